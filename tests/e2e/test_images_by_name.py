"""An image that a prompt names is the image itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_local.types.sdk import to_sdk

from tests.conftest import VISION


def test_an_image_by_name_samples_as_its_bytes_do(real_server: Any, real_sdk: Any, picture: Callable[..., Any]) -> None:
    chunk, count = picture(96, 64)
    (real_server.images / "a.png").write_bytes(chunk.data)
    named = tinker.types.ImageAssetPointerChunk(location="a.png", format="png", expected_tokens=count)
    sampler = real_sdk.service.create_sampling_client(base_model=VISION)
    text = [tinker.types.EncodedTextChunk(tokens=tokens) for tokens in ([5, 9, 20], [31, 7])]
    scored = [
        sampler.compute_logprobs(tinker.ModelInput(chunks=[text[0], image, text[1]])).result()
        for image in (to_sdk(chunk), named)
    ]
    assert len(scored[0]) == 5 + count
    np.testing.assert_array_equal(scored[0][1:], scored[1][1:])
    outside = tinker.types.ImageAssetPointerChunk(location=str(real_server.data_dir), format="png")
    with pytest.raises(tinker.TinkerError, match="is not a file below the folder of images"):
        sampler.compute_logprobs(tinker.ModelInput(chunks=[outside])).result()
