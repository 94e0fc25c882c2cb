"""The project's goals of speed and memory, as ratios of lines of one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.lines import Line

TEXT_LOOPS = (
    "text.padded_recompute",
    "text.packed",
    "text.packed_bf16",
    "text.packed_bf16_liger",
    "text.packed_bf16_recompute",
    "text.packed_bf16_recompute_liger",
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The `field` of line `of`, divided by that of the fastest line of `over`, or alone if `over` is empty. Without a
    `target` the ratio is only shown."""

    title: str
    of: str
    over: tuple[str, ...] = ()
    target: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    field: Literal["value", "peak_gib"] = "value"


RATIOS = (
    Ratio("text: ours / best hand-written loop", "text.ours", TEXT_LOOPS, 1.2),
    Ratio("text: ours / padded loop that recomputes", "text.ours", ("text.padded_recompute",), 5),
    Ratio(
        "text: ours, recomputing / best loop that recomputes",
        "text.ours_recompute",
        tuple(name for name in TEXT_LOOPS if "recompute" in name),
        1.2,
    ),
    Ratio("text: autograd / packed loop without Liger", "text.autograd", ("text.packed_bf16",), 0.9),
    Ratio("the same: peak memory", "text.autograd", ("text.packed_bf16",), 1, "at most", "peak_gib"),
    Ratio(
        "text: autograd, recomputing / packed loop that recomputes, without Liger",
        "text.autograd_recompute",
        ("text.packed_bf16_recompute",),
        0.9,
    ),
    Ratio(
        "the same: peak memory",
        "text.autograd_recompute",
        ("text.packed_bf16_recompute",),
        1,
        "at most",
        "peak_gib",
    ),
    Ratio("text: with the LM head trained / without", "text.ours_with_head", ("text.ours",)),
    Ratio("text: importance sampling / cross-entropy", "text.ours_importance_sampling", ("text.ours",)),
    Ratio("one long sequence: peak GiB", "text.ours_long_sequence", (), 80, "at most", "peak_gib"),
    Ratio("adapters: co-batched / one, same tokens", "adapters.co_batched", ("adapters.one",), 0.95),
    Ratio(
        "adapters, autograd: co-batched / one, same tokens",
        "adapters.autograd_co_batched",
        ("adapters.autograd_one",),
        0.9,
    ),
    Ratio(
        "small runs: co-batched / PEFT one after the other",
        "adapters.small_together",
        ("adapters.bare_float32", "adapters.bare_bf16"),
        4,
    ),
    Ratio("smallest runs: co-batched / ours one by one", "adapters.smallest_together", ("adapters.smallest_apart",), 5),
    Ratio("images: ours / packed loop", "images.ours", ("images.packed_bf16",), 1.3),
    Ratio("images: features cached / packed loop", "images.ours_cached", ("images.packed_bf16",)),
    Ratio("images: SDK over HTTP / packed loop", "images.sdk", ("images.packed_bf16",)),
    Ratio("images: SDK over HTTP, sent ahead / packed loop", "images.sdk_ahead", ("images.packed_bf16",)),
    Ratio("images: SDK over HTTP / in process", "images.sdk", ("images.in_process",), 0.95),
    Ratio("step of text: SDK over HTTP / in process", "steps.text_sdk", ("steps.text_in_process",), 0.95),
    Ratio("16 samples of 512 after 2,048: prompt once / again", "prompts.long_shared", ("prompts.long_alone",), 2.8),
    Ratio("16 samples of 256 after 256: prompt once / again", "prompts.short_shared", ("prompts.short_alone",), 1.6),
    Ratio("sequences that share nothing: looked for / not", "prompts.apart_shared", ("prompts.apart_alone",), 0.99),
    Ratio("16 samples of 64 after a picture: once / again", "prompts.pictures_shared", ("prompts.pictures_alone",), 4),
    Ratio("the same, pictures cached", "prompts.cached_shared", ("prompts.cached_alone",)),
    Ratio("sampling: our sampler / vLLM alone", "sampling.sampler", ("sampling.alone",)),
    Ratio("sampling: in process / vLLM alone", "sampling.in_process", ("sampling.alone",)),
    Ratio("sampling: SDK over HTTP / vLLM alone", "sampling.sdk", ("sampling.alone",), 0.97),
    Ratio("hand-over: SDK, trainer idle, ms", "handover.sdk", (), 300, "at most"),
    Ratio("hand-over: in process, trainer idle, ms", "handover.in_process", (), 300, "at most"),
    Ratio("hand-over: another model trains, ms", "handover.busy", (), 1000, "at most"),
    Ratio("autosave: how long a step waits, ms", "autosave.wait", (), 50, "at most"),
    Ratio("overlap: sampling while training / alone", "overlap.sampling_together", ("overlap.sampling_alone",)),
    Ratio("overlap: training while sampling / alone", "overlap.training_together", ("overlap.training_alone",)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The value of a ratio in a run. `base`: the line of its denominator. `met`: None without a target."""

    ratio: Ratio
    value: float
    line: Line
    base: Line | None
    met: bool | None


def results(lines: Sequence[Line], ratios: Sequence[Ratio] = RATIOS) -> list[Result]:
    """The `ratios` whose lines have values; of `over`, only the measured lines count."""
    by_name = {line.name: line for line in lines if line.value is not None}
    return [result for ratio in ratios if (result := _result(ratio, by_name)) is not None]


def _result(ratio: Ratio, by_name: Mapping[str, Line]) -> Result | None:
    line = by_name.get(ratio.of)
    value = None if line is None else getattr(line, ratio.field)
    base = None
    if value is None or line is None:
        return None
    if ratio.over:
        bases = [by_name[name] for name in ratio.over if name in by_name]
        if not bases:
            return None
        base = max(bases, key=lambda candidate: candidate.value or 0.0)
        if not (amount := getattr(base, ratio.field)):
            return None
        value /= amount
    met = None
    if ratio.target is not None:
        met = value >= ratio.target if ratio.sense == "at least" else value <= ratio.target
    return Result(ratio, value, line, base, met)


def unknown(lines: Sequence[Line], ratios: Sequence[Ratio] = RATIOS) -> list[str]:
    """Names in `ratios` that no line has, because one of the two was renamed. A skipped measurement has a single line,
    whose name is a prefix of its other lines' names."""
    printed = {line.name for line in lines}
    skipped = tuple(line.name for line in lines if line.skipped)
    named = [name for ratio in ratios for name in (ratio.of, *ratio.over)]
    return [name for name in named if name not in printed and not name.startswith(skipped)]
