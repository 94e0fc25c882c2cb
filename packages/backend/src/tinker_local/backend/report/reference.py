"""Logprobs and gradients by transformers' own model and autograd, with an adapter as hooks on its modules, as PEFT
computes it: the reference for the trainer's."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tinker_local.backend.adapters.adapter import LORA_ALPHA, AdapterState, path_of, tensor_name
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.families.family import SplitRows, Vision
from tinker_local.backend.options import HeadPrecision, Precision
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.model.load_model import config_of, supported_family, without_values
from tinker_local.backend.training.model.load_published import load_published
from tinker_local.backend.training.model.logit_rule import complete_logits
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.backend.weights.packed_stack import pack_decoder
from tinker_local.backend.weights.packed_vocabulary import pack_vocabulary
from tinker_local.backend.weights.published import published_of

Arrays = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """`logprobs`: of the targets of all data, one after the other. `gradients`: of the sum of the losses, by the
    adapter's tensors."""

    logprobs: npt.NDArray[np.float32]
    gradients: Arrays


@contextmanager
def hooked(
    model: torch.nn.Module, leaves: Mapping[str, torch.Tensor], scale: float, split: Mapping[str, SplitRows]
) -> Iterator[None]:
    """While open, the modules of `model` add to their outputs what an adapter of `leaves`, by PEFT's names, makes of
    their inputs, in the leaves' dtype. `split`: modules whose rows are several projections of the adapter. ValueError
    for a tensor without a module."""
    missing = set(leaves)
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            parent, _, last = path.rpartition(".")
            parts = [f"{parent}.{part}" for part in split[last].projections] if last in split else [path]
            if tensor_name(parts[0], "A") in leaves:
                names = [[tensor_name(part, factor) for factor in "AB"] for part in parts]
                missing -= {name for pair in names for name in pair}
                pairs = [[leaves[name] for name in pair] for pair in names]
                hooks.callback(module.register_forward_hook(_low_rank(pairs, scale)).remove)
        if missing:
            raise ValueError(f"{len(missing)} tensors of the adapter have no module in transformers: {min(missing)}")
        yield


def _low_rank(pairs: Sequence[Sequence[torch.Tensor]], scale: float) -> Callable[..., torch.Tensor]:
    """`pairs`: A and B of each part of the module's rows."""

    def add(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        x = args[0].to(pairs[0][0].dtype)
        return output + (torch.cat([x @ a.T @ b.T for a, b in pairs], -1) * scale).to(output.dtype)

    return add


def arguments(input: RenderedInput, vision: Vision | None) -> dict[str, Any]:
    """What transformers' models take of an input, whose images do not touch."""
    token_ids = torch.from_numpy(input.token_ids.astype(np.int64))[None]
    found: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
    if input.images and vision is not None:
        placements = sorted(input.images, key=lambda placement: placement.offset)
        is_image = torch.from_numpy(input.holds_features)[None].to(torch.int32)
        found |= vision.arguments([placement.image for placement in placements], is_image)
    return found


def compute(
    path: str,
    dtype: torch.dtype,
    device: str,
    state: AdapterState,
    data: Sequence[TrainDatum],
    precision: Precision | None = None,
    head_precision: HeadPrecision | None = None,
) -> Computed:
    """Load the model in `dtype`, its layers packed to `precision`, embedding and LM head to `head_precision`, and
    compute `data`, one after the other, by cross-entropy, with the adapter `state`; its numbers are in float32 at
    least."""
    config = config_of(path)
    family = supported_family(config, path)
    plainly = {} if family.lora.experts is None else {"experts_implementation": "eager"}
    if published_of(path) is None:
        model = getattr(transformers, family.auto_class).from_pretrained(path, config=config, dtype=dtype, **plainly)
    else:
        model, _ = load_published(path, type(without_values(config, family)), config, dtype)
    model = model.to(device).eval().requires_grad_(False)
    complete_logits(model, family, path)
    if precision is not None:
        pack_decoder(model.get_submodule(family.decoder_path), precision)
    if head_precision is not None:
        pack_vocabulary(model, head_precision)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: torch.tensor(in_float32(matrix), device=device, dtype=precise).requires_grad_()
        for name, matrix in state.tensors.items()
    }
    found = []
    try:
        with hooked(model, leaves, LORA_ALPHA / state.lora_config.rank, family.lora.split):
            for each in data:
                given = {
                    name: value.to(device) if isinstance(value, torch.Tensor) else value
                    for name, value in arguments(each.input, family.vision).items()
                }
                rows = model(**given).logits[0].to(precise).log_softmax(-1)
                targets = torch.from_numpy(each.target_tokens).to(device)
                logprobs = rows.gather(1, targets[:, None])[:, 0]
                (-(torch.from_numpy(each.loss_inputs["weights"]).to(device) * logprobs).sum()).backward()
                found.append(logprobs.detach().float().cpu().numpy())
        gradients = {
            name: np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.float().cpu().numpy()
            for name, leaf in leaves.items()
        }
        return Computed(np.concatenate(found), gradients)
    finally:
        del model, leaves
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def device_for(parameters: int, dtype: torch.dtype) -> str | None:
    """Where a model of `parameters` in `dtype` fits, with something to compute it in: "cuda", "cpu" or nowhere."""
    from tinker_local.backend.heap import memory_available

    wanted = int(1.2 * parameters * dtype.itemsize) + 2**31
    if torch.cuda.is_available() and wanted < torch.cuda.mem_get_info()[0]:
        return "cuda"
    return "cpu" if wanted < memory_available() else None


@dataclass(frozen=True, slots=True)
class Distance:
    """How far `one` is from `other`: the norm of the difference by that of `other`, over all tensors of a kind."""

    kind: str
    tensors: int
    relative: float


def distances(one: Arrays, other: Arrays) -> list[Distance]:
    """By the last names of the modules (`q_proj`, ...), in order of their first tensor."""
    kinds: dict[str, list[str]] = {}
    for name in other:
        kinds.setdefault(path_of(name).rpartition(".")[2], []).append(name)
    found = []
    for kind, names in kinds.items():
        apart = sum(float(np.square(one[name].astype(np.float64) - other[name]).sum()) for name in names)
        whole = sum(float(np.square(other[name].astype(np.float64)).sum()) for name in names)
        found.append(Distance(kind, len(names), float(np.sqrt(apart / whole)) if whole else float(apart > 0)))
    return found
