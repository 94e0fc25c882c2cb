"""The asynchronous loop against a real server, with weights that move under its samples."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import tinker_local.client as tinker
from tinker_local.client import rl
from transformers import AutoImageProcessor, AutoTokenizer

from tests.rl.test_rl_cookbook import VISION, Squares


@pytest.mark.more
async def test_tokens_are_never_older_than_the_loop_says(real_server: Any, tiny_models: dict[str, Path]) -> None:
    folder = tiny_models[VISION]
    chat = rl.Chat(AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder))
    with tinker.ServiceClient(base_url=real_server.url) as service:
        client = await service.create_lora_training_client(VISION, rank=4, seed=0)
        moved = taken = 0
        stale: list[int] = []
        fresh: list[float] = []

        def on_step(step: rl.AsyncStep) -> None:
            nonlocal moved, taken
            tinker.log_metrics(client, step.metrics(), base_url=real_server.url)
            for group, staleness in zip(step.groups, step.staleness, strict=True):
                for turn in (turn for trajectory in group.trajectories for turn in trajectory.turns):
                    spans = tinker.weights_of_tokens(turn.sequence_id, base_url=real_server.url)
                    assert sum(span.tokens for span in spans) == len(turn.tokens)
                    assert all(span.optimizer_steps >= taken - staleness for span in spans)
                    moved += len(spans) > 1
            stale.extend(step.staleness)
            fresh.append(step.metrics()["async/fresh_share"])
            taken += step.update is not None

        groups = (rl.Group(Squares, 4, seed=number) for number in itertools.count())
        params = tinker.SamplingParams(max_tokens=40, stop=[])
        adam = tinker.AdamParams(learning_rate=1e-3)
        steps = await rl.train_asynchronously(
            client, groups, chat, params, adam, steps=6, groups_per_step=2, steps_ahead=2, on_step=on_step
        )
        assert steps == taken > 0
        print(f"{moved} replies went on under other weights; staleness {stale}, fresh {fresh}")
        assert max(stale) >= 1
