"""What `mutations.py` breaks, which tests must see it, and which promise that shows.

A mutation replaces one text, which its file holds exactly once, by another. The promises are those that the README's
tables stand for; the second list are mistakes that servers of this kind make, each kept out by a test.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ADAMW = "tests/training/test_adamw.py::"
ADAPTERS = "tests/sampling/test_adapters.py::"
ALTERNATIVES = "tests/sampling/test_alternative_tokens.py::"
ADAPTER_STATE = "tests/training/test_adapter_state.py::"
ADMISSION = "tests/scheduling/test_admission.py::"
AGREEMENT = "tests/e2e/test_agreement.py::"
BACK_PRESSURE = "tests/http/test_http_back_pressure_on_fakes.py::"
BAD_INPUT = "tests/http/test_http_bad_input_on_fakes.py::"
CODEC = "tests/types/test_types_codec.py::"
COMMAND_LOG = "tests/scheduling/test_command_log.py::"
DECODING = "tests/rendering/test_decoding.py::"
ENDPOINTS = "tests/http/test_http_endpoints_on_fakes.py::"
ENGINE_THREAD = "tests/sampling/test_engine_thread.py::"
EXPORT_NAMES = "tests/training/test_export_names.py::"
EXTERNAL = "tests/http/test_http_external_weights_on_fakes.py::"
FORMULAS = "tests/training/test_loss_formulas.py::"
FUTURES = "tests/http/test_http_futures_on_fakes.py::"
IMAGE_ASSETS = "tests/rendering/test_image_assets.py::"
INPUT_CHECKS = "tests/training/test_loss_input_checks.py::"
MEMORY_SHARING = "tests/http/test_http_memory_sharing_on_fakes.py::"
LAST_N = "tests/sampling/test_prompt_last_n.py::"
LIMITS = "tests/sampling/test_limits.py::"
OFFSETS = "tests/training/test_images_at_offsets.py::"
ORDER = "tests/http/test_http_order_on_fakes.py::"
PACKING = "tests/training/test_packing_isolation.py::"
PEFT = "tests/training/test_lora_equals_peft.py::"
PROMPT_SCORES = "tests/sampling/test_prompt_scores.py::"
PROMPT_LOGPROBS = "tests/sampling/test_prompt_logprobs.py::"
CHECKPOINT_LIFE = "tests/http/test_http_checkpoint_life_on_fakes.py::"
QUEUE_STATES = "tests/http/test_http_queue_states_on_fakes.py::"
RECORDS = "tests/storage/test_storage_records.py::"
RENDERER = "tests/rendering/test_renderer.py::"
RESTART = "tests/http/test_http_restart_on_fakes.py::"
SAMPLING_CLIENTS = "tests/http/test_http_sampling_clients_on_fakes.py::"
SAMPLED_TOPK = "tests/sampling/test_sampled_topk.py::"
SAMPLED = "tests/sampling/test_sampled_logprobs.py::"
SEEDS = "tests/sampling/test_seeds.py::"
SESSIONS = "tests/http/test_http_sessions_on_fakes.py::"
SESSION_TRACE = "tests/http/test_http_session_trace_on_fakes.py::"
SETTINGS = "tests/http/test_http_settings_arrive_on_fakes.py::"
SIMULATION = "tests/scheduling/test_scheduler_simulation_on_fakes.py::"
STORE = "tests/storage/test_storage_checkpoints.py::"
VALUES = "tests/types/test_types_values.py::"
VERSIONS = "tests/storage/test_storage_versions.py::"
SIDE_BY_SIDE = "tests/training/test_adapters_side_by_side.py::"
RULES = "tests/training/test_attention_rules.py::test_each_segment_attends_as_in_transformers_alone"
AUTOGRAD = "tests/training/test_engine_against_autograd.py::test_values_and_gradients_equal_transformers_with_autograd"
THROUGH_THE_SDK = "tests/training/test_training_through_the_sdk_on_fakes.py::"
GOLDEN = "tests/training/test_golden_curve.py::test_the_loss_curve_equals_the_stored_one"
WORKS = "tests/training/test_trainer_works.py::"

CHATS = "tests/rl/test_rl_chat_templates.py::"
CONVERSATIONS = "tests/rl/test_rl_conversation_tokens.py::"
ENVIRONMENTS = "tests/rl/test_rl_environments_on_fakes.py::"
RL_MEASURES = "tests/rl/test_rl_advantages.py::"
ROLLOUTS = "tests/rl/test_rl_rollouts_on_fakes.py::"
TRAJECTORIES = "tests/rl/test_rl_trajectory_data.py::"
VISION_RL = "tests/e2e/test_vision_rl.py::"

ACCESS = "tests/http/test_http_access_on_fakes.py::"
AGREES = AGREEMENT + "test_trainer_and_sampler_agree_before_and_after_training[all-tiny/text]"
DURABLE_SAVES = "tests/http/test_http_durable_saves_on_fakes.py::"
GROUPS = "tests/sampling/test_groups_share_images.py::"
LORA_SCALE = "tests/training/test_lora_scale.py::"
OFF_THE_LOOP = (
    "tests/http/test_http_off_the_loop_on_fakes.py::test_nothing_that_takes_long_runs_on_the_event_loop_on_fakes"
)
SEVERAL_LOSSES = WORKS + "test_results_come_in_request_order_with_several_losses_in_one_call"
SOCKETS = "tests/http/test_http_sockets_on_fakes.py::"
STARTED = "tests/http/test_http_serve_on_fakes.py::"


@dataclass(frozen=True, slots=True)
class Mutation:
    """`file`: below the namespace package, its first part names the distribution's folder. `tests`: node ids of
    functions, of which at least one case must fail, or of single cases."""

    name: str
    file: str
    original: str
    replacement: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """`tests`: beside those of the mutations. `note`: what is left out, and why."""

    number: str
    words: str
    mutations: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""


def source_of(file: str, root: Path) -> Path:
    """Where a mutation's file is in a checkout at `root`."""
    return root / "packages" / file.partition("/")[0] / "src" / "tinker_local" / file


MUTATIONS = (
    # Losses ---------------------------------------------------------------------------------------------------------
    Mutation(
        "mean-gradient",
        "backend/training/losses/loss.py",
        "xp.where(active, derivative, 0.0))",
        "xp.where(active, derivative, 0.0) / len(logprobs))",
        (
            WORKS + "test_four_copies_give_four_times_the_gradient[cross_entropy]",
            WORKS + "test_a_plus_b_is_a_then_b[cross_entropy]",
        ),
    ),
    Mutation(
        "mean-loss",
        "backend/training/tally.py",
        "computed.losses[span].sum(dtype=torch.float64)",
        "computed.losses[span].mean(dtype=torch.float64)",
        (
            WORKS + "test_four_copies_give_four_times_the_gradient[cross_entropy]",
            WORKS + "test_loss_is_the_sum_of_what_is_reported_per_position",
        ),
    ),
    Mutation(
        "normalised-by-weights",
        "backend/training/losses/cross_entropy.py",
        "return Terms(-weights * logprobs, -weights)",
        "return Terms(-weights * logprobs / abs(weights).sum(), -weights / abs(weights).sum())",
        (WORKS + "test_ten_times_the_coefficient_is_ten_times_loss_and_gradient[cross_entropy]",),
    ),
    Mutation(
        "last-gradient-only",
        "backend/training/worker.py",
        "gradient if adapter.gradient is None else adapter.gradient.add_(gradient)",
        "gradient",
        (WORKS + "test_a_plus_b_is_a_then_b[ppo]",),
    ),
    Mutation(
        "log-ratio-clamped",
        "backend/training/losses/importance_sampling.py",
        'xp.exp(logprobs - inputs["logprobs"])',
        'xp.exp(xp.clip(logprobs - inputs["logprobs"], -20, 20))',
        (FORMULAS + "test_a_ratio_that_overflows_is_not_clamped[importance_sampling]",),
    ),
    Mutation(
        "importance-sampling-clipped",
        "backend/training/losses/importance_sampling.py",
        'weighted = -xp.exp(logprobs - inputs["logprobs"])',
        'weighted = -xp.clip(xp.exp(logprobs - inputs["logprobs"]), 0.8, 1.2)',
        (FORMULAS + "test_values_equal_a_numpy_reference[importance_sampling]",),
    ),
    Mutation(
        "ppo-gradient-where-clipped",
        "backend/training/losses/ppo.py",
        "xp.where(free <= bound, -free, 0.0)",
        "-free",
        (FORMULAS + "test_ppo_has_no_gradient_where_the_clipped_term_is_smaller",),
    ),
    Mutation(
        "not-a-number-passes",
        "backend/training/micro_batch.py",
        "            if not finite.all():\n",
        "            if False:\n",
        (WORKS + "test_a_loss_that_is_not_finite_fails_its_request_and_leaves_no_gradient",),
    ),
    Mutation(
        "not-a-number-becomes-0",
        "backend/training/losses/loss_inputs.py",
        "    values = np.asarray(tensor.to_numpy(), dtype=np.float32)\n",
        "    values = np.nan_to_num(np.asarray(tensor.to_numpy(), dtype=np.float32))\n",
        (INPUT_CHECKS + "test_numbers_that_are_not_finite_are_refused_with_their_position",),
    ),
    Mutation(
        "unknown-loss-is-cross-entropy",
        "backend/training/losses/__init__.py",
        '    known = ", ".join(LOSSES)\n',
        '    known = ", ".join(LOSSES)\n    return LOSSES.get(loss_fn, CROSS_ENTROPY)\n',
        (
            INPUT_CHECKS + "test_an_unknown_loss_is_refused_with_the_known_ones",
            INPUT_CHECKS + "test_losses_of_the_sdk_that_are_not_here_are_refused_with_the_nearest",
        ),
    ),
    Mutation(
        "first-loss-for-all",
        "backend/training/losses/loss_evaluation.py",
        "loss = LOSSES[part.work.loss_fn]",
        "loss = LOSSES[self._parts[0].work.loss_fn]",
        (SEVERAL_LOSSES,),
    ),
    Mutation(
        "totals-of-the-batch",
        "backend/training/tally.py",
        '{"loss:sum": work.loss}',
        '{"loss:sum": sum(other.loss for other in self.works.values())}',
        (SEVERAL_LOSSES,),
    ),
    Mutation(
        "packed-order",
        "backend/training/tally.py",
        "outputs[item.index] = output",
        "outputs[self.works[item.work].outputs.index({})] = output",
        (SEVERAL_LOSSES,),
    ),
    Mutation(
        "fake-losses-drift",
        "backend/fakes/training.py",
        "    return np.full(values.shape, values.sum(), np.float64)",
        "    return np.full(values.shape, values.mean(), np.float64)",
        (FORMULAS + "test_the_fake_trainer_has_the_same_losses[gspo]",),
    ),
    Mutation(
        "dro-learns-prompts-by-heart",
        "backend/training/losses/loss.py",
        "Terms(xp.where(active, values, 0.0), xp.where(active, derivative, 0.0))",
        "Terms(values, derivative)",
        (FORMULAS + "test_dro_pulls_to_the_sampler_but_leaves_a_prompt_alone",),
    ),
    Mutation(
        "gspo-ratio-of-a-chunk",
        "backend/training/lm_head.py",
        "np.union1d(np.setdiff1d(targets.rows, active_rows), targets.rows[targets.prepass])",
        "np.setdiff1d(targets.rows, active_rows)",
        (AUTOGRAD,),
    ),
    Mutation(
        "gspo-ratio-of-several-data",
        "backend/training/losses/loss_evaluation.py",
        "np.repeat(np.arange(len(data)), [datum.target_tokens.size for datum in data])",
        "np.zeros(sum(datum.target_tokens.size for datum in data), np.int64)",
        (AUTOGRAD,),
    ),
    # Targets and weights --------------------------------------------------------------------------------------------
    Mutation(
        "targets-rebuilt",
        "backend/training/packing.py",
        "targets = [item.datum.target_tokens for item in items]",
        "targets = [np.append(item.datum.input.token_ids[1:], 0).astype(np.int64) "
        "if item.datum.target_tokens.ndim == 1 else item.datum.target_tokens for item in items]",
        (WORKS + "test_targets_are_those_given",),
    ),
    Mutation(
        "candidates-in-column-order",
        "backend/training/packing.py",
        "[np.repeat(np.arange(s, s + t.shape[0]), t[0].size)",
        "[np.tile(np.arange(s, s + t.shape[0]), t[0].size)",
        (WORKS + "test_candidates_add_up_like_separate_data",),
    ),
    Mutation(
        "sparse-cells-out-of-place",
        "types/tensors.py",
        "dense[rows, self.sparse_col_indices] = self.data",
        "dense.reshape(-1)[: self.data.size] = self.data",
        (INPUT_CHECKS + "test_sparse_targets_and_weights_are_made_dense",),
    ),
    Mutation(
        "negative-weights-dropped",
        "backend/training/losses/cross_entropy.py",
        '    weights = inputs["weights"]\n',
        '    weights = xp.clip(inputs["weights"], 0, None)\n',
        (FORMULAS + "test_values_equal_a_numpy_reference[cross_entropy]",),
    ),
    Mutation(
        "zero-times-infinity",
        "backend/training/losses/loss.py",
        "Terms(xp.where(active, values, 0.0), xp.where(active, derivative, 0.0))",
        "Terms(active * values, active * derivative)",
        (FORMULAS + "test_a_position_with_coefficient_zero_adds_exactly_nothing",),
    ),
    Mutation(
        "switched-off-targets-refused",
        "backend/training/losses/loss_inputs.py",
        "(targets >= vocab_size)) & any_of(inputs, loss.target_inputs)",
        "(targets >= vocab_size))",
        (
            INPUT_CHECKS + "test_targets_outside_the_vocabulary_are_refused_only_where_they_count",
            BAD_INPUT + "test_target_out_of_the_vocabulary_is_fine_where_its_weight_is_0_on_fakes",
        ),
    ),
    Mutation(
        "lengths-not-compared",
        "backend/training/losses/loss_inputs.py",
        "    if targets.shape[0] != length:\n",
        "    if False:\n",
        (INPUT_CHECKS + "test_lengths_that_differ_are_refused_with_both_numbers",),
    ),
    # Optimizer ------------------------------------------------------------------------------------------------------
    Mutation(
        "betas-ignored",
        "backend/training/optimizers/adamw.py",
        "gradient, 1 - settings.beta1,",
        "gradient, 1 - 0.9,",
        (ADAMW + "test_equals_torch_over_steps_with_changing_settings",),
    ),
    Mutation(
        "eps-ignored",
        "backend/training/optimizers/adamw.py",
        "denominator += settings.eps",
        "denominator += 1e-8",
        (
            ADAMW + "test_equals_torch_over_steps_with_changing_settings",
            ADAMW + "test_every_setting_of_a_step_matters",
        ),
    ),
    Mutation(
        "weight-decay-coupled",
        "backend/training/optimizers/adamw.py",
        "    weights *= decay\n",
        "    gradient = gradient + settings.weight_decay * weights\n",
        (ADAMW + "test_equals_torch_over_steps_with_changing_settings",),
    ),
    Mutation(
        "clip-norm-ignored",
        "backend/training/optimizers/adamw.py",
        "if 0 < settings.grad_clip_norm < norm:",
        "if False:",
        (
            ADAMW + "test_equals_torch_over_steps_with_changing_settings",
            ADAMW + "test_every_setting_of_a_step_matters",
        ),
    ),
    Mutation(
        "clip-norm-0-is-1",
        "backend/training/optimizers/adamw.py",
        "    if 0 < settings.grad_clip_norm < norm:\n        gradient = gradient * (settings.grad_clip_norm / norm)\n",
        "    if (settings.grad_clip_norm or 1.0) < norm:\n"
        "        gradient = gradient * ((settings.grad_clip_norm or 1.0) / norm)\n",
        (ADAMW + "test_equals_torch_over_steps_with_changing_settings",),
    ),
    Mutation(
        "another-optimizer-is-adamw",
        "backend/training/optimizers/__init__.py",
        "    if config.type not in OPTIMIZERS:\n",
        "    if config.type not in OPTIMIZERS:\n        return ADAMW\n    if False:\n",
        (THROUGH_THE_SDK + "test_dimuon_is_refused_with_what_to_do_on_fakes",),
    ),
    Mutation(
        "only-the-learning-rate-used",
        "backend/control/training.py",
        "model.model_id, params)",
        "model.model_id, type(params)(learning_rate=params.learning_rate))",
        (SETTINGS + "test_every_setting_of_each_optimizer_step_arrives_on_fakes",),
    ),
    Mutation(
        "optimizer-state-not-restored",
        "backend/training/worker.py",
        "        if state.optimizer is not None:\n",
        "        if False:\n",
        (ADAPTER_STATE + "test_a_restored_adapter_goes_on_bit_for_bit",),
    ),
    # LoRA -----------------------------------------------------------------------------------------------------------
    Mutation(
        "scale-without-rank",
        "backend/training/lora.py",
        "self.scale = LORA_ALPHA / config.rank",
        "self.scale = 1.0",
        (PEFT + "test_values_and_gradients_equal_peft[qwen3-attention-float32-1e-05]",),
    ),
    Mutation(
        "another-alpha",
        "backend/training/interface.py",
        "LORA_ALPHA = 32\n",
        "LORA_ALPHA = 16\n",
        (LORA_SCALE + "test_an_adapter_is_the_base_plus_32_over_rank_times_b_a",),
    ),
    Mutation(
        "flags-of-lora-ignored",
        "backend/training/lora.py",
        '"attn": config.train_attn',
        '"attn": True',
        (ADAPTER_STATE + "test_flags_decide_what_trains",),
    ),
    Mutation(
        "seed-of-lora-ignored",
        "backend/training/lora.py",
        "if seed is None else seed) % 2**64",
        "if seed is None else 0) % 2**64",
        (ADAPTER_STATE + "test_the_seed_alone_decides_the_first_weights",),
    ),
    Mutation(
        "lora-settings-dropped-on-the-way",
        "backend/control/training_runs.py",
        "call(create, model_id, request.lora_config,",
        "call(create, model_id, LoraConfig(rank=request.lora_config.rank),",
        (SETTINGS + "test_rank_seed_and_flags_of_lora_arrive_and_are_kept_on_fakes",),
    ),
    Mutation(
        "b-not-0-at-the-start",
        "backend/training/lora.py",
        '        if spec.factor == "A":\n            bound',
        "        if True:\n            bound",
        (ADAPTER_STATE + "test_a_new_adapter_is_the_base_model",),
    ),
    Mutation(
        "recomputed-without-adapters",
        "backend/training/decoders/written_out/mlp_block.py",
        "self.h_down = low_rank.down(self.context.kernels.swiglu(there(self.gate_up)))",
        "self.h_down = 0 * low_rank.down(self.context.kernels.swiglu(there(self.gate_up)))",
        (PACKING + "test_layers_computed_again_give_the_same_gradients",),
    ),
    # Trainer: packing and failures ----------------------------------------------------------------------------------
    Mutation(
        "window-ignored",
        "backend/training/attention.py",
        "(distance < 0) | (distance >= rule.window)",
        "distance < 0",
        (RULES,),
    ),
    Mutation(
        "soft-cap-without-its-derivative",
        "backend/training/attention.py",
        "grad_scores *= 1 - capped * capped",
        "grad_scores *= 1",
        (RULES,),
    ),
    Mutation(
        "sinks-without-a-share",
        "backend/training/attention.py",
        "torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]",
        "scores.softmax(-1)",
        (RULES,),
    ),
    Mutation(
        "one-segment-for-all",
        "backend/training/embedding.py",
        "Segments(packed.lengths, device)",
        "Segments((sum(packed.lengths),), device)",
        (PACKING + "test_changing_one_datum_leaves_the_others_logprobs_unchanged",),
    ),
    Mutation(
        "one-failure-fails-the-batch",
        "backend/training/worker.py",
        "for part in [again] if failed else",
        "for part in [] if failed else",
        (WORKS + "test_a_loss_that_is_not_finite_fails_its_request_and_leaves_no_gradient",),
    ),
    Mutation(
        "columns-of-other-adapters-count",
        "backend/training/lora_batch.py",
        "h if self.others is None else",
        "h if True else",
        (SIDE_BY_SIDE + "test_ranks_and_flags_of_all_kinds_in_one_micro_batch_equal_each_alone",),
    ),
    Mutation(
        "other-adapters-multiplied-by-zero",
        "backend/training/lora_batch.py",
        "h.masked_fill_(self.others[:, None], 0)",
        "h.mul_(~self.others[:, None])",
        (SIDE_BY_SIDE + "test_weights_that_broke_leave_the_others_in_their_products_alone",),
    ),
    Mutation(
        "broken-weights-are-multiplied",
        "backend/training/lora.py",
        "self._computable = bool(largest < torch.finfo(torch.bfloat16).max)",
        "self._computable = True",
        (SIDE_BY_SIDE + "test_weights_that_broke_leave_the_others_in_their_products_alone",),
    ),
    Mutation(
        "ranks-without-bound",
        "backend/training/packing.py",
        "columns + wider > MAX_COLUMNS",
        "columns + wider > 10**9",
        (SIDE_BY_SIDE + "test_a_micro_batch_has_no_more_ranks_than_its_bound",),
    ),
    Mutation(
        "scale-forgotten-in-the-gradient",
        "backend/training/lora_batch.py",
        "columns.start : columns.stop], alpha=adapter.scale)",
        "columns.start : columns.stop])",
        (PEFT + "test_values_and_gradients_equal_peft[qwen3-attention-float32-1e-05]",),
    ),
    Mutation(
        "residual-without-gradient",
        "backend/training/kernels.py",
        "return residual + _norm_backward(",
        "return 0 * residual + _norm_backward(",
        (PEFT + "test_values_and_gradients_equal_peft[qwen3-attention-float32-1e-05]", GOLDEN),
    ),
    Mutation(
        "same-target-twice-counts-once",
        "backend/training/lm_head.py",
        "of_target = _sums(derivative, chunk.same, len(chunk.same))[chunk.same]",
        "of_target = derivative",
        (WORKS + "test_candidates_add_up_like_separate_data",),
    ),
    Mutation(
        "memory-error-not-caught",
        "backend/training/passes.py",
        "except torch.OutOfMemoryError:\n            return None",
        "except torch.OutOfMemoryError:\n            raise",
        (
            WORKS + "test_running_out_of_memory_halves_the_budget_and_tries_again",
            WORKS + "test_a_datum_that_does_not_fit_alone_fails_its_request_only",
        ),
    ),
    # Sampling -------------------------------------------------------------------------------------------------------
    Mutation(
        "logprobs-after-the-cut",
        "backend/vllm_engine/draw_tokens.py",
        "generators), Probabilities(p_bv, likeliest)",
        "generators), Probabilities(kept_bv / kept_bv.sum(-1, keepdim=True), likeliest)",
        (SAMPLED + "test_each_setting_alone_agrees_with_hf",),
    ),
    Mutation(
        "logprobs-without-temperature",
        "backend/vllm_engine/draw_tokens.py",
        '        sampler.logprobs_mode = "processed_logprobs"\n',
        '        sampler.logprobs_mode = "processed_logprobs"\n'
        "        sampler.apply_temperature = lambda logits, *_: logits\n",
        (SAMPLED + "test_each_setting_alone_agrees_with_hf",),
    ),
    Mutation(
        "small-temperatures-raised",
        "backend/vllm_engine/engine_inputs.py",
        "    result.temperature = params.temperature\n",
        "    result.temperature = max(params.temperature, 0.01) if params.temperature else 0.0\n",
        (
            "tests/sampling/test_small_temperatures.py::"
            "test_close_calls_are_drawn_and_scored_at_the_temperature_asked_for",
        ),
    ),
    Mutation(
        "temperature-0-is-1",
        "backend/vllm_engine/engine_inputs.py",
        "    result.temperature = params.temperature\n",
        "    result.temperature = params.temperature or 1.0\n",
        (SAMPLED + "test_temperature_0_is_greedy_with_logprobs_of_temperature_1",),
    ),
    Mutation(
        "seed-of-samples-dropped",
        "backend/vllm_engine/engine_inputs.py",
        "        if work.params.seed is not None:\n",
        "        if False:\n",
        (SEEDS + "test_a_seed_repeats_whatever_runs_beside_it", SEEDS + "test_any_integer_is_a_seed"),
    ),
    Mutation(
        "neighbouring-seeds-share",
        "backend/vllm_engine/engine_inputs.py",
        'return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1',
        "return (seed + index) % 2**63",
        (SEEDS + "test_samples_of_one_seed_and_of_neighbouring_seeds_are_all_different",),
    ),
    Mutation(
        "huge-seeds-reach-the-engine",
        "backend/vllm_engine/engine_inputs.py",
        'return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1',
        "return seed * 1000 + index",
        (SEEDS + "test_any_integer_is_a_seed",),
    ),
    Mutation(
        "stop-strings-forgotten",
        "backend/vllm_engine/engine_inputs.py",
        "        stop=texts,\n",
        "        stop=[],\n",
        (LIMITS + "test_stop_strings_end_a_sample_with_the_token_that_completes_them",),
    ),
    Mutation(
        "stop-string-taken-for-a-list",
        "backend/vllm_engine/engine_inputs.py",
        "stops = (stop,) if isinstance(stop, str) else stop or ()",
        "stops = tuple(stop or ())",
        (LIMITS + "test_stop_strings_end_a_sample_with_the_token_that_completes_them",),
    ),
    Mutation(
        "empty-stop-is-no-stop",
        "backend/vllm_engine/engine_inputs.py",
        "ignore_eos=params.stop == (),",
        "ignore_eos=False,",
        (LIMITS + "test_eos_stops_unless_stop_is_empty_also_beside_other_stops",),
    ),
    Mutation(
        "finish-reason-mapped-wrongly",
        "types/codec/sample_output.py",
        'stop_reason=wire.STOP_REASON_LENGTH if sequence.stop_reason == "length" else wire.STOP_REASON_STOP,',
        "stop_reason=wire.STOP_REASON_STOP,",
        (CODEC + "test_sdk_reads_our_sample_output",),
    ),
    Mutation(
        "16-tokens-by-default",
        "backend/sampling/interface.py",
        "wanted = max(limit - prompt_length, 1) if max_tokens is None else max_tokens",
        "wanted = 16 if max_tokens is None else max_tokens",
        (LIMITS + "test_without_max_tokens_the_sample_goes_up_to_the_context",),
    ),
    Mutation(
        "prompt-logprobs-one-short",
        "backend/sampling/prompt_scores.py",
        "np.concatenate([np.full(1, np.nan, np.float32), self.chosen])",
        "np.concatenate([self.chosen, np.full(1, np.nan, np.float32)])",
        (PROMPT_LOGPROBS + "test_text_agrees_with_hf[text]",),
    ),
    Mutation(
        "prompts-scored-without-their-lm-head",
        "backend/vllm_engine/score_prompts.py",
        "with heads.of(int(self.input_batch.request_lora_mapping[row])):",
        "with heads.of(0):",
        (PROMPT_SCORES + "test_everything_at_once_agrees_with_hf[adapter-text]",),
    ),
    Mutation(
        "scored-rows-read-from-the-cache",
        "backend/vllm_engine/score_prompts.py",
        "self.num_tokens = first_row + 1  #",
        "self.num_tokens = request.num_tokens  #",
        (LAST_N + "test_last_n_reads_the_prefix_from_the_cache",),
    ),
    Mutation(
        "alternatives-at-temperature-1",
        "backend/vllm_engine/score_prompts.py",
        "(log_p_nv / draws.temperature).softmax(dim=-1)",
        "log_p_nv.softmax(dim=-1)",
        (ALTERNATIVES + "test_alternatives_are_drawn_at_the_temperature_with_the_models_logprobs[base-text-2.0]",),
    ),
    Mutation(
        "alternatives-depend-on-the-parts-of-a-prompt",
        "backend/vllm_engine/score_prompts.py",
        "draws.uniforms(start, start + len(log_p_nv))",
        "draws.uniforms(0, len(log_p_nv))",
        (ALTERNATIVES + "test_alternatives_of_a_long_prompt_do_not_depend_on_its_parts",),
    ),
    Mutation(
        "topk-of-the-wrong-requests",
        "backend/vllm_engine/draw_tokens.py",
        "logits_bv[list(widths)]",
        "logits_bv[: len(widths)]",
        (SAMPLED_TOPK + "test_sampled_topk_of_requests_that_share_steps_agree_with_hf",),
    ),
    Mutation(
        "sparse-targets-read-as-dense",
        "backend/sampling/prompt_scores.py",
        'np.searchsorted(request.sparse_crow_indices, cells, side="right") - 1',
        "cells // shape[1]",
        (PROMPT_SCORES + "test_sparse_targets_are_answered_sparsely_and_only_where_they_name_an_id",),
    ),
    Mutation(
        "nan-of-the-first-token-becomes-0",
        "types/codec/sample_output.py",
        "message.prompt_logprobs = raw_bytes(output.prompt_logprobs, FLOAT32)",
        "message.prompt_logprobs = raw_bytes(__import__('numpy').nan_to_num(output.prompt_logprobs), FLOAT32)",
        (CODEC + "test_prompt_logprobs_keep_their_nan_and_empty_logprobs_are_kept_apart_from_none",),
    ),
    Mutation(
        "one-batch-after-the-other",
        "backend/vllm_engine/engine_thread.py",
        "            idle = not any(engine.in_flight for engine in self._engines)\n",
        "            idle = not any(engine.in_flight for engine in self._engines)\n"
        "            if not idle:\n                return True\n",
        (ENGINE_THREAD + "test_cancelling_a_sample_frees_its_slots_and_hurts_nobody",),
    ),
    Mutation(
        "one-sample-at-a-time",
        "backend/control/sampling.py",
        "            output = await self._sample(session, request, operation)\n",
        '            async with self.__dict__.setdefault("_one", asyncio.Lock()):\n'
        "                output = await self._sample(session, request, operation)\n",
        (FUTURES + "test_cancelling_frees_the_slot_on_fakes",),
    ),
    Mutation(
        "prefix-cache-never-read",
        "backend/vllm_engine/engine_inputs.py",
        "        output_kind=RequestOutputKind.FINAL_ONLY,\n",
        "        output_kind=RequestOutputKind.FINAL_ONLY,\n        skip_reading_prefix_cache=True,\n",
        (LIMITS + "test_several_samples_share_one_prefill_and_the_cache_is_counted_once",),
    ),
    Mutation(
        "dead-engine-stays-dead",
        "backend/vllm_engine/engine_thread.py",
        "        engine.discard()\n        engine.restarts += 1\n",
        "        engine.restarts += 1\n",
        (ENGINE_THREAD + "test_with_a_fake_engine_an_unnamed_failure_fails_all_in_flight",),
    ),
    Mutation(
        "culprit-takes-all-with-it",
        "backend/vllm_engine/engine_thread.py",
        "    return named or groups\n",
        "    return groups\n",
        (ENGINE_THREAD + "test_with_a_fake_engine_a_named_culprit_fails_alone_and_the_others_run_again",),
    ),
    # Agreement of trainer and sampler -------------------------------------------------------------------------------
    Mutation(
        "saved-with-another-rank",
        "backend/training/interface.py",
        '"r": self.lora_config.rank,',
        '"r": 2 * self.lora_config.rank,',
        ("tests/storage/test_storage_peft.py::test_peft_loads_a_checkpoint_folder",),
    ),
    Mutation(
        "trainers-positions",
        "backend/families/interface.py",
        "np.arange(input.length, dtype=np.int64)[None]",
        "2 * np.arange(input.length, dtype=np.int64)[None]",
        (AGREES,),
    ),
    Mutation(
        "head-without-a-name-in-vllm",
        "backend/families/gemma2.py",
        ', embedding="model.embed_tokens"',
        "",
        ("tests/families/test_families_train_and_sample.py::test_trainer_and_sampler_agree[gemma2]",),
    ),
    Mutation(
        "logits-not-capped",
        "backend/families/gemma2.py",
        "LogitRule(softcap=config.final_logit_softcapping)",
        "LogitRule()",
        ("tests/families/test_families_train_and_sample.py::test_trainer_and_sampler_agree[gemma2]",),
    ),
    Mutation(
        "effect-not-verified",
        "backend/control/save_weights_for_sampler.py",
        "        if not agreement.difference <= tolerance:\n",
        "        if False:\n",
        (FUTURES + "test_version_that_the_sampler_does_not_serve_is_an_error_and_leaves_nothing_on_fakes",),
    ),
    Mutation(
        "unmatched-keys-ignored",
        "backend/vllm_engine/vllm_adapters.py",
        "    if ignored:\n",
        "    weights = {name: weights[name] for name in weights if name not in ignored}\n    if False:\n",
        (ADAPTERS + "test_an_adapter_that_is_not_served_whole_is_refused",),
    ),
    Mutation(
        "base-gets-an-adapter",
        "backend/vllm_engine/patches.py",
        "        to_process=_replace_cpu_operators,\n",
        "",
        (ADAPTERS + "test_base_and_adapters_in_one_step_do_not_touch_each_other",),
    ),
    # Versions -------------------------------------------------------------------------------------------------------
    Mutation(
        "old-samplers-get-new-weights",
        "backend/control/sampling.py",
        "return self._versions.ephemeral(session.ephemeral)",
        "return self._versions.ephemeral(list(self._versions._folders._versions)[-1])",
        (FUTURES + "test_samplers_keep_the_weights_of_their_save_on_fakes",),
    ),
    Mutation(
        "lora-ids-used-again",
        "backend/vllm_engine/vllm_adapters.py",
        "next(self._ids), str(version.path)",
        "1, str(version.path)",
        (ADAPTERS + "test_base_and_adapters_in_one_step_do_not_touch_each_other",),
    ),
    Mutation(
        "captured-weights-shared",
        "backend/training/transfer.py",
        'tensor.to("cpu", dtype, copy=True)',
        'tensor.to("cpu", dtype)',
        (ADAPTER_STATE + "test_later_steps_do_not_change_what_was_captured",),
    ),
    Mutation(
        "saving-replaces-the-adapter",
        "backend/control/save_weights_for_sampler.py",
        "state = trainer.capture(model.model_id, optimizer=False, dtype=dtype)\n",
        "state = trainer.capture(model.model_id, optimizer=False, dtype=dtype)\n"
        "                trainer.load_adapter(model.model_id, state)\n",
        (
            "tests/e2e/test_saving_leaves_training_alone.py::"
            "test_saves_and_samples_between_gradient_and_step_change_no_loss",
        ),
    ),
    Mutation(
        "newest-version-spilled-first",
        "backend/storage/versions.py",
        "self._spill(older.pop(0))",
        "self._spill(older.pop())",
        (VERSIONS + "test_older_versions_move_to_disk_and_keep_their_path_and_content",),
    ),
    Mutation(
        "versions-outlive-their-session",
        "backend/control/sampling.py",
        "for s in ending if s.ephemeral is not None)\n",
        "for s in ending if s.ephemeral is not None and s.base is None)\n",
        (SESSIONS + "test_finish_frees_adapters_and_nameless_versions_and_nobody_elses_on_fakes",),
    ),
    # Images ---------------------------------------------------------------------------------------------------------
    Mutation(
        "expected-tokens-not-compared",
        "backend/rendering/renderer.py",
        "if chunk.expected_tokens not in (None, image.num_tokens):",
        "if False:",
        (RENDERER + "test_a_wrong_expected_tokens_fails_with_all_numbers",),
    ),
    Mutation(
        "engines-not-compared",
        "backend/rendering/renderer.py",
        "if trainer.num_tokens != sampler.num_tokens:",
        "if False:",
        (RENDERER + "test_engines_that_do_not_agree_fail_with_all_numbers",),
    ),
    Mutation(
        "expected-tokens-for-training-only",
        "backend/control/sampling.py",
        'render, given, "prompt"',
        "render, type(given)(chunks=tuple(chunk.model_copy(update={'expected_tokens': None}) "
        "if chunk.type == 'image' else chunk for chunk in given.chunks)), \"prompt\"",
        (BAD_INPUT + "test_bad_image_fails_its_own_request_on_fakes",),
    ),
    Mutation(
        "trained-without-its-image",
        "backend/rendering/renderer.py",
        '            raise InvalidRequestError(f"{where}: {error}") from error\n',
        "            image = RenderedImage(content_hash, 0, np.zeros((0, 1), np.float32), (0, 0, 0))\n",
        (
            RENDERER + "test_a_bad_image_fails_its_own_input_alone",
            RENDERER + "test_a_wrong_expected_tokens_fails_with_all_numbers",
        ),
    ),
    Mutation(
        "rotation-ignored",
        "backend/rendering/decoding.py",
        'ImageOps.exif_transpose(opened).convert("RGB")',
        'opened.convert("RGB")',
        (DECODING + "test_exif_rotation_is_applied_as_hf_does",),
    ),
    Mutation(
        "client-counts-width-first",
        "client/images.py",
        "get_number_of_image_patches(rgb.height, rgb.width, {})",
        "get_number_of_image_patches(rgb.width, rgb.height, {})",
        ("tests/client/test_client_images.py::test_a_counter_is_asked_for_height_then_width",),
    ),
    Mutation(
        "client-ignores-rotation",
        "client/images.py",
        'PIL.ImageOps.exif_transpose(image).convert("RGB")',
        'image.convert("RGB")',
        ("tests/client/test_client_images.py::test_a_rotated_image_is_counted_as_it_is_seen",),
    ),
    Mutation(
        "image-position-lost",
        "backend/rendering/renderer.py",
        "ImagePlacement(offset, image)",
        "ImagePlacement(0, image)",
        (RENDERER + "test_positions_of_images_do_not_depend_on_how_text_is_split",),
    ),
    Mutation(
        "pad-ids-found-by-the-renderer",
        "backend/rendering/renderer.py",
        "ImagePlacement(offset, image)",
        "ImagePlacement(next((i for i, t in enumerate(np.concatenate([*parts, [pad]])) if t == pad)), image)",
        (RENDERER + "test_a_pad_id_that_comes_as_text_is_no_image",),
    ),
    Mutation(
        "pad-ids-found-by-the-trainer",
        "backend/training/embedding.py",
        "image_rows = to_device(packed.image_rows, device)",
        "image_rows = to_device("
        "np.flatnonzero(packed.token_ids == loaded.model.config.image_token_id)[: len(packed.image_rows)], device)",
        (OFFSETS + "test_a_pad_id_that_came_as_text_is_text",),
    ),
    Mutation(
        "pad-ids-found-by-the-sampler",
        "backend/vllm_engine/engine_inputs.py",
        "PlaceholderRange(offset=p.offset,",
        "PlaceholderRange(offset=ids.index(ids[p.offset]),",
        (PROMPT_LOGPROBS + "test_pad_ids_that_come_as_text_stay_text[vl]",),
    ),
    Mutation(
        "positions-after-an-image",
        "backend/families/qwen_vision.py",
        "next_position += max(rows, columns)",
        "next_position += rows * columns",
        (OFFSETS + "test_positions_equal_those_of_transformers",),
    ),
    Mutation(
        "images-at-the-start-of-the-batch",
        "backend/training/packing.py",
        "rows.append(start + placement.offset + np.arange(image.num_tokens))",
        "rows.append(placement.offset + np.arange(image.num_tokens))",
        (PACKING + "test_packed_equals_one_by_one[qwen3_vl]",),
    ),
    Mutation(
        "no-rows-of-pixels",
        "backend/training/embedding.py",
        "    if not packed.images:\n",
        "    if packed.images is None:\n",
        (PACKING + "test_packed_equals_one_by_one[qwen3_vl]",),
    ),
    Mutation(
        "image-processed-again",
        "backend/rendering/image_cache.py",
        "            if content_hash in self._kept:\n",
        "            if False:\n",
        (RENDERER + "test_an_image_is_processed_once_however_many_threads_ask",),
    ),
    Mutation(
        "image-encoded-for-every-datum",
        "backend/training/packing.py",
        "            if image.content_hash not in first_row:\n",
        "            if True:\n",
        (OFFSETS + "test_an_image_is_encoded_once_per_content",),
    ),
    Mutation(
        "image-encoded-for-every-sample",
        "backend/vllm_engine/engine_inputs.py",
        '"image": [image.content_hash for image in images]',
        '"image": [f"{image.content_hash}{id(ids)}" for image in images]',
        (GROUPS + "test_sixteen_samples_of_one_prompt_encode_its_image_once",),
    ),
    Mutation(
        "base64-not-decoded",
        "types/datum.py",
        "return base64.b64decode(data, validate=True)",
        'return data.encode("ascii")',
        (VALUES + "test_image_data_is_bytes_or_base64_and_serialises_to_base64",),
    ),
    Mutation(
        "base64-encoded-twice",
        "types/datum.py",
        'return base64.b64encode(data).decode("ascii")',
        'return base64.b64encode(base64.b64encode(data)).decode("ascii")',
        (VALUES + "test_image_data_is_bytes_or_base64_and_serialises_to_base64",),
    ),
    Mutation(
        "chunks-joined-wrongly",
        "backend/rendering/renderer.py",
        "                parts.append(chunk.tokens)\n",
        "                parts.append(chunk.tokens[1:] if parts else chunk.tokens)\n",
        (RENDERER + "test_text_alone_equals_the_plain_token_list_however_it_is_split",),
    ),
    Mutation(
        "text-is-no-plain-list",
        "backend/vllm_engine/engine_inputs.py",
        "    if not prompt.images:\n",
        "    if False:\n",
        ("tests/rendering/test_plain_tokens.py::test_text_in_any_number_of_chunks_is_vllms_plain_token_input",),
    ),
    # Order ----------------------------------------------------------------------------------------------------------
    Mutation(
        "order-of-arrival",
        "backend/scheduling/command_log.py",
        "            if not self._skipped(now) and not overdue:\n",
        "            if False:\n",
        (
            COMMAND_LOG + "test_first_chunk_last_as_the_sdk_sends_them",
            ORDER + "test_chunks_that_arrive_as_2_3_1_run_as_1_2_3_on_fakes",
        ),
    ),
    Mutation(
        "duplicates-run-twice",
        "backend/control/training.py",
        "        if (known := self._operations.repeated(operation.request_id, operation.kind)) is not None:\n"
        "            return known\n        model =",
        "        model =",
        (ORDER + "test_same_seq_id_again_is_the_same_request_and_runs_once_on_fakes",),
    ),
    Mutation(
        "gap-not-skipped-by-a-step",
        "backend/scheduling/command_log.py",
        "self._skip_to = max(self._skip_to, seq_id)",
        "pass",
        (COMMAND_LOG + "test_gap_is_skipped_at_once_by_an_operation_that_is_not_forward_backward",),
    ),
    Mutation(
        "gap-waited-for-for-ever",
        "backend/scheduling/command_log.py",
        "overdue = self._gap_since is not None and now - self._gap_since >= self._patience",
        "overdue = False",
        (
            COMMAND_LOG + "test_gap_below_forward_backward_waits_until_patience_ends",
            ORDER + "test_missing_chunk_is_waited_for_and_then_given_up_on_fakes",
        ),
    ),
    Mutation(
        "impatient-with-gaps",
        "backend/options.py",
        "gap_patience: float = 360.0",
        "gap_patience: float = 60.0",
        ("tests/scheduling/test_gap_patience.py::test_default_patience_outlasts_the_sdks_retries",),
    ),
    Mutation(
        "skipped-id-stays-open",
        "backend/scheduling/command_log.py",
        "return seq_id >= self.next_seq_id and seq_id not in self._entries",
        "return seq_id not in self._entries",
        (
            COMMAND_LOG + "test_skipped_id_is_closed",
            ORDER + "test_skipped_id_is_closed_and_refused_through_its_future_on_fakes",
        ),
    ),
    Mutation(
        "skipped-gap-forgotten",
        "backend/scheduling/command_log.py",
        '            self.poison(f"the request with seq_id {missing} never arrived")\n',
        "",
        (
            COMMAND_LOG + "test_skipped_gap_poisons_the_gradient_of_the_next_step_and_of_that_alone",
            ORDER + "test_gap_is_skipped_at_once_by_a_step_which_fails_and_discards_on_fakes",
        ),
    ),
    Mutation(
        "one-request-per-call",
        "backend/scheduling/fairness.py",
        "                    if batch and offer.positions > left:\n",
        "                    if batch:\n",
        (ORDER + "test_models_share_a_call_of_the_trainer_and_stay_apart_on_fakes",),
    ),
    Mutation(
        "step-after-a-failed-gradient",
        "backend/scheduling/model_queue.py",
        '            self.commands.poison(f"{command.operation.request_id} failed: {error}")\n',
        "            pass\n",
        (ORDER + "test_failed_gradient_fails_the_next_step_alone_on_fakes",),
    ),
    Mutation(
        "partial-gradient-kept",
        "backend/control/training.py",
        "                await scheduler.call(trainer.discard_gradients, model.model_id)\n",
        "",
        (ORDER + "test_failed_gradient_fails_the_next_step_alone_on_fakes",),
    ),
    # Fairness and bounds --------------------------------------------------------------------------------------------
    Mutation(
        "budget-of-a-call-not-kept",
        "backend/scheduling/fairness.py",
        "                    left -= offer.positions\n",
        "",
        (SIMULATION + "test_random_traffic_keeps_order_budget_and_starves_nobody_on_fakes",),
    ),
    Mutation(
        "share-of-a-model-not-of-a-session",
        "backend/scheduling/fairness.py",
        "                session.begin_turn(self._quantum)\n",
        "                session.begin_turn(self._quantum * len(session.models))\n",
        (SIMULATION + "test_sessions_get_the_same_however_many_models_they_have_on_fakes",),
    ),
    Mutation(
        "waiting-saves-up",
        "backend/scheduling/fairness.py",
        "            self.deficit = 0\n",
        "",
        ("tests/scheduling/test_fairness.py::test_who_has_nothing_to_take_saves_nothing_up",),
    ),
    Mutation(
        "steps-are-free",
        "backend/scheduling/fairness.py",
        "                session.debt += offer.cost\n",
        "",
        (SIMULATION + "test_one_session_with_many_saves_keeps_nobody_waiting_on_fakes",),
    ),
    Mutation(
        "longest-batch-whoever-waits",
        "backend/scheduling/fairness.py",
        "                return []\n",
        "                pass\n",
        (SIMULATION + "test_step_behind_a_gradient_waits_for_one_turn_of_the_others_on_fakes",),
    ),
    Mutation(
        "nobody-expected-back",
        "backend/scheduling/train_scheduler.py",
        "        if self._waits_for_company():\n",
        "        if False:\n",
        (SIMULATION + "test_clients_that_wait_for_their_results_run_together_on_fakes",),
    ),
    Mutation(
        "everybody-expected-back",
        "backend/scheduling/train_scheduler.py",
        "q.runs and q.absence <= self._patience and",
        "q.runs and",
        (SIMULATION + "test_clients_that_stay_away_are_not_waited_for_on_fakes",),
    ),
    Mutation(
        "unready-model-holds-others-up",
        "backend/scheduling/train_scheduler.py",
        "        until = min(latest, self._wait_limit)\n",
        "        until = latest + 1e9\n",
        (SIMULATION + "test_random_traffic_keeps_order_budget_and_starves_nobody_on_fakes",),
    ),
    Mutation(
        "queue-without-end",
        "backend/scheduling/command_log.py",
        "        if reason is not None and waited < PATIENCE:\n",
        "        if False:\n",
        (
            ADMISSION + "test_session_is_refused_beyond_its_own_bounds_and_others_are_not",
            BACK_PRESSURE + "test_refused_submit_is_told_when_to_come_again_on_fakes",
        ),
    ),
    Mutation(
        "refused-until-the-sdk-gives-up",
        "backend/scheduling/command_log.py",
        "        if reason is not None and waited < PATIENCE:\n",
        "        if reason is not None:\n",
        (ADMISSION + "test_nobody_is_refused_for_as_long_as_the_sdk_tries",),
    ),
    Mutation(
        "bound-locks-a-model",
        "backend/scheduling/command_log.py",
        "        if not queue.commands.can_run(now):\n            return\n",
        "",
        (
            ADMISSION + "test_model_that_cannot_run_without_it_is_never_refused",
            BACK_PRESSURE + "test_full_server_takes_from_each_model_what_it_needs_to_go_on_on_fakes",
        ),
    ),
    Mutation(
        "refused-id-is-a-gap",
        "backend/scheduling/command_log.py",
        "            queue.commands.refuse(seq_id, now)\n",
        "",
        (
            ADMISSION + "test_refused_id_is_no_gap_for_a_step_to_skip",
            BACK_PRESSURE + "test_refused_submit_can_be_sent_again_and_leaves_no_gap_on_fakes",
        ),
    ),
    # Time -----------------------------------------------------------------------------------------------------------
    Mutation(
        "results-polled-for",
        "backend/scheduling/operations.py",
        "await self._wake.wait()",
        "await asyncio.sleep(0.05)",
        (FUTURES + "test_result_wakes_the_poll_within_milliseconds_on_fakes",),
    ),
    Mutation(
        "scheduler-polls",
        "backend/scheduling/train_scheduler.py",
        "            await self._wake.wait()\n",
        "            await asyncio.sleep(0.1)\n",
        (ORDER + "test_waiting_for_a_missing_chunk_is_no_polling_on_fakes",),
    ),
    Mutation(
        "engine-thread-spins",
        "backend/vllm_engine/engine_thread.py",
        "command = self._commands.get(block=idle)",
        "command = self._commands.get(block=False)",
        ("tests/sampling/test_engine_thread_idle.py::test_an_idle_engine_thread_takes_no_processor_time",),
    ),
    Mutation(
        "event-loop-per-call",
        "backend/control/training.py",
        "    request = decode()\n",
        "    import asyncio\n\n    request = asyncio.run(asyncio.to_thread(decode))\n",
        ("tests/workspace/test_source_rules.py::test_event_loops_are_made_where_a_server_begins_and_nowhere_else",),
    ),
    Mutation(
        "nagle",
        "backend/http/server.py",
        "socket.SOCK_STREAM, socket.IPPROTO_TCP)",
        "socket.SOCK_STREAM)",
        (SOCKETS + "test_connections_do_not_wait_for_nagle",),
    ),
    Mutation(
        "bodies-parsed-on-the-loop",
        "backend/http/training_routes.py",
        "await asyncio.to_thread(envelope)",
        "envelope()",
        (OFF_THE_LOOP,),
    ),
    Mutation(
        "results-encoded-on-the-loop",
        "backend/http/future_routes.py",
        "await asyncio.to_thread(encode_sample_output, result)",
        "encode_sample_output(result)",
        (OFF_THE_LOOP,),
    ),
    Mutation(
        "images-rendered-on-the-loop",
        "backend/control/sampling.py",
        'prompt = await loop.run_in_executor(self._rendering, render, given, "prompt")\n',
        'prompt = render(given, "prompt")\n',
        (OFF_THE_LOOP,),
    ),
    Mutation(
        "disk-on-the-loop",
        "backend/control/save_weights_for_sampler.py",
        "await asyncio.to_thread(self._folders.publish, name, state)",
        "self._folders.publish(name, state)",
        (OFF_THE_LOOP,),
    ),
    # Durability -----------------------------------------------------------------------------------------------------
    Mutation(
        "folder-not-synced",
        "backend/storage/checkpoints.py",
        "            fsync_path(unfinished)\n",
        "",
        (STORE + "test_everything_is_on_the_disk_before_the_record",),
    ),
    Mutation(
        "database-does-not-wait",
        "backend/storage/database.py",
        "synchronous = FULL",
        "synchronous = OFF",
        (STORE + "test_sqlite_waits_for_the_disk",),
    ),
    Mutation(
        "recorded-before-it-is-written",
        "backend/storage/store.py",
        "        written = self._folders.write(record, state)\n        try:\n"
        "            replaced = self._commit(written, overwrite)\n",
        "        replaced = self._commit(record, overwrite)\n        try:\n"
        "            written = self._folders.write(record, state)\n",
        ("tests/storage/test_storage_kill.py::test_a_write_cut_off_at_any_step_leaves_old_or_new",),
    ),
    Mutation(
        "acknowledged-before-it-is-written",
        "backend/control/training.py",
        "            model.beside(operation, write())\n",
        '            operation.succeed({"path": record.tinker_path})\n            model.beside(operation, write())\n',
        (DURABLE_SAVES + "test_named_save_is_acknowledged_only_when_it_is_on_the_disk_on_fakes[save_weights]",),
    ),
    Mutation(
        "optimizer-not-saved",
        "backend/control/training.py",
        "capture, model.model_id, optimizer=True)",
        "capture, model.model_id, optimizer=False)",
        (RESTART + "test_named_checkpoints_survive_kill_9_with_optimizer_state_on_fakes",),
    ),
    Mutation(
        "last-checkpoint-not-named",
        "backend/control/training_runs.py",
        'saved = [c for c in checkpoints if c.kind == "weights"]',
        "saved: list[CheckpointRecord] = []",
        (RESTART + "test_named_checkpoints_survive_kill_9_with_optimizer_state_on_fakes",),
    ),
    Mutation(
        "lost-samplers-of-named-versions",
        "backend/control/sampling.py",
        "        if record.nameless:\n",
        "        if True:\n",
        (RESTART + "test_named_checkpoints_survive_kill_9_with_optimizer_state_on_fakes",),
    ),
    Mutation(
        "pickle",
        "backend/storage/adapter_files.py",
        "        _save(folder / OPTIMIZER, state.optimizer, metadata)\n",
        "        __import__('pickle').dump(dict(state.optimizer), (folder / 'optimizer.pt').open('wb'))\n",
        (STORE + "test_checkpoint_folder_holds_safetensors_and_json_alone",),
    ),
    Mutation(
        "adapters-read-as-pickles",
        "backend/storage/adapter_files.py",
        "import json\n",
        "import json\nimport pickle\n",
        ("tests/workspace/test_source_rules.py::test_nothing_reads_or_writes_pickles",),
    ),
    Mutation(
        "lost-session-is-404",
        "backend/control/sessions.py",
        'raise GoneError(f"session_id: the session',
        'raise NotFoundError(f"session_id: the session',
        (RESTART + "test_what_was_lost_in_a_restart_says_so_on_fakes",),
    ),
    # Errors ---------------------------------------------------------------------------------------------------------
    Mutation(
        "failed-operation-is-500",
        "backend/http/future_routes.py",
        'return JSONResponse({"error": message(error), "category": error.category})',
        'return JSONResponse({"error": message(error), "category": error.category}, error.status)',
        (ENDPOINTS + "test_failed_operation_is_200_with_error_and_category_on_fakes",),
    ),
    Mutation(
        "409",
        "types/errors.py",
        "    status = 400\n",
        "    status = 409\n",
        (ENDPOINTS + "test_every_client_error_has_a_body_and_its_length_on_fakes",),
    ),
    Mutation(
        "existing-name-is-refused-at-the-submit",
        "backend/control/training.py",
        "        model = await self._place(operation, model_id, seq_id)\n",
        "        model = await self._place(operation, model_id, seq_id)\n"
        '        if kind == "save_weights" and self._store.list_checkpoints(model_id):\n'
        '            raise TooManyRequestsError("a checkpoint of this name exists")\n',
        (FUTURES + "test_name_that_exists_fails_the_save_and_no_409_on_fakes",),
    ),
    Mutation(
        "lost-model-is-500",
        "backend/control/training_runs.py",
        "raise GoneError(str(lost)) if isinstance(lost, InternalError) else lost",
        "raise lost",
        (RESTART + "test_what_was_lost_in_a_restart_says_so_on_fakes",),
    ),
    Mutation(
        "unknown-fields-ignored",
        "types/base.py",
        'extra="forbid"',
        'extra="ignore"',
        (
            "tests/types/test_types_json_bodies.py::test_wrong_samples_are_refused_with_the_fields_name",
            ENDPOINTS + "test_what_is_not_honoured_is_refused_by_name_on_fakes",
        ),
    ),
    Mutation(
        "unknown-fields-of-protobuf-ignored",
        "types/codec/wire_tensors.py",
        "    if len(unknown):\n",
        "    if False:\n",
        (CODEC + "test_fields_of_a_later_schema_are_refused_and_not_dropped",),
    ),
    Mutation(
        "unsupported-fields-ignored",
        "backend/control/sampling.py",
        "        if request.record_stability_info:\n",
        "        if False:\n",
        (ENDPOINTS + "test_what_is_not_honoured_is_refused_by_name_on_fakes",),
    ),
    Mutation(
        "checkpoint-of-another-base-accepted",
        "backend/control/load_weights.py",
        "    if record.base_model not in base.names:\n",
        "    if False:\n",
        (ORDER + "test_checkpoint_of_another_base_is_refused_on_fakes",),
    ),
    Mutation(
        "unserved-base-model-accepted",
        "backend/models/served_models.py",
        "        if name not in self._by_name:\n",
        "        name = name if name in self._by_name else next(iter(self._by_name))\n        if False:\n",
        (BAD_INPUT + "test_unknown_base_model_is_refused_with_those_that_are_served_on_fakes",),
    ),
    Mutation(
        "prompt-over-the-context-fails-as-a-sample",
        "backend/control/sampling.py",
        "        _check_context(request, session.base.engines.sampler.max_context_length)\n",
        "",
        (BAD_INPUT + "test_a_picture_counts_towards_the_context_by_what_it_says_or_when_rendered_on_fakes",),
    ),
    Mutation(
        "ttl-dropped",
        "backend/control/training_runs.py",
        "expires_at=expiry(when, ttl_seconds)",
        "expires_at=None",
        (ENDPOINTS + "test_models_and_checkpoints_are_answered_as_the_sdk_reads_them_on_fakes",),
    ),
    Mutation(
        "expired-checkpoint-found",
        "backend/storage/store.py",
        "        return expires_at.is_(None) | (expires_at > self._clock())\n",
        "        return sa.true()\n",
        (CHECKPOINT_LIFE + "test_an_expired_path_is_404_at_once_before_anybody_sweeps_on_fakes",),
    ),
    Mutation(
        "expired-folder-stays",
        "backend/storage/store.py",
        "            expired = self._checkpoints(tables.checkpoints.c.expires_at <= self._clock())\n",
        "            expired: list[CheckpointRecord] = []\n",
        (CHECKPOINT_LIFE + "test_expired_checkpoints_leave_the_disk_and_the_engine_by_themselves_on_fakes",),
    ),
    Mutation(
        "folder-deleted-under-its-users",
        "backend/control/checkpoints.py",
        "            await self._uses.unused(record)\n",
        "",
        (CHECKPOINT_LIFE + "test_a_checkpoint_that_is_being_loaded_stays_until_it_is_read_on_fakes",),
    ),
    Mutation(
        "one-key-two-copies",
        "backend/control/checkpoints.py",
        '            keys.append(f"key {idempotency_key}")\n',
        "            pass\n",
        (CHECKPOINT_LIFE + "test_one_idempotency_key_is_one_copy_on_fakes",),
    ),
    Mutation(
        "last-reason-of-a-session-wins",
        "backend/storage/store.py",
        " & table.c.ended_at.is_(None)\n",
        "\n",
        (RECORDS + "test_sessions_come_back_equal_and_end_once",),
    ),
    Mutation(
        "old-data-folder-as-it-is",
        "backend/storage/database.py",
        "        _migrate(engine, version)\n",
        "        pass\n",
        ("tests/storage/test_storage_migration.py::test_a_folder_of_version_1_opens_with_everything_in_it",),
    ),
    Mutation(
        "metadata-dropped",
        "backend/control/training_runs.py",
        "            user_metadata=user_metadata or {},\n",
        "            user_metadata={},\n",
        (FUTURES + "test_name_that_exists_fails_the_save_and_no_409_on_fakes",),
    ),
    Mutation(
        "results-kept-for-ever",
        "backend/scheduling/operations.py",
        "            del self._by_id[request_id]\n",
        "            pass\n",
        (FUTURES + "test_results_can_be_read_again_until_their_retention_ends_on_fakes",),
    ),
    Mutation(
        "bodies-in-the-database",
        "backend/storage/tables.py",
        '    Column("user_metadata", JSON, nullable=False),\n    Column("tags", JSON, nullable=False),\n',
        '    Column("user_metadata", JSON, nullable=False),\n    Column("tags", JSON, nullable=False),\n'
        '    Column("body", __import__("sqlalchemy").LargeBinary),\n',
        (RECORDS + "test_nothing_of_a_request_body_is_kept",),
    ),
    Mutation(
        "pool-exhausted",
        "backend/storage/database.py",
        "pool_size=8, max_overflow=-1",
        "pool_size=8, max_overflow=10",
        ("tests/storage/test_storage_connections.py::test_a_hundred_threads_read_at_the_same_time",),
    ),
    Mutation(
        "ready-before-it-is",
        "backend/http/access.py",
        'if scope["type"] == "http" and not self._backend.ready and scope["path"] != HEALTH:',
        "if False:",
        (STARTED + "test_ready_is_said_when_it_is_and_health_is_503_before_on_fakes",),
    ),
    Mutation(
        "healthy-before-it-is",
        "backend/http/client_routes.py",
        "    if backend.ready:\n",
        "    if True:\n",
        (STARTED + "test_ready_is_said_when_it_is_and_health_is_503_before_on_fakes",),
    ),
    # Safety ---------------------------------------------------------------------------------------------------------
    Mutation(
        "listens-to-everybody",
        "backend/cli/serve.py",
        '"--host", default="127.0.0.1"',
        '"--host", default="0.0.0.0"',
        (STARTED + "test_signal_ends_long_polls_and_cleans_up_on_fakes",),
    ),
    Mutation(
        "binds-to-everything",
        "backend/http/server.py",
        "listening.bind((host, port))",
        'listening.bind(("0.0.0.0", port))',
        (SOCKETS + "test_server_listens_to_this_machine_alone_unless_told_otherwise_on_fakes",),
    ),
    Mutation(
        "no-key-for-other-machines",
        "backend/cli/serve.py",
        "if not is_loopback(host) and api_key_file is None:",
        "if False:",
        (ACCESS + "test_address_that_others_reach_needs_a_key_file_on_fakes[192.0.2.1]",),
    ),
    Mutation(
        "rebound-names-let-in",
        "backend/http/access.py",
        "    if not _names_loopback(host):\n",
        "    if not host:\n",
        (ACCESS + "test_without_keys_a_page_whose_name_was_made_to_lead_here_is_refused_on_fakes",),
    ),
    Mutation(
        "web-pages-let-in",
        "backend/http/access.py",
        '    if origin is not None and not _names_loopback(origin.partition("://")[2]):\n',
        "    if origin is None and not host:\n",
        (ACCESS + "test_without_keys_web_pages_of_other_sites_are_refused_on_fakes",),
    ),
    Mutation(
        "image-host-drips-for-ever",
        "backend/rendering/image_assets.py",
        "            asyncio.timeout(end - time.monotonic()),\n",
        "            asyncio.timeout(None),\n",
        (IMAGE_ASSETS + "test_a_host_that_drips_is_given_up_in_time_wherever_it_drips[]",),
    ),
    Mutation(
        "dead-hosts-hold-up-files",
        "backend/rendering/image_assets.py",
        "return host if host in self._look_ups else FOLDER",
        "return FOLDER",
        (IMAGE_ASSETS + "test_a_host_that_does_not_answer_holds_up_nobody_who_reads_elsewhere",),
    ),
    Mutation(
        "image-folder-takes-everybodys-threads",
        "backend/rendering/image_assets.py",
        "in_daemon_thread(self._read, location, field)",
        "asyncio.to_thread(self._read, location, field)",
        (IMAGE_ASSETS + "test_a_folder_that_hangs_holds_up_nobody_who_reads_no_images",),
    ),
    Mutation(
        "download-read-whole",
        "backend/http/download_routes.py",
        'FileResponse(path, media_type="application/octet-stream", filename=self._wanted.file)',
        'Response(path.read_bytes(), media_type="application/octet-stream")',
        (EXTERNAL + "test_file_is_streamed_and_never_whole_in_memory_on_fakes",),
    ),
    Mutation(
        "exports-with-paths-of-transformers",
        "backend/families/interface.py",
        "            return HOSTED_DECODER + path.removeprefix(self.decoder_path)\n",
        "            return path\n",
        (EXPORT_NAMES + "test_merged_export_of_an_untied_model_is_what_was_trained[qwen3_vl_untied]",),
    ),
    Mutation(
        "tied-head-as-a-tensor-of-its-own",
        "backend/families/interface.py",
        "return HOSTED_TIED_HEAD if tied_head else path",
        "return path",
        (EXPORT_NAMES + "test_merged_export_of_a_tied_model_differs_by_its_input_embedding_alone[qwen3]",),
    ),
    Mutation(
        "untied-head-named-as-a-tied-one",
        "backend/families/interface.py",
        "return HOSTED_TIED_HEAD if tied_head else path",
        "return HOSTED_TIED_HEAD",
        (EXPORT_NAMES + "test_export_is_loaded_by_peft_as_documented[qwen3_untied]",),
    ),
    Mutation(
        "export-is-a-checkpoint",
        "backend/control/exports.py",
        "call(model.base.engines.trainer.export, model.model_id)",
        "call(model.base.engines.trainer.capture, model.model_id, optimizer=False)",
        ("tests/e2e/test_download.py::test_checkpoint_downloaded_by_the_command_is_what_peft_loads_and_was_trained",),
    ),
    Mutation(
        "folder-names-the-first-of-a-models-names",
        "backend/storage/checkpoints.py",
        "write_adapter(folder, replace(state, base_model=record.base_model))",
        "write_adapter(folder, state)",
        ("tests/storage/test_storage_peft.py::test_folder_names_the_base_model_as_the_run_asked_for_it",),
    ),
    Mutation(
        "forged-url-accepted",
        "backend/control/signatures.py",
        "expires, *signed = self._tokens.loads(token)",
        "_, (expires, *signed) = self._tokens.loads_unsafe(token)",
        (EXTERNAL + "test_forged_or_expired_url_is_403_on_fakes",),
    ),
    Mutation(
        "expired-url-accepted",
        "backend/control/signatures.py",
        "        if self._clock().timestamp() >= expires:\n",
        "        if expires < 0:\n",
        (EXTERNAL + "test_forged_or_expired_url_is_403_on_fakes",),
    ),
    Mutation(
        "trace-without-the-time-of-preparation",
        "backend/scheduling/operations.py",
        "            self.enter(stage)\n",
        '            self.enter("waiting")\n',
        (SESSION_TRACE + "test_time_is_where_it_was_spent_on_fakes",),
    ),
    Mutation(
        "traces-grow-without-bound",
        "backend/traces/recorder.py",
        "        if len(self._arrivals) > MOST:\n",
        "        if len(self._arrivals) < 0:\n",
        (
            "tests/traces/test_trace_recorder.py::"
            "test_all_sessions_together_keep_no_more_than_the_bound_and_the_oldest_go_first",
        ),
    ),
    Mutation(
        "trace-with-slices-that-overlap",
        "backend/traces/perfetto.py",
        "            while taken and taken[0][0] <= timeline.stages[0][1]:\n",
        "            while taken:\n",
        (
            "tests/traces/test_trace_perfetto.py::"
            "test_operations_that_overlap_lie_on_lines_of_their_own_and_lines_are_used_again",
        ),
    ),
    Mutation(
        "trace-for-whoever-asks",
        "backend/control/session_traces.py",
        "        self._signatures.check(token, KIND, session_id)\n",
        "",
        (SESSION_TRACE + "test_url_needs_no_key_and_a_forged_or_expired_one_is_403_on_fakes",),
    ),
    Mutation(
        "traces-of-sessions-that-never-were",
        "backend/scheduling/operations.py",
        "        if operation.failures is not None:\n            self._record",
        "        if True:\n            self._record",
        (SESSION_TRACE + "test_requests_of_unknown_models_are_recorded_for_nobody_on_fakes",),
    ),
    Mutation(
        "export-deleted-under-a-download",
        "backend/control/exports.py",
        "        with self._uses.using(record):\n",
        "        if record:\n",
        (EXTERNAL + "test_download_goes_on_to_its_end_if_the_export_is_deleted_on_fakes[headers0]",),
    ),
    Mutation(
        "copies-share-ids",
        "backend/control/sampling_clients.py",
        "        self._joined += 1\n        while",
        "        self._joined = 1\n        while",
        (SAMPLING_CLIENTS + "test_clients_of_one_session_hear_of_their_own_samples_on_fakes",),
    ),
    Mutation(
        "completions-seen-once",
        "backend/control/sampling_clients.py",
        "        return [completion for completion in self._unseen if completion.cursor > cursor]\n",
        "        return [self._unseen.popleft() for _ in range(len(self._unseen))]\n",
        (SAMPLING_CLIENTS + "test_poll_tells_what_ended_since_the_cursor_on_fakes",),
    ),
    Mutation(
        "queue-state-always-active",
        "backend/scheduling/train_scheduler.py",
        "        running = [other.session_id for other in self.running]\n",
        "        running: list[str] = []\n",
        (QUEUE_STATES + "test_training_that_waits_for_others_is_told_for_whom_on_fakes",),
    ),
    Mutation(
        "keys-not-checked",
        "backend/http/access.py",
        "hmac.compare_digest(given.encode(), key) for key in self._keys) > 0",
        "hmac.compare_digest(given.encode(), key) for key in self._keys) >= 0",
        (ACCESS + "test_request_without_a_key_is_401_before_its_body_is_read_on_fakes",),
    ),
    Mutation(
        "keys-in-the-log",
        "backend/http/client_routes.py",
        'in clear text."""\n    await discard_body(request)\n',
        'in clear text."""\n    __import__("logging").warning((await request.body()).decode())\n',
        (ACCESS + "test_keys_reach_no_log_and_no_disk_on_fakes",),
    ),
    Mutation(
        "zstd-bomb",
        "backend/http/bodies.py",
        "        if size > limit:\n            raise InvalidRequestError(\n",
        "        if False:\n            raise InvalidRequestError(\n",
        (BAD_INPUT + "test_zstd_bomb_is_refused_without_its_memory_on_fakes",),
    ),
    Mutation(
        "endless-bodies",
        "backend/http/bodies.py",
        '        if size > limit:\n            raise InvalidRequestError(f"body: over',
        '        if size > 64 * limit:\n            raise InvalidRequestError(f"body: over',
        (BAD_INPUT + "test_bodies_over_their_limits_are_refused_before_they_are_read_on_fakes",),
    ),
    Mutation(
        "any-number-of-pixels",
        "backend/rendering/decoding.py",
        "if opened.width * opened.height > max_pixels:",
        "if False:",
        (DECODING + "test_an_image_of_too_many_pixels_is_refused_from_its_header",),
    ),
    Mutation(
        "bound-of-tensors-raised",
        "backend/control/training.py",
        "MAX_CELLS = 2**26",
        "MAX_CELLS = 2**28",
        (BAD_INPUT + "test_sparse_tensor_that_would_be_huge_is_refused_before_it_is_dense_on_fakes",),
    ),
    Mutation(
        "image-pointers-fetched",
        "backend/rendering/renderer.py",
        "        if isinstance(chunk, ImageAssetPointerChunk):\n",
        "        if isinstance(chunk, ImageAssetPointerChunk):\n"
        "            import urllib.request\n\n"
        "            data = urllib.request.urlopen(chunk.location, timeout=1).read()\n"
        "            chunk = ImageChunk(data=data, format=chunk.format)\n        if False:\n",
        (RENDERER + "test_image_pointers_are_refused_by_name",),
    ),
    Mutation(
        "paths-leave-their-folder",
        "backend/storage/names.py",
        "if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:",
        "if len(name) > MAX_NAME_LENGTH:",
        (
            STORE + "test_a_name_that_is_no_plain_segment_is_refused",
            BAD_INPUT + "test_name_that_is_none_fails_in_its_place_on_fakes",
        ),
    ),
    # Memory that trainer and sampler share --------------------------------------------------------------------------
    Mutation(
        "sleeps-when-all-fits",
        "backend/scheduling/memory_sharing.py",
        "if isinstance(result, NotEnoughMemoryError)",
        "if True",
        (MEMORY_SHARING + "test_training_that_fits_never_puts_the_sampler_to_sleep_and_never_wakes_it_on_fakes",),
    ),
    Mutation(
        "memory-taken-from-under-samples",
        "backend/scheduling/memory_sharing.py",
        "            await self._unused.wait()\n",
        "",
        (MEMORY_SHARING + "test_the_trainer_waits_for_samples_in_flight_and_later_ones_for_it_on_fakes",),
    ),
    Mutation(
        "samples-are-not-held-back",
        "backend/scheduling/memory_sharing.py",
        "while self._wanted or self.asleep",
        "while self.asleep",
        (MEMORY_SHARING + "test_the_trainer_waits_for_samples_in_flight_and_later_ones_for_it_on_fakes",),
    ),
    Mutation(
        "neighbours-run-again",
        "backend/scheduling/memory_sharing.py",
        "self._again([works[at] for at in short], list(short.values()))",
        "self._again([work for work in works], [*short.values()] * len(works)); short = dict(enumerate(works))",
        (MEMORY_SHARING + "test_neighbours_of_a_request_that_does_not_fit_run_once_on_fakes",),
    ),
    Mutation(
        "wakes-beside-the-trainers-cache",
        "backend/scheduling/memory_sharing.py",
        "                await self._in_thread(self._trainer.release_memory)\n",
        "                pass\n",
        (MEMORY_SHARING + "test_the_next_sample_wakes_the_sampler_on_fakes",),
    ),
    Mutation(
        "removing-a-version-wakes",
        "backend/scheduling/memory_sharing.py",
        "        await self._sampler.remove_version(version)\n",
        "        async with self._memory_sharing.awake():\n            await self._sampler.remove_version(version)\n",
        (MEMORY_SHARING + "test_the_end_of_a_session_wakes_nobody_on_fakes",),
    ),
    # Vision RL ------------------------------------------------------------------------------------------------------
    Mutation(
        "replies-encoded-again",
        "client/rl/conversation.py",
        "said_chunks = [tinker.EncodedTextChunk(tokens=sampled)] if sampled else []",
        "said_chunks = [tinker.EncodedTextChunk(tokens=chat.encode(written, continued=True) + sampled[len(body) :])]",
        (CONVERSATIONS + "test_whatever_is_sampled_stays_as_it_was_sampled",),
    ),
    Mutation(
        "end-of-turn-twice",
        "client/rl/conversation.py",
        "            if ended:  # what was sampled is not repeated",
        "            if False:",
        (
            CONVERSATIONS + "test_three_turns_with_images_are_these_tokens",
            CONVERSATIONS + "test_written_conversations_are_the_template_s_tokens_up_to_the_last_end_of_turn",
        ),
    ),
    Mutation(
        "rewritten-context-taken-for-continued",
        "client/rl/conversation.py",
        "self.continues = bool(found) and _continues(before, self._text, written)",
        "self.continues = bool(found)",
        (CHATS + "test_thoughts_are_dropped_before_a_new_query_and_each_turn_is_a_datum",),
    ),
    Mutation(
        "lost-reply-unnoticed",
        "client/rl/conversation.py",
        '            _check_shown(before if found else "", chat.prefill + written)\n',
        "",
        (CHATS + "test_a_template_that_loses_the_reply_is_an_error",),
    ),
    Mutation(
        "special-tokens-forged",
        "client/rl/chat.py",
        "return self._any_special.sub(lambda found: self._fence_of[found[0]], text)",
        "return text",
        (CONVERSATIONS + "test_text_is_data",),
    ),
    Mutation(
        "observations-trained",
        "client/rl/trajectory.py",
        "self._advantages += [np.zeros(given, np.float32),",
        "self._advantages += [np.full(given, advantage, np.float32),",
        (TRAJECTORIES + "test_a_datum_is_what_was_given_and_sampled",),
    ),
    Mutation(
        "logprobs-one-off",
        "client/rl/trajectory.py",
        '"logprobs": logprobs[1:]',
        '"logprobs": logprobs[:-1]',
        (TRAJECTORIES + "test_a_datum_is_what_was_given_and_sampled",),
    ),
    Mutation(
        "later-turns-dropped",
        "client/rl/trajectory.py",
        "            data += sequence.data(loss_fn)\n",
        "",
        (TRAJECTORIES + "test_a_prompt_that_only_resembles_begins_anew",),
    ),
    Mutation(
        "provenance-without-offset",
        "client/rl/trajectory.py",
        "sequence_id=turn.sequence_id, offset=self._positions, length=given",
        "sequence_id=turn.sequence_id, length=given",
        (TRAJECTORIES + "test_a_datum_is_what_was_given_and_sampled",),
    ),
    Mutation(
        "kl-of-all-positions",
        "client/rl/measures.py",
        "        if isinstance(span, tinker.SampledProvenanceSpan):\n",
        "        if True:\n",
        (RL_MEASURES + "test_the_kl_is_the_mean_over_sampled_tokens_alone",),
    ),
    Mutation(
        "one-failure-fails-the-rollout",
        "client/rl/rollouts.py",
        "        except EpisodeError as error:\n",
        "        except ZeroDivisionError as error:\n",
        (
            ENVIRONMENTS + "test_an_environment_that_raises_fails_alone",
            ENVIRONMENTS + "test_an_observation_that_cannot_be_rendered_fails_alone",
            VISION_RL + "test_five_failures_end_their_own_trajectories_and_the_others_train",
        ),
    ),
    Mutation(
        "siblings-ask-apart",
        "client/rl/sampling.py",
        "if turn == 0 and params.seed is None:",
        "if turn < 0:",
        (ROLLOUTS + "test_equal_first_prompts_go_as_one_request_although_rendering_takes_its_time",),
    ),
    Mutation(
        "one-seed-for-all",
        "client/rl/sampling.py",
        "% 2**64, self._index, member, turn])",
        "% 2**64, self._index, turn])",
        (ROLLOUTS + "test_with_a_seed_every_reply_has_its_own_and_again_the_same",),
    ),
    Mutation(
        "context-not-watched",
        "client/rl/sampling.py",
        "        if self._context_length is not None:\n",
        "        if False:\n",
        (ROLLOUTS + "test_replies_get_what_is_left_of_the_context_and_an_episode_that_fills_it_ends",),
    ),
    Mutation(
        "encoded-images-not-counted",
        "backend/training/image_features.py",
        "self.images_encoded += len(new)",
        "self.images_encoded += 0",
        (VISION_RL + "test_group_of_sixteen_renders_and_encodes_each_image_once",),
    ),
)


PROMISES = (
    Promise(
        "1",
        "Losses are plain weighted sums; a + b equals a, then b; no mean, no clamp, no repaired NaN",
        (
            "mean-gradient",
            "mean-loss",
            "normalised-by-weights",
            "last-gradient-only",
            "log-ratio-clamped",
            "not-a-number-passes",
            "not-a-number-becomes-0",
        ),
        (ORDER + "test_loss_is_a_sum_so_chunks_add_up_on_fakes",),
    ),
    Promise(
        "2",
        "Targets are those given, [T] or [T, K], dense or CSR; any weights; a coefficient of 0 adds exactly 0",
        (
            "targets-rebuilt",
            "candidates-in-column-order",
            "same-target-twice-counts-once",
            "sparse-cells-out-of-place",
            "negative-weights-dropped",
            "zero-times-infinity",
            "switched-off-targets-refused",
        ),
        (WORKS + "test_positions_with_coefficient_zero_add_nothing_whatever_their_target",),
    ),
    Promise(
        "3",
        "Optimizer settings are those of each step",
        (
            "betas-ignored",
            "eps-ignored",
            "weight-decay-coupled",
            "clip-norm-ignored",
            "clip-norm-0-is-1",
            "only-the-learning-rate-used",
            "another-optimizer-is-adamw",
        ),
    ),
    Promise(
        "4",
        "LoRA: scale 32 / rank, flags and seed obeyed, step 0 is the base model",
        (
            "scale-without-rank",
            "another-alpha",
            "flags-of-lora-ignored",
            "seed-of-lora-ignored",
            "lora-settings-dropped-on-the-way",
            "b-not-0-at-the-start",
            "scale-forgotten-in-the-gradient",
        ),
    ),
    Promise(
        "5",
        "Sampled logprobs are log softmax(logits / T) over the whole vocabulary; trainer and sampler agree to 1e-4",
        (
            "logprobs-after-the-cut",
            "logprobs-without-temperature",
            "small-temperatures-raised",
            "temperature-0-is-1",
            "trainers-positions",
        ),
        (
            SAMPLED + "test_a_batch_that_mixes_all_settings_agrees_with_hf",
            AGREEMENT + "test_sampled_logprobs_are_the_trainers",
        ),
        "The gap in bfloat16 on a GPU is measured and printed, by the same tests.",
    ),
    Promise(
        "6",
        "What is not honoured is refused by name; so is a base model that is not served",
        (
            "unknown-fields-ignored",
            "unknown-fields-of-protobuf-ignored",
            "unsupported-fields-ignored",
            "unknown-loss-is-cross-entropy",
            "checkpoint-of-another-base-accepted",
            "unserved-base-model-accepted",
            "prompt-over-the-context-fails-as-a-sample",
        ),
        (
            SETTINGS + "test_every_setting_of_a_sample_arrives_on_fakes",
            ENDPOINTS + "test_endpoint_that_is_not_served_is_refused_by_name_with_advice_on_fakes",
        ),
    ),
    Promise(
        "7",
        "One renderer; vLLM, HF and the client count each image alike, or that request alone fails",
        (
            "expected-tokens-not-compared",
            "engines-not-compared",
            "expected-tokens-for-training-only",
            "trained-without-its-image",
            "rotation-ignored",
            "client-counts-width-first",
            "client-ignores-rotation",
        ),
        ("tests/rendering/test_image_counts.py::test_25_shapes_count_alike_and_have_equal_pixels",),
    ),
    Promise(
        "8",
        "Positions of images are explicit; a pad id that comes as text is text",
        (
            "image-position-lost",
            "pad-ids-found-by-the-renderer",
            "pad-ids-found-by-the-trainer",
            "pad-ids-found-by-the-sampler",
            "positions-after-an-image",
        ),
        (OFFSETS + "test_pad_ids_in_pure_text_are_text",),
    ),
    Promise(
        "9",
        "Text-only and image datums mix in one batch and one micro-batch",
        ("images-at-the-start-of-the-batch", "no-rows-of-pixels", "one-segment-for-all"),
        note="The FSDP step comes with FSDP.",
    ),
    Promise(
        "10",
        "An image is processed once per content; 16 samples of a prompt pay for one image",
        ("image-processed-again", "image-encoded-for-every-datum", "image-encoded-for-every-sample"),
    ),
    Promise(
        "11",
        "Text chunks equal their concatenation; text alone equals a plain token list",
        ("chunks-joined-wrongly", "text-is-no-plain-list"),
        (
            PROMPT_LOGPROBS + "test_text_on_a_vision_model_is_the_same_whether_in_one_chunk_or_many",
            ORDER + "test_text_chunks_equal_their_concatenation_on_fakes",
        ),
    ),
    Promise(
        "12",
        "Each model's order is that of seq_id; duplicates are one; gaps are skipped and closed; models share calls",
        (
            "order-of-arrival",
            "duplicates-run-twice",
            "gap-not-skipped-by-a-step",
            "gap-waited-for-for-ever",
            "impatient-with-gaps",
            "skipped-id-stays-open",
            "skipped-gap-forgotten",
            "one-request-per-call",
            "columns-of-other-adapters-count",
            "ranks-without-bound",
        ),
    ),
    Promise(
        "13",
        "A step after a failed gradient fails and discards; a bad datum or no memory fails its own request",
        (
            "step-after-a-failed-gradient",
            "partial-gradient-kept",
            "one-failure-fails-the-batch",
            "memory-error-not-caught",
            "not-a-number-passes",
            "other-adapters-multiplied-by-zero",
            "broken-weights-are-multiplied",
        ),
        (ORDER + "test_bad_datum_fails_its_own_request_and_nobody_elses_on_fakes",),
    ),
    Promise(
        "14",
        "Nothing polls; a control-plane step costs milliseconds",
        ("results-polled-for", "scheduler-polls", "engine-thread-spins", "nagle"),
        (SOCKETS + "test_step_over_a_socket_takes_milliseconds_on_fakes",),
    ),
    Promise(
        "15",
        "Decoding, encoding, image work and disk stay off the event loop",
        (
            "bodies-parsed-on-the-loop",
            "results-encoded-on-the-loop",
            "images-rendered-on-the-loop",
            "disk-on-the-loop",
        ),
        ("tests/http/test_http_event_loop_on_fakes.py::test_large_body_does_not_hold_up_heartbeats_on_fakes",),
    ),
    Promise(
        "16",
        "A sampler version never changes, lives as long as promised, and leaves training alone",
        (
            "old-samplers-get-new-weights",
            "lora-ids-used-again",
            "captured-weights-shared",
            "saving-replaces-the-adapter",
            "newest-version-spilled-first",
            "versions-outlive-their-session",
            "lost-samplers-of-named-versions",
        ),
        (ADAPTERS + "test_a_version_stays_what_it_was_when_newer_ones_are_loaded",),
    ),
    Promise(
        "17",
        "An acknowledged checkpoint survives kill -9, with its optimizer, in PEFT's layout; what is lost says so",
        (
            "folder-not-synced",
            "database-does-not-wait",
            "recorded-before-it-is-written",
            "acknowledged-before-it-is-written",
            "optimizer-not-saved",
            "optimizer-state-not-restored",
            "saved-with-another-rank",
            "last-checkpoint-not-named",
            "lost-session-is-404",
            "lost-samplers-of-named-versions",
        ),
        ("tests/storage/test_storage_kill.py::test_acknowledged_checkpoints_survive_kill_minus_nine",),
    ),
    Promise(
        "18",
        "A failed operation is HTTP 200 with error and category; nothing permanent is 409 or 5xx",
        ("failed-operation-is-500", "409", "existing-name-is-refused-at-the-submit", "lost-model-is-500"),
        ("tests/http/test_http_fuzz_on_fakes.py::test_no_json_body_gets_a_5xx_on_fakes",),
    ),
    Promise(
        "19",
        "The effect of a loaded adapter is verified",
        ("effect-not-verified", "unmatched-keys-ignored"),
    ),
    Promise(
        "20",
        "Loopback or keys; no secret in a log or on disk; bounds before decoding; no fetches, no pickle",
        (
            "listens-to-everybody",
            "binds-to-everything",
            "no-key-for-other-machines",
            "rebound-names-let-in",
            "web-pages-let-in",
            "keys-not-checked",
            "keys-in-the-log",
            "zstd-bomb",
            "endless-bodies",
            "any-number-of-pixels",
            "bound-of-tensors-raised",
            "image-pointers-fetched",
            "image-host-drips-for-ever",
            "dead-hosts-hold-up-files",
            "image-folder-takes-everybodys-threads",
            "paths-leave-their-folder",
            "pickle",
            "adapters-read-as-pickles",
        ),
    ),
)

MISTAKES = (
    Promise("loss", "Mean in place of a sum", ("mean-gradient", "mean-loss", "normalised-by-weights")),
    Promise("loss", "An unknown loss trains cross-entropy", ("unknown-loss-is-cross-entropy",)),
    Promise(
        "loss",
        "A sequence's ratio is that of a part of it or of several",
        ("gspo-ratio-of-a-chunk", "gspo-ratio-of-several-data"),
    ),
    Promise("loss", "A penalty on prompts teaches them by heart", ("dro-learns-prompts-by-heart",)),
    Promise(
        "loss",
        "Importance sampling that is clipped, log-ratios clamped",
        ("importance-sampling-clipped", "log-ratio-clamped", "ppo-gradient-where-clipped"),
    ),
    Promise(
        "loss",
        "Only the learning rate of a step used",
        ("only-the-learning-rate-used", "betas-ignored", "eps-ignored", "weight-decay-coupled", "clip-norm-ignored"),
    ),
    Promise("loss", "Targets rebuilt from the input", ("targets-rebuilt",)),
    Promise(
        "loss",
        "One loss for a whole queue, totals as each request's metrics",
        ("first-loss-for-all", "totals-of-the-batch"),
    ),
    Promise(
        "loss",
        "Results in packed order",
        ("packed-order",),
        (ORDER + "test_metrics_and_outputs_are_of_each_request_and_in_its_order_on_fakes",),
    ),
    Promise("loss", "NaN reported as 0", ("not-a-number-passes", "not-a-number-becomes-0")),
    Promise(
        "loss", "Gradients averaged over ranks, fewer datums than ranks", note="There is one rank; comes with FSDP."
    ),
    Promise(
        "loss",
        "Zero adapter gradients under recomputation",
        ("recomputed-without-adapters", "residual-without-gradient"),
        (WORKS + "test_a_gradient_lost_inside_the_model_is_an_error_of_the_server",),
    ),
    Promise("loss", "Two loss modules drift apart", ("fake-losses-drift",)),
    Promise(
        "sampling",
        "Old samplers give newer weights, or sampling overwrites training weights",
        (
            "old-samplers-get-new-weights",
            "captured-weights-shared",
            "saving-replaces-the-adapter",
            "lora-ids-used-again",
        ),
    ),
    Promise("sampling", "Temperature 0 becomes 1", ("temperature-0-is-1", "small-temperatures-raised")),
    Promise(
        "sampling",
        "Seeds dropped, shared by neighbours, or fatal when huge",
        ("seed-of-samples-dropped", "neighbouring-seeds-share", "huge-seeds-reach-the-engine"),
    ),
    Promise(
        "sampling",
        "Stops forgotten or plain strings refused",
        ("stop-strings-forgotten", "stop-string-taken-for-a-list", "empty-stop-is-no-stop"),
    ),
    Promise("sampling", "Finish reasons not mapped", ("finish-reason-mapped-wrongly",)),
    Promise(
        "sampling", "The base model served because keys do not match", ("unmatched-keys-ignored", "effect-not-verified")
    ),
    Promise("sampling", "The base model gets a neighbour's adapter", ("base-gets-an-adapter",)),
    Promise(
        "sampling",
        "Prompt logprobs one short, NaN turned into something else",
        ("prompt-logprobs-one-short", "nan-of-the-first-token-becomes-0"),
    ),
    Promise(
        "sampling",
        "Top-k, target ids, the last n and drawn alternatives ignored, or wrong with adapters, images and long prompts",
        (
            "prompts-scored-without-their-lm-head",
            "scored-rows-read-from-the-cache",
            "alternatives-at-temperature-1",
            "alternatives-depend-on-the-parts-of-a-prompt",
            "topk-of-the-wrong-requests",
            "sparse-targets-read-as-dense",
        ),
        (PROMPT_SCORES + "test_a_prompt_that_is_preempted_in_its_middle_is_answered_rightly",),
    ),
    Promise(
        "sampling",
        "Batches run to completion, one task at a time",
        ("one-batch-after-the-other", "one-sample-at-a-time"),
    ),
    Promise("sampling", "Prefix cache of no use", ("prefix-cache-never-read",)),
    Promise("sampling", "Absent max_tokens means 16", ("16-tokens-by-default",)),
    Promise(
        "images",
        "Image dropped, its position lost, or trained without it",
        ("trained-without-its-image", "image-position-lost"),
        (VALUES + "test_tokens_of_several_text_chunks_are_their_concatenation",),
    ),
    Promise(
        "images",
        "No sampling of a vision model with LoRA",
        tests=(
            "tests/e2e/test_http_equals_in_process.py::test_image_loop_is_the_same_over_http_and_in_process",
            AGREEMENT + "test_trainer_and_sampler_agree_before_and_after_training",
        ),
        note="No one line does this here: images are rendered before an adapter is known.",
    ),
    Promise("images", "A batch of text and images crashes", ("no-rows-of-pixels", "images-at-the-start-of-the-batch")),
    Promise(
        "images",
        "expected_tokens checked in training only, one mismatch fails the batch, lengths not compared",
        ("expected-tokens-for-training-only", "one-failure-fails-the-batch", "lengths-not-compared"),
    ),
    Promise("images", "base64 decoded twice or not at all", ("base64-not-decoded", "base64-encoded-twice")),
    Promise("images", "LoRA on the vision tower that the sampler ignores", ("vision-tower-trained",)),
    Promise(
        "images",
        "Every sample of a group renders its image again",
        ("image-processed-again", "image-encoded-for-every-sample"),
    ),
    Promise("images", "A fresh event loop per call", ("event-loop-per-call",)),
    Promise("operation", "Polling", ("results-polled-for", "scheduler-polls")),
    Promise("operation", "Chunks run in order of arrival", ("order-of-arrival",)),
    Promise(
        "operation",
        "Who sends most has the trainer; small runs wait for long ones and never share a call",
        (
            "budget-of-a-call-not-kept",
            "share-of-a-model-not-of-a-session",
            "waiting-saves-up",
            "steps-are-free",
            "longest-batch-whoever-waits",
            "nobody-expected-back",
            "everybody-expected-back",
            "unready-model-holds-others-up",
        ),
    ),
    Promise(
        "operation",
        "Queues without an end, or one at which the SDK's training client hangs",
        ("queue-without-end", "refused-until-the-sdk-gives-up", "bound-locks-a-model", "refused-id-is-a-gap"),
    ),
    Promise("operation", "409 for a duplicate name", ("409", "existing-name-is-refused-at-the-submit")),
    Promise("operation", "5xx for a failed operation", ("failed-operation-is-500", "lost-model-is-500")),
    Promise(
        "operation",
        "Bodies and results kept for ever, pools exhausted",
        ("bodies-in-the-database", "results-kept-for-ever", "pool-exhausted"),
        (FUTURES + "test_five_hundred_samples_at_once_are_all_answered_on_fakes",),
    ),
    Promise(
        "operation",
        "Large bodies decoded on the event loop",
        ("bodies-parsed-on-the-loop",),
        ("tests/http/test_http_event_loop_on_fakes.py::test_large_body_does_not_hold_up_heartbeats_on_fakes",),
    ),
    Promise(
        "operation",
        "A missing seq_id stalls the model for ever",
        ("gap-waited-for-for-ever", "gap-not-skipped-by-a-step"),
    ),
    Promise(
        "operation",
        "TTL, metadata and LoRA flags dropped, a wrong base model accepted",
        (
            "ttl-dropped",
            "expired-checkpoint-found",
            "expired-folder-stays",
            "folder-deleted-under-its-users",
            "one-key-two-copies",
            "last-reason-of-a-session-wins",
            "old-data-folder-as-it-is",
            "metadata-dropped",
            "lora-settings-dropped-on-the-way",
            "checkpoint-of-another-base-accepted",
            "unserved-base-model-accepted",
        ),
    ),
    Promise(
        "operation",
        "No keys, everybody listened to, secrets in logs",
        (
            "keys-not-checked",
            "listens-to-everybody",
            "binds-to-everything",
            "no-key-for-other-machines",
            "keys-in-the-log",
        ),
    ),
    Promise(
        "operation",
        "Checkpoints read whole for a download, or given to whom they are not for",
        ("download-read-whole", "export-deleted-under-a-download", "forged-url-accepted", "expired-url-accepted"),
        ("tests/e2e/test_download.py::test_checkpoint_downloaded_by_the_command_is_what_peft_loads_and_was_trained",),
    ),
    Promise(
        "operation",
        "No trace of where a session's time went, or one that leaks, grows, or that Perfetto cannot show",
        (
            "trace-without-the-time-of-preparation",
            "trace-with-slices-that-overlap",
            "traces-grow-without-bound",
            "traces-of-sessions-that-never-were",
            "trace-for-whoever-asks",
        ),
        (SESSION_TRACE + "test_each_request_of_a_session_has_a_slice_with_its_stages_on_fakes",),
    ),
    Promise(
        "operation",
        "Exports that the cookbook's exporters fail on, or merge into nothing",
        (
            "exports-with-paths-of-transformers",
            "tied-head-as-a-tensor-of-its-own",
            "untied-head-named-as-a-tied-one",
            "export-is-a-checkpoint",
            "folder-names-the-first-of-a-models-names",
        ),
    ),
    Promise(
        "operation",
        "Copies of a sampling client get each other's results; queue states are made up",
        ("copies-share-ids", "completions-seen-once", "queue-state-always-active"),
    ),
    Promise(
        "operation",
        "A dead engine stays dead",
        ("dead-engine-stays-dead", "culprit-takes-all-with-it"),
        (ENGINE_THREAD + "test_an_exception_in_a_step_fails_what_was_in_flight_and_the_engine_comes_back",),
    ),
    Promise(
        "operation",
        "The sampler keeps memory that training lacks; or sleeps, or wakes, when nobody needs it",
        (
            "sleeps-when-all-fits",
            "memory-taken-from-under-samples",
            "samples-are-not-held-back",
            "neighbours-run-again",
            "wakes-beside-the-trainers-cache",
            "removing-a-version-wakes",
        ),
        (MEMORY_SHARING + "test_many_samples_at_once_wake_the_sampler_once_on_fakes",),
    ),
    Promise("operation", "Healthy before anything works", ("healthy-before-it-is", "ready-before-it-is")),
)

VISION_RL_PROMISES = (
    Promise(
        "tokens",
        "What is trained is what was sampled: replies stay as they were, only observations are rendered",
        ("replies-encoded-again", "end-of-turn-twice", "later-turns-dropped"),
        (
            VISION_RL + "test_trained_sequence_is_what_the_sampler_was_given_and_gave",
            CONVERSATIONS + "test_three_turns_with_images_are_these_tokens",
        ),
    ),
    Promise(
        "tokens",
        "Sampled tokens carry the sampler's logprobs, advantages and their provenance; all else trains nothing",
        ("observations-trained", "logprobs-one-off", "provenance-without-offset"),
    ),
    Promise(
        "tokens", "Text of an observation or a reply is data, whatever is written in it", ("special-tokens-forged",)
    ),
    Promise(
        "templates",
        "Where a template rewrites what was there, each turn is trained as it was shown; a lost reply is an error",
        ("rewritten-context-taken-for-continued", "lost-reply-unnoticed"),
        (VISION_RL + "test_thinking_model_trains_each_turn_as_it_was_shown",),
    ),
    Promise(
        "agreement",
        "KL(sampler, trainer) is below 1e-6 before training, in every example",
        ("kl-of-all-positions",),
        (
            "tests/examples/test_examples_rl.py::test_reward_rises_by_rl_and_not_on_blank_images",
            "tests/examples/test_examples_rl.py::test_classifier_begins_with_a_trainer_that_agrees_with_its_sampler",
        ),
    ),
    Promise(
        "rollouts",
        "A failure ends its own trajectory and says why; the others train",
        ("one-failure-fails-the-rollout", "context-not-watched"),
    ),
    Promise(
        "rollouts",
        "Siblings share what they can and no more: one first request, one rendering, no seed",
        ("siblings-ask-apart", "one-seed-for-all", "encoded-images-not-counted"),
    ),
    Promise(
        "rollouts",
        "A slow environment keeps nobody waiting; cancelling and Ctrl-C end everything",
        (),
        (
            ROLLOUTS + "test_512_sync_environments_run_at_once_while_a_slow_one_keeps_nobody_waiting",
            ROLLOUTS + "test_cancelling_ends_requests_and_closes_environments",
            ROLLOUTS + "test_ctrl_c_ends_a_rollout_with_stuck_environments_and_closes_the_others",
        ),
    ),
)


def named_tests(promise: Promise) -> list[str]:
    """Those of its mutations and its own, each once."""
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    of_mutations = [test for name in promise.mutations for test in by_name[name].tests]
    return list(dict.fromkeys([*of_mutations, *promise.tests]))


def table_of_promises() -> str:
    """The content of docs/promises.md."""
    return "\n".join(
        [*_HEAD, *_rows(PROMISES), "", *_RL_HEAD, *_rows(VISION_RL_PROMISES), "", *_MISTAKES_HEAD, *_rows(MISTAKES), ""]
    )


def _rows(promises: Iterable[Promise]) -> list[str]:
    rows = []
    for promise in promises:
        by_file: dict[str, list[str]] = {}
        for test in named_tests(promise):
            file, _, name = test.removeprefix("tests/").partition("::")
            by_file.setdefault(file, []).append(f"`{name}`")
        tests = "<br>".join(f"`{file}`: {', '.join(names)}" for file, names in by_file.items())
        mutations = ", ".join(f"`{name}`" for name in promise.mutations)
        told = f"{promise.words}. {promise.note}" if promise.note else promise.words
        rows.append(f"| {promise.number} | {told} | {tests or '–'} | {mutations or '–'} |")
    return rows


_HEAD = """\
# Promises, the tests that keep them, and how the tests are tested

Written by `python tests/mutations.py --write-docs`; a test compares. Tests lie below `tests/`. Each mutation breaks
one line, on a copy, and its tests must turn red: `python tests/mutations.py` runs them all, `--only NAME` one.

## What is promised

| | promise | tests | mutations |
| --- | --- | --- | --- |
""".splitlines()

_RL_HEAD = """\
## What vision RL promises

| | promise | tests | mutations |
| --- | --- | --- | --- |
""".splitlines()

_MISTAKES_HEAD = """\
## What servers of this kind get wrong

| | mistake | tests | mutations |
| --- | --- | --- | --- |
""".splitlines()
