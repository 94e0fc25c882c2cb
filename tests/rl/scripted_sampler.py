"""Stand-ins for what a rollout needs: a tokenizer of bytes with a chat template, and a sampler that reads a script."""

import asyncio
import itertools
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker_local.client import rl

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|image_pad|>")
IMAGE_TOKENS = 4
END = 257


@dataclass(frozen=True)
class _Added:
    content: str
    special: bool = True
    rstrip: bool = False


class ByteTokenizer:
    """Token ids are bytes, and 256 on are special; the chat template is Qwen's, written out."""

    chat_template = "built in"
    eos_token_id = END
    all_special_tokens = SPECIAL
    added_tokens_decoder = {256 + index: _Added(name) for index, name in enumerate(SPECIAL)}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        ids = [[256 + SPECIAL.index(piece)] if piece in SPECIAL else list(piece.encode()) for piece in pieces]
        return list(itertools.chain(*ids))

    def decode(
        self, tokens: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        text = b""
        for token in tokens:
            text += bytes([token]) if token < 256 else b"" if skip_special_tokens else SPECIAL[token - 256].encode()
        return text.decode(errors="replace")

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, chat_template: Any
    ) -> str:
        text = ""
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"this template knows no role {message['role']}")
            content = message["content"]
            if not isinstance(content, str):
                content = "".join("<|image_pad|>" if part["type"] == "image" else part["text"] for part in content)
            text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class Patches:
    """An image processor that counts alike for all images."""

    merge_size = 1

    def get_number_of_image_patches(self, height: int, width: int, options: Any) -> int:
        return IMAGE_TOKENS


def make_chat(*, images: bool = True) -> rl.Chat:
    return rl.Chat(ByteTokenizer(), Patches() if images else None)


@dataclass
class Request:
    """What the sampler was asked. `text`: the prompt, an image as [image]."""

    prompt: tinker.ModelInput
    count: int
    params: tinker.SamplingParams
    text: str


Script = Callable[[Request], "str | BaseException | Awaitable[str]"]


@dataclass
class ScriptedSampler:
    """Answers every sample of a request with what `script` returns for it; an exception is raised by the future.

    As in the SDK, requests run on a separate event loop, and cancelling a future cancels its request.
    """

    script: Script = lambda request: "ok"
    requests: list[Request] = field(default_factory=list)
    cancelled: int = 0
    logprobs: bool = True

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="scripted sampler")
        self.thread.start()
        self._ids = itertools.count()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> AwaitableConcurrentFuture[tinker.SampleResponse]:
        request = Request(prompt, num_samples, sampling_params, _text(prompt))
        self.requests.append(request)
        future: Future[tinker.SampleResponse] = asyncio.run_coroutine_threadsafe(self._answer(request), self.loop)
        return AwaitableConcurrentFuture(future)

    async def _answer(self, request: Request) -> tinker.SampleResponse:
        sequences = []
        try:
            for _ in range(request.count):
                answer = self.script(request)
                if isinstance(answer, Awaitable):
                    answer = await answer
                if isinstance(answer, BaseException):
                    raise answer
                sequences.append(self._sequence(answer, request.params.max_tokens))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return tinker.SampleResponse(sequences=sequences)

    def _sequence(self, text: str, max_tokens: int | None) -> tinker.SampledSequence:
        tokens = ([*text.encode(), END])[:max_tokens]
        return tinker.SampledSequence(
            stop_reason="stop" if tokens[-1] == END else "length",
            sequence_id=f"sequence-{next(self._ids)}",
            _tokens_list=tokens,
            _logprobs_list=[-0.5] * len(tokens) if self.logprobs else None,
        )


def _text(prompt: tinker.ModelInput) -> str:
    tokenizer = ByteTokenizer()
    return "".join(
        tokenizer.decode(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else "[image]"
        for chunk in prompt.chunks
    )


@dataclass
class Countdown:
    """Ends after `turns` replies with reward 1 each; records what happened to it, and in which threads."""

    turns: int = 2
    first: Any = "begin"
    shown: Any = "go on"
    on_reset: Callable[[], Any] = lambda: None
    on_step: Callable[[int], Any] = lambda turn: None
    seeds: list[int | None] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    closed: int = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.seeds.append(seed)
        self.on_reset()
        return self.first, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.actions.append(action)
        instead = self.on_step(len(self.actions))
        over = len(self.actions) >= self.turns
        return (self.shown, 1.0, over, False, {}) if instead is None else instead

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Maker:
    """Makes environments one after the other and keeps them; `make(index)` may be given."""

    def __init__(self, make: Callable[[int], Any] = lambda index: Countdown()) -> None:
        self.made: list[Any] = []
        self._make = make
        self._count = itertools.count()

    def __call__(self) -> Any:
        environment = self._make(next(self._count))
        self.made.append(environment)
        return environment
