"""vLLM, HF's processor and a client that only knows the size count every image alike, and read the same pixels."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinker_local.types import EncodedTextChunk, ModelInput

from tests.rendering.test_decoding import on_white

SHAPES = [
    (1, 1), (16, 16), (28, 28), (32, 32), (33, 33), (64, 64), (97, 389), (100, 150), (150, 100), (224, 224),
    (1, 60), (60, 1), (2, 399), (31, 700), (700, 31), (1000, 50), (50, 1000), (320, 240), (240, 320), (512, 512),
    (513, 511), (640, 480), (480, 640), (1024, 300), (800, 900),
]  # fmt: skip


@pytest.mark.rotated(3)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_25_shapes_count_alike_and_have_equal_pixels(rendering: Any, pictures: Any, mode: str) -> None:
    processor = rendering.processor.image_processor
    for seed, (width, height) in enumerate(SHAPES):
        image = pictures.noise(width, height, mode, seed)
        client = processor.get_number_of_image_patches(height, width, {}) // processor.merge_size**2
        chunk = pictures.chunk(image, expected_tokens=client)
        rendered = rendering.renderer.render(ModelInput(chunks=(chunk,)), "x").images[0].image
        hf = processor(images=[Image.fromarray(on_white(chunk.data))], return_tensors="np")
        assert rendered.num_tokens == client == hf["image_grid_thw"].prod() // processor.merge_size**2
        assert rendered.grid_thw == tuple(hf["image_grid_thw"][0])
        assert np.array_equal(rendered.pixel_values, hf["pixel_values"])
        vllm = rendered.vllm_item.get_data()
        # float32 on CPU, bfloat16 on CUDA
        assert torch.equal(vllm["pixel_values"], torch.from_numpy(hf["pixel_values"]).to(vllm["pixel_values"].dtype))
        assert vllm["image_grid_thw"].tolist() == list(rendered.grid_thw)


@pytest.mark.parametrize("count", range(10))
def test_prompts_with_several_images_equal_those_of_the_hf_processor(qwen3_vl: Any, pictures: Any, count: int) -> None:
    """Prompt `count` has 1 to 4 images between texts, some without any text between them."""
    random = np.random.default_rng(count)
    marker = "<|vision_start|><|image_pad|><|vision_end|>"
    images = [
        pictures.noise(*map(int, random.integers(20, 400, 2)), seed=100 * count + i) for i in range(1 + count % 4)
    ]
    texts = ["Look: " if random.integers(2) else "" for _ in images]
    hf = qwen3_vl.processor(
        text=["".join(text + marker for text in texts) + " What is it?"], images=images, return_tensors="np"
    )
    tokenize = qwen3_vl.processor.tokenizer.encode
    chunks: list[Any] = []
    text = ""
    for part, image in zip(texts, images, strict=True):
        ids = tokenize(text + part + "<|vision_start|>")
        chunks += [EncodedTextChunk(tokens=np.array(ids)), pictures.chunk(image)]
        text = "<|vision_end|>"
    chunks.append(EncodedTextChunk(tokens=np.array(tokenize(text + " What is it?"))))
    rendered = qwen3_vl.renderer.render(ModelInput(chunks=tuple(chunks)), "x")
    assert rendered.token_ids.tolist() == hf["input_ids"][0].tolist()
    assert np.array_equal(np.concatenate([p.image.pixel_values for p in rendered.images]), hf["pixel_values"])
    pad = qwen3_vl.renderer.tokens.pad
    covered = np.zeros(rendered.length, bool)
    for placement in rendered.images:
        covered[placement.offset : placement.offset + placement.image.num_tokens] = True
    assert np.array_equal(covered, rendered.token_ids == pad)
