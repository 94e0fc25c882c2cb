"""What a rank of a sharded trainer holds in memory, as bytes of tensors on the CPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.training.run.worker import HFTrainer


@dataclass
class ShardMemory:
    """Bytes. `large`: of all layers and an untied LM head, on all ranks together. `layer`: of the largest layer.
    `head`: of that LM head. `replicated`: of the rest of the model. `loading`, `walking`: the most while reading the
    checkpoint, and in a walk. `resting`: between walks."""

    large: int
    layer: int
    head: int
    replicated: int
    loading: int
    walking: int
    resting: int


def tensor_bytes() -> int:
    """The bytes of all tensors that Python can see and that were not there before `gc.freeze`, each storage once."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in kinds and each.device.type == "cpu"]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


@contextmanager
def _most(*at: tuple[Any, str]) -> Iterator[list[int]]:
    """The most bytes whenever one of the functions `at` ends."""
    found, originals = [0], [(owner, name, getattr(owner, name)) for owner, name in at]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            found[0] = max(found[0], tensor_bytes())
            return result

        return call

    for owner, name, original in originals:
        setattr(owner, name, watched(original))
    try:
        yield found
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def measured(make: Callable[[], HFTrainer]) -> ShardMemory:
    """Load a sharded trainer and walk once."""
    # Not before: a test sees what a trainer of one rank imports.
    from tinker_local.backend.training.parallel.load_sharded import Checkpoint
    from tinker_local.backend.training.parallel.sharded_weights import ShardedWeights, Unit

    gc.collect()
    gc.freeze()
    try:
        with _most((Checkpoint, "elements"), (Unit, "views")) as loading:
            trainer = make()
        gc.collect()
        resting = tensor_bytes()
        weights: Any = trainer._loaded.weights
        with _most((ShardedWeights, "gather")) as walking, weights.walk(backward=True):
            pass
    finally:
        gc.unfreeze()
    model = trainer._loaded.model
    layers = model.get_submodule(trainer._loaded.family.decoder_path).layers
    in_units = {id(parameter) for module in layers for parameter in module.parameters()}
    if not trainer._loaded.tied_head:
        in_units |= {id(parameter) for parameter in model.lm_head.parameters()}
    others = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in in_units]
    sizes = [unit.nbytes for unit in weights._units]
    return ShardMemory(
        large=sum(sizes),
        layer=max(sizes[: len(layers)]),
        head=sum(sizes[len(layers) :]),
        replicated=sum(tensor.nbytes for tensor in others),
        loading=loading[0],
        walking=walking[0],
        resting=resting,
    )
