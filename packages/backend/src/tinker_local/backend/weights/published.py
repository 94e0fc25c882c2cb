"""What a published checkpoint in fewer bits says of itself: which of its matrices are packed, and how.

`config.json` names a method, and headers of the files tell which matrices have its tensors; both have to fit. Reads no
numbers (`read_published.py` does) and imports no torch, so that plans and `check` know it, too.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.weight_files import StoredTensor, folder_of, folder_on_disk, stored_tensors
from tinker_local.backend.weights.joined_names import DRAFT, JOINED, PROJECTIONS, is_projection
from tinker_local.backend.weights.layout import Layout
from tinker_local.backend.weights.precision import Packable
from tinker_local.backend.weights.published_forms import Form, form_of
from tinker_local.types import UnsupportedError

WEIGHTS = "published"
"""The kind of matrices (`kinds.py`) that are stored as their files have them."""

OTHER_CONFIGS = ("quantize_config.json", "quant_config.json")
"""Of GPTQ and AWQ, beside `config.json`, which says the same in folders that are served."""
_KEYS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"

_TOWER = re.compile(r"(?:^|\.)(?:visual|vision\w*|image\w*|audio\w*)\.")
_OF_CACHE = re.compile(r"\.(?:[kv]_proj\.output_scale|[qkv]_(?:scale|zero_point)|kv_scale|prob_output_scale)$")
"""Scales and zero points of a KV cache in fewer bits."""
_IN_LAYERS = re.compile(r"(?:^|\.)(layers\.\d+\..*)$")


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint in fewer bits. `form`: how its files have a matrix. `modules`: [out, in] of each packed one, by the
    name in the files without what follows the module's; `consumed`: the names of all tensors that these are made of,
    or that are left out: scales of activations and of a KV cache, and packed layers that predict several tokens at
    once, whole. `biases`: of packed modules; programs write zeros where a model has no bias."""

    form: Form
    modules: Mapping[str, tuple[int, int]] = field(repr=False)
    consumed: frozenset[str] = field(repr=False)
    biases: frozenset[str] = field(repr=False)

    @property
    def layout(self) -> Layout:
        return self.form.layout

    @property
    def told(self) -> str:
        """In words."""
        return self.form.told

    @property
    def word(self) -> str:
        """In one, for records of what was trained on it: such as gptq-int4-g128-zeros."""
        group = f"-g{self.layout.group}" if self.layout.group else ""
        return f"{self.form.method}-{self.layout.codes}{group}{'-zeros' if self.layout.zeros else ''}"

    @property
    def packable(self) -> Packable:
        """For the plan of memory."""
        sizes = [(outputs, inputs, self.layout.groups(inputs)) for outputs, inputs in self.modules.values()]
        return Packable(
            numbers=sum(outputs * inputs for outputs, inputs, _ in sizes),
            scales={self.layout.bits: sum(outputs * groups for outputs, _, groups in sizes)},
            largest=max(outputs * inputs for outputs, inputs, _ in sizes),
            scale_bytes=self.layout.scale_bytes,
        )

    @property
    def orders(self) -> Mapping[str, str]:
        """The names in the files of the groups of columns, by the modules that have some."""
        return {module: f"{module}.{self.form.order}" for module in self.modules} if self.layout.order else {}

    def bias(self, name: str) -> str | None:
        """Which of `biases` the parameter `name` of transformers' model would be, which may begin otherwise."""
        if (tail := in_layers(name)) is None:
            return None
        return next((bias for bias in self.biases if bias.endswith(f".{tail}")), None)

    def tails(self) -> list[str]:
        """The packed modules from `layers.` on, which vLLM and transformers call alike."""
        return sorted(_IN_LAYERS.search(module)[1] for module in self.modules)  # type: ignore[index]  # all match

    def as_dense(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """`tensors` of the files as they would be without packing: a `weight` in place of what each module has."""
        found = {name: tensor for name, tensor in tensors.items() if name not in self.consumed}
        for module, shape in self.modules.items():
            file = tensors[f"{module}.{self.form.codes}"].file
            found[f"{module}.weight"] = StoredTensor(f"{module}.weight", file, "BF16", shape, 0, 0)
        return found


def in_layers(name: str) -> str | None:
    """The end of a name, from `layers.` on, which files, transformers and vLLM have in common; None if it is of a
    tower, or of no layer."""
    found = _IN_LAYERS.search(name)
    return None if found is None or _TOWER.search(name) else found[1]


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a `config.json` says of fewer bits; None if it says nothing."""
    text = config.get("text_config")
    for part in (config, *([text] if isinstance(text, dict) else [])):
        for key in _KEYS:
            if part.get(key):
                return part[key] if isinstance(part[key], dict) else {"quant_method": str(part[key])}
    return None


def forget_quantization(config: Any) -> None:
    """Take what `quantization_of` reads out of transformers' `config`, by which transformers would load the weights."""
    for part in (config, config.get_text_config()):
        for key in _KEYS:
            part.__dict__.pop(key, None)


def published_of(path: str) -> Published | None:
    """What the model at `path`, a folder or a name of the hub, is if its base has fewer bits; None if it has not, or is
    not on this machine. UnsupportedError in a sentence if it has, and cannot be served."""
    if (where := folder_on_disk(path)) is None or not (where / "config.json").is_file():
        return None
    try:
        config = json.loads((where / "config.json").read_bytes())
        said = quantization_of(config) if isinstance(config, dict) else None
        if said is None and (where / MODELOPT).is_file():
            said = {"quant_method": "modelopt"}
        if said is None:
            return None
        form = _form(said, where / "config.json")
        if (folder := folder_of(path)) is None:
            raise UnsupportedError(
                f"{path}: its weights are quantized ({form.told}), and not all of them are on this machine: download "
                "it before it is served"
            )
        return _found(form, folder, stored_tensors(folder))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None  # files that cannot be read, which `look_at` tells of


def _form(said: Mapping[str, Any], config: Path) -> Form:
    """By the `quantization_config` in the file `config`; UnsupportedError if it is none of those that are served."""
    try:
        return form_of(said, str(config))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"{config}: its quantization_config cannot be read: {error!r}") from error


def _found(form: Form, folder: Path, tensors: Mapping[str, StoredTensor]) -> Published:
    """Of the files in `folder`; UnsupportedError if they are not as `form` says."""
    stems = [
        name.removesuffix(f".{form.codes}")
        for name, tensor in tensors.items()
        if name.endswith(f".{form.codes}") and tensor.dtype in form.dtypes
    ]
    drafts = [stem for stem in stems if stem.startswith(DRAFT)]
    stems = [stem for stem in stems if stem not in drafts]
    if not stems:
        raise UnsupportedError(
            f"{folder / 'config.json'} says that the weights are quantized ({form.told}), and its files have no tensor "
            f"*.{form.codes} in {' or '.join(form.dtypes)}; {_AGAIN}"
        )
    _check_others(form, folder, tensors)
    consumed = {name for name in tensors if _OF_CACHE.search(name)}
    if drafts:
        consumed |= {name for name in tensors if name.startswith(DRAFT)}
    modules: dict[str, tuple[int, int]] = {}
    scales: dict[str, str] = {}
    for stem in stems:
        parts = {suffix: tensors[f"{stem}.{suffix}"] for suffix in form.suffixes if f"{stem}.{suffix}" in tensors}
        _check_place(stem, form, folder)
        if form.codes != "weight" and f"{stem}.weight" in tensors:
            raise UnsupportedError(
                f"{folder}: {stem} has {form.codes} ({form.told}) and also weight, and one of them is due; {_AGAIN}"
            )
        modules[stem] = form.shape_of(stem, parts)
        scales[stem] = parts[form.scale_of(stem, parts)].dtype
        consumed |= {tensor.name for tensor in parts.values()}
    if len({*scales.values()}) > 1:
        first, *_, last = sorted(scales, key=scales.__getitem__)
        raise UnsupportedError(
            f"{folder}: scales are {scales[first]} of {first} and {scales[last]} of {last}; all must have one dtype"
        )
    form = form.with_scales(scales[stems[0]], folder)
    _check_joined(form, folder, modules, tensors)
    biases = frozenset(name for name in (f"{module}.bias" for module in modules) if name in tensors)
    return Published(form, modules, frozenset(consumed), biases)


_AGAIN = "give the config.json that was saved with these weights, or download the model again"


def _check_others(form: Form, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """UnsupportedError if there are tensors of fewer bits that `form` has no place for."""
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if _OF_CACHE.search(name):
            continue
        if tensor.dtype in ("F8_E4M3", "F8_E5M2", "F4", "F8_E8M0", "I8", "U8") and last not in form.suffixes:
            raise UnsupportedError(
                f"{tensor.file}: {name} is in {tensor.dtype}, for which {form.told} has no place; {_AGAIN}"
            )
        if last == "weight" and tensor.dtype not in ("F64", "F32", "F16", "BF16", *form.dtypes):
            raise UnsupportedError(f"{tensor.file}: {name} is in {tensor.dtype}, and config.json says {form.told}")


def _check_place(stem: str, form: Form, folder: Path) -> None:
    """UnsupportedError if the packed module is none of those that both engines multiply by."""
    if is_projection(stem) and _TOWER.search(stem) is None:
        return
    what = (
        "a quantized LM head"
        if stem.rpartition(".")[2] == "lm_head"
        else "quantized experts"
        if ".experts." in stem or "expert" in stem.rpartition(".")[0].rpartition(".")[2]
        else "a quantized vision tower"
        if _TOWER.search(stem)
        else f"quantized modules other than {', '.join(sorted(PROJECTIONS))} of self_attn, linear_attn and mlp"
    )
    raise UnsupportedError(f"{folder}: {stem} is quantized ({form.told}), and {what} cannot be served")


def _check_joined(
    form: Form, folder: Path, modules: Mapping[str, tuple[int, int]], tensors: Mapping[str, StoredTensor]
) -> None:
    """UnsupportedError if of matrices that are multiplied as one some are packed and others are not."""
    for stem in modules:
        parent, _, name = stem.rpartition(".")
        for joined in JOINED:
            for other in joined.parts if name in joined.parts else ():
                if f"{parent}.{other}" not in modules and f"{parent}.{other}.weight" in tensors:
                    raise UnsupportedError(
                        f"{folder}: {stem} is quantized ({form.told}) and {parent}.{other} is not, and both engines "
                        f"multiply by {', '.join(joined.parts)} as one matrix"
                    )
