"""Builds vLLM engines that this process steps itself, and protects the process from what vLLM does to it."""

import contextlib
import importlib.util
import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinker_local.backend.heap import while_importing
from tinker_local.backend.options import DType
from tinker_local.backend.sampling.sampler import RESERVED
from tinker_local.backend.stages import stage
from tinker_local.backend.vllm_engine import packed_method, patches, record_routes, triton_on_cpu
from tinker_local.backend.vllm_engine.compat_vllm import (
    BREAKABLE_GRAPHS,
    LORA_RANKS,
    MODEL_RUNNER,
    choose_model_runner,
    cuda_graphs_work,
    default_dtype,
    forget_rotary_modules,
    graph_arguments,
    has_breakable_graphs,
    image_arguments,
    runs_on_cpu,
    uses_v2,
    version,
    why_not_v2,
)
from tinker_local.backend.vllm_engine.release_engine import kept_by_dynamo, workspaces_of_failures_left
from tinker_local.backend.vllm_engine.sleep_mode import sleep_mode_is_free
from tinker_local.backend.weights.published import published_of
from tinker_local.types import UnsupportedError

log = logging.getLogger(__name__)
_MIB = 2**20
_building = threading.Lock()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run vLLM on one copy of a base model.

    `model`: a folder or hub name. `dtype` None: float32 on CPU, bfloat16 on CUDA. `max_context_length` None: as long
    as the model and the KV cache allow. `kv_cache_bytes` None: 256 MiB on CPU; on CUDA vLLM takes
    `gpu_memory_utilization` of the card, weights included. `max_rank`: of LoRA adapters. `adapters_per_step`: how many
    different adapters one step may mix (each has a slot of `max_rank` in the device's memory); requests with further
    adapters wait. `cached_adapters`: how many stay in host memory; others are read again from their folder on use.
    `max_sequences`: in one step, and `RESERVED` more. `max_batched_tokens`: most positions in one step
    (`models/gpu_plan.py` chooses both for a GPU). `image_cache_bytes`: image features kept on the device for later
    requests, if that is more than vLLM's default. `enforce_eager` None: True on CPU, False on CUDA (CUDA graphs).
    `sleeps`: enable sleep mode; on CUDA, and for one engine of the process at a time. `ranks`: of tensor parallelism,
    each a process with a share of every layer (`rank_leader.py`); `kv_cache_bytes` is that of one. `train_vision`:
    adapters may change the vision tower, which also takes `max_rank` in each slot. `shared_weights`: the address of a
    `MemoryHolder` with the matrices of a trainer on the same device, which the engine then reads where it can
    (`shared_weights.py`). `weights`: the kind of its matrices, of `weights/kinds.py`, and `head_weights` of embedding
    and LM head; those that are not dense are read from a trainer. `spare_bytes`: of a GPU, left to others while nothing
    is sampled. `model_runner`: the runner that the environment of the process that made these options asks for,
    since an engine may run on another host; "": it asks for none. `record_routes`: keep which experts positions take,
    if the model has any, for requests that ask for it. `moves_keys`: sequences whose weights change compute their keys
    and values again.
    """

    model: str
    dtype: DType | None = None
    max_context_length: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.4
    max_rank: int = 32
    adapters_per_step: int = 4
    cached_adapters: int = 32
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    image_cache_bytes: int = 2**30
    enforce_eager: bool | None = None
    sleeps: bool = False
    ranks: int = 1
    train_vision: bool = False
    shared_weights: str | None = None
    weights: str = "dense"
    head_weights: str = "dense"
    spare_bytes: int = 0
    model_runner: str = field(default_factory=lambda: os.environ.get(MODEL_RUNNER, ""))
    record_routes: bool = False
    moves_keys: bool = False


def prepare_environment() -> None:
    """Set what vLLM reads from the environment. Call it before vLLM is imported.

    Variables that the user set keep their values, except for the first one, which this package requires.
    UnsupportedError for a model runner that is not to be had.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process steps the engine
    choose_model_runner()
    if uses_v2() and runs_on_cpu():
        triton_on_cpu.interpret()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM's logger only takes its level from there once an engine is built.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    # `FullVocabularyDraw` replaces flashinfer's draw, without which vLLM would refuse to start.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if has_breakable_graphs():
        os.environ.setdefault(BREAKABLE_GRAPHS, "1")
    if runs_on_cpu():
        # Otherwise the first prompt logprobs compile for seconds and need a C++ compiler.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        dynamo = sys.modules.get("torch._dynamo.config")
        if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
            dynamo.disable = True  # type: ignore[attr-defined]  # already imported, and ignores the variable


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what importing vLLM and building an engine do to the process.

    They reseed the random generators of Python, numpy and torch, replace `torch.set_num_threads` by a no-op (CPU), and
    set environment variables (among them `LD_PRELOAD`) that child processes inherit. vLLM's own variables (`VLLM_...`)
    stay, because it keeps reading them. One thread at a time.
    """
    import torch

    with _building:
        environment = dict(os.environ)
        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        python_random, numpy_random, torch_random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        try:
            yield
        finally:
            for name in [name for name in os.environ if name not in environment and not name.startswith("VLLM_")]:
                del os.environ[name]
            os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            torch.set_float32_matmul_precision(precision)
            random.setstate(python_random)
            np.random.set_state(numpy_random)
            torch.set_rng_state(torch_random)
            if cuda_random is not None:
                torch.cuda.set_rng_state_all(cuda_random)


def model_arguments(model: str, dtype: DType | None) -> dict[str, Any]:
    """Keywords of `EngineArgs` that an engine and an image renderer of one model must share. For a published checkpoint
    in fewer bits, `packed_method.register` has to be called before they are used."""
    published = published_of(model)
    return {
        **({} if published is None else {"hf_overrides": {"quantization_config": packed_method.config_of(published)}}),
        "model": model,
        "dtype": dtype or default_dtype(),
        "limit_mm_per_prompt": {"video": 0},
        # Images are rendered and cached by content hash before they reach the engine.
        "mm_processor_cache_gb": 0,
        # generation_config stays "auto": its sampling defaults are not used, but its EOS ids are.
        "trust_remote_code": False,
        # As transformers; "auto" prefers Mistral's own format where a folder has both.
        "load_format": "safetensors",
        "config_format": "hf",
        **image_arguments(),
    }


def import_vllm() -> None:
    """Import what `build_engine` needs, which leaves the process's state as it was."""
    prepare_environment()
    with process_state_kept():
        _import_vllm()


_of_import: dict[str, str] = {}
"""Variables of the environment that vLLM's import has set, for Triton among others, and that engines are built with."""


def _import_vllm() -> None:
    """Import vLLM, in a context of `process_state_kept`, and set what its import sets, which it does once."""
    before = dict(os.environ)
    with while_importing("vllm"):
        import vllm.v1.engine.llm_engine  # noqa: F401
    _of_import.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    os.environ.update(_of_import)


def build_engine(options: EngineOptions, events: patches.EngineEvents | None = None) -> Any:
    """A started `LLMEngine` that this process steps, with all of `patches` applied.

    Takes seconds to minutes and leaves the process's state as it was.
    """
    if options.model_runner:
        os.environ[MODEL_RUNNER] = options.model_runner
    prepare_environment()
    if not runs_on_cpu():
        from tinker_local.backend.autotuning import compile_choices_at_once

        compile_choices_at_once()
    with process_state_kept():
        with stage("imports"):
            _import_vllm()
        from tinker_local.backend.vllm_engine import shared_weights
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        patches.apply_to_process()
        forget_rotary_modules()
        if options.shared_weights is not None:
            shared_weights.register()
        if options.weights != "dense":
            packed_method.register()
        with stage("options"):
            config = EngineArgs(**_engine_arguments(options)).create_engine_config(UsageContext.ENGINE_CONTEXT)
        patches.apply_to_config(config, options.image_cache_bytes)
        kept_before = kept_by_dynamo()
        with workspaces_of_failures_left():
            with stage("engine"), shared_weights.reading(options.shared_weights, options.head_weights) as read:
                try:
                    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
                except (AssertionError, AttributeError, LookupError, TypeError, NotImplementedError) as error:
                    first = str(error).partition("\n")[0]
                    raise UnsupportedError(
                        f"{options.model}: vLLM does not run it ({type(error).__name__}: {first})"
                    ) from error
            engine.lent = read
            if read.holder is not None and not runs_on_cpu():
                read.check(engine)
            if not runs_on_cpu():
                import torch

                torch.cuda.empty_cache()  # of its profile and warm-up; steps take again what they need
            if not uses_v2():
                why = f"V2 {why}" if (why := why_not_v2()) else f"{MODEL_RUNNER}=0"
                log.info("%s: sampled on vLLM's older Model Runner V1 (%s)", options.model, why)
            engine.kept_by_dynamo = kept_by_dynamo() - kept_before
            patches.apply_to_engine(engine, events or patches.EngineEvents())
    return engine


def _engine_arguments(options: EngineOptions) -> dict[str, Any]:
    on_cpu, rank = runs_on_cpu(), served_rank(options.max_rank)
    eager = options.enforce_eager
    if eager is None:
        eager = on_cpu or not cuda_graphs_work(options.model, rank)
    arguments = model_arguments(options.model, options.dtype) | {
        # -1: as much as the KV cache holds of the model's own context.
        "max_model_len": options.max_context_length or -1,
        "enforce_eager": eager,
        "max_num_seqs": options.max_sequences + RESERVED,
        "max_num_batched_tokens": max(options.max_batched_tokens, options.max_sequences + RESERVED),
        "enable_lora": True,
        "enable_tower_connector_lora": options.train_vision,
        "max_lora_rank": rank,
        "max_loras": options.adapters_per_step,
        "max_cpu_loras": max(options.cached_adapters, options.adapters_per_step),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # All requests of an engine share the backend of the first one, so none may choose another.
        "structured_outputs_config": {"backend": "xgrammar"},
        # Requests are checked before they reach the engine.
        "max_logprobs": -1,
        "enable_sleep_mode": options.sleeps and not on_cpu and sleep_mode_is_free(),
    }
    if options.shared_weights is not None:
        from tinker_local.backend.vllm_engine.shared_weights import LOAD_FORMAT

        arguments["load_format"] = LOAD_FORMAT
    if options.weights != "dense":
        arguments["quantization"] = packed_method.name_of(options.weights)
    overrides = arguments.get("hf_overrides", {}) | query_scaling(options.model) | window_of_cohere2(options.model)
    if overrides:
        arguments["hf_overrides"] = overrides
    if options.ranks > 1:
        arguments |= {"tensor_parallel_size": options.ranks, "distributed_executor_backend": "external_launcher"}
        # All ranks have to schedule alike: what a step may contain must not depend on when the one before it ends.
        arguments["async_scheduling"] = False
    if not eager:
        arguments |= graph_arguments(arguments["max_num_batched_tokens"], arguments["max_num_seqs"])
    if options.kv_cache_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes or 256 * _MIB
        # Does not size the cache then, but vLLM refuses to start where less than this share of the card is free.
        arguments["gpu_memory_utilization"] = 0.01
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if not on_cpu and importlib.util.find_spec("flashinfer") is None:
        # Otherwise Qwen3.5 starts on Hopper and fails at its first prompt.
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    if options.record_routes:
        arguments["additional_config"] = {**arguments.get("additional_config", {}), record_routes.WANTED: True}
    return arguments


def query_scaling(model: str) -> dict[str, Any]:
    """What vLLM's config needs so that it multiplies queries by 1 + beta log(1 + floor(position / original)), as
    transformers does: vLLM 0.32 reads both numbers in Mistral's format alone."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(model)
    config = whole.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta or not original or getattr(config, "llama_4_scaling", None):
        return {}
    scaling = {"llama_4_scaling": {"beta": beta, "original_max_position_embeddings": original}}
    return scaling if config is whole else {"text_config": scaling}


def window_of_cohere2(model: str) -> dict[str, Any]:
    """What vLLM's config needs so that a position of Cohere 2 sees as many before it as in transformers: vLLM 0.32 adds
    one to the window."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "cohere2" or version() < (0, 32) or not config.sliding_window:
        return {}
    return {"sliding_window": config.sliding_window - 1}


def served_rank(rank: int) -> int:
    """The smallest of `LORA_RANKS` that is at least `rank`; ValueError beyond 512."""
    for served in LORA_RANKS:
        if rank <= served:
            return served
    raise ValueError(f"max_rank is {rank}; vLLM serves LoRA ranks up to {LORA_RANKS[-1]}")
