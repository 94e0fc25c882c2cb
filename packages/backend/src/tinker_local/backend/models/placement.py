"""Which GPUs the processes of a base model see."""

import os
from collections.abc import Sequence


def environment_of(gpus: Sequence[int]) -> dict[str, str]:
    """What the environment of a process has that sees only `gpus`, counted among those that this process sees. Where
    there are none, as on CPU, their numbers mean nothing."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = [seen[gpu] if any(seen) and gpu < len(seen) else str(gpu) for gpu in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def check_gpus(option: str, gpus: Sequence[int], count: int) -> None:
    """ValueError in one line if there are `count` GPUs and one of `gpus` is none of them."""
    if missing := [gpu for gpu in gpus if gpu >= count]:
        there = "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise ValueError(f"{option}: there is no GPU {missing[0]}; this machine shows {there}")
