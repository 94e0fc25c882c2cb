"""Promise 15: decoding, encoding, image work, training and disk run in other threads than the event loop's."""

import base64
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from tinker_local.backend import threads as thread_pools
from tinker_local.backend.control import sample_prompts, training_commands
from tinker_local.backend.http import bodies
from tinker_local.backend.storage.store import Store
from tinker_local.types import Datum, EncodedTextChunk, ForwardBackwardRequest, ImageChunk, ModelInput
from tinker_local.types.codec import encode_forward_backward_request

from tests.http.conftest import Api

COMPUTED = {"checkpoint_folder", "full_disk_explained", "next_save", "disk_problem"}
"""Of the store, without a look at the disk: a path made of a record, a context that turns errors into others, a number
that is counted, and what the last look at the disk has found."""


def png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def methods(owner: Any) -> list[str]:
    return [name for name in vars(owner) if not name.startswith("_") and callable(getattr(owner, name))]


class Threads:
    """Notes in which thread what is watched runs; the test, and so the event loop, is in the one that made this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        self.on_the_loop: list[str] = []
        self._loop = threading.current_thread()
        self._patch = monkeypatch.setattr

    def watch(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                self.seen.add(name)
                if threading.current_thread() is self._loop:
                    self.on_the_loop.append(name)
            return original(*args, **kwargs)

        self._patch(owner, name, noting)


@pytest.mark.mutation(
    "disk-on-the-loop",
    "SamplerVersions.remove_ephemeral",
    "await DISK.run(self._folders.remove, name)",
    "self._folders.remove(name)",
)
async def test_nothing_that_takes_long_runs_on_the_event_loop_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_local.backend.control import sampling_sessions
    from tinker_local.backend.control import training_commands as training_commands
    from tinker_local.backend.http import training_routes as route
    from tinker_local.backend.scheduling import train_scheduler
    from tinker_local.backend.training.trainer import Trainer

    threads = Threads(monkeypatch)
    of_the_store = set(methods(Store)) - COMPUTED - {"close"}
    for name in of_the_store:
        threads.watch(api.backend.store, name)
    for owner, name in [
        (zstandard, "frame_content_size"),
        (route, "parse_forward_backward_envelope"),
        (training_commands, "prepare_datum"),
        (train_scheduler, "to_output"),
        (train_scheduler, "encode_forward_backward_output"),
        (sampling_sessions, "encode_sample_output"),
        (api.engines["fake/bigram"].renderer, "render"),
        (api.backend.folders, "remove"),
        (api.sampler, "_read"),
        (api.sampler, "_sample"),
        *((api.trainer, name) for name in methods(Trainer) if name not in ("adapter_bytes", "close")),
    ]:
        threads.watch(owner, name)
    threads.watch(bodies, "validate", lambda body, model: len(body) > bodies.INLINE_BYTES)

    session = await api.session()
    model = await api.model(session, 0)
    image = ImageChunk(data=png(), format="png", expected_tokens=2)
    prompt = ModelInput(chunks=(EncodedTextChunk(tokens=[5, 6]), image))
    data = (Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [6, 7, 8, 9]}),)
    request = ForwardBackwardRequest(model_id=model, seq_id=1, data=data, loss_fn="cross_entropy")
    packed = zstandard.ZstdCompressor().compress(encode_forward_backward_request(request))
    sent = await api.send_gradient(packed, **{"Content-Encoding": "zstd"})
    await api.result(sent.json()["request_id"])
    await api.result(await api.step(model, 2))
    saved, named = await api.save(model, 3, "a"), await api.named(model, 4, "a")
    nameless = await api.nameless(model, 5, 0)
    await api.gradient(model, 7)  # 6 is missing: the step discards
    await api.failure(await api.step(model, 8))
    assert (await api.post("check_weights", {})).status_code == 200
    body = {"model_id": model, "seq_id": 9, "path": "a"}
    await api.result(await api.submit("save_weights_external", body))
    signed = f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
    assert (await api.get(signed)).status_code == 200
    await api.result(await api.gradient(model, 10))
    await api.result(await api.step(model, 11))
    assert await api.backend.autosaves.save(api.backend.runs.all_live()[0]) is not None

    chunks = [{"type": "image", "format": "png", "data": base64.b64encode(png()).decode()}]
    large = [{"type": "encoded_text", "tokens": [100] * 12_000}]
    await api.result(await api.submit("asample", api.sample_body(nameless, 0, prompt={"chunks": chunks})))
    assert (await api.post("asample", api.sample_body(nameless, 1, prompt={"chunks": large}))).status_code == 400
    body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": named}
    await api.score((await api.ok("create_sampling_session", body))["sampling_session_id"], 0)
    body = {"session_id": session, "model_seq_id": 1, "path": saved, "optimizer": True}
    await api.result(await api.submit("load_weights", body))
    for path in ("training_runs", "checkpoints", f"training_runs/{model}/checkpoints"):
        assert (await api.get(path)).status_code == 200
    await api.ok("weights_info", {"tinker_path": saved})
    assert (await api.post("weights_info", {"tinker_path": f"{saved}-not"})).status_code == 404
    assert (await api.get("sessions")).status_code == (await api.get(f"sessions/{session}")).status_code == 200
    await api.ok("sessions/search", {})
    checkpoint = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert (await api.http.post(f"{checkpoint}/publish")).status_code == 204
    assert (await api.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 7200})).status_code == 204
    copying = {"source_path": saved, "destination_project_id": "local"}
    await api.post("copy_weights", copying, headers={"X-Idempotency-Key": "k"})
    await api.poll("s-none:train:0:1")
    await api.poll("s-none:sample:0:1")
    assert (await api.delete(f"training_runs/{model}/checkpoints/weights/a")).status_code == 204
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    await api.post("session_heartbeat", {"session_id": session})
    await api.backend._look_at_disk()  # as the housekeeping does
    await api.backend.checkpoints.examine()  # as the start does

    assert threads.on_the_loop == []
    # By the housekeeping, once a minute, after a save that failed, and of curves, which had this method before.
    rare = {"forget_expired", "touch_training_run", "delete_checkpoint", "take_curve"}
    wanted = of_the_store - rare
    wanted |= {
        "parse_forward_backward_envelope",
        "prepare_datum",
        "to_output",
        "render",
        "validate",
        "remove",
    }
    wanted |= {"encode_forward_backward_output", "encode_sample_output", "frame_content_size", "_read", "_sample"}
    wanted |= set(methods(Trainer)) - {"adapter_bytes", "close"}
    wanted -= {"release_memory", "rotations", "module_outputs", "replayed"}  # after a sleep, while a model is loaded
    assert threads.seen >= wanted


def hold_renderer(api: Api, chunks: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Inputs of so many chunks are rendered only after the event that this returns. All of them fail, if it does not
    come in 30 seconds."""
    renderer, go, late = api.engines["fake/bigram"].renderer, threading.Event(), threading.Event()
    render = renderer.render

    def held(given: ModelInput, where: str) -> Any:
        if len(given.chunks) == chunks and not late.is_set() and not go.wait(30):
            late.set()
        assert len(given.chunks) != chunks or not late.is_set()
        return render(given, where)

    monkeypatch.setattr(renderer, "render", held)
    return go


async def test_images_that_take_long_hold_up_neither_text_nor_the_images_of_others_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five images of 64 megapixels of one session once kept another's text waiting for 30 seconds."""
    monkeypatch.setattr(
        sample_prompts, "RENDERING_IMAGES", thread_pools.Threads("render-images", 3)
    )  # as many as are slow
    slow, slow_too, text, other = [await api.base_sampler() for _ in range(4)]
    go = hold_renderer(api, 2, monkeypatch)
    image = {"type": "image", "data": base64.b64encode(png()).decode(), "format": "png"}
    words = {"type": "encoded_text", "tokens": [5]}

    async def sample(sampler: str, number: int, *chunks: Any) -> str:
        body = api.sample_body(sampler, number)
        return await api.submit("asample", {**body, "prompt": {"chunks": list(chunks)}})

    stuck = [await sample(slow, number, words, image) for number in range(5)]
    assert await api.result(await sample(other, 0, image))
    stuck += [await sample(slow_too, number, words, image) for number in range(5)]
    assert await api.result(await sample(text, 0, words))
    go.set()
    for request in stuck:
        assert await api.result(request)


async def test_images_to_train_on_hold_up_neither_text_nor_the_images_of_others_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_commands, "PREPARING_IMAGES", thread_pools.Threads("prepare-images", 3))
    sessions = [await api.session() for _ in range(3)]
    slow = [await api.model(sessions[0], number) for number in range(7)]
    text, other = [await api.model(session) for session in sessions[1:]]
    renderer = api.engines["fake/bigram"].renderer
    render = renderer.render
    go = hold_renderer(api, 3, monkeypatch)
    words = EncodedTextChunk(tokens=[5, 6])
    image = ImageChunk(data=png(), format="png")

    async def gradient(model: str, *chunks: Any) -> str:
        given = ModelInput(chunks=chunks)
        length = renderer.render(given, "").length if len(chunks) < 3 else length_of_both
        targets = {"target_tokens": [1] * length, "weights": [1.0] * length}
        datum = Datum(model_input=given, loss_fn_inputs=targets)
        request = ForwardBackwardRequest(model_id=model, seq_id=1, data=(datum,), loss_fn="cross_entropy")
        return str((await api.send_gradient(encode_forward_backward_request(request))).json()["request_id"])

    length_of_both = render(ModelInput(chunks=(words, image, words)), "").length
    stuck = [await gradient(model, words, image, words) for model in slow]
    assert await api.result(await gradient(text, words))
    assert await api.result(await gradient(other, words, image))
    go.set()
    for request_id in stuck:
        assert await api.result(request_id)
