"""Draws the next tokens, and gives their logprobs over the whole vocabulary.

Shape suffixes: b requests of a step, v vocabulary.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tinker_local.backend.vllm_engine.vllm_logprobs import Likeliest, Logits, Probabilities, gather_logprobs
from torch import nn


class FullVocabularyDraw(nn.Module):
    """In place of vLLM's `TopKTopPSampler`; its caller has divided the logits by each request's temperature.

    vLLM offers two kinds of logprobs, and neither is log softmax(logits / T): `raw_logprobs` ignore T, and
    `processed_logprobs` renormalise over what top-k and top-p keep. Here they are taken after the temperature and
    before the cut, from the probabilities that the draw needs anyway: one softmax a step. (Greedy rows have been
    divided by 1; a step of greedy rows alone does not come here.)

    Unseeded requests draw from a generator of their own, seeded by the operating system, so that a program that seeds
    torch's global generator does not make samples repeat, and sampling does not disturb that program's random numbers.
    """

    def __init__(self, device: torch.device, widths: Callable[[], Mapping[int, int]] = dict) -> None:
        """`widths`: how many of the likeliest tokens the requests of the step ask for, by their row."""
        super().__init__()
        self._widths = widths
        self._unseeded = torch.Generator(device)
        self._unseeded.seed()
        self._rewinds = False
        self._states: dict[int, torch.Tensor] = {}

    @classmethod
    def install(cls, runner: Any) -> None:
        """Make `runner` (a V1 model runner) sample with it."""

        def widths() -> Mapping[int, int]:
            batch = runner.input_batch
            if not batch.sampling_metadata.max_num_logprobs:
                return {}
            return {batch.req_id_to_index[name]: k for name, k in batch.num_logprobs.items() if k}

        draw = cls(runner.device, widths)
        draw.install_in(runner.sampler)
        if runner.device.type == "cpu":
            draw._rewind_instead_of(runner)

    def install_in(self, sampler: Any) -> None:
        """Make vLLM's `Sampler` draw with it. Its logprobs are then those of `vllm_logprobs`."""
        sampler.topk_topp_sampler = self
        # What the module returns counts as the processed logprobs; it need not be a tensor.
        sampler.logprobs_mode = "processed_logprobs"
        # For steps of greedy rows alone.
        sampler.compute_logprobs = lambda logits_bv: Logits(logits_bv, self._likeliest(logits_bv))
        sampler.gather_logprobs = gather_logprobs

    def forward(
        self,
        logits_bv: torch.Tensor,
        generators: dict[int, torch.Generator],
        top_k_b: torch.Tensor | None,
        top_p_b: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Probabilities]:
        """Token ids int64 [B] and what their logprobs are taken from; `generators` by row, for requests with a seed."""
        p_bv = logits_bv.softmax(dim=-1, dtype=torch.float32)
        kept_bv, likeliest = p_bv, self._likeliest(logits_bv)
        if top_k_b is not None or top_p_b is not None:
            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            # Cuts in place: the logits are not needed any more.
            cut_bv = apply_top_k_top_p(logits_bv, top_k_b, top_p_b)
            kept_bv = p_bv.masked_fill(cut_bv == -torch.inf, 0.0)
        return self._exponential_race(kept_bv, generators), Probabilities(p_bv, likeliest)

    def _likeliest(self, logits_bv: torch.Tensor) -> Likeliest | None:
        widths = self._widths()
        return Likeliest.of(logits_bv, widths) if widths else None

    def _exponential_race(self, p_bv: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        """argmax p / e with e ~ Exp(1) has the distribution p / sum(p), without a synchronisation with the host."""
        noise_bv = torch.empty_like(p_bv)
        if self._rewinds:
            self._states = {row: generator.get_state() for row, generator in generators.items()}
        if len(generators) < len(noise_bv):
            noise_bv.exponential_(generator=self._unseeded)
        for row, generator in generators.items():
            noise_bv[row].exponential_(generator=generator)
        return torch.div(p_bv, noise_bv, out=noise_bv).argmax(dim=-1)

    def _rewind_instead_of(self, runner: Any) -> None:
        """Undo the draws of requests whose prompt is not all in yet.

        vLLM throws such a draw away and sets the request's generator back by CUDA's count of random numbers, which a
        CPU generator does not have: it raises, and a seeded request with a long prompt ends the step for everybody.
        """
        self._rewinds = True
        original = type(runner)._bookkeeping_sync

        def bookkeeping(self_: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self_.input_batch
            generators = batch.generators
            for row in np.flatnonzero(self_.discard_request_mask.np[: batch.num_reqs]).tolist():
                if row in generators:
                    generators[row].set_state(self._states[row])
            batch.generators = {}
            try:
                return original(self_, *args, **kwargs)
            finally:
                batch.generators = generators

        runner._bookkeeping_sync = types.MethodType(bookkeeping, runner)
