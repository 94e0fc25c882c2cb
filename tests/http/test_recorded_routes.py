"""Which recorded experts a datum takes, how long they are kept, and how many."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.control.recorded_routes import RecordedRoutes
from tinker_local.backend.control.session_records import LIFETIME
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.training.routes import RoutedLayers, Routes
from tinker_local.types import InvalidRequestError, ProvenanceSpan, SampledSequence

ROUTED = RoutedLayers((1, 2, 5), 2, 8)
PROMPT = RenderedInput(np.arange(10, 20, dtype=np.int32))
TOKENS = np.arange(30, 36, dtype=np.int32)


def sequence(name: str, common: Any = None, tokens: Any = TOKENS) -> SampledSequence:
    rng = np.random.default_rng(len(name))
    common = rng.integers(0, 8, (10, 3, 2), np.uint8) if common is None else common
    own = rng.integers(0, 8, (len(tokens) - 1, 3, 2), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    found = SampledSequence(stop_reason="length", tokens=tokens, logprobs=logprobs, sequence_id=name)
    return found.model_copy(update={"routes": Routes(common, own)})


def spans(name: str, *parts: tuple[str, int, int]) -> list[ProvenanceSpan]:
    return [
        ProvenanceSpan(source=source, sequence_id=name, offset=offset, length=length)  # type: ignore[arg-type]
        for source, offset, length in parts
    ]


def input_of(*parts: Any) -> RenderedInput:
    return RenderedInput(np.concatenate(parts).astype(np.int32))


def records(*sequences: SampledSequence, **options: Any) -> RecordedRoutes:
    found = RecordedRoutes(**options)
    found.add("session", "base", sequences, PROMPT)
    return found


def test_a_sample_takes_the_experts_of_its_prompt_and_its_tokens() -> None:
    one = sequence("one")
    found = records(one).routes(
        "session",
        "base",
        ROUTED,
        spans("one", ("prompt", 0, 10), ("sampled", 0, 5)),
        input_of(PROMPT.token_ids, TOKENS[:-1]),
    )
    assert found is not None
    assert found.common is one.routes.common
    np.testing.assert_array_equal(found.read(0, 15), one.routes.read(0, 15))


def test_a_turn_that_goes_on_takes_what_both_requests_recorded() -> None:
    """The last token of the first turn was computed by the second request alone."""
    one, given = sequence("one"), np.arange(50, 54)
    later = RenderedInput(np.concatenate([PROMPT.token_ids, TOKENS, given]).astype(np.int32))
    kept = records(one)
    two = sequence("second", np.full((20, 3, 2), 7, np.uint8), np.arange(60, 63, dtype=np.int32))
    kept.add("session", "base", [two], later)
    whole = [
        *spans("one", ("prompt", 0, 10), ("sampled", 0, 6)),
        *spans("second", ("prompt", 16, 4), ("sampled", 0, 2)),
    ]
    found = kept.routes("session", "base", ROUTED, whole, input_of(later.token_ids, [60, 61]))
    assert found is not None
    assert found.known.tolist() == [True] * 15 + [False] + [True] * 6
    np.testing.assert_array_equal(found.read(0, 15), one.routes.read(0, 15))
    np.testing.assert_array_equal(found.read(16, 22), two.routes.read(16, 22))


def _spans(*parts: tuple[str, int, int]) -> list[ProvenanceSpan]:
    return spans("one", *parts)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (_spans(("prompt", 2, 8), ("sampled", 0, 5)), input_of(PROMPT.token_ids[2:], TOKENS[:-1])),
        (_spans(("prompt", 0, 10), ("sampled", 0, 5)), input_of(PROMPT.token_ids + 1, TOKENS[:-1])),
        (_spans(("sampled", 0, 6)), input_of(TOKENS)),
    ],
    ids=["the beginning is left out", "another prompt", "without the prompt"],
)
def test_what_did_not_see_what_the_sample_saw_takes_no_recorded_experts(found: Any, what: RenderedInput) -> None:
    routes = records(sequence("one")).routes("session", "base", ROUTED, found, what)
    assert routes is not None
    assert not routes.known.any()


def test_another_picture_takes_no_recorded_experts() -> None:
    def with_picture(content: str) -> RenderedInput:
        image = RenderedImage(content, 4, np.zeros((16, 6), np.float32), (1, 4, 4))
        return replace(PROMPT, images=(ImagePlacement(3, image),))

    kept = RecordedRoutes()
    kept.add("session", "base", [sequence("one")], with_picture("a"))
    shares = []
    for content in ("a", "b"):
        rendered = with_picture(content)
        found = kept.routes("session", "base", ROUTED, spans("one", ("prompt", 0, 3), ("prompt", 3, 7)), rendered)
        assert found is not None
        shares.append(found.known.mean())
    assert shares == [1.0, 0.3]


def test_nothing_is_taken_without_a_record() -> None:
    kept, whole = records(sequence("one")), spans("one", ("prompt", 0, 10))
    assert kept.routes("session", "base", ROUTED, None, PROMPT) is None
    assert kept.routes("another", "base", ROUTED, whole, PROMPT) is None
    assert kept.routes("session", "base", ROUTED, spans("two", ("prompt", 0, 10)), PROMPT) is None
    assert kept.routes("session", "other", ROUTED, whole, PROMPT) is None
    assert kept.routes("session", "base", ROUTED, whole, PROMPT) is not None
    kept.end_session("session")
    assert kept.routes("session", "base", ROUTED, whole, PROMPT) is None
    assert kept.bytes == 0


def test_what_samples_have_in_common_counts_once_and_the_oldest_give_way() -> None:
    common = np.zeros((10, 3, 2), np.uint8)
    alone = records(sequence("a", common)).bytes
    both = records(sequence("a", common), sequence("b", common)).bytes
    assert both == 2 * alone - common.nbytes
    kept = records(*(sequence(name, common) for name in "abcd"), session_bytes=both)
    whole = [spans(name, ("prompt", 0, 10)) for name in "abcd"]
    left = [kept.routes("session", "base", ROUTED, each, PROMPT) is not None for each in whole]
    assert left == [False, False, True, True]
    assert kept.bytes == both
    kept.add("session", "base", [sequence("d", common)], PROMPT)  # the same request again
    assert kept.bytes == both
    kept = RecordedRoutes(all_bytes=both)
    for name, session in (("a", "old"), ("b", "old"), ("c", "new")):
        kept.add(session, "base", [sequence(name, common)], PROMPT)
    assert kept.routes("old", "base", ROUTED, whole[0], PROMPT) is None
    assert kept.routes("new", "base", ROUTED, whole[2], PROMPT) is not None


def test_a_day_after_its_last_use_a_record_is_gone() -> None:
    now = time.monotonic()
    kept = records(sequence("one"), clock=lambda: now)
    kept.add("other", "base", [sequence("two")], PROMPT)
    now += LIFETIME + 1
    kept.add("other", "base", [sequence("three")], PROMPT)
    assert kept.routes("session", "base", ROUTED, spans("one", ("prompt", 0, 10)), PROMPT) is None


def test_samples_whose_experts_would_not_fit_are_refused_with_the_numbers() -> None:
    kept = RecordedRoutes(session_bytes=10_000)
    kept.check(ROUTED, 4, 200, 100)
    words = "the experts of 40 samples of 100 tokens after 200 positions take 42000 bytes, and a session has 10000"
    with pytest.raises(InvalidRequestError, match=words):
        kept.check(ROUTED, 40, 200, 100)
