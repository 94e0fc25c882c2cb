"""The renderer's promises: explicit positions, exact counts, each image once, errors for one input alone."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering import image_cache
from tinker_local.backend.rendering.image_cache import ImageCache
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)


def text(*ids: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=np.array(ids))


@pytest.mark.mutation(
    "chunks-joined-wrongly",
    "ModelRenderer.render",
    "                parts.append(chunk.tokens)\n",
    "                parts.append(chunk.tokens[1:] if parts else chunk.tokens)\n",
)
def test_text_alone_equals_the_plain_token_list_however_it_is_split(qwen3_vl: Any, text_renderer: Any) -> None:
    ids = np.random.default_rng(0).integers(0, 512, 50).astype(np.int32)
    for renderer in (qwen3_vl.renderer, text_renderer):
        for cuts in ([], [1], [49], [10, 20, 30]):
            chunks = tuple(EncodedTextChunk(tokens=part) for part in np.split(ids, cuts))
            rendered = renderer.render(ModelInput(chunks=chunks), "x")
            assert rendered.token_ids.dtype == np.int32
            assert np.array_equal(rendered.token_ids, ids)
            assert rendered.images == ()
            assert rendered.length == 50


@pytest.mark.mutation(
    "image-position-lost", "ModelRenderer.render", "ImagePlacement(offset, image)", "ImagePlacement(0, image)"
)
def test_positions_of_images_do_not_depend_on_how_text_is_split(qwen3_vl: Any, pictures: Any) -> None:
    image = pictures.chunk(pictures.noise(150, 100))
    whole = qwen3_vl.renderer.render(ModelInput(chunks=(text(1, 2, 3), image, text(4, 5))), "x")
    split = qwen3_vl.renderer.render(ModelInput(chunks=(text(1), text(2, 3), image, text(4), text(5))), "x")
    assert np.array_equal(whole.token_ids, split.token_ids)
    assert [p.offset for p in whole.images] == [p.offset for p in split.images] == [3]


def test_a_pad_id_that_comes_as_text_is_no_image(rendering: Any, pictures: Any) -> None:
    tokens = rendering.renderer.tokens
    chunks = (text(5, tokens.start, tokens.pad, tokens.end), pictures.chunk(pictures.noise(64, 64)), text(tokens.pad))
    rendered = rendering.renderer.render(ModelInput(chunks=chunks), "x")
    (placement,) = rendered.images
    assert placement.offset == 4
    assert rendered.length == 4 + placement.image.num_tokens + 1
    alone = rendering.renderer.render(ModelInput(chunks=(text(tokens.pad, tokens.pad),)), "x")
    assert alone.images == ()


@pytest.mark.mutation(
    "expected-tokens-not-compared",
    "ModelRenderer._image",
    "if chunk.expected_tokens not in (None, image.num_tokens):",
    "if False:",
)
def test_a_wrong_expected_tokens_fails_with_all_numbers(qwen3_vl: Any, pictures: Any) -> None:
    chunk = pictures.chunk(pictures.noise(150, 100), expected_tokens=14)
    message = (
        r"^data\[0\].model_input.chunks\[1\]: image of 150x100 pixels takes 15 tokens in vLLM and 15 in the HF "
        r"processor, but expected_tokens is 14$"
    )
    with pytest.raises(InvalidRequestError, match=message):
        qwen3_vl.renderer.render(ModelInput(chunks=(text(1), chunk)), "data[0].model_input")
    right = pictures.chunk(pictures.noise(150, 100), expected_tokens=15)
    assert qwen3_vl.renderer.render(ModelInput(chunks=(right,)), "x").length == 15


@pytest.mark.mutation(
    "engines-not-compared", "ModelRenderer._process", "if trainer.num_tokens != sampler.num_tokens:", "if False:"
)
def test_engines_that_do_not_agree_fail_with_all_numbers(
    qwen3_vl: Any, pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load_renderer(str(qwen3_vl.folder))
    assert renderer._images is not None
    hf = renderer._images.trainer
    process = hf.process
    monkeypatch.setattr(hf, "process", lambda image: replace(process(image), num_tokens=12))
    for expected, told in ((None, "not given"), (15, "15"), (12, "12")):
        chunk = pictures.chunk(pictures.noise(150, 100), expected_tokens=expected)
        message = f"takes 15 tokens in vLLM and 12 in the HF processor, but expected_tokens is {told}"
        with pytest.raises(InvalidRequestError, match=message):
            renderer.render(ModelInput(chunks=(chunk,)), "x")


def test_a_token_id_outside_the_vocabulary_is_refused_with_its_position(qwen3_vl: Any, text_renderer: Any) -> None:
    for renderer in (qwen3_vl.renderer, text_renderer):
        renderer.render(ModelInput(chunks=(text(511),)), "x")
        message = r"data\[2\].model_input.chunks\[1\].tokens\[2\]: token id 512 .* vocabulary of 512 tokens"
        with pytest.raises(InvalidRequestError, match=message):
            renderer.render(ModelInput(chunks=(text(1), text(5, 6, 512))), "data[2].model_input")


def test_images_on_a_text_model_are_refused(text_renderer: Any, pictures: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"p.chunks\[1\]: an image, but this base model reads text only"):
        text_renderer.render(ModelInput(chunks=(text(1), pictures.chunk(pictures.noise(9, 9)))), "p")


def test_image_pointers_are_refused_by_name(qwen3_vl: Any) -> None:
    chunk = ImageAssetPointerChunk(location="http://127.0.0.1/x.png", format="png")
    with pytest.raises(UnsupportedError, match=r"p.chunks\[0\]: image_asset_pointer"):
        qwen3_vl.renderer.render(ModelInput(chunks=(chunk,)), "p")


def test_an_input_without_chunks_is_refused(text_renderer: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"p\.chunks"):
        text_renderer.render(ModelInput(), "p")


@pytest.mark.parametrize(("width", "height"), [(1000, 3), (3, 1000)])
def test_an_aspect_ratio_that_the_processor_refuses_is_the_clients_error(
    qwen3_vl: Any, pictures: Any, width: int, height: int
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"p.chunks\[0\]: image of {width}x{height} pixels: .*200"):
        qwen3_vl.renderer.render(ModelInput(chunks=(pictures.chunk(pictures.noise(width, height)),)), "p")


def test_an_image_is_processed_once_however_many_threads_ask(qwen3_vl: Any, pictures: Any) -> None:
    chunks = [pictures.chunk(pictures.noise(300, 200, seed=seed)) for seed in (1000, 1001)]
    before = qwen3_vl.renderer.images_processed
    gate = threading.Barrier(16)

    def render(index: int) -> Any:
        gate.wait()
        chunk = chunks[index % 2]
        return qwen3_vl.renderer.render(ModelInput(chunks=(text(1), chunk, text(2), chunk)), "x")

    with ThreadPoolExecutor(16) as pool:
        rendered = list(pool.map(render, range(16)))
    assert qwen3_vl.renderer.images_processed - before == 2
    assert len({id(placement.image) for r in rendered for placement in r.images}) == 2


def test_a_bad_image_fails_its_own_input_alone(qwen3_vl: Any, pictures: Any) -> None:
    good = pictures.chunk(pictures.noise(90, 90))
    bad = good.model_copy(update={"data": good.data[: len(good.data) // 2]})

    def render(index: int) -> Any:
        return qwen3_vl.renderer.render(ModelInput(chunks=(bad if index % 2 else good,)), f"data[{index}]")

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(render, index) for index in range(8)]
    for index, future in enumerate(futures):
        if index % 2:
            with pytest.raises(InvalidRequestError, match=rf"data\[{index}\].chunks\[0\]: image of 90x90 pixels"):
                future.result()
        else:
            assert len(future.result().images) == 1


def an_image(name: str, num_bytes: int) -> RenderedImage:
    return RenderedImage(name, 1, np.zeros((0, 1), np.float32), (1, 1, 1), item_bytes=num_bytes)


def test_the_cache_keeps_the_images_used_last_within_its_bytes() -> None:
    cache = ImageCache(100)
    made: list[str] = []

    def get(name: str, num_bytes: int = 40) -> RenderedImage:
        def make() -> RenderedImage:
            made.append(name)
            return an_image(name, num_bytes)

        return cache.get(name, make)

    for name in ("a", "b", "a", "c", "a", "b"):
        assert get(name).content_hash == name
    assert made == ["a", "b", "c", "b"]
    get("huge", 1000)
    get("b")
    assert made[4:] == ["huge"]
    assert cache.images_processed == 5


def test_whoever_waits_for_an_image_that_fails_gets_the_error_and_the_next_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, waiting, go = threading.Event(), threading.Event(), threading.Event()

    class WatchedFuture(Future[RenderedImage]):
        def result(self, timeout: float | None = None) -> RenderedImage:
            waiting.set()
            return super().result(timeout)

    monkeypatch.setattr(image_cache, "Future", WatchedFuture)
    cache = ImageCache(100)

    def fail() -> RenderedImage:
        started.set()
        assert go.wait(60)
        raise ValueError("broken")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", fail)
        assert started.wait(60)
        second = pool.submit(cache.get, "a", lambda: an_image("a", 1))
        assert waiting.wait(60)
        go.set()
        for future in (first, second):
            with pytest.raises(ValueError, match="broken"):
                future.result(60)
    assert cache.get("a", lambda: an_image("a", 1)).content_hash == "a"


def test_rendering_leaves_the_process_as_it_was(qwen3_vl: Any) -> None:
    import os
    import random

    import torch

    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),  # type: ignore[index]
        torch.set_num_threads,
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    load_renderer(str(qwen3_vl.folder))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index]
    assert torch.set_num_threads is before[3]
    assert {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} == environment
