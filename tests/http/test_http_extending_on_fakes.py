"""docs/extending.md is true: its loss, optimizer and route work as they stand there, registered here alone."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.hosting import app
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.types import Datum, ModelInput

Guide = Callable[[str], ModuleType]

TOKENS = [5, 9, 20, 31]


def datum(advantages: list[float]) -> Datum:
    inputs: dict[str, Any] = {"target_tokens": TOKENS[1:], "advantages": advantages}
    return Datum(model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


async def test_the_loss_of_the_guide_trains_on_fakes(api: Any, guide: Guide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "reinforce", guide("training/losses/reinforce.py").REINFORCE)
    model = await api.model()
    data = [datum([0.0, 1.5, -1.0])]

    async def run(seq_id: int, **settings: float) -> Any:
        request = await api.gradient(model, seq_id, data, "reinforce", loss_fn_config=settings)
        return await api.result(request)

    plain, shifted = await run(1), await run(2, baseline=0.5)
    logprobs = plain.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert plain.metrics["loss:sum"] == pytest.approx(-1.5 * logprobs[1] + logprobs[2])
    # A baseline changes nothing at the masked position.
    assert shifted.metrics["loss:sum"] == pytest.approx(-1.0 * logprobs[1] + 1.5 * logprobs[2])
    await api.result(await api.step(model, 3))
    assert (await run(4)).metrics["loss:sum"] < plain.metrics["loss:sum"]
    assert "unknown to reinforce" in await api.failure(
        await api.gradient(model, 5, data, "reinforce", loss_fn_config={"beta": 1.0})
    )


async def test_the_optimizer_of_the_guide_trains_is_saved_and_goes_on_on_fakes(
    api: Any, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = guide("training/optimizers/sgd.py").SGD
    monkeypatch.setitem(OPTIMIZERS, "sgd", sgd)
    session = await api.session()
    model = await api.model(session, 0, optimizer_config={"type": "sgd"})

    async def step(model: str, seq_id: int, **fields: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "optimizer_params": {"type": "sgd", **fields}}
        return str(await api.submit("optim_step", body))

    async def train(model: str, seq_id: int) -> float:
        loss = (await api.result(await api.gradient(model, seq_id))).metrics["loss:sum"]
        await api.result(await step(model, seq_id + 1, learning_rate=0.05))
        return float(loss)

    losses = [await train(model, seq_id) for seq_id in (1, 3, 5)]
    assert losses[2] < losses[1] < losses[0]
    state = api.trainer.capture(model, optimizer=True)
    assert {name.partition(".")[0] for name in state.optimizer} == {"velocity"}
    assert api.trainer.adapter_bytes(state.lora_config, "sgd") * 4 == api.trainer.adapter_bytes(state.lora_config) * 3

    # Settings are checked, and another optimizer's are refused; neither costs the gradient.
    await api.result(await api.gradient(model, 7))
    assert "optimizer_params.momentum" in await api.failure(await step(model, 8, learning_rate=0.1, momentum=1.0))
    assert "'sgd'" in await api.failure(await api.step(model, 9))

    path = await api.save(model, 10, "a")
    assert (await api.ok("weights_info", {"tinker_path": path}))["optimizer_config"] == {"type": "sgd"}
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    resumed = (await api.result(await api.submit("load_weights", body)))["model_id"]
    api.trainer.discard_gradients(model)
    assert await train(resumed, 1) == await train(model, 11)
    ours, theirs = (api.trainer.capture(name, optimizer=True) for name in (resumed, model))
    assert ours.step == theirs.step == 4
    for name, tensor in theirs.optimizer.items():
        np.testing.assert_array_equal(ours.optimizer[name], tensor)

    # Its state does not fit a model of another optimizer, its weights do.
    other = await api.model(session, 2)
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
    assert "'sgd'" in await api.failure(await api.submit("load_weights", body))
    weights_alone = {"session_id": session, "model_seq_id": 3, "path": path, "optimizer": False}
    await api.result(await api.submit("load_weights", weights_alone))
    assert (await api.ok("get_info", {"model_id": f"{session}:train:3"}))["optimizer_config"] == {"type": "adamw"}


async def test_the_route_of_the_guide_answers_on_fakes(
    start_api: Any, guide: Guide, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "ROUTES", (*app.ROUTES, guide("http/optimizer_routes.py")))
    api = await start_api(api_keys=["tml-key"], data_dir=tmp_path)
    assert (await api.get("models/x/optimizer")).status_code == 401
    api.http.headers["X-API-Key"] = "tml-key"
    model = await api.model()
    found = await api.get(f"models/{model}/optimizer")
    assert found.json() == {"type": "adamw", "state": ["exp_avg", "exp_avg_sq"]}
    assert (await api.get("models/unknown:train:0/optimizer")).status_code == 404
