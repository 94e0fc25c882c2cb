"""Draws the next tokens, and carries their logprobs over the whole vocabulary to a request's output.

vLLM writes the logprobs of the whole vocabulary, ranks every chosen token in it, and carries ids, logprobs and ranks
through objects per token. Here each token has one number: a vector per step goes to the host, the scheduler takes each
request's float from it (`slice_request`), and the request's output holds a list. Requests for the likeliest tokens get
two more vectors per token.

Shape suffixes: b requests of a step, a those of them that ask for the likeliest, k how many, v vocabulary.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.sampling.prompt_scores import PromptScores
from torch import nn

ROWS = 256
"""Requests of a step that are drawn at a time. A step has up to four times as many, and `models/gpu_plan.py` counts
three arrays as large as its logits."""

StepLogprob = float | tuple[float, npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Of one sampled token; with ids [k] and logprobs [k] of the likeliest in falling order if the request asks."""


@dataclass(frozen=True, slots=True, eq=False)
class Likeliest:
    """`widths`: how many each request asks for, by its row in the step. `ids_ak` int64, `logprobs_ak` float32: row i
    belongs to the i-th request of `widths`, k is the largest width."""

    widths: Mapping[int, int]
    ids_ak: torch.Tensor
    logprobs_ak: torch.Tensor

    @classmethod
    def of(cls, logits_bv: torch.Tensor, widths: Mapping[int, int]) -> "Likeliest":
        """From logits after the temperature and before top-k and top-p."""
        rows, k = list(widths), max(widths.values())
        parts = [
            logits_bv[rows[start : start + ROWS]].log_softmax(dim=-1, dtype=torch.float32).topk(k)
            for start in range(0, len(rows), ROWS)
        ]
        return cls(widths, torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))

    def to_cpu_nonblocking(self) -> "Likeliest":
        """On the host once the stream is done."""
        ids, logprobs = (tensor.to("cpu", non_blocking=True) for tensor in (self.ids_ak, self.logprobs_ak))
        return Likeliest(self.widths, ids, logprobs)

    def by_row(self) -> dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """Ids and logprobs [k] of each request that asks, by its row."""
        ids, logprobs = self.ids_ak.cpu().numpy().astype(np.int32), self.logprobs_ak.cpu().numpy()
        return {row: (ids[at, :k].copy(), logprobs[at, :k].copy()) for at, (row, k) in enumerate(self.widths.items())}


class Scores(Protocol):
    """What vLLM's sampler takes for the logprobs of a vocabulary. `likeliest` None: no request asks."""

    @property
    def likeliest(self) -> Likeliest | None: ...

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logprobs, float32 [B], of one token (int64 [B]) for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """float32 [B, V], rows sum to 1; those of chosen tokens are greater than 0."""

    p_bv: torch.Tensor
    likeliest: Likeliest | None = None

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        return self.p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).log()


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """[B, V] of any floating dtype."""

    logits_bv: torch.Tensor
    likeliest: Likeliest | None = None

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        log_p_bv = self.logits_bv.log_softmax(dim=-1, dtype=torch.float32)
        return log_p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class ChosenLogprobs:
    """Of the chosen tokens, float32 [B]; in place of vLLM's `LogprobsTensors`."""

    logprobs: torch.Tensor
    likeliest: Likeliest | None = None

    def to_cpu_nonblocking(self) -> "ChosenLogprobs":
        """vLLM calls this on its copy stream and reads the result when that stream is done."""
        if self.logprobs.device.type == "cpu":
            return self
        likeliest = None if self.likeliest is None else self.likeliest.to_cpu_nonblocking()
        return ChosenLogprobs(self.logprobs.to("cpu", non_blocking=True), likeliest)

    def tolists(self) -> "StepLogprobs":
        """Python floats, with arrays for requests that ask."""
        numbers: list[float] = self.logprobs.tolist()
        if self.likeliest is None:
            return StepLogprobs(numbers)
        values: list[StepLogprob] = [*numbers]
        for row, (ids, logprobs) in self.likeliest.by_row().items():
            values[row] = (numbers[row], ids, logprobs)
        return StepLogprobs(values)


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """One for each request of a step; in place of vLLM's `LogprobsLists`."""

    values: Sequence[StepLogprob]

    def slice_request(self, index: int, count: int) -> StepLogprob | None:
        """That of one request: one token per step (no speculative decoding), none before its prompt is complete."""
        assert count <= 1
        return self.values[index] if count else None


def gather_logprobs(scores: Scores, num_logprobs: int, token_ids: torch.Tensor) -> ChosenLogprobs:
    """In place of `Sampler.gather_logprobs`: without ranks, and the likeliest only for requests that ask."""
    return ChosenLogprobs(scores.of(token_ids), scores.likeliest)


@dataclass(slots=True, eq=False)
class RequestLogprobs:
    """In place of vLLM's `LogprobsProcessor`; a request's final output has `logprobs` of its sampled tokens, and the
    answers about its prompt in `prompt_logprobs`."""

    logprobs: list[StepLogprob] = field(default_factory=list)
    prompt_logprobs: PromptScores | None = None
    prompt_token_id_logprobs: None = None
    cumulative_logprob: None = None

    def update_from_output(self, output: Any) -> None:
        """Add what one step gave (`EngineCoreOutput`)."""
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors


def collect_logprobs(processor: Any) -> None:
    """Make the outputs of an engine's `output_processor` hold `RequestLogprobs`."""
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        processor.request_states[request.request_id].logprobs_processor = RequestLogprobs()

    processor.add_request = add_request


_BLOCK = 256
"""Tokens whose probabilities are added up before one of them is looked for."""


def at_share(p_bv: torch.Tensor, share_b: torch.Tensor) -> torch.Tensor:
    """Ids int64 [B]: the first token up to which the row of `p_bv` (float32, >= 0) holds more than that share (float64,
    in [0, 1)) of its sum. With uniform shares this draws from p / sum(p), by inversion of the distribution function.

    First the block of the token is found and then the token in it, so only sums of blocks are added up in float64.
    """
    width = p_bv.shape[1]
    whole = width - width % _BLOCK
    blocks = p_bv[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(-1), p_bv[:, whole:].sum(-1, keepdim=True)
    block_b1, share_b1 = _place(torch.cat(blocks, dim=1), share_b.unsqueeze(1))
    columns_bn = block_b1 * _BLOCK + torch.arange(_BLOCK)
    in_block_bn = p_bv.gather(1, columns_bn.clamp(max=width - 1)).masked_fill(columns_bn >= width, 0.0)
    at_b1, _ = _place(in_block_bn, share_b1)
    return (block_b1 * _BLOCK + at_b1).squeeze(1).clamp(max=width - 1)  # past it: NaN


def _place(parts_bn: torch.Tensor, share_b1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part (int64 [B, 1]; never one whose sum is 0) that `share_b1` of each row's sum falls into, and at what share
    of it."""
    sums_bn = parts_bn.cumsum(-1, dtype=torch.float64)
    total_b1 = sums_bn[:, -1:]
    below_total_b1 = torch.nextafter(total_b1, torch.zeros_like(total_b1))
    target_b1 = torch.minimum(share_b1 * total_b1, below_total_b1)
    at_b1 = torch.searchsorted(sums_bn, target_b1, right=True).clamp(max=parts_bn.shape[1] - 1)
    below_b1 = sums_bn.gather(1, (at_b1 - 1).clamp(min=0)).masked_fill(at_b1 == 0, 0.0)
    return at_b1, (target_b1 - below_b1) / (sums_bn.gather(1, at_b1) - below_b1)


def apply_penalties_where_sampled(runner: Any) -> None:
    """Make `runner` (a V1 model runner) lower the logits of tokens that were sampled, of the requests with penalties.

    vLLM counts the tokens of prompt and answer of every request of the step, over the vocabulary, on the device.
    """
    batch = runner.input_batch
    batch._make_prompt_token_ids_cpu_tensor = lambda: torch.empty((batch.num_reqs, 0), dtype=torch.int64)

    def apply(logits_bv: torch.Tensor, settings: Any, output_token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        if not settings.no_penalties:
            rows = slice(batch.num_reqs)
            lower(logits_bv, batch.presence_penalties_cpu[rows], batch.frequency_penalties_cpu[rows], output_token_ids)
        return logits_bv

    runner.sampler.apply_penalties = apply


def lower(
    logits_bv: torch.Tensor,
    presence_b: npt.NDArray[np.float32],
    frequency_b: npt.NDArray[np.float32],
    sampled: Sequence[Sequence[int]],
) -> None:
    """Lower the logits of `sampled` of each row by its presence penalty, and for each time by its frequency penalty.
    Negative ids stand for tokens that are not known yet, and are left out."""
    rows = np.flatnonzero((presence_b != 0) | (frequency_b != 0)).tolist()
    ids, counts = [], []
    for row in rows:
        tokens = np.asarray(sampled[row], np.int64)
        which, how_often = np.unique(tokens[tokens >= 0], return_counts=True)
        ids.append(which)
        counts.append(how_often)
    if not rows:
        return
    row_of_each = np.repeat(rows, [which.size for which in ids])
    amounts = presence_b[row_of_each] + np.concatenate(counts) * frequency_b[row_of_each]
    arrays = row_of_each, np.concatenate(ids), amounts.astype(np.float32)
    where_row, where_id, amount = (torch.from_numpy(array).to(logits_bv.device) for array in arrays)
    logits_bv[where_row, where_id] -= amount.to(logits_bv.dtype)


class FullVocabularyDraw(nn.Module):
    """In place of vLLM's `TopKTopPSampler`, which gets logits that are divided by each request's temperature.

    Logprobs are log softmax(logits / T) before top-k and top-p, from the probabilities that the draw needs anyway: one
    softmax per step. Greedy rows are divided by 1; a step with only greedy rows skips this module. On CUDA most steps
    need neither: `one_pass_draw`.

    Unseeded requests draw from separate generators, seeded by the operating system: samples do not repeat when the
    program seeds torch's global generator, and do not change that program's random numbers.
    """

    def __init__(self, device: torch.device, widths: Callable[[], Mapping[int, int]] = dict) -> None:
        """`widths`: how many of the likeliest tokens the requests of the current step ask for, by row."""
        super().__init__()
        self._has_kernel = device.type == "cuda"
        self._widths = widths
        self._unseeded = torch.Generator(device)
        self._unseeded.seed()
        self._seeds = torch.Generator()
        self._seeds.seed()
        self._rewinds = False
        self._states: dict[int, torch.Tensor] = {}

    def seed(self, seed: int) -> None:
        """Draw for unseeded requests as every other rank of this engine does."""
        self._unseeded.manual_seed(seed)
        self._seeds.manual_seed(seed)

    @classmethod
    def install(cls, runner: Any) -> None:
        """Make `runner` (a V1 model runner) draw with it."""

        def widths() -> Mapping[int, int]:
            batch = runner.input_batch
            if not batch.sampling_metadata.max_num_logprobs:
                return {}
            return {batch.req_id_to_index[name]: k for name, k in batch.num_logprobs.items() if k}

        cls(runner.device, widths).install_in(runner.sampler)

    def install_in(self, sampler: Any) -> None:
        """Make vLLM's `Sampler` draw with it and return `ChosenLogprobs`."""
        sampler.forward = functools.partial(self.in_one_pass, sampler.forward)
        sampler.topk_topp_sampler = self
        # vLLM takes what the module returns for the processed logprobs; it need not be a tensor.
        sampler.logprobs_mode = "processed_logprobs"
        # For steps with only greedy rows.
        sampler.compute_logprobs = lambda logits_bv: Logits(logits_bv, self._likeliest(logits_bv))
        sampler.gather_logprobs = gather_logprobs

    def forward(
        self,
        logits_bv: torch.Tensor,
        generators: dict[int, torch.Generator],
        top_k_b: torch.Tensor | None,
        top_p_b: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Probabilities]:
        """Token ids int64 [B] and the source of their logprobs. `generators`: by row, of requests with a seed."""
        p_bv = logits_bv.softmax(dim=-1, dtype=torch.float32)
        likeliest = self._likeliest(logits_bv)
        if self._rewinds:
            self._states = {row: generator.get_state() for row, generator in generators.items()}
        drawn = []
        for start in range(0, len(p_bv), ROWS):
            rows = slice(start, start + ROWS)
            kept_bv = p_bv[rows]
            if top_k_b is not None or top_p_b is not None:
                from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

                # Cuts in place; the logits are not needed after this.
                cut_bv = apply_top_k_top_p(
                    logits_bv[rows],
                    None if top_k_b is None else top_k_b[rows],
                    None if top_p_b is None else top_p_b[rows],
                )
                kept_bv = kept_bv.masked_fill(cut_bv == -torch.inf, 0.0)
            of_rows = {row - start: generators[row] for row in generators.keys() & range(rows.start, rows.stop)}
            drawn.append(self._draw(kept_bv, of_rows))
        return torch.cat(drawn), Probabilities(p_bv, likeliest)

    def in_one_pass(self, otherwise: Callable[..., Any], logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """In place of `Sampler.forward`: a step on CUDA without seeds, top-k, top-p, penalties and requests for the
        likeliest tokens reads its logits [B, V] once. Of vLLM's other settings, `engine_inputs.py` uses none."""
        settings = sampling_metadata
        changed = settings.top_k is not None or settings.top_p is not None or not settings.no_penalties
        if not self._has_kernel or changed or settings.generators or self._widths():
            return otherwise(logits, settings)
        from tinker_local.backend.vllm_engine.one_pass_draw import draw
        from vllm.v1.outputs import SamplerOutput

        temperature_b = settings.temperature
        if temperature_b is None:  # only greedy rows
            temperature_b = torch.zeros(len(logits), device=logits.device)
        ids_b, logprobs_b = draw(logits, temperature_b, int(torch.randint(2**62, (), generator=self._seeds)))
        return SamplerOutput(
            sampled_token_ids=ids_b.unsqueeze(-1),
            logprobs_tensors=ChosenLogprobs(logprobs_b),
        )

    def _likeliest(self, logits_bv: torch.Tensor) -> Likeliest | None:
        widths = self._widths()
        return Likeliest.of(logits_bv, widths) if widths else None

    def _draw(self, p_bv: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        """Ids int64 [B] with the distributions p / sum(p)."""
        if self._has_kernel:
            return self._exponential_race(p_bv, generators)
        share_b = torch.rand(len(p_bv), dtype=torch.float64, generator=self._unseeded)
        for row, generator in generators.items():
            share_b[row] = torch.rand((), dtype=torch.float64, generator=generator)
        return at_share(p_bv, share_b)

    def _exponential_race(self, p_bv: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        """argmax p / e with e ~ Exp(1) has the distribution p / sum(p). A random number per token of the vocabulary is
        free on a GPU; on a CPU it would be a quarter of a small model's step."""
        noise_bv = torch.empty_like(p_bv)
        if len(generators) < len(noise_bv):
            noise_bv.exponential_(generator=self._unseeded)
        for row, generator in generators.items():
            noise_bv[row].exponential_(generator=generator)
        return torch.div(p_bv, noise_bv, out=noise_bv).argmax(dim=-1)

    def rewind_discarded(self, runner: Any) -> None:
        """Undo the draws of requests whose prompt is not complete, which vLLM discards.

        vLLM rewinds such a request's generator by CUDA's count of random numbers. A CPU generator has none, so it would
        raise, and a seeded request with a long prompt would fail the step for all requests.
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
