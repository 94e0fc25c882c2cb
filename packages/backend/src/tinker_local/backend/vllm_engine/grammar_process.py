"""Compiles grammars in a process that may be killed, before an engine compiles them.

xgrammar compiles without an end in sight some patterns of a few hundred characters, and cannot be interrupted. In the
engine's process these would take its cores and its memory for good.
"""

import asyncio
import functools
import os
import re
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import LOAD, serve_calls
from tinker_local.backend.process.process_group import ProcessEndedError, ProcessGroup
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.types import InvalidRequestError

CPU_SECONDS = 10
"""Processor time of one grammar, on at most two cores."""

WALL_SECONDS = 60.0
"""The same, on a machine that has others to do."""

MEMORY_BYTES = 2 * 2**30
"""Of one grammar."""

REMEMBERED = 4096
"""Grammars that were compiled, which are not compiled again."""

_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""Time, file and line, with which messages of xgrammar begin."""


class GrammarCompiler:
    """What runs in the process. `cpu_seconds` ends it in the middle of a grammar, and `memory_bytes` may."""

    def __init__(self, model: str, vocab_size: int, cpu_seconds: int, memory_bytes: int) -> None:
        os.nice(10)
        import xgrammar
        from transformers import AutoTokenizer

        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(model), vocab_size=vocab_size
        )
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=2, cache_enabled=False)
        self._cpu_seconds = cpu_seconds
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def compile(self, grammar: Grammar) -> None:
        """As vLLM does; InvalidRequestError says what is wrong with it."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + self._cpu_seconds, hard))
        compiler, text = self._compiler, grammar.text
        try:
            match grammar.kind:
                case "json":
                    compiler.compile_json_schema(text, any_whitespace=True)
                case "regex":
                    compiler.compile_regex(text)
                case "structural_tag":
                    compiler.compile_structural_tag(text)
                case "grammar" if "::=" in text:
                    compiler.compile_grammar(text)
                case "grammar":
                    compiler.compile_lark(text)
                case "choice":
                    pass  # texts alone: as many states as characters
        except Exception as error:  # of several types in C++
            raise InvalidRequestError(f"{grammar.field}: {_PLACE.sub('', str(error)).strip()}") from None

    def close(self) -> None:
        """Nothing is open."""


class GrammarProcess:
    """Checks grammars for the engine of `model`. The process starts with the first one, which so takes some seconds,
    and again after one that was too much for it."""

    def __init__(
        self, model: str, vocab_size: int, cpu_seconds: int = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._make = functools.partial(GrammarCompiler, model, vocab_size, cpu_seconds, memory_bytes)
        self._bounds = f"{cpu_seconds} s of processor time and {memory_bytes / 2**30:.3g} GiB"
        self._calls: Calls | None = None
        self._closed = False
        self._turn = asyncio.Lock()
        self._compiled: LRUCache[Grammar, None] = LRUCache(REMEMBERED)

    async def check(self, grammar: Grammar) -> None:
        """InvalidRequestError if it is invalid, or takes too much to compile."""
        if grammar in self._compiled:
            return
        async with self._turn:
            if grammar not in self._compiled:
                await in_daemon_thread(self._compile, grammar)
                self._compiled[grammar] = None

    def _compile(self, grammar: Grammar) -> None:
        calls = self._running()
        try:
            calls.call(WALL_SECONDS, "compile", grammar)
        except ProcessEndedError:
            raise InvalidRequestError(
                f"{grammar.field}: {len(grammar.text)} characters take more than {self._bounds} to compile, or crash "
                "the compiler; write it with fewer repetitions and choices"
            ) from None

    def _running(self) -> Calls:
        if self._closed:
            raise InvalidRequestError("the sampling engine was stopped")
        if self._calls is None or self._calls.group.ended:
            program: Any = functools.partial(serve_calls, make=self._make, describe=_nothing)
            calls = Calls(ProcessGroup("grammar compiler", [program]))
            calls.call(None, LOAD)
            self._calls = calls
        return self._calls

    def close(self) -> None:
        """End the process; blocks for at most two seconds."""
        self._closed = True
        if self._calls is not None:
            with suppress(ProcessEndedError):
                self._calls.close()


def _nothing(_: object) -> None:
    """What the process tells of itself."""
