"""Several trainer ranks compute what one does, stay equal to the bit, and fail together or not at all.

Every rank runs `rank_program.py` once, in a process over gloo; the tests look at what it saw.
"""

import ast
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.training.parallel import ranks as ranks_module
from tinker_local.backend.training.parallel.ranks import Ranks
from tinker_local.backend.training.run.packing import Item, Limits, rounds

from tests.training import rank_program, shared_rows_program
from tests.training.conftest import Maker
from tests.training.rank_program import (
    ADAPTERS,
    KINDS,
    LABELS,
    OF_ADAPTERS,
    OTHER_FAMILIES,
    PLACES,
    RETRIED,
    SHARDED,
    TRAINERS,
    Fault,
    Seen,
)

pytestmark = pytest.mark.more

Folder = Callable[[], Path]


@pytest.fixture(scope="module")
def folder(model_path: Callable[[str], Path]) -> Path:
    for model in [*(model for model, _, _ in TRAINERS.values()), *OTHER_FAMILIES, "qwen3_deep"]:
        model_path(model)
    return model_path("qwen3_vl").parent


PROGRAMS = {"rank_program": rank_program.main, "shared_rows_program": shared_rows_program.main}


@cache
def fork_server() -> Any:
    """Starts processes as forks of one that has imported what ranks run, which takes a processor 8 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"tests.training.{program}" for program in PROGRAMS])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


def where(processes: Sequence[Any], folder: Path, extent: str) -> dict[int, str]:
    """How each rank ended, or the innermost frames of what it does."""
    running = {rank: process for rank, process in enumerate(processes) if process.exitcode is None}
    for process in running.values():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2)
    found = {rank: f"exit code {process.exitcode}" for rank, process in enumerate(processes)}
    for rank in running:
        trace = folder / f"{extent}-{rank}.trace"
        _, _, frames = (trace.read_text() if trace.exists() else "").rpartition("most recent call first")
        found[rank] = " < ".join(f"{name}:{line}" for name, line in re.findall(r'/([\w.]+)", line (\d+)', frames)[:8])
    return found


def spawned(folder: Path, size: int, extent: str = "all", program: str = "rank_program") -> list[dict[str, Any]]:
    """What each of `size` ranks saw."""
    meeting = None
    if extent == "copies":
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    started = [
        fork_server().Process(target=PROGRAMS[program], args=(folder, extent, rank, size, meeting))
        for rank in range(size)
    ]
    try:
        for process in started:
            process.start()
        running = {process.sentinel: process for process in started}
        failed = False
        while running and not failed:  # a rank that dies leaves the others waiting for it
            ended = [running.pop(each) for each in connection.wait(running, 420)]
            failed = not ended or any(process.exitcode for process in ended)
        if failed:
            pytest.fail(f"{program} of {size} ranks: {where(started, folder, extent)}")
    finally:
        for process in started:
            process.kill()
    return [pickle.loads((folder / f"{extent}-{rank}-of-{size}.pickle").read_bytes()) for rank in range(size)]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return spawned(folder, 2)


@pytest.fixture(scope="module")
def short(folder: Path) -> list[dict[str, Any]]:
    return spawned(folder, 2, "short")


@pytest.fixture(scope="module")
def two_hosts(folder: Path) -> list[dict[str, Any]]:
    """Ranks 0 and 1, and ranks 2 and 3: each two hold a copy of the weights."""
    return spawned(folder, 4, "copies")


@pytest.fixture(scope="module")
def three(folder: Path, two: Any) -> list[dict[str, Any]]:
    return spawned(folder, 3)  # which also loads what two have saved


@pytest.fixture(scope="module")
def one(folder: Path) -> Mapping[str, Seen]:
    found = {
        label: rank_program.run(rank_program.make_trainer(folder, label), images=label.startswith("image"))
        for label in TRAINERS
    }
    return {label: found[SHARDED.get(label, label)] for label in LABELS}


@pytest.fixture(params=[2, 3])
def several(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.getfixturevalue({2: "two", 3: "three"}[request.param])
    return found


def assert_equal(found: Any, wanted: Any) -> None:
    """The same values, arrays to the bit."""
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    elif is_dataclass(wanted):
        for each in fields(wanted):
            assert_equal(getattr(found, each.name), getattr(wanted, each.name))
    elif isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


def deviation(found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> float:
    """The largest difference of an element, in the largest value of its array."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for key, array in wanted.items():
        scale = float(np.abs(array).max(initial=0)) or 1.0
        worst = max(worst, float(np.abs(np.float64(found[key]) - np.float64(array)).max(initial=0)) / scale)
    return worst


def _parts(message: str) -> tuple[str, list[float]]:
    """A message without its numbers, and these: the last digits of a logprob depend on how many rows were multiplied
    at once."""
    number = r"-?\d+\.\d+(?:e[-+]\d+)?"
    return re.sub(number, "#", message), [float(found) for found in re.findall(number, message)]


@pytest.mark.parametrize("label", LABELS)
def test_gradients_of_several_ranks_are_those_of_one(one: Any, several: Any, label: str) -> None:
    tolerance = 1e-12 if "float64" in label else 1e-5
    assert any(array.any() for array in one[label].gradients.values())
    for seen in several:
        assert deviation(seen[label].gradients, one[label].gradients) <= tolerance


@pytest.mark.parametrize("label", LABELS)
def test_results_of_several_ranks_are_those_of_one(one: Any, several: Any, label: str) -> None:
    for seen in several:
        assert seen[label].results.keys() == one[label].results.keys()
        for call, wanted in one[label].results.items():
            for found, expected in zip(seen[label].results[call], wanted, strict=True):
                if isinstance(expected, str):
                    (text, numbers), (wanted_text, right) = _parts(found), _parts(expected)
                    assert text == wanted_text
                    assert numbers == pytest.approx(right, rel=1e-5, nan_ok=True)
                    continue
                assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
                assert len(found.outputs) == len(expected.outputs)
                for output, right in zip(found.outputs, expected.outputs, strict=True):
                    assert deviation(output, right) <= 1e-5
        np.testing.assert_allclose(seen[label].logprobs, one[label].logprobs, atol=1e-4)


@pytest.mark.parametrize("label", LABELS)
def test_all_ranks_see_the_same_to_the_bit(several: Any, label: str) -> None:
    first, *others = (seen[label] for seen in several)
    for other in others:
        for name in ("results", "gradients", "norms", "saved", "trained", "logprobs"):
            assert_equal(getattr(other, name), getattr(first, name))


def tensors(states: Mapping[str, AdapterState]) -> dict[tuple[str, str], Any]:
    return {
        (name, key): array
        for name, state in states.items()
        for key, array in {**state.tensors, **(state.optimizer or {})}.items()
    }


@pytest.mark.parametrize("label", LABELS)
def test_steps_of_several_ranks_are_those_of_one(one: Any, several: Any, label: str) -> None:
    """To what rounding moves them by: AdamW divides small gradients by their own size, and so their rounding, too."""
    exact = one[label if "float64" in label else f"{label.partition(',')[0]} in float64"]
    by_rounding = 16 * deviation(_norms(one[label]), _norms(exact))
    trained_by_rounding = 16 * deviation(tensors(one[label].trained), tensors(exact.trained))
    for seen in several:
        assert deviation(_norms(seen[label]), _norms(one[label])) <= max(1e-9, by_rounding)
        assert deviation(tensors(seen[label].trained), tensors(one[label].trained)) <= max(1e-7, trained_by_rounding)
        assert [state.step for state in seen[label].trained.values()] == [5] * len(ADAPTERS)


def _norms(seen: Seen) -> dict[tuple[int, str, str], Any]:
    return {(*key, name): np.array([norm]) for key, norms in seen.norms.items() for name, norm in norms.items()}


def test_each_image_is_encoded_by_the_ranks_that_read_it(one: Any, two: Any) -> None:
    encoded = [seen["image"].images_encoded for seen in two]
    assert all(encoded)
    assert sum(encoded) <= 2 * one["image"].images_encoded


@pytest.mark.parametrize("label", ["image", "text, sharded"])
def test_a_save_of_two_ranks_goes_on_on_three_and_on_one(folder: Path, two: Any, three: Any, label: str) -> None:
    saved, trained = two[0][label].saved, two[0][label].trained
    one_rank = rank_program.make_trainer(folder, SHARDED.get(label, label))
    alone = rank_program.resumed(one_rank, saved, images=label == "image")
    for seen in (alone, *(each[f"resumed {label}"] for each in three)):
        for key, array in tensors(saved).items():
            np.testing.assert_array_equal(tensors(seen.saved)[key], array)
        assert deviation(tensors(seen.trained), tensors(trained)) <= 1e-5
        assert [state.step for state in seen.trained.values()] == [5] * len(ADAPTERS)


def test_a_sharded_rank_holds_its_part_and_three_layers(several: Any) -> None:
    for memory in [each for seen in several for each in seen["memory"]]:
        part = memory.large / len(several) + memory.replicated
        assert memory.head < memory.layer
        assert memory.resting <= 1.05 * (part + 2 * memory.layer + memory.head)
        assert memory.walking <= 1.05 * (part + 3 * memory.layer)
        assert memory.loading <= 1.05 * (part + 2 * memory.layer + memory.head)
        assert memory.walking < 0.9 * (memory.large + memory.replicated)  # the model is large enough to see it


def test_sharded_layers_of_other_families_are_those_of_one_rank(folder: Path, several: Any) -> None:
    alone = rank_program.probed(folder)
    for seen in several:
        for model, logprobs in alone.items():
            np.testing.assert_allclose(seen["probed"][model], logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_on_one_rank_is_one_of_all_and_changes_nothing(two: Any, place: str, kind: str) -> None:
    where = [label for label in LABELS if place in rank_program.places(label)]
    if place in {*RETRIED, *OF_ADAPTERS}:  # with whole weights and with a part on each rank
        assert {label in SHARDED for label in where} == {False, True}
    faults: list[Fault] = [seen[label].faults[f"{kind} in {place}"] for label in where for seen in two]
    assert faults
    for fault in faults:
        assert fault.same
        assert fault.again
        if kind == "memory" and place in RETRIED:
            assert fault.error is None
        else:
            assert fault.error is not None
    errors = [fault.error for fault in faults]
    if kind == "exception":
        assert set(errors[1::2]) == {"ZeroDivisionError: injected"}
        assert set(errors[::2]) == {"InternalError: rank 1 of the trainer failed: ZeroDivisionError: injected"}


@pytest.mark.mutation(
    "gradients-averaged-over-ranks",
    "JoinedRanks.add_up",
    "        dist.all_reduce(tensor)\n",
    "        dist.all_reduce(tensor)\n        tensor /= self.size\n",
)
def test_gradients_of_two_ranks_are_those_of_one_in_short(folder: Path, short: Any) -> None:
    alone = rank_program.run(rank_program.make_trainer(folder, "text"), images=False)
    assert deviation(short[0]["text"].gradients, alone.gradients) <= 1e-5


@pytest.mark.mutation(
    "stepped-before-all-ranks-have",
    "HFTrainer._stepped",
    "stepped = adapter if self._ranks.size == 1 else adapter.copied(torch.clone)",
    "stepped = adapter",
)
def test_a_failure_on_one_rank_is_one_of_all_in_short(short: Any) -> None:
    for seen in short:
        for fault in seen["text"].faults.values():
            assert (fault.error is None, fault.same, fault.again) == (False, True, True)


@pytest.mark.mutation(
    "ranks-diverge-unnoticed", "JoinedRanks.compare", "        if differing:\n", "        if False:\n"
)
def test_ranks_that_diverge_are_an_error_in_short(short: Any) -> None:
    for seen in short:
        assert "(rank 1: weights)" in seen["divergence of text"]


def check_fatal_step(seen: Mapping[str, Any], label: str) -> None:
    error, same, discarded = seen[f"fatal step of {label}"]
    assert "lora_A.weight and of" in error
    assert "the step was not taken and the gradient was discarded" in error
    assert (same, discarded) == (True, True)


def test_all_ranks_refuse_a_step_that_would_leave_what_is_not_finite_in_short(short: Any) -> None:
    for seen in short:
        check_fatal_step(seen, "text")


def test_all_ranks_refuse_a_step_that_would_leave_what_is_not_finite(two: Any) -> None:
    for seen in two:
        for label in LABELS:
            check_fatal_step(seen, label)


def test_four_ranks_with_two_copies_of_sharded_weights_compute_what_one_does(folder: Path, two_hosts: Any) -> None:
    four = two_hosts
    for label in ("image, sharded", "text, sharded"):
        alone = rank_program.run(rank_program.make_trainer(folder, SHARDED[label]), images=label.startswith("image"))
        for seen in four:
            assert deviation(seen[label].gradients, alone.gradients) <= 1e-5
            assert_equal(seen[label].gradients, four[0][label].gradients)
            assert_equal(seen[label].trained, four[0][label].trained)
            np.testing.assert_allclose(seen[label].logprobs, alone.logprobs, atol=1e-4)
            for fault in seen[label].faults.values():
                assert (fault.error is None, fault.same, fault.again) == (False, True, True)
        assert four[0][label].faults
    for memory in [each for seen in four for each in seen["memory"]]:
        part = memory.large / 2 + memory.replicated
        assert 0.9 * part <= memory.resting <= 1.05 * (part + 2 * memory.layer + memory.head)
        assert memory.walking <= 1.05 * (part + 3 * memory.layer)


def test_weights_are_sharded_within_a_host_and_copied_over_hosts(two_hosts: Any) -> None:
    processes = [seen["process"] for seen in two_hosts]
    for rank, seen in enumerate(two_hosts):
        assert seen["opened"] == [processes[rank ^ 1]], "a rank reads the parts of its host alone"
        assert seen["over both hosts"] == "shards 4: ranks 0 to 3 must be on one host, and are on 0, 1"


class Spread(Ranks):
    """Six ranks on three hosts."""

    size = 6
    hosts = (0, 0, 1, 1, 2, 2)


def test_ranks_that_share_weights_or_rows_are_on_one_host() -> None:
    Spread().check_neighbours(1, "shards")
    Spread().check_neighbours(2, "shards")
    with pytest.raises(ValueError, match=r"^shards 3: ranks 0 to 2 must be on one host, and are on 0, 1$"):
        Spread().check_neighbours(3, "shards")
    with pytest.raises(ValueError, match=r"^context_parallel 6: ranks 0 to 5 must be on one host, and are on 0, 1, 2$"):
        Spread().share_rows(6)
    with pytest.raises(ValueError, match=r"^shards 4: it must divide the number of ranks, 6$"):
        Spread().check_neighbours(4, "shards")


def test_ranks_that_diverge_are_an_error_that_names_what_differs(two: Any) -> None:
    for seen in two:
        error = seen["divergence of image"]
        assert error.startswith("optim_step of model a: the trainer's ranks have other results than rank 0")
        assert "(rank 1: weights)" in error


def test_one_rank_does_not_import_what_joins_several() -> None:
    source = Path(ranks_module.__file__).read_text()
    imported = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("distributed" in ast.unparse(node) or "joined_ranks" in ast.unparse(node) for node in imported)
    users = [
        path.name
        for path in Path(ranks_module.__file__).parents[1].rglob("*.py")
        if any(name in path.read_text() for name in ("torch.distributed", "joined_ranks import", "sharded import"))
    ]
    assert sorted(users) == [
        "compat_torch.py",
        "joined_ranks.py",
        "load_model.py",
        "peer_memory.py",
        "sharded_weights.py",
        "worker.py",
    ]


def test_a_trainer_of_one_rank_trains_without_what_joins_several(folder: Path) -> None:
    alone = fork_server().Process(target=rank_program.alone, args=(folder,))
    alone.start()
    alone.join(280)
    assert alone.exitcode == 0


def items_of_lengths(lengths: list[int]) -> list[Item]:
    make = Maker(np.random.default_rng(0))
    return [Item(0, at, "a", make.datum(length)) for at, length in enumerate(lengths)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rounds_hold_every_item_once_and_are_as_even_as_can_be(size: int) -> None:
    lengths = [7, 30, 12, 5, 5, 18, 22, 3, 9, 64, 1]
    found = rounds(items_of_lengths(lengths), Limits(70), {"a": 4}, size)
    flat = [[item.length for item in items] for each in found for items in each]
    assert sorted(length for items in flat for length in items) == sorted(lengths)
    assert all(len(each) == size for each in found[:-1])
    if size == 1:
        assert [length for items in flat for length in items] == lengths
    else:  # a round has micro-batches of about one size, and the largest is another rank's in the next one
        sizes = [[sum(item.length for item in items) for items in each] for each in found]
        assert [max(each) for each in sizes] == sorted((max(each) for each in sizes), reverse=True)
        assert all(min(a) >= max(b) for a, b in itertools.pairwise(sizes))
    if size == 2:
        assert [each.index(max(each)) for each in sizes] == [0, 1]
    assert max(map(sum, flat)) <= 70
    assert len(found) == -(-3 // size)
    if size == 3:
        assert max(map(sum, flat)) == 65
