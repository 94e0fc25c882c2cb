"""One copy of the frozen base for both engines: vLLM's matrices are memory that the trainer has written.

vLLM's own loading says which rows of which tensor each parameter has, whatever a family calls and joins: it runs on the
trainer's tensors, and what it copies into a matrix is noted and not copied. A matrix whose rows lie in the trainer's
memory one after the other becomes a view of that. Any other is loaded as usual, into memory of vLLM's own: one with
padding, in another dtype, in another order. After loading, vLLM may replace a matrix too: on a CPU it packs those of
linear layers, which is 1.2 to 3.6 times as fast for few rows.
"""

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.stages import stage
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.vocabulary_method import pack_vocabularies
from tinker_local.backend.weights.lent_weights import LentWeights, SharedMatrices
from tinker_local.backend.weights.memory_holder import get, refuse
from tinker_local.backend.weights.packed import CODES
from tinker_local.backend.weights.precision import DENSE
from tinker_local.backend.weights.shared_memory import CannotShareError
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

LOAD_FORMAT = "tinker_local_shared"
"""vLLM's name of the loader, see `register`."""


@dataclass(slots=True, eq=False)
class Reading:
    """Where an engine that is built with `LOAD_FORMAT` gets its weights: from the holder at the address `holder`.
    `head`: in what its embedding and LM head are. `matrices`: what it has got there. `shared`, `whole`: bytes of them
    that its matrices are, and of all weights."""

    holder: str | None
    head: str = DENSE
    matrices: SharedMatrices | None = None
    shared: int = 0
    whole: int = 0

    def get(self, source: str, device: torch.device) -> LentWeights:
        """Waits for a trainer of the model at `source`. CannotShareError if it shares nothing."""
        assert self.holder is not None
        deposit = get(self.holder, wait=True)
        if deposit is None:
            raise CannotShareError("the trainer shares nothing")
        try:
            found = LentWeights.of(deposit, source, device)
        except CannotShareError as error:
            raise self.refused(str(error)) from None
        finally:
            for file in deposit.files:
                os.close(file)
        twice = [found.matrices.tensor(name) for name in found.matrices.again]
        self.matrices, self.whole = found.matrices, sum(each.nbytes for each in (*found.tensors.values(), *twice))
        return found

    def check(self, engine: Any) -> None:
        """CannotShareError unless `engine` still reads as many bytes of the trainer's memory as after loading. The plan
        of a GPU's memory counts on them."""
        found = bytes_in(engine, self.matrices)
        if found < self.shared:
            raise self.refused(f"vLLM has replaced {self.shared - found} bytes of matrices after it had loaded them")

    def refused(self, why: str) -> CannotShareError:
        """The error, of which the holder has been told."""
        assert self.holder is not None
        refuse(self.holder, why)
        return CannotShareError(why)


_reading: ContextVar[Reading] = ContextVar("reading")


@contextlib.contextmanager
def reading(holder: str | None, head: str = DENSE) -> Iterator[Reading]:
    """An engine that is built here with `LOAD_FORMAT` reads what the holder at the address `holder` keeps, its
    embedding and LM head in the precision `head`."""
    before = _reading.set(Reading(holder, head))
    try:
        yield _reading.get()
    finally:
        _reading.reset(before)


@functools.cache
def register() -> None:
    """Make the loader known to vLLM."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedLoader(BaseModelLoader):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            self._emptied = _Emptied()
            with contextlib.ExitStack() as self._until_loaded:
                self._until_loaded.enter_context(self._emptied.matrices())
                return super().load_model(*args, **kwargs)

        def download_model(self, model_config: Any) -> None:
            """Nothing is read from files."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            read = _reading.get()
            tied = read.head != DENSE and pack_vocabularies(model, read.head, self._emptied.device, model_config.model)
            self._until_loaded.close()  # what vLLM makes of matrices afterwards is its affair
            torch.cuda.empty_cache()  # each had memory before it was emptied
            with stage("trainer waited for"):
                weights = read.get(model_config.model, self._emptied.device)
            if tied:  # whatever the files have: newer versions tie only what has no matrix there
                weights = weights.codes_once()
            try:
                with stage("shared"):
                    read.shared = self._emptied.fill(model, weights)
            except (MemoryError, torch.AcceleratorError, torch.OutOfMemoryError):
                raise  # two copies would need more
            except Exception as error:  # of any type: a model's loading may do what a matrix without memory cannot
                log.info("trainer and sampler cannot share their weights", exc_info=True)
                raise read.refused(f"{type(error).__name__}: {error}".partition("\n")[0]) from None

    register_model_loader(LOAD_FORMAT)(SharedLoader)


def bytes_in(engine: Any, matrices: SharedMatrices | None) -> int:
    """Bytes of the model of `engine` that are in the memory of `matrices`."""
    pieces = {piece.untyped_storage().data_ptr() for piece in ([] if matrices is None else matrices.pieces)}
    parts = {
        (parameter.data_ptr(), parameter.nbytes)
        for parameter in served_model(engine).parameters()
        if parameter.numel() and parameter.untyped_storage().data_ptr() in pieces
    }
    return sum(size for _, size in parts)


def _vocabularies(model: Any) -> set[int]:
    """The identities of the dense matrices of embeddings and LM heads of `model`. vLLM adds rows up to a multiple of
    64, which are planned for."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    modules = (module for module in model.modules() if isinstance(module, VocabParallelEmbedding))
    dense = (module for module in modules if not hasattr(module, CODES))
    return {id(parameter) for module in dense for parameter in module.parameters(recurse=False)}


@dataclass(frozen=True, slots=True)
class _Copy:
    """Of `count` numbers to `place` of the target, from `shift` places before that in the memory `source`, or from
    `other_shift`, where the same numbers are again. `plain`: that is the trainer's, and both sides are contiguous, of
    one shape and one dtype."""

    source: int
    place: int
    count: int
    shift: int
    other_shift: int
    plain: bool


def _become(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Give `parameter` the memory of `data`, which may be on another device. It stays the same object, which vLLM's
    layers have and add attributes to."""
    other = torch.Tensor._make_subclass(type(parameter), data, require_grad=False)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


_WRITTEN_FIRST = frozenset({"per_layer_embeddings"})
"""Attributes of vLLM's modules whose tensors are written before they are read."""


def _make_tables(model: Any, device: torch.device) -> None:
    """Make on `device` what modules made where they found their matrices without memory: Pixtral's tower its
    frequencies, and Gemma 4 the room that it writes second embeddings into. ValueError for a table that cannot be made
    again."""
    for path, module in model.named_modules():
        for name, found in list(vars(module).items()):
            if isinstance(found, torch.Tensor) and found.is_meta:
                if name not in _WRITTEN_FIRST:
                    raise ValueError(f"vLLM made {path}.{name} where its matrices have no memory")
                setattr(module, name, torch.zeros_like(found, device=device))
        if vars(module).get("device") == torch.device("meta"):
            module.device = device
            for name, child in list(module.named_children()):
                if any(buffer.is_meta for buffer in child.buffers()) and hasattr(child, "config"):
                    setattr(module, name, type(child)(child.config).to(device))
    if without := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(f"vLLM made {without[0]} where its matrices have no memory")


class _Emptied(TorchDispatchMode):
    """Matrices of vLLM's model that have no memory yet (on torch's meta device), and the copies into them."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, list[_Copy]] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no other gets the number of one of them
        self._lent: Mapping[int, torch.Tensor] = {}
        self._further: Mapping[tuple[int, int], int] = {}
        self._written: set[int] = set()
        self.device = torch.device("meta")

    @contextlib.contextmanager
    def matrices(self) -> Iterator[None]:
        """Take its memory from each matrix as soon as a module has it, so that one at a time takes any."""

        here = threading.get_ident()

        def empty(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
            if threading.get_ident() != here:
                return  # another thread's module: the hook is one for the process
            if parameter is not None and parameter.dim() >= 2 and not parameter.is_meta:  # a tied one has been here
                self.device = parameter.device
                _become(parameter, torch.empty_like(parameter, device="meta"))
                self._storages.append(parameter.untyped_storage())
                self._copies[self._storages[-1]._cdata] = []

        hook = register_module_parameter_registration_hook(empty)
        try:
            yield
        finally:
            hook.remove()

    def fill(self, model: Any, weights: LentWeights) -> int:
        """Give each matrix of `model` its memory: the trainer's, if its rows lie there, else new memory. Returns the
        bytes of those in the trainer's.

        ValueError if there is one that loading leaves as vLLM made it: what that was is gone.
        """
        self._lent, self._further = weights.storages(), weights.further()
        with self:
            model.load_weights(iter(weights.tensors.items()))
        views: dict[int, torch.Tensor] = {}
        own: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            memory = parameter.untyped_storage()._cdata
            if memory not in self._copies:
                continue
            if not self._copies[memory]:
                raise ValueError(f"vLLM loads nothing into {name}")
            found = self._view(parameter)
            if found is None:
                own[name] = parameter
            else:
                views[id(parameter)] = found
        with_rows = _vocabularies(model)
        other = [name for name, parameter in own.items() if id(parameter) not in with_rows]
        if other and self.device.type == "cuda":  # its memory is planned for one copy
            raise ValueError(f"vLLM has {len(other)} matrices in another form, such as {other[0]}")
        for parameter in own.values():
            _become(parameter, torch.zeros_like(parameter, device=self.device))
        if own:
            with self:
                model.load_weights(iter(weights.tensors.items()))
        for parameter in model.parameters():
            if id(parameter) in views:
                _become(parameter, views[id(parameter)])
        self._copies, self._lent, self._storages = {}, {}, []
        _make_tables(model, self.device)
        return sum({(view.data_ptr(), view.nbytes): view.nbytes for view in views.values()}.values())

    def _view(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What `parameter` is of the trainer's memory, or None."""
        storage = parameter.untyped_storage()._cdata
        copies = sorted(self._copies[storage], key=lambda copy: copy.place)
        if storage in self._written or not parameter.is_contiguous():
            return None
        end, first = parameter.storage_offset(), copies[0]
        for copy in copies:
            if not copy.plain or copy.place != end or copy.source != first.source:
                return None
            if first.shift not in (copy.shift, copy.other_shift):
                return None
            end += copy.count
        if end != parameter.storage_offset() + parameter.numel():
            return None
        place = parameter.storage_offset() - first.shift
        memory = self._lent[first.source].untyped_storage()
        empty = torch.empty(0, dtype=parameter.dtype, device=self.device)
        return empty.set_(memory, place, parameter.shape, parameter.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or target.untyped_storage()._cdata not in self._copies:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._note(target, args[1])
            return target
        if func._schema.is_mutable:  # such as zeros in the rows that vLLM adds
            if target.numel():
                self._written.add(target.untyped_storage()._cdata)
            return target
        return func(*args, **kwargs)

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        memory = source.untyped_storage()._cdata
        plain = memory in self._lent and target.is_contiguous() and source.is_contiguous()
        plain = plain and (source.shape, source.dtype, source.device) == (target.shape, target.dtype, self.device)
        place = target.storage_offset()
        shift = place - source.storage_offset()
        other = shift - self._further.get((memory, source.storage_offset()), 0)
        copy = _Copy(memory, place, math.prod(target.shape), shift, other, plain)
        self._copies[target.untyped_storage()._cdata].append(copy)
