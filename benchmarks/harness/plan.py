"""The measurements there are, in order, with their time limits."""

from collections.abc import Sequence
from dataclasses import dataclass

TRAINER = "trainer"
"""The host that is no backend: a trainer of the text model."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement.

    `run`: "module:function" under `measurements`, called with (scale, folder of models, **arguments); with a shared
    trainer besides if `host` is "trainer"; with a backend alone (`measurements.hosting.Host`) if `host` names the model
    that one serves. Measurements of one host follow one another in one process, since it takes long to load; every
    other has its own, so that memory is really free between them. `models`: which random models must be on disk.
    `seconds`: its time limit, start of the process included. `usual`: seconds that it usually takes, by which a budget
    decides whether it still fits.
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
    _text_baseline("padded_recompute", 150, 45),
    _text_baseline("packed", 100, 35),
    _text_baseline("packed_bf16", 100, 25),
    _text_baseline("packed_bf16_liger", 100, 25),
    _text_baseline("packed_bf16_recompute", 100, 30),
    _text_baseline("packed_bf16_recompute_liger", 100, 30),
    Measurement("text.ours_recompute", "training:ours_recompute", 120, 45, models=("text",)),
    Measurement("text.ours", "training:ours", 240, 95, models=("text",), host=TRAINER),
    Measurement("adapters.ours", "adapters:ours", 150, 40, models=("text",), host=TRAINER),
    Measurement("trace", "tracing:measure", 120, 25, models=("text",), host=TRAINER),
    Measurement("adapters.bare", "adapters:bare", 120, 30),
    Measurement("images.packed_bf16", "images:baseline", 120, 30, models=("vl",)),
    Measurement("images.ours", "images:ours", 150, 45, models=("vl",)),
    Measurement("sampling.alone", "sampling:alone", 240, 95, models=("text",)),
    Measurement("steps.text", "steps:text", 240, 80, models=("text",), host="text"),
    Measurement("sampling.ours", "sampling:ours", 240, 90, models=("text",), host="text"),
    Measurement("handover", "handovers:measure", 120, 25, models=("text",), host="text"),
    Measurement("overlap", "overlap:measure", 150, 25, models=("text",), host="text"),
    Measurement("steps.images", "steps:images", 300, 90, models=("vl",), host="vl"),
)


def selected(names: Sequence[str]) -> list[Measurement]:
    """Those whose name, or its part before the dot, is in `names`; all for none. ValueError for a name that is not
    known."""
    if not names:
        return list(MEASUREMENTS)
    known = {measurement.name for measurement in MEASUREMENTS} | {m.name.split(".")[0] for m in MEASUREMENTS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: no such measurement; there are {', '.join(sorted(known))}")
    return [m for m in MEASUREMENTS if m.name in names or m.name.split(".")[0] in names]


def processes(measurements: Sequence[Measurement], *, tiny: bool) -> list[list[Measurement]]:
    """Measurements by the process that they run in, in order.

    Tiny ones share two, one without vLLM and one with it: importing takes longer than measuring there.
    """
    if tiny:
        with_vllm = [m for m in measurements if m.host in ("text", "vl") or m.name == "sampling.alone"]
        without = [m for m in measurements if m not in with_vllm]
        return [part for part in (without, with_vllm) if part]
    groups: list[list[Measurement]] = []
    for measurement in measurements:
        if measurement.host and groups and groups[-1][-1].host == measurement.host:
            groups[-1].append(measurement)
        else:
            groups.append([measurement])
    return groups
