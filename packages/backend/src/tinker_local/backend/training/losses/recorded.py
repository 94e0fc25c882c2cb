"""Inputs of a loss that come from records of samples: which target was sampled, and with which logprob.

A datum's spans say where each of its positions comes from. All of them are checked against the records, so that no
logprob is taken for another token's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.types import Datum, InvalidRequestError, ProvenanceSpan

Float32Array = npt.NDArray[np.float32]

CLOSE = 1e-3
"""Nats by which `logprobs` that a client sends may differ from the recorded ones."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSequence:
    """`tokens` int32 [S] were sampled with `logprobs` float32 [S] after a prompt of `prompt_length` positions, by the
    weights of `version`; None: those of the base model, or unknown."""

    tokens: npt.NDArray[np.int32]
    logprobs: Float32Array
    prompt_length: int
    version: str | None = None


FindRecord = Callable[[str], RecordedSequence]
"""The record of a sequence id; InvalidRequestError if there is none."""


def recorded_inputs(
    datum: Datum, ids: npt.NDArray[np.int32], targets: npt.NDArray[np.int64], find: FindRecord, where: str
) -> tuple[Float32Array, Float32Array]:
    """The recorded logprobs of `targets` [N], 0 where they were not sampled, and 1 where they were, else 0.

    `ids` int32 [N]: the model input's token ids. InvalidRequestError, with the field and the numbers, if a span names
    what was not recorded, or other tokens than are there; or if an advantage is not 0 where nothing was sampled.
    """
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        raise InvalidRequestError(
            f"{where}: has no provenance spans, which this loss needs: they name the recorded samples that its "
            "positions come from (sample with record_stability_info=True, and set model_input_spans and "
            "loss_fn_input_spans)"
        )
    for _ in _sampled(datum.model_input_spans, ids, find, f"{where}.model_input_spans"):
        pass
    logprobs, sampled = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    for start, recorded in _sampled(datum.loss_fn_input_spans, targets, find, f"{where}.loss_fn_input_spans"):
        logprobs[start : start + len(recorded)] = recorded
        sampled[start : start + len(recorded)] = 1
    return logprobs, sampled


def check_sent(sent: Float32Array, recorded: Float32Array, sampled: Float32Array, where: str) -> None:
    """InvalidRequestError if logprobs that a client sent are not those that were recorded."""
    far = (np.abs(sent - recorded) > CLOSE) & (sampled != 0)
    if far.any():
        at = int(np.argmax(far))
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.logprobs: {sent[at]:.6g} at position {at}, but {recorded[at]:.6g} was recorded"
        )


def check_advantages(advantages: Float32Array, sampled: Float32Array, where: str) -> None:
    """InvalidRequestError if one is not 0 where nothing was sampled."""
    wrong = (advantages != 0) & (sampled == 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.advantages: {advantages[at]:g} at position {at}, whose target was not sampled by "
            "its span; only sampled tokens may have one"
        )


def _sampled(
    spans: Sequence[ProvenanceSpan], tokens: npt.NDArray[np.integer], find: FindRecord, field: str
) -> Iterator[tuple[int, Float32Array]]:
    """Where each span of sampled tokens begins, and its recorded logprobs; all spans are checked."""
    start = 0
    for number, span in enumerate(spans):
        here, stop = f"{field}[{number}]", start + span.length
        try:
            record = find(span.sequence_id)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{here}.{error}") from None
        end = span.offset + span.length
        there = record.prompt_length if span.source == "prompt" else len(record.tokens)
        if end > there:
            raise InvalidRequestError(
                f"{here}: positions {span.offset} to {end} of the {span.source} part of {span.sequence_id}, which has "
                f"{there}"
            )
        if span.source == "sampled":
            differs = tokens[start:stop] != record.tokens[span.offset : end]
            if differs.any():
                at = int(np.argmax(differs))
                raise InvalidRequestError(
                    f"{here}: token {tokens[start + at]} at position {start + at}, but {span.sequence_id} has "
                    f"{record.tokens[span.offset + at]} as sampled token {span.offset + at}"
                )
            yield start, record.logprobs[span.offset : end]
        start = stop
