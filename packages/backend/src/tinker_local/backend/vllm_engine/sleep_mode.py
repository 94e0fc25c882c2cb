"""Sleep mode: an engine gives its memory back until it is woken.

vLLM allocates weights, LoRA slots and KV cache through its own allocator, one for the process. The allocator can
release the memory and keep the addresses, so CUDA graphs stay valid. Touching memory that is asleep ends the process's
CUDA context.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from tinker_local.backend.vllm_engine.compat_vllm import allocator_checks_state, allocator_owners, mark_asleep

_BACKED_UP = ("weights", "runtime", "cudagraph")
"""Tags of the allocator that a sleep copies to host memory (0.26 only has the first). The rest, KV cache and buffers of
steps, is dropped."""

_kept_alive: list[Any] = []
"""Owners of the memory of released engines; some of it may be freed later than the engine."""


def _sleep_allocator() -> Any:
    """vLLM's allocator for engines with sleep mode."""
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def sleep_mode_is_free() -> bool:
    """Whether the allocator works here and no other engine of the process uses it; vLLM refuses to start a second."""
    from vllm.device_allocator import cumem

    if not cumem.cumem_available:
        return False
    if _sleep_allocator().get_current_usage():  # of a released engine, not all of which was unused then
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    return bool(_sleep_allocator().get_current_usage() == 0)


def can_sleep(engine: Any) -> bool:
    """Whether `put_to_sleep` may be called."""
    return bool(engine.model_config.enable_sleep_mode)


def is_asleep(engine: Any) -> bool:
    """Whether any of the engine's memory is asleep; vLLM's own `is_sleeping` is wrong after a failure."""
    return can_sleep(engine) and any(data.is_asleep for data in _sleep_allocator().pointer_to_data.values())


def put_to_sleep(engine: Any) -> None:
    """Move the weights to host memory and drop the KV cache, the prefix cache and image features.

    Nothing may be in flight. If it fails (no host memory), the engine is awake as before, unless `is_asleep`.
    """
    try:
        engine.sleep(level=1)
    except Exception:
        wake(engine)  # what is asleep already
        raise


def wake(engine: Any) -> None:
    """Undo `put_to_sleep`. If it fails (no memory on the device), the engine stays asleep; try again later."""
    allocator, executor = _sleep_allocator(), engine.model_executor
    asleep = {pointer: data for pointer, data in allocator.pointer_to_data.items() if data.is_asleep}
    mark_asleep(executor)  # also after a sleep that failed half way
    try:
        with _only(allocator, asleep=True):
            engine.wake_up()
    except Exception:
        with _only(allocator, asleep=False):  # the part that fitted would only take memory
            allocator.sleep(offload_tags=_BACKED_UP)
        raise
    # A new engine's memory is zero; this holds what others left in it.
    for pointer, data in asleep.items():
        if data.tag not in _BACKED_UP:
            _fill_with_zeros(pointer, data.handle[1])


def _fill_with_zeros(pointer: int, num_bytes: int) -> None:
    """On the device; returns when it is done."""
    import torch
    from vllm.device_allocator import cumem

    cumem.libcudart.cudaMemset(pointer, 0, num_bytes)
    torch.cuda.synchronize()


@contextlib.contextmanager
def _only(allocator: Any, *, asleep: bool) -> Iterator[None]:
    """Show the allocator only the memory that is asleep, or awake: 0.26 maps, or releases, the rest a second time."""
    if allocator_checks_state(allocator):
        yield
        return
    everything = allocator.pointer_to_data
    allocator.pointer_to_data = {at: data for at, data in everything.items() if data.is_asleep == asleep}
    try:
        yield
    finally:
        allocator.pointer_to_data = everything


def free_sleep_pools() -> None:
    """Free the allocator's memory of a released engine."""
    allocator = _sleep_allocator()
    if any(data.is_asleep for data in allocator.pointer_to_data.values()):
        # It holds no memory of the device, and freeing it would release it a second time. The addresses stay in use,
        # and so does the allocator: no later engine of this process can sleep.
        for data in allocator.pointer_to_data.values():
            data.cpu_backup_tensor = None
        return
    _kept_alive.extend(allocator_owners(allocator))
    allocator.release_pools()
