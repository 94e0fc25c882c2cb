"""Compares a GGUF file with what was trained: its numbers with the merged model's, its logprobs with the trainer's."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.exporting.check_export import (
    Checked,
    Reference,
    check_by_transformers,
    compare_logprobs,
    make_probe,
)
from tinker_local.backend.exporting.llama_cpp import PROGRAM, LlamaCpp
from tinker_local.backend.exporting.trained import Trained
from tinker_local.types import InternalError, InvalidRequestError

LLAMA_CPP = "llama.cpp"

QUANTIZED_LIMIT = 1.0
"""Nats: how far logprobs of a quantised file may be from the trainer's on average. A type of few bits loses what it
loses; a file that lost more than this answers another way, or was written wrongly."""


@dataclass(frozen=True, slots=True)
class CheckedGguf:
    """`numbers`: what comparing matrices found, in words; empty without the package gguf. `logprobs`: of the file that
    the converter wrote, against the trainer; without llama-cpp-python, of the merged model that the converter read.
    `quantized`: what is to be said of a type of fewer bits, in words; else empty."""

    numbers: str
    logprobs: Checked | None
    quantized: str = ""

    def __str__(self) -> str:
        said = "" if self.logprobs is None else str(self.logprobs)
        unread = self.logprobs is not None and self.logprobs.library != LLAMA_CPP
        without = "llama.cpp itself did not load the file, since llama-cpp-python is not installed" if unread else ""
        return "; ".join(each for each in (self.numbers, said, self.quantized, without) if each)


def check_gguf_libraries(found: LlamaCpp) -> None:
    """InvalidRequestError if neither library is there that reads a GGUF file."""
    if find_spec("llama_cpp") is None and not _has_reader(found):
        raise InvalidRequestError(
            "--to gguf: the file is checked with llama-cpp-python, or at least with gguf, and neither is installed: "
            "pip install gguf, or leave the check out with --no-check"
        )


def _has_reader(found: LlamaCpp) -> bool:
    return find_spec("gguf") is not None or bool(found.further)


def check_converted(file: Path, kind: str, merged: Path, trained: Trained, device: str, found: LlamaCpp) -> CheckedGguf:
    """That `file`, which the converter wrote of `merged`, a folder, computes what was trained. InternalError if not."""
    numbers = ""
    if _has_reader(found):
        told = _ask("compare", found, file, merged)
        if told["wrong"]:
            raise InternalError(f"the export was not kept: in {file.name}, {'; '.join(told['wrong'][:3])}")
        if not told["compared"]:
            raise InternalError(f"the export was not kept: {file.name} has no matrix of the merged model by its name")
        share = told["numbers_compared"] / told["numbers"]
        numbers = (
            f"{told['compared']} of {told['matrices']} matrices ({share:.0%} of their numbers) have the merged model's "
            f"numbers in {kind}, the others are stored by other names or in other parts"
            if told["compared"] < told["matrices"]
            else f"all {told['matrices']} matrices have the merged model's numbers in {kind}"
        )
    if find_spec("llama_cpp") is None:
        checked = check_by_transformers(merged, trained, "merged", device)
    elif kind == "q8_0":
        return CheckedGguf(numbers, None, _quantized_logprobs(file, kind, trained, device, found))
    else:
        checked = _against_trainer(file, kind, trained, device, found)
    if not checked.agrees:
        raise InternalError(f"the export was not kept, because it is not what was trained: {checked}")
    return CheckedGguf(numbers, checked)


def check_quantized(file: Path, kind: str, plain: Path, trained: Trained, device: str, found: LlamaCpp) -> str:
    """How far the quantised `file` is from `plain`, of which it was made, and from the trainer. InternalError if its
    numbers moved by more than their bits allow, or its logprobs by more than QUANTIZED_LIMIT on average."""
    words = []
    if _has_reader(found):
        told = _ask("difference", found, file, plain)
        if told["wrong"]:
            raise InternalError(f"the export was not kept: in {file.name}, {'; '.join(told['wrong'][:3])}")
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(told["kinds"].items()))
        words.append(f"{kind} moves numbers by {told['all']:.1%} of their size ({kinds})")
    if find_spec("llama_cpp") is not None:
        words.append(_quantized_logprobs(file, kind, trained, device, found))
    return "; ".join(words)


def _quantized_logprobs(file: Path, kind: str, trained: Trained, device: str, found: LlamaCpp) -> str:
    checked = _against_trainer(file, kind, trained, device, found)
    said = (
        f"llama.cpp's logprobs of {kind} differ from the trainer's by {checked.mean:.2g} nats on average, "
        f"{checked.largest:.2g} at most"
    )
    if not checked.mean <= QUANTIZED_LIMIT:
        raise InternalError(
            f"the export was not kept: {said}; the mean may be {QUANTIZED_LIMIT:g}, and --no-check keeps the file"
        )
    return f"{said} (mean allowed {QUANTIZED_LIMIT:g})"


def _against_trainer(file: Path, kind: str, trained: Trained, device: str, found: LlamaCpp) -> Checked:
    """The logprobs of the probe's text. llama.cpp computes in float32 where the file does."""
    probe = make_probe(trained.base)
    prompts = probe.prompts[:1]
    reference = Reference(trained, device)
    ours, without = reference.logprobs(prompts)
    rounding = reference.rounding(prompts, ours)
    reference.close()
    with tempfile.TemporaryDirectory() as scratch:
        ids = Path(scratch) / "ids.json"
        ids.write_text(json.dumps(prompts[0].token_ids.tolist()))
        theirs = np.array(_ask("logprobs", found, file, ids), np.float32)
    exact = kind == "f32" and trained.base.dtype == "float32"
    dtype = "float32" if exact else "bfloat16"
    return compare_logprobs(LLAMA_CPP, dtype, ours, theirs, without, rounding, images=0)


def _ask(what: str, found: LlamaCpp, *files: Path) -> Any:
    """What `llama_cpp_program.py` answers. InternalError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", PROGRAM, what, *(str(file.absolute()) for file in files), str(answer)]
        environment: Mapping[str, str] = found.environment
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if done.returncode != 0 or not answer.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            last = said[-1] if said else f"status {done.returncode}"
            raise InternalError(f"the export was not kept: {files[0].name} cannot be read to check it ({what}): {last}")
        return json.loads(answer.read_text())
