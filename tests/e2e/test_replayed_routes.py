"""A gradient on recorded samples of a mixture of experts takes the experts that they took, through the SDK."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.routes import REPLAYED, Routes
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.vllm_engine.record_routes import RouteTable
from tinker_local.types import NotEnoughMemoryError

pytestmark = pytest.mark.more

BASE = "tiny/mixture"
PROMPT = [5, 90, 200, 7, 31, 45, 66, 81, 25]
COUNT, LENGTH = 3, 12

Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("mixture") / "model", family="qwen3_moe")


@contextmanager
def served(
    folder: Path, data: Path, progress: Callable[[str], None] | None = None, **options: Any
) -> Iterator[tuple[InProcessBackend, Any]]:
    """The backend, and a training client with an adapter that changes something."""
    chosen = BackendOptions(data_dir=data, max_rank=8, kv_cache_bytes=2**26, **options)
    backend = InProcessBackend([ModelSource(BASE, str(folder))], chosen, progress=progress or (lambda _: None))
    server = LoopbackServer(backend)
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as service:
            client = service.create_lora_training_client(base_model=BASE, rank=4, seed=1)
            rng = np.random.default_rng(0)
            targets = rng.integers(20, 380, 30)
            inputs = {"target_tokens": targets, "weights": np.ones(30, np.float32)}
            datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(targets.tolist()), loss_fn_inputs=inputs)
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
            yield backend, client
    finally:
        server.close()


def sample(client: Any, *, record: bool = True) -> list[Any]:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=record)
    params = tinker.SamplingParams(max_tokens=LENGTH, seed=3, temperature=1.0, stop=[])
    return list(sampler.sample(tinker.ModelInput.from_ints(PROMPT), COUNT, params).result().sequences)


def data(sequences: list[Any], *, spans: bool = True) -> list[tinker.Datum]:
    found = []
    for each in sequences:
        tokens, before, name = each.tokens_np.tolist(), len(PROMPT) - 1, each.sequence_id
        prompt, sampled = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
        fields: dict[str, Any] = {}
        if spans:
            fields["model_input_spans"] = [
                prompt(sequence_id=name, length=before + 1),
                sampled(sequence_id=name, length=len(tokens) - 1),
            ]
            fields["loss_fn_input_spans"] = [
                prompt(sequence_id=name, offset=1, length=before),
                sampled(sequence_id=name, length=len(tokens)),
            ]
        inputs = {
            "target_tokens": np.array([*PROMPT[1:], *tokens]),
            "logprobs": np.array([0.0] * before + list(each.logprobs_np), np.float32),
            "advantages": np.array([0.0] * before + [1.0] * len(tokens), np.float32),
        }
        model_input = tinker.ModelInput.from_ints([*PROMPT, *tokens[:-1]])
        found.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs, **fields))
    return found


def forward(client: Any, given: list[tinker.Datum]) -> tuple[np.ndarray, Any]:
    """Logprobs of the sampled tokens, and which share of positions took recorded experts."""
    output = client.forward(given, "importance_sampling").result()
    logprobs = [each["logprobs"].to_numpy()[len(PROMPT) - 1 :] for each in output.loss_fn_outputs]
    return np.concatenate(logprobs), output.metrics.get(REPLAYED)


PLACES: dict[str, dict[str, Any]] = {
    "threads": {},
    "processes": {"trainer": "process", "sampler": "process"},
    "ranks": {"train_gpus": (0, 1), "context_parallel": 2, "sample_gpus": (0, 1), "sample_tp": 2},
}
"""Where engines run. Ranks share each row, and each layer of the sampler."""


@pytest.mark.parametrize("place", PLACES)
def test_recorded_experts_are_taken_and_the_metric_says_how_many(place: str, folder: Path, tmp_path: Path) -> None:
    """In float32 trainer and sampler choose the same, so what was recorded is changed here."""
    with served(folder, tmp_path, dtype="float32", **PLACES[place]) as (backend, client):
        sequences = sample(client)
        drawn = np.concatenate([each.logprobs_np for each in sequences])
        alone, none = forward(client, data(sequences, spans=False))
        with_records, all_of_them = forward(client, data(sequences))
        assert (none, all_of_them) == (0.0, 1.0)
        np.testing.assert_allclose(alone, drawn, atol=1e-4)
        np.testing.assert_allclose(with_records, alone, atol=1e-5)

        kept = backend.sampling.routes._sessions[next(iter(backend.sampling.routes._sessions))]._kept
        count = backend.models.get(BASE).routed.experts  # type: ignore[union-attr]
        for name, (record, used) in list(kept.items()):
            turned = Routes((record.routes.common + 1) % count, (record.routes.own + 1) % count)
            kept[name] = replace(record, routes=turned), used
        changed, share = forward(client, data(sequences))
        assert share == 1.0
        assert np.abs(changed - alone).max() > 0.01

        halves = data(sequences, spans=False)[:1] + data(sequences)[1:]
        _, share = forward(client, halves)
        assert share == pytest.approx(2 / 3, abs=1e-6)
        kept.clear()
        assert forward(client, data(sequences))[1] == 0.0
        assert sample(client, record=False)[0].sequence_id is not None
        assert not kept


def test_of_a_recorder_that_is_wrong_nothing_is_replayed_and_the_start_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is served all the same."""

    def nothing_but_zeros(table: RouteTable, slots: Any) -> None:
        table._table.zero_()

    monkeypatch.setattr(RouteTable, "keep", nothing_but_zeros)
    said: list[str] = []
    with served(folder, tmp_path, said.append, dtype="float32") as (backend, client):
        assert backend.models.get(BASE).routed is None
        (line,) = [each for each in said if "the experts that samples took" in each]
        assert re.fullmatch(
            rf"{BASE}: gradients do not take the experts that samples took: of those recorded in layer \d for prompts, "
            r"[\d.]+% are not those of the trainer's router \(at most 5% is normal\)",
            line,
        )
        sequences = sample(client)
        assert backend.sampling.routes.bytes == 0
        logprobs, share = forward(client, data(sequences))
        assert share == 0.0
        np.testing.assert_allclose(logprobs, np.concatenate([each.logprobs_np for each in sequences]), atol=1e-4)
        trained = client.forward_backward(data(sequences), "importance_sampling").result()
        assert trained.metrics[REPLAYED] == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_recorded_in_cuda_graphs_is_right(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, dtype="bfloat16") as (backend, client):
        model = backend.models.get(BASE)
        assert model.routes is not None
        assert model.routes.problem == ""
        assert model.routed is not None
        assert forward(client, data(sample(client)))[1] == 1.0


def test_a_start_that_cannot_check_what_is_recorded_goes_on_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise NotEnoughMemoryError("logprobs of 376 positions: out of memory")

    monkeypatch.setattr(HFTrainer, "replayed", refused)
    said: list[str] = []
    with served(folder, tmp_path, said.append, dtype="float32") as (_, client):
        assert any(
            each.endswith("they could not be checked: logprobs of 376 positions: out of memory") for each in said
        )
        assert forward(client, data(sample(client)))[1] == 0.0


def test_without_it_nothing_is_recorded_and_there_is_no_metric(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, dtype="float32", replay_routes="off") as (backend, client):
        sequences = sample(client)
        assert forward(client, data(sequences))[1] is None
        assert backend.sampling.routes.bytes == 0
        assert backend.models.get(BASE).routed is None
