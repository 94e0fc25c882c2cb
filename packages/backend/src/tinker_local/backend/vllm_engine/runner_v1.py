"""What this project does inside vLLM's V1 model runner (`v1/worker/gpu_model_runner.py`, and that of CPUs).

The runner keeps requests in the rows of its `input_batch`. `runner_v2.py` does the same for its successor.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tinker_local.backend.sampling.prompt_scores import PromptQuestions, PromptScores
from tinker_local.backend.vllm_engine.draw_tokens import Asked, FullVocabularyDraw, lower
from tinker_local.backend.vllm_engine.score_prompts import PromptScorer, questions_of


def draw_all(runner: Any) -> FullVocabularyDraw:
    """Make `runner` draw with what this returns."""
    batch, draw = runner.input_batch, FullVocabularyDraw(runner.device)
    # Of prompts, which penalties here do not count; vLLM would count them in each step, over the vocabulary.
    batch._make_prompt_token_ids_cpu_tensor = lambda: torch.empty((batch.num_reqs, 0), dtype=torch.int64)
    on_cpu = runner.device.type == "cpu"

    def forward(logits: torch.Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> Any:
        # What is drawn before a prompt is complete is discarded, and takes no random number of its request.
        discarded = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist() if on_cpu else []
        return _output(*draw(logits, _asked(batch, sampling_metadata, discarded)))

    runner.sampler.forward = forward
    return draw


def draw_rows(sampler: Any, draw: FullVocabularyDraw) -> None:
    """Make a `Sampler` of vLLM draw with `draw`, without a runner: for requests without penalties that ask for no
    other tokens."""
    sampler.forward = lambda logits, settings: _output(*draw(logits, _settings(settings)))


def _output(ids_b: torch.Tensor, logprobs: Any) -> Any:
    from vllm.v1.outputs import SamplerOutput

    return SamplerOutput(sampled_token_ids=ids_b.unsqueeze(-1), logprobs_tensors=logprobs)


def _settings(settings: Any, discarded: Sequence[int] = (), **more: Any) -> Asked:
    """Of vLLM's `SamplingMetadata`."""
    return Asked(
        temperature_b=None if settings.all_greedy else settings.temperature,
        some_greedy=not settings.all_random,
        top_k_b=settings.top_k,
        top_p_b=settings.top_p,
        generators={row: each for row, each in settings.generators.items() if row not in discarded},
        **more,
    )


def _asked(batch: Any, settings: Any, discarded: Sequence[int]) -> Asked:
    widths = {}
    if settings.max_num_logprobs:
        widths = {batch.req_id_to_index[name]: k for name, k in batch.num_logprobs.items() if k}
    if settings.no_penalties:
        return _settings(settings, discarded, widths=widths)
    rows = slice(batch.num_reqs)
    penalties = batch.presence_penalties_cpu[rows], batch.frequency_penalties_cpu[rows]
    lowered = functools.partial(_lower, penalties, settings.output_token_ids)
    return _settings(settings, discarded, widths=widths, lower=lowered)


def _lower(penalties: Any, sampled: Any, logits_bv: torch.Tensor) -> None:
    presence_b, frequency_b = penalties
    lower(logits_bv, presence_b, frequency_b, sampled)


def keep_generators(runner: Any) -> None:
    """On a CPU, do not rewind the generators of requests whose prompt is not complete: they have drawn nothing.

    vLLM does it by CUDA's count of random numbers. A CPU generator has none, so it would raise, and a seeded request
    with a long prompt would fail the step for all requests.
    """
    if runner.device.type != "cpu":
        return
    original = type(runner)._bookkeeping_sync

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators = generators

    runner._bookkeeping_sync = types.MethodType(bookkeeping, runner)


def answer_questions(runner: Any) -> None:
    """Make `runner` answer the questions of `score_prompts.ask`."""
    scorer = PromptScorer(runner)

    def prompt_scores(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, PromptScores]:
        pending: dict[str, int] = self.num_prompt_logprobs
        finished: dict[str, PromptScores] = {}
        for request_id in [name for name in pending if name in num_scheduled_tokens]:
            request = self.requests[request_id]
            questions: PromptQuestions = questions_of(request.sampling_params)
            if request.in_progress_prompt_logprobs_cpu is None:
                request.in_progress_prompt_logprobs_cpu = questions.unanswered()
            scores: PromptScores = request.in_progress_prompt_logprobs_cpu
            computed, scheduled = request.num_computed_tokens, num_scheduled_tokens[request_id]
            row = self.input_batch.req_id_to_index[request_id]
            first = int(self.query_start_loc.np[row])
            adapter = int(self.input_batch.request_lora_mapping[row])
            scorer.answer(hidden_states[first : first + scheduled], computed, adapter, questions, scores)
            # The step that computes the last position also gives the first token. If that position has a row, the
            # prompt fills the context, and the engine has all of it but the last token.
            if computed + scheduled >= len(request.prompt_token_ids):
                finished[request_id] = scores
                request.in_progress_prompt_logprobs_cpu = None
                del pending[request_id]
        return finished

    runner._get_prompt_logprobs_dict = types.MethodType(prompt_scores, runner)
