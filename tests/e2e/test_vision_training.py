"""`train_vision` from the client to the export: through the SDK, in a backend of this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import tinker_local.client
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.base_model import find_base
from tinker_local.backend.exporting.trained import find_checkpoint, read_trained
from tinker_local.backend.vllm_engine.vllm_adapters import VLLMAdapters
from tinker_local.types import TRAIN_VISION, EncodedTextChunk, ModelInput
from tinker_local.types.sdk import to_sdk

from tests.conftest import VISION
from tests.e2e.test_agreement import TOLERANCE, difference, sampler_logprobs, tokens, trainer_logprobs

pytestmark = pytest.mark.more

Inputs = list[tuple[ModelInput, np.ndarray]]
STEP = tinker.AdamParams(learning_rate=0.01)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def service(tiny_models: dict[str, Path], data_dir: Path) -> Iterator[tinker_local.client.ServiceClient]:
    options = BackendOptions(data_dir=data_dir, max_rank=8, train_vision=True, sampler_sleeps=False)
    backend = InProcessBackend([ModelSource(VISION, str(tiny_models[VISION]))], options)
    with tinker_local.client.ServiceClient(backend=backend) as client:
        yield client


@pytest.fixture(scope="module")
def inputs(picture: Any) -> Inputs:
    """Two images between texts, one image, and none."""
    found = []
    for seed, sizes in ((1, [(96, 64), (64, 64)]), (2, [(40, 128)]), (3, [])):
        chunks: list[Any] = [EncodedTextChunk(tokens=tokens(10 * seed, 3))]
        ids = list(chunks[0].tokens)
        for k, (width, height) in enumerate(sizes):
            image, count = picture(width, height, seed + k)
            after = tokens(10 * seed + k + 1, 5)
            chunks += [image, EncodedTextChunk(tokens=after)]
            ids += [-1] * count + after
        found.append((ModelInput(chunks=tuple(chunks)), np.array(ids)))
    return found


def data_of(inputs: Inputs) -> list[tinker.Datum]:
    data = []
    for model_input, ids in inputs:
        targets = np.append(np.maximum(ids[1:], 0), 0).astype(np.int64)
        weights = np.append(ids[1:] >= 0, 0).astype(np.float32)
        loss_inputs: Any = {"target_tokens": targets, "weights": weights}
        data.append(tinker.Datum(model_input=to_sdk(model_input), loss_fn_inputs=loss_inputs))
    return data


def losses(client: Any, inputs: Inputs, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        gradient = client.forward_backward(data_of(inputs), "cross_entropy")
        client.optim_step(STEP).result()
        found.append(gradient.result().metrics["loss:sum"])
    return found


def test_a_tower_is_trained_saved_sampled_resumed_and_exported(
    service: Any, inputs: Inputs, data_dir: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """By our client's argument and by the SDK's metadata, which train the same; not without either."""
    asked = [{"train_vision": True}, {"user_metadata": {TRAIN_VISION: "true"}}, {}]
    clients = [service.create_lora_training_client(VISION, rank=4, seed=3, **each).result() for each in asked]
    with_tower, by_metadata, plain = (losses(client, inputs, 3) for client in clients)
    assert with_tower == by_metadata
    assert with_tower[0] == pytest.approx(plain[0], rel=1e-6)
    assert with_tower[2] < with_tower[0]
    assert with_tower[2] != pytest.approx(plain[2], rel=1e-3)
    client = clients[0]
    assert service.create_rest_client().get_training_run(client.model_id).result().user_metadata == {
        TRAIN_VISION: "true"
    }
    sampler = client.save_weights_and_get_sampling_client().result()
    assert difference(trainer_logprobs(client, inputs), sampler_logprobs(sampler, inputs)) < TOLERANCE
    state = client.save_state("tower").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert losses(resumed, inputs, 2) == losses(client, inputs, 2)
    base = find_base(str(tiny_models[VISION]), "--base")
    read = read_trained(find_checkpoint(state, data_dir), base)
    assert all(array.any() for array in read.tensors.values())
    assert sum(".visual." in name for name in read.tensors) == 2 * (2 * 4 + 2 * 2)
    exported = export_checkpoint(state, tmp_path / "merged", to="merged", data_dir=data_dir)
    assert exported.checked is not None
    assert exported.checked.agrees


def test_metadata_that_asks_wrongly_or_for_what_a_checkpoint_lacks_is_refused(service: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="must be 'true' or 'false', not 'yes'"):
        service.create_lora_training_client(VISION, user_metadata={TRAIN_VISION: "yes"}).result()
    client = service.create_lora_training_client(VISION, rank=2).result()
    state = client.save_state("plain").result().path
    with pytest.raises(tinker.BadRequestError, match="does not train the vision tower"):
        service.create_training_client_from_state(state, user_metadata={TRAIN_VISION: "true"}).result()


def test_a_save_fails_if_the_sampler_has_another_tower(
    service: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe of every save has an image."""
    client = service.create_lora_training_client(VISION, rank=4, seed=3, train_vision=True).result()
    losses(client, inputs, 3)
    original = VLLMAdapters._copy

    def without_tower(self: Any, adapter: Any, dtype: Any) -> Any:
        numbers, tensors = original(self, adapter, dtype)
        for name, tensor in tensors.items():
            if ".visual." in name:
                tensor.zero_()
        return numbers, tensors

    monkeypatch.setattr(VLLMAdapters, "_copy", without_tower)
    with pytest.raises(tinker.TinkerError, match="does not serve the weights that were saved"):
        client.save_weights_and_get_sampling_client().result()


def test_a_server_without_the_option_refuses_and_names_it(real_server: Any) -> None:
    service = tinker_local.client.ServiceClient(base_url=real_server.url)
    with pytest.raises(tinker.BadRequestError, match="start it with --train-vision"):
        service.create_lora_training_client(VISION, rank=2, train_vision=True).result()
    service.create_lora_training_client(VISION, rank=2).result()
