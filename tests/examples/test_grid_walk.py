"""The environment of grid_walk.py is what its page says: pictures tell the way, and nothing else does."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def grid_walk(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("grid_walk")


def places(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, in cells, of the red and of the blue one, seen in the middles of the cells."""
    cells = picture[3::6, 3::6].astype(int)
    return tuple(np.argwhere(cells[..., colour] - cells[..., 1] > 100)[0] for colour in (0, 2))  # type: ignore[return-value]


def good_moves(grid_walk: Any, picture: np.ndarray) -> list[str]:
    walker, goal = places(picture)
    return [name for name, move in grid_walk.MOVES.items() if np.dot(move, goal - walker) > 0]


@pytest.mark.parametrize("answers", ["good", "random", "nonsense"])
def test_rewards_sum_to_1_on_arrival_and_a_policy_that_reads_each_picture_goes_straight(
    grid_walk: Any, answers: str
) -> None:
    arrivals, lost = 0, 0.0
    for seed in range(200):
        environment, rng = grid_walk.GridWalk(), np.random.default_rng(seed + 1)
        (_, picture), _ = environment.reset(seed=seed)
        start = np.abs(np.subtract(*places(picture))).sum()
        assert 2 <= start <= 8
        rewards: list[float] = []
        terminated = truncated = False
        while not (terminated or truncated):
            move = {"good": good_moves(grid_walk, picture), "random": "NSWE", "nonsense": ["", "north", "NN"]}[answers]
            (picture,), reward, terminated, truncated, _ = environment.step(str(rng.choice(list(move))))
            rewards.append(reward)
        arrivals += terminated
        assert not (terminated and truncated)
        assert sum(rewards) == pytest.approx(1) if terminated else len(rewards) == 8
        if not terminated:
            assert sum(rewards) == pytest.approx(1 - np.abs(np.subtract(*places(picture))).sum() / start)
        if answers == "good":
            assert len(rewards) == start
        if answers == "nonsense":
            lost += sum(rewards)
            assert max(rewards) <= 0
    assert {"good": arrivals == 200, "random": 20 < arrivals < 100, "nonsense": arrivals == 0}[answers], arrivals
    assert answers != "nonsense" or lost / 200 < -0.4  # silence does not pay


def test_pictures_have_one_size_and_two_coloured_cells_wherever_the_goal_is(grid_walk: Any) -> None:
    seen = set()
    texts = set()
    for seed in range(300):
        (text, picture), _ = grid_walk.GridWalk().reset(seed=seed)
        texts.add(text)
        assert (picture.shape, picture.dtype) == ((30, 30, 3), np.uint8)
        colours, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
        assert colours.tolist() == [[30, 30, 230], [128, 128, 128], [230, 30, 30]]
        assert counts.tolist() == [36, 23 * 36, 36]
        seen.add(tuple(np.concatenate(places(picture))))
    assert len(texts) == 1
    assert len(seen) > 200


def test_the_next_way_is_in_the_newest_picture_only(grid_walk: Any) -> None:
    """From the same board, the same move leads to boards with opposite ways."""
    (_, board), _ = (environment := grid_walk.GridWalk()).reset(seed=0)
    ways = set()
    for seed in range(50):
        environment = grid_walk.GridWalk()
        environment.reset(seed=0)
        environment.rng = np.random.default_rng(seed)
        (picture,), *_ = environment.step(good_moves(grid_walk, board)[0])
        ways.add("".join(good_moves(grid_walk, picture)))
    assert any("N" in way for way in ways), ways
    assert any("S" in way for way in ways), ways


def test_controls_show_the_first_board_or_nothing_and_walk_alike(grid_walk: Any) -> None:
    walks = {shows: grid_walk.GridWalk(shows) for shows in ("newest", "first", "nothing")}
    pictures = {shows: [walk.reset(seed=1)[0][1]] for shows, walk in walks.items()}
    for move in "NWSE":
        answers = {shows: walk.step(move) for shows, walk in walks.items()}
        assert len({answer[1:3] for answer in answers.values()}) == 1
        for shows, answer in answers.items():
            pictures[shows] += answer[0]
    assert len({picture.tobytes() for picture in pictures["newest"]}) > 1
    assert len({picture.tobytes() for picture in pictures["first"]}) == 1
    assert {picture.tobytes() for picture in pictures["nothing"]} == {bytes([128]) * 30 * 30 * 3}


def test_the_return_of_a_blind_policy_is_what_the_page_says(grid_walk: Any) -> None:
    random, blind = grid_walk.blind_returns()
    page = " ".join((ROOT / "docs" / "rl-with-images.md").read_text(encoding="utf-8").split())
    assert f"random moves return {random:.2f}, and the best sequence of moves returns {blind:.2f}" in page
    returns = []
    for seed in range(2000):
        environment, rng = grid_walk.GridWalk(), np.random.default_rng(seed + 1)
        environment.reset(seed=seed)
        returns.append(0.0)
        done = False
        while not done:
            _, reward, terminated, truncated, _ = environment.step(str(rng.choice(list("NSWE"))))
            returns[-1] += reward
            done = terminated or truncated
    error = float(np.std(returns)) / len(returns) ** 0.5
    assert abs(np.mean(returns) - random) < 4 * error
