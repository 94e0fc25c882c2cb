"""Which GPUs the processes of a base model see."""

import os
from collections.abc import Sequence
from typing import Any


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


def replica_gpus(gpus: Sequence[int], each: int) -> list[Sequence[int]]:
    """The GPUs of each replica on `gpus`, of `each`. ValueError in one line if they cannot be divided so."""
    if len(gpus) % each or (each > 1 and not gpus):
        raise ValueError(f"--sample-tp {each}: --sample-gpus has {len(gpus)} GPUs, not a multiple of it")
    return [gpus[at : at + each] for at in range(0, len(gpus), each)]


def check_shares(config: Any, ranks: int) -> None:
    """ValueError in one line if `ranks` cannot have equal shares of the attention of a text config of transformers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % ranks:
        raise ValueError(f"--sample-tp {ranks}: it must divide the {heads} KV heads of this model")
