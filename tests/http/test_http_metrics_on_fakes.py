"""`GET /metrics`: every number goes up by exactly what was done, and no other number moves."""

import base64
import io
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

from tests.http.conftest import Api, StartApi

BASE = "fake/bigram"
KEY = "tml-correct-horse-battery"

Series = dict[tuple[str, str, str], float]
"""Values by metric without its prefix, model, and the other label's value ("" if there is none)."""

COUNTERS = {
    "images_rendered_total": {""},
    "images_encoded_total": {"sampler", "trainer"},
    "samples_total": {""},
    "prompt_tokens_total": {""},
    "sampled_tokens_total": {""},
    "trained_tokens_total": {""},
    "optimizer_steps_total": {""},
    "submits_refused_total": {""},
    "sampler_sleeps_total": {""},
    "ephemeral_versions_dropped_total": {""},
    "in_flight_versions_total": {""},
    "in_flight_tokens_total": {""},
    "tokens_on_older_keys_total": {""},
    "trainer_restarts_total": {""},
    "sampler_restarts_total": {""},
    "operations_failed_total": {"user", "server", "unknown"},
}
GAUGES = {
    "requests_running": {"sampler", "trainer"},
    "requests_waiting": {"sampler", "trainer"},
    "adapters": {""},
    "sampler_versions": {""},
    "sampler_asleep": {""},
    "sequences": {""},
    "kv_cache_used_ratio": {""},
    "ephemeral_version_bytes": {""},
    "trainer_up": {""},
    "sampler_up": {""},
}


def parsed(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            name = sample.name.removeprefix("tinker_local_")
            assert name != sample.name
            labels = dict(sample.labels)
            if "model" not in labels or family.type == "histogram":
                continue  # test_http_quotas_on_fakes.py, test_http_server_metrics_on_fakes.py
            assert family.type == ("counter" if name.endswith("_total") else "gauge")
            key = (name, labels.pop("model"), labels.popitem()[1] if labels else "")
            assert not labels
            assert key not in found
            found[key] = sample.value
    return found


async def metrics(api: Api) -> Series:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return parsed(answer.text)


def moved(before: Series, after: Series) -> dict[tuple[str, str], float]:
    """What changed, of the one model that did."""
    assert before.keys() == after.keys()
    models = {key[1] for key in after if after[key] != before[key]}
    assert len(models) <= 1
    return {(key[0], key[2]): after[key] - before[key] for key in after if after[key] != before[key]}


def png(seed: int, width: int = 70, height: int = 40) -> bytes:
    """An image of 3 times 2 cells, which the fake renderer counts as 6 positions."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image_prompt(data: bytes) -> dict[str, Any]:
    image = {"type": "image", "format": "png", "data": base64.b64encode(data).decode()}
    return {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, image, {"type": "encoded_text", "tokens": [7]}]}


def image_datum(data: bytes) -> Datum:
    """9 positions."""
    chunks = (EncodedTextChunk(tokens=[5, 6]), ImageChunk(data=data, format="png"), EncodedTextChunk(tokens=[7]))
    return Datum(
        model_input=ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [9] * 9, "weights": [0.0] * 8 + [1.0]}
    )


async def test_metrics_are_prometheus_text_with_every_series_from_the_start_on_fakes(start_api: StartApi) -> None:
    api = await start_api(models=(BASE, "fake/other", f"fake/alias={BASE}"))
    series = await metrics(api)
    kinds = COUNTERS | GAUGES
    # Weights under two names are counted once.
    assert series.keys() == {
        (name, model, value) for name in kinds for value in kinds[name] for model in (BASE, "fake/other")
    }
    assert {key for key, value in series.items() if value} == {
        (kind, name, "") for kind in ("trainer_up", "sampler_up") for name in (BASE, "fake/other")
    }


async def test_samples_are_counted_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    before = await metrics(api)
    found = await api.result(await api.sample(sampler, 0, [5, 9, 20], num_samples=3))
    tokens = sum(len(sequence.tokens) for sequence in found.sequences)
    assert moved(before, await metrics(api)) == {
        ("samples_total", ""): 3,
        ("prompt_tokens_total", ""): 3,
        ("sampled_tokens_total", ""): tokens,
    }
    body = api.sample_body(sampler, 0, [5, 9, 20], num_samples=3)
    await api.result(await api.submit("asample", body))  # the same request again is the same sample
    assert moved(before, await metrics(api))[("samples_total", "")] == 3


async def test_an_image_is_counted_once_by_renderer_sampler_and_trainer_on_fakes(api: Api) -> None:
    sampler, model = await api.base_sampler(), await api.model()
    before = await metrics(api)
    for number in range(3):
        await api.result(await api.submit("asample", api.sample_body(sampler, number, prompt=image_prompt(png(1)))))
    images = {("images_rendered_total", ""): 1, ("images_encoded_total", "sampler"): 1}
    after = await metrics(api)
    changed = moved(before, after)
    assert {key: changed[key] for key in changed if key[0].startswith("images")} == images
    assert changed[("prompt_tokens_total", "")] == 3 * 9
    await api.result(await api.gradient(model, 1, [image_datum(png(1))] * 2))
    assert moved(after, await metrics(api)) == {
        ("images_encoded_total", "trainer"): 1,
        ("trained_tokens_total", ""): 18,
    }
    after = await metrics(api)
    await api.result(await api.gradient(model, 2, [image_datum(png(2)), image_datum(png(1))], forward_only=True))
    assert moved(after, await metrics(api)) == {
        ("images_rendered_total", ""): 1,
        ("images_encoded_total", "trainer"): 1,
    }


async def test_training_is_counted_on_fakes(api: Api, make_datum: Any) -> None:
    before = await metrics(api)
    session = await api.session()
    model = await api.model(session)
    await api.result(await api.gradient(model, 1, [make_datum([5, 9, 20, 31]), make_datum([5, 9])]))
    await api.result(await api.gradient(model, 2, [make_datum([5, 9, 20])], forward_only=True))
    await api.result(await api.step(model, 3))
    changed = {("trained_tokens_total", ""): 4, ("optimizer_steps_total", ""): 1, ("adapters", ""): 1}
    assert moved(before, await metrics(api)) == changed
    sampler = await api.nameless(model, 4, 0)
    size = api.backend.folders.size(f"{model}/4#1")
    saved = {("sampler_versions", ""): 1, ("ephemeral_version_bytes", ""): size}
    assert moved(before, await metrics(api)) == {**changed, **saved}
    await api.result(await api.sample(sampler, 0))
    await api.post(f"sessions/{session}/finish", {})
    after = await metrics(api)
    assert after[("adapters", BASE, "")] == after[("sampler_versions", BASE, "")] == 0
    assert after[("ephemeral_version_bytes", BASE, "")] == 0
    assert after[("trained_tokens_total", BASE, "")] == 4


async def test_failures_are_counted_by_category_on_fakes(
    api: Api, make_datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampler = await api.model(), await api.base_sampler()
    before = await metrics(api)
    await api.failure(await api.gradient(model, 1, [make_datum([5, 9, 20])], loss_fn="no_such_loss"))
    assert moved(before, await metrics(api)) == {("operations_failed_total", "user"): 1}
    await api.failure(await api.step(model, 2))  # what it would step with failed
    await api.failure(await api.sample(sampler, 0, [100_000]))
    assert moved(before, await metrics(api)) == {("operations_failed_total", "user"): 3}

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(api.trainer, "optim_step", broken)
    await api.failure(await api.step(model, 3))
    monkeypatch.setattr(api.trainer, "forward_backward", broken)
    await api.failure(await api.gradient(model, 4))
    assert moved(before, await metrics(api)) == {
        ("operations_failed_total", "user"): 3,
        ("operations_failed_total", "server"): 2,
    }


async def test_running_and_waiting_requests_are_told_apart_on_fakes(api: Api) -> None:
    model, sampler = await api.model(), await api.base_sampler()
    before = await metrics(api)
    api.trainer.hold.clear()
    api.sampler.hold.clear()
    gradients = [await api.gradient(model, 1)]
    await api.until(lambda: api.trainer.entered)
    gradients += [await api.gradient(model, number) for number in (2, 3)]
    samples = [await api.sample(sampler, number) for number in range(4)]
    await api.until(lambda: api.sampler.running == 4)
    assert moved(before, await metrics(api)) == {
        ("requests_running", "trainer"): 1,
        ("requests_waiting", "trainer"): 2,
        ("requests_running", "sampler"): 4,
        ("sequences", ""): 4,
    }
    cancelled = await api.sample(sampler, 4)
    await api.until(lambda: api.sampler.running == 5)
    api.backend.operations.cancel(cancelled)
    await api.until(lambda: api.sampler.running == 4)
    assert (await metrics(api))[("requests_running", BASE, "sampler")] == 4
    api.trainer.hold.set()
    api.sampler.hold.set()
    for request in (*gradients, *samples):
        await api.result(request)
    changed = moved(before, await metrics(api))
    assert not [key for key in changed if key[0].startswith("requests")]
    assert changed[("samples_total", "")] == 4
    assert changed[("operations_failed_total", "user")] == 1


async def test_sample_that_is_rendered_is_waiting_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, go = api.engines[BASE].renderer, threading.Event()
    render = renderer.render

    def slow(*arguments: Any) -> Any:
        assert go.wait(60)
        return render(*arguments)

    monkeypatch.setattr(renderer, "render", slow)
    sampler = await api.base_sampler()
    request = await api.sample(sampler, 0)
    series = await metrics(api)
    assert (series[("requests_waiting", BASE, "sampler")], series[("requests_running", BASE, "sampler")]) == (1, 0)
    go.set()
    await api.result(request)
    series = await metrics(api)
    assert (series[("requests_waiting", BASE, "sampler")], series[("requests_running", BASE, "sampler")]) == (0, 0)


async def test_metrics_need_the_key_that_all_requests_need_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=[KEY])
    for headers in ({}, {"X-API-Key": "tml-another"}):
        answer = await api.http.get("/metrics", headers=headers)
        assert answer.status_code == 401
        assert BASE not in answer.text
    assert (await api.http.get("/metrics", headers={"X-API-Key": KEY})).status_code == 200


async def test_metrics_lie_beside_the_api_and_wait_for_the_models_on_fakes(api: Api) -> None:
    assert (await api.get("metrics")).status_code == 404
    api.backend.ready = False
    try:
        assert (await api.http.get("/metrics")).status_code == 503
        assert api.backend.metrics() == {}
    finally:
        api.backend.ready = True
    unstarted = InProcessBackend([ModelSource(BASE, BASE)], BackendOptions(data_dir=api.backend.options.data_dir))
    assert unstarted.metrics() == {}


async def test_two_backends_of_a_process_share_no_number_on_fakes(start_api: StartApi, tmp_path: Any) -> None:
    one, other = await start_api(), await start_api(data_dir=tmp_path / "other")
    before = await metrics(other)
    await one.result(await one.sample(await one.base_sampler(), 0))
    assert moved(await metrics(other), before) == {}
    assert (await metrics(one))[("samples_total", BASE, "")] == 1
    from prometheus_client import REGISTRY

    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("tinker_local")]


async def test_in_process_metrics_are_the_same_numbers_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.result(await api.gradient(model, 1, [image_datum(png(1))]))
    await api.result(await api.step(model, 2))
    await api.result(await api.sample(await api.nameless(model, 3, 0), 0, num_samples=2))
    await api.failure(await api.sample(await api.base_sampler(), 0, [100_000]))
    (plain,) = api.backend.metrics().values()
    numbers = {name: value for name, value in asdict(plain).items() if not isinstance(value, Mapping)}
    over_http = await metrics(api)
    assert sum(numbers.values()) + sum(plain.failures.values()) == sum(over_http.values())
    for name in ("images_rendered", "trained_tokens", "optimizer_steps", "samples", "sampled_tokens"):
        assert over_http[(f"{name}_total", BASE, "")] == numbers[name] > 0
    assert over_http[("images_encoded_total", BASE, "trainer")] == plain.images_encoded_by_trainer == 1
    assert over_http[("images_encoded_total", BASE, "sampler")] == plain.images_encoded_by_sampler == 0
    assert plain.failures == {"user": 1}
    assert (plain.adapters, plain.sampler_versions) == (1, 1)
