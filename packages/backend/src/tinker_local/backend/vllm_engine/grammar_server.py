"""Processes that follow grammars, for `grammar_process.py`: one that knows the vocabulary, a fork of it for each
grammar, and of that one a fork for each request.

A call of xgrammar cannot be interrupted, and some grammars make one token cost seconds. So each request has a process
that a timer of its processor time ends, also in the middle of such a call, and nothing else notices. A fork shares the
vocabulary and the compiled grammar with its parent, so they take no more memory.
"""

import ctypes
import json
import mmap
import os
import pickle
import re
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.structured.ebnf import Text, either, write
from tinker_local.backend.rendering.structured.json_schema import SchemaError, grammar_of
from tinker_local.backend.rendering.structured.structural_tags import tag_of

REPLY = struct.Struct("<iii")
"""The sequence, microseconds of processor time, and a code of `OK` and so on."""

OK, NOT_ALLOWED, NOTHING_FITS, TOO_MUCH = range(4)

_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""Time, file and line, with which messages of xgrammar begin."""

_DIE_WITH_PARENT = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """`compile_seconds`, `token_seconds`: of processor time. A request has `request_seconds`, and `seconds_per_token`
    for each that it has drawn; `silent_seconds`: by the clock, for one token. `compile_bytes`: of memory while a
    grammar is compiled; `compiled_bytes`: after that; `request_bytes`: of a request."""

    compile_seconds: float = 10.0
    token_seconds: float = 1.0
    request_seconds: float = 10.0
    seconds_per_token: float = 0.02
    silent_seconds: float = 30.0
    compile_bytes: int = 2**30
    compiled_bytes: int = 2**29
    request_bytes: int = 2**29


@dataclass(frozen=True, slots=True)
class Order:
    """What a grammar's process compiles."""

    grammar: Grammar
    limits: Limits


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence begins, or begins again. `stops`: tokens that may follow where the grammar may end."""

    sequence: int
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """A sequence goes on with a token."""

    sequence: int
    token: int


def send(to: socket.socket, message: Any) -> None:
    """Over a stream."""
    data = pickle.dumps(message)
    to.sendall(struct.pack("<q", len(data)) + data)


def receive(origin: socket.socket) -> Any:
    """Over a stream; EOFError."""
    (size,) = struct.unpack("<q", _exactly(origin, 8))
    return pickle.loads(_exactly(origin, size))


def _exactly(origin: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = origin.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def words_of(vocabulary: int) -> int:
    """int32 of a mask."""
    return (vocabulary + 31) // 32


def main() -> None:
    """The first process; its arguments are the number of a socket, the model and the size of the vocabulary."""
    descriptor, model, vocabulary = sys.argv[1:]
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for a fork
    import xgrammar
    from transformers import AutoTokenizer

    info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(model), vocab_size=int(vocabulary))
    control = socket.socket(fileno=int(descriptor))
    control.sendall(b"r")
    _fork_for_each(control, 1, lambda files: _follow_grammar(info, int(vocabulary), files[0]))


def _fork_for_each(control: socket.socket, count: int, run: Callable[[list[int]], None]) -> None:
    """Fork for each message with `count` files, until the other side ends, and `run` there."""
    while True:
        data, files, _, _ = socket.recv_fds(control, 1, count)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            try:
                run(files)
            except (BrokenPipeError, ConnectionResetError):  # the request has ended
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        for file in files:
            os.close(file)


def _follow_grammar(info: Any, vocabulary: int, file: int) -> None:
    """Compile one grammar and say how it went; then fork for each request."""
    channel = socket.socket(fileno=file)
    send(channel, os.getpid())
    order: Order = receive(channel)
    limits = order.limits
    _limit_memory(limits.compile_bytes)
    try:
        with _Budget(limits.compile_seconds):
            compiled = compile_grammar(info, order.grammar)
    except (MemoryError, RecursionError):
        return
    except Exception as error:  # of several types in C++
        send(channel, (f"{order.grammar.field}: {_PLACE.sub('', str(error)).strip()}", 0))
        return
    size = int(compiled.memory_size_bytes)
    send(channel, (None, size))
    _fork_for_each(channel, 2, lambda files: _follow_request(compiled, vocabulary, limits, *files))


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Budget:
    """Ends this process, wherever it is, when it has used so much processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def compile_grammar(info: Any, grammar: Grammar) -> Any:
    """xgrammar's CompiledGrammar; SchemaError, or what xgrammar raises."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    text = grammar.text
    match grammar.kind:
        case "json":
            return compiler.compile_grammar(grammar_of(json.loads(text), compact=grammar.compact))
        case "regex":
            return compiler.compile_regex(text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(tag_of(json.loads(text))))
        case "choice":
            written = write({"choice": either(*map(Text, json.loads(text)))}, "choice")
            if written is None:
                raise SchemaError("", "choice", "there is none")
            return compiler.compile_grammar(written)
        case "grammar":
            return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)


def _follow_request(compiled: Any, vocabulary: int, limits: Limits, file: int, memory: int) -> None:
    channel = socket.socket(fileno=file)
    _limit_memory(limits.request_bytes)
    rows = mmap.mmap(memory, 0)
    masks = np.frombuffer(rows, np.int32).reshape(-1, words_of(vocabulary))
    channel.send(struct.pack("<i", os.getpid()))
    request = _Request(compiled, masks, limits)
    while data := channel.recv(2**20):
        for order in pickle.loads(data):
            with _Budget(limits.token_seconds):
                reply = request.take(order)
            channel.send(REPLY.pack(*reply))


class _Request:
    def __init__(self, compiled: Any, masks: Any, limits: Limits) -> None:
        import torch

        self._compiled = compiled
        self._masks = masks
        self._rows = torch.from_numpy(masks)
        self._limits = limits
        self._matchers: dict[int, Any] = {}
        self._tokens = 0
        self._used = 0.0

    def take(self, order: Begin | Take) -> tuple[int, int, int]:
        """Do it and write the mask of what may follow."""
        import xgrammar

        start, at = time.process_time(), order.sequence
        if isinstance(order, Begin):
            stops = list(order.stops) or None
            self._matchers[at] = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=stops)
            code = OK
        else:
            self._tokens += 1
            code = self._go_on(self._matchers[at], order.token)
        if code == OK:
            code = self._fill(self._matchers[at], at)
        taken = time.process_time() - start
        self._used += taken
        if self._used > self._limits.request_seconds + self._limits.seconds_per_token * self._tokens:
            code = TOO_MUCH
        return at, int(taken * 1e6), code

    def _go_on(self, matcher: Any, token: int) -> int:
        return OK if matcher.is_terminated() or matcher.accept_token(token) else NOT_ALLOWED

    def _fill(self, matcher: Any, at: int) -> int:
        if matcher.is_terminated():
            self._masks[at] = -1
            return OK
        matcher.fill_next_token_bitmask(self._rows, at)
        return OK if self._masks[at].any() else NOTHING_FITS
