"""One process of a run: `python -m measurements SCALE MODELS NAME…` prints the lines of the measurements named."""

import contextlib
import functools
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.lines import Unavailable, failed
from harness.plan import AUTOGRAD_TRAINER, MEASUREMENTS, TRAINERS, Measurement
from harness.scale import SCALES, Scale

if TYPE_CHECKING:
    from measurements.hosting import Client

TINY_LIMIT = 120.0
"""Seconds of a tiny measurement on a host."""


def function(measurement: Measurement) -> Any:
    """The function of `measurement` with its arguments bound."""
    module, name = measurement.run.split(":")
    found = getattr(importlib.import_module(f"measurements.{module}"), name)
    return functools.partial(found, **dict(measurement.arguments))


def run_plain(scale: Scale, models: Path, measurements: Sequence[Measurement], **shared: Any) -> None:
    """Run measurements one after another; one that fails prints its error as a line, and the others go on."""
    for measurement in measurements:
        try:
            function(measurement)(scale, models, **shared)
        except Unavailable as error:
            failed(measurement.name, error).emit()
        except Exception as error:
            traceback.print_exc()
            failed(measurement.name, error).emit()


def run_on_trainer(scale: Scale, models: Path, host: str, measurements: Sequence[Measurement]) -> None:
    """Run measurements one after another on one trainer of the text model; all fail if it cannot be made."""
    from measurements.training import AUTOGRAD, collect, make_trainer

    try:
        trainer = make_trainer(scale, models / "text", **(AUTOGRAD if host == AUTOGRAD_TRAINER else {}))
    except Exception as error:
        if not isinstance(error, Unavailable):
            traceback.print_exc()
        for measurement in measurements:
            failed(measurement.name, error).emit()
        return
    run_plain(scale, models, measurements, trainer=trainer)
    trainer.close()
    del trainer
    collect()


def run_on_backend(scale: Scale, folder: Path, client: "Client", measurements: Sequence[Measurement]) -> None:
    """Run measurements one after another on one backend."""
    from measurements.hosting import Hosted, run_hosted

    tiny = scale.name == "tiny"
    hosted = [Hosted(m.name, function(m), TINY_LIMIT if tiny else m.seconds) for m in measurements]
    run_hosted(scale, folder, client, hosted)


def main(arguments: Sequence[str]) -> None:
    scale, models, names = SCALES[arguments[0]], Path(arguments[1]), arguments[2:]
    chosen = [measurement for measurement in MEASUREMENTS if measurement.name in names]
    if kinds := {kind for measurement in chosen for kind in measurement.models}:
        from measurements.models import write_missing

        write_missing(scale, models, kinds)
    with contextlib.ExitStack() as closing:
        client = None
        if any(measurement.host not in (None, *TRAINERS) for measurement in chosen):
            from measurements.hosting import Client

            client = closing.enter_context(contextlib.closing(Client(scale)))
        for host, group in itertools.groupby(chosen, key=lambda measurement: measurement.host):
            if host in TRAINERS:
                run_on_trainer(scale, models, host, list(group))
            elif client is None or host is None:
                run_plain(scale, models, list(group))
            else:
                run_on_backend(scale, models / host, client, list(group))
    sys.stdout.flush()
    # Threads of vLLM and its allocator may hang or crash a process that ends; all lines are printed by now.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
