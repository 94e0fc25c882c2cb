"""Promises 3, 4 and 6: what a request says is what the engines are told, nothing more, nothing less, no defaults."""

from typing import Any

import pytest
from tinker_local.types import AdamParams, LoraConfig, SamplingParams

from tests.http.conftest import Api


@pytest.mark.mutation(
    "only-the-learning-rate-used",
    "Training.optim_step.run",
    "model.model_id, params)",
    "model.model_id, type(params)(learning_rate=params.learning_rate))",
)
async def test_every_setting_of_each_optimizer_step_arrives_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[AdamParams] = []
    original = api.trainer.optim_step

    def note(adapter_id: str, params: AdamParams) -> dict[str, float]:
        told.append(params)
        result: dict[str, float] = original(adapter_id, params)
        return result

    monkeypatch.setattr(api.trainer, "optim_step", note)
    model = await api.model()
    steps = [
        {"learning_rate": 0.3, "beta1": 0.1, "beta2": 0.2, "eps": 1e-3, "weight_decay": 0.4, "grad_clip_norm": 0.5},
        {"learning_rate": 0.2, "beta1": 0.6, "beta2": 0.7, "eps": 1e-4, "weight_decay": 0.0, "grad_clip_norm": 9.0},
        {"learning_rate": 0.1},
    ]
    for at, adam in enumerate(steps):
        await api.gradient(model, 2 * at + 1)
        body = {"model_id": model, "seq_id": 2 * at + 2, "adam_params": adam}
        await api.result(await api.submit("optim_step", body))
    assert told == [AdamParams(**adam) for adam in steps]
    # The defaults of a step that leaves settings out are the SDK's.
    import tinker

    assert told[2].model_dump() == {**tinker.AdamParams().model_dump(), "learning_rate": 0.1}


@pytest.mark.parametrize(
    "config",
    [
        {"rank": 2, "seed": 7, "train_attn": False, "train_mlp": True, "train_unembed": True},
        {"rank": 8, "seed": -1, "train_attn": True, "train_mlp": False, "train_unembed": True},
        {"rank": 16, "seed": None, "train_attn": True, "train_mlp": True, "train_unembed": False},
    ],
)
async def test_rank_seed_and_flags_of_lora_arrive_and_are_kept_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    made: list[LoraConfig] = []
    original = api.trainer.create_adapter

    def note(adapter_id: str, lora_config: LoraConfig, optimizer: str) -> None:
        made.append(lora_config)
        original(adapter_id, lora_config, optimizer)

    monkeypatch.setattr(api.trainer, "create_adapter", note)
    session = await api.session()
    model = await api.model(session, 0, lora_config=config)
    assert made == [LoraConfig(**config)]
    path = await api.save(model, 1, "a")
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    await api.result(await api.submit("load_weights", body))
    assert api.trainer.capture(f"{session}:train:1", optimizer=False).lora_config == LoraConfig(**config)


async def test_every_setting_of_a_sample_arrives_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    original = api.sampler.sample

    async def note(work: Any) -> Any:
        told.append(work)
        return await original(work)

    monkeypatch.setattr(api.sampler, "sample", note)
    sampler = await api.base_sampler()
    settings: list[dict[str, Any]] = [
        {"max_tokens": 3, "seed": 5, "temperature": 0.0, "top_k": 4, "top_p": 0.5, "stop": "ab"},
        {"max_tokens": None, "seed": -(2**70), "temperature": 0.25, "top_k": -1, "top_p": 1.0, "stop": ["ab", "c"]},
        {"max_tokens": 2, "seed": 0, "temperature": 1.5, "top_k": 1, "top_p": 0.9, "stop": [7, 8]},
        {"max_tokens": 2, "stop": []},
    ]
    for seq_id, params in enumerate(settings):
        fields = {"sampling_params": params, "num_samples": seq_id + 1, "prompt_logprobs": seq_id % 2 == 0}
        await api.result(await api.submit("asample", api.sample_body(sampler, seq_id, **fields)))
    assert [work.params for work in told] == [SamplingParams(**params) for params in settings]
    assert [work.params.stop for work in told] == ["ab", ("ab", "c"), (7, 8), ()]
    assert [work.num_samples for work in told] == [1, 2, 3, 4]
    assert [work.prompt_logprobs for work in told] == [True, False, True, False]
    assert [work.prompt.token_ids.tolist() for work in told] == [[5, 9]] * 4
