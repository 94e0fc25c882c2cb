"""What this project does inside vLLM's Model Runner V2 (`v1/worker/gpu/model_runner.py`).

The runner keeps requests in slots (`req_idx`), on the device, and makes its sampler and what scores prompts from two
classes. These stand in for them: two names of vLLM's module in place of the methods that `runner_v1.py` replaces. A
request that is preempted leaves its slot, and comes back with what it has sampled as part of what is to be computed.

Shape suffixes: b requests of a step, v vocabulary.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.sampling.prompt_scores import PromptQuestions, PromptScores
from tinker_local.backend.vllm_engine.compat_vllm import SAMPLED_TEMPERATURE_MIN
from tinker_local.backend.vllm_engine.draw_tokens import Asked, FullVocabularyDraw
from tinker_local.backend.vllm_engine.score_prompts import PromptScorer, questions_of


def replace_sampler() -> None:
    """Have the runners that are made from now on draw with `FullVocabularySampler`."""
    import vllm.v1.worker.gpu.model_runner as of_runner

    of_runner.Sampler = FullVocabularySampler


class FullVocabularySampler:
    """In place of vLLM's `Sampler`: what requests ask for, by slot, and one draw for each step.

    A slot that had no request yet asks for a cut and for likeliest tokens, so that vLLM's profile of the memory, which
    has no requests, measures the largest step.
    """

    penalties_state = SimpleNamespace(output_bin_counts=None)
    """vLLM would count what requests sample, over the vocabulary, for each slot: 300 MB of 512 slots."""

    compute_nans = False

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device, req_states: Any, **_: Any) -> None:
        """The keywords are vLLM's; those left out are of what no request asks for."""
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

        self.draw = FullVocabularyDraw(device)
        self._device, self._vocab_size, self._states = device, vocab_size, req_states
        self._temperature = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self._top_p = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self._top_k = UvaBackedTensor(max_num_reqs, dtype=torch.int32)
        self._columns = self._temperature, self._top_p, self._top_k
        self._width = np.ones(max_num_reqs, np.int64)
        self._presence, self._frequency = np.zeros((2, max_num_reqs))
        self._seeded: dict[int, torch.Generator] = {}
        self._temperature.np[:], self._top_p.np[:], self._top_k.np[:] = 1.0, 0.99, vocab_size
        self._changed = True
        self.apply_staged_writes()

    def add_request(self, slot: int, params: Any) -> None:
        """Note what a request asks for, whose lengths and tokens are in `req_states` already."""
        self._temperature.np[slot], self._top_p.np[slot] = params.temperature, params.top_p
        self._top_k.np[slot] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._width[slot] = params.logprobs or 0
        self._presence[slot], self._frequency[slot] = params.presence_penalty, params.frequency_penalty
        self._seeded.pop(slot, None)
        if params.seed is not None:
            sampled = int(self._states.prefill_len.np[slot]) - int(self._states.prompt_len.np[slot])
            self._seeded[slot] = self.draw.past(params.seed, sampled, self._vocab_size)
        self._changed = True

    def apply_staged_writes(self) -> None:
        """Copy to the device what `add_request` has noted."""
        if self._changed:
            for column in self._columns:
                column.copy_to_uva()
            self._changed = False

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        """Draw a token for each of the rows [B, V]; vLLM drops those of prompts that are not complete."""
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        ids_b, logprobs = self.draw(logits, self._asked(input_batch))
        sampled, rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=ids_b.unsqueeze(-1),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )

    def _asked(self, batch: Any) -> Asked:
        slots, of_rows = batch.idx_mapping_np, batch.idx_mapping
        greedy = self._temperature.np[slots] < SAMPLED_TEMPERATURE_MIN
        width = self._width[slots]
        penalties = np.flatnonzero((self._presence[slots] != 0) | (self._frequency[slots] != 0))
        return Asked(
            temperature_b=None if greedy.all() else self._temperature.gpu[of_rows],
            some_greedy=bool(greedy.any()),
            top_k_b=self._top_k.gpu[of_rows] if (self._top_k.np[slots] != self._vocab_size).any() else None,
            top_p_b=self._top_p.gpu[of_rows] if (self._top_p.np[slots] != 1.0).any() else None,
            generators=self._generators(batch) if self._seeded else {},
            widths={int(row): int(width[row]) for row in np.flatnonzero(width)},
            lower=functools.partial(self._lower, batch, penalties) if penalties.size else None,
        )

    def _generators(self, batch: Any) -> Mapping[int, torch.Generator]:
        """By row, of requests whose prompt this step completes: what others draw is dropped."""
        computed = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
        return {
            row: self._seeded[slot]
            for row, slot in enumerate(batch.idx_mapping_np.tolist())
            if slot in self._seeded and computed[row] >= batch.prefill_len_np[row]
        }

    def _lower(self, batch: Any, rows: npt.NDArray[np.int64], logits_bv: torch.Tensor) -> None:
        """Apply penalties to `rows`. What they have sampled is on the device alone where vLLM draws ahead."""
        for row in rows.tolist():
            slot = int(batch.idx_mapping_np[row])
            first, end = int(self._states.prompt_len.np[slot]), int(batch.seq_lens_cpu_upper_bound[row])
            sampled = self._states.all_token_ids.gpu[slot, first:end].long()
            counts = torch.zeros(logits_bv.shape[1], dtype=torch.float64, device=self._device)
            counts.index_add_(0, sampled, torch.ones_like(sampled, dtype=torch.float64))
            amount = counts.sign() * float(self._presence[slot]) + counts * float(self._frequency[slot])
            logits_bv[row] -= amount.to(logits_bv.dtype)


class PromptAnswers:
    """In place of vLLM's `PromptLogprobsWorker`: answers the questions of `score_prompts.ask`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scorer = PromptScorer(runner)
        self._pending: dict[str, tuple[PromptQuestions, PromptScores]] = {}

    def add_request(self, request_id: str, slot: int, params: Any) -> None:
        """Note the questions of a request, if it has any that are not answered."""
        states = self._runner.req_states
        if params.prompt_logprobs is not None and states.prefill_len.np[slot] == states.prompt_len.np[slot]:
            questions = questions_of(params)
            self._pending[request_id] = questions, questions.unanswered()

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended or is preempted."""
        self._pending.pop(request_id, None)

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: torch.Tensor, input_batch: Any, *_: Any
    ) -> dict[str, "_OnHost"]:
        """Answer from the `hidden_states` of one step; the answers of the prompts that it completes."""
        if not self._pending:
            return {}
        finished: dict[str, _OnHost] = {}
        states, of_adapters = self._runner.req_states, self._runner.lora_state.lora_ids
        for row, request_id in enumerate(input_batch.req_ids):
            if request_id not in self._pending:
                continue
            questions, scores = self._pending[request_id]
            slot = int(input_batch.idx_mapping_np[row])
            first, computed = int(input_batch.query_start_loc_np[row]), int(input_batch.num_computed_tokens_np[row])
            scheduled = int(input_batch.num_scheduled_tokens[row])
            hidden = hidden_states[first : first + scheduled]
            self._scorer.answer(hidden, computed, int(of_adapters[slot]), questions, scores)
            if computed + scheduled >= int(states.prompt_len.np[slot]):
                finished[request_id] = _OnHost(scores)
                del self._pending[request_id]
        return finished

    def compute_prompt_token_id_logprobs(self, *_: Any) -> dict[str, torch.Tensor]:
        """Nothing: no request asks in this way."""
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class _OnHost:
    """Answers as vLLM takes them."""

    scores: PromptScores

    def to_cpu_nonblocking(self) -> PromptScores:
        """The answers, which are on the host already."""
        return self.scores


def answer_questions(runner: Any) -> None:
    """Make `runner` answer the questions of `score_prompts.ask`."""
    runner.prompt_logprobs_worker = PromptAnswers(runner)
