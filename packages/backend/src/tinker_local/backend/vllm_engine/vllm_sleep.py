"""Engines that give their memory back for a while.

vLLM allocates weights (LoRA slots among them) and KV cache through an allocator of its own, one for the process, that
can take the memory away behind addresses which stay: CUDA graphs go on being right. Whoever touches what sleeps ends
the process's CUDA context. Nothing here imports vLLM before it is needed.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

_BACKED_UP = ("weights", "runtime", "cudagraph")
"""What is copied to host memory for a sleep, by the allocator's tags (0.26 has the first alone). The rest, KV cache and
buffers of steps, is forgotten."""

_kept_alive: list[Any] = []
"""What frees the memory of engines that were released; something of theirs may be freed later still."""


def _sleep_allocator() -> Any:
    """vLLM's allocator for engines that can sleep."""
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def sleep_mode_is_free() -> bool:
    """Whether the allocator works here and no engine of the process has it; vLLM would refuse to start a second."""
    from vllm.device_allocator import cumem

    if not cumem.cumem_available:
        return False
    if _sleep_allocator().get_current_usage():  # of an engine whose release did not find all of it unused
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    return bool(_sleep_allocator().get_current_usage() == 0)


def can_sleep(engine: Any) -> bool:
    """Whether `put_to_sleep` may be called."""
    return bool(engine.model_config.enable_sleep_mode)


def is_asleep(engine: Any) -> bool:
    """Whether any of the engine's memory is away; vLLM's own `is_sleeping` does not know of failures."""
    return can_sleep(engine) and any(data.is_asleep for data in _sleep_allocator().pointer_to_data.values())


def put_to_sleep(engine: Any) -> None:
    """Move the weights to host memory and forget the KV cache, the prefix cache and image features. Nothing may be in
    flight. If it fails (no host memory), the engine is awake as before, unless `is_asleep`."""
    try:
        engine.sleep(level=1)
    except Exception:
        wake(engine)  # whatever is away already
        raise


def wake(engine: Any) -> None:
    """Undo `put_to_sleep`. If it fails (no memory on the device), the engine sleeps on; it may be called again."""
    allocator, executor = _sleep_allocator(), engine.model_executor
    asleep = {pointer: data for pointer, data in allocator.pointer_to_data.items() if data.is_asleep}
    # As vLLM notes it after a sleep, also if that failed in the middle; else it would do nothing here.
    executor.sleeping_tags = {"weights", "kv_cache"}
    if not isinstance(getattr(type(executor), "is_sleeping", None), property):  # 0.26
        executor.is_sleeping = True
    try:
        with _only(allocator, asleep=True):
            engine.wake_up()
    except Exception:
        with _only(allocator, asleep=False):  # what fitted would be in everybody's way
            allocator.sleep(offload_tags=_BACKED_UP)
        raise
    # It was all zeros when the engine was built; now there is in it what others left in that memory.
    for pointer, data in asleep.items():
        if data.tag not in _BACKED_UP:
            _fill_with_zeros(pointer, data.handle[1])


def _fill_with_zeros(pointer: int, num_bytes: int) -> None:
    """On the device, and wait for it."""
    import torch
    from vllm.device_allocator import cumem

    cumem.libcudart.cudaMemset(pointer, 0, num_bytes)
    torch.cuda.synchronize()


@contextlib.contextmanager
def _only(allocator: Any, *, asleep: bool) -> Iterator[None]:
    """Let the allocator see only what sleeps, or only what is awake: 0.26 would map, or take away, the others again."""
    if hasattr(allocator, "discard"):  # it came with the version that looks for itself
        yield
        return
    everything = allocator.pointer_to_data
    allocator.pointer_to_data = {at: data for at, data in everything.items() if data.is_asleep == asleep}
    try:
        yield
    finally:
        allocator.pointer_to_data = everything


def keep_rotary_tables_apart() -> None:
    """Engines of a process share tables of rotary positions. Those of an engine that can sleep lie in memory that goes
    away, and would keep the allocator in use after its release."""
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def free_sleep_pools() -> None:
    """Free what the allocator has for an engine that is released."""
    allocator = _sleep_allocator()
    if any(data.is_asleep for data in allocator.pointer_to_data.values()):
        # It holds no memory of the device, and freeing it would take it away a second time. The addresses stay taken,
        # and so does the allocator: other engines of this process cannot sleep.
        for data in allocator.pointer_to_data.values():
            data.cpu_backup_tensor = None
        return
    for pools in allocator.allocator_and_pools.values():
        # One pair of pool and allocator for each tag in 0.26, a list of them in 0.32.
        _kept_alive.extend(owner for _, owner in (pools if isinstance(pools, list) else [pools]))
    allocator.release_pools()
