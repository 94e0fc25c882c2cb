"""Why vLLM cannot run a model, by its config: no engine starts, and no weights are read."""

from typing import Any

from tinker_local.backend.families import OTHER
from tinker_local.backend.families.family import Family
from tinker_local.backend.vllm_engine.build_engine import import_vllm, process_state_kept
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.types import UnsupportedError

USUAL_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Sizes of attention heads that every version of vLLM here computes on a CPU. Others need a look into vLLM."""


def check_runs(path: str, config: Any, family: Family) -> None:
    """UnsupportedError in a sentence if vLLM is known not to run the model at `path`. Imports vLLM, which takes
    seconds, only for models that have no family, or heads of an unusual size."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    if family is not OTHER and (size in USUAL_HEADS or not runs_on_cpu()):
        return
    import_vllm()
    if runs_on_cpu():
        _check_heads(path, size)
    if family is OTHER:
        for name in (config.architectures or ())[:1]:
            _check_class(path, name)


def _check_heads(path: str, size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size and size not in sizes:
        raise UnsupportedError(
            f"{path}: its attention heads are {size} wide, and vLLM on a CPU computes those of "
            f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
        )


def _check_class(path: str, name: str) -> None:
    """Whether vLLM's class for the architecture `name` takes adapters, or transformers' runs in vLLM."""
    import transformers
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.model_executor.models.registry import ModelRegistry

    with process_state_kept():
        own = ModelRegistry.models[name].load_model_cls() if name in ModelRegistry.models else None
    if own is not None and not supports_lora(own):
        raise UnsupportedError(f"{path}: vLLM runs it as {own.__name__}, which takes no adapters")
    theirs = getattr(transformers, name, None)
    if own is None and not (theirs and theirs.is_backend_compatible()):
        raise UnsupportedError(f"{path}: vLLM has no class {name}, and cannot run transformers' in its place")
