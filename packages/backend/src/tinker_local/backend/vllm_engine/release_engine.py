"""Releases engines: frees what vLLM and dynamo would keep until the process ends, and the weights with it."""

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinker_local.backend.vllm_engine.compat_vllm import lora_modules, lora_worker, model_runner
from tinker_local.backend.vllm_engine.sleep_mode import can_sleep, free_sleep_pools


def kept_by_dynamo() -> set[tuple[str, Any]]:
    """What dynamo keeps of compiled models, and with it their weights: names in vLLM's modules, keys of its hooks."""
    hooks = getattr(sys.modules.get("torch._dynamo.convert_frame"), "_bytecode_hooks", {})
    return {("", key) for key in hooks} | {
        (module, name)
        for module in [name for name in sys.modules if name.startswith("vllm.model_executor.models.")]
        for name in [name for name in vars(sys.modules[module]) if name.startswith("__compiled_fn_")]
    }


def _let_dynamo_forget(kept: set[tuple[str, Any]]) -> None:
    for module, key in kept:
        if module:
            setattr(sys.modules[module], key, None)  # dynamo may still delete it
        else:
            sys.modules["torch._dynamo.convert_frame"]._bytecode_hooks.pop(key, None)


def _forget_lora_pointers(worker: Any) -> None:
    """Drop what vLLM's Triton kernels note about LoRA slots, by their addresses.

    The notes keep some of the slots in memory. A later engine with slots of other ranks at the same addresses would
    take them for its own.
    """
    slots = [(slot.data_ptr(), slot.nbytes) for slot in lora_slot_tensors(worker)]
    for name in [name for name in sys.modules if name.startswith("vllm.lora.ops.triton_ops.")]:
        for notes in [
            value
            for key, value in vars(sys.modules[name]).items()
            if key.endswith("_PTR_DICT") and isinstance(value, dict)
        ]:
            for addresses in list(notes):
                if any(start <= address < start + size for address in addresses for start, size in slots):
                    del notes[addresses]


def workspaces() -> Any:
    """The buffers of steps of the engine that was built last, or None: vLLM has one manager of them for a process."""
    from vllm.v1.worker import workspace

    return workspace._manager


def _leave_workspaces(manager: Any) -> None:
    """Replace vLLM's manager if it is `manager`, which holds the worker of its engine."""
    from vllm.v1.worker import workspace

    if manager is not None and workspace._manager is manager:
        workspace._manager = workspace.WorkspaceManager(manager._device, manager._num_ubatches)


@contextmanager
def workspaces_of_failures_left() -> Iterator[None]:
    """If what is built here fails, vLLM's manager of workspaces does not hold its worker, with all that was loaded."""
    from vllm.v1.worker import workspace

    before = workspace._manager
    try:
        yield
    except BaseException:
        workspace._manager = before
        raise


def lora_slot_tensors(worker: Any) -> Iterator[Any]:
    """The tensors that hold adapters, of every module that takes them."""
    for module in lora_modules(worker).values():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, name, ())
            yield from stacked if isinstance(stacked, list | tuple) else [stacked]


def _tensors_that_have_to_go(runner: Any) -> list[Any]:
    """Weak references to weights, KV caches and LoRA slots.

    A weight also lets go of its module here, of which it has a method: a cycle that outlasts a collection where several
    modules have that weight.
    """
    for weight in runner.model.parameters():
        vars(weight).clear()
    caches = (cache if isinstance(cache, list | tuple) else [cache] for cache in runner.kv_caches)  # a list until 0.26
    tensors = (*runner.model.parameters(), *itertools.chain(*caches), *lora_slot_tensors(runner.lora_manager))
    return [weakref.ref(tensor) for tensor in tensors]


def release_engine(engine: Any) -> None:
    """Free an engine's memory, and leave other engines of the process alone.

    vLLM's own `shutdown` does not do: it destroys the process's distributed groups and workspaces, which all engines
    (and a trainer) share.
    """
    runner, sleeps = model_runner(engine), can_sleep(engine)
    is_frozen = not any(each is engine for each in gc.get_objects())  # and would never be collected
    _forget_lora_pointers(lora_worker(engine))
    tensors = _tensors_that_have_to_go(runner)
    runner.compilation_config.static_forward_context.clear()
    runner.kv_caches.clear()
    runner.model = None
    runner.lora_manager = None
    engine.engine_core.engine_core = None
    _let_dynamo_forget(engine.kept_by_dynamo)
    _leave_workspaces(engine.workspaces)
    vars(engine).clear()  # the caller still has it, and what is frozen below is not collected when that ends
    del runner
    if is_frozen:
        gc.unfreeze()
    gc.collect()
    if any(tensor() is not None for tensor in tensors):
        gc.collect()  # what finalizers of the first one let go; it takes as long again, seconds in a large process
    if is_frozen:
        gc.freeze()  # as it was: the server's modules and other engines stay out of full collections
    if sleeps:
        free_sleep_pools()
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
