"""A part of `attention_kernels.py`, as lines: `python -m measurements.attention_ways SCALE PART FOLDER LAYERS ROWS`.
PART is `kernels` or a shape, of which a step on each of ROWS, with commas between them, is measured."""

import contextlib
import dataclasses
import functools
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import timing, workloads
from harness.lines import Line, Unavailable, failed
from harness.model_shapes import SHAPES
from harness.scale import SCALES, Scale
from tinker_local.backend.training.kernels import flash_attention
from tinker_local.backend.training.kernels.flash_attention import FASTER, RIGHT, Faster, kernel_for
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.model.vision_attention import packed_attention

from measurements.cut_model import cut
from measurements.one_family import write_model
from measurements.training import collect, make_trainer, parameters_of, rate_line, text_datum, train_step, work

WAYS = ("fa2", "fa4")


@contextlib.contextmanager
def attending(way: str, *, everywhere: bool) -> Iterator[None]:
    """With FlashAttention 4 where the table has it, or `everywhere` it can compute, or nowhere; on a CPU plain torch
    computes in either way. Raises Unavailable, which says why FlashAttention 4 does not."""
    lines: tuple[Faster, ...] = ()
    if way == "fa4" and timing.device() == "cuda":
        four, words = flash_attention.flash_attention_4()
        if four is None:
            raise Unavailable(words)
        all_rules = frozenset({"window", "sinks", "full"})
        whole = (Faster(torch.cuda.get_device_capability(), RIGHT, all_rules, scores=0, keys=0),)
        lines = whole if everywhere else FASTER
    flash_attention.FASTER = lines
    try:
        yield
    finally:
        flash_attention.FASTER = FASTER


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Heads, key-value heads and their size, lengths of the segments, and the rule's extensions. `tower`: every
    position sees all, forward alone."""

    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tower: bool = False

    def rule(self, device: torch.device) -> AttentionRule:
        sinks = torch.linspace(-2, 2, self.heads, device=device) if self.sinks else None
        return AttentionRule(self.size**-0.5, self.window, self.softcap, sinks)


def cases(scale: Scale) -> dict[str, Case]:
    """By name. One where a kernel is compiled for each head size and rule, and rows of many lengths for some."""
    if scale.name == "tiny":
        return {
            "row": Case(4, 2, 16, (9, 20)),
            "window": Case(4, 2, 16, (30,), window=5, softcap=3.0),
            "sinks": Case(4, 2, 8, (30,), sinks=True),
            "tower": Case(2, 2, 8, (16, 16), tower=True),
        }
    drawn, total = workloads.ragged_lengths(scale), 0
    ragged: tuple[int, ...] = ()
    for length in drawn:
        if (total := total + length) <= scale.micro_batch_tokens:
            ragged += (length,)
    rows = {
        "4 of 64": (64,) * 4,
        "128 of 64": (64,) * 128,
        "64 of 128": (128,) * 64,
        "32 of 256": (256,) * 32,
        "4 of 256": (256,) * 4,
        "8 of 256": (256,) * 8,
        "1024": (1024,),
        "2048": (2048,),
        "ragged": ragged,
        "8192": (8192,),
        "32768": (32768,),
    }
    found = {f"qwen3-8b, {name}": Case(32, 8, 128, lengths) for name, lengths in rows.items()}
    for name, heads, kv_heads, size in (
        ("qwen3.5-9b", 16, 4, 256),
        ("gemma-3-12b", 16, 8, 256),
        ("gpt-oss-20b", 64, 8, 64),
    ):
        for row in ("64 of 128", "8 of 256", "ragged", "32768"):
            found[f"{name}, {row}"] = Case(heads, kv_heads, size, rows[row], sinks=name == "gpt-oss-20b")
    found |= {
        "gemma-3-12b, 32768, window 1024": Case(16, 8, 256, (32768,), window=1024),
        "gpt-oss-20b, ragged, window 128": Case(64, 8, 64, ragged, window=128, sinks=True),
        "gpt-oss-20b, 32768, window 128": Case(64, 8, 64, (32768,), window=128, sinks=True),
        "mistral-7b, 32768, window 4096": Case(32, 8, 128, (32768,), window=4096),
        "gemma-2-9b, ragged, soft cap 50": Case(16, 8, 256, ragged, softcap=50.0),
        "gemma-2-9b, 8192, soft cap 50, window 4096": Case(16, 8, 256, (8192,), window=4096, softcap=50.0),
        "gemma-2-27b, ragged, soft cap 50": Case(32, 16, 128, ragged, softcap=50.0),
        "smollm2-135m, ragged": Case(9, 3, 64, ragged),
        "size 96, ragged": Case(32, 8, 96, ragged),
        "size 192, ragged": Case(32, 8, 192, ragged),
        "tower of size 64, 8 of 1024": Case(16, 16, 64, (1024,) * 8, tower=True),
    }
    return found


def kernels(scale: Scale) -> None:
    """Milliseconds of forward and backward of each case, ten in a row, in turns; with what the table chooses."""
    for name, case in cases(scale).items():
        try:
            kernel_line(scale, f"kernels.{name}", case)
        except Exception as error:
            traceback.print_exc()
            failed(f"kernels.{name}", error).emit()
        collect()


def kernel_line(scale: Scale, name: str, case: Case) -> None:
    """How many times as fast FlashAttention 4 is as what computes without it."""
    device = torch.device(timing.device())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    segments, rule = Segments(case.lengths, device), case.rule(device)
    torch.manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(sum(case.lengths), heads, case.size, device=device, dtype=dtype)

    query, key, value, grad = (random(heads) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads))

    def run(way: str) -> None:
        with attending(way, everywhere=True):
            if case.tower:
                rows, bounds = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)], segments.bounds
                given: dict[str, Any] = {"cu_seq_lens_q": bounds.queries, "max_length_q": bounds.longest_query}
                packed_attention(
                    torch.nn.Identity(), rows[0], rows[1], rows[2], attention_mask=None, scaling=rule.scaling, **given
                )
                return
            output, logsumexp = attend(query, key, value, segments, rule)
            attend_backward(grad, query, key, value, output, logsumexp, segments, rule)

    start = time.perf_counter()
    run("fa4")
    timing.synchronize()
    first = time.perf_counter() - start
    found = timing.seconds_in_turns(
        {way: functools.partial(run, way) for way in WAYS}, scale, at_once=10, warmup=2, repeats=5
    )
    two, four = (1000 * found[way] for way in WAYS)
    kernel = kernel_for(query, key, segments.bounds, rule, causal=not case.tower)
    table = "the table takes " + ("plain torch" if kernel is None else type(kernel).__name__)
    note = f"{two:.3f} ms without, {four:.3f} ms with, the first time {first:.1f} s; {table}"
    Line(name, two / four, "times as fast", note=note).emit()


def model(scale: Scale, name: str, folder: Path, layers: int, rows: Sequence[str]) -> None:
    """A step on ragged sequences and one on a long one, or one of these `rows`, by both ways, on one trainer. `layers`:
    0 for all."""
    shape = cut(SHAPES[name], layers) if layers else SHAPES[name]
    config = write_model(scale, shape, folder)
    collect()
    scale = dataclasses.replace(scale, text=dataclasses.replace(scale.text, vocab=config["vocab_size"]))
    trainer, parameters = make_trainer(scale, folder), parameters_of(folder)
    print(trainer.trains)
    from tinker_local.types import LoraConfig

    trainer.create_adapter("a", LoraConfig(rank=scale.rank, train_unembed=False))
    of_rows = {"ragged": workloads.ragged_lengths(scale), "long": [scale.long_sequence]}
    for row in rows:
        lengths = of_rows[row]
        works = [work("a", [text_datum(tokens) for tokens in workloads.sequences(scale, lengths)])]
        for way in WAYS:
            line = f"{name}.{row}_{way}"
            try:
                with attending(way, everywhere=False):
                    seconds = timing.median_seconds(functools.partial(train_step, trainer, works), scale, warmup=1)
                note = f"{config['num_hidden_layers']} layers, {len(lengths)} sequences of {sum(lengths)} tokens"
                rate_line(line, sum(lengths), seconds, parameters, note).emit()
            except Exception as error:
                traceback.print_exc()
                failed(line, error).emit()
            collect()
    trainer.close()


def main(arguments: list[str]) -> None:
    scale, part, folder = SCALES[arguments[0]], arguments[1], Path(arguments[2]) / "model"
    if part == "kernels":
        kernels(scale)
    else:
        model(scale, part, folder, int(arguments[3]), arguments[4].split(","))
    sys.stdout.flush()
    os._exit(0)  # threads may hang a process that ends; all lines are printed by now


if __name__ == "__main__":
    main(sys.argv[1:])
