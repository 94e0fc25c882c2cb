"""The forms in which published checkpoints store a matrix in fewer bits, and what their `quantization_config` may say.

Legend: N rows (out), K columns (in).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

from tinker_local.backend.weight_files import StoredTensor
from tinker_local.backend.weights.layout import Layout, Scales
from tinker_local.types import UnsupportedError

_SCALES: Mapping[str, Scales] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_WORD = 32
"""Bits of an integer that codes are packed into."""

Kind = Literal["gptq", "awq", "fp8", "packed"]


class UnknownMethodError(UnsupportedError):
    """A method that is not among `FORMS`."""


@dataclass(frozen=True, slots=True)
class Form:
    """`kind`: where what is (`read_published.py`). `method`: whose form it is; `told`: in words. `codes`: the suffix of
    the tensor of codes, which has one of `dtypes`; `suffixes`: of all tensors that a module may have. `block_rows`: how
    many rows share a scale of FP8 (None: all or each). `order`: the suffix of the groups of columns. `zero_offset`:
    what is added to stored zero points."""

    kind: Kind
    method: str
    told: str
    layout: Layout
    codes: str
    dtypes: tuple[str, ...]
    suffixes: tuple[str, ...]
    block_rows: int | None = None
    order: str = ""
    zero_offset: int = 0

    def with_scales(self, dtype: str, folder: Path) -> "Form":
        """The form with scales of `dtype`, as safetensors calls it."""
        if dtype not in _SCALES:
            raise UnsupportedError(
                f"{folder}: scales in {dtype} ({self.told}) cannot be served: {', '.join(_SCALES)} can"
            )
        return replace(self, layout=replace(self.layout, scales=_SCALES[dtype]))

    def scale_of(self, stem: str, parts: Mapping[str, StoredTensor]) -> str:
        """The suffix of the module's scales among its `parts`; UnsupportedError if it has none."""
        possible = [suffix for suffix in _SCALE_SUFFIXES if suffix in self.suffixes]
        found = [suffix for suffix in possible if suffix in parts]
        codes = parts[self.codes]
        if len(found) > 1:
            raise UnsupportedError(
                f"{codes.file}: {stem} has {' and '.join(found)} ({self.told}), and one of them is due; download the "
                "model again"
            )
        if not found:
            raise UnsupportedError(
                f"{codes.file}: {codes.name} is in {codes.dtype} ({self.told}), and there is no "
                f"{' or '.join(f'{stem}.{suffix}' for suffix in possible)}; download the model again"
            )
        return found[0]

    def shape_of(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """(N, K) of a module; UnsupportedError if its tensors do not fit together."""
        self.scale_of(stem, parts)
        shape, wanted = _SHAPES[self.kind](self, parts)
        for suffix, possible in wanted.items():
            if suffix not in parts:
                raise UnsupportedError(
                    f"{parts[self.codes].file}: there is no {stem}.{suffix} ({self.told}); download the model again"
                )
            if parts[suffix].shape not in possible:
                raise UnsupportedError(
                    f"{parts[suffix].file}: {stem}.{suffix} is {[*parts[suffix].shape]}, and "
                    f"{' or '.join(str([*each]) for each in possible)} is due for {self.told} with "
                    f"{stem}.{self.codes} {[*parts[self.codes].shape]}"
                )
            due = _INTEGERS.get(suffix)
            if due is not None and parts[suffix].dtype not in due:
                raise UnsupportedError(
                    f"{parts[suffix].file}: {stem}.{suffix} is in {parts[suffix].dtype}, and {' or '.join(due)} is due "
                    f"for {self.told}; download the model again"
                )
        return shape


_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scales")
_INTEGERS: Mapping[str, tuple[str, ...]] = {
    "qzeros": ("I32",),
    "weight_zero_point": ("I32",),
    "weight_shape": ("I64", "I32"),
    "g_idx": ("I32", "I64"),
    "weight_g_idx": ("I32", "I64"),
}
"""The dtypes of tensors that are integers, where a module's shape makes them due."""

_Shapes = tuple[tuple[int, int], Mapping[str, tuple[tuple[int, ...], ...]]]
"""(N, K), and the shapes that tensors may have, by their suffixes."""


def _gptq_shapes(form: Form, parts: Mapping[str, StoredTensor]) -> _Shapes:
    per_word = _WORD // form.layout.bits
    words, outputs = _matrix(parts[form.codes])
    inputs = words * per_word
    groups = _groups(form, inputs)
    wanted: dict[str, tuple[tuple[int, ...], ...]] = {
        "scales": ((groups, outputs),),
        "qzeros": ((groups, outputs // per_word),),
    }
    if "g_idx" in parts or form.layout.order:
        wanted["g_idx"] = ((inputs,),)
    return (outputs, inputs), wanted


def _awq_shapes(form: Form, parts: Mapping[str, StoredTensor]) -> _Shapes:
    per_word = _WORD // form.layout.bits
    inputs, words = _matrix(parts[form.codes])
    groups = _groups(form, inputs)
    return (words * per_word, inputs), {"scales": ((groups, words * per_word),), "qzeros": ((groups, words),)}


def _packed_shapes(form: Form, parts: Mapping[str, StoredTensor]) -> _Shapes:
    per_word = _WORD // form.layout.bits
    outputs, words = _matrix(parts[form.codes])
    inputs = words * per_word
    groups = _groups(form, inputs)
    wanted: dict[str, tuple[tuple[int, ...], ...]] = {"weight_scale": ((outputs, groups),), "weight_shape": ((2,),)}
    if form.layout.zeros:
        wanted["weight_zero_point"] = ((-(-outputs // per_word), groups),)
    if "weight_g_idx" in parts or form.layout.order:
        wanted["weight_g_idx"] = ((inputs,),)
    return (outputs, inputs), wanted


def _fp8_shapes(form: Form, parts: Mapping[str, StoredTensor]) -> _Shapes:
    outputs, inputs = _matrix(parts[form.codes])
    scale = form.scale_of("", parts)
    if form.layout.group is None:
        return (outputs, inputs), {scale: ((), (1,), (1, 1), (outputs, 1), (outputs,))}
    assert form.block_rows is not None
    return (outputs, inputs), {scale: ((-(-outputs // form.block_rows), _groups(form, inputs)),)}


def _matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise UnsupportedError(f"{tensor.file}: {tensor.name} is {[*tensor.shape]}, and a matrix is due")
    return tensor.shape[0], tensor.shape[1]


def _groups(form: Form, inputs: int) -> int:
    """Scales of a row in the files."""
    return 1 if form.layout.group is None else -(-inputs // form.layout.group)


_SHAPES: Mapping[Kind, Callable[[Form, Mapping[str, StoredTensor]], _Shapes]] = {
    "gptq": _gptq_shapes,
    "awq": _awq_shapes,
    "packed": _packed_shapes,
    "fp8": _fp8_shapes,
}


def form_of(said: Mapping[str, Any], where: str) -> Form:
    """By a `quantization_config`; UnsupportedError, which begins with `where`, if it is none of those that are
    served."""
    method = str(said.get("quant_method") or "").lower()
    if method not in FORMS:
        known = ", ".join(each for each in FORMS if "_" not in each)
        raise UnknownMethodError(
            f"{where}: quantized weights of quant_method {method!r} cannot be trained; those of {known} are served as "
            "they are"
        )
    return FORMS[method](said, where)


def _gptq(said: Mapping[str, Any], where: str) -> Form:
    bits, group = _whole(said, "bits", where), _whole(said, "group_size", where)
    if bits not in (4, 8):
        raise UnsupportedError(f"{where}: GPTQ in {bits} bits cannot be served: 4 and 8 can")
    written = str(said.get("checkpoint_format") or said.get("format") or "gptq")
    if written not in ("gptq", "gptq_v2") or said.get("is_marlin_format"):
        raise UnsupportedError(
            f"{where}: checkpoint_format {'marlin' if said.get('is_marlin_format') else written!r} of GPTQ cannot be "
            "served: gptq and gptq_v2 can"
        )
    _check_uniform(said, where)
    zeros = not said.get("sym", True)
    order = bool(said.get("desc_act"))
    return Form(
        "gptq",
        "gptq",
        f"GPTQ in {bits} bits, {_of_groups(group)}{', with zero points' if zeros else ''}",
        Layout(
            "int4" if bits == 4 else "int8",
            group=group if group > 0 else None,
            zeros=zeros,
            order=order and group > 0,
        ),
        codes="qweight",
        dtypes=("I32",),
        suffixes=("qweight", "qzeros", "scales", "g_idx"),
        order="g_idx",
        zero_offset=1 if written == "gptq" else 0,
    )


def _awq(said: Mapping[str, Any], where: str) -> Form:
    bits = _whole(said, "bits" if "bits" in said else "w_bit", where)
    group = _whole(said, "group_size" if "group_size" in said else "q_group_size", where)
    if bits != 4:
        raise UnsupportedError(f"{where}: AWQ in {bits} bits cannot be served: 4 can")
    if (version := str(said.get("version") or said.get("format") or "gemm").lower()) != "gemm":
        raise UnsupportedError(f"{where}: AWQ of version {version!r} cannot be served: gemm can")
    return Form(
        "awq",
        "awq",
        f"AWQ in 4 bits, {_of_groups(group)}",
        Layout("int4", group=group if group > 0 else None, zeros=True),
        codes="qweight",
        dtypes=("I32",),
        suffixes=("qweight", "qzeros", "scales"),
    )


def _fp8(said: Mapping[str, Any], where: str) -> Form:
    blocks = said.get("weight_block_size")
    if blocks is not None and not _is_block(blocks):
        raise UnsupportedError(f"{where}: weight_block_size is {blocks!r}, and two sizes are due, as [128, 128]")
    if (written := str(said.get("fmt") or "e4m3")) != "e4m3":
        raise UnsupportedError(f"{where}: FP8 of fmt {written!r} cannot be served: e4m3 can")
    return Form(
        "fp8",
        "fp8",
        "FP8" if blocks is None else f"FP8 in blocks of {blocks[0]} x {blocks[1]}",
        Layout("float8", group=None if blocks is None else blocks[1]),
        codes="weight",
        dtypes=("F8_E4M3",),
        suffixes=("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
        block_rows=None if blocks is None else blocks[0],
    )


def _compressed(said: Mapping[str, Any], where: str) -> Form:
    """compressed-tensors, whose `config_groups` have one scheme of weights here. How activations and a KV cache are to
    be rounded is left out: here they are not."""
    if said.get("transform_config"):
        raise UnsupportedError(f"{where}: transform_config of compressed-tensors cannot be served")
    sparse = said.get("sparsity_config") or {}
    if sparse.get("format", "dense") != "dense":
        raise UnsupportedError(f"{where}: sparse weights of compressed-tensors ({sparse['format']}) cannot be served")
    groups = said.get("config_groups")
    schemes = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else []
    if not schemes or not all(isinstance(each, dict) for each in schemes):
        raise UnsupportedError(f"{where}: config_groups of compressed-tensors have no scheme of weights")
    written = str(said.get("format"))
    if written == "mixed-precision" or any(_scheme(each) != _scheme(schemes[0]) for each in schemes):
        raise UnsupportedError(
            f"{where}: config_groups have several schemes of weights; modules in several precisions cannot be served"
        )
    if written not in _COMPRESSED:
        raise UnsupportedError(
            f"{where}: compressed-tensors of format {written!r} cannot be served: {', '.join(_COMPRESSED)} can"
        )
    return _of_scheme(schemes[0], written, where)


_COMPRESSED = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_DECISIVE = ("num_bits", "type", "symmetric", "group_size", "block_structure")


def _scheme(weights: Mapping[str, Any]) -> list[Any]:
    return [weights.get(field) for field in _DECISIVE] + [_ordered(weights), _strategy(weights)]


def _ordered(weights: Mapping[str, Any]) -> bool:
    """Whether files name the group of each column; "weight" and "static" chose columns before the groups were made.
    compressed-tensors read True as "group", in any case of letters."""
    return str(weights.get("actorder")).lower() in ("group", "dynamic", "true")


def _strategy(weights: Mapping[str, Any]) -> str:
    """Where none is named, it follows from the size of a group, as in compressed-tensors."""
    if (given := weights.get("strategy")) is not None:
        return str(given)
    group = weights.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _of_scheme(weights: Mapping[str, Any], written: str, where: str) -> Form:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), _strategy(weights)
    symmetric, packed = bool(weights.get("symmetric", True)), written == "pack-quantized"
    group, rows = _sizes(weights, strategy, where)
    told = (
        f"compressed-tensors, {kind} in {bits} bits, {_of_groups(group or -1) if rows is None else f'{rows} x {group}'}"
    )
    order = packed and _ordered(weights)
    if packed:
        if (bits, kind) not in ((4, "int"), (8, "int")) or strategy not in ("group", "channel"):
            raise UnsupportedError(
                f"{where}: {told}, cannot be served as {written}: int in 4 or 8 bits by group or row can"
            )
        return Form(
            "packed",
            "compressed",
            told + ("" if symmetric else ", with zero points"),
            Layout("int4" if bits == 4 else "int8", group=group, zeros=not symmetric, order=order),
            codes="weight_packed",
            dtypes=("I32",),
            suffixes=("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
            order="weight_g_idx",
        )
    if (bits, kind) not in ((8, "int"), (8, "float")) or not symmetric:
        raise UnsupportedError(f"{where}: {told}, cannot be served as {written}: symmetric int or float in 8 bits can")
    return Form(
        "fp8",
        "compressed",
        told,
        Layout("float8" if kind == "float" else "int8", group=group),
        codes="weight",
        dtypes=("F8_E4M3" if kind == "float" else "I8",),
        suffixes=("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point"),
        block_rows=rows or (1 if group else None),
    )


def _sizes(weights: Mapping[str, Any], strategy: str, where: str) -> tuple[int | None, int | None]:
    """How many columns share a scale (None: all), and how many rows, if those of a block do."""
    if strategy in ("channel", "tensor"):
        return None, None
    if strategy == "group" and weights.get("group_size") != -1:
        return _whole(weights, "group_size", where), None
    if strategy == "block":
        blocks = weights.get("block_structure")
        if not _is_block(blocks):
            raise UnsupportedError(f"{where}: block_structure is {blocks!r}, and two sizes are due, as [128, 128]")
        return blocks[1], blocks[0]
    raise UnsupportedError(
        f"{where}: strategy {strategy!r} of compressed-tensors cannot be served: group, channel, tensor and block can"
    )


def _check_uniform(said: Mapping[str, Any], where: str) -> None:
    """UnsupportedError if GPTQModel's `dynamic` gives modules another layout than the rest. It begins with "-:" what
    stays as it is; other rules may repeat what holds for all, or say nothing."""
    for pattern, rule in sorted(dict(said.get("dynamic") or {}).items()):
        changed = [field for field in ("bits", "group_size", "sym", "desc_act") if rule.get(field, ...) is not ...]
        if not pattern.startswith("-:") and any(rule[field] != said.get(field) for field in changed):
            raise UnsupportedError(
                f"{where}: dynamic gives {pattern!r} other bits than the rest; modules in several precisions cannot be "
                "served"
            )


def _is_block(given: Any) -> TypeGuard[list[int]]:
    return isinstance(given, list) and len(given) == 2 and all(type(each) is int and each > 0 for each in given)


def _whole(said: Mapping[str, Any], field: str, where: str) -> int:
    value = said.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise UnsupportedError(f"{where}: {field} of its quantization_config is {value!r}, and a whole number is due")
    return value


def _of_groups(group: int) -> str:
    return f"groups of {group}" if group > 0 else "a scale for each row"


FORMS: Mapping[str, Callable[[Mapping[str, Any], str], Form]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
}
"""By `quant_method`."""
