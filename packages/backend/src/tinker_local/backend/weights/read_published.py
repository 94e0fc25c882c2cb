"""Reads matrices of published checkpoints in fewer bits (`published.py`) as `Packed`: the same numbers, in the layout
that both engines read.

Legend: N rows (out), K columns (in), G groups in a row.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from tinker_local.backend.weight_files import stored_tensors
from tinker_local.backend.weights.codes import Packed, in_pairs
from tinker_local.backend.weights.published import Published
from tinker_local.backend.weights.published_forms import Form, Kind
from tinker_local.types import UnsupportedError

Read = Callable[[str], torch.Tensor]
"""A tensor by its name in the files. KeyError without it."""


@contextmanager
def reading(folder: Path) -> Iterator[Read]:
    """Reads tensors of the files in `folder`."""
    tensors = stored_tensors(folder)
    with ExitStack() as opened:
        files = {file: opened.enter_context(safe_open(file, "pt")) for file in {each.file for each in tensors.values()}}
        yield lambda name: files[tensors[name].file].get_tensor(name)


def read_packed(published: Published, module: str, read: Read) -> Packed:
    """The matrix of `module`. UnsupportedError if its zero points, or the groups of its columns, are not as
    `config.json` says."""
    return _READ[published.form.kind](published.form, module, read)


def _gptq(form: Form, module: str, read: Read) -> Packed:
    """`qweight` int32 [K / codes of a word, N], `qzeros` [G, N / codes of a word], `scales` [G, N]."""
    bits = form.layout.bits
    codes = _unpacked(read(f"{module}.qweight").T, bits)
    zeros = _unpacked(read(f"{module}.qzeros"), bits) + form.zero_offset
    middle = 2 ** (bits - 1)
    if not bool((zeros == middle).all()):
        other = int(zeros[zeros != middle][0])
        raise UnsupportedError(
            f"{module}.qzeros has the zero point {other}, and sym of the quantization_config says that all are "
            f"{middle} (checkpoint_format {'gptq' if form.zero_offset else 'gptq_v2'})"
        )
    return Packed(_stored(codes, bits), _groups(form, read(f"{module}.scales").T, codes.shape[1]))


def _fp8(form: Form, module: str, read: Read) -> Packed:
    """`weight` float8 [N, K], and a scale for all, each row or each block."""
    codes = read(f"{module}.weight")
    rows, inputs = codes.shape
    scales = _first(read, (f"{module}.weight_scale_inv", f"{module}.weight_scale"))
    if form.block_rows is None:
        return Packed(codes, scales.reshape(-1, 1).expand(rows, 1).contiguous())
    of_rows = torch.arange(rows) // form.block_rows
    return Packed(codes, _groups(form, scales[of_rows], inputs))


def _first(read: Read, names: tuple[str, ...]) -> torch.Tensor:
    """The first of the tensors that is there."""
    for name in names[:-1]:
        try:
            return read(name)
        except KeyError:
            continue
    return read(names[-1])


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` without sign, int16 [R, C x codes of a word], of int32 `words` [R, C]: the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & 2**bits - 1).to(torch.int16).flatten(1)


def _stored(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As `Packed` has codes [N, K] without sign, of which the middle one is 0 there."""
    signed = (codes - 2 ** (bits - 1)).to(torch.int8)
    return in_pairs(signed) if bits == 4 else signed


def _groups(form: Form, of_groups: torch.Tensor, inputs: int) -> torch.Tensor:
    """What groups have [N, G], for groups of one size: several times where that of the files does not divide K."""
    group = form.layout.group
    if group is None or inputs % group == 0:
        return of_groups.contiguous()
    size = math.gcd(group, inputs)
    return of_groups[:, torch.arange(0, inputs, size) // group]


_READ: Mapping[Kind, Callable[[Form, str, Read], Packed]] = {"gptq": _gptq, "fp8": _fp8}
