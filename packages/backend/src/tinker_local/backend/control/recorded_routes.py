"""Which experts recorded samples took, so that a gradient on them takes the same (`training/routes.py`)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.control.session_records import SessionRecords
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.routes import RouteArray, RoutedLayers, Routes
from tinker_local.types import InvalidRequestError, ProvenanceSpan, SampledSequence

ROUTES_OF_SESSION = 2**31
"""Bytes of what is recorded of one session's samples: 5.6 million positions of 48 layers that take 8 experts."""

ROUTES_OF_ALL = 2**32

ImagePlaces = tuple[tuple[int, str], ...]
"""The position and the content hash of each image of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedSequence:
    """The experts of a sequence that the model `base` sampled: `ids` int32 [P + S], of which the last has none, after a
    prompt of P positions with `images`."""

    base: str
    ids: npt.NDArray[np.int32]
    prompt_length: int
    images: ImagePlaces
    routes: Routes

    def take(self, span: ProvenanceSpan, start: int, input: RenderedInput, found: RouteArray) -> None:
        """Write into `found` the experts of the positions from `start` on that `span` takes from this sequence, if all
        that comes before them is what it was in the sample. What they saw is what they were routed by."""
        stop = min(start + span.length, len(self.routes))
        if self._first(span) == start < stop and self._begins(input, stop):
            found[start:stop] = self.routes.read(start, stop)

    def whole(self, spans: Sequence[ProvenanceSpan], input: RenderedInput) -> Routes | None:
        """The experts of all positions of `input`, which `spans` take from this sequence, if it is its beginning."""
        starts = np.cumsum([0, *(span.length for span in spans)])
        begins = all(self._first(span) == start for span, start in zip(spans, starts, strict=False))
        if not begins or input.length > len(self.routes) or not self._begins(input, input.length):
            return None
        return self.routes.first(input.length)

    def _first(self, span: ProvenanceSpan) -> int:
        """The position in this sequence that a span begins with."""
        return span.offset + (self.prompt_length if span.source == "sampled" else 0)

    def _begins(self, input: RenderedInput, stop: int) -> bool:
        """Whether the first positions of `input` are those of this sequence."""
        if not np.array_equal(self.ids[:stop], input.token_ids[:stop]):
            return False
        return _images(input, stop) == tuple(image for image in self.images if image[0] < stop)


def _images(input: RenderedInput, stop: int) -> ImagePlaces:
    return tuple((each.offset, each.image.content_hash) for each in input.images if each.offset < stop)


class RecordedRoutes(SessionRecords[RoutedSequence]):
    """Experts of sequences. What is dropped is chosen by the trainer's routers again, and the metric `routes_replayed`
    says so."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        session_bytes: int = ROUTES_OF_SESSION,
        all_bytes: int = ROUTES_OF_ALL,
    ) -> None:
        super().__init__(clock, session_bytes, all_bytes, lambda each: (each.ids, each.routes.own, each.routes.common))

    def check(self, routed: RoutedLayers, samples: int, prompt_length: int, most_tokens: int) -> None:
        """InvalidRequestError if so many samples of up to `most_tokens` may take more than a session has."""
        positions = prompt_length + samples * most_tokens
        needed = positions * (routed.position_bytes + 4)
        if needed > self._session_bytes:
            raise InvalidRequestError(
                f"record_stability_info: the experts of {samples} samples of {most_tokens} tokens after "
                f"{prompt_length} positions take {needed} bytes, and a session has {self._session_bytes}; ask for "
                "fewer samples or tokens at once, or have the server started with --replay-routes off"
            )

    def add(self, session_id: str, base: str, sequences: Sequence[SampledSequence], prompt: RenderedInput) -> None:
        """Record the sequences of one sample of the model `base`, of those that have routes."""
        images, records = _images(prompt, prompt.length), {}
        for sequence in sequences:
            if sequence.routes is not None and sequence.sequence_id is not None:
                ids = np.concatenate([prompt.token_ids, sequence.tokens]).astype(np.int32)
                records[sequence.sequence_id] = RoutedSequence(base, ids, prompt.length, images, sequence.routes)
        self.keep(session_id, records)

    def routes(
        self,
        session_id: str,
        base: str,
        routed: RoutedLayers,
        spans: Sequence[ProvenanceSpan] | None,
        input: RenderedInput,
    ) -> Routes | None:
        """The experts of the positions of `input`, which `spans` tile, in a run of `base`; None if nothing is recorded
        of any."""
        used = {span.sequence_id: self.known(session_id, span.sequence_id) for span in spans or ()}
        records = {name: each for name, each in used.items() if each is not None and each.base == base}
        if spans is None or not records:
            return None
        if len(used) == 1 and (whole := next(iter(records.values())).whole(spans, input)) is not None:
            return whole
        found, start = routed.unrecorded(input.length), 0
        for span in spans:
            if (record := records.get(span.sequence_id)) is not None:
                record.take(span, start, input, found)
            start += span.length
        return Routes.of(found)
