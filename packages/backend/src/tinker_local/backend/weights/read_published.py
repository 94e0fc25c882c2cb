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
    order = _order(form, module, read, codes.shape[1])
    scales = _groups(form, read(f"{module}.scales").T, codes.shape[1])
    zeros = _unpacked(read(f"{module}.qzeros"), bits)
    if not form.layout.zeros:
        _check_middle(form, module, zeros + form.zero_offset)
        return Packed(_stored(codes, bits), scales, None, order)
    if form.zero_offset and bool((zeros == 2**bits - 1).any()):
        raise UnsupportedError(
            f"{module}.qzeros has a zero point that is stored as {2**bits - 1}, which programs read as 0 or as "
            f"{2**bits} (checkpoint_format gptq); save it again as gptq_v2"
        )
    signed = zeros + (form.zero_offset - 2 ** (bits - 1))
    return Packed(_stored(codes, bits), scales, _groups(form, signed.T, codes.shape[1]), order)


def _order(form: Form, module: str, read: Read, inputs: int) -> torch.Tensor | None:
    """The groups of columns, int32 [K], if they are not side by side. UnsupportedError if there are no such groups, or
    if they are in another order and `config.json` does not say so."""
    assert form.order
    name, group = f"{module}.{form.order}", form.layout.group or inputs
    try:
        found = read(name).int()
    except KeyError:  # of GPTQ without an order, from some programs
        return None
    count = -(-inputs // group)
    if form.layout.order:
        if int(found.min()) < 0 or int(found.max()) >= count:
            raise UnsupportedError(f"{name} has groups from {found.min()} to {found.max()}, and there are {count}")
        return found
    if not torch.equal(found, (torch.arange(inputs) // group).int()):
        raise UnsupportedError(
            f"{name} has columns of a group that are not side by side, and "
            f"{'desc_act' if form.kind == 'gptq' else 'actorder'} of the quantization_config does not say so"
        )
    return None


def _check_middle(form: Form, module: str, zeros: torch.Tensor) -> None:
    """UnsupportedError unless zero points are those of symmetric codes."""
    middle = 2 ** (form.layout.bits - 1)
    if not bool((zeros == middle).all()):
        raise UnsupportedError(
            f"{module}.qzeros has the zero point {int(zeros[zeros != middle][0])}, and sym of the quantization_config "
            f"says that all are {middle} (checkpoint_format {'gptq' if form.zero_offset else 'gptq_v2'})"
        )


_AWQ_COLUMNS = torch.tensor((0, 2, 4, 6, 1, 3, 5, 7)).argsort()
"""Where the codes of eight columns are in an integer."""


def _awq(form: Form, module: str, read: Read) -> Packed:
    """`qweight` int32 [K, N / 8], `qzeros` [G, N / 8], `scales` [G, N]."""
    bits = form.layout.bits
    codes, zeros = (
        _unpacked(words, bits).view(len(words), -1, len(_AWQ_COLUMNS))[..., _AWQ_COLUMNS].flatten(1).T
        for words in (read(f"{module}.qweight"), read(f"{module}.qzeros"))
    )
    inputs = codes.shape[1]
    scales = _groups(form, read(f"{module}.scales").T, inputs)
    return Packed(_stored(codes, bits), scales, _groups(form, zeros - 2 ** (bits - 1), inputs))


def _packed(form: Form, module: str, read: Read) -> Packed:
    """Of compressed-tensors: `weight_packed` int32 [N, K / codes of a word], `weight_scale` [N, G],
    `weight_zero_point` int32 [N / codes of a word, G]."""
    bits = form.layout.bits
    codes = _unpacked(read(f"{module}.weight_packed"), bits)
    rows, inputs = codes.shape
    if (shape := read(f"{module}.weight_shape").tolist()) != [rows, inputs]:
        raise UnsupportedError(f"{module}.weight_shape is {shape}, and {module}.weight_packed has {[rows, inputs]}")
    zeros = None
    if form.layout.zeros:
        of_rows = _unpacked(read(f"{module}.weight_zero_point").T, bits).T[:rows]
        zeros = _groups(form, of_rows - 2 ** (bits - 1), inputs)
    else:
        _check_no_zeros(form, module, read)
    order = _order(form, module, read, inputs)
    return Packed(_stored(codes, bits), _groups(form, read(f"{module}.weight_scale"), inputs), zeros, order)


def _check_no_zeros(form: Form, module: str, read: Read) -> None:
    """UnsupportedError if symmetric codes of compressed-tensors have zero points other than 0, which it reads."""
    try:
        zeros = read(f"{module}.weight_zero_point")
    except KeyError:
        return
    if bool(zeros.float().any()):
        raise UnsupportedError(
            f"{module}.weight_zero_point has numbers other than 0, and the quantization_config says that weights are "
            f"symmetric ({form.told})"
        )


def _fp8(form: Form, module: str, read: Read) -> Packed:
    """`weight` float8 or int8 [N, K], and a scale for all, each row or each block."""
    codes = read(f"{module}.weight")
    rows, inputs = codes.shape
    _check_no_zeros(form, module, read)
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
    signed = (codes - 2 ** (bits - 1)).to(torch.int8).contiguous()
    return in_pairs(signed) if bits == 4 else signed


def _groups(form: Form, of_groups: torch.Tensor, inputs: int) -> torch.Tensor:
    """What groups have [N, G], for groups of one size: several times where that of the files does not divide K."""
    group = form.layout.group
    if group is None or inputs % group == 0 or form.layout.order:
        return of_groups.contiguous()
    size = math.gcd(group, inputs)
    return of_groups[:, torch.arange(0, inputs, size) // group]


_READ: Mapping[Kind, Callable[[Form, str, Read], Packed]] = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "packed": _packed}
