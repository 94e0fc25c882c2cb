"""Models that see, whole: a real server, the SDK, OpenAI's client, exports. Qwen2-VL and Gemma 4 have families."""

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
import tinker_local.client
from PIL import Image
from safetensors.numpy import load_file
from tinker_local.backend.adapters.adapter import path_of
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.families import family_of
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.types import InvalidRequestError, LoraConfig, ModelInput
from transformers import AutoConfig, AutoProcessor

from tests.conftest import Server, start_server
from tests.e2e.conftest import SdkDriver
from tests.e2e.seeing_inputs import Read, inputs_of, read_pictures
from tests.e2e.test_agreement import difference, sampler_logprobs, train, trainer_logprobs

pytestmark = [pytest.mark.more, pytest.mark.rotated(3)]

GEMMA4 = ("gemma4", "gemma4_dense", "gemma4_moe")
"""A small model, a large one, and one with experts."""

SERVED = (
    *("llava", "llava_next", "internvl", "internvl3_5", "mistral3", "ministral3", "pixtral", "idefics3"),
    *("qwen2_vl", "glm4v", "glm_ocr", "exaone4_5", "smolvlm", "glm4v_moe", "internvl3_5_moe"),
    *("granite_vision", "granite4_vision", "lfm2_vl", *GEMMA4),
)
"""Architectures."""

TRAINED_TOWERS = ("llava_next", "granite_vision", "pixtral", "idefics3", "smolvlm", "qwen2_vl", "exaone4_5", "lfm2_vl")
"""Of these vLLM takes adapters on tower and projector."""

FROZEN_TOWERS = {
    "llava": "without its class token, and fails with adapters",
    **dict.fromkeys(
        ("internvl", "internvl3_5", "internvl3_5_moe", "mistral3", "ministral3"), "takes no adapters on its tower"
    ),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm_ocr"), "takes no adapters on gate_proj and up_proj of towers of this kind"
    ),
    "granite4_vision": "it has not been seen that vLLM computes adapters on towers of granite4_vision models",
    **dict.fromkeys(GEMMA4, "computed by transformers' class without adapters"),
}
"""Of the others, why not."""

IGNORED = r"ignores adapters of some modules .* such as .*\.conv\.in_proj"
"""By vLLM as it is, of LFM2."""

ROUNDING = dict.fromkeys(GEMMA4, 5e-4)
"""Nats by which trainer and sampler may differ, if not 1e-4: these layers do not scale the products of queries and
keys of RMS 1, so that rounding moves them more."""


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("seeing") / request.param, request.param)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--model", f"tiny/sees={folder}", "--dtype", "float32", "--max-rank", "8", "--train-vision")
    one = start_server(tmp_path_factory.mktemp("data"), *options)
    yield one
    assert one.stop() == 0


@pytest.fixture(scope="module")
def sdk(server: Server) -> SdkDriver:
    return SdkDriver(server.url)


@pytest.fixture(scope="module")
def read(folder: Path) -> list[Read]:
    return read_pictures(folder)


@pytest.fixture(scope="module")
def inputs(read: Sequence[Read]) -> list[tuple[ModelInput, np.ndarray]]:
    return inputs_of(read)


def test_trainer_and_sampler_agree_before_and_after_training(
    sdk: SdkDriver, server: Server, inputs: list[tuple[ModelInput, np.ndarray]], folder: Path, tmp_path: Path
) -> None:
    """And the checkpoint resumes, and is exported for PEFT and merged, which are compared with the trainer."""
    client, near = sdk.create("tiny/sees", LoraConfig(rank=4, seed=4)), ROUNDING.get(folder.name, 1e-4)
    base = sampler_logprobs(sdk.base_sampler("tiny/sees"), inputs)
    assert difference(trainer_logprobs(client, inputs), base) < near
    train(client, inputs, 3)
    trained = trainer_logprobs(client, inputs)
    assert difference(trained, base) > 0.2
    assert difference(trained, sampler_logprobs(client.save_weights_and_get_sampling_client(), inputs)) < near
    state = client.save_state("seen").result().path
    resumed = sdk.resume(state, optimizer=True)
    assert difference(trained, trainer_logprobs(resumed, inputs)) == 0
    for to in ("peft", "merged"):
        exported = export_checkpoint(state, tmp_path / to, to=to, data_dir=server.data_dir)  # type: ignore[arg-type]
        assert exported.checked is not None
        assert exported.checked.agrees
        assert exported.checked.images == 1
        left_out = [each for each in exported.warnings if "leaves logits_scaling 2.0 out of its logits" in each]
        assert len(left_out) == (folder.name == "granite_vision")
    if folder.name == "lfm2_vl":
        with pytest.raises(InvalidRequestError, match=IGNORED):
            export_checkpoint(state, tmp_path / "vllm", to="vllm", data_dir=server.data_dir)


def test_a_tower_is_trained_where_vllm_takes_adapters_of_it(
    server: Server, sdk: SdkDriver, folder: Path, inputs: list[tuple[ModelInput, np.ndarray]], tmp_path: Path
) -> None:
    """Sampled, resumed and exported for PEFT, for vLLM and merged, which are compared with the trainer; refused with
    the reason elsewhere."""
    with tinker_local.client.ServiceClient(base_url=server.url) as service:
        # Without the LM head, of which vLLM by itself takes no adapters.
        asked = service.create_lora_training_client("tiny/sees", rank=4, seed=4, train_unembed=False, train_vision=True)
        if folder.name not in TRAINED_TOWERS:
            with pytest.raises(tinker.BadRequestError, match=f"stays as it is: .*{FROZEN_TOWERS[folder.name]}"):
                asked.result()
            return
        client = asked.result()
        before = trainer_logprobs(client, inputs)
        train(client, inputs, 3)
        trained = trainer_logprobs(client, inputs)
        assert difference(trained, before) > 0.2
        sampler = client.save_weights_and_get_sampling_client().result()
        assert difference(trained, sampler_logprobs(sampler, inputs)) < 1e-4
        state = client.save_state("tower").result().path
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert difference(trained, trainer_logprobs(resumed, inputs)) == 0
    if folder.name == "lfm2_vl":
        with pytest.raises(InvalidRequestError, match=IGNORED):
            export_checkpoint(state, tmp_path / "vllm", to="vllm", data_dir=server.data_dir)
    for to in ("peft", "merged") if folder.name == "lfm2_vl" else ("peft", "vllm", "merged"):
        made = export_checkpoint(state, tmp_path / to, to=to, data_dir=server.data_dir)  # type: ignore[arg-type]
        checked = made.checked
        assert checked is not None
        told = any("unless it is served with --no-mm-device-do-normalize" in each for each in made.warnings)
        assert told == (folder.name == "exaone4_5" and to != "peft")
        card = (tmp_path / to / "README.md").read_text()
        assert ("--no-mm-device-do-normalize" in card) == (folder.name == "exaone4_5" and "vllm serve" in card)
        assert checked.agrees
        assert checked.images == 1
    family = family_of(AutoConfig.from_pretrained(folder).model_type, str(folder))
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    of_tower = [b for name, b in exported.items() if family.in_tower(path_of(name)) and ".lora_B." in name]
    assert len(of_tower) > 9
    assert all(b.any() for b in of_tower)


def test_a_picture_in_a_chat_is_read_as_by_the_models_own_processor(
    sdk: SdkDriver, server: Server, folder: Path, read: Sequence[Read]
) -> None:
    """The answer is greedy after the ids that the processor makes of the template's text and the picture."""
    chunk, image = read[1]
    url = f"data:image/png;base64,{base64.b64encode(chunk.data).decode()}"
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-any", max_retries=0) as client:
        said = client.chat.completions.create(
            model="tiny/sees", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0
        )
    processor: Any = AutoProcessor.from_pretrained(folder)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    picture = Image.open(io.BytesIO(chunk.data))
    ids = processor(text=text, images=[picture], return_tensors="np", add_special_tokens=False)["input_ids"][0]
    pad = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    own = np.full(image.num_tokens, pad) if image.positions is None else image.positions.ids
    at = next(at for at in range(len(ids)) if np.array_equal(ids[at : at + len(own)], own))
    prompt = tinker.ModelInput(
        chunks=[
            *([tinker.EncodedTextChunk(tokens=ids[:at].tolist())] if at else []),
            tinker.types.ImageChunk(data=chunk.data, format="png"),
            tinker.EncodedTextChunk(tokens=ids[at + len(own) :].tolist()),
        ]
    )
    sampler = sdk.base_sampler("tiny/sees")
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    same = sampler.sample(prompt, 1, params).result().sequences[0]
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(ids)
    assert said.choices[0].message.content == processor.tokenizer.decode(same.tokens, skip_special_tokens=True)


def test_a_count_of_positions_that_differs_is_refused_with_both(sdk: SdkDriver, read: Sequence[Read]) -> None:
    chunk, image = read[0]
    wrong = tinker.types.ImageChunk(data=chunk.data, format="png", expected_tokens=image.num_tokens + 1)
    prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[5]), wrong])
    count = image.num_tokens
    with pytest.raises(
        tinker.RequestFailedError, match=f"takes {count} tokens in vLLM and {count} in the HF processor"
    ):
        sdk.base_sampler("tiny/sees").compute_logprobs(prompt).result()
