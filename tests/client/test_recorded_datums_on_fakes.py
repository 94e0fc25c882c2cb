"""Recorded sessions through the client, on a server of fakes: trajectories, their data and the gradients of these."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.client.recorded_conversations import (
    RecordedTrajectory,
    forget_session,
    record_session,
    recorded,
    to_datums,
)
from tinker_local.types import InvalidRequestError

BASE = "fake/bigram"
LOSSES = ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"), record_sessions=True)
    server = LoopbackServer(InProcessBackend([ModelSource(BASE, BASE)], options, load=load_fake))
    yield server
    server.close()


def where(server: LoopbackServer) -> dict[str, str]:
    return {"base_url": server.url, "api_key": server.api_key}


@pytest.fixture
def forked(server: LoopbackServer) -> Iterator[list[RecordedTrajectory]]:
    """A first turn that two others continue, by OpenAI's client."""
    name = record_session(**where(server))
    with openai.OpenAI(base_url=f"{server.url}/session/{name}/v1", api_key=server.api_key) as client:
        hello: Any = {"role": "user", "content": "hello"}
        asked: Any = {"model": BASE, "max_tokens": 5, "temperature": 0.7}
        first = client.chat.completions.create(messages=[hello], **asked).choices[0].message
        for text in ("and?", "so?"):
            messages: Any = [hello, first, {"role": "user", "content": text}]
            client.chat.completions.create(messages=messages, **asked)
    yield recorded(name, **where(server))
    forget_session(name, **where(server))


def weights_after(server: LoopbackServer, data: list[tinker.Datum], loss_fn: Any) -> list[Any]:
    """The logprobs of a probe after a step on `data`."""
    with tinker.ServiceClient(**where(server)) as service:
        client = service.create_lora_training_client(base_model=BASE, rank=2, seed=1)
        for _ in range(2):  # the first gradient of LoRA's A is 0
            client.forward_backward(data, loss_fn).result()
            client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        probe = client.forward(data, loss_fn).result()
        return [each["logprobs"].tolist() for each in probe.loss_fn_outputs]


def test_each_leaf_is_a_trajectory_that_shares_its_first_turn_on_fakes(forked: list[RecordedTrajectory]) -> None:
    one, two = forked
    assert [turn.number for turn in one.turns] == [0, 1]
    assert [turn.number for turn in two.turns] == [0, 2]
    assert one.turns[0].sampling_params["temperature"] == 0.7


def test_data_have_every_sampled_token_with_its_logprob_on_fakes(forked: list[RecordedTrajectory]) -> None:
    for trajectory, datum in zip(forked, to_datums(forked, [2.0, -1.0]), strict=True):
        inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        sampled = inputs["advantages"] != 0
        assert inputs["target_tokens"][sampled].tolist() == [token for t in trajectory.turns for token in t.tokens]
        assert inputs["logprobs"][sampled] == pytest.approx([q for t in trajectory.turns for q in t.logprobs])
        assert datum.model_input.to_ints()[1:] == inputs["target_tokens"][:-1].tolist()


def test_a_shared_turn_counts_once_with_the_mean_advantage_on_fakes(forked: list[RecordedTrajectory]) -> None:
    first = forked[0].turns[0]
    span = slice(first.prompt.length - 1, first.prompt.length - 1 + len(first.tokens))
    values = [
        [datum.loss_fn_inputs["advantages"].to_numpy()[span] for datum in to_datums(forked, [2.0, -1.0], shared=how)]
        for how in ("each", "once")
    ]
    assert np.unique(values[0][0]) == [2.0]
    assert np.unique(values[0][1]) == [-1.0]
    assert np.unique(values[1][0]) == [0.5]
    assert np.unique(values[1][1]) == [0.0]


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_loss_takes_the_data_and_learns_from_them_on_fakes(
    server: LoopbackServer, forked: list[RecordedTrajectory], loss_fn: Any
) -> None:
    up, down = (weights_after(server, to_datums(forked, [sign, sign], loss_fn), loss_fn) for sign in (1.0, -1.0))
    assert up != down


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo"])
def test_counted_once_the_gradient_is_that_of_the_shared_turn_and_the_rest_apart_on_fakes(
    server: LoopbackServer, forked: list[RecordedTrajectory], loss_fn: Any
) -> None:
    """The gradient of one datum of the shared turn alone, and of the rest of each path, is that of the shared form."""
    once = to_datums(forked, [2.0, -1.0], loss_fn, shared="once")
    apart = []
    shared = RecordedTrajectory(forked[0].session, forked[0].turns[:1])
    apart += to_datums([shared], [0.5], loss_fn)
    for trajectory, advantage in zip(forked, [2.0, -1.0], strict=True):
        (datum,) = to_datums([trajectory], [advantage], loss_fn)
        first = trajectory.turns[0]
        values = datum.loss_fn_inputs["advantages"].to_numpy().copy()
        values[: first.prompt.length - 1 + len(first.tokens)] = 0
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(values)
        apart.append(datum)
    with tinker.ServiceClient(**where(server)) as service:
        found = []
        for data in (once, apart):
            client = service.create_lora_training_client(base_model=BASE, rank=2, seed=1)
            client.forward_backward(data, loss_fn).result()
            client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
            probe = client.forward(once, loss_fn).result()
            found.append(np.concatenate([each["logprobs"].to_numpy() for each in probe.loss_fn_outputs]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_another_number_of_advantages_is_refused_on_fakes(forked: list[RecordedTrajectory]) -> None:
    with pytest.raises(InvalidRequestError, match="advantages: 1 numbers for 2 trajectories"):
        to_datums(forked, [1.0])
    with pytest.raises(InvalidRequestError, match=r"advantages\[1\]: nan is not finite"):
        to_datums(forked, [1.0, float("nan")])
