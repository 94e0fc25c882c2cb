"""Targets of adapters that vLLM's model classes do not declare, from the model's family."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.families import family_of
from tinker_local.backend.vllm_engine.compat_vllm import class_of_model
from tinker_local.backend.weights.joined_names import GATE_UP


def declare_lm_head(config: Any, _: int) -> None:
    """Declare the LM head of the model of a `VllmConfig`, if its family says that vLLM does not."""
    hf_config = config.model_config.hf_config
    head = family_of(hf_config.model_type, config.model_config.model).vllm_head
    if head is None:
        return
    model_class: Any
    if head.name:
        model_class = getattr(importlib.import_module(f"vllm.model_executor.models.{head.module}"), head.name)
    else:
        model_class = class_of_model(config)
    declared = getattr(model_class, "embedding_modules", {})  # a class without LoRA has none
    if "lm_head" in declared:
        return
    model_class.embedding_modules = {**declared, "lm_head": "output_embeddings"}
    if head.embedding is not None:
        model_class.__init__ = _with_head(model_class.__init__, head.embedding)


def _with_head(init: Callable[..., None], embedding: str) -> Callable[..., None]:
    @functools.wraps(init)
    def with_head(model: Any, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        if not hasattr(model, "lm_head"):
            model.lm_head = model.get_submodule(embedding)

    return with_head


def name_split_rows(config: Any, _: int) -> None:
    """Name the parts of modules of the model of a `VllmConfig` as its family does."""
    model = config.model_config
    split = family_of(model.hf_config.model_type, model.model).lora.split
    if not split:
        return
    for model_class in vars(importlib.import_module(class_of_model(config).__module__)).values():
        packed = getattr(model_class, "packed_modules_mapping", None)
        if isinstance(packed, dict):
            model_class.packed_modules_mapping = {
                name: [part for each in parts for part in (split[each].projections if each in split else (each,))]
                for name, parts in packed.items()
            }


def name_joined_modules(config: Any, _: int) -> None:
    """Name a module of a `VllmConfig`'s model by the one name that it has in transformers' class, too. vLLM's class of
    GLM 4 names the parts of `gate_up_proj`, which neither files nor adapters have."""
    model = config.model_config
    if not family_of(model.hf_config.model_type, model.model).unwritten:
        return
    found = class_of_model(config)
    packed = getattr(found, "packed_modules_mapping", None)
    if not packed:  # as of a class without LoRA, or of transformers' classes, which name theirs themselves
        return
    theirs = _last_names(model.model)
    found.packed_modules_mapping = {name: [name] if name in theirs else parts for name, parts in packed.items()}


def name_short_convolutions(config: Any, _: int) -> None:
    """Have adapters find the projections of the short convolutions of a `VllmConfig`'s model: vLLM's class of LFM2-VL
    does not rename them as that of its language model does. The convolution itself, which the latter renames after it,
    keeps its name here."""
    found = class_of_model(config)
    if found.__name__ != "Lfm2VLForConditionalGeneration":
        return
    from vllm.model_executor.models.utils import WeightsMapper

    names = {f".conv.{name}.": f".short_conv.{name}." for name in ("in_proj", "out_proj")}
    found.hf_to_vllm_mapper = found.hf_to_vllm_mapper | WeightsMapper(orig_to_new_substr=names)


def adapt_heads_beside_language_models() -> None:
    """Let adapters reach an LM head that is outside of what a class that sees calls its language model."""
    from vllm.lora.model_manager import LoRAModelManager

    original: Any = LoRAModelManager._get_punica_wrapper
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wrapper_of(self: Any, module_name: str) -> Any:
        found = original(self, module_name)
        if found is None and module_name.rpartition(".")[2] == HEAD:
            return self.punica_wrapper_mapping.get(self.mm_mapping.language_model[0])
        return found

    LoRAModelManager._get_punica_wrapper = wrapper_of


def _last_names(path: str) -> set[str]:
    """Of the modules of the decoder of transformers' model of the config at `path`."""
    from tinker_local.backend.training.model.load_model import config_of, without_values

    config = config_of(path)
    family = family_of(config.model_type, path)
    decoder = without_values(config, family).get_submodule(family.decoder_path)
    return {name.rpartition(".")[2] for name, _ in decoder.named_modules()}


def name_stacked_modules(config: Any, _: int) -> None:
    """Name what vLLM's class of a model with experts stacks and does not name, so that adapters reach it: query, key
    and value of the vision tower, one module in files too, and the MLP of layers without experts. Where its module of
    experts has the name of earlier files, adapters are renamed."""
    model = config.model_config
    family, text = family_of(model.hf_config.model_type, model.model), model.hf_text_config
    if (experts := family.lora.experts) is None:
        return
    from vllm.model_executor.models.utils import WeightsMapper

    stacked: dict[str, list[str]] = {}
    if family.vision is not None:
        stacked["qkv"] = ["qkv"]
    if getattr(text, "mlp_only_layers", None) or getattr(text, "decoder_sparse_step", 1) > 1:
        stacked[GATE_UP.vllm] = [*GATE_UP.parts]
    found = class_of_model(config)
    if found.packed_modules_mapping:  # otherwise vLLM asks the classes of its parts
        found.packed_modules_mapping = {**stacked, **found.packed_modules_mapping}
    if experts.block != experts.module:
        inside = f".{experts.module}.experts."
        renamed = WeightsMapper(orig_to_new_substr={inside: experts.path_in_files(inside)})
        found.hf_to_vllm_mapper = getattr(found, "hf_to_vllm_mapper", WeightsMapper()) | renamed
