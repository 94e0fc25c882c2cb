"""What is fuzzed, class by class: how a case is made, and what must not happen when the server reads it.

Most cases go straight into the parsers, which may only raise an `ApiError` of category user. Every `THROUGH_APP`-th
goes through the whole app, in this process, where no 5xx and no failure of category server may come back.
"""

import asyncio
import io
import json
import random
import socket
import tempfile
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.http import bodies, future_routes
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.rendering.decoding import ImageError, decode_image
from tinker_local.types import ApiError
from tinker_local.types.codec import parse_forward_backward_envelope
from tinker_local.types.wire import tinker_local_wire_pb2 as wire

from tests.fuzz import mutate
from tests.fuzz.corpus import corpus

MODEL = "fake/bigram"
THROUGH_APP = 8
RENEW = 2000
"""Cases after which the session is ended and another one opened, so that nothing adds up that a user would not keep."""


class Fault(AssertionError):
    """What must not happen."""


def short_polls() -> ExitStack:
    """Long polls of this process end after 0.02 s, until this is closed."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(future_routes, "LONG_POLL_SECONDS", 0.02))
    return stack


class App:
    """The app over fakes in its own event loop, asked without a socket."""

    def __init__(self) -> None:
        self._short_polls = short_polls()
        self._scratch = tempfile.TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        options = BackendOptions(data_dir=Path(self._scratch.name), gap_patience=1.0, failure_pause=0.0)
        self._backend = InProcessBackend([ModelSource(MODEL, MODEL)], options, load=load_fake)
        self._loop.run_until_complete(self._backend.start())
        self._app = create_app(self._backend)
        self.names: dict[str, str] = {}
        self.renew()

    def close(self) -> None:
        self._loop.run_until_complete(self._backend.close())
        self._loop.close()
        self._scratch.cleanup()
        self._short_polls.close()

    def ask(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Status and content. `path` begins with /api/v1."""
        return self._loop.run_until_complete(self._ask(method, path, body, headers))

    async def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        target, _, query = path.partition("?")
        sent = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
        sent += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": sent,
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "scheme": "http",
            "root_path": "",
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        status, content = 0, bytearray()

        async def receive() -> Any:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            content.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, bytes(content)

    def check(self, method: str, path: str, body: bytes, **headers: str) -> None:
        """Ask, and poll once what was promised; Fault for what must not happen."""
        status, content = self.ask(method, path, body, **headers)
        if status >= 500 or status in (0, 409):
            raise Fault(f"{method} {path}: {status} {content[:300]!r}")
        if status == 200 and b'"request_id"' in content:
            found = json.loads(content)
            if isinstance(found, dict) and isinstance(found.get("request_id"), str):
                asked = json.dumps({"request_id": found["request_id"]}).encode()
                status, content = self.ask("POST", "/api/v1/retrieve_future", asked, content_type="application/json")
                if status >= 500:
                    raise Fault(f"retrieve_future: {status} {content[:300]!r}")
                if b"is gone: its session has ended" in content:  # by an earlier case, so that this is as it should be
                    self.renew()
                elif content.startswith(b'{"error"') and json.loads(content)["category"] != "user":
                    raise Fault(f"{path}: {content[:400]!r}")

    def renew(self) -> None:
        """Another session, run and sampler; their ids are in `names`."""
        if self.names:
            self._json(f"sessions/{self.names['session_id']}/finish", {})
        session = self._json("create_session", {"tags": []})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2, "seed": 1}}
        run = f"{session}:train:0"
        request = {"request_id": self._json("create_model", body)["request_id"]}
        while self._json("retrieve_future", request).get("type") == "try_again":
            pass
        body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": MODEL}
        sampler = self._json("create_sampling_session", body)["sampling_session_id"]
        self.names = {"session_id": session, "model_id": run, "sampling_session_id": sampler}

    def _json(self, path: str, body: Any) -> Any:
        status, content = self.ask(
            "POST", f"/api/v1/{path}", json.dumps(body).encode(), content_type="application/json"
        )
        assert status in (200, 204, 408), (path, status, content)
        return json.loads(content or b"{}")


class Target:
    """One class of input."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.app = App()
        self._count = 0

    def run(self, rng: random.Random) -> None:
        """One case; Fault if the server did what it must not."""
        self._count += 1
        if self._count % RENEW == 0:
            self.app.renew()
        self.case(rng, through_app=self._count % THROUGH_APP == 0)

    @abstractmethod
    def case(self, rng: random.Random, *, through_app: bool) -> None: ...

    def close(self) -> None:
        self.app.close()


def only_user_errors(read: Callable[[], object]) -> None:
    """Fault unless `read` ends, or raises an ApiError that is the user's."""
    try:
        read()
    except ApiError as error:
        if error.category != "user":
            raise Fault(f"{type(error).__name__}: {error}") from error
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}") from error


class Protobuf(Target):
    """Contents of a forward_backward."""

    name = "protobuf"

    def __init__(self) -> None:
        super().__init__()
        self._seeds = []
        for sent in corpus():
            if sent.kind == "application/x-protobuf":
                message = wire.ForwardBackwardRequest()
                message.ParseFromString(sent.body)
                self._seeds.append(message)

    def body(self, rng: random.Random) -> bytes:
        """A message for the live run, changed."""
        message = rng.choice(self._seeds)
        message.model_id, message.seq_id = self.app.names["model_id"], rng.randint(1, 2000)
        return mutate.of_protobuf(rng, message.SerializeToString())

    def case(self, rng: random.Random, *, through_app: bool) -> None:
        body = self.body(rng)
        if through_app:
            self.app.check("POST", "/api/v1/forward_backward", body, content_type="application/x-protobuf")
        else:
            only_user_errors(lambda: parse_forward_backward_envelope(body).decode())


class Zstd(Protobuf):
    """The same, packed, and the frame changed."""

    name = "zstd"

    def case(self, rng: random.Random, *, through_app: bool) -> None:
        import zstandard

        level = rng.choice((1, 3, 19))
        packer = zstandard.ZstdCompressor(
            level=level, write_content_size=rng.random() < 0.9, write_checksum=rng.random() < 0.5
        )
        body = packer.compress(self.body(rng) * rng.choice((1, 1, 200)))
        if rng.random() < 0.9:
            body = mutate.of_bytes(rng, body[:64]) + body[64:] if rng.random() < 0.7 else mutate.of_bytes(rng, body)
        if through_app:
            named = {"content_type": "application/x-protobuf", "content_encoding": "zstd"}
            self.app.check("POST", "/api/v1/forward_backward", body, **named)
        else:
            only_user_errors(lambda: bodies.unpack(body, "zstd"))


class Json(Target):
    """Bodies, paths and queries of every other request, all through the app."""

    name = "json"

    def __init__(self) -> None:
        super().__init__()
        self._seeds = [sent for sent in corpus() if sent.kind != "application/x-protobuf"]

    def case(self, rng: random.Random, *, through_app: bool) -> None:
        sent = rng.choice(self._seeds)
        path = sent.path
        if rng.random() < 0.8:
            session = self.app.names["session_id"]
            path = "/".join(session + part[18:] if part.startswith("s-") else part for part in path.split("/"))
        if rng.random() < 0.2:
            path = path[:8] + "".join(c for c in mutate.of_bytes(rng, path[8:].encode()).decode("utf-8", "replace"))
        body = sent.body
        if body:
            value = json.loads(body)
            value = (
                {**value, **{k: v for k, v in self.app.names.items() if k in value}}
                if isinstance(value, dict)
                else value
            )
            body = mutate.of_json(rng, value) if rng.random() < 0.9 else mutate.of_bytes(rng, body)
        self.app.check(sent.method, path, body, content_type=sent.kind or "application/json")


class Images(Target):
    """PNG and JPEG files."""

    name = "images"

    def __init__(self) -> None:
        super().__init__()
        self._seeds = list(seeds())

    def case(self, rng: random.Random, *, through_app: bool) -> None:
        data = rng.choice(self._seeds)
        png = data.startswith(b"\x89PNG")
        change = mutate.of_png if png and rng.random() < 0.6 else mutate.of_bytes
        data = change(rng, data)
        if through_app:
            image = wire.ImageChunk(data=data, format=rng.choice(("png", "jpeg")))
            datum = wire.Datum(model_input=[wire.Chunk(image=image)])
            message = wire.ForwardBackwardRequest(
                model_id=self.app.names["model_id"], seq_id=rng.randint(1, 2000), data=[datum], loss_fn="cross_entropy"
            )
            body = message.SerializeToString()
            self.app.check("POST", "/api/v1/forward_backward", body, content_type="application/x-protobuf")
            return
        try:
            decode_image(data, 2**20)
        except ImageError:
            pass
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}") from error


def seeds() -> list[bytes]:
    """Small files of every mode that PIL writes as PNG or JPEG, with palettes, transparency, EXIF, frames."""
    colors = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 17, 3), dtype=np.uint8))
    alpha, exif = Image.new("L", colors.size, 77), Image.Exif()
    exif[0x0112] = 6
    made: list[tuple[Image.Image, str, dict[str, Any]]] = [
        *((colors.convert(mode), "PNG", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *((colors.convert(mode), "JPEG", {}) for mode in ("L", "RGB", "CMYK")),
        (colors, "JPEG", {"progressive": True, "exif": exif}),
        (colors, "JPEG", {"subsampling": 0, "quality": 100, "icc_profile": b"not a profile"}),
        (colors, "PNG", {"exif": exif}),
        (colors.convert("P"), "PNG", {"transparency": 3, "bits": 4}),
        (colors, "PNG", {"save_all": True, "append_images": [colors.rotate(180)], "duration": 10}),
    ]
    alpha.putpixel((0, 0), 0)
    found = []
    for image, kind, how in made:
        file = io.BytesIO()
        image.save(file, kind, **how)
        found.append(file.getvalue())
    return found


class Heads(Target):
    """Heads and framing of HTTP, over sockets of a server in this process."""

    name = "heads"

    SEEDS: ClassVar[tuple[bytes, ...]] = (
        b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nTrailer: x\r\n\r\n",
        b"GET /api/v1/sessions?limit=5&offset=0 HTTP/1.0\r\nX-API-Key: KEY\r\nConnection: keep-alive\r\n\r\n",
        b"PUT /api/v1/sessions/x/project HTTP/1.1\r\nHost: [::1]:80\r\nX-API-Key: KEY\r\nExpect: 100-continue\r\n"
        b'Content-Length: 20\r\n\r\n{"project_id": null}',
        b"GET /api/v1/external_weights/a/b/c?expires=1&signature=x HTTP/1.1\r\nHost: a\r\nRange: bytes=0-5,7-\r\n"
        b"Accept-Encoding: gzip\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    )

    def __init__(self) -> None:
        self._short_polls = short_polls()
        self._count = 0
        self._scratch = tempfile.TemporaryDirectory()
        options = BackendOptions(data_dir=Path(self._scratch.name))
        self._server = LoopbackServer(InProcessBackend([ModelSource(MODEL, MODEL)], options, load=load_fake))
        self._port = int(self._server.url.rpartition(":")[2])
        self._key = self._server.api_key.encode()

    def run(self, rng: random.Random) -> None:
        self.case(rng, through_app=True)

    def case(self, rng: random.Random, *, through_app: bool) -> None:
        seed = rng.choice(self.SEEDS)
        data = seed if rng.random() < 0.1 else mutate.of_bytes(rng, seed, rng.choice(self.SEEDS))
        data = data.replace(b"KEY", self._key)
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as stream:
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := stream.recv(65536):
                    answer += part
            except ConnectionResetError:
                pass
            except TimeoutError:
                raise Fault(f"no end of an answer to {data!r}") from None
        if answer and not answer.startswith(b"HTTP/1.1 "):
            raise Fault(f"{answer[:100]!r} to {data!r}")
        if answer[9:10] == b"5":
            raise Fault(f"{answer[:200]!r} to {data!r}")

    def close(self) -> None:
        self._server.close()
        self._scratch.cleanup()
        self._short_polls.close()


TARGETS: dict[str, type[Target]] = {each.name: each for each in (Protobuf, Zstd, Json, Images, Heads)}
