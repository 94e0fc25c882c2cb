"""Recorded conversations on vLLM and the real trainer: what was sampled is what is trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tinker
import torch
from tinker_local.client.recorded_conversations import record_session, recorded, to_datums

from tests.conftest import Server, start_server

pytestmark = [pytest.mark.more]

NEAR = 0.5 if torch.cuda.is_available() else 1e-4
"""Nats between sampler and trainer: rounding in bfloat16 on a GPU, in float32 elsewhere."""


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--model", f"tiny/text={tiny_models['tiny/text']}", "--kv-cache", "0.25", "--max-rank", "8")
    one = start_server(tmp_path_factory.mktemp("data"), *options, "--record-sessions")
    yield one
    assert one.stop() == 0


def by_openai(url: str, name: str, model: str) -> None:
    """Two turns; what the client gives back as the reply is repeated with other fields, as frameworks do."""
    with openai.OpenAI(base_url=f"{url}/session/{name}/v1", api_key="tml-any", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for text in ("and then?", "why?"):
            said = client.chat.completions.create(model=model, messages=messages, max_tokens=12, seed=len(messages))
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": said.choices[0].message.content}]},
                {"role": "user", "content": text},
            ]
        client.chat.completions.create(model=model, messages=messages, max_tokens=12, seed=9)


def by_anthropic(url: str, name: str, model: str) -> None:
    with anthropic.Anthropic(base_url=f"{url}/session/{name}", api_key="tml-any", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for text in ("and then?", "why?"):
            said = client.messages.create(model=model, messages=messages, max_tokens=12)
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": text}]
        client.messages.create(model=model, messages=messages, max_tokens=12)


@pytest.mark.parametrize("talk", [by_openai, by_anthropic])
def test_a_trained_model_scores_recorded_turns_as_they_were_sampled(server: Server, talk: Any) -> None:
    """By a checkpoint: the prompt of each turn begins with what was read and sampled before, and the trainer, which has
    the same weights, gives the recorded logprobs."""
    where = {"base_url": server.url, "api_key": "tml-any"}
    with tinker.ServiceClient(**where) as service:
        client = service.create_lora_training_client("tiny/text", rank=4, seed=2)
        tokens = np.random.default_rng(1).integers(20, 380, 12).tolist()
        learnt = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
        )
        for _ in range(3):
            client.forward_backward([learnt], "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        path = client.save_weights_for_sampler(f"w-{talk.__name__}").result().path
        name = record_session(**where)
        talk(server.url, name, path)
        (trajectory,) = recorded(name, **where)
        assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
        assert all(turn.version == path and turn.branch is None for turn in trajectory.turns)
        before: list[int] = []
        for turn in trajectory.turns:
            prompt = turn.prompt.to_ints()
            assert prompt[: len(before)] == before
            before = [*prompt, *turn.tokens]
        data = to_datums([trajectory], [1.0], "importance_sampling")
        result = client.forward_backward(data, "importance_sampling").result()
        (datum,), (output,) = data, result.loss_fn_outputs
        sampled = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        assert sampled.sum() == trajectory.num_tokens
        apart = output["logprobs"].to_numpy()[sampled] - datum.loss_fn_inputs["logprobs"].to_numpy()[sampled]
        assert np.abs(apart).max() < NEAR
