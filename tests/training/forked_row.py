"""A row through a decoder alone, in float64, on which tests compare sequences that share their beginning."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.lora.lora import HEAD_GROUP, AdapterSlice
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.parallel.ranks import ONE_RANK, Ranks
from tinker_local.backend.training.parallel.shared_rows import share
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig

from tests.float64 import InFloat64


class Passed(NamedTuple):
    """The hidden states [T, H], the gradient of the embeddings [T, H], and that of the adapter, a vector."""

    hidden: torch.Tensor
    embeds: torch.Tensor
    adapter: torch.Tensor


def made(folder: Path, decoder: DecoderName, ranks: Ranks = ONE_RANK, context_parallel: int = 1) -> HFTrainer:
    """A trainer of the model in `folder`, with an adapter "a" whose B is not 0."""
    config = TrainerConfig(
        str(folder), name="tiny", device="cpu", dtype="float64", decoder=decoder, context_parallel=context_parallel
    )
    with InFloat64():
        trainer = HFTrainer(config, ranks)
    trainer.create_adapter("a", LoraConfig(rank=4, seed=1))
    adapter = trainer._adapters["a"]
    rng = np.random.default_rng(1)
    for spec in sorted(adapter.specs, key=lambda spec: spec.name):  # decoders order them differently
        view = spec.view(adapter.weights)
        view.copy_(torch.from_numpy(rng.standard_normal(view.shape) * 0.05))
    return trainer


@torch.no_grad()
def passed(
    trainer: HFTrainer, segments: Segments, embeds: torch.Tensor, grad: torch.Tensor, keep: Keep = Keep.ALL
) -> Passed:
    """The decoder forward and backward on a row of `segments`, from `embeds` and the gradient of the hidden states,
    `grad`, both [T, H]. Ranks that share the row make the same call, and each gets all of it."""
    row_ranks, adapter = trainer._runner._row_ranks, trainer._adapters["a"]
    shared = share(len(embeds), row_ranks)
    position_ids = segments.places[None, shared.own]
    row = PackedRow(embeds[shared.own], position_ids, replace(segments, shared=shared.or_none))
    slices = [AdapterSlice(adapter, 0, len(row.embeds))]
    batch = LoraBatch(trainer._runner._groups, slices, torch.float64, torch.float64, gradient=True)
    policy = [keep] * trainer._loaded.model.config.get_text_config().num_hidden_layers
    found = Passed(torch.zeros_like(embeds), torch.zeros_like(embeds), torch.zeros_like(adapter.weights))
    with InFloat64(), row_ranks.sharing():
        done = trainer._loaded.decoder.forward(row, batch, policy)
        found.hidden[shared.own] = done.hidden
        found.embeds[shared.own] = done.backward(grad[shared.own].clone())
        batch.add_gradients(adapter, found.adapter, [group for group in batch.trained() if group != HEAD_GROUP])
        for tensor in found:
            row_ranks.add_up(tensor)
    return found
