"""A stand-in server that speaks just enough of the protocol, and a small tokenizer with Qwen's special tokens."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


@dataclass
class FakeServer:
    """Answers every sample with tokens [7, 8]; keeps what it was asked."""

    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    health: int = 200
    api_key: str = "tml-fake-1234"
    http: ThreadingHTTPServer | None = None
    closed: int = 0

    @property
    def url(self) -> str:
        assert self.http is not None
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def body(self, path: str) -> dict[str, Any]:
        return next(body for seen, body in self.requests if seen == path)

    def start(self) -> "FakeServer":
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def close(self) -> None:
        assert self.http is not None
        self.closed += 1
        self.http.shutdown()
        self.http.server_close()


@dataclass
class FakeBackend:
    """What `backend=` takes, with the stand-in server behind it."""

    server: FakeServer = field(default_factory=FakeServer)
    bound_to: tuple[str, int] | None = None

    def serve_in_thread(self, host: str = "127.0.0.1", port: int = 0) -> FakeServer:
        self.bound_to = (host, port)
        return self.server.start()


def _sample_response() -> bytes:
    sequence = tinker_public_pb2.SampledSequence(
        stop_reason=tinker_public_pb2.STOP_REASON_LENGTH,
        tokens=np.array([7, 8], np.int32).tobytes(),
        logprobs=np.array([-0.5, -1.5], np.float32).tobytes(),
    )
    return tinker_public_pb2.SampleResponse(sequences=[sequence]).SerializeToString()


def _answer(path: str) -> dict[str, Any]:
    match path.removeprefix("/api/v1/"):
        case "create_session":
            return {"session_id": "s1"}
        case "create_sampling_session":
            return {"sampling_session_id": "s1:sample:0"}
        case "get_server_capabilities":
            return {"supported_models": [{"model_name": "tiny"}]}
        case "asample":
            return {"request_id": "r1", "sample_sequence_ids": ["q1"]}
        case "telemetry":
            return {"status": "accepted"}
        case "healthz":
            return {"status": "ok"}
    return {}


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(server.health if self.path.endswith("healthz") else 200)

        def do_POST(self) -> None:
            self.reply(200)

        def reply(self, status: int) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            server.requests.append((self.path.removeprefix("/api/v1/"), json.loads(raw) if raw else {}))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path.endswith("retrieve_future"):
                body, kind = _sample_response(), "application/x-protobuf"
            else:
                body, kind = json.dumps(_answer(self.path)).encode(), "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer().start()
    yield server
    if not server.closed:
        server.close()


@pytest.fixture
def fake_backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that steers the SDK is set, and what a test sets is taken back."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE like Qwen's, trained on a few lines; unlike Qwen's it begins each text with a special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["What is this? It is a cat.", "What colour is the square? The square is red."]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens(["<|endoftext|>"])
    bos = ("<|endoftext|>", bpe.token_to_id("<|endoftext|>"))
    bpe.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    return fast
