"""Nothing acknowledged is lost and no command runs twice or out of order, whatever happens to the server."""

from dataclasses import replace
from typing import Any

import pytest
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SampledSequence, SampleOutput

from tests.chaos.chaos_run import ALICE, asynchronous_loops, chaos
from tests.chaos.chaos_users import Ledger
from tests.chaos.in_flight_user import Asked, MovesWeights
from tests.chaos.possible_states import Oracle, Run, Violation
from tests.chaos.served import served_fake

FAKE = served_fake()
ADAM = FAKE.adam
DATA = [Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs={"target_tokens": [9, 20, 31]})]
OTHER = [Datum(model_input=ModelInput.from_ints([7, 8]), loss_fn_inputs={"target_tokens": [8, 99]})]


@pytest.mark.rotated(2)
@pytest.mark.more
@pytest.mark.timeout(900)
def test_a_minute_of_faults_breaks_no_promise_on_fakes() -> None:
    report = chaos(FAKE, 60, seed=1, first=("sampler killed", "server stopped", "trainer killed", "server killed"))
    print(report)
    assert report.violations == []
    assert report.faults["sampler killed"]
    assert sum(report.faults.values()) >= 4
    assert report.done["step"] > 20
    assert report.done["sample"] > 20
    assert report.recoveries > 0
    assert report.done["look around"] > 0
    assert report.done["run beyond the quota refused"] > 0
    assert report.audit["loaded and trained on"] > 0


@pytest.mark.rotated(2)
@pytest.mark.more
@pytest.mark.timeout(900)
def test_every_token_of_asynchronous_loops_is_of_its_version_whatever_ends_on_fakes() -> None:
    """One of two replicas ends in a change of weights, trainers end while samples run, clients vanish."""
    served = replace(FAKE, arguments=(*FAKE.arguments, "--sample-gpus", "0,1"))
    first = ("sampler killed in a switch", "trainer killed", "sampler killed in a switch", "server killed")
    report = chaos(served, 60, seed=2, first=first, make_users=asynchronous_loops)
    print(report)
    assert report.violations == []
    assert report.faults["sampler killed in a switch"]
    assert report.faults["trainer killed"]
    assert report.done["in-flight save"] > 5
    assert report.done["in-flight sequence that moved"] > 5
    assert report.done["in-flight sequence of weights saved after it began"] > 0


@pytest.mark.parametrize(
    ("said", "drawn", "fits"),
    [
        ([(1, 4, 2), (3, 9, 1)], [21, 21, 23], True),
        ([(1, 4, 2), (3, 9, 1)], [21, 23, 23], False),  # a token of the next version, before it is said to be there
        ([(1, 4, 3)], [21, 21, 20], False),  # a token of no version
        ([(1, 5, 3)], [21, 21, 21], False),  # other optimizer steps than at that save
        ([(3, 9, 1), (1, 4, 2)], [23, 21, 21], False),  # a version that comes back
        ([(1, 4, 1), (4, 9, 2)], [21, 23, 23], False),  # a version that was not saved
        ([(1, 4, 2)], [21, 21, 21], False),  # a token too few
    ],
)
def test_the_checker_tells_a_token_that_is_not_of_its_version_on_fakes(
    said: list[tuple[int, int, int]], drawn: list[int], fits: bool
) -> None:
    spans = [dict(zip(("version", "optimizer_steps", "tokens"), span, strict=True)) for span in said]
    user = MovesWeights("http://localhost:1", FAKE, 1, ALICE, Ledger())
    user._saves = [(4, 21), (4, 21), (9, 23)]

    class Wire:
        def result(self, request: str) -> Any:
            return SampleOutput(sequences=(SampledSequence(tokens=drawn, stop_reason="length"),))

        def get(self, path: str) -> Any:
            return {"drawn_under": spans}

    user.wire = Wire()  # type: ignore[assignment]
    if fits:
        user._check(Asked("request", "sampler", since=1, saves=3))
        assert user.ledger.done["in-flight sequence that moved"] == 1
    else:
        with pytest.raises(Violation):
            user._check(Asked("request", "sampler", since=1, saves=3))
    user.wire, user.ledger = Wire(), Ledger()  # type: ignore[assignment]
    with pytest.raises(Violation, match="out of order"):
        user._check(Asked("request", "sampler", since=2, saves=3))


def other_history(oracle: Oracle, *commands: object) -> tuple[Any, float]:
    """What a server that ran `commands` (data, or None for a step) answers: the last logprobs, the last norm."""
    name, logprobs, norm = oracle.new(LoraConfig(rank=2, seed=3)), [], 0.0
    for command in commands:
        if isinstance(command, AdamParams):
            norm = oracle.step(name, command)
        else:
            logprobs = oracle.gradient(name, command)
    return logprobs, norm


@pytest.mark.parametrize(
    ("ran", "fits"),
    [
        ((DATA, OTHER, ADAM), True),
        ((DATA, DATA, OTHER, ADAM), False),  # a gradient twice
        ((DATA, ADAM), False),  # a gradient lost
        ((DATA, OTHER, ADAM, OTHER, ADAM), False),  # a step twice
    ],
)
def test_the_checker_tells_a_history_with_a_command_lost_or_run_twice_on_fakes(
    ran: tuple[Any, ...], fits: bool
) -> None:
    oracle = Oracle(FAKE)
    run = Run(oracle, [oracle.new(LoraConfig(rank=2, seed=3))])
    first, _ = other_history(oracle, DATA)
    second, _ = other_history(oracle, DATA, OTHER)
    _, norm = other_history(oracle, *ran)
    run.gradient(DATA, first, "gradient 1")
    run.gradient(OTHER, second, "gradient 2")
    if fits:
        run.step(ADAM, norm, "step 3")
    else:
        with pytest.raises(Violation):
            run.step(ADAM, norm, "step 3")


def test_the_checker_follows_both_when_an_answer_is_lost_on_fakes() -> None:
    oracle = Oracle(FAKE)
    for ran in ((DATA, ADAM, OTHER), (OTHER,)):
        run = Run(oracle, [oracle.new(LoraConfig(rank=2, seed=3))])
        run.gradient(DATA, other_history(oracle, DATA)[0], "gradient 1")
        run.failed_step(ADAM)
        assert [steps for steps, _ in run.states()] == [0, 1]
        run.forward(OTHER, other_history(oracle, *ran)[0], "forward 3")
        assert len(run.states()) == 1
