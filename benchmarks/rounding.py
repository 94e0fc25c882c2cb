"""Start tiny models of all families, and a random one in Qwen3-8B's shape, in bfloat16: how far their engines differ.

    python benchmarks/rounding.py                          # a GPU; about fifteen minutes
    python benchmarks/rounding.py --only qwen3,gpt_oss     # some of them
    python benchmarks/rounding.py --without-8b             # runs on a CPU, but for Qwen3.5

A line for each: the median over all positions of what rounding alone moves logprobs by (nats), of how much trainer and
sampler differ, the limit, and difference / rounding; then the same of means, for the prompt where they are largest.
A model that does not start is a line with its error, and the exit status is 1.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import room_for_models
from random_model import SHAPES, write_random_model
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.models.agreement import Comparison
from tinker_local.backend.tiny_models import make_experts_alike, make_tiny_text_model, make_tiny_vl_model

LARGE = "qwen3-8b"
TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
"""Served as with images."""


def arguments() -> argparse.Namespace:
    names = [*(name for name in FAMILIES if name not in TEXT_ALONE), LARGE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(names), metavar="NAME,…", help=f"of {', '.join(names)}")
    parser.add_argument("--without-8b", action="store_true", help="leave out the large model")
    parser.add_argument("--seeds", type=int, default=1, help="how many tiny models of each family")
    options = parser.parse_args()
    options.chosen = [name for name in options.only.split(",") if not (options.without_8b and name == LARGE)]
    for name in options.chosen:
        if name not in names:
            parser.error(f"--only {name}: there are {', '.join(names)}")
    return options


def models(chosen: list[str], seeds: int, room: Path) -> Iterator[tuple[str, Path]]:
    """Names and folders, each written when it is asked for and deleted after that."""
    for name in chosen:
        for seed in range(1 if name == LARGE else seeds):
            folder = room / f"{name}-{seed}"
            if name == LARGE:
                write_random_model(folder, *SHAPES["8b"])
            else:
                make: Any = make_tiny_text_model if FAMILIES[name].vision is None else make_tiny_vl_model
                make(folder, family=name, seed=seed, tie_word_embeddings=name in ("gemma2", "lfm2_moe"))
                if name == "qwen3_5_moe":  # of random numbers, rounding alone sends every other token elsewhere
                    make_experts_alike(folder)
            yield name, folder
            shutil.rmtree(folder)


async def compared(name: str, folder: Path, data_dir: Path) -> Comparison:
    """How trainer and sampler differ at the start of a server of the model."""
    tiny = {} if name == LARGE else {"kv_cache_bytes": 2**28, "max_rank": 8}
    options = BackendOptions(data_dir=data_dir, dtype="bfloat16", **tiny)
    async with InProcessBackend([ModelSource(name, str(folder))], options) as backend:
        comparison = backend.models.get(name).comparison
    assert comparison is not None
    return comparison


def line(name: str, found: Comparison) -> str:
    rounding, worst = found.rounding, found.worst.difference
    return (
        f"{name:14} {rounding.typical:8.4f} {found.typical:8.4f} {found.typical_limit:8.4f} "
        f"{found.typical / rounding.typical:6.2f}   |{rounding.mean:8.4f} {worst:8.4f} {found.mean_limit:8.4f} "
        f"{worst / rounding.mean:6.2f}"
    )


def main() -> None:
    options = arguments()
    failed = False
    numbers = f"{'rounding':>8} {'differ':>8} {'limit':>8} {'ratio':>6}"
    print(f"{'':14} {numbers}   |{numbers}", flush=True)
    with tempfile.TemporaryDirectory(dir=room_for_models() if LARGE in options.chosen else None) as room:
        for name, folder in models(options.chosen, options.seeds, Path(room)):
            try:
                print(line(name, asyncio.run(compared(name, folder, Path(room) / "data"))), flush=True)
            except Exception as error:  # of any engine: the others are still to be seen
                failed = True
                print(f"{name:14} {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
