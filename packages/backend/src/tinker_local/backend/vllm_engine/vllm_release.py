"""Letting go of an engine: what vLLM and dynamo keep for the rest of the process, and with it the engine's weights."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

from tinker_local.backend.vllm_engine.kept_by_dynamo import let_dynamo_forget
from tinker_local.backend.vllm_engine.vllm_compat import lora_worker, model_runner
from tinker_local.backend.vllm_engine.vllm_sleep import can_sleep, free_sleep_pools


def _forget_lora_pointers(worker: Any) -> None:
    """vLLM's Triton kernels note the layout of LoRA slots for the rest of the process, by the addresses where these
    lie. The notes keep some of the slots in memory, and would be taken for those of another engine's slots of other
    ranks that come to lie there."""
    slots = [(slot.data_ptr(), slot.nbytes) for slot in _lora_slots(worker)]
    for name in [name for name in sys.modules if name.startswith("vllm.lora.ops.triton_ops.")]:
        for notes in [
            value
            for key, value in vars(sys.modules[name]).items()
            if key.endswith("_PTR_DICT") and isinstance(value, dict)
        ]:
            for addresses in list(notes):
                if any(start <= address < start + size for address in addresses for start, size in slots):
                    del notes[addresses]


def _lora_slots(worker: Any) -> Iterator[Any]:
    """The tensors that hold adapters, of every module that takes them."""
    for module in worker._adapter_manager.modules.values():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, name, ())
            yield from stacked if isinstance(stacked, list | tuple) else [stacked]


def release_engine(engine: Any) -> None:
    """Let go of an engine's memory and leave other engines of the process alone.

    vLLM's own `shutdown` cannot be used: it destroys the process's distributed groups and workspaces, which are shared
    by all engines (and by a trainer).
    """
    runner, sleeps = model_runner(engine), can_sleep(engine)
    _forget_lora_pointers(lora_worker(engine))
    runner.compilation_config.static_forward_context.clear()
    runner.kv_caches.clear()
    runner.model = None
    runner.lora_manager = None
    engine.engine_core.engine_core = None
    let_dynamo_forget(engine.kept_by_dynamo)
    gc.unfreeze()  # vLLM froze the heap when the engine was built; what is frozen is never collected
    gc.collect()
    if sleeps:
        free_sleep_pools()
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
