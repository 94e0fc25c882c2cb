"""Adapter versions in vLLM: prepared off the engine's thread, and handed over in memory."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.adapters.host_adapters import HostAdapter, host_adapter
from tinker_local.backend.families import OTHER, family_of
from tinker_local.backend.families.family import ROUTERS
from tinker_local.backend.threads import without_pool
from tinker_local.backend.vllm_engine.compat_vllm import (
    divides_b,
    holds_adapter,
    lora_modules,
    lora_worker,
    module_renames,
    runs_on_cpu,
    taken_by,
    tower_prefixes,
)
from tinker_local.backend.vllm_engine.host_memory import new_vector
from tinker_local.backend.vllm_engine.moved_sequences import TornSlotError
from tinker_local.types import ApiError, InternalError, InvalidRequestError

if TYPE_CHECKING:
    from tinker_local.backend.vllm_engine.rank_leader import Leader


@dataclass(slots=True, eq=False)
class _Target:
    """Weights that move under running sequences, in one slot. `request`: vLLM's handle, the same for all versions.
    `number`: of `version`, which is in the slot. `tower`: it changes the vision tower. `lora`: vLLM's
    `LoRAModel` of it, in case vLLM drops it; None in a new engine. `broken`: why it is not in the
    slot, after a change that failed."""

    request: Any
    version: AdapterVersion
    number: int
    tower: bool = False
    lora: Any = None
    broken: InternalError | None = None

    def holds(self, version: AdapterVersion, number: int, lora: Any, *, tower: bool) -> None:
        """Its slot is being written with `version`."""
        self.version, self.number, self.lora, self.tower, self.broken = version, number, lora, tower, None

    def starts_again(self) -> None:
        """Another engine serves it."""
        self.lora = None

    def breaks(self, error: Exception) -> InternalError:
        """The slot could not be written; what clients see."""
        self.broken = InternalError(
            f"the weights of {self.request.lora_name} could not be changed to those of its in-flight save "
            f"{self.number} ({type(error).__name__}: {error}); save with kind='inflight' again"
        )
        return self.broken


class VLLMAdapters:
    """The versions of one engine. Each gets a new LoRA id, so two versions can share neither weights nor prefix cache.

    vLLM keeps the most recent versions in memory. Instead of reading another from its folder, it calls `load`, which
    hands over what `prepare` made in another thread: the engine only copies it into a slot. If vLLM drops a version in
    use and needs it again within a step, `load` makes it on the spot.

    A target has one LoRA id for all of its versions, and with it its sequences. Their keys and values are under the
    name of the target and the salt of the request.
    """

    def __init__(self, max_rank: int, leader: "Leader | None" = None) -> None:
        """`leader`: tells other ranks of each version that is made."""
        self._max_rank = max_rank
        self._leader = leader
        self._ids = itertools.count(1)
        self._requests: dict[str, Any] = {}  # by name, verified; only the engine thread changes it
        self._versions: dict[str, AdapterVersion] = {}  # those with a LoRARequest
        self._with_tower: set[str] = set()  # names of versions that change the vision tower
        self._preparing: dict[str, asyncio.Task[Any]] = {}
        self._targets: dict[str, _Target] = {}  # only the engine thread changes it
        self._target_ids: dict[int, _Target] = {}
        self._handed_over: Any = None  # a LoRAModel, during `add_lora`
        self._worker: Any = None
        self._family = OTHER
        self._locks_pages = not runs_on_cpu()

    def __len__(self) -> int:
        """How many versions are verified."""
        return len(self._requests)

    def attach(self, engine: Any) -> None:
        """Serve a new engine in place of the last."""
        self._worker = lora_worker(engine)
        config = engine.model_config
        for target in self._targets.values():
            target.starts_again()
        self._family = family_of(config.hf_config.model_type, config.model)

    def detach(self) -> None:
        """The engine is gone."""
        self._worker = None

    # On the event loop ----------------------------------------------------------------------------------------------

    async def prepare(self, version: AdapterVersion) -> Any:
        """What `request` hands to the engine, made in a thread; None if vLLM has the version.

        Raises what `host_adapter` and `check_adapter_taken` raise. Concurrent calls share the work.
        """
        worker = self._worker
        if worker is None:  # the engine is being rebuilt, and `request` will load it
            return None
        request = self._requests.get(version.name)
        if request is not None and holds_adapter(worker, request.lora_int_id):
            return None
        return await self._prepared(version.name, version, worker)

    async def prepare_target(self, name: str, version: AdapterVersion, number: int) -> Any:
        """As `prepare`, for `move`; None if the target has this version or a later one."""
        worker, target = self._worker, self._targets.get(name)
        if worker is None or (target is not None and self._serves(target, number, worker)):
            return None
        return await self._prepared(f"{name} {version.name}", version, worker)

    @staticmethod
    def _serves(target: _Target, number: int, worker: Any) -> bool:
        """Whether nothing has to be read for a sequence that needs version `number` of `target`, or a later one."""
        return target.number >= number and target.broken is None and holds_adapter(worker, target.request.lora_int_id)

    async def _prepared(self, key: str, version: AdapterVersion, worker: Any) -> Any:
        task = self._preparing.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(without_pool, self.make, version, worker))
            self._preparing[key] = task
            task.add_done_callback(lambda _: self._preparing.pop(key, None))
        return await asyncio.shield(task)

    # On the engine's thread -----------------------------------------------------------------------------------------

    def request(self, version: AdapterVersion, engine: Any, prepared: Any) -> Any:
        """Load `version` and return vLLM's handle. `prepared`: what `prepare` gave."""
        request = self._requests.get(version.name)
        if request is not None and request.lora_int_id in engine.list_loras():
            return request
        if prepared is None:  # vLLM dropped it since `prepare`
            prepared = self.make(version, self._worker)
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

    def move(self, name: str, version: AdapterVersion, number: int, engine: Any, prepared: Any) -> bool:
        """Put `version` into the slot of a target; False if it has this one or a later one already. `prepared`: what
        `prepare_target` gave. If the slot cannot be written, the target is broken until a later version is in it.

        Raises what `make` raises, with the target as it was, and TornSlotError if it is broken.
        """
        target = self._targets.get(name)
        if target is not None and target.number >= number:
            if target.broken is not None:
                raise TornSlotError(target.broken)
            return False
        if prepared is None:
            prepared = self.make(version, self._worker)
        from vllm.lora.request import LoRARequest

        if target is None:
            target = _Target(LoRARequest(name, next(self._ids), name), version, 0)
            self._targets[name] = self._target_ids[target.request.lora_int_id] = target
        self._write(target, version, number, engine, prepared)
        return True

    def _write(self, target: _Target, version: AdapterVersion, number: int, engine: Any, prepared: Any) -> None:
        from vllm.lora.request import LoRARequest

        lora_id = target.request.lora_int_id
        prepared.id = lora_id
        target.holds(version, number, prepared, tower=target.tower or version.name in self._with_tower)
        self._handed_over = prepared
        try:
            engine.add_lora(LoRARequest(version.name, lora_id, str(version.path), load_inplace=True))
        except Exception as error:
            engine.remove_lora(lora_id)
            raise TornSlotError(target.breaks(error)) from error
        finally:
            self._handed_over = None

    def moving(self, name: str, engine: Any) -> tuple[Any, int, bool]:
        """Of a target: vLLM's handle, the number of the version in its slot, and whether that changes the vision tower.
        InternalError if it is broken."""
        target = self._targets[name]
        if target.broken is not None:
            raise target.broken
        if target.request.lora_int_id not in engine.list_loras():  # vLLM dropped it, or this is a new engine
            lora = target.lora or self.make(target.version, self._worker)
            try:
                self._write(target, target.version, target.number, engine, lora)
            except TornSlotError as torn:
                raise torn.error from torn
        return target.request, target.number, target.tower

    def end_target(self, name: str, engine: Any) -> None:
        """Remove a target that no request uses from the engine."""
        target = self._targets.pop(name, None)
        if target is not None:
            del self._target_ids[target.request.lora_int_id]
            engine.remove_lora(target.request.lora_int_id)

    def changes_tower(self, version: AdapterVersion) -> bool:
        """Whether `version`, which was requested, has its own image features."""
        return version.name in self._with_tower

    def forget(self, name: str, engine: Any) -> None:
        """Remove a version that no request uses from the engine."""
        self._versions.pop(name, None)
        self._with_tower.discard(name)
        request = self._requests.pop(name, None)
        if request is not None:
            engine.remove_lora(request.lora_int_id)

    def load(self, request: Any) -> Any:
        """The `LoRAModel` of a `LoRARequest`; vLLM calls it instead of reading the folder."""
        prepared = self._handed_over
        if prepared is None or prepared.id != request.lora_int_id:
            target = self._target_ids.get(request.lora_int_id)
            if target is not None:
                return target.lora
            prepared = self.make(self._versions[request.lora_name], self._worker)
            prepared.id = request.lora_int_id
        return prepared

    # On any thread --------------------------------------------------------------------------------------------------

    def make(self, version: AdapterVersion, worker: Any) -> Any:
        """vLLM's `LoRAModel` of a version, packed and checked."""
        if worker is None:
            raise InternalError("the sampling engine is not running")
        if self._leader is None:
            return self._made(version, worker)
        with self._leader.preparing(version) as prepared:
            return prepared.kept_for(self._made(version, worker))

    def _made(self, version: AdapterVersion, worker: Any) -> Any:
        adapter = host_adapter(version, self._max_rank)
        numbers, tensors = self._copy(adapter, worker.lora_config.lora_dtype)
        named = {self._family.tower_in_vllm(name): tensor for name, tensor in tensors.items()}
        try:
            lora = build_lora_model(worker, adapter.config, named)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise _refusal(version, error) from error
        if any(name.startswith(tower_prefixes(worker)) for name in lora.loras):
            if not worker.lora_config.enable_tower_connector_lora:
                raise InvalidRequestError(
                    f"sampler version {version.name}: it changes the vision tower, and this server's sampler has the "
                    "base model's alone; start the server with --train-vision"
                )
            self._with_tower.add(version.name)
        check_adapter_taken(version, numbers, len(tensors), lora, lora_modules(worker))
        return lora

    def _copy(self, adapter: HostAdapter, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy in the engine's dtype, in one vector and as views of it: vLLM scales B in place."""
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
    """Write the concatenation of `tensors`."""
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        part.view(tensor.shape).copy_(tensor)


def _refusal(version: AdapterVersion, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"sampler version {version.name}: vLLM cannot serve it: {type(error).__name__}: {error}")


def build_lora_model(worker: Any, peft_config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """vLLM's `LoRAModel` of tensors by PEFT's names, packed as the modules of `worker` are. The caller sets its `id`.

    `tensors`: in host memory and in `lora_config.lora_dtype`; the model keeps them and may write to them. Raises what
    vLLM raises for configurations and names that it does not support. Does not change `worker`; any thread may call it.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager, config = worker._adapter_manager, worker.lora_config
    peft = PEFTHelper.from_dict(
        dict(peft_config) | {"vllm_max_position_embeddings": worker.max_position_embeddings}  # as vLLM reads a folder
    )
    peft.validate_legal(config)
    lora = worker._lora_model_cls.from_lora_tensors(
        1,
        tensors,
        peft,
        device="cpu",
        dtype=config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=module_renames(manager.model),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    # vLLM repeats this when it registers the adapter, and then finds nothing to do.
    manager._create_merged_loras_inplace(lora)
    return lora


def check_adapter_taken(version: AdapterVersion, numbers: torch.Tensor, tensors: int, lora: Any, modules: Any) -> None:
    """InvalidRequestError unless all `tensors` of an adapter reached modules of their size, and all are finite.

    vLLM silently ignores tensors that match none of its modules, and those of routers. `lora`: vLLM's `LoRAModel`,
    packed (`q_proj`, `k_proj` and `v_proj` are one entry `qkv_proj`, and so on). `modules`: vLLM's modules that can
    take an adapter, by name. `numbers`: everything in `lora`, in one vector.
    """
    where = f"sampler version {version.name}"
    weights = lora.loras
    ignored = sorted(name for name in weights if name not in modules or name.rpartition(".")[2] in ROUTERS)
    if ignored:
        raise InvalidRequestError(f"{where}: vLLM does not use the tensors of {', '.join(ignored)}")
    finite = all_finite(numbers)
    taken = 0
    for name, module in weights.items():
        pairs, places = _pairs(module), taken_by(modules[name])
        if len(pairs) == 1 < len(places) and divides_b(modules[name]):
            places = [replace(places[0], outputs=sum(place.outputs for place in places))]
        for (a, b), place in zip(pairs, places, strict=True):
            if a is None or b is None:  # the adapter only has some of the packed ones
                continue
            # vLLM copies a smaller matrix into a corner of its buffer.
            if (a.shape[-1], b.shape[-2]) != (place.inputs, place.outputs):
                raise InvalidRequestError(
                    f"{where}: {name} is {a.shape[-1]} to {b.shape[-2]} wide in the adapter, and "
                    f"{place.inputs} to {place.outputs} in the model"
                )
            experts = tuple(len(factor) if factor.ndim == 3 else 1 for factor in (a, b))
            if experts != (place.experts_a, place.experts_b):
                raise InvalidRequestError(
                    f"{where}: {name} has A of {experts[0]} and B of {experts[1]} experts in the adapter, and "
                    f"{place.experts_a} and {place.experts_b} in the model (1: all share it)"
                )
            if not finite and not (all_finite(a) and all_finite(b)):
                raise InvalidRequestError(f"{where}: the tensors of {name} hold NaN or infinity")
            taken += 2
    if taken != tensors:
        raise InvalidRequestError(f"{where}: vLLM took {taken} of its {tensors} tensors")


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without a copy: aminmax propagates NaN, and `isfinite` takes twenty
    times as long on a CPU."""
    low, high = torch.aminmax(values)
    return bool(low.isfinite() and high.isfinite())


def _pairs(weights: Any) -> list[tuple[Any, Any]]:
    """A and B of a module, a pair for each packed one."""
    if isinstance(weights.lora_a, list):
        return list(zip(weights.lora_a, weights.lora_b, strict=True))
    return [(weights.lora_a, weights.lora_b)]
