"""A group of rollouts from one image pays for it once on the server, whatever way its requests come."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker_local.types import Datum, EncodedTextChunk, ModelInput
from tinker_local.types.sdk import to_sdk

MODEL = "tiny/vision"
GROUP = 16
IMAGES = ("rendered", "encoded by the sampler", "encoded by the trainer")


def counted(url: str) -> dict[str, float]:
    """What the server has counted for the vision model."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {
        (sample.name.removeprefix("tinker_local_"), sample.labels.get("side", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model") == MODEL
    }
    return {
        "rendered": found["images_rendered_total", ""],
        "encoded by the sampler": found["images_encoded_total", "sampler"],
        "encoded by the trainer": found["images_encoded_total", "trainer"],
        "samples": found["samples_total", ""],
        "sampled tokens": found["sampled_tokens_total", ""],
        "prompt tokens": found["prompt_tokens_total", ""],
        "trained tokens": found["trained_tokens_total", ""],
        "optimizer steps": found["optimizer_steps_total", ""],
    }


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def prompt_of(image: Any, number: int = 0) -> ModelInput:
    return ModelInput(
        chunks=(EncodedTextChunk(tokens=[5, 6]), image, EncodedTextChunk(tokens=[7, 8, *range(20, 20 + number)]))
    )


def datum_of(prompt: ModelInput, length: int) -> Any:
    inputs = {"target_tokens": [9] * length, "weights": [0.0] * (length - 1) + [1.0]}
    return to_sdk(Datum(model_input=prompt, loss_fn_inputs=inputs))


@pytest.fixture(scope="module")
def service(real_server: Any) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=real_server.url, api_key="tml-local")


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)


@pytest.mark.parametrize("seed", [901, 902])
def test_sixteen_separate_requests_and_training_encode_an_image_once_each(
    real_server: Any, service: tinker.ServiceClient, training: tinker.TrainingClient, picture: Any, seed: int
) -> None:
    image, positions = picture(96, 64, seed)
    sampler = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=3, stop=[], seed=1)
    length = positions + 4
    before = counted(real_server.url)
    prompt = to_sdk(prompt_of(image))
    futures = [sampler.sample(prompt, 1, params) for _ in range(GROUP)]
    assert [len(future.result().sequences) for future in futures] == [1] * GROUP
    sampled = counted(real_server.url)
    assert moved(before, sampled) == {
        "rendered": 1,
        "encoded by the sampler": 1,
        "encoded by the trainer": 0,
        "samples": GROUP,
        "sampled tokens": 3 * GROUP,
        "prompt tokens": length * GROUP,
        "trained tokens": 0,
        "optimizer steps": 0,
    }
    training.forward_backward([datum_of(prompt_of(image), length)] * 2, "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert moved(sampled, counted(real_server.url)) == {
        **dict.fromkeys(before, 0),
        "encoded by the trainer": 1,
        "trained tokens": 2 * length,
        "optimizer steps": 1,
    }


def test_an_image_is_encoded_once_under_other_texts_and_other_weights(
    real_server: Any, service: tinker.ServiceClient, training: tinker.TrainingClient, picture: Any
) -> None:
    """Neither of which shares a prefix of the KV cache beyond the image."""
    image, _ = picture(96, 64, 903)
    samplers = [training.save_weights_and_get_sampling_client(), service.create_sampling_client(base_model=MODEL)]
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    before = counted(real_server.url)

    def sample(number: int) -> int:
        prompt = to_sdk(prompt_of(image, number))
        return len(samplers[number % 2].sample(prompt, 1, params).result().sequences)

    with ThreadPoolExecutor(GROUP) as threads:
        assert sum(threads.map(sample, range(GROUP))) == GROUP
    changed = moved(before, counted(real_server.url))
    assert [changed[name] for name in IMAGES] == [1, 1, 0]


def test_different_images_are_encoded_once_each(
    real_server: Any, service: tinker.ServiceClient, training: tinker.TrainingClient, picture: Any
) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    images = [picture(64, 64, 910 + number) for number in range(5)]
    before = counted(real_server.url)
    prompts = [to_sdk(prompt_of(image)) for image, _ in images] * 4
    for future in [sampler.sample(prompt, 1, params) for prompt in prompts]:
        future.result()
    data = [datum_of(prompt_of(image), positions + 4) for image, positions in images] * 2
    training.forward_backward(data, "cross_entropy").result()
    changed = moved(before, counted(real_server.url))
    assert [changed[name] for name in IMAGES] == [5, 5, 5]
