"""One scenario through the official SDK over HTTP and through `InProcessBackend`: the same numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.types import AdamParams, Datum, EncodedTextChunk, ImageChunk, LoraConfig, ModelInput, SamplingParams

pytestmark = pytest.mark.more

ON_GPU = torch.cuda.is_available()
"""There the engines run in bfloat16, whose sums depend on what else is in a batch: samples may differ."""


def text_datum(tokens: list[int], weights: list[float] | None = None) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)},
    )


def image_datum(image: ImageChunk, count: int, answer: list[int], before: list[int]) -> Datum:
    """`before`, the image, then `answer`, of which every token but the first is a target."""
    tokens = [*before, *[0] * count, *answer]
    chunks = (EncodedTextChunk(tokens=before), image, EncodedTextChunk(tokens=answer[:-1]))
    return Datum(
        model_input=ModelInput(chunks=chunks),
        loss_fn_inputs={
            "target_tokens": [*[0] * (len(tokens) - len(answer)), *answer[1:]],
            "weights": [*[0.0] * (len(tokens) - len(answer)), *[1.0] * (len(answer) - 1)],
        },
    )


def run(driver: Any, base_model: str, data: list[Datum], prompt: ModelInput) -> dict[str, Any]:
    """Train three steps, sample before and after, save, resume with and without the optimizer, go on."""
    params = AdamParams(learning_rate=0.02, beta2=0.99, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
    seen: dict[str, Any] = {}
    model = driver.create(base_model, LoraConfig(rank=4, seed=7))
    base = driver.base_sampler(base_model)
    seen["base score"] = driver.score(base, prompt)
    first = driver.sampler(model)
    for i in range(3):
        logprobs, loss = driver.gradient(model, data, "cross_entropy")
        seen[f"loss {i}"] = loss
        seen[f"logprobs {i}"] = np.concatenate([p.ravel() for p in logprobs])
        driver.step(model, params)
    _, named = driver.named_sampler(model, "after")
    seen["first score"] = driver.score(first, prompt)
    seen["named score"] = driver.score(named, prompt)
    for temperature, top_p in ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0)):
        sampling = SamplingParams(max_tokens=6, temperature=temperature, top_p=top_p, seed=11, stop=())
        for i, (tokens, logprobs, reason) in enumerate(driver.sample(named, prompt, 3, sampling)):
            seen[f"tokens {temperature} {i}"] = tokens
            seen[f"sampled {temperature} {i}"] = logprobs
            assert reason == "length"
    saved = driver.save(model, "state")
    for optimizer in (True, False):
        resumed = driver.resume(saved, optimizer=optimizer)
        for i in range(2):
            seen[f"resumed {optimizer} {i}"] = driver.gradient(resumed, data, "cross_entropy")[1]
            driver.step(resumed, params)
    seen["forward only"] = driver.gradient(model, data, "cross_entropy", forward_only=True)[1]
    return seen


def check(seen: dict[str, Any], tolerance: float) -> None:
    """What must be true of either way in."""
    assert seen["loss 2"] < seen["loss 0"]
    np.testing.assert_allclose(seen["first score"], seen["base score"], atol=tolerance)
    assert np.nanmax(np.abs(seen["named score"] - seen["base score"])) > 0.01
    assert seen["resumed True 0"] == pytest.approx(seen["forward only"], rel=1e-2 if ON_GPU else 1e-5)
    assert seen["resumed False 0"] == pytest.approx(seen["forward only"], rel=1e-2 if ON_GPU else 1e-5)
    assert abs(seen["resumed True 1"] - seen["resumed False 1"]) > 1e-4


def assert_equal(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for key in one:
        if ON_GPU and key.startswith(("tokens", "sampled")):
            continue
        np.testing.assert_allclose(one[key], other[key], rtol=tolerance, atol=tolerance, err_msg=key)


def test_text_loop_is_the_same_over_http_and_in_process_on_fakes(fake_sdk: Any, fake_in_process: Any) -> None:
    data = [text_datum([5, 9, 20, 31, 7]), text_datum([40, 41, 42], [0.5, -0.25])]
    prompt = ModelInput.from_ints([5, 9, 20, 31])
    over_http = run(fake_sdk, "fake/bigram", data, prompt)
    in_process = run(fake_in_process, "fake/bigram", data, prompt)
    check(over_http, 1e-6)
    assert_equal(over_http, in_process, 1e-9)


def test_text_loop_is_the_same_over_http_and_in_process(real_sdk: Any, real_in_process: Any) -> None:
    data = [text_datum([5, 9, 20, 31, 7, 80, 2]), text_datum([40, 41, 42, 43], [0.5, -0.25, 1.0])]
    prompt = ModelInput.from_ints([5, 9, 20, 31])
    over_http = run(real_sdk, "tiny/text", data, prompt)
    check(over_http, 0.5 if ON_GPU else 1e-4)
    assert_equal(over_http, run(real_in_process, "tiny/text", data, prompt), 0.1 if ON_GPU else 1e-5)


def test_image_loop_is_the_same_over_http_and_in_process(real_sdk: Any, real_in_process: Any, picture: Any) -> None:
    image, count = picture(70, 50)
    data = [image_datum(image, count, [30, 31, 32], [5, 6]), text_datum([5, 9, 20, 31, 7])]
    prompt = ModelInput(chunks=(EncodedTextChunk(tokens=[5, 6]), image, EncodedTextChunk(tokens=[30])))
    over_http = run(real_sdk, "tiny/vision", data, prompt)
    check(over_http, 0.5 if ON_GPU else 1e-4)
    assert_equal(over_http, run(real_in_process, "tiny/vision", data, prompt), 0.1 if ON_GPU else 1e-5)
