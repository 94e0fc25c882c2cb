"""The cookbook's own `rl.train` on environments of this package, against a real server."""

import asyncio
import json
import math
import pickle
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_strategy import FailFast, RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer
from tinker_local.client import WeightsSpan, rl, weights_of_tokens
from tinker_local.client.rl.cookbook import CookbookDatasetBuilder, CookbookGroupBuilder
from tinker_local.client.rl.episode import EpisodeError
from transformers import AutoImageProcessor, AutoTokenizer

pytestmark = pytest.mark.more

VISION = "tiny/vision"


class Squares:
    """Two squares, one after the other; a reply of an even number of characters is right."""

    closed = 0
    failures = 0
    to_fail = 0
    lock = threading.Lock()

    def reset(self, *, seed: int | None = None) -> Any:
        self._rng = np.random.default_rng(seed)
        self._turn = 0
        return ["Which colour? ", self._square()], {}

    def step(self, action: str) -> Any:
        self._turn += 1
        with Squares.lock:
            if self._turn == 2 and Squares.failures < Squares.to_fail:
                Squares.failures += 1
                raise OSError("the browser is gone")
        info = {"characters": len(action), "even": np.bool_(len(action) % 2 == 0), "mean": np.float32(0.5), "text": "x"}
        return ["And this? ", self._square()], float(len(action) % 2 == 0), self._turn == 2, False, info

    def close(self) -> None:
        with Squares.lock:
            Squares.closed += 1

    def _square(self) -> np.ndarray:
        return np.full((32, 32, 3), self._rng.integers(0, 256, 3), np.uint8)


def squares(step: int) -> list[rl.Group]:
    return [rl.Group(Squares, 4, seed=2 * step + group) for group in range(2)]


@pytest.fixture(autouse=True)
def _counts() -> None:
    Squares.closed = Squares.failures = Squares.to_fail = 0


@pytest.fixture(scope="module")
def chat(tiny_models: dict[str, Path]) -> rl.Chat:
    folder = tiny_models[VISION]
    return rl.Chat(AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder))


class Says:
    """A policy that says one word."""

    def __init__(self, chat: rl.Chat, word: str = "blue") -> None:
        self.tokens = [*chat.encode(word), *chat.stop]
        self.prompts: list[tinker.ModelInput] = []

    async def __call__(self, prompt: tinker.ModelInput, stop: Any, **limits: Any) -> TokensWithLogprobs:
        self.prompts.append(prompt)
        return TokensWithLogprobs(tokens=self.tokens, maybe_logprobs=[-1.0] * len(self.tokens))


async def test_two_steps_of_rl_train_on_a_real_server_are_exact(
    real_server: Any, chat: rl.Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[tinker.Datum]] = []
    original = tinker.TrainingClient.forward_backward

    def recorded(self: Any, data: list[tinker.Datum], *arguments: Any, **named: Any) -> Any:
        batches.append(list(data))
        return original(self, data, *arguments, **named)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", recorded)
    register_tokenizer(VISION, lambda: chat.tokenizer)  # the cookbook would look for the model's name on the hub
    Squares.to_fail = 1
    config = train.Config(
        learning_rate=1e-3,
        dataset_builder=CookbookDatasetBuilder(make_groups=squares, steps=2, chat=chat),
        model_name=VISION,
        recipe_name="test",
        max_tokens=6,
        log_path=str(tmp_path),
        lora_rank=4,
        loss_fn="importance_sampling",
        eval_every=0,
        save_every=0,
        base_url=real_server.url,
        rollout_error_tolerance=RetryOnFailure(max_retries=2),
    )
    try:
        await train.main(config)
    finally:
        unregister_tokenizer(VISION)

    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kl = [row["optim/kl_sample_train_v1"] for row in metrics if "optim/kl_sample_train_v1" in row]
    print("kl_sample_train_v1", kl)
    assert len(kl) == 2
    assert all(math.isfinite(value) and abs(value) < 1e-4 for value in kl)
    assert any("env/all/characters" in row for row in metrics)
    assert [len(batch) for batch in batches] == [8, 8]  # two groups of four: one datum each
    for datum in (datum for batch in batches for datum in batch):
        images = [chunk for chunk in datum.model_input.chunks if isinstance(chunk, tinker.types.ImageChunk)]
        assert len(images) == 2
        assert datum.loss_fn_input_spans is not None
        sampled = [span for span in datum.loss_fn_input_spans if isinstance(span, tinker.SampledProvenanceSpan)]
        assert len({span.sequence_id for span in sampled}) == 2
        logprobs = datum.loss_fn_inputs["logprobs"].to_numpy()
        assert np.count_nonzero(logprobs) == sum(span.length for span in sampled)
    assert Squares.failures == 1
    assert Squares.closed == 17  # 16, and the one that failed


class InFlight(tinker.TrainingClient):
    save_weights_and_get_sampling_client = partialmethod(  # type: ignore[assignment]
        tinker.TrainingClient.save_weights_and_get_sampling_client, kind="inflight"
    )


async def test_the_asynchronous_loop_runs_with_every_save_in_flight(
    real_server: Any, chat: rl.Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trained token says which weights drew it, and none is older than the loop allows."""
    trained: list[list[str]] = []
    backward = tinker.TrainingClient.forward_backward

    def recorded(self: Any, data: list[tinker.Datum], *arguments: Any, **named: Any) -> Any:
        spans = [span for datum in data for span in datum.loss_fn_input_spans or ()]
        trained.append([span.sequence_id for span in spans if isinstance(span, tinker.SampledProvenanceSpan)])
        return backward(self, data, *arguments, **named)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", recorded)
    monkeypatch.setattr("tinker.lib.public_interfaces.training_client.TrainingClient", InFlight)
    drawn: dict[str, list[WeightsSpan]] = {}
    step = tinker.TrainingClient.optim_step

    def asked(self: Any, *arguments: Any, **named: Any) -> Any:
        for sequence_id in trained[-1]:  # before the session ends
            if ":sample:0:" not in sequence_id:  # the loop's first client is of a checkpoint with a name
                drawn[sequence_id] = weights_of_tokens(sequence_id, base_url=real_server.url)
        return step(self, *arguments, **named)

    monkeypatch.setattr(tinker.TrainingClient, "optim_step", asked)
    register_tokenizer(VISION, lambda: chat.tokenizer)
    config = train.Config(
        learning_rate=1e-3,
        dataset_builder=CookbookDatasetBuilder(make_groups=squares, steps=8, chat=chat),
        model_name=VISION,
        recipe_name="test",
        max_tokens=6,
        max_steps=4,
        log_path=str(tmp_path),
        lora_rank=4,
        eval_every=0,
        save_every=0,
        base_url=real_server.url,
        async_config=train.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2),
    )
    try:
        await train.main(config)
    finally:
        unregister_tokenizer(VISION)
    assert len(trained) == 4
    assert set(trained[-1]) <= set(drawn)
    for steps, sequences in enumerate(trained):
        for span in (span for sequence_id in sequences for span in drawn.get(sequence_id, ())):
            assert 0 <= steps - span.optimizer_steps <= 3  # two, and the step that runs while a save is published
            assert span.version == span.optimizer_steps


async def test_a_group_builder_can_be_pickled_and_goes_on_where_it_arrives(chat: rl.Chat) -> None:
    builder = CookbookGroupBuilder(
        rl.Group(Squares, 3, seed=1), chat, max_turns=5, context_length=400, tags=["squares"]
    )
    copy = pickle.loads(pickle.dumps(builder))
    assert copy.logging_tags() == ["squares"]
    here, there = Says(chat), Says(chat)
    groups = [await do_group_rollout(builder, here), await do_group_rollout(copy, there)]
    assert sorted(map(repr, here.prompts)) == sorted(map(repr, there.prompts))
    for group in groups:
        assert group.get_total_rewards() == [2.0, 2.0, 2.0]
        pickle.loads(pickle.dumps(group))
    last = groups[0].trajectories_G[0].transitions[-1]
    assert last.metrics == {"characters": 4.0, "even": 1.0, "mean": 0.5, "stop/completed": 1.0}
    assert Squares.closed == 6


async def test_an_environment_that_raises_once_is_replaced_by_retry_on_failure(chat: rl.Chat) -> None:
    Squares.to_fail = 1
    group = await do_group_rollout(CookbookGroupBuilder(rl.Group(Squares, 3), chat), Says(chat), RetryOnFailure(1))
    assert group.get_total_rewards() == [2.0, 2.0, 2.0]
    (error,) = group.rollout_errors
    assert (error.error_type, error.error_message) == ("EpisodeError", "step: OSError: the browser is gone")
    assert Squares.closed == 4


async def test_without_tolerance_the_error_comes_out_and_everything_is_closed(chat: rl.Chat) -> None:
    Squares.to_fail = 1
    with pytest.raises(EpisodeError, match="the browser is gone"):
        await do_group_rollout(CookbookGroupBuilder(rl.Group(Squares, 3), chat), Says(chat), FailFast())
    assert Squares.closed == 3
    for thread in threading.enumerate():
        if thread.name.startswith("environment"):
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({"max_turns": 1}, "max_turns", 1),
        ({"context_length": 41}, "context_overflow", 1),
        ({"context_length": 5}, "max_tokens", 1),
    ],
)
async def test_limits_end_an_episode_with_their_reason(
    chat: rl.Chat, limits: dict[str, int], reason: str, turns: int
) -> None:
    group = await do_group_rollout(CookbookGroupBuilder(rl.Group(Squares, 1), chat, **limits), policy := Says(chat))
    (trajectory,) = group.trajectories_G
    assert trajectory.stop_reason == reason
    assert len(trajectory.transitions) == turns
    assert len(policy.prompts) == (0 if reason == "max_tokens" else 1)
    assert Squares.closed == 1


async def test_cleaning_up_closes_all_environments_at_once(chat: rl.Chat) -> None:
    together = threading.Barrier(4, timeout=60)

    class Slow(Squares):
        def close(self) -> None:
            together.wait()
            super().close()

    await asyncio.wait_for(do_group_rollout(CookbookGroupBuilder(rl.Group(Slow, 4), chat), Says(chat)), 60)
    assert Squares.closed == 4


def test_a_builder_whose_environment_is_a_lambda_says_so(chat: rl.Chat) -> None:
    make: Callable[[], Any] = lambda: Squares()  # noqa: E731
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(CookbookGroupBuilder(rl.Group(make), chat))
