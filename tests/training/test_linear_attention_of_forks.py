"""Decoders with linear attention on rows where sequences share their beginning: the hidden states and gradients of the
same sequences without anything shared, in float64. The tiny model has three layers of linear attention and one of
softmax attention."""

from pathlib import Path

import pytest
import torch
from tinker_local.backend.options import DecoderName
from tinker_local.backend.tiny_models.make_models import make_tiny_text_model
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.run.recompute_policy import Keep

from tests.training.forked_row import Passed, made, passed
from tests.training.test_attention_of_forks import rows_of

FORESTS = {
    "groups and one alone": ((66, 70, 1, 12, 9, 2, 5, 3), (NO_PARENT, 0, 0, 0, NO_PARENT, NO_PARENT, 5, 5)),
    "forks of forks": ((3, 1, 64, 2, 40, 1), (NO_PARENT, 0, 1, 1, 0, 4)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("linear-attention-of-forks") / "model"
    make_tiny_text_model(path, family="qwen3_5_text", shape=QWEN3_5_SHAPE)
    return path


@pytest.mark.parametrize("keep", [Keep.ALL, Keep.INPUT], ids=lambda keep: keep.name)
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_a_forked_row_has_the_hidden_states_and_gradients_of_the_row_that_shares_nothing(
    decoder: DecoderName, forest: str, keep: Keep, folder: Path
) -> None:
    lengths, parents = FORESTS[forest]
    trainer, cpu = made(folder, decoder), torch.device("cpu")
    forked = Segments(lengths, cpu, parents=parents)
    generator = torch.Generator().manual_seed(3)
    embeds, grad = torch.randn(2, sum(lengths), QWEN3_5_SHAPE.hidden_size, generator=generator, dtype=torch.float64)
    found = passed(trainer, forked, embeds, grad, keep)

    rows = [rows_of(forked, segment) for segment in range(len(lengths))]
    apart = torch.cat(rows)
    own = torch.cat([torch.arange(-len(each), 0) >= -length for each, length in zip(rows, lengths, strict=True)])
    unshared = Segments(tuple(map(len, rows)), cpu)
    # What is shared has its gradient once: in the sequence that ends with it.
    alone = passed(trainer, unshared, embeds[apart], grad[apart] * own[:, None], keep)
    hidden = torch.empty_like(embeds).index_copy_(0, apart[own], alone.hidden[own])
    summed = torch.zeros_like(embeds).index_add_(0, apart, alone.embeds)
    for name, ours, theirs in zip(Passed._fields, found, Passed(hidden, summed, alone.adapter), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()), msg=name)
