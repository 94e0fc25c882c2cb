"""All measurements, in order, with their time limits."""

from collections.abc import Sequence
from dataclasses import dataclass

TRAINER = "trainer"
AUTOGRAD_TRAINER = "autograd trainer"
TRAINERS = (TRAINER, AUTOGRAD_TRAINER)
"""Hosts that are trainers of the text model; all others are backends."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement.

    `run`: "module:function" under `measurements`, called with (scale, folder of models, **arguments). If `host` is one
    of `TRAINERS`, it also gets `trainer=`; if `host` names a model, it gets only a backend that serves the model
    (`measurements.hosting.Host`). Neighbours with the same host share a process, since loading takes long; every other
    measurement has a separate process, so that its memory is really free afterwards. `models`: the random models that
    must be on disk. `seconds`: the time limit, start of the process included. `usual`: the seconds that it takes on an
    H200; a budget uses them to decide whether it still fits.
    """

    name: str
    run: str
    seconds: int
    usual: int
    arguments: tuple[tuple[str, object], ...] = ()
    models: tuple[str, ...] = ()
    host: str | None = None


def _text_baseline(variant: str, seconds: int, usual: int) -> Measurement:
    return Measurement(f"text.{variant}", "training:baseline", seconds, usual, (("variant", variant),))


MEASUREMENTS = (
    _text_baseline("packed_bf16", 100, 25),
    _text_baseline("packed_bf16_recompute", 100, 30),
    _text_baseline("packed_bf16_liger", 100, 25),
    _text_baseline("packed_bf16_recompute_liger", 100, 30),
    Measurement("text.ours", "training:ours", 240, 95, models=("text",), host=TRAINER),
    Measurement("adapters.ours", "adapters:ours", 150, 40, models=("text",), host=TRAINER),
    Measurement("trace", "tracing:measure", 120, 25, models=("text",), host=TRAINER),
    Measurement("text.ours_recompute", "training:ours_recompute", 120, 45, models=("text",)),
    Measurement("text.autograd", "training:autograd", 150, 50, models=("text",), host=AUTOGRAD_TRAINER),
    Measurement("adapters.autograd", "adapters:autograd", 150, 40, models=("text",), host=AUTOGRAD_TRAINER),
    Measurement("text.autograd_recompute", "training:autograd_recompute", 150, 50, models=("text",)),
    Measurement("adapters.bare", "adapters:bare", 120, 30),
    _text_baseline("padded_recompute", 150, 45),
    _text_baseline("packed", 100, 35),
    Measurement("images.packed_bf16", "images:baseline", 120, 30, models=("vl",)),
    Measurement("images.ours", "images:ours", 150, 45, models=("vl",)),
    Measurement("images.api", "steps:images", 300, 110, models=("vl",), host="vl"),
    Measurement("prompts.text", "prompts:text", 240, 120, models=("text",)),
    Measurement("prompts.pictures", "prompts:pictures", 240, 120, models=("vl",)),
    Measurement("sampling.alone", "sampling:alone", 300, 180, models=("text",)),
    Measurement("sampling.ours", "sampling:ours", 340, 270, models=("text",), host="text"),
    Measurement("steps.text", "steps:text", 240, 40, models=("text",), host="text"),
    Measurement("handover", "handovers:measure", 120, 25, models=("text",), host="text"),
    Measurement("autosave", "handovers:autosave", 90, 20, models=("text",), host="text"),
    Measurement("overlap", "overlap:measure", 150, 25, models=("text",), host="text"),
)
"""The most important come first: a budget drops the end."""


def selected(names: Sequence[str]) -> list[Measurement]:
    """Measurements whose name, or its part before the dot, is in `names`; all if `names` is empty. Raises ValueError
    for an unknown name."""
    if not names:
        return list(MEASUREMENTS)
    known = {measurement.name for measurement in MEASUREMENTS} | {m.name.split(".")[0] for m in MEASUREMENTS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: no such measurement; there are {', '.join(sorted(known))}")
    return [m for m in MEASUREMENTS if m.name in names or m.name.split(".")[0] in names]


def processes(measurements: Sequence[Measurement], *, tiny: bool) -> list[list[Measurement]]:
    """Measurements grouped by process, in order.

    Tiny measurements share two processes (one for those on a backend, one for all others), because imports take longer
    than they do. vLLM alone is among the others: a backend changes vLLM's settings for its whole process.
    """
    if tiny:
        on_backend = [m for m in measurements if m.host not in (None, *TRAINERS)]
        others = [m for m in measurements if m not in on_backend]
        return [part for part in (others, on_backend) if part]
    groups: list[list[Measurement]] = []
    for measurement in measurements:
        if measurement.host and groups and groups[-1][-1].host == measurement.host:
            groups[-1].append(measurement)
        else:
            groups.append([measurement])
    return groups
