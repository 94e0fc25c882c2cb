"""`export_checkpoint`: a checkpoint as a folder for PEFT or vLLM, or merged into a whole model, for transformers or as
a GGUF file, compared with the trainer before it is there."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinker_local.backend.exporting.base_model import find_base
from tinker_local.backend.exporting.check_export import (
    Checked,
    check_by_transformers,
    check_by_vllm,
    check_peft_version,
    missing_library,
)
from tinker_local.backend.exporting.check_gguf import check_gguf_libraries
from tinker_local.backend.exporting.gguf import GgufFiles, plain_type, write_gguf
from tinker_local.backend.exporting.llama_cpp import find_llama_cpp
from tinker_local.backend.exporting.merged_model import write_merged
from tinker_local.backend.exporting.model_card import NORMALIZED, Target, write_card
from tinker_local.backend.exporting.peft_folder import check_vllm_takes, write_adapter_for
from tinker_local.backend.exporting.trained import Trained, find_checkpoint, read_trained
from tinker_local.backend.options import default_data_dir
from tinker_local.backend.weights.precision import base_in
from tinker_local.types import InternalError, InvalidRequestError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Exported:
    """`folder`: what was written. `base_model`: a folder or hub name. `checked`: how far logprobs of a probe are from
    the trainer's; None if `check` was False. `warnings`: what a user of the folder should know. `gguf`: the files of
    `to="gguf"`, and what was checked of their numbers."""

    folder: Path
    base_model: str
    checked: Checked | None
    warnings: tuple[str, ...]
    gguf: GgufFiles | None = None

    @property
    def found(self) -> str:
        """What was checked, in words; empty without a check."""
        whole = self.checked if self.gguf is None else self.gguf.checked
        return "" if whole is None else str(whole)


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    to: Target,
    data_dir: str | Path | None = None,
    base: str | None = None,
    device: Device = "cpu",
    check: bool = True,
    llama_cpp: str | Path | None = None,
    gguf_type: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write `checkpoint` into the new folder `out`.

    `checkpoint`: a `tinker://` path, read from the server's `data_dir` (default: the server's default) whether the
    server runs or not, or the folder of an adapter. `to`: "peft" and "vllm" write an adapter that these load as it is;
    "merged" writes a whole model for transformers and vLLM; "gguf" one for llama.cpp and Ollama, by llama.cpp's own
    converter and quantiser: in the folder `llama_cpp`, or in the PATH or a package. `gguf_type`: a type of theirs, such
    as "q8_0" or "q4_k_m" (default: the numbers as they are, "bf16" or "f32"). `base`: the base model's folder or hub
    name, if no server recorded it. `check`: load the result with PEFT, vLLM, transformers or llama-cpp-python on
    `device` and compare its logprobs with the trainer's; a result that differs is deleted.

    Raises InvalidRequestError for what cannot be exported that way, NotFoundError for what does not exist, and
    InternalError if the result differs from what was trained.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise InvalidRequestError(f"{out} exists; an export overwrites nothing, so name a new folder")
    source = find_checkpoint(str(checkpoint), Path(data_dir) if data_dir is not None else default_data_dir())
    path = base or source.base_path or source.base_name
    if not path:
        raise InvalidRequestError(f"{source.name} does not name its base model; pass --base")
    found = find_base(path, "--base" if base else source.name)
    trained = read_trained(source, found)
    if to == "vllm":
        check_vllm_takes(trained)
    if to != "gguf" and (llama_cpp is not None or gguf_type is not None):
        raise InvalidRequestError(f"--to {to}: --llama-cpp and --gguf-type are for --to gguf")
    kind = (gguf_type or plain_type(trained)).lower()
    converter = find_llama_cpp(None if llama_cpp is None else Path(llama_cpp), kind) if to == "gguf" else None
    if check and converter is not None:
        check_gguf_libraries(converter)
    if check and to != "gguf" and (missing := missing_library(to)):
        raise InvalidRequestError(
            f"--to {to}: the result is checked with {missing}, which is not installed: pip install {missing}, or leave "
            "the check out with --no-check"
        )
    if check and to == "peft" and trained.has_experts:
        check_peft_version()
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        progress(f"writing {source.name} on {found.path}")
        checked: Checked | None = None
        files: GgufFiles | None = None
        if converter is not None:
            files = write_gguf(unfinished, out.name, trained, kind, converter, device, check, progress)
            checked = None if files.checked is None else files.checked.logprobs
        else:
            _write(unfinished, trained, to)
            if check:
                progress("comparing it with the trainer")
                checked = _compared(unfinished, trained, to, device)
        said = Exported(out, found.path, checked, (), files).found
        write_card(unfinished, out, trained, to, said or "not checked", files)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    warnings = []
    if files is not None and not files.templated:
        warnings.append(
            "the Modelfile has no TEMPLATE: this model's chat template is not of fixed texts around each message; "
            "llama.cpp's own programs run the one in the file"
        )
    if to in ("peft", "vllm") and trained.has_head and found.tied_head:
        warnings.append(
            "the LM head was trained, and the base model ties it to its embedding: do not merge this adapter with "
            "PEFT's merge_and_unload or the cookbook's build_hf_model, which would change both; use --to merged"
        )
    if to in ("peft", "merged") and found.family.logits_left_out:
        warnings.append(
            f"transformers' {type(found.model).__name__} leaves {found.family.logits_left_out} out of its logits, "
            "which the trainer and vLLM compute, and so did the check: its greedy samples are the same, others are as "
            "at another temperature"
        )
    if to in ("vllm", "merged") and found.family.vision is not None and found.family.vision.raw_in_vllm:
        warnings.append(
            f"vLLM gives this model's vision tower pixels from 0 to 255 unless it is served with {NORMALIZED}, "
            "whatever adapter it has: then it is what was trained"
        )
    if to == "merged" and (why := _unlike_vllm(trained)):
        warnings.append(
            f"vLLM, and so this server, computes another model of this folder than transformers: {why}. The check was "
            "by transformers; for vLLM use --to vllm, or train with train_unembed=False"
        )
    if source.base_precision != found.precision:
        unsure = "" if source.base_precision else ", or by a server that did not record it"
        warnings.append(
            f"the adapter was trained on {base_in(source.base_precision)}{unsure}, and this is of the base as its "
            "files have it, which computes something else: measure it before you rely on it"
        )
    return Exported(out, found.path, checked, tuple(warnings), files)


def _unlike_vllm(trained: Trained) -> str:
    """Why vLLM computes the merged model otherwise, although it serves the base: a head that was trained is not its
    embedding any more. Empty if it does not."""
    if not (trained.has_head and trained.base.tied_head):
        return ""
    config = deepcopy(trained.base.config)
    config.tie_word_embeddings = False
    return trained.base.family.unlike_vllm(config)


def _write(folder: Path, trained: Trained, to: Target) -> None:
    if to == "merged":
        write_merged(folder, trained)
    elif to != "gguf":
        write_adapter_for(to, folder, trained)


def _compared(folder: Path, trained: Trained, to: Target, device: Device) -> Checked:
    """InternalError if what was written is not what was trained."""
    checked = (
        check_by_vllm(folder, trained, device) if to == "vllm" else check_by_transformers(folder, trained, to, device)
    )
    if not checked.agrees:
        raise InternalError(f"the export was not kept, because it is not what was trained: {checked}")
    return checked
