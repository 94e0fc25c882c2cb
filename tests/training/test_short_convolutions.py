"""Short convolutions of LFM2 on packed rows, against transformers' own layer on each sequence alone, in float64."""

from typing import Any

import pytest
import torch
from tinker_local.backend.training.model.decoders.packed_short_conv import is_short_conv, packed_short_conv
from tinker_local.backend.training.model.segments import Segments
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

HIDDEN = 8

ROWS = {
    "texts": ((5, 1, 7), (), ((0,), (1,), (2,))),
    "forks": ((5, 1, 4, 2, 3), (-1, 0, 1, 1, 0), ((0, 1, 2), (0, 1, 3), (0, 4))),
    "short forks": ((1, 1, 1, 2), (-1, 0, 1, 0), ((0, 1, 2), (0, 3))),
}
"""Lengths of segments, their parents, and the segments of each sequence."""


def layer(taps: int, bias: bool) -> Any:
    config = Lfm2Config(
        hidden_size=HIDDEN, conv_L_cache=taps, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Lfm2ShortConv(config, 0).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("row", ROWS)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(row: str, taps: int, bias: bool) -> None:
    lengths, parents, sequences = ROWS[row]
    module = layer(taps, bias)
    assert is_short_conv(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), HIDDEN, generator=generator, dtype=torch.float64)
    segments = Segments(lengths, x.device, parents=parents)
    rows = [torch.arange(start, start + length) for start, length in zip(segments.starts, lengths, strict=True)]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    packed = packed_short_conv(module, ours[None], segments)[0]
    whole = []
    for sequence in sequences:
        path = torch.cat([rows[segment] for segment in sequence])
        alone = module(theirs[path][None])[0]
        whole.append((packed[path], alone))
        torch.testing.assert_close(packed[path], alone, rtol=0, atol=1e-12)
    weights = [torch.randn(alone.shape, generator=generator, dtype=torch.float64) for _, alone in whole]
    sum(((weight * found).sum() for weight, (found, _) in zip(weights, whole, strict=True)), x.new_zeros(())).backward()
    sum(((weight * found).sum() for weight, (_, found) in zip(weights, whole, strict=True)), x.new_zeros(())).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_rows_that_are_before_positions_are_of_their_path() -> None:
    """`none` is the number of positions."""
    segments, none = Segments((2, 1, 2), torch.device("cpu"), parents=(-1, 0, 0)), 5
    assert segments.rows_back(3).tolist() == [
        [none, 0, 1, 1, 3],
        [none, none, 0, 0, 1],
        [none, none, none, none, 0],
    ]
