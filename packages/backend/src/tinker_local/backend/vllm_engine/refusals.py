"""Why vLLM cannot run a model, by its config: no engine starts, and no weights are read."""

import dataclasses
from typing import Any

from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.families import OTHER
from tinker_local.backend.families.family import Family
from tinker_local.backend.training.model.load_model import without_values
from tinker_local.backend.vllm_engine.build_engine import import_vllm, process_state_kept
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.types import UnsupportedError

USUAL_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Sizes of attention heads that every version of vLLM here computes on a CPU. Others need a look into vLLM."""


def check_runs(path: str, config: Any, family: Family) -> None:
    """UnsupportedError in a sentence if vLLM is known not to run the model at `path`. Imports vLLM, which takes
    seconds, only for models that have no family, or heads of an unusual size."""
    if why := family.unlike_vllm(config):
        raise UnsupportedError(f"{path}: {why}")
    sizes = _head_sizes(config.get_text_config())
    if not family.unwritten and (sizes <= {*USUAL_HEADS} or not runs_on_cpu()):
        return
    import_vllm()
    if runs_on_cpu():
        _check_heads(path, sizes)
    if family.unwritten:
        _check_fields(path, config.get_text_config())
        for name in (config.architectures or ())[:1]:
            _check_class(path, name, config, sees=family.vision is not None)


def _head_sizes(text: Any) -> set[int]:
    """Of the attention heads of all layers. Configs of some families have a config for each layer."""
    layers = [*text.per_layer_config] if getattr(text, "per_layer_attributes", None) else [text]
    heads = getattr(text, "num_attention_heads", None)
    found = {getattr(layer, "head_dim", None) or (text.hidden_size // heads if heads else 0) for layer in layers}
    return found - {0}


def _check_fields(path: str, config: Any) -> None:
    """Whether vLLM reads what transformers' class does not: keys and values of fewer heads."""
    known = {field.name for field in dataclasses.fields(config)} | {*config.attribute_map}
    number = getattr(config, "num_key_value_heads", None)
    all_heads = getattr(config, "num_attention_heads", None)
    if "num_key_value_heads" not in known and number not in (None, all_heads):
        raise UnsupportedError(
            f"{path}: config.json says num_key_value_heads {number}, which vLLM reads and transformers' "
            f"{type(config).__name__} does not have; remove it if the model has keys and values of all heads"
        )


def _check_heads(path: str, found: set[int]) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if unknown := found - {*sizes}:
        raise UnsupportedError(
            f"{path}: its attention heads are {min(unknown)} wide, and vLLM on a CPU computes those of "
            f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
        )


def _check_class(path: str, name: str, config: Any, *, sees: bool) -> None:
    """Whether vLLM's class for the architecture `name` takes adapters and all weights, or transformers' runs in
    vLLM. `sees`: it has to be vLLM's own, and to take images."""
    import transformers
    from vllm.model_executor.models.interfaces import supports_lora, supports_multimodal
    from vllm.model_executor.models.registry import ModelRegistry

    with process_state_kept():
        own = ModelRegistry.models[name].load_model_cls() if name in ModelRegistry.models else None
    if own is not None and not supports_lora(own):
        raise UnsupportedError(f"{path}: vLLM runs it as {own.__name__}, which takes no adapters")
    if sees and (own is None or not supports_multimodal(own)):
        has = f"no class {name}" if own is None else f"{own.__name__} for it, which takes no images"
        raise UnsupportedError(f"{path}: vLLM has {has}")
    if own is not None:
        mapper = getattr(own, "hf_to_vllm_mapper", None)
        tied = getattr(config, "tie_word_embeddings", False)
        if not tied and mapper and mapper.orig_to_new_prefix.get(HEAD, "") is None:
            raise UnsupportedError(
                f"{path}: vLLM's {own.__name__} has the embedding for its LM head, and this model has another one "
                "(tie_word_embeddings is false)"
            )
        return
    theirs = getattr(transformers, name, None)
    if not (theirs and theirs.is_backend_compatible() and _attends_once(config)):
        raise UnsupportedError(f"{path}: vLLM has no class {name}, and cannot run transformers' in its place")


def _attends_once(config: Any) -> bool:
    """Whether each layer has one module that vLLM can give its attention to."""
    try:
        from vllm.model_executor.models.transformers.fusers.attention import interface_call
    except ImportError:  # before 0.32
        return True
    layers = without_values(config, OTHER).get_submodule(OTHER.decoder_path).layers
    return all(
        sum(interface_call(type(module).forward) is not None for module in layer.modules()) == 1 for layer in layers
    )
