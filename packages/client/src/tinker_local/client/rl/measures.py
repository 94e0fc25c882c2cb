"""Measures how far the trainer is from the sampler."""

from collections.abc import Sequence

import numpy as np
import tinker
from tinker_local.types import InvalidRequestError


def sampler_trainer_kl(data: Sequence[tinker.Datum], output: tinker.ForwardBackwardOutput) -> float:
    """KL(sampler ‖ trainer) in nats per sampled token, estimated on the sampled tokens themselves.

    `output`: the result of `forward` or `forward_backward` on `data`. The estimate is the mean of r - 1 - log r with
    r = p_trainer / p_sampler, which is never negative and unbiased (Schulman, "Approximating KL Divergence", 2020,
    estimator k3). For the weights that were sampled from, it is the numerical difference of the two engines: below 1e-6
    in float32 on CPU.

    Raises InvalidRequestError if `data` is empty, or if a datum has no logprobs of the sampler or no provenance, which
    marks the sampled tokens.
    """
    if not data:
        raise InvalidRequestError("data: is empty, so there is nothing to compare")
    log_ratios = [
        _sampled(datum, result["logprobs"].to_numpy() - _logprobs(datum, index), index)
        for index, (datum, result) in enumerate(zip(data, output.loss_fn_outputs, strict=True))
    ]
    log_ratio = np.concatenate(log_ratios).astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def _logprobs(datum: tinker.Datum, index: int) -> np.ndarray:
    if "logprobs" not in datum.loss_fn_inputs:
        raise InvalidRequestError(f"data[{index}].loss_fn_inputs.logprobs: is missing")
    return np.asarray(datum.loss_fn_inputs["logprobs"].to_numpy(), np.float64)


def _sampled(datum: tinker.Datum, values: np.ndarray, index: int) -> np.ndarray:
    if datum.loss_fn_input_spans is None:
        raise InvalidRequestError(f"data[{index}]: has no provenance, so its sampled tokens are unknown")
    parts, position = [], 0
    for span in datum.loss_fn_input_spans:
        if isinstance(span, tinker.SampledProvenanceSpan):
            parts.append(values[position : position + span.length])
        position += span.length
    return np.concatenate(parts)
