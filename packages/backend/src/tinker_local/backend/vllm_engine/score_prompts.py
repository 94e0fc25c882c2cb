"""Scores prompts inside vLLM's model runners, in place of vLLM's prompt logprobs.

A request's `PromptQuestions` travel in its `SamplingParams.extra_args`; its output holds the arrays that answer them.
Prompts may come in parts (chunked prefill), and again from the beginning after a preemption.

Shape suffixes: n rows of a part, v vocabulary.
"""

from typing import Any

import numpy as np
import torch
from tinker_local.backend.sampling.prompt_scores import Draws, PromptQuestions, PromptScores
from tinker_local.backend.vllm_engine.lora_operators import LMHeads

CHUNK_NUMBERS = 2**26
"""About how many float32 numbers scoring takes at a time: 256 MiB. The logits of all positions of one step, even in the
model's dtype, may be as large as the KV cache."""

_QUESTIONS = "tinker_local_prompt_questions"


def ask(params: Any, questions: PromptQuestions) -> None:
    """Make a request with these `SamplingParams` of vLLM answer `questions` in its output's `prompt_logprobs`."""
    params.prompt_logprobs = 0
    params.extra_args = {**(params.extra_args or {}), _QUESTIONS: questions}
    params.skip_reading_prefix_cache = questions.first_row == 0


class _UntilFirstRow:
    """A request as the prefix cache sees it: rows from `first_row` on are always computed."""

    def __init__(self, request: Any, first_row: int) -> None:
        self._request = request
        self.num_tokens = first_row + 1  # the last token is always computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def read_cached_prefixes(manager: Any) -> None:
    """Let requests with questions read what is before their first row from the prefix cache, a `KVCacheManager`."""
    original = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *limit: None) -> Any:
        """`limit`: from 0.33 on; None without a connector that vLLM calls auxiliary."""
        questions = (request.sampling_params.extra_args or {}).get(_QUESTIONS)
        return original(request if questions is None else _UntilFirstRow(request, questions.first_row), *limit)

    manager.get_computed_blocks = get_computed_blocks


def questions_of(params: Any) -> PromptQuestions:
    """Of `SamplingParams` that `ask` has changed."""
    questions: PromptQuestions = params.extra_args[_QUESTIONS]
    return questions


class PromptScorer:
    """Answers questions from the hidden states of prompts, for either model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._heads = LMHeads(runner)

    def answer(
        self,
        hidden_states: torch.Tensor,
        computed: int,
        adapter_id: int,
        questions: PromptQuestions,
        scores: PromptScores,
    ) -> None:
        """Write into `scores` what one step says: `hidden_states` [T, H] of the positions from `computed` on. With the
        LM head of `adapter_id` (0: the base model); in parts that bound the memory."""
        start = max(computed, questions.first_row)
        stop = min(computed + len(hidden_states), questions.num_rows)
        if start >= stop:
            return
        at_a_time = rows_at_a_time(questions, self._runner.model_config.get_vocab_size())
        with self._heads.of(adapter_id):
            for part in hidden_states[start - computed : stop - computed].split(at_a_time):
                answer_rows(self._runner.model.compute_logits(part), start, questions, scores)
                start += len(part)


def rows_at_a_time(questions: PromptQuestions, vocab_size: int) -> int:
    """As many as `answer_rows` can do with about `CHUNK_NUMBERS` float32 numbers, at least 1."""
    # The likeliest and the drawn are float32 and int64; a draw has the probabilities in float32 and float64.
    drawn = 0 if questions.draws is None else 4 * vocab_size + 3 * questions.draws.k
    return max(1, CHUNK_NUMBERS // (vocab_size + 3 * questions.topk + drawn))


def answer_rows(logits_nv: torch.Tensor, start: int, questions: PromptQuestions, scores: PromptScores) -> None:
    """Write the answers of rows [start, start + N) into `scores`; `logits_nv` of any floating dtype."""
    log_p_nv = logits_nv.log_softmax(dim=-1, dtype=torch.float32)
    stop = start + len(log_p_nv)
    first = max(start, questions.chosen_from)
    if questions.chosen and first < stop:
        next_ids = _on_device(questions.next_ids[first:stop], log_p_nv)
        scores.chosen[first:stop] = _gathered(log_p_nv[first - start :], next_ids.unsqueeze(-1))[:, 0]
    if questions.topk and first < stop:
        values, ids = log_p_nv[first - start :].topk(questions.topk)
        scores.topk_ids[first:stop], scores.topk_logprobs[first:stop] = ids.cpu().numpy(), values.cpu().numpy()
    if questions.targets is not None:
        cells = questions.targets.within(start, stop)
        rows = _on_device(questions.targets.rows[cells] - start, log_p_nv)
        scores.targets[cells] = log_p_nv[rows, _on_device(questions.targets.ids[cells], log_p_nv)].cpu().numpy()
    if questions.draws is not None:
        drawn = _draw(log_p_nv, questions.draws, start)
        scores.drawn_ids[start:stop] = drawn.cpu().numpy()
        scores.drawn_logprobs[start:stop] = _gathered(log_p_nv, drawn)


def _draw(log_p_nv: torch.Tensor, draws: Draws, start: int) -> torch.Tensor:
    """int64 [N, k], by the inverse of the cumulative distribution."""
    if draws.temperature == 0:
        return log_p_nv.argmax(dim=-1, keepdim=True).expand(-1, draws.k)
    # In float64: float32 sums over 150,000 tokens lose the tail.
    cumulative_nv = (log_p_nv / draws.temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    uniforms = torch.from_numpy(draws.uniforms(start, start + len(log_p_nv))).to(log_p_nv.device)
    # Below the last sum also after rounding: a uniform is at most 1 - 2^-53.
    drawn = torch.searchsorted(cumulative_nv, uniforms * cumulative_nv[:, -1:], right=True)
    return drawn.clamp_(max=log_p_nv.shape[-1] - 1)


def _gathered(log_p_nv: torch.Tensor, ids: torch.Tensor) -> Any:
    """The logprobs of `ids` int64 [N, k], on the host."""
    return log_p_nv.gather(-1, ids).cpu().numpy()


def _on_device(ids: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(ids, np.int64)).to(like.device)
