"""One table of every patch of vLLM's internals and every private name in use, and the code that applies it.

Before you change the version of vLLM, read `PATCHES` and run `make test-vllm`. Public means documented by vLLM:
`EngineArgs`, `LLMEngine`, `SamplingParams`, `LoRARequest`, `vllm.inputs`, the renderer.
"""

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker_local.backend.families import family_of
from tinker_local.backend.stages import stage
from tinker_local.backend.vllm_engine import (
    adapter_targets,
    delta_net_on_cpu,
    draw_tokens,
    grammar_masks,
    lora_operators,
    record_routes,
    release_engine,
    rotary_on_cpu,
    runner_v1,
    runner_v2,
    score_prompts,
    sleep_mode,
    vllm_experts,
    whole_images,
)
from tinker_local.backend.vllm_engine.compat_vllm import (
    class_of_model,
    lora_worker,
    model_runner,
    runs_on_cpu,
    scheduler,
    uses_v2,
    version,
)

RANKS_NAME = "TINKER_LOCAL_RANKS"
"""A variable of the environment: the name of the ranks of which this process is one."""


def _ignore(_: Any) -> None:
    """Ignore an event."""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Callbacks of an engine, called on the thread that steps it.

    `images_encoded` gets the number of images of each run of the vision tower. `sequence_begun` gets the request id of
    a sequence in the step that first runs it, and possibly again after a preemption; `sequence_preempted` gets it when
    the sequence loses its place. `load_adapter` returns vLLM's `LoRAModel` of a `LoRARequest`; None lets vLLM read the
    request's folder.
    """

    images_encoded: Callable[[int], None] = _ignore
    sequence_begun: Callable[[str], None] = _ignore
    sequence_preempted: Callable[[str], None] = _ignore
    load_adapter: Callable[[Any], Any] | None = None


# Before an engine is built ------------------------------------------------------------------------------------------


def _replace_cpu_operators() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or version() >= (0, 33):
        return
    module = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
    if not hasattr(module.PunicaWrapperCPU, "fixes_base_rows"):
        module.PunicaWrapperCPU = lora_operators.by_segments(module.PunicaWrapperCPU)  # type: ignore[attr-defined]


def _replace_cuda_operators() -> None:
    if not runs_on_cpu() and version() >= (0, 32):  # before 0.32, vLLM's compiler would trace the launches
        lora_operators.multiply_by_rows()


def _look_at_models_here() -> None:
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _name_ranks() -> None:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    original: Any = ExecutorWithExternalLauncher._distributed_args

    @functools.wraps(original)
    def distributed_args(self: Any) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        return f"env://{os.environ[RANKS_NAME]}", rank, local_rank

    if not hasattr(original, "__wrapped__"):
        ExecutorWithExternalLauncher._distributed_args = distributed_args


@functools.cache
def _keep_bars_out_of_files() -> None:
    try:
        warmup: Any = importlib.import_module("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry
    except ImportError:  # before 0.32
        return
    original = warmup.warmup

    @functools.wraps(original)
    def without_bar(self: Any) -> None:
        if sys.stderr.isatty():
            original(self)
        else:
            with contextlib.redirect_stderr(io.StringIO()):
                original(self)

    warmup.warmup = without_bar


def _leave_a_block_empty() -> None:
    if version() >= (0, 32):
        return
    from vllm.v1.core import kv_cache_utils

    original: Any = kv_cache_utils._max_memory_usage_bytes_from_groups
    bytes_per_block: Any = kv_cache_utils._pool_bytes_per_block
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def and_one_block(config: Any, groups: Any) -> int:
        return int(original(config, groups) + bytes_per_block(config, groups))

    kv_cache_utils._max_memory_usage_bytes_from_groups = and_one_block


def _leave_the_heap_alone() -> None:
    for name in ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
        importlib.import_module(name).freeze_gc_heap = lambda: None  # type: ignore[attr-defined]


_STAGES = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "compiled",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "kernels",
}
"""What vLLM's worker does in a start, by its methods. The first forward compiles the model."""


@functools.cache
def _time_stages() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original: Any = WorkerWrapperBase.init_worker

    @functools.wraps(original)
    def init_worker(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        worker = self.worker
        for method, name in _STAGES.items():
            setattr(worker, method, _timed(getattr(worker, method), name))
        make_runner = worker.init_device

        def init_device() -> None:
            make_runner()
            worker.model_runner.capture_model = _timed(worker.model_runner.capture_model, "graphs")

        worker.init_device = init_device

    WorkerWrapperBase.init_worker = init_worker


def _timed(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def timed(*args: Any, **given: Any) -> Any:
        with stage(name):
            return method(*args, **given)

    return timed


def _leave_transformers_alone() -> None:
    if runs_on_cpu():
        from vllm.model_executor.models.transformers.base import Base

        Base._decorate_cls_for_torch_compile = lambda self, *args, **kwargs: None


def _correct_yarn_of_sections() -> None:
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    original: Any = MRotaryEmbedding.__init__
    if hasattr(original, "__wrapped__"):
        return
    frequencies: Any = MRotaryEmbedding._compute_inv_freq

    @functools.wraps(original)
    def init(
        self: Any, head_size: int, rotary_dim: int, max_position_embeddings: int, *args: Any, **given: Any
    ) -> None:
        self.trained_positions = max_position_embeddings
        original(self, head_size, rotary_dim, max_position_embeddings, *args, **given)

    @functools.wraps(frequencies)
    def by_trained_positions(self: Any, base: float) -> Any:
        enlarged, self.max_position_embeddings = self.max_position_embeddings, self.trained_positions
        try:
            return frequencies(self, base)
        finally:
            self.max_position_embeddings = enlarged

    MRotaryEmbedding.__init__ = init
    MRotaryEmbedding._compute_inv_freq = by_trained_positions


def _keep_xielu_in_dtype() -> None:
    import torch
    from vllm.model_executor.layers.activation import XIELU

    original: Any = XIELU.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **{"dtype": torch.get_default_dtype(), **given})  # the model's, while it is built

    XIELU.__init__ = init


def _clear_features_of_pictures(config: Any, _: int) -> None:
    found = class_of_model(config)
    original: Any = getattr(found, "_clear_deepstack_input_embeds", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def clear(self: Any, num_tokens: int) -> None:
        self.deepstack_input_embeds_num_tokens = num_tokens  # at 0 the original does nothing
        original(self, num_tokens)

    found._clear_deepstack_input_embeds = clear


def _take_another_graph_pool(config: Any, _: int) -> None:
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def _keep_images(config: Any, num_bytes: int) -> None:
    model = config.model_config
    if not model.is_multimodal_model:
        return
    whole, vision = model.hf_config, getattr(model.hf_config, "vision_config", None)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))  # each position has the features of all levels
    levels += len(getattr(whole, "deepstack_layer_map", ())) + len(getattr(whole, "spatial_target_layers", ()))
    positions = num_bytes // (levels * model.get_hidden_size() * model.dtype.itemsize)
    config.scheduler_config.encoder_cache_size = max(config.scheduler_config.encoder_cache_size, positions)


# On an engine that was built ----------------------------------------------------------------------------------------


def _keep_rotary_tables_apart(engine: Any, events: EngineEvents) -> None:
    if sleep_mode.can_sleep(engine):
        from vllm.model_executor.layers import rotary_embedding

        rotary_embedding._ROPE_DICT.clear()


def _prevent_shutdown(engine: Any, events: EngineEvents) -> None:
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def _forget_shared_memory(engine: Any, events: EngineEvents) -> None:
    if engine.vllm_config.parallel_config.tensor_parallel_size == 1:
        return
    from vllm.distributed.parallel_state import get_tp_group

    buffer = get_tp_group().mq_broadcaster.buffer
    if buffer.is_creator:
        buffer.shared_memory.unlink()
    for file in Path("/dev/shm").glob(f"{os.environ[RANKS_NAME]}-*"):
        file.unlink(missing_ok=True)  # another rank may be faster


def _keep_workspaces(engine: Any, events: EngineEvents) -> None:
    engine.workspaces = release_engine.workspaces()


def _draw(engine: Any, events: EngineEvents) -> None:
    engine.draw = runner_v1.draw_all(model_runner(engine))


def _know_draw(engine: Any, events: EngineEvents) -> None:
    engine.draw = model_runner(engine).sampler.draw


def _keep_generators(engine: Any, events: EngineEvents) -> None:
    runner_v1.keep_generators(model_runner(engine))


def _collect_logprobs(engine: Any, events: EngineEvents) -> None:
    draw_tokens.collect_logprobs(engine.output_processor)


def _score_prompts(engine: Any, events: EngineEvents) -> None:
    runner_v1.answer_questions(model_runner(engine))


def _score_prompts_on_v2(engine: Any, events: EngineEvents) -> None:
    runner_v2.answer_questions(model_runner(engine))


def _read_cached_prefixes(engine: Any, events: EngineEvents) -> None:
    score_prompts.read_cached_prefixes(scheduler(engine).kv_cache_manager)


def _load_adapters(engine: Any, events: EngineEvents) -> None:
    if events.load_adapter is not None:
        lora_worker(engine)._load_adapter = events.load_adapter


def _share_features(engine: Any, events: EngineEvents) -> None:
    # `engine_inputs.with_own_features` names those of adapters that have their own.
    engine.input_processor._get_mm_identifier = lambda mm_hash, lora_request: mm_hash


def _keep_images_whole(engine: Any, events: EngineEvents) -> None:
    whole_images.keep_images_whole(scheduler(engine), engine.model_config)


def _report_images(engine: Any, events: EngineEvents) -> None:
    runner, config = model_runner(engine), engine.model_config
    if not runner.supports_mm_inputs:
        return
    vision = family_of(config.hf_config.model_type, config.model).vision
    if vision is None:
        raise RuntimeError(f"vLLM takes images for {config.model}, but its family names no vision tower")

    if vision.by_processor:
        _report_embeddings(runner.get_model(), events)
        return

    def after(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # One row of the grid, or of pixels, for each image; some models pass the grid by position.
        events.images_encoded(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[min(1, len(args) - 1)]))

    # It sees every run: vLLM's CUDA graphs leave the tower out unless those for encoders are switched on.
    runner.get_model().get_submodule(vision.vllm_tower).register_forward_hook(after, with_kwargs=True)


def _report_embeddings(model: Any, events: EngineEvents) -> None:
    """Count what vLLM's `model` makes of images, whatever its tower is: a tensor for each."""
    original = model.embed_multimodal

    def embed(**given: Any) -> Any:
        found = original(**given)
        events.images_encoded(len(found))
        return found

    model.embed_multimodal = embed


def _match_elsewhere(engine: Any, events: EngineEvents) -> None:
    engine.grammar_masks = grammar_masks.GrammarMasks(engine)


def _report_begun(engine: Any, events: EngineEvents) -> None:
    of_engine = scheduler(engine)
    schedule = of_engine.schedule

    def reporting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            events.sequence_begun(record_routes.external(new.req_id))
        for request_id in getattr(output, "preempted_req_ids", None) or ():  # not told by every version
            events.sequence_preempted(record_routes.external(request_id))
        return output

    of_engine.schedule = reporting


def _return_routes(engine: Any, events: EngineEvents) -> None:
    record_routes.return_routes(model_runner(engine), scheduler(engine), engine)


# The table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patch:
    """What a patch does, why, and which of the `versions` that we tried need it.

    `names`: the private names of vLLM, and the public ones that we assign to. `tests`: those below `tests/` that fail
    without the patch. `hook`: the public alternative in vLLM. `used_in`: other modules that use the names. `runner`:
    the model runner that needs it. `on_v2`: what Model Runner V2 needs in its place, or what of V2 it touches (files
    below vLLM's `v1/worker`); without it, a patch touches no runner.
    """

    what: str
    why: str
    versions: str
    names: tuple[str, ...]
    tests: tuple[str, ...]
    hook: str = "none"
    used_in: tuple[str, ...] = ()
    to_process: Callable[[], None] | None = None
    to_config: Callable[[Any, int], None] | None = None
    to_engine: Callable[[Any, EngineEvents], None] | None = None
    runner: Literal["both", "V1", "V2"] = "both"
    on_v2: str = ""

    @property
    def applies(self) -> bool:
        """Whether the model runner of this process needs it."""
        return self.runner in ("both", "V2" if uses_v2() else "V1")


PATCHES = (
    Patch(
        "LoRA on CPU multiplies once per adapter and leaves rows of the base model alone",
        "vLLM's index for no adapter is -1, which selects the last slot's adapter (vllm-project/vllm#48421, #49656). "
        "It also copies the weights once per token, which makes a prefill ten times slower",
        "CPU, before 0.33",
        ("PunicaWrapperCPU",),
        ("sampling/test_adapters.py::test_base_and_adapters_in_one_step_do_not_touch_each_other",),
        to_process=_replace_cpu_operators,
    ),
    Patch(
        "LoRA of linear layers on CUDA takes two launches, without a buffer of zeros and atomic sums",
        "vLLM's three launches take a fifth of a step of 512 sequences of an 8B model, a quarter of one sequence's. "
        "They multiply by all ranks for which a slot has room",
        "CUDA, 0.32",
        (
            "PunicaWrapperGPU",
            "_apply_sync",
            "_get_quant_method",
            "token_mapping_meta",
            "no_lora_flag_cpu",
            "token_lora_mapping",
            "token_indices_sorted_by_lora_ids",
            "num_tokens_per_lora",
            "lora_token_start_loc",
            "active_lora_ids",
            "activate_adapter",
            "punica_wrapper_mapping",
            "_registered_adapters",
            "lora_index_to_id",
        ),
        ("sampling/test_lora_kernels.py::test_rows_of_many_adapters_are_multiplied_in_the_interpreter",),
        hook="VLLM_TUNED_CONFIG_FOLDER, which sets sizes of vLLM's own kernels",
        used_in=("lora_operators.py",),
        to_process=_replace_cuda_operators,
    ),
    Patch(
        "a prompt as long as the context that is served fits the KV cache",
        "one block of it is never given to a sequence, which the context that fits was found without: the scheduler "
        "then waits for that block for ever",
        "0.26, and to be tried on others before 0.32",
        ("_max_memory_usage_bytes_from_groups", "_pool_bytes_per_block"),
        ("sampling/test_limits.py::test_a_context_that_the_cache_bounds_is_served_to_its_end",),
        to_process=_leave_a_block_empty,
    ),
    Patch(
        "the class of a model is looked at in this process, which loads it next",
        "vLLM starts an interpreter for it, which takes ten seconds for each new architecture",
        "0.26 to 0.32",
        ("_run_in_subprocess",),
        ("sampling/test_patches.py::test_no_interpreter_is_started_to_look_at_a_model",),
        to_process=_look_at_models_here,
    ),
    Patch(
        "experts take adapters of the hosted layout, in which they share factors; on CPU in plain torch",
        "vLLM serves one layout in an engine, by default another; with LoRA it computes experts in Triton alone",
        "0.26 to 0.32",
        (
            "enable_moe_shared_loras",
            "enable_mixed_moe_lora_format",
            "is_3d_moe_weight",
            "select_unquantized_moe_backend",
            "process_weights_after_loading",
            "_lora_context",
            "token_lora_indices",
            "CPURouter",
            "use_grouped_topk",
            "num_expert_group",
            "topk_group",
        ),
        ("families/test_experts.py::test_each_target_alone_reaches_the_sampler",),
        hook="enable_moe_shared_loras of EngineArgs, which is made before the model's family is known",
        used_in=("vllm_experts.py",),
        to_process=vllm_experts.take_adapters_on_cpu,
        to_config=vllm_experts.share_factors,
        on_v2="the same; rows are mapped to adapters by LoraState.make_lora_inputs of gpu/lora_utils.py",
    ),
    Patch(
        "a request can ask which experts each of its positions took, also positions of cached prefixes",
        "vLLM returns experts in Model Runner V2 alone, of all requests or none, and copies those of every step to the "
        "host, where it handles them request by request",
        "0.32",
        (
            "set_capture_fn",
            "top_k",
            "_quant_method",
            "layer_id",
            "initialize_kv_cache",
            "execute_model",
            "execute_model_state",
            "slot_mappings",
            "_free_request",
            "step",
            "init_device",
            "init_worker",
        ),
        ("sampling/test_record_routes.py::test_experts_of_all_positions_are_those_of_the_model",),
        hook="enable_return_routed_experts of EngineArgs",
        used_in=("record_routes.py",),
        to_process=record_routes.watch_new_runners,
        to_engine=_return_routes,
        on_v2="the same: ExecuteModelState of gpu/model_runner.py has the slots of a step as slot_mappings_by_layer",
    ),
    Patch(
        "a model with experts may come after one without",
        "the first engine of a process makes vLLM's groups of ranks, and that of experts only if its model has any",
        "0.26 to 0.32",
        ("_EP",),
        ("families/test_experts.py::test_a_model_with_experts_may_come_after_one_without",),
        used_in=("vllm_experts.py",),
        to_config=vllm_experts.make_group_of_experts,
    ),
    Patch(
        "adapters of gate and up change the numbers where gpt-oss has them, which take turns",
        "older kernels add them as if gate came first; newer ones do what the patch does",
        "0.26",
        ("apply_w13_lora", "w13_num_slices", "moe_config"),
        ("families/test_gpt_oss.py::test_adapters_of_gate_and_up_change_numbers_that_take_turns",),
        used_in=("vllm_experts.py",),
        to_config=vllm_experts.interleave_gate_and_up,
    ),
    Patch(
        "the classes that families name in `vllm_head` declare their LM head as a LoRA target",
        "unlike Qwen3's, they do not, so vLLM refuses adapters of the LM head; Gemma 2's has no module of that name",
        "0.26 to 0.32",
        ("embedding_modules", "lm_head", "__init__"),
        (
            "sampling/test_adapters.py::test_an_adapter_agrees_with_hf",
            "families/test_families_train_and_sample.py::test_trainer_and_sampler_agree",
        ),
        hook="ModelRegistry.register_model takes a subclass, but then its logs show another class name",
        to_config=adapter_targets.declare_lm_head,
    ),
    Patch(
        "classes of transformers stay as they are",
        "where vLLM has no class for a model it runs transformers', which it changes for its compiler; the trainer of "
        "the same process could then neither load nor run the model",
        "CPU, 0.32",
        ("_decorate_cls_for_torch_compile",),
        ("families/test_other_families.py::test_a_model_without_a_family_starts_and_says_what_adapters_reach",),
        to_process=_leave_transformers_alone,
    ),
    Patch(
        "adapters name parts of a module's rows as their family does: in_proj_q, in_proj_k, in_proj_v of in_proj_qkv",
        "vLLM ignores tensors of these names; one adapter on all rows would take three times the rank",
        "0.26 to 0.32",
        ("packed_modules_mapping",),
        ("families/test_qwen3_5.py::test_each_target_alone_reaches_the_sampler",),
        to_config=adapter_targets.name_split_rows,
    ),
    Patch(
        "adapters reach the tower of Qwen3-VL-MoE, layers without experts between layers with them, and experts that "
        "vLLM calls by the name of earlier files (Mixtral, MiniMax-M2)",
        "vLLM's classes do not name `qkv` of the tower, nor `gate_up_proj` unless `mlp_only_layers` is set, and know "
        "`block_sparse_moe` alone",
        "0.26 to 0.32",
        ("packed_modules_mapping", "hf_to_vllm_mapper"),
        (
            "families/test_mixed_layers.py::test_each_target_alone_reaches_the_sampler",
            "families/test_experts.py::test_each_target_alone_reaches_the_sampler",
        ),
        to_config=adapter_targets.name_stacked_modules,
    ),
    Patch(
        "adapters reach what vLLM's class and transformers' both join, and vLLM names by parts: the MLP of GLM 4",
        "vLLM takes an adapter of `gate_up_proj` for one of its first part",
        "0.32",
        ("packed_modules_mapping",),
        ("families/test_other_families.py::test_a_model_without_a_family_starts_and_says_what_adapters_reach",),
        to_config=adapter_targets.name_joined_modules,
    ),
    Patch(
        "adapters reach the projections of the short convolutions of LFM2-VL",
        "vLLM's class of LFM2 renames them, and the one that sees does not, so that it ignores their tensors",
        "0.32",
        ("hf_to_vllm_mapper",),
        ("e2e/test_models_that_see.py::test_trainer_and_sampler_agree_before_and_after_training",),
        to_config=adapter_targets.name_short_convolutions,
    ),
    Patch(
        "adapters reach the LM head of Idefics 3, SmolVLM and GLM-4V",
        "it is outside of what their classes call the language model, and vLLM then leaves its adapters out",
        "0.32",
        ("_get_punica_wrapper", "punica_wrapper_mapping", "mm_mapping"),
        ("e2e/test_models_that_see.py::test_trainer_and_sampler_agree_before_and_after_training",),
        used_in=("adapter_targets.py",),
        to_process=adapter_targets.adapt_heads_beside_language_models,
    ),
    Patch(
        "the numbers of the activation xIELU (Apertus) are in the model's dtype",
        "vLLM keeps and computes them in bfloat16 also in a model in float32, which moves logprobs by 0.0005 nats",
        "0.32",
        ("XIELU", "__init__"),
        ("families/test_other_families.py::test_a_model_without_a_family_starts_and_says_what_adapters_reach",),
        to_process=_keep_xielu_in_dtype,
    ),
    Patch(
        "linear attention (Gated DeltaNet) runs in float32",
        "on CPU vLLM has it in bfloat16 alone, with heads of some sizes",
        "CPU, 0.32",
        (
            "cpu_gdn_attention_core",
            "_resolve_layer_name",
            "_conv_buffer_view",
            "_ssm_state_view",
            "_unpacked_conv_weight",
        ),
        ("families/test_qwen3_5.py::test_each_target_alone_reaches_the_sampler",),
        used_in=("delta_net_on_cpu.py",),
        to_process=delta_net_on_cpu.take_float32,
    ),
    Patch(
        "rotary positions turn queries and keys that are given as heads",
        "vLLM's operator for CPUs reads them wrongly: LFM2 differs by 0.8 nats",
        "CPU, 0.32",
        ("forward_cpu",),
        ("sampling/test_rotary_on_cpu.py::test_heads_turn_as_their_rows_do",),
        used_in=("rotary_on_cpu.py",),
        to_process=rotary_on_cpu.read_heads,
    ),
    Patch(
        "the positions of an image see each other, where the model was made so",
        "vLLM's attention on CPUs is causal, also where that of GPUs is not: Gemma 3 differs by 0.7 nats",
        "CPU, 0.32",
        ("CPUAttentionMetadataBuilder", "build", "mm_req_doc_ranges"),
        ("families/test_gemma3.py::test_trainer_and_sampler_agree_with_each_target_alone",),
        used_in=("whole_images.py",),
        to_process=whole_images.see_whole_images,
        on_v2="the same: DefaultModelState.prepare_attn of gpu/model_states/default.py says where images are",
    ),
    Patch(
        "no step has a part of an image whose positions see each other",
        "vLLM's rule against it leaves out images that begin where the step before has ended",
        "0.26 to 0.32",
        ("disable_chunked_mm_input", "_try_schedule_encoder_inputs"),
        ("families/test_gemma3.py::test_an_image_is_never_split_over_two_steps",),
        hook="disable_chunked_mm_input of EngineArgs, which is made before the model's family is known",
        used_in=("whole_images.py",),
        to_config=whole_images.check_steps,
        to_engine=_keep_images_whole,
    ),
    Patch(
        "an LM head of any size takes adapters",
        "vLLM refuses LoRA on more than 258,048 tokens, a limit that no kernel of it needs; Gemma 3 has 262,144",
        "0.26 to 0.32",
        ("create_lora_weights", "vocab_size"),
        ("families/test_families_train_and_sample.py::test_gemma_3s_vocabulary_takes_adapters",),
        to_process=lora_operators.allow_large_vocabularies,
    ),
    Patch(
        "YaRN stretches the positions of Qwen-VL models by the context length that they were trained with",
        "vLLM enlarges its table of positions to four times that, and then takes the size of the table for the length: "
        "frequencies are off by a factor of up to 2. transformers has those of the paper (arXiv 2309.00071)",
        "0.26 to 0.32",
        ("MRotaryEmbedding", "__init__", "_compute_inv_freq", "max_position_embeddings"),
        ("sampling/test_engines_agree.py::test_yarn_agrees_also_on_positions_of_images",),
        to_process=_correct_yarn_of_sections,
    ),
    Patch(
        "every step of Qwen3-VL clears what pictures add to its first layers, whether it had a picture or not",
        "vLLM clears it if a counter in Python is not 0. A CUDA graph replays what was captured, without a picture and "
        "so without clearing: later prompts would read an earlier picture",
        "CUDA, 0.32",
        ("_clear_deepstack_input_embeds", "deepstack_input_embeds_num_tokens"),
        (
            "sampling/test_patches.py::test_features_of_pictures_are_cleared_without_a_picture",
            "sampling/test_graphs_on_gpu.py::test_prompts_after_a_picture_are_as_without_graphs",
        ),
        to_config=_clear_features_of_pictures,
    ),
    Patch(
        "each engine has its own memory pool for CUDA graphs",
        "vLLM has one for a process, which is lost with the graphs of the first engine, so that the next one fails: "
        "`use_count > 0 INTERNAL ASSERT FAILED` or `beginAllocateToPool: already recording` (torch 2.13)",
        "CUDA, 0.32",
        ("_global_graph_pool",),
        ("sampling/test_graphs_on_gpu.py::test_prompts_after_a_picture_are_as_without_graphs",),
        to_config=_take_another_graph_pool,
        on_v2="the same: CudaGraphManager of gpu/cudagraph_utils.py takes the pool of the process",
    ),
    Patch(
        "copies of norms, with which positions are measured, compute with their own weights",
        "a norm calls a method that vLLM chose, and perhaps compiled, for the module that was copied",
        "0.32",
        ("_forward_method",),
        (
            "sampling/test_engines_agree.py::test_a_model_that_the_engines_compute_alike_starts_and_says_how_close_they_are",
        ),
        used_in=("engine_positions.py",),
    ),
    Patch(
        "features of images stay on the device for later requests",
        "vLLM keeps only as many positions as one step has. A prompt whose image ends in the last, incomplete block of "
        "its KV cache needs the features again, so requests that alternate between a few images encode them each time",
        "0.26 to 0.32",
        ("encoder_cache_size",),
        ("sampling/test_image_features_stay.py::test_requests_of_more_images_than_a_step_holds_encode_each_once",),
        hook="none: EngineArgs sets it to max_num_batched_tokens, which also sizes the profiling run at start-up",
        to_config=_keep_images,
        on_v2="the same: EncoderCache of gpu/mm/encoder_cache.py keeps what the scheduler does not free",
    ),
    Patch(
        "vLLM leaves the garbage collector's heap as it is",
        "it freezes all objects of the process, and to release an engine all had to be thawed and searched: 0.6 s; "
        "processes of engines, and servers, freeze theirs when all is loaded",
        "0.26 to 0.32",
        ("freeze_gc_heap",),
        ("sampling/test_released_engines.py::test_a_built_engine_leaves_the_heap_as_it_was",),
        hook="none",
        to_process=_leave_the_heap_alone,
    ),
    Patch(
        "a start shows no progress bar where standard error is a file",
        "vLLM's bar for the kernels that it compiles has no switch",
        "CUDA, 0.32",
        ("warmup",),
        ("sampling/test_start_stages.py::test_kernels_that_are_compiled_show_no_progress_bar_in_a_file",),
        hook="none: enable_jit_warmup=False compiles the kernels at the first requests instead",
        to_process=_keep_bars_out_of_files,
    ),
    Patch(
        "the stages of a start are timed",
        "vLLM logs some of them, in sentences that change",
        "0.26 to 0.32",
        ("init_worker", "init_device", "capture_model"),
        ("sampling/test_start_stages.py::test_an_engine_says_where_the_time_of_its_start_went",),
        hook="none",
        to_process=_time_stages,
        on_v2="the same: capture_model of gpu/model_runner.py",
    ),
    Patch(
        "each group of tensor parallel ranks names its shared memory differently",
        "on CPU vLLM names it after the address where ranks meet, which is the same for all groups of other launchers",
        "CPU, 0.32",
        ("_distributed_args",),
        ("sampling/test_tensor_parallel.py::test_two_ranks_answer_as_one_does_with_adapters_from_memory_and_disk",),
        hook="none: VLLM_DIST_IDENT is overwritten",
        to_process=_name_ranks,
    ),
    Patch(
        "other ranks do what rank 0's engine is called to do",
        "vLLM's external launcher leaves it to us that all ranks get the same requests before the same step",
        "0.26 to 0.32",
        ("add_request", "abort_request", "add_lora", "remove_lora", "step"),
        ("sampling/test_tensor_parallel.py::test_two_ranks_answer_as_one_does_with_adapters_from_memory_and_disk",),
        hook="none: other executors keep the engine in processes that patches do not reach",
        used_in=("rank_leader.py",),
    ),
    Patch(
        "shared memory of tensor parallelism has no names once all ranks have it",
        "what has a name stays behind when a process is killed",
        "0.26 to 0.32",
        ("mq_broadcaster", "buffer", "is_creator", "shared_memory"),
        ("sampling/test_tensor_parallel.py::test_a_rank_that_is_killed_ends_all_and_all_start_again",),
        to_engine=_forget_shared_memory,
    ),
    Patch(
        "engines of one process do not share tables of rotary positions",
        "an engine that can sleep frees the memory of its tables; while others use them, its allocator stays in use",
        "0.26 to 0.32",
        ("_ROPE_DICT",),
        ("sampling/test_engine_sleeps_on_gpu.py::test_an_engine_that_was_built_anew_can_sleep",),
        to_engine=_keep_rotary_tables_apart,
    ),
    Patch(
        "vLLM does not shut down when its client object is collected",
        "its shutdown destroys distributed groups and workspaces that all engines of the process share",
        "since 0.32",
        ("_finalizer",),
        ("sampling/test_engine_thread.py::test_closing_one_engine_leaves_the_others_and_the_process_alone",),
        to_engine=_prevent_shutdown,
    ),
    Patch(
        "tokens are drawn by FullVocabularyDraw: penalties lower what was sampled, and logprobs are of the logits after"
        " the temperature and before top-k and top-p",
        "raw_logprobs ignore the temperature, processed_logprobs renormalise over what top-k and top-p keep. For "
        "penalties vLLM counts the tokens of all requests over the vocabulary, in memory that the plan lacks",
        "0.26 to 0.32",
        (
            "forward",
            "_make_prompt_token_ids_cpu_tensor",
            *("presence_penalties_cpu", "frequency_penalties_cpu", "no_penalties"),
        ),
        (
            "sampling/test_sampled_logprobs.py::test_each_setting_alone_agrees_with_hf",
            "sampling/test_penalties.py::test_logprobs_are_of_the_logits_after_penalties",
        ),
        hook="none: a custom LogitsProcessor runs before the temperature and returns no logprobs",
        used_in=("runner_v1.py",),
        to_engine=_draw,
        runner="V1",
        on_v2="a class in place of its Sampler, the next row",
    ),
    Patch(
        "the runner makes its sampler from FullVocabularySampler, which draws in the same way",
        "the same as of V1; V2's counts of penalties stay on the device, 300 MB of 512 requests; it takes seeds of "
        "requests without one from numpy's global generator, and draws nothing that V1 draws",
        "0.32",
        ("Sampler", "penalties_state"),
        (
            "sampling/test_sampled_logprobs.py::test_each_setting_alone_agrees_with_hf",
            "sampling/test_penalties.py::test_logprobs_are_of_the_logits_after_penalties",
        ),
        hook="none: custom_sampler is of a model's class, custom LogitsProcessors run before the temperature",
        used_in=("runner_v2.py",),
        to_process=runner_v2.replace_sampler,
        to_engine=_know_draw,
        runner="V2",
    ),
    Patch(
        "its kernels run on a CPU, in Triton's interpreter",
        "vLLM has them for Triton alone, whose backend for CPUs is on no index",
        "CPU, 0.32",
        ("backends",),
        ("sampling/test_model_runners.py::test_both_runners_give_the_same_tokens_and_logprobs",),
        hook="none: V1 is the runner of a CPU unless the variable says otherwise",
        used_in=("triton_on_cpu.py",),
        runner="V2",
    ),
    Patch(
        "a request draws no random number before its prompt is complete",
        "vLLM draws, and rewinds the generator by its CUDA offset, which raises for a CPU generator",
        "CPU, 0.26 to 0.32",
        ("_bookkeeping_sync", "generators", "discard_request_mask"),
        ("sampling/test_seeds.py::test_a_seeded_prompt_that_takes_several_steps_draws_the_same",),
        used_in=("runner_v1.py",),
        to_engine=_keep_generators,
        runner="V1",
        on_v2="none: FullVocabularySampler knows which prompts a step completes",
    ),
    Patch(
        "a request's output holds one float per token, and arrays of the likeliest tokens if asked for",
        "vLLM ranks every chosen token in the whole vocabulary, and makes several objects per token",
        "0.26 to 0.32",
        ("add_request", "logprobs_processor"),
        ("sampling/test_sampled_topk.py::test_sampled_topk_of_requests_that_share_steps_agree_with_hf",),
        hook="flat_logprobs (0.32) saves the objects, not the ranks",
        used_in=("draw_tokens.py",),
        to_engine=_collect_logprobs,
    ),
    Patch(
        "prompts are scored by score_prompts, each request with its own adapter on the LM head",
        "vLLM has neither draws at prompt positions nor targets per position with top-k, builds a dict per token, and "
        "scores prompts with the LM head's adapter of the rows that were sampled: missing on CUDA, a crash on CPU "
        "(vllm-project/vllm#51594)",
        "0.26 to 0.33",
        ("_get_prompt_logprobs_dict", "in_progress_prompt_logprobs_cpu", "punica_wrapper"),
        (
            "sampling/test_prompt_scores.py::test_everything_at_once_agrees_with_hf",
            "sampling/test_adapters.py::test_prompt_logprobs_of_several_requests_have_their_own_lm_head",
        ),
        hook="none",
        used_in=("runner_v1.py", "score_prompts.py", "lora_operators.py"),
        to_engine=_score_prompts,
        runner="V1",
        on_v2="an object in place of its PromptLogprobsWorker, the next row",
    ),
    Patch(
        "prompts are scored by score_prompts in place of the runner's worker for them",
        "the same as of V1, the LM head's adapter included",
        "0.32, 0.33",
        ("prompt_logprobs_worker", "punica_wrapper"),
        (
            "sampling/test_prompt_scores.py::test_everything_at_once_agrees_with_hf",
            "sampling/test_adapters.py::test_prompt_logprobs_of_several_requests_have_their_own_lm_head",
        ),
        hook="prompt_logprob_token_ids and prompt_logprob_start cover targets, with the same fault",
        used_in=("runner_v2.py", "score_prompts.py", "lora_operators.py"),
        to_engine=_score_prompts_on_v2,
        runner="V2",
    ),
    Patch(
        "requests that score the end of a prompt read the beginning from the prefix cache",
        "vLLM computes a whole prompt again as soon as one of its logprobs is asked for",
        "0.26 to 0.32",
        ("get_computed_blocks",),
        ("sampling/test_prompt_last_n.py::test_last_n_reads_the_prefix_from_the_cache",),
        hook="prompt_logprob_start (0.32) only limits what is returned",
        used_in=("score_prompts.py",),
        to_engine=_read_cached_prefixes,
    ),
    Patch(
        "adapters come from memory: made and checked off the engine's thread, then copied into a slot",
        "vLLM only reads folders, on its own thread, and ignores tensors that match no module",
        "0.26 to 0.32",
        (
            "_load_adapter",
            "_adapter_manager",
            "_registered_adapters",
            "_create_merged_loras_inplace",
            "_lora_model_cls",
        ),
        (
            "sampling/test_handover.py::"
            "test_a_version_without_a_folder_is_served_and_stays_the_same_when_it_is_read_again",
            "sampling/test_adapters.py::test_an_adapter_that_is_not_served_whole_is_refused",
        ),
        hook="none: a LoRAResolver also returns a folder",
        used_in=("compat_vllm.py", "vllm_adapters.py"),
        to_engine=_load_adapters,
        on_v2="the same: both runners inherit from LoRAModelRunnerMixin",
    ),
    Patch(
        "adapters that leave the vision tower as it is share the features of images with the base model",
        "an engine that takes adapters of the tower encodes each image again for each adapter, whatever it changes",
        "0.26 to 0.32",
        ("_get_mm_identifier",),
        ("families/test_vision_tower.py::test_the_sampler_keeps_features_of_adapters_apart_and_shares_the_others",),
        to_engine=_share_features,
    ),
    Patch(
        "runs of the vision tower are counted",
        "vLLM counts hits of its caches, but not what it encodes",
        "0.26 to 0.32",
        ("embed_multimodal",),
        (
            "sampling/test_image_features_stay.py::test_start_of_an_engine_counts_no_image",
            "sampling/test_image_features_stay.py::test_images_of_a_model_without_a_family_are_counted_on_a_fake",
        ),
        to_engine=_report_images,
        on_v2="the same: get_model and supports_mm_inputs of gpu/model_runner.py",
    ),
    Patch(
        "the first step of each sequence is reported, and when it loses its place",
        "vLLM's statistics count sequences without naming them",
        "0.26 to 0.32",
        ("schedule", "preempted_req_ids"),
        (
            "sampling/test_limits.py::test_requests_that_do_not_fit_the_kv_cache_together_give_what_they_give_alone",
            "sampling/test_sequences_waiting.py::test_a_request_begins_when_its_first_sequence_has_a_place_and_is_told_once",
        ),
        hook="scheduler_cls takes a class, but vLLM says that its interface is not public",
        to_engine=_report_begun,
        on_v2="the same; a preempted sequence comes back as a new request, and is reported again",
    ),
    Patch(
        "sequences whose weights change compute their keys and values again",
        "vLLM empties the whole prefix cache for that, of all adapters and of the base model",
        "0.32",
        ("_preempt_request", "cache_salt", "identifier"),
        ("sampling/test_in_flight.py::test_keys_are_computed_again_where_the_server_says_so",),
        hook="reset_prefix_cache(reset_running_requests=True), for all sequences at once",
        used_in=("moved_sequences.py",),
        on_v2="the same: a preempted sequence comes back as a new request",
    ),
    Patch(
        "grammars are matched in processes of their requests, and a sequence whose next token is not settled is "
        "left out of a step",
        "vLLM matches them on the engine's thread, where one grammar can stop everybody, and reads them there when a "
        "request is added",
        "0.31 to 0.32",
        (
            "structured_output_manager",
            "grammar_init",
            "grammar",
            "backend",
            "schedule",
            "running",
            "max_num_running_reqs",
            "max_loras",
            "step_fn",
            "batch_queue",
            "has_requests",
            "num_output_placeholders",
            "all_stop_token_ids",
        ),
        ("sampling/test_hostile_grammars.py::test_a_grammar_that_costs_seconds_a_token_ends_alone",),
        hook="none: the backends of structured output are a fixed list",
        used_in=("grammar_masks.py",),
        to_engine=_match_elsewhere,
        on_v2="the same: StructuredOutputsWorker of gpu/structured_outputs.py applies the scheduler's masks",
    ),
    Patch(
        "a sleep or a wake-up that fails half way is undone, and memory that was not saved is zero again",
        "vLLM's state is lost after a failure, 0.26 maps memory twice, and buffers keep what others wrote",
        "CUDA, 0.26 to 0.32",
        ("sleeping_tags", "is_sleeping", "pointer_to_data", "cpu_backup_tensor"),
        (
            "sampling/test_engine_sleeps.py::test_a_waking_that_fails_leaves_the_engine_asleep_and_may_be_tried_again",
            "sampling/test_engine_sleeps_on_gpu.py::"
            "test_an_engine_closed_in_its_sleep_leaves_nothing_and_the_next_one_works",
        ),
        used_in=("sleep_mode.py", "compat_vllm.py"),
        on_v2="the same: init_kv_cache of gpu/attn_utils.py puts the KV cache alone into its pool",
    ),
    Patch(
        "a model reads the matrices of a trainer in this process",
        "each engine would have a copy of the frozen weights",
        "0.26 to 0.32",
        ("load_weights", "device"),
        (
            "sampling/test_shared_weights.py::test_vllm_reads_the_trainers_matrices",
            "families/test_models_found_to_see.py::test_a_packed_base_is_one_copy_for_both_engines",
        ),
        hook="register_model_loader, which is public; that a model's load_weights copies row by row is not promised",
        used_in=("shared_weights.py",),
    ),
    Patch(
        "embeddings and LM heads multiply by codes of 8 bits, which are a trainer's",
        "vLLM gives them a method of quantization through the config of the layers, and half of its models give none",
        "0.26 to 0.32",
        ("quant_method", "weight"),
        ("sampling/test_packed_head_sampling.py::test_both_engines_look_up_and_multiply_by_one_copy_of_codes",),
        hook="get_quant_method, which is public, where a model hands its config to embedding and LM head",
        used_in=("vocabulary_method.py",),
    ),
    Patch(
        "releasing an engine frees its weights and forgets its LoRA slots",
        "vLLM's shutdown breaks other engines, dynamo keeps compiled code, and LoRA kernels cache slots by address",
        "0.26 to 0.32",
        ("_PTR_DICT", "_bytecode_hooks", "model", "lora_manager", "engine_core"),
        ("sampling/test_released_engines.py::test_a_released_engine_leaves_no_weights",),
        used_in=("release_engine.py",),
        on_v2="the same: model, kv_caches and lora_manager of gpu/model_runner.py",
    ),
    Patch(
        "workspaces (buffers of steps) stay as long as the engine whose CUDA graphs write to them, and end with it",
        "vLLM has one manager of them for a process. The next engine's manager replaces it, and the buffers are freed. "
        "Since 0.32 a manager also holds its worker, so the last engine's memory stays after its release, and no later "
        "engine can sleep",
        "CUDA, 0.26 to 0.32",
        ("_manager", "_device", "_num_ubatches"),
        (
            "sampling/test_released_engines.py::test_buffers_of_steps_end_with_their_engine_on_fakes",
            "sampling/test_engine_sleeps_on_gpu.py::test_without_memory_to_wake_the_engine_sleeps_on_and_wakes_later",
        ),
        used_in=("release_engine.py",),
        to_engine=_keep_workspaces,
    ),
    Patch(
        "a temperature below 0.01 or above 2 reaches the sampler",
        "the constructor of SamplingParams raises the former to 0.01 and refuses the latter",
        "0.26 to 0.32",
        ("temperature",),
        ("sampling/test_sampled_logprobs.py::test_temperatures_that_vllm_would_change_or_refuse_are_honoured",),
        used_in=("engine_inputs.py",),
    ),
)


def apply_to_process() -> None:
    """Patch the process, for engines that are built from now on."""
    for patch in PATCHES:
        if patch.applies and patch.to_process is not None:
            patch.to_process()


def apply_to_config(config: Any, image_cache_bytes: int) -> None:
    """Patch the `VllmConfig` of an engine to be built."""
    for patch in PATCHES:
        if patch.applies and patch.to_config is not None:
            patch.to_config(config, image_cache_bytes)


def apply_to_engine(engine: Any, events: EngineEvents) -> None:
    """Patch an `LLMEngine` that was built and has not stepped yet."""
    for patch in PATCHES:
        if patch.applies and patch.to_engine is not None:
            patch.to_engine(engine, events)
