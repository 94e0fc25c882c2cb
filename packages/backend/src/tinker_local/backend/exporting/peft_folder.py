"""An adapter as a folder that PEFT and vLLM load without being told other names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS
from tinker_local.backend.adapters.peft_experts import as_parameters
from tinker_local.backend.exporting.trained import Trained
from tinker_local.types import InvalidRequestError

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `max_lora_rank` can be."""


def write_adapter_for(library: Literal["peft", "vllm"], folder: Path, trained: Trained) -> None:
    """Write the adapter in float32 into `folder`, with the names of the base model's modules; experts as `library` has
    them."""
    experts = trained.base.family.lora.experts
    names = experts if library == "peft" else None
    tensors = trained.tensors if names is None else as_parameters(trained.tensors, names)
    if experts is not None and names is None:
        tensors = {experts.path_in_files(name): array for name, array in tensors.items()}
    if library == "vllm":
        tensors = {trained.base.family.tower_in_vllm(name): array for name, array in tensors.items()}
    arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(trained.peft_config(names), indent=2) + "\n")


IGNORED: Mapping[str, str] = {"lfm2_vl": ".conv."}
"""Parts of names of modules of which vLLM, as it is, ignores adapters, by `model_type`."""


def check_vllm_takes(trained: Trained) -> None:
    """InvalidRequestError for an adapter that vLLM, as it is, refuses or ignores a part of."""
    kind = trained.base.config.model_type
    ignored = sorted(name for name in trained.tensors if kind in IGNORED and IGNORED[kind] in name)
    if ignored:
        raise InvalidRequestError(
            f"--to vllm: vLLM ignores adapters of some modules of {kind} models, such as {ignored[0]}, unless a server "
            "of this project runs it; use --to merged"
        )
    if trained.has_head and not trained.base.family.head_adapters_in_vllm:
        raise InvalidRequestError(
            f"--to vllm: vLLM takes no adapter of the LM head of {trained.base.config.model_type} models, and this "
            "one trained it; use --to merged, or train with train_unembed=False"
        )
    if trained.largest_rank > VLLM_RANKS[-1]:
        raise InvalidRequestError(
            f"--to vllm: vLLM takes adapters of up to rank {VLLM_RANKS[-1]}, and this one has {trained.largest_rank}; "
            "use --to merged"
        )


def vllm_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that takes `rank`."""
    return next(served for served in VLLM_RANKS if rank <= served)
