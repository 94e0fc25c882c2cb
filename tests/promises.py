"""What the project promises, which tests show it, and which mutations show that those tests work.

The first two tables are what README promises; the third lists mistakes that servers of this kind make.
`python -m tests.promises` writes `docs/promises.md` from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.mutations import ROOT, Mutation, read_mutations

DOCUMENT = ROOT / "docs" / "promises.md"


@dataclass(frozen=True, slots=True)
class Promise:
    """`mutations`: names, separated by spaces; the tests that catch them show the promise. `tests`: more tests, as node
    ids below `tests/`. `note`: what is left out, and why."""

    number: str
    words: str
    mutations: str = ""
    tests: tuple[str, ...] = ()
    note: str = ""


PROMISES = (
    Promise(
        "1",
        "Losses are plain weighted sums; a + b at once equals a, then b; no mean, no clamp, no NaN replaced",
        "mean-gradient mean-loss normalised-by-weights last-gradient-only log-ratio-clamped "
        "not-a-number-passes not-a-number-becomes-0",
        ("http/test_http_order_on_fakes.py::test_loss_is_a_sum_so_chunks_add_up_on_fakes",),
    ),
    Promise(
        "2",
        "Targets are those given, [T] or [T, K], dense or CSR; any weights; a coefficient of 0 adds exactly 0",
        "targets-rebuilt candidates-in-column-order same-target-twice-counts-once all-data-have-the-same-outputs "
        "sparse-cells-out-of-place negative-weights-dropped zero-times-infinity threshold-beyond-float32 "
        "switched-off-targets-refused",
        ("training/test_trainer_works.py::test_positions_with_coefficient_zero_add_nothing_whatever_their_target",),
    ),
    Promise(
        "3",
        "Optimizer settings are those of each step",
        "betas-ignored eps-ignored weight-decay-coupled clip-norm-ignored clip-norm-0-is-1 one-pass-of-another-step "
        "only-the-learning-rate-used another-optimizer-is-adamw",
    ),
    Promise(
        "4",
        "LoRA: scale 32 / rank, flags and seed obeyed, step 0 is the base model",
        "scale-without-rank another-alpha flags-of-lora-ignored seed-of-lora-ignored "
        "lora-settings-dropped-on-the-way b-not-0-at-the-start scale-forgotten-in-the-gradient "
        "scores-of-experts-detached router-without-gradient-written-out scores-do-not-add-up "
        "every-router-a-softmax rounded-scores-do-not-add-up experts-drawn-last-by-autograd "
        "gate-of-the-shared-expert-detached gradient-beyond-the-limits-of-gpt-oss "
        "last-tile-of-a-group-left-out gradient-of-experts-without-their-share "
        "tower-drawn-first deepstack-without-gradient an-image-twice-counts-once "
        "metadata-of-vision-ignored",
    ),
    Promise(
        "5",
        "Sampled logprobs are log softmax(logits / T) over the whole vocabulary; trainer and sampler agree to 1e-4",
        "logprobs-after-the-cut logprobs-without-temperature small-temperatures-raised temperature-0-is-1 "
        "one-pass-without-noise one-pass-logprob-unscaled one-pass-ignores-seeds "
        "trainers-positions frequencies-by-the-row yarn-by-the-size-of-the-table "
        "experts-without-adapters-in-vllm experts-come-first",
        (
            "sampling/test_sampled_logprobs.py::test_a_batch_that_mixes_all_settings_agrees_with_hf",
            "e2e/test_agreement.py::test_sampled_logprobs_are_the_trainers",
        ),
        note="The gap in bfloat16 on a GPU is measured and printed, by the same tests.",
    ),
    Promise(
        "6",
        "What is not honoured is refused by name; so is a base model that is not served",
        "unknown-fields-ignored unknown-fields-of-protobuf-ignored unsupported-fields-ignored "
        "unknown-loss-is-cross-entropy checkpoint-of-another-base-accepted unserved-base-model-accepted "
        "preset-on-another-tower "
        "context-in-a-name-ignored context-of-a-name-kept "
        "prompt-over-the-context-fails-as-a-sample decoder-never-compared "
        "sampling-of-training-state-without-advice",
        (
            "http/test_http_settings_arrive_on_fakes.py::test_every_setting_of_a_sample_arrives_on_fakes",
            "http/test_http_endpoints_on_fakes.py::test_endpoint_that_is_not_served_is_refused_by_name_with_advice_on_fakes",
        ),
    ),
    Promise(
        "7",
        "One renderer; vLLM, HF and the client count each image alike, or that request alone fails",
        "expected-tokens-not-compared engines-not-compared expected-tokens-for-training-only "
        "trained-without-its-image rotation-ignored client-counts-width-first client-ignores-rotation",
        ("rendering/test_image_counts.py::test_25_shapes_count_alike_and_have_equal_pixels",),
    ),
    Promise(
        "8",
        "Positions of images are explicit; a pad id that comes as text is text",
        "image-position-lost pad-ids-found-by-the-renderer pad-ids-found-by-the-trainer "
        "pad-ids-found-by-the-sampler positions-after-an-image",
        ("training/test_images_at_offsets.py::test_pad_ids_in_pure_text_are_text",),
    ),
    Promise(
        "9",
        "Text-only and image datums mix in one batch and one micro-batch",
        "images-at-the-start-of-the-batch no-rows-of-pixels one-segment-for-all",
        note="The FSDP step comes with FSDP.",
    ),
    Promise(
        "10",
        "An image is processed once per content; 16 samples of a prompt pay for one image",
        "image-processed-again image-encoded-for-every-datum image-encoded-for-every-sample features-for-each-adapter",
    ),
    Promise(
        "11",
        "Text chunks equal their concatenation; text alone equals a plain token list",
        "chunks-joined-wrongly text-is-no-plain-list",
        (
            "sampling/test_prompt_logprobs.py::test_text_on_a_vision_model_is_the_same_whether_in_one_chunk_or_many",
            "http/test_http_order_on_fakes.py::test_text_chunks_equal_their_concatenation_on_fakes",
        ),
    ),
    Promise(
        "12",
        "Each run follows the order of seq_id; a duplicate runs once; gaps are skipped and closed; runs share calls",
        "order-of-arrival duplicates-run-twice gap-not-skipped-by-a-step gap-waited-for-for-ever "
        "impatient-with-gaps skipped-id-stays-open skipped-gap-forgotten one-request-per-call "
        "columns-of-other-adapters-count columns-of-no-adapter-unwritten gradient-of-the-head-added-to-what-was-there "
        "items-split-again-out-of-order micro-batches-end-anywhere "
        "more-micro-batches-than-needed ranks-without-bound rows-by-expert-alone "
        "first-tile-of-a-group-alone "
        "first-rows-of-a-tile-alone spread-to-one-place pairs-sorted-without-those-of-earlier-blocks "
        "counts-of-later-programs-lost columns-of-the-first-adapter",
    ),
    Promise(
        "13",
        "Nothing of a failed gradient stays; a step after it fails, unless the client had read the failure and sent "
        "another one; a step that would leave NaN changes nothing; a bad datum or lack of memory fails its own request",
        "step-after-a-failed-gradient partial-gradient-kept failures-never-read failures-told-at-once "
        "requests-of-a-call-apart "
        "part-of-a-failed-call-kept part-of-a-failed-call-added part-of-a-failed-call-in-one-pass-kept "
        "steps-untried every-step-tried eps-of-0-untried moments-that-overflow-pass weights-that-overflow-pass "
        "trial-of-nothing refused-step-keeps-its-loss submission-unshielded cancelled-gradient-untold "
        "one-failure-fails-the-batch "
        "memory-error-not-caught not-a-number-passes other-adapters-multiplied-by-zero "
        "broken-weights-are-multiplied",
        ("http/test_http_order_on_fakes.py::test_bad_datum_fails_its_own_request_and_nobody_elses_on_fakes",),
    ),
    Promise(
        "14",
        "Nothing polls; a control-plane step costs milliseconds",
        "results-polled-for scheduler-polls engine-thread-spins nagle listing-asks-once-for-each-run",
        ("http/test_http_sockets_on_fakes.py::test_step_over_a_socket_takes_milliseconds_on_fakes",),
    ),
    Promise(
        "15",
        "Decoding, encoding, image work and disk stay off the event loop",
        "bodies-parsed-on-the-loop results-encoded-on-the-loop images-rendered-on-the-loop disk-on-the-loop "
        "all-silent-sessions-at-once images-take-the-threads-of-text places-kept-for-newcomers "
        "image-threads-for-one-owner image-turns-by-age-alone preparations-for-one-owner "
        "rendered-pixels-without-bound prepared-pixels-without-bound owner-over-its-share-prepares-nothing "
        "share-of-bodies-without-bound bodies-bounded-in-all-alone waiting-bodies-not-counted bodies-held-twice "
        "images-of-training-take-the-threads-of-text images-of-a-session-take-all-preparations "
        "images-of-training-take-no-turns owners-get-places-by-their-sessions prompts-without-bound "
        "text-prompts-of-any-size bodies-out-of-turn rests-of-refused-bodies-at-once pieces-of-bodies-copied "
        "python-for-each-chunk bodies-joined-on-the-loop bodies-freed-at-once memory-of-bodies-kept "
        "modules-searched-for-garbage",
        ("http/test_http_event_loop_on_fakes.py::test_large_body_does_not_hold_up_heartbeats_on_fakes",),
    ),
    Promise(
        "16",
        "A sampler version never changes, lives as long as promised, and leaves training alone",
        "old-samplers-get-new-weights lora-ids-used-again captured-weights-shared "
        "saving-replaces-the-adapter newest-version-spilled-first versions-outlive-their-session "
        "versions-without-bound versions-dropped-under-samples any-number-of-unwritten-versions "
        "versions-of-an-owner-without-bound versions-of-all-without-bound versions-of-the-smaller-owner-dropped "
        "used-versions-dropped-first "
        "written-version-keeps-its-place removed-version-keeps-its-place "
        "links-in-shared-memory-followed lock-of-a-removed-folder-counts "
        "lost-samplers-of-named-versions",
        ("sampling/test_adapters.py::test_a_version_stays_what_it_was_when_newer_ones_are_loaded",),
    ),
    Promise(
        "17",
        "An acknowledged checkpoint survives kill -9, with its optimizer, in PEFT's layout; what was lost is named; a "
        "trainer that ends or hangs is replaced, and a run goes on in the new one if nothing of it was lost; "
        "a stop and a silent session save training",
        "folder-not-synced database-does-not-wait recorded-before-it-is-written "
        "acknowledged-before-it-is-written optimizer-not-saved optimizer-state-not-restored "
        "saved-with-another-rank last-checkpoint-not-named lost-session-is-404 "
        "lost-samplers-of-named-versions adapters-not-restored goes-on-from-an-older-state lost-gradient-forgotten "
        "healthy-without-a-trainer hangs-for-ever start-deletes-what-has-no-record record-without-folder-dropped "
        "older-folder-wins last-checkpoint-by-time listings-by-time numbers-lost-with-the-database "
        "saves-are-not-numbered-as-they-begin old-checkpoints-by-time "
        "only-expected-damage links-adopted times-as-described deleted-checkpoint-comes-back "
        "unloadable-saves old-saves-unexamined "
        "flipped-bytes-are-loaded backup-without-a-second-look restore-follows-links "
        "lock-follows-links lock-of-any-kind "
        "jump-of-the-clock-deletes model-of-a-finished-session-lives stop-loses-training autosave-without-optimizer "
        "autosave-newer-than-its-content "
        "autosave-reads-the-run-itself copy-shares-its-numbers copies-of-matrices-alone "
        "restored-from-the-last-save-of-the-client stop-waits-for-a-stopped-trainer stop-takes-longer-than-its-limit "
        "stop-waits-for-a-sampler-that-hangs samples-hold-the-memory-for-ever sampler-falls-asleep-for-ever "
        "sampler-wakes-for-ever stop-leaves-the-sampler-its-memory "
        "unsaved-since-nothing saves-wait-for-another-trainer base-models-stop-one-after-the-other "
        "silent-session-loses-training hangup-kills interpreter-destroyed-at-exit exit-without-clean-up",
        (
            "storage/test_storage_kill.py::test_acknowledged_checkpoints_survive_kill_minus_nine",
            "http/test_http_stops_on_fakes.py::test_a_stop_with_nothing_unsaved_waits_for_no_engine_on_fakes",
        ),
    ),
    Promise(
        "18",
        "A failed operation is HTTP 200 with error and category; nothing permanent is 409 or 5xx",
        "failed-operation-is-500 409 existing-name-is-refused-at-the-submit lost-model-is-500 torn-optimizer-is-500 "
        "optimizer-read-for-its-weights",
        ("http/test_http_fuzz_on_fakes.py::test_no_json_body_gets_a_5xx_on_fakes",),
    ),
    Promise(
        "19",
        "No model starts whose trainer and sampler differ; the effect of a loaded adapter is verified",
        "base-models-not-compared images-not-compared rounding-not-measured rounding-of-experts-forgotten "
        "adapter-in-the-folder weights-made-up weights-left-over nan-not-looked-for nan-loaded engines-outlive-a-probe "
        "image-probe-of-any-size effect-not-verified unmatched-keys-ignored unknown-adapters-not-compared "
        "changed-classes-of-transformers configs-of-other-libraries known-refusals-forgotten "
        "experts-without-a-family-accepted "
        "quantized-weights-loaded adapters-lost-in-rounding runs-that-cannot-be-sampled-begin "
        "adapters-make-noise-of-a-model stacked-modules-without-a-name positions-compared-at-some-alone "
        "decoders-not-compared-at-positions table-that-ends-not-seen query-scaling-left-to-vllm "
        "rotary-modules-of-another-model long-texts-not-compared verdicts-not-kept verdicts-of-other-files "
        "a-few-positions-hide-among-many differing-positions-served models-compared-once",
    ),
    Promise(
        "20",
        "Loopback or keys; no secret in a log or on disk; bounds before decoding; no fetches, no pickle",
        "listens-to-everybody binds-to-everything no-key-for-other-machines rebound-names-let-in "
        "web-pages-let-in keys-not-checked keys-in-the-log zstd-bomb endless-bodies any-number-of-pixels "
        "pixels-in-flight scans-without-bound pipelines-without-bound image-hosts-at-any-port "
        "unread-answers-wait-for-ever slow-readers-never-gain slow-readers-gain-for-ever deleted-exports-cost-nothing "
        "deleted-exports-cost-for-ever "
        "sparse-tensors-out-of-proportion "
        "bound-of-tensors-raised image-pointers-fetched image-host-drips-for-ever "
        "dead-hosts-hold-up-files image-folder-takes-everybodys-threads paths-leave-their-folder "
        "links-lead-anywhere pickle "
        "adapters-read-as-pickles",
    ),
)

VISION_RL_PROMISES = (
    Promise(
        "tokens",
        "What is trained is what was sampled: replies stay as they were, only observations are rendered",
        "replies-encoded-again end-of-turn-twice later-turns-dropped",
        (
            "e2e/test_vision_rl.py::test_trained_sequence_is_what_the_sampler_was_given_and_gave",
            "rl/test_rl_conversation_tokens.py::test_three_turns_with_images_are_these_tokens",
        ),
    ),
    Promise(
        "tokens",
        "Sampled tokens carry the sampler's logprobs, advantages and their provenance; nothing else is trained on",
        "observations-trained logprobs-one-off provenance-without-offset",
    ),
    Promise(
        "tokens", "Text in an observation or a reply is data: it forges no special tokens", "special-tokens-forged"
    ),
    Promise(
        "templates",
        "Where a template rewrites earlier turns, each turn is trained as the model saw it; a lost reply is an error",
        "rewritten-context-taken-for-continued lost-reply-unnoticed",
        ("e2e/test_vision_rl.py::test_thinking_model_trains_each_turn_as_it_was_shown",),
    ),
    Promise(
        "agreement",
        "KL(sampler, trainer) is below 1e-6 before training, in every example; the demo's model can learn its task",
        "kl-of-all-positions demo-tower-without-discriminants",
        (
            "examples/test_examples_rl.py::test_reward_rises_by_rl_and_not_on_blank_images",
            "examples/test_examples_rl.py::test_walker_learns_the_way_to_a_goal_that_only_the_newest_picture_shows",
            "examples/test_examples_rl.py::test_classifier_begins_with_a_trainer_that_agrees_with_its_sampler",
        ),
    ),
    Promise(
        "agreement",
        "On real weights too: at every position of the context, for the gradients, for an adapter in training; what it "
        "learns shows in answers that were not trained, in exports, and after a kill",
        tests=(
            "real_weights/test_real_weights.py::test_all_positions_of_the_context_agree_with_transformers",
            "training/test_gradients_of_real_weights.py::test_gradients_on_real_text_are_as_near_to_float64_as_pefts",
            "real_weights/test_real_weights.py::test_samples_have_the_logprobs_of_the_trainer",
            "real_weights/test_real_weights.py::test_the_first_program_teaches_a_style_and_keeps_the_facts",
            "real_weights/test_real_weights.py::test_exports_answer_the_same_in_transformers",
            "real_weights/test_real_weights.py::test_a_killed_server_goes_on_from_the_saved_state",
        ),
    ),
    Promise(
        "rollouts",
        "A failure ends its own trajectory and says why; the others train",
        "one-failure-fails-the-rollout context-not-watched",
    ),
    Promise(
        "rollouts",
        "Episodes of a group share their first request and its rendering, but no seed",
        "siblings-ask-apart one-seed-for-all encoded-images-not-counted",
    ),
    Promise(
        "rollouts",
        "A slow environment delays no other; cancelling and Ctrl-C end everything",
        tests=(
            "rl/test_rl_rollouts_on_fakes.py::test_512_sync_environments_run_at_once_while_a_slow_one_keeps_nobody_waiting",
            "rl/test_rl_rollouts_on_fakes.py::test_cancelling_ends_requests_and_closes_environments",
            "rl/test_rl_rollouts_on_fakes.py::test_ctrl_c_ends_a_rollout_with_stuck_environments_and_closes_the_others",
        ),
    ),
)

MISTAKES = (
    Promise("loss", "Mean in place of a sum", "mean-gradient mean-loss normalised-by-weights"),
    Promise("loss", "An unknown loss trains cross-entropy", "unknown-loss-is-cross-entropy"),
    Promise(
        "loss",
        "A sequence's ratio is taken over a part of it, or over several sequences",
        "gspo-ratio-of-a-chunk gspo-ratio-of-several-data prompts-in-the-sequence-ratio",
    ),
    Promise(
        "loss",
        "A loss reads what was recorded of samples, and trains on other tokens, other sessions' samples, or for ever",
        "records-of-nothing spans-not-compared spans-out-of-bounds prompts-have-advantages sent-logprobs-not-compared "
        "records-for-everybody use-does-not-renew-a-record records-without-bound all-records-without-bound "
        "records-counted-twice stable-weights-not-cut-off drifted-sequences-kept strict-losses-ignored",
    ),
    Promise("loss", "A penalty on prompts makes the model memorise them", "dro-learns-prompts-by-heart"),
    Promise(
        "loss",
        "Importance sampling is clipped, or log-ratios are clamped",
        "importance-sampling-clipped log-ratio-clamped ppo-gradient-where-clipped",
    ),
    Promise(
        "loss",
        "Only the learning rate of a step is used",
        "only-the-learning-rate-used betas-ignored eps-ignored weight-decay-coupled clip-norm-ignored",
    ),
    Promise("loss", "Targets rebuilt from the input", "targets-rebuilt"),
    Promise(
        "loss",
        "One loss for a whole queue, or the batch's totals as each request's metrics",
        "first-loss-for-all totals-of-the-batch",
    ),
    Promise(
        "loss",
        "Results come in packed order",
        "packed-order",
        ("http/test_http_order_on_fakes.py::test_metrics_and_outputs_are_of_each_request_and_in_its_order_on_fakes",),
    ),
    Promise("loss", "NaN reported as 0", "not-a-number-passes not-a-number-becomes-0"),
    Promise(
        "loss",
        "Gradients are averaged over ranks; fewer datums than ranks fail; a rank that fails or diverges changes a run",
        "gradients-averaged-over-ranks stepped-before-all-ranks-have ranks-diverge-unnoticed",
    ),
    Promise(
        "loss",
        "A rank that fails in a micro-batch, or has none, leaves others waiting for weights; gathers come late",
        "walk-left-in-the-middle unit-sent-for-too-late peers-bytes-not-compared rank-gathers-alone "
        "shard-choice-ignored twice-the-tokens-without-room logprobs-fail-before-the-walk "
        "memory-of-a-failed-step-kept cache-of-given-size-shares-no-layers one-copy-of-sharded-weights "
        "weights-sharded-over-hosts",
    ),
    Promise(
        "loss",
        "Ranks that share a row mix up heads, positions or images; one that fails leaves the others waiting",
        "heads-in-order-of-ranks sinks-of-the-first-heads parts-without-each-others-logprobs "
        "image-rows-of-the-whole-row row-no-longer-than-for-one-rank failure-not-told failure-told-twice "
        "any-kv-heads-share-rows exchanges-not-planned",
        (
            "training/test_shared_rows.py::test_a_failure_on_one_rank_of_a_row_is_one_of_all_and_changes_nothing",
            "training/test_shared_rows.py::test_four_ranks_that_share_rows_train_what_one_does",
        ),
    ),
    Promise(
        "loss",
        "Adapter gradients are zero under recomputation",
        "recomputed-without-adapters recomputed-without-adapters-by-autograd residual-without-gradient",
        ("training/test_trainer_works.py::test_a_gradient_lost_inside_the_model_is_an_error_of_the_server",),
    ),
    Promise("loss", "Two loss modules drift apart", "fake-losses-drift"),
    Promise(
        "sampling",
        "Old samplers use newer weights, or sampling overwrites training weights",
        "old-samplers-get-new-weights captured-weights-shared saving-replaces-the-adapter lora-ids-used-again",
    ),
    Promise("sampling", "Temperature 0 becomes 1", "temperature-0-is-1 small-temperatures-raised"),
    Promise(
        "sampling",
        "Seeds are dropped, shared by neighbours, or fatal when huge",
        "seed-of-samples-dropped neighbouring-seeds-share huge-seeds-reach-the-engine",
    ),
    Promise(
        "sampling",
        "On a CPU, a token is drawn of other probabilities, or an adapter is taken for the one before it in its slot",
        "share-of-a-block-of-its-row ranks-of-the-first-slice changed-slots-keep-their-copy",
    ),
    Promise(
        "operation",
        "On a CPU, threads that wait slow those down that compute, or a busy machine",
        "threads-spin-long trainer-keeps-its-pool threads-keep-their-pools idle-engine-keeps-its-pool",
    ),
    Promise(
        "sampling",
        "Stop strings are dropped, or a plain string is refused",
        "stop-strings-forgotten stop-string-taken-for-a-list empty-stop-is-no-stop",
    ),
    Promise("sampling", "Finish reasons are not mapped", "finish-reason-mapped-wrongly"),
    Promise(
        "sampling",
        "The base model answers because the adapter's keys do not match",
        "unmatched-keys-ignored effect-not-verified",
    ),
    Promise("sampling", "The base model gets a neighbour's adapter", "base-gets-an-adapter"),
    Promise(
        "sampling",
        "Prompt logprobs are one short, or NaN becomes something else",
        "prompt-logprobs-one-short nan-of-the-first-token-becomes-0",
    ),
    Promise(
        "sampling",
        "Top-k, target ids, last n or alternatives are ignored, or wrong with adapters, images or long prompts",
        "prompts-scored-without-their-lm-head scored-rows-read-from-the-cache "
        "alternatives-at-temperature-1 alternatives-depend-on-the-parts-of-a-prompt random-numbers-of-the-first-rows "
        "topk-of-the-wrong-requests sparse-targets-read-as-dense",
        ("sampling/test_prompt_scores.py::test_a_prompt_that_is_preempted_in_its_middle_is_answered_rightly",),
    ),
    Promise(
        "sampling",
        "A batch runs to completion before the next begins, or samples run one at a time",
        "one-batch-after-the-other one-sample-at-a-time",
    ),
    Promise("sampling", "The prefix cache is never hit", "prefix-cache-never-read"),
    Promise("sampling", "Absent max_tokens means 16", "16-tokens-by-default"),
    Promise(
        "images",
        "An image is dropped, its position lost, or its datum trained without it",
        "trained-without-its-image image-position-lost",
        ("types/test_types_values.py::test_tokens_of_several_text_chunks_are_their_concatenation",),
    ),
    Promise(
        "images",
        "A vision model with LoRA cannot be sampled",
        tests=(
            "e2e/test_http_equals_in_process.py::test_image_loop_is_the_same_over_http_and_in_process",
            "e2e/test_agreement.py::test_trainer_and_sampler_agree_before_and_after_training",
        ),
        note="No one line does this here: images are rendered before an adapter is known.",
    ),
    Promise("images", "A batch of text and images crashes", "no-rows-of-pixels images-at-the-start-of-the-batch"),
    Promise(
        "images",
        "expected_tokens is checked in training only, one mismatch fails the batch, or lengths are not compared",
        "expected-tokens-for-training-only one-failure-fails-the-batch lengths-not-compared",
    ),
    Promise(
        "images",
        "Features of an image come from the vision tower of another adapter",
        "towers-share-features features-of-another-tower",
    ),
    Promise(
        "images",
        "The positions of an image see only what precedes them where the model sees all of it, or they see others",
        "images-seen-causally images-of-a-portion-alone images-beside-their-place images-causal-on-cpus "
        "images-in-several-steps images-longer-than-the-window images-cut-into-several",
    ),
    Promise(
        "images",
        "The colours hidden below transparent pixels are trained on, or 16 bits of grey become white",
        "hidden-colours-shown transparent-colour-sent-raw deep-grey-clipped",
    ),
    Promise(
        "images",
        "A checkpoint is asked otherwise than it was trained: text and picture change places, or the picture is larger",
        "chat-ignores-the-order chat-sends-larger-pictures playground-ignores-the-order layout-of-the-run-not-told "
        "layout-lost-on-resume layout-lost-in-copies",
        ("documentation/test_pages_run.py::test_every_block_of_a_page_runs",),
    ),
    Promise("images", "base64 is decoded twice or not at all", "base64-not-decoded base64-encoded-twice"),
    Promise(
        "images",
        "The vision tower gets LoRA that the sampler ignores",
        "tower-of-gemma-3-trained",
        tests=("training/test_lora_equals_peft.py::test_files_have_the_names_of_transformers_modules[qwen2_5_vl]",),
    ),
    Promise(
        "images",
        "Every sample of a group renders its image again",
        "image-processed-again image-encoded-for-every-sample",
    ),
    Promise("images", "Each call makes an event loop", "event-loop-per-call"),
    Promise("operation", "Polling", "results-polled-for scheduler-polls"),
    Promise("operation", "Chunks run in order of arrival", "order-of-arrival"),
    Promise(
        "operation",
        "The busiest client gets the trainer; small runs wait for long ones and never share a call",
        "budget-of-a-call-not-kept share-of-a-model-not-of-a-session waiting-saves-up steps-are-free "
        "longest-batch-always clients-never-expected-back clients-always-expected-back "
        "unready-model-holds-others-up",
    ),
    Promise(
        "operation",
        "Queues are unbounded, or have a bound at which the SDK's training client hangs",
        "queue-without-end refused-until-the-sdk-gives-up bound-locks-a-model refused-id-is-a-gap",
    ),
    Promise("operation", "409 for a duplicate name", "409 existing-name-is-refused-at-the-submit"),
    Promise("operation", "5xx for a failed operation", "failed-operation-is-500 lost-model-is-500"),
    Promise(
        "operation",
        "Bodies and results are kept for ever, or pools are exhausted",
        "bodies-in-the-database results-kept-for-ever results-without-bound "
        "unread-results-dropped-first errors-keep-what-was-sent pool-exhausted results-stay-in-memory "
        "filed-results-stay-in-memory files-of-results-stay files-of-results-survive results-fill-the-disk "
        "half-written-results-stay objects-of-results-not-counted results-of-the-largest-session-dropped "
        "results-that-come-late-stay fake-reads-prompts-in-one-piece large-results-copied-thrice",
        ("http/test_http_futures_on_fakes.py::test_five_hundred_samples_at_once_are_all_answered_on_fakes",),
    ),
    Promise(
        "operation",
        "Large bodies are decoded on the event loop",
        "bodies-parsed-on-the-loop",
        ("http/test_http_event_loop_on_fakes.py::test_large_body_does_not_hold_up_heartbeats_on_fakes",),
    ),
    Promise(
        "operation", "A missing seq_id stalls the model for ever", "gap-waited-for-for-ever gap-not-skipped-by-a-step"
    ),
    Promise(
        "operation",
        "TTL, metadata or LoRA flags are dropped, or a wrong base model is accepted",
        "ttl-dropped expired-checkpoint-found expired-folder-stays folder-deleted-under-its-users "
        "one-key-two-copies last-reason-of-a-session-wins old-data-folder-as-it-is metadata-dropped "
        "lora-settings-dropped-on-the-way checkpoint-of-another-base-accepted "
        "unserved-base-model-accepted checkpoint-without-kind-is-not-found strict-hosted-ignored",
    ),
    Promise(
        "operation",
        "No API keys, listening on every address, secrets in logs",
        "keys-not-checked listens-to-everybody binds-to-everything no-key-for-other-machines keys-in-the-log",
    ),
    Promise("operation", "An error tells where objects lie in the server's memory", "addresses-in-answers"),
    Promise(
        "operation",
        "One owner sees, samples, changes or deletes what belongs to another",
        "ids-of-others-in-paths ids-of-others-in-bodies open-samplers-do-not-hear-of-it "
        "samplers-of-unpublished-checkpoints-go-on",
    ),
    Promise(
        "operation",
        "One owner takes what is left from the others, or is refused without the numbers and what helps",
        "half-for-the-only-owner heap-searched-after-a-release owners-counted-once-for-all "
        "quota-of-an-owner-for-all adapters-of-all-owners-alone queues-of-owners-not-bounded "
        "samples-of-owners-not-bounded bytes-of-samples-not-counted connections-for-one-owner "
        "answers-not-counted unread-streams-without-bound unread-streams-of-all-without-bound "
        "unread-answers-are-not-in-flight any-number-of-unread-answers answers-in-one-piece "
        "waiting-logprobs-as-doubles completions-without-bound clients-without-bound "
        "storage-quota-not-checked saves-at-once-share-the-room autosaves-refused runs-beyond-the-storage-quota "
        "usage-of-others",
        (
            "http/test_http_quotas_on_fakes.py::"
            "test_sdk_beyond_the_quota_of_queued_requests_is_slowed_down_and_loses_nothing_on_fakes",
            "http/test_http_quotas_on_fakes.py::test_sdk_beyond_the_quota_of_samples_waits_and_gets_all_on_fakes",
            "http/test_http_quotas_on_fakes.py::"
            "test_sdk_beyond_other_quotas_stops_at_once_and_goes_on_after_a_deletion_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "The client and a server with --fake need torch or transformers",
        "fakes-need-torch",
        ("workspace/test_installing.py::test_server_without_an_engine_depends_on_neither_torch_nor_vllm",),
    ),
    Promise(
        "operation",
        "The name of an image file in a prompt is silently text, and the picture is missing",
        "image-names-as-text",
    ),
    Promise(
        "operation",
        "An option in a file or in the environment changes nothing, or goes before the command line",
        "config-before-the-command-line variables-named-after-fields",
    ),
    Promise(
        "operation",
        "What cannot work is a traceback after minutes: weights absent or cut off, pickles, GGUF, memory, a port",
        "weights-cut-off one-copy-of-the-weights",
        (
            "http/test_before_it_starts.py::test_weights_that_are_absent_pickled_or_of_another_format_are_named",
            "http/test_before_it_starts.py::test_configs_tokenizers_and_processors_that_are_absent_or_wrong_are_named",
            "http/test_before_it_starts.py::test_a_name_of_a_hub_that_cannot_be_reached_is_a_line",
            "http/test_before_it_starts.py::test_folders_ports_and_libraries_are_looked_at",
        ),
    ),
    Promise(
        "operation",
        "What a run did is known to its program alone, or to everybody; a full disk stops the run that is recorded",
        "loss-of-masked-targets loss-over-targets loss-of-all-steps curves-from-the-start torn-lines-stay "
        "everybodys-runs everybodys-numbers histogram-not-cumulated kv-cache-use-is-that-of-running-sequences "
        "board-of-metrics-that-are-gone plan-without-the-mlp log-written-anew-reads-on links-out-of-the-logs "
        "everybodys-logs",
        (
            "http/test_http_server_metrics_on_fakes.py::"
            "test_operations_and_tokens_are_counted_by_kind_and_owner_on_fakes",
            "http/test_http_server_metrics_on_fakes.py::test_live_runs_memory_disk_and_versions_are_told_on_fakes",
            "http/test_http_progress_on_fakes.py::test_log_metrics_and_status_work_on_a_running_server_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "The page of the server runs what a client named, leads to another host, or is stale; its data need no key",
        "console-asks-for-a-key console-may-run-any-script console-is-stale console-texts-are-markup "
        "console-asks-behind-other-tabs",
        (
            "http/test_console_on_fakes.py::test_texts_of_the_server_cannot_become_markup_or_code_on_fakes",
            "http/test_console_on_fakes.py::test_there_are_no_pages_that_load_scripts_of_other_hosts_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "A server is silent while it works and while it fails, or says more than anybody reads",
        "failures-fill-the-log cancelled-samples-are-told status-of-nothing a-terminal-obeys-a-client "
        "ready-names-no-address log-closed-by-libraries",
        (
            "http/test_http_notices_on_fakes.py::test_sessions_runs_checkpoints_and_failures_are_a_line_each_on_fakes",
            "http/test_http_notices_on_fakes.py::"
            "test_a_log_of_objects_has_time_level_owner_request_and_what_happened_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "A log holds secrets, loses what happened, or fails or delays requests when its disk is full or hangs",
        "urls-in-the-access-log audit-of-small-bodies-alone audit-without-endpoints audit-without-the-end audit-twice "
        "log-of-a-renamed-file full-disk-ends-the-log a-terminal-stops-requests",
        (
            "http/test_http_request_logs_on_fakes.py::"
            "test_a_log_that_cannot_be_written_or_hangs_fails_and_delays_no_request_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "Keys are guessed at any speed, or those who guess keep right keys of their address waiting",
        "wrong-keys-at-any-speed every-address-remembered right-keys-wait-too wrong-tokens-at-any-speed "
        "wrong-tokens-in-bodies-at-any-speed tokens-compared-on-open-routes clients-choose-their-address "
        "proxies-of-uvicorn",
    ),
    Promise(
        "operation",
        "A key that was taken out of the key file goes on, or half an edit of it locks others out",
        "emptied-key-file-changes-nothing one-wrong-line-keeps-revoked-keys missing-key-file-changes-nothing "
        "half-written-key-file-locks-out",
    ),
    Promise(
        "operation",
        "A download reads the whole checkpoint into memory, or is given without a valid signature",
        "download-read-whole export-deleted-under-a-download forged-url-accepted expired-url-accepted",
        ("e2e/test_download.py::test_checkpoint_downloaded_by_the_command_is_what_peft_loads_and_was_trained",),
    ),
    Promise(
        "operation",
        "No trace shows where a session's time went, or it leaks, grows without bound, or Perfetto cannot open it",
        "trace-without-the-time-of-preparation trace-with-slices-that-overlap traces-grow-without-bound "
        "one-session-drops-the-traces-of-all "
        "traces-of-sessions-that-never-were trace-without-a-signature",
        (
            "http/test_http_session_trace_on_fakes.py::test_each_request_of_a_session_has_a_slice_with_its_stages_on_fakes",
        ),
    ),
    Promise(
        "operation",
        "A local name needs the hub, or the server's disk, for its tokenizer and its renderer",
        "served-names-not-redirected tokenizers-by-the-servers-disk loading-server-is-an-error",
    ),
    Promise(
        "operation",
        "The cookbook's exporters fail on an export, or merge nothing",
        "draft-layers-taken-for-layers exports-with-paths-of-transformers tied-head-as-a-tensor-of-its-own "
        "merged-into-the-tied-embedding "
        "exported-with-the-hosted-names tower-merged-into-the-decoder export-not-compared export-overwrites "
        "heads-that-newer-vllm-takes-are-refused "
        "columns-of-experts-by-expert scale-of-gate-and-up-halved gate-and-up-side-by-side-in-gpt-oss "
        "models-not-recorded "
        "export-beside-its-encrypted-form encrypted-for-the-first-recipient-alone "
        "untied-head-named-as-a-tied-one export-is-a-checkpoint folder-names-the-first-of-a-models-names",
    ),
    Promise(
        "operation",
        "An imported adapter is another one here, in its scale, its modules or its base model, or half of it stays",
        "alpha-is-true tensors-of-any-name "
        "parts-of-an-export-in-another-order alpha-of-peft-ignored rslora-taken-for-lora rows-of-parts-from-the-first "
        "unknown-fields-of-peft-ignored missing-layers-filled joined-parts-beside-the-diagonal-dropped "
        "import-loads-a-fresh-adapter import-goes-on-from-a-fresh-adapter adapter-of-another-base-imported "
        "file-of-a-tar-archive-chosen-by-the-archive "
        "truncated-tar-archive-accepted half-an-import-stays imports-belong-to-everybody rslora-of-joined-parts-taken "
        "imports-need-a-tower header-of-any-length-parsed checkpoint-written-after-its-deletion "
        "experts-that-share-nothing-taken beside-the-blocks-of-experts-dropped modules-of-one-expert-taken "
        "left-out-modules-begin-anew left-out-modules-exported",
        ("e2e/test_imports_on_real_models.py::test_what_peft_wrote_samples_and_trains_as_pefts_model",),
    ),
    Promise(
        "operation",
        "Copies of a sampling client get each other's results; queue states are made up",
        "copies-share-ids completions-seen-once queue-state-always-active",
    ),
    Promise(
        "operation",
        "A dead engine stays dead",
        "dead-engine-stays-dead culprit-takes-all-with-it",
        (
            "sampling/test_engine_thread.py::test_an_exception_in_a_step_fails_what_was_in_flight_and_the_engine_comes_back",
        ),
    ),
    Promise(
        "operation",
        "A sampler whose process ends or hangs stays dead, or what was in it is lost",
        "sampler-death-fails-what-runs sampler-asked-again-too-soon hanging-sampler-not-noticed "
        "trainer-sleeps-a-dead-sampler",
        (
            "sampling/test_process_sampler.py::test_a_step_that_hangs_ends_the_process",
            "e2e/test_sampler_restarts.py::test_sampling_goes_on_after_a_kill_and_a_hang_as_if_there_had_been_none",
        ),
    ),
    Promise(
        "operation",
        "Of several replicas of a sampler, one that ends stops the others, or answers what the others do not",
        "replica-that-has-ended-gets-samples one-replica-that-ends-closes-the-sampler "
        "one-replica-that-ends-is-a-server-that-recovers version-complete-before-all-replicas-have-it "
        "one-replica-compared-with-the-trainer",
    ),
    Promise(
        "operation",
        "Ranks that share the layers of one sampler do different things, or one of them alone sleeps",
        "ranks-step-without-the-requests a-sampler-sleeps-on-one-rank ranks-draw-apart",
        (
            "sampling/test_tensor_parallel.py::test_two_ranks_answer_as_one_does_with_adapters_from_memory_and_disk",
            "e2e/test_sampler_restarts.py::test_sampling_goes_on_after_a_kill_and_a_hang_as_if_there_had_been_none",
        ),
    ),
    Promise(
        "operation",
        "Prompts are read by a replica that has not read them, or all by one while others have nothing to do",
        "replica-that-has-read-the-prompt-passed-over one-replica-gets-all-of-a-prompt versions-share-a-cache "
        "images-of-one-size-share-a-cache",
    ),
    Promise(
        "operation",
        "Of several ranks of a trainer, one that ends or hangs leaves others behind, or ends what it has no part in",
        "ranks-left-behind ranks-on-one-gpu one-of-a-group-without-the-call a-failure-alone-waits-for-the-limit "
        "unspeakable-errors-leave-others-waiting calls-that-one-rank-missed "
        "an-adapter-that-one-rank-dropped-and-needs-again an-adapter-that-one-rank-never-got "
        "only-the-first-answer-may-be-a-failure signals-without-a-name-end-the-watch",
        (
            "training/test_rank_processes_on_fakes.py::test_a_rank_killed_in_a_step_ends_all_and_runs_go_on_from_their_save_on_fakes",
            "chaos/test_rank_kills.py::"
            "test_ranks_killed_and_stopped_in_steps_leave_nothing_behind_and_runs_go_on_from_the_same_states",
            "e2e/test_ranks_over_http.py::test_two_ranks_train_over_http_as_one_and_go_on_after_one_is_killed",
        ),
    ),
    Promise(
        "operation",
        "Ranks on other hosts compute another thing; a host that ends or falls silent is waited for, or leaves ranks",
        "a-host-for-all-ranks another-hosts-process-outlives-the-server a-lost-host-waits-for-the-limit "
        "a-killed-rank-elsewhere-ends-well a-silent-host-is-waited-for hosts-without-ray-ignored "
        "a-rank-that-ends-beside-others-goes-unseen",
        (
            "training/test_ranks_elsewhere_on_fakes.py::"
            "test_a_lost_host_fails_the_step_with_the_last_checkpoint_and_another_model_never_notices_on_fakes",
            "training/test_ray.py::"
            "test_ranks_on_two_ray_nodes_train_as_one_process_and_outlive_actor_and_host_but_no_other_token",
        ),
    ),
    Promise(
        "operation",
        "A replica on another host lacks weights that were saved here, forgets what a call needs, or ends the others",
        "versions-stay-on-the-servers-host a-value-that-a-call-needs-is-forgotten a-gpu-for-two-engines-on-other-hosts "
        "an-older-start-takes-the-place-of-a-newer-one",
        (
            "fakes/test_replicas_elsewhere_on_fakes.py::"
            "test_a_replica_without_a_host_waits_while_the_other_answers_on_fakes",
            "fakes/test_replicas_elsewhere_on_fakes.py::"
            "test_why_a_replica_has_no_place_is_the_error_of_the_start_on_fakes",
            "fakes/test_replicas_elsewhere_on_fakes.py::"
            "test_a_broken_replica_is_the_error_of_the_start_while_another_waits_for_a_host",
            "fakes/test_replicas_elsewhere_on_fakes.py::"
            "test_a_version_that_cannot_be_read_is_refused_before_it_is_sent",
            "fakes/test_replicas_elsewhere_on_fakes.py::test_replicas_start_and_end_while_ray_is_joined",
            "training/test_ray.py::test_replicas_on_two_ray_nodes_sample_as_one_and_outlive_actor_and_host",
            "training/test_ray.py::"
            "test_a_server_on_two_ray_nodes_trains_and_samples_through_the_sdk_and_goes_on_after_the_other_host_ends",
        ),
    ),
    Promise(
        "operation",
        "A process on another host takes orders from anybody",
        "any-secret-will-do",
        ("training/test_ranks_elsewhere_on_fakes.py::test_hosts_are_refused_without_what_they_need",),
    ),
    Promise(
        "operation",
        "A GPU that has a sampler alone keeps memory for a trainer that is elsewhere",
        "sampler-alone-shares-its-gpu",
    ),
    Promise(
        "operation",
        "The first start of an architecture takes ten seconds more, in an interpreter that imports vLLM again",
        "an-interpreter-for-each-architecture",
    ),
    Promise(
        "operation",
        "GPUs are idle or taken unasked: those not named, one without room, one that is not there; and no line says so",
        "one-gpu-of-many gpus-of-the-other-engine-taken busy-gpu-stops-the-start layout-not-said "
        "missing-gpu-refused-without-those-there",
    ),
    Promise(
        "operation",
        "A start or an end takes longer than it must or does not say for what: one engine after the other, kernels "
        "compiled again each time, an engine that waits for one that has failed, searches for garbage",
        "a-failed-start-waits a-cache-that-cannot-be-written vllm-freezes-the-heap "
        "weights-not-read-ahead frozen-engine-stays sampler-searched-for-garbage",
        (
            "sampling/test_start_stages.py::test_an_engine_says_where_the_time_of_its_start_went",
            "fakes/test_loading_at_once_on_fakes.py::test_both_load_at_the_same_time_only_if_told_to",
            "fakes/test_processes_started_early_on_fakes.py::"
            "test_an_engine_takes_the_process_of_its_name_and_the_rest_are_ended",
        ),
    ),
    Promise(
        "operation",
        "A driver that is too old, a missing compiler or unlike GPUs show as a traceback or not at all",
        tests=(
            "workspace/test_gpu_machines.py::test_an_old_driver_is_a_problem_that_says_the_lowest",
            "workspace/test_gpu_machines.py::test_no_compiler_and_no_headers_are_said",
            "workspace/test_gpu_machines.py::test_gpus_of_different_kinds_are_named",
        ),
    ),
    Promise(
        "operation",
        "A sampler in a process keeps what is not needed: cancelled samples, versions, memory of other results",
        "cancelled-samples-run-on unwritten-version-sent-each-time large-messages-joined",
    ),
    Promise(
        "operation",
        "The sampler keeps memory that training needs, or sleeps or wakes without need",
        "sleeps-when-all-fits memory-taken-from-under-samples samples-are-not-held-back "
        "neighbours-run-again wakes-beside-the-trainers-cache removing-a-version-wakes",
        ("http/test_http_memory_sharing_on_fakes.py::test_many_samples_at_once_wake_the_sampler_once_on_fakes",),
    ),
    Promise(
        "operation",
        "Training keeps activations and gradients in memory that no layer's backward reads, or all that a GPU has",
        "gated-mlp-as-autograd-keeps-it norm-as-autograd-keeps-it norm-of-heads-in-tiny-parts "
        "gradient-of-hidden-states-kept kept-on-meta-counted-once plan-of-the-other-decoder "
        "share-of-the-device-ignored no-spare-memory "
        "whole-product-of-a-gated-mlp backward-of-a-tower-hardly-planned tower-not-planned tower-not-in-adapters "
        "sizes-without-vision-tower",
    ),
    Promise(
        "operation",
        "An option that is NaN or infinite is a traceback or no limit",
        "options-are-not-finite",
    ),
    Promise("operation", "A database that another program holds is an error full of SQL", "lock-unexplained"),
    Promise(
        "operation",
        "The server is healthy before training and sampling work, or while no step of a sampler ends",
        "healthy-before-it-is ready-before-it-is health-blind-to-stalls",
    ),
    Promise(
        "attention",
        "A sliding window, a soft cap or a sink is ignored, forward or backward",
        "window-ignored soft-cap-without-its-derivative logits-capped-without-the-derivative sinks-without-a-share "
        "softmax-backward-by-the-output",
    ),
    Promise(
        "families",
        "One engine ignores a rule of a family's LM head",
        "head-without-a-name-in-vllm logits-not-capped heads-of-gemma-3-without-a-name logits-scaled-by-a-guess "
        "head-reads-hidden-states-as-they-are wrong-logits-of-a-family-accepted",
    ),
    Promise(
        "grammars",
        "Structured output and calls only look alike: sampling is not constrained, or a hostile schema stops all",
        "grammar-lost-on-the-way grammar-not-given-to-vllm deep-schemas-pass schema-of-elsewhere "
        "grammar-without-a-budget not-is-ignored keywords-beside-a-reference a-free-key-may-be-a-listed-one "
        "blanks-without-a-bound grammars-with-an-old-vllm "
        "tools-without-their-grammar calls-not-counted-as-the-end",
        (
            "sampling/test_grammars.py::test_other_requests_in_the_batch_are_the_same",
            "sampling/test_grammars.py::"
            "test_a_grammar_that_is_too_much_is_killed_with_its_process_and_the_next_one_starts_again",
            "e2e/test_tools_on_real_models.py::test_random_weights_call_a_strict_tool_whole_and_streamed",
            "http/test_structured_output_on_fakes.py::test_what_is_no_grammar_is_refused_by_its_name_streamed_or_not_on_fakes",
        ),
    ),
    Promise(
        "families",
        "Qwen3.5: sequences of a packed row see each other, or adapters of linear attention are loaded and ignored",
        "delta-nets-see-other-sequences delta-rule-state-of-other-segments convolution-leaks-between-segments "
        "delta-rule-decay-not-in-the-system delta-rule-keeps-a-graph parts-of-a-module-in-one "
        "split-rows-ignored-by-vllm parts-joined-off-the-diagonal gate-of-attention-without-its-gradient "
        "wrong-gradients-on-hopper old-fla-core last-chunk-unknown-to-fla positions-of-text-in-one-row "
        "choices-compiled-one-by-one failed-choices-kept kernels-of-gpus-on-a-cpu kernels-of-gpus-unused-on-a-gpu",
        ("families/test_qwen3_5.py::test_long_prompts_in_parts_and_from_the_cache_have_the_same_logprobs",),
    ),
    Promise(
        "families",
        "The memory plan knows no windows and no states of linear attention: models are refused or do not start",
        "windows-planned-whole states-in-blocks-of-one-layer more-sequences-than-states "
        "fewer-sequences-with-more-memory cache-too-small-for-states",
    ),
    Promise(
        "families",
        "Gemma's written-out layers leave out a norm, a kind of rotary positions, or the slope of GELU",
        "norm-after-a-block-without-gradient all-layers-turn-by-the-same-angles slope-of-gelu-forgotten",
    ),
    Promise(
        "families",
        "Every layer of experts waits for the GPU",
        "number-of-adapters-read-from-the-device",
    ),
    Promise(
        "families",
        "A kernel takes more shared memory than a card has, and training ends at the first step there",
        "blocks-of-a-large-card-everywhere",
        ("training/test_kernels_on_other_cards.py::test_every_kernel_fits_every_card_for_all_models_and_ranks",),
    ),
    Promise(
        "endpoints",
        "OpenAI's and Anthropic's parameters are taken and ignored; another owner's checkpoint answers as a model",
        "unsupported-fields-of-openai-ignored checkpoints-of-others-answer-as-models",
        (
            "http/test_anthropic_on_fakes.py::test_what_is_not_served_is_refused_by_name_on_fakes",
            "http/test_http_fuzz_on_fakes.py::test_every_route_that_takes_a_body_is_fuzzed_on_fakes",
        ),
    ),
    Promise(
        "endpoints",
        "Text of a message becomes a control token, or a template misses the thoughts in an assistant's text",
        "added-tokens-that-are-not-special-are-text templates-do-not-see-thoughts tokenizer-without-control-tokens "
        "control-tokens-cut-once",
        (
            "real_tokenizers/test_real_chat_templates.py::test_text_that_looks_like_structure_becomes_no_control_token",
            "real_tokenizers/test_real_chat_templates.py::test_tools_and_what_they_say_forge_nothing",
        ),
    ),
    Promise(
        "endpoints",
        "A stream differs from the whole answer, shows what belongs to a stop, or goes on when its client has left",
        "stream-without-its-last-tokens top-logprobs-dropped-from-streams stop-texts-shown-in-streams "
        "client-that-left-is-served-on results-of-endpoints-kept unread-streams-go-on streams-begin-again "
        "streams-of-an-engine-begin-again tokens-of-processes-not-told bytes-shown-as-they-come "
        "bytes-without-end-decoded-again a-byte-takes-the-characters-before-it-back what-may-begin-a-call-is-forgotten "
        "bytes-of-parts-of-characters-unknown tokens-without-the-blank-before-them offsets-count-parts-of-characters",
        (
            "real_tokenizers/test_real_text.py::test_tokens_that_are_no_text_are_the_same_streamed_at_any_places",
            "http/test_http_streams_on_fakes.py::test_examples_of_the_page_run_on_fakes",
            "http/test_openai_on_fakes.py::test_chat_is_what_the_sdk_samples_with_equal_logprobs_on_fakes",
            "e2e/test_endpoints_on_real_models.py::"
            "test_answers_have_the_sdks_tokens_and_logprobs_with_an_image_and_an_adapter",
        ),
    ),
    Promise(
        "vLLM",
        "A patch of vLLM is not applied, or another version of vLLM passes it by",
        "vllms-draw draws-not-rewound large-vocabularies-refused images-not-counted begun-sequences-not-reported "
        "temperature-through-vllms-checks slots-of-released-engines-noted caches-of-a-layer-taken-for-a-tensor "
        "compiled-code-of-released-engines-stays half-a-waking-stays engines-shut-vllm-down images-encoded-each-time "
        "buffers-of-steps-know-a-released-engine buffers-of-steps-know-a-failed-engine "
        "buffers-of-steps-freed-under-graphs",
    ),
)


def named_tests(promise: Promise, mutations: Sequence[Mutation]) -> list[str]:
    """Node ids of the tests of its mutations and of its `tests`, each once."""
    by_name = {mutation.name: mutation for mutation in mutations}
    of_mutations = [test for name in promise.mutations.split() for test in by_name[name].tests]
    return list(dict.fromkeys([*of_mutations, *(f"tests/{test}" for test in promise.tests)]))


def document(mutations: Sequence[Mutation]) -> str:
    """The content of docs/promises.md."""
    parts = ((_HEAD, PROMISES), (_RL_HEAD, VISION_RL_PROMISES), (_MISTAKES_HEAD, MISTAKES))
    return "\n".join("\n".join([*head, *_rows(promises, mutations), ""]) for head, promises in parts)


def _rows(promises: Iterable[Promise], mutations: Sequence[Mutation]) -> list[str]:
    rows = []
    for promise in promises:
        by_file: dict[str, list[str]] = {}
        for test in named_tests(promise, mutations):
            file, _, name = test.removeprefix("tests/").partition("::")
            by_file.setdefault(file, []).append(f"`{name}`")
        tests = "<br>".join(f"`{file}`: {', '.join(names)}" for file, names in by_file.items())
        broken = ", ".join(f"`{name}`" for name in promise.mutations.split())
        told = f"{promise.words}. {promise.note}" if promise.note else promise.words
        rows.append(f"| {promise.number} | {told} | {tests or '–'} | {broken or '–'} |")
    return rows


_HEAD = """\
# Promises, the tests that keep them, and how the tests are tested

Written by `python -m tests.promises`; a test compares. Paths are below `tests/`. A mutation breaks one line of a
copy, and its tests must fail: `make mutations` runs all of them, `python tests/mutations.py --only NAME` one.

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


if __name__ == "__main__":
    DOCUMENT.write_text(document(read_mutations()))
