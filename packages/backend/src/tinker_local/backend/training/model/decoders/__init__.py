"""Choose the decoder of a base model: the written-out one if it supports the layers, else autograd."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.families.family import Family
from tinker_local.backend.options import DecoderChoice
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.decoder import Decoder, PackedRow
from tinker_local.backend.training.model.decoders.autograd import AutogradDecoder
from tinker_local.backend.training.model.decoders.packed_attention import attending
from tinker_local.backend.training.model.decoders.transformers_delta_net import use_kernels_on_gpus_alone
from tinker_local.backend.training.model.decoders.transformers_positions import check_positions
from tinker_local.backend.training.model.decoders.written_out.take_layers import take_layers
from tinker_local.backend.training.model.per_layer import per_layer_arguments, per_layer_embeddings
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL, RowRanks, share
from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import MakeMatrix
from tinker_local.backend.weights.large_weights import RESIDENT, LargeWeights, entering
from tinker_local.types import UnsupportedError

_SHORT, _LONGEST = 5, 64
"""Lengths of the sequences in the comparison with transformers: `_SHORT`, and 8 more than the sliding window, which
counts with at most `_LONGEST`."""
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Maximum relative difference of the hidden states: another architecture differs by about 1, rounding by far less.
transformers computes norms in float32 whatever the dtype."""
_TOLERANCE_16_BIT = 0.25


def make_decoder(
    model: Any,
    family: Family,
    kernels: Kernels,
    choice: DecoderChoice,
    where: str,
    weights: LargeWeights = RESIDENT,
    row_ranks: RowRanks = ONE_HAS_ALL,
    max_positions: int = 0,
    make: MakeMatrix = dense,
) -> Decoder:
    """The decoder that `choice` names for transformers' `model`, compared with transformers' own forward. `where`: the
    model's name in errors. `weights`: of the model's layers. `row_ranks`: who shares rows; all of them call this.
    `max_positions`: how many are compared. `make`: makes the frozen matrices. UnsupportedError if no decoder works,
    with the reasons."""
    use_kernels_on_gpus_alone(model)
    reasons: list[str] = []
    if choice in ("auto", "written-out"):
        try:
            return _checked(
                _written_out(model, family, kernels, weights, row_ranks, make), model, family, max_positions
            )
        except UnsupportedError as error:
            reasons.append(f"the written-out decoder cannot train it: {error}")
    if choice in ("auto", "autograd"):
        try:
            return _checked(_autograd(model, family, weights, row_ranks, make), model, family, max_positions)
        except UnsupportedError as error:
            reasons.append(f"the autograd decoder cannot train it: {error}")
    raise UnsupportedError(f"{where}: {'; '.join(reasons)}")


def _checked(decoder: Decoder, model: Any, family: Family, max_positions: int) -> Decoder:
    modules = model.get_submodule(family.decoder_path)
    check_positions(decoder, modules, family, model.config, max_positions)
    return decoder


def _written_out(
    model: Any, family: Family, kernels: Kernels, weights: LargeWeights, row_ranks: RowRanks, make: MakeMatrix
) -> Decoder:
    path = family.decoder_path
    decoder = take_layers(model.get_submodule(path), path, kernels, weights, family.lora.experts, make)
    _compare(decoder, model, family, weights, row_ranks)
    return decoder


def _autograd(model: Any, family: Family, weights: LargeWeights, row_ranks: RowRanks, make: MakeMatrix) -> Decoder:
    modules = model.get_submodule(family.decoder_path)
    decoder = AutogradDecoder(modules, family.decoder_path, family.lora, weights, make)
    try:
        _compare(decoder, model, family, weights, row_ranks)
        decoder.measure()
    except BaseException:
        decoder.undo()
        raise
    return decoder


@torch.no_grad()
def _compare(decoder: Decoder, model: Any, family: Family, weights: LargeWeights, row_ranks: RowRanks) -> None:
    """Raise UnsupportedError unless `decoder` gives two sequences in one row, which `row_ranks` share, the same hidden
    states as transformers' modules, with eager attention, give each alone. A model on the meta device has no values to
    compare."""
    modules = model.get_submodule(family.decoder_path)
    embedding = model.get_input_embeddings()
    device, vocabulary = embedding.weight.device, embedding.num_embeddings
    if device.type == "meta":
        return
    lengths = (_SHORT, min(getattr(modules.config, "sliding_window", None) or 0, _LONGEST) + 8)
    tokens = [np.arange(1, length + 1) * 7919 % vocabulary for length in lengths]
    embeds = [embedding(torch.from_numpy(ids).to(device)) for ids in tokens]
    positions = [
        torch.from_numpy(family.position_ids(model.config, RenderedInput(ids.astype(np.int32), ()))).to(device)
        for ids in tokens
    ]
    shared = share(sum(lengths), row_ranks)
    row = PackedRow(
        torch.cat(embeds)[shared.own],
        _batched(torch.cat(positions, dim=1)[:, shared.own]),
        Segments(lengths, device, shared=shared.or_none),
        per_layer=per_layer_embeddings(modules, _ids(tokens, device)[shared.own]),
    )
    batch = LoraBatch({}, [], embeds[0].dtype, torch.float32, gradient=False)
    with weights.walk(backward=False) as walk, row_ranks.sharing():
        packed = decoder.forward(row, batch, None, walk).hidden.double()
    given = [per_layer_embeddings(modules, _ids([ids], device)) for ids in tokens]
    alone = [_alone(modules, weights, *each).double() for each in zip(embeds, positions, given, strict=True)]
    wanted = torch.cat(alone)[shared.own]
    squares = torch.stack([(packed - wanted).square().sum(), wanted.square().sum()])
    row_ranks.add_up(squares)  # so that all ranks come to the same conclusion
    difference = float((squares[0] / squares[1]).sqrt())
    tolerance = tolerance_of(embeds[0].dtype)
    if not difference <= tolerance:
        raise UnsupportedError(
            f"its hidden states differ from transformers' by {difference:.2g} of their norm; allowed is {tolerance}"
        )


def _ids(tokens: Sequence[npt.NDArray[Any]], device: torch.device) -> torch.Tensor:
    """Of several texts in a row, [T]."""
    return torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device)


def _alone(
    modules: Any,
    weights: LargeWeights,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    per_layer: torch.Tensor | None,
) -> torch.Tensor:
    """The hidden states that transformers' decoder `modules`, with eager attention, give one sequence."""
    with attending(modules, "eager"), entering(modules.layers, weights):
        further = per_layer_arguments(modules, len(embeds), per_layer)
        output = modules(inputs_embeds=embeds[None], position_ids=_batched(positions), use_cache=False, **further)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def run_text(model: Any, family: Family, weights: LargeWeights, text: RenderedInput) -> None:
    """Run the modules of transformers' `model` on a text, from the embedding on, for those who watch them."""
    embedding = model.get_input_embeddings()
    place = embedding.weight.device
    ids, modules = _ids([text.token_ids], place), model.get_submodule(family.decoder_path)
    positions = torch.from_numpy(family.position_ids(model.config, text)).to(place)
    _alone(modules, weights, embedding(ids), positions, per_layer_embeddings(modules, ids))


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest difference from transformers that is allowed, relative to the norm."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16_BIT)


def _batched(positions: torch.Tensor) -> torch.Tensor:
    """Positions [1, T] or [3, T] as rotary modules take them, [1, T] or [3, 1, T]."""
    return positions if len(positions) == 1 else positions[:, None]
