"""Prompts that name their images, on the way through the server."""

import io
import threading
from pathlib import Path

import pytest
from PIL import Image
from tinker_local.backend.control.sample_prompts import MAX_FETCHED
from tinker_local.backend.rendering.image_assets import MAX_PROMPTS, ImageAssets

from tests.http.conftest import StartApi


async def test_so_many_prompts_at_once_read_images_from_one_place_and_others_are_sampled_on_fakes(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api(image_folder=tmp_path)
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    reading: list[str] = []
    answer = threading.Event()

    def read(assets: ImageAssets, location: str, field: str) -> bytes:
        reading.append(location)
        assert answer.wait(60)
        return picture.getvalue()

    monkeypatch.setattr(ImageAssets, "_read", read)
    sampler = await api.base_sampler()
    pointer = {"type": "image_asset_pointer", "location": "a.png", "format": "png"}
    prompt = {"chunks": [pointer, {"type": "encoded_text", "tokens": [5, 9]}]}
    waiting = [await api.sample(sampler, number, prompt=prompt) for number in range(1, 13)]
    await api.until(lambda: len(reading) == MAX_FETCHED < MAX_PROMPTS)
    assert await api.result(await api.sample(sampler, 13))
    assert len(reading) == MAX_FETCHED < MAX_PROMPTS
    answer.set()
    for request in waiting:
        assert await api.result(request)
    assert len(reading) == len(waiting)
