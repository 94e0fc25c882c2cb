"""How far sampler and trainer are apart, against the formula in float64, token by token, on a real trainer."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput
from tinker_local.backend.control import mismatch
from tinker_local.backend.control.mismatch import Distance, SampledSpan, Watch, added, measure, telling
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import ProvenanceSpan

from tests.training.conftest import VOCAB, Maker

COMPARED = [name for name, loss in LOSSES.items() if loss.reads_sampler]


@dataclass(frozen=True)
class Turn:
    """A prompt of `before` positions and then `sampled` tokens of this advantage. `stale`: by how many steps."""

    before: int
    sampled: int
    advantage: float = 1.0
    stale: int | None = None


@dataclass(frozen=True)
class Sampled:
    """A token that was sampled, as it was laid out: in which groups it is."""

    position: int
    groups: tuple[str, ...]


def laid_out(
    make: Maker, turns: Sequence[Turn], loss_fn: str, images: Sequence[Any] = (), prompt: RenderedInput | None = None
) -> tuple[TrainDatum, list[Sampled], list[SampledSpan]]:
    """A datum of these turns, each of whose sampled tokens is the next of the input; its sampled tokens and spans."""
    length = sum(turn.before + turn.sampled for turn in turns)
    given = make.input(length, images)
    if prompt is not None:
        given.token_ids[: prompt.length] = prompt.token_ids
        given = replace(given, images=prompt.images)
    values = {name: np.zeros(length, np.float32) for name in LOSSES[loss_fn].inputs}
    targets = np.append(given.token_ids[1:], 0).astype(np.int64)
    first_image = min((placed.offset for placed in given.images), default=length)
    tokens, spans, at = [], [], 0
    for number, turn in enumerate(turns):
        at += turn.before
        here = slice(at, at + turn.sampled)
        values["logprobs"][here] = make.rng.normal(-4, 1, turn.sampled)
        values["advantages"][here] = turn.advantage
        for mask in {"sampled", "sequence_ratio_mask"} & values.keys():
            values[mask][here] = 1
        stale = "unknown" if turn.stale is None else ("3_on" if turn.stale >= 3 else str(turn.stale))
        for position in range(at, at + turn.sampled):
            context = "after_image" if position >= first_image else "text"
            turn_name = "turn_4_on" if number >= 3 else f"turn_{number + 1}"
            tokens.append(Sampled(position, ("all", context, turn_name, f"staleness_{stale}")))
        spans.append(SampledSpan(at, at + turn.sampled, None if turn.stale is None else f"by {turn.stale}"))
        at += turn.sampled
    return TrainDatum(given, targets, values), tokens, spans


def reference(
    data: Sequence[TrainDatum], tokens: Sequence[Sequence[Sampled]], logprobs: Sequence[np.ndarray]
) -> dict[str, dict[str, float]]:
    """From the formula: of each group its tokens, the sum of r - 1 - log r, those beyond 1 +- 0.2, the largest r."""
    found: dict[str, dict[str, float]] = {}
    for datum, of_datum, trained in zip(data, tokens, logprobs, strict=True):
        for token in of_datum:
            log_ratio = float(trained[token.position]) - float(datum.loss_inputs["logprobs"][token.position])
            ratio = math.exp(log_ratio)
            for group in token.groups:
                sums = found.setdefault(group, {"tokens": 0, "kl_sum": 0.0, "beyond": 0, "largest_ratio": 0.0})
                sums["tokens"] += 1
                sums["kl_sum"] += ratio - 1 - log_ratio
                sums["beyond"] += not 0.8 <= ratio <= 1.2
                sums["largest_ratio"] = max(sums["largest_ratio"], ratio)
    return found


def assert_equal(found: Any, wanted: dict[str, dict[str, float]], rel: float) -> None:
    assert found.keys() == wanted.keys()
    for group, sums in wanted.items():
        for name, value in sums.items():
            assert getattr(found[group], name) == pytest.approx(value, rel=rel), f"{name} of {group}"


STALENESS = {"by 0": 0, "by 1": 1, "by 2": 2, "by 7": 7}


@pytest.fixture(scope="module")
def seeing(model_path: Any) -> HFTrainer:
    """A trainer whose micro-batches hold a part of a request."""
    return HFTrainer(
        TrainerConfig(
            str(model_path("qwen3_vl")), name="seeing", dtype="float64", device="cpu", micro_batch_tokens=60,
            logit_chunk_elements=8 * VOCAB,
        )
    )  # fmt: skip


@pytest.fixture
def ours(seeing: HFTrainer, add_adapter: Any) -> Any:
    for adapter in ("a", "b"):
        add_adapter(seeing, adapter, seed=ord(adapter))
    yield seeing
    for adapter in ("a", "b"):
        seeing.remove_adapter(adapter)


def conversations(make: Maker, loss_fn: str) -> Any:
    """Data of one and of several turns, of text and of images, two that share a prompt, and one without a sample."""
    prompt = make.input(12, [(2, (4, 4))])
    made = [
        laid_out(make, [Turn(5, 9, stale=0)], loss_fn),
        laid_out(make, [Turn(3, 4, stale=0), Turn(2, 5, -1.0, 1), Turn(4, 3, 0.0, 2), Turn(1, 2, stale=7)], loss_fn),
        laid_out(make, [Turn(1, 3), Turn(10, 4, stale=1), Turn(6, 3)], loss_fn, [(5, (4, 6)), (19, (4, 4))]),
        laid_out(make, [Turn(12, 8, 2.0), Turn(2, 3, 2.0)], loss_fn, prompt=prompt),
        laid_out(make, [Turn(12, 5, 0.0)], loss_fn, prompt=prompt),
        laid_out(make, [Turn(2, 2), Turn(1, 1), Turn(1, 2), Turn(1, 1), Turn(2, 1)], loss_fn),
        laid_out(make, [Turn(30, 0)], loss_fn),
        laid_out(make, [Turn(0, 2), Turn(1, 3)], loss_fn),
    ]
    return tuple(list(part) for part in zip(*made, strict=True))


def alone(trainer: HFTrainer, adapter: str, datum: TrainDatum) -> np.ndarray:
    """The logprobs of the next tokens, of the datum in a row for itself; nothing is known of the last."""
    return np.append(trainer.logprobs(adapter, datum.input), np.nan)


@pytest.mark.parametrize("loss_fn", COMPARED)
def test_the_distance_is_that_of_the_formula_for_every_loss(loss_fn: str, ours: Any, make: Any) -> None:
    """In rows that hold data of two adapters and three losses, over several micro-batches, against rows of one datum
    each: text, images, turns, staleness, and sampled tokens whose advantage is 0."""
    data, tokens, spans = conversations(make, loss_fn)
    tokens = [[token for token in each if token.position < data[at].input.length - 1] for at, each in enumerate(tokens)]
    for datum in data:  # of the last position's target no other road knows the logprob
        for values in datum.loss_inputs.values():
            values[-1] = 0
    settings = loss_of(loss_fn).complete_settings({})
    works = [
        make.work("b", [7, 20]),
        TrainWork("a", data, loss_fn, settings),
        TrainWork("b", data, loss_fn, settings, backward=False),
        make.work("a", [9, 8], "dro"),
    ]
    results = ours.forward_backward(works)
    for at in (1, 2):
        adapter, own = works[at].adapter_id, [output["logprobs"] for output in results[at].outputs]
        found = measure(loss_of(loss_fn), data, results[at], spans, STALENESS, VOCAB)
        assert_equal(found, reference(data, tokens, own), rel=1e-11)
        assert_equal(found, reference(data, tokens, [alone(ours, adapter, datum) for datum in data]), rel=1e-5)
        assert found["all"].tokens == sum(len(each) for each in tokens) > 30
        assert {"text", "after_image", "turn_4_on", "staleness_3_on", "staleness_unknown"} <= found.keys()
    assert ours.forward_backward([replace(works[1], loss_config={**settings})])[0].metrics.keys() == {
        "loss:sum",
        *(["local_definition:mean"] if LOSSES[loss_fn].own_definition else []),
    }


def made_result(logprobs: Sequence[Any]) -> TrainResult:
    return TrainResult([{"logprobs": np.asarray(each, np.float32)} for each in logprobs], {"loss:sum": 0.0})


def made_datum(targets: Sequence[int], sampler: Any, advantages: Any) -> TrainDatum:
    inputs = {"logprobs": np.asarray(sampler, np.float32), "advantages": np.asarray(advantages, np.float32)}
    return TrainDatum(RenderedInput(np.full(len(targets), 5, np.int32)), np.array(targets, np.int64), inputs)


IMPORTANCE = loss_of("importance_sampling")


def test_over_all_tokens_as_often_as_they_are_drawn_it_is_the_divergence_itself() -> None:
    """The mean over tokens with the frequencies of the sampler is its expectation, and that is KL(sampler, trainer)."""
    rng = np.random.default_rng(0)
    count = rng.integers(1, 400, 16)
    sampler, trainer = count / count.sum(), rng.dirichlet(np.ones(16))
    tokens = np.repeat(np.arange(16), count)
    data = [made_datum(tokens.tolist(), np.log(sampler)[tokens], np.ones(len(tokens)))]
    found = measure(IMPORTANCE, data, made_result([np.log(trainer)[tokens]]), [None], {}, 16)["all"]
    exact = float((sampler * np.log(sampler / trainer)).sum())
    assert found.kl == pytest.approx(exact, rel=1e-5)
    assert abs(exact - float((trainer * np.log(trainer / sampler)).sum())) > 0.1  # the other direction
    far = np.abs(trainer / sampler - 1) > 0.2
    assert found.beyond_share == pytest.approx(float(sampler[far].sum()))
    assert found.largest_ratio == pytest.approx(float((trainer / sampler).max()), rel=1e-5)


def test_small_distances_keep_their_digits() -> None:
    """Half of log r squared, where exp(log r) - 1 - log r would be rounding alone."""
    log_ratio = np.float32(-2.0) - np.nextafter(np.float32(-2.0), np.float32(0))
    data = [made_datum([3], [np.nextafter(np.float32(-2.0), np.float32(0))], [1])]
    found = measure(IMPORTANCE, data, made_result([[-2.0]]), [None], {}, 16)["all"]
    assert found.kl == pytest.approx(float(log_ratio) ** 2 / 2, rel=1e-6)


def test_what_was_not_sampled_or_is_no_token_does_not_count() -> None:
    """Prompts arrive with zeros; a target outside the vocabulary may stand where nothing is trained; a sampled token
    whose advantage is 0 counts."""
    data = [made_datum([3, -100, 4, 99, 5], [0, -1, -1, -2, 0], [0, 0, 0, 0, 1])]
    found = measure(IMPORTANCE, data, made_result([[-9, -9, -1, -9, -0.5]]), [None], {}, 16)
    assert found["all"] == Distance(2, pytest.approx(math.exp(-0.5) - 0.5), 1, 1.0)
    assert found["turn_2"].tokens == 1
    joined = measure(IMPORTANCE, [made_datum([3, 4], [-1, -1], [1, 1]), made_datum([5, 6, 7], [-1, 0, -1], [1, 0, 1])],
                     made_result([[-1, -1], [-1, -1, -1]]), [None, None], {}, 16)  # fmt: skip
    assert {name: each.tokens for name, each in joined.items() if "turn" in name} == {"turn_1": 3, "turn_2": 1}
    nothing = measure(IMPORTANCE, [made_datum([3], [0], [0])], made_result([[-1]]), [None], {}, 16)
    assert nothing == {"all": Distance()}
    assert telling(added([nothing])) == {}


@pytest.mark.parametrize("sampler", [-3.4e38, 3.4e38, -1000.0])
def test_numbers_stay_finite_whatever_logprobs_a_client_sends(sampler: float) -> None:
    data = [made_datum([3, 4], [sampler, -1], [0, 1])]
    with np.errstate(all="raise", under="ignore"):
        found = measure(IMPORTANCE, data, made_result([[-1, -1]]), [None], {}, 16)
    values = [value for each in found.values() for value in mismatch.measures(each).values()]
    assert np.isfinite([*values, found["all"].kl_sum]).all()


def test_spans_say_what_a_turn_is() -> None:
    """A token of probability 1 and advantage 0 in the middle of a turn does not make it two; spans that follow each
    other are one turn; what is of another run, or not recorded, is of unknown staleness."""
    spans = [
        ProvenanceSpan(source="prompt", sequence_id="s:0:0", length=1),
        ProvenanceSpan(source="sampled", sequence_id="s:0:0", length=2),
        ProvenanceSpan(source="sampled", sequence_id="s:1:0", length=1),
        ProvenanceSpan(source="prompt", sequence_id="s:2:0", length=1),
        ProvenanceSpan(source="sampled", sequence_id="s:2:0", length=1),
        ProvenanceSpan(source="sampled", sequence_id="s:2:0", length=0),
    ]
    versions: dict[str, mismatch.DrawnBy] = {"s:0:0": "new", "s:1:0": "old", "s:2:0": "of another run"}
    found = mismatch.sampled_spans(spans, versions.get)
    assert found == [SampledSpan(1, 3, "new"), SampledSpan(3, 4, "old"), SampledSpan(5, 6, "of another run")]
    datum = made_datum([1] * 6, [0, -1, 0, -1, 0, -1], [0, 0, 0, 0, 0, 0])
    result = made_result([[-1] * 6])
    told = measure(IMPORTANCE, [datum, datum], TrainResult([*result.outputs] * 2, {}), [found, None],
                   {"new": 0, "old": 9}, 16)  # fmt: skip
    assert {name: each.tokens for name, each in told.items()} == {
        "all": 6,
        "text": 6,
        "turn_1": 3,  # two of the first datum, one of the second
        "turn_2": 2,
        "turn_3": 1,
        "staleness_0": 1,
        "staleness_3_on": 1,
        "staleness_unknown": 4,
    }


@pytest.mark.parametrize("cuts", [[3], [1, 2, 4], [6, 7]])
def test_metrics_of_the_parts_of_a_call_are_those_of_the_whole(cuts: list[int], make: Any) -> None:
    """As the SDK combines them: by the suffix of their names. A part may have no sampled token."""
    data, _, spans = conversations(make, "importance_sampling")
    logprobs = [make.rng.normal(-4, 1, datum.input.length) for datum in data]

    def metrics(start: int, stop: int) -> dict[str, float]:
        here = slice(start, stop)
        found = measure(IMPORTANCE, data[here], made_result(logprobs[here]), spans[here], STALENESS, VOCAB)
        return {"loss:sum": 0.0, **mismatch.request_metrics(found)}

    parts = [
        ForwardBackwardOutput(
            loss_fn_output_type="", loss_fn_outputs=[{}] * (stop - start), metrics=metrics(start, stop)
        )
        for start, stop in itertools.pairwise([0, *cuts, len(data)])
    ]
    whole = metrics(0, len(data))
    assert len(whole) == 5
    assert combine_fwd_bwd_output_results(parts).metrics == pytest.approx(whole, rel=1e-12)


def test_requests_of_a_step_add_up_to_one_and_groups_that_say_nothing_are_left_out(make: Any) -> None:
    data, _, spans = conversations(make, "importance_sampling")
    logprobs = [make.rng.normal(-4, 1, datum.input.length) for datum in data]

    def of(chosen: Sequence[int], staleness: dict[str, int]) -> dict[str, Distance]:
        picked = [data[at] for at in chosen]
        return measure(IMPORTANCE, picked, made_result([logprobs[at] for at in chosen]),
                       [spans[at] for at in chosen], staleness, VOCAB)  # fmt: skip

    whole, parts = of(range(8), STALENESS), added(of([at], STALENESS) for at in (6, 2, 0, 5, 7, 4, 1, 3))
    wanted = {
        name: {part: getattr(each, part) for part in ("tokens", "kl_sum", "beyond", "largest_ratio")}
        for name, each in whole.items()
    }
    assert_equal(parts, wanted, rel=1e-12)
    assert telling(parts).keys() == whole.keys()
    assert telling(of([0], {})).keys() == {"all"}
    assert telling(of([0], STALENESS)).keys() == {"all", "staleness_0"}
    assert telling(of([5], {})).keys() == {"all", "turn_1", "turn_2", "turn_3", "turn_4_on"}
    shown = mismatch.step_metrics(telling(of([2], {})))
    assert shown["mismatch/tokens"] == shown["mismatch/tokens/text"] + shown["mismatch/tokens/after_image"]
    assert shown["mismatch/kl"] == pytest.approx(
        sum(shown[f"mismatch/kl/{each}"] * shown[f"mismatch/tokens/{each}"] for each in ("text", "after_image"))
        / shown["mismatch/tokens"]
    )


def apart(kl: float, stale: int = 0) -> dict[str, Distance]:
    found = {"all": Distance(100, 100 * kl, 5, 1.5), "staleness_0": Distance(100 - stale, kl, 5, 1.5)}
    return {**found, "staleness_2": Distance(stale, kl, 0, 1.0)} if stale else found


def test_the_log_says_once_that_the_distance_has_grown() -> None:
    watch = Watch()
    usual = [2e-4, 1e-4, 4e-4, *[1e-4] * 7]
    assert [watch.note(step, apart(kl)) for step, kl in enumerate(usual, 1)] == [None] * 10
    assert watch.note(11, apart(1.19e-3)) is None
    said = watch.note(12, apart(1.3e-3, stale=40))
    assert said is not None
    assert "step 12: sampler and trainer are 0.0013 nats per token apart, more than 3 times the 0.0004" in said
    assert "of 100 tokens 5.0% have a ratio beyond 1 ± 0.2" in said
    assert "40% were sampled by older weights" in said
    assert watch.note(13, apart(9.0)) is None


def test_stale_steps_are_compared_with_the_on_policy_ones_before_them() -> None:
    watch = Watch()
    assert watch.note(1, apart(9.0, stale=100)) is None, "nothing is usual yet"
    assert watch.note(2, apart(1e-4)) is None
    assert watch.note(3, apart(0.1)) is None, "one of the first ten"
    assert watch.note(4, apart(0.29, stale=1)) is None
    assert "first 2 on-policy steps" in (watch.note(5, apart(0.31, stale=1)) or "")
    exact = Watch()
    assert exact.note(1, apart(0.0)) is None
    assert exact.note(2, apart(9e-6, stale=1)) is None, "rounding"
    assert exact.note(3, {}) is None
    assert exact.note(4, apart(2e-5, stale=1)) is not None


def test_a_span_is_cut_where_its_weights_moved() -> None:
    """An in-flight client's sequence of 2 + 3 + 4 tokens, of which a datum has those from the second on, and one that
    is in the last row alone."""
    drawn = [(2, "first"), (3, "second"), (4, "third")]
    spans = [
        ProvenanceSpan(source="prompt", sequence_id="s:0:0", length=3),
        ProvenanceSpan(source="sampled", sequence_id="s:0:0", offset=1, length=6),
        ProvenanceSpan(source="sampled", sequence_id="s:0:0", offset=7, length=1),
    ]
    assert mismatch.sampled_spans(spans, lambda _: drawn) == [
        SampledSpan(3, 4, "first"),
        SampledSpan(4, 7, "second"),
        SampledSpan(7, 9, "third"),
        SampledSpan(9, 10, "third"),
    ]
