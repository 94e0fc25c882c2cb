"""`log_metrics`: numbers of a program beside the loss of its run."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import tinker
from tinker_local.client.endpoint import connect, send
from tinker_local.types import InvalidRequestError


def log_metrics(
    run: "tinker.TrainingClient | str",
    metrics: Mapping[str, float],
    step: int | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
) -> None:
    """Add numbers, say a reward, to the curve of a training run on a local server.

    Args:
        run: The run's `TrainingClient`, or its `model_id`.
        metrics: At most 64 numbers by name. Those that are not finite are left out, as a curve has no place for them.
        step: The program's own number of a step.
        base_url: As those of `ServiceClient`.
        api_key: As those of `ServiceClient`.

    Raises tinker.APIConnectionError if no server answers, tinker.APIStatusError if it refuses them.
    """
    finite = {name: float(value) for name, value in metrics.items() if abs(float(value)) < float("inf")}
    run_id = run if isinstance(run, str) else _id_of(run)
    endpoint = connect(base_url, api_key, check_server=False)
    if not finite:
        return
    send(
        endpoint,
        "POST",
        f"training_runs/{quote(run_id)}/metrics",
        json={"metrics": finite, "step": step},
        timeout=30,
    )


def _id_of(run: Any) -> str:
    model_id = getattr(run, "model_id", None)
    if not isinstance(model_id, str):
        raise InvalidRequestError(f"run: must be a TrainingClient or a model_id, not {type(run).__name__}")
    return model_id
