"""Adapter versions as vLLM holds them: made ready off the engine's thread, handed over without a file in between."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tinker_local.backend.sampling.interface import AdapterVersion
from tinker_local.backend.vllm_engine import vllm_compat
from tinker_local.backend.vllm_engine.adapter_files import HostAdapter, check_adapter_taken, read_adapter
from tinker_local.backend.vllm_engine.host_memory import new_vector
from tinker_local.types import ApiError, InternalError, InvalidRequestError


class VLLMAdapters:
    """The versions of one engine. Each gets a LoRA id of its own that is never used again, so neither weights nor
    prefix cache of two versions can mix.

    vLLM keeps the versions used last in memory. Wherever it would read one from a folder, it gets what was made ready
    here instead: usually beforehand in another thread (`prepare`), so that the engine only copies it into a slot. If
    vLLM drops a version that is in use and needs it again within a step, it is made ready there and then.
    """

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank
        self._ids = itertools.count(1)
        self._requests: dict[str, Any] = {}  # name → LoRARequest, verified; the engine thread alone changes it
        self._versions: dict[str, AdapterVersion] = {}  # those with a LoRARequest
        self._preparing: dict[str, asyncio.Task[Any]] = {}
        self._handed_over: Any = None  # a LoRAModel, while the engine takes it
        self._worker: Any = None
        self._locks_pages = not vllm_compat.runs_on_cpu()

    def __len__(self) -> int:
        """How many versions were verified and not forgotten."""
        return len(self._requests)

    def attach(self, engine: Any) -> None:
        """Serve a new engine, in place of the last."""
        self._worker = vllm_compat.lora_worker(engine)
        self._worker._load_adapter = self._load_for_vllm

    def detach(self) -> None:
        """The engine is given up."""
        self._worker = None

    # On the event loop ----------------------------------------------------------------------------------------------

    async def prepare(self, version: AdapterVersion) -> Any:
        """What `request` hands to the engine, made in a thread; None if vLLM has the version.

        Raises what `read_adapter` and `check_adapter_taken` raise. Several calls at once share the work.
        """
        worker = self._worker
        if worker is None:  # the engine is being built again, on its own thread, where `request` will see to it
            return None
        request = self._requests.get(version.name)
        if request is not None and vllm_compat.holds_adapter(worker, request.lora_int_id):
            return None
        task = self._preparing.get(version.name)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._make, version, worker))
            self._preparing[version.name] = task
            task.add_done_callback(lambda _: self._preparing.pop(version.name, None))
        return await asyncio.shield(task)

    # On the engine's thread -----------------------------------------------------------------------------------------

    def request(self, version: AdapterVersion, engine: Any, prepared: Any) -> Any:
        """vLLM's handle of `version`, which is loaded when this returns. `prepared`: what `prepare` gave."""
        request = self._requests.get(version.name)
        if request is not None and request.lora_int_id in engine.list_loras():
            return request
        if prepared is None:  # vLLM dropped it since it was asked
            prepared = self._make(version, self._worker)
        if request is None:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(version.name, next(self._ids), str(version.path))
        prepared.id = request.lora_int_id
        self._handed_over = prepared
        try:
            engine.add_lora(request)
        except Exception as error:
            engine.remove_lora(request.lora_int_id)
            if isinstance(error, (ApiError, torch.OutOfMemoryError)):
                raise
            raise _refusal(version, error) from error
        finally:
            self._handed_over = None
        self._requests[version.name], self._versions[version.name] = request, version
        return request

    def forget(self, name: str, engine: Any) -> None:
        """Take a version that no request uses from the engine."""
        self._versions.pop(name, None)
        request = self._requests.pop(name, None)
        if request is not None:
            engine.remove_lora(request.lora_int_id)

    def _load_for_vllm(self, request: Any) -> Any:
        """In place of vLLM's reading of a folder."""
        prepared = self._handed_over
        if prepared is None or prepared.id != request.lora_int_id:
            prepared = self._make(self._versions[request.lora_name], self._worker)
            prepared.id = request.lora_int_id
        return prepared

    # On any thread --------------------------------------------------------------------------------------------------

    def _make(self, version: AdapterVersion, worker: Any) -> Any:
        """vLLM's `LoRAModel` of a version, packed, scaled and checked."""
        if worker is None:
            raise InternalError("the sampling engine is not running")
        adapter = read_adapter(version, self._max_rank)
        numbers, tensors = self._copy(adapter, worker.lora_config.lora_dtype)
        try:
            lora = vllm_compat.build_lora_model(worker, adapter.config, tensors)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise _refusal(version, error) from error
        check_adapter_taken(version, numbers, len(tensors), lora, worker._adapter_manager.modules)
        return lora

    def _copy(self, adapter: HostAdapter, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The adapter in the engine's dtype, in one vector and as views of it: vLLM scales B where it lies."""
        count = sum(tensor.numel() for tensor in adapter.tensors.values())
        if adapter.flat is not None:
            numbers = new_vector(count, dtype, partial(_fill, [adapter.flat]), locked=self._locks_pages)
            first = adapter.flat.storage_offset()
            starts = [tensor.storage_offset() - first for tensor in adapter.tensors.values()]
        else:
            parts = list(adapter.tensors.values())
            numbers = new_vector(count, dtype, partial(_fill, parts), locked=self._locks_pages)
            starts = [0, *itertools.accumulate(tensor.numel() for tensor in parts)][:-1]
        return numbers, {
            name: numbers[start:][: tensor.numel()].view(tensor.shape)
            for start, (name, tensor) in zip(starts, adapter.tensors.items(), strict=True)
        }


def _fill(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
    """Write `tensors` one behind the other."""
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        part.view(tensor.shape).copy_(tensor)


def _refusal(version: AdapterVersion, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"sampler version {version.name}: vLLM cannot serve it: {type(error).__name__}: {error}")
