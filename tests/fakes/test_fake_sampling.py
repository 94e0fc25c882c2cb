"""The fake sampler and renderer keep their contracts, and agree with the fake trainer."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.fakes import EOS_ID, FakeModel, FakeRenderer, FakeSampler, FakeTrainer, decode, encode
from tinker_local.backend.fakes.fake_model import Features
from tinker_local.backend.fakes.fake_sampler import PROMPT_ROWS_AT_ONCE
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import (
    AdamParams,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    SampleOutput,
    SamplingParams,
    UnsupportedError,
)

MODEL = FakeModel()
PROMPT = RenderedInput(np.array(encode("What is"), np.int32))


def png(width: int, height: int, colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def image_input(data: bytes, expected_tokens: int | None = None) -> ModelInput:
    text = EncodedTextChunk(tokens=np.array([MODEL.image_pad_id, 65]))
    return ModelInput(chunks=(text, ImageChunk(data=data, format="png", expected_tokens=expected_tokens), text))


def trained(folder: Path) -> tuple[FakeTrainer, AdapterVersion]:
    """A trainer with an adapter "m" that differs much from the base, and a version of it on disk."""
    trainer = FakeTrainer(MODEL)
    trainer.create_adapter("m", LoraConfig(rank=4, seed=0))
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, 200)
    datum = TrainDatum(RenderedInput(tokens[:-1].astype(np.int32)), tokens[1:], {"weights": np.ones(199, np.float32)})
    for _ in range(3):
        trainer.forward_backward([TrainWork("m", [datum], "cross_entropy")])
        trainer.optim_step("m", AdamParams(learning_rate=0.1))
    state = trainer.capture("m", optimizer=False)
    folder.mkdir()
    save_file(dict(state.tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(state.peft_config()))
    return trainer, AdapterVersion("m-1", folder)


async def sample(version: AdapterVersion | None = None, prompt: RenderedInput = PROMPT, **options: Any) -> SampleOutput:
    params = {name: options.pop(name) for name in list(options) if name not in ("num_samples", "prompt_logprobs")}
    sampler = FakeSampler(MODEL)
    try:
        return await sampler.sample(SampleWork(prompt, version, SamplingParams(**params), **options))
    finally:
        await sampler.close()


@pytest.mark.parametrize("with_image", [False, True])
async def test_fake_sampler_and_trainer_agree(tmp_path: Path, with_image: bool) -> None:
    trainer, version = trained(tmp_path / "v")
    prompt = FakeRenderer(MODEL).render(image_input(png(64, 64)), "prompt") if with_image else PROMPT
    for adapter_id, used in [("m", version), (None, None)]:
        result = await sample(used, prompt, num_samples=3, prompt_logprobs=True, max_tokens=20, seed=1)
        assert result.prompt_logprobs is not None
        assert np.isnan(result.prompt_logprobs[0])
        np.testing.assert_allclose(result.prompt_logprobs[1:], trainer.logprobs(adapter_id, prompt), atol=1e-6)
        for sequence in result.sequences:
            whole = RenderedInput(np.concatenate([prompt.token_ids, sequence.tokens]), prompt.images)
            expected = trainer.logprobs(adapter_id, whole)[-len(sequence.tokens) :]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-6)


async def test_fake_sampler_samples_an_immutable_version(tmp_path: Path) -> None:
    trainer, version = trained(tmp_path / "v")
    sampler = FakeSampler(MODEL)
    work = SampleWork(PROMPT, version, SamplingParams(seed=3, max_tokens=30))
    before = await sampler.sample(work)
    trainer.optim_step("m", AdamParams(learning_rate=1.0))
    assert (await sampler.sample(work)).sequences == before.sequences
    assert (await sampler.sample(SampleWork(PROMPT, None, work.params))).sequences != before.sequences
    await sampler.remove_version(version)
    assert (await sampler.sample(work)).sequences == before.sequences  # loaded again
    await sampler.close()


async def test_fake_sampler_refuses_a_version_that_does_not_match(tmp_path: Path) -> None:
    trainer, version = trained(tmp_path / "v")
    tensors = {f"x.{name}": tensor for name, tensor in trainer.capture("m", optimizer=False).tensors.items()}
    save_file(tensors, version.path / "adapter_model.safetensors")
    with pytest.raises(InvalidRequestError, match="matches no module"):
        await FakeSampler(MODEL).load_version(version)


async def test_fake_seeds_repeat_and_differ_between_samples() -> None:
    options = {"max_tokens": 30, "num_samples": 4, "stop": ()}
    for seed in (0, -5, 10**40):
        first, again = await sample(seed=seed, **options), await sample(seed=seed, **options)
        assert first.sequences == again.sequences
        assert len({tuple(sequence.tokens) for sequence in first.sequences}) == 4
    one, two = await sample(seed=1, **options), await sample(seed=2, **options)
    assert not {tuple(s.tokens) for s in one.sequences} & {tuple(s.tokens) for s in two.sequences}
    assert (await sample(**options)).sequences != (await sample(**options)).sequences
    # The count of samples does not change the first one.
    alone = await sample(seed=1, max_tokens=30, stop=())
    assert np.array_equal(alone.sequences[0].tokens, one.sequences[0].tokens)


async def test_fake_logprobs_are_of_the_whole_vocabulary_at_the_temperature() -> None:
    base = MODEL.base[: MODEL.vocab_size]
    for temperature in (0.5, 1.0, 2.0, 0.0):
        result = await sample(temperature=temperature, top_k=5, top_p=0.6, seed=0, max_tokens=50, stop=())
        tokens = result.sequences[0].tokens
        logits = base[np.concatenate([PROMPT.token_ids[-1:], tokens[:-1]])] / (temperature or 1.0)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(result.sequences[0].logprobs, expected[np.arange(50), tokens], atol=1e-6)
        ranks = (logits > logits[np.arange(50), tokens][:, None]).sum(-1)
        assert ranks.max() == 0 if temperature == 0 else ranks.max() < 5


async def test_fake_top_p_keeps_the_smallest_set() -> None:
    logits = MODEL.base[PROMPT.token_ids[-1]]
    p = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-p)
    nucleus = set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.2)) + 1].tolist())
    result = await sample(top_p=0.2, num_samples=400, max_tokens=1, seed=0, stop=())
    drawn = {int(sequence.tokens[0]) for sequence in result.sequences}
    assert drawn <= nucleus
    assert len(drawn) > len(nucleus) / 2


async def test_fake_frequencies_follow_the_probabilities() -> None:
    result = await sample(num_samples=4000, max_tokens=1, seed=0, stop=())
    counts = np.bincount([int(s.tokens[0]) for s in result.sequences], minlength=MODEL.vocab_size) / 4000
    logits = MODEL.base[PROMPT.token_ids[-1]]
    p = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(counts - p).max() < 5 * np.sqrt(0.25 / 4000)


async def test_fake_stops_at_eos_strings_and_ids_and_never_for_an_empty_list() -> None:
    plain = await sample(seed=0, max_tokens=2000)
    assert plain.sequences[0].stop_reason == "stop"
    assert plain.sequences[0].tokens[-1] == EOS_ID
    endless = await sample(seed=0, max_tokens=2000, stop=())
    tokens = endless.sequences[0].tokens
    assert endless.sequences[0].stop_reason == "length"
    assert tokens.size == 2000
    end = int(np.flatnonzero(tokens == EOS_ID)[0])
    assert np.array_equal(tokens[: end + 1], plain.sequences[0].tokens)
    text = decode(tokens[3:5])
    for stop in (text, ("never", text), (int(tokens[4]),)):
        stopped = (await sample(seed=0, max_tokens=2000, stop=stop)).sequences[0]
        assert stopped.stop_reason == "stop"
        assert np.array_equal(stopped.tokens, tokens[: stopped.tokens.size])
        assert stopped.tokens.size <= 5


async def test_fake_max_tokens_absent_means_up_to_the_context() -> None:
    model = FakeModel(max_context_length=64)
    sampler = FakeSampler(model)
    result = await sampler.sample(SampleWork(PROMPT, None, SamplingParams(stop=())))
    assert result.sequences[0].tokens.size == 64 - PROMPT.length
    with pytest.raises(InvalidRequestError, match="64"):
        await sampler.sample(SampleWork(RenderedInput(np.ones(64, np.int32)), None, SamplingParams()))
    await sampler.close()


async def test_fake_sampler_leaves_the_loop_free_and_stops_when_cancelled() -> None:
    sampler = FakeSampler(FakeModel(max_context_length=10**7))
    tasks = [asyncio.create_task(sampler.sample(SampleWork(PROMPT, None, SamplingParams(stop=())))) for _ in range(2)]
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not any(task.done() for task in tasks)  # the loop went on beside them
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Both threads are free again.
    short = SampleWork(PROMPT, None, SamplingParams(max_tokens=1))
    await asyncio.wait_for(asyncio.gather(sampler.sample(short), sampler.sample(short)), 60)
    await sampler.close()


def test_fake_renderer_counts_places_and_caches_images() -> None:
    renderer = FakeRenderer(MODEL)
    rendered = renderer.render(image_input(png(65, 32), expected_tokens=3), "prompt")
    pad = MODEL.image_pad_id
    assert rendered.token_ids.tolist() == [pad, 65, pad, pad, pad, pad, 65]
    assert [(p.offset, p.image.num_tokens, p.image.grid_thw) for p in rendered.images] == [(2, 3, (1, 1, 3))]
    for _ in range(3):
        renderer.render(image_input(png(65, 32)), "prompt")
    renderer.render(image_input(png(65, 32, "blue")), "prompt")
    assert renderer.images_processed == 2


def test_fake_renderer_names_field_and_numbers() -> None:
    renderer = FakeRenderer(MODEL)
    data = png(64, 64)
    cases = [
        (image_input(data, expected_tokens=5), r"data\[3\].model_input.chunks\[1\].expected_tokens: .* 5 .* 4"),
        (image_input(data[:60]), r"chunks\[1\].data: the image cannot be decoded"),
        (image_input(png(10_000, 10_000)), r"10000 × 10000 pixels"),
        (ModelInput.from_ints([1, 512]), r"chunks\[0\].tokens\[1\]: id 512 .* 512"),
    ]
    for model_input, message in cases:
        with pytest.raises(InvalidRequestError, match=message):
            renderer.render(model_input, "data[3].model_input")
    pointer = ImageAssetPointerChunk(location="https://x/y.png", format="png")
    with pytest.raises(UnsupportedError):
        renderer.render(ModelInput(chunks=(pointer,)), "prompt")


def test_fake_pad_id_as_text_is_text_and_images_matter() -> None:
    trainer, renderer = FakeTrainer(MODEL), FakeRenderer(MODEL)
    pad = MODEL.image_pad_id

    def last_logprobs(model_input: ModelInput) -> np.ndarray:
        return trainer.logprobs(None, renderer.render(model_input, "prompt"))[-2:]

    after = EncodedTextChunk(tokens=np.array([65, 66, 67]))
    red, blue = (
        ModelInput(chunks=(ImageChunk(data=png(32, 32, colour), format="png"), after)) for colour in ("red", "blue")
    )
    text = ModelInput(chunks=(EncodedTextChunk(tokens=np.array([pad])), after))
    values = [last_logprobs(one) for one in (red, blue, text)]
    assert not any(np.allclose(values[i], values[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert np.array_equal(values[2], last_logprobs(ModelInput(chunks=(after,))))
    assert np.array_equal(values[0], last_logprobs(red))


async def test_fake_prompts_are_scored_in_parts_between_which_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The top 256 of eight prompts of 4,000 positions once kept another's sample waiting for as long as all took."""
    rows, logits = [], FakeModel.logits

    def noted(model: FakeModel, features: Features, *args: Any) -> Any:
        rows.append(len(features.tokens))
        return logits(model, features, *args)

    monkeypatch.setattr(FakeModel, "logits", noted)
    sampler = FakeSampler(MODEL)
    prompt = RenderedInput(np.arange(1, 301, dtype=np.int32))
    output = await sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=1), topk_prompt_logprobs=5))
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs.token_ids.shape == (300, 5)
    assert sum(rows) == 299 + 1
    assert max(rows) <= PROMPT_ROWS_AT_ONCE
