"""Moves the matrices of a frozen model into memory that a sampler maps, too."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tinker_local.backend.weight_files import folder_of, weight_files
from tinker_local.backend.weights.checksum import checksum
from tinker_local.backend.weights.joined_names import JOINED, QKV
from tinker_local.backend.weights.lent_weights import Place, SharedMatrices
from tinker_local.backend.weights.memory_holder import Deposit, get, put
from tinker_local.backend.weights.packed import MATRICES
from tinker_local.backend.weights.shared_memory import map_shared, write_shared

PIECE_BYTES = 2**30
"""Of a piece of memory, unless a matrix is larger."""
_ALIGNED = 512
"""Bytes that the first of joined matrices begins at a multiple of, as torch's own memory does."""

VALUES_ARE_KEYS = ("q_proj", "k_proj", "k_proj")
"""What vLLM joins to one matrix where attention has no projection of values."""


@dataclass(frozen=True, slots=True)
class InFiles:
    """`places`: where tensors of a model's files are in the pieces, by the names there, with codes and scales in place
    of what is packed. `packed`: the names in the files of what is."""

    places: Mapping[str, Place]
    packed: Set[str]


FileNames = Callable[[Any, Mapping[int, int]], InFiles]
"""See `file_names.py`."""


def share_matrices(model: Any, source: str, device: torch.device, holder: str, file_names: FileNames) -> SharedMatrices:
    """Put all matrices of transformers' frozen `model`, read from `source` into the host's memory, into memory of
    `device` that the holder at the address `holder` keeps, and return them. If a trainer before this one has put them
    there, read those.

    Its parameters are the same objects afterwards. RuntimeError if what is there is another model, has changed, or was
    read from other files.
    """
    deposit = get(holder, wait=False)
    if deposit is None:
        files, matrices = _written(model, device)
        try:
            _replace(model, matrices)
            said = {**_said(model, matrices, file_names), "read": _read_from(source)}
            put(holder, Deposit(said, files))
        finally:
            for file in files:
                os.close(file)
        return matrices
    try:
        matrices = SharedMatrices.mapped(deposit, device)
    finally:
        for file in deposit.files:
            os.close(file)
    if deposit.said["read"] != _read_from(source):
        raise RuntimeError(f"the files of {source} are not those that the sampler's weights were read from")
    matrices.verify()
    _replace(model, matrices)
    return matrices


def _read_from(source: str) -> list[list[str | int]]:
    """Name, size and time of each file of weights; nothing if they are not on this machine."""
    folder = folder_of(source)
    files = [] if folder is None else [folder / name for name in weight_files(folder)]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _said(model: Any, matrices: SharedMatrices, file_names: FileNames) -> Mapping[str, Any]:
    numbers = {piece.untyped_storage()._cdata: number for number, piece in enumerate(matrices.pieces)}
    files = file_names(model, numbers)
    return {
        "pieces": [len(piece) for piece in matrices.pieces],
        "places": {name: asdict(place) for name, place in matrices.places.items()},
        "sums": matrices.sums,
        "again": {name: asdict(place) for name, place in matrices.again.items()},
        "files": {name: asdict(place) for name, place in files.places.items()},
        "packed": sorted(files.packed),
    }


def _replace(model: Any, matrices: SharedMatrices) -> None:
    """Give the parameters of `model` their numbers in `matrices`."""
    parameters = {name: each for name, each in model.named_parameters() if each.dim() >= 2}
    here = {name: (str(each.dtype), tuple(each.shape)) for name, each in parameters.items()}
    there = {name: (f"torch.{place.dtype}", tuple(place.shape)) for name, place in matrices.places.items()}
    if here != there:
        differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        raise RuntimeError(f"the shared weights are not those of this model: {differing[0]} differs")
    for name, parameter in parameters.items():
        parameter.data = matrices.tensor(name)


def _written(model: Any, device: torch.device) -> tuple[list[int], SharedMatrices]:
    """Descriptors of new memory with the matrices of `model`, and these, mapped."""
    files: list[int] = []
    pieces: list[torch.Tensor] = []
    places: dict[str, Place] = {}
    again: dict[str, Place] = {}
    parameters = dict(model.named_parameters())
    try:
        for size, of_piece in _layout(parameters, _runs(model)):

            def fill(memory: torch.Tensor, of_piece: Sequence[tuple[str, Place]] = of_piece) -> None:
                for name, place in of_piece:
                    place.tensor([memory] * (place.piece + 1)).copy_(parameters[name].detach())

            files.append(write_shared(size, device, fill))
            pieces.append(map_shared(files[-1], size, device))
            for name, place in of_piece:
                (again if name in places else places)[name] = place
        matrices = SharedMatrices(pieces, places, {})
        sums = {name: checksum(matrices.tensor(name)) for name in places}
        return files, SharedMatrices(pieces, places, sums, again)
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _runs(model: Any) -> Iterator[Sequence[str]]:
    """The names of all matrices, those that the trainer and vLLM join together in their order: one comes twice where
    vLLM joins it twice."""
    given: set[str] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        children = dict(module.named_children())
        for joined in JOINED:
            parts = joined.parts
            if joined is QKV and getattr(module, "v_proj", module) is None:  # keys are values, too
                parts = VALUES_ARE_KEYS
            if all(isinstance(children.get(part), torch.nn.Linear) for part in parts):
                for kind in ("weight", *MATRICES):
                    run = [f"{prefix}{part}.{kind}" for part in parts if kind in children[part]._parameters]
                    given.update(run)
                    yield run
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and f"{prefix}{name}" not in given:
                given.add(f"{prefix}{name}")
                yield [f"{prefix}{name}"]


def _layout(
    parameters: Mapping[str, torch.Tensor], runs: Iterator[Sequence[str]]
) -> Iterator[tuple[int, Sequence[tuple[str, Place]]]]:
    """The size of each piece, and what is where in it. A run is in one piece, without gaps."""
    number, size = 0, 0
    places: list[tuple[str, Place]] = []
    for run in runs:
        names = [name for name in run if name in parameters]  # without a tied head, which is another name of a matrix
        length = sum(parameters[name].nbytes for name in names)
        if places and size + length > PIECE_BYTES:
            yield size, places
            number, size, places = number + 1, 0, []
        for name in names:
            tensor = parameters[name]
            shape, dtype = [*tensor.shape], str(tensor.dtype).removeprefix("torch.")
            places.append((name, Place(number, size, dtype, shape, [*torch.empty(shape, device="meta").stride()])))
            size += tensor.nbytes
        size = -(-size // _ALIGNED) * _ALIGNED
    if places:
        yield size, places
