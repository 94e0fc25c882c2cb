"""One user of a running server, over its own sockets and without the SDK, which would retry on its own.

Imports neither torch nor the backend, so that many of them start quickly.
"""

import http.client
import itertools
import json
import socket
import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from tinker_local.types.wire import tinker_local_wire_pb2 as wire

PROTOBUF = "application/x-protobuf"
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Refused(Exception):
    """An answer other than 200, or a future that failed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status
        self.text = text


class Connection:
    """One keep-alive connection; `send` raises OSError or HTTPException if it breaks."""

    def __init__(self, url: str, key: str, timeout: float = 45.0) -> None:
        parts = urlsplit(url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        self._headers = {"X-API-Key": key}

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, bytes]:
        """Status, content type, content. `path` is below /api/v1."""
        if self._http.sock is None:
            self._http.connect()
            stream = cast(socket.socket, self._http.sock)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self._http.request(method, f"/api/v1/{path}", body, {**self._headers, **named})
            answer = self._http.getresponse()
            return answer.status, answer.headers.get("content-type", ""), answer.read()
        except BaseException:
            self._http.close()
            raise

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """The JSON answer; Refused unless it is 200 or 204."""
        status, _, content = self.send("POST", path, json.dumps(body).encode(), Content_Type="application/json")
        if status not in (200, 204):
            raise Refused(status, content.decode("utf-8", "replace"))
        found: dict[str, Any] = json.loads(content) if content else {}
        return found

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer; Refused unless it is 200."""
        status, _, content = self.send("GET", path)
        if status != 200:
            raise Refused(status, content.decode("utf-8", "replace"))
        found: dict[str, Any] = json.loads(content)
        return found

    def wait(self, request_id: str, seconds: float = 300.0) -> tuple[str, bytes]:
        """Content type and content of a result; Refused if the operation failed, TimeoutError if it takes longer."""
        body = json.dumps({"request_id": request_id, "allow_metadata_only": True}).encode()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, kind, content = self.send("POST", "retrieve_future", body, Content_Type="application/json")
            if status == 408:
                continue
            if status != 200:
                raise Refused(status, content.decode("utf-8", "replace"))
            if kind == "application/json" and b'"error"' in content and "error" in (failed := json.loads(content)):
                raise Refused(200, f"{failed['category']}: {failed['error']}")
            return kind, content
        raise TimeoutError(f"{request_id}: not there after {seconds:g} s")

    def result(self, request_id: str, seconds: float = 300.0) -> Any:
        """`wait`, decoded."""
        kind, content = self.wait(request_id, seconds)
        if kind != PROTOBUF:
            return json.loads(content)
        message = wire.SampleResponse() if ":sample:" in request_id else wire.ForwardBackwardOutput()
        message.ParseFromString(content)
        return message

    def close(self) -> None:
        self._http.close()


def gradient_message(model: str, seq_id: int, tokens: Sequence[int], count: int = 1) -> wire.ForwardBackwardRequest:
    """`count` equal datums: each of `tokens` predicts the next."""
    import numpy as np

    inputs, targets = np.array(tokens[:-1], "<i4"), np.array(tokens[1:], "<i8")
    datum = wire.Datum(
        model_input=[wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=inputs.tobytes()))],
        loss_fn_inputs={
            "target_tokens": wire.Tensor(dense=targets.tobytes(), dtype=wire.DTYPE_INT64, shape=[len(targets)])
        },
    )
    return wire.ForwardBackwardRequest(model_id=model, seq_id=seq_id, data=[datum] * count, loss_fn="cross_entropy")


def sample_body(sampler: str, seq_id: int, tokens: Sequence[int] = (5, 9), **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 3}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "sampling_params": {**params, **fields.pop("sampling_params", {})},
        "num_samples": 1,
        "type": "sample",
        **fields,
    }


class Tenant:
    """A session with at most one training run; `connection()` gives each thread its own."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self.url, self.key, self.base_model = url, key, base_model
        self.connection = Connection(url, key)
        self.session = str(self.connection.post("create_session", {"tags": [], "user_metadata": {}})["session_id"])
        self._numbers = itertools.count()
        self._samples = itertools.count()
        self.seq_id = 0

    def another_connection(self) -> Connection:
        return Connection(self.url, self.key)

    def run(self, rank: int = 4) -> str:
        """A new training run."""
        body = {
            "session_id": self.session,
            "model_seq_id": next(self._numbers),
            "base_model": self.base_model,
            "lora_config": {"rank": rank, "seed": 1},
        }
        return str(self.connection.result(self.connection.post("create_model", body)["request_id"])["model_id"])

    def sampler(self, model_path: str | None = None) -> str:
        """A new sampling session: of the base model, or of saved weights."""
        body: dict[str, Any] = {"session_id": self.session, "sampling_session_seq_id": next(self._numbers)}
        body |= {"base_model": self.base_model} if model_path is None else {"model_path": model_path}
        return str(self.connection.post("create_sampling_session", body)["sampling_session_id"])

    def next_sample(self) -> int:
        """A `seq_id` that no sample of this tenant has used."""
        return next(self._samples)

    def next_seq_id(self) -> int:
        """The next place in the order of the run."""
        self.seq_id += 1
        return self.seq_id

    def heartbeat(self) -> None:
        self.connection.post("session_heartbeat", {"session_id": self.session})
