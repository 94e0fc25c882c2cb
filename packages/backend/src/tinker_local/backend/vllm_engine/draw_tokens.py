"""Draws the next tokens, and carries their logprobs over the whole vocabulary to a request's output.

vLLM writes the logprobs of the whole vocabulary, ranks every chosen token in it, and carries ids, logprobs and ranks
through objects per token. Here each token has one number: a vector per step goes to the host, the scheduler takes each
request's float from it (`slice_request`), and the request's output holds a list. Requests for the likeliest tokens get
two more vectors per token.

Both model runners of vLLM draw with it: `runner_v1.py` and `runner_v2.py` say what the requests of a step ask for.

Shape suffixes: b requests of a step, a those of them that ask for the likeliest, k how many, v vocabulary.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.sampling.prompt_scores import PromptScores
from tinker_local.backend.vllm_engine.compat_vllm import SAMPLED_TEMPERATURE_MIN, top_k_top_p

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
    """Logprobs of a vocabulary, one row for each request."""

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logprobs, float32 [B], of one token (int64 [B]) for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """float32 [B, V], rows sum to 1; those of chosen tokens are greater than 0."""

    p_bv: torch.Tensor

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        return self.p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).log()


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """[B, V] of any floating dtype."""

    logits_bv: torch.Tensor

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


class TimedLogprobs(list[StepLogprob]):
    """Of the tokens of one sequence. `since`: of `time.monotonic`, when the first one came; 0: not yet."""

    since = 0.0


@dataclass(slots=True, eq=False)
class RequestLogprobs:
    """In place of vLLM's `LogprobsProcessor`; a request's final output has `logprobs` of its sampled tokens, and the
    answers about its prompt in `prompt_logprobs`."""

    logprobs: TimedLogprobs = field(default_factory=TimedLogprobs)
    prompt_logprobs: PromptScores | None = None
    prompt_token_id_logprobs: None = None
    cumulative_logprob: None = None

    def update_from_output(self, output: Any) -> None:
        """Add what one step gave (`EngineCoreOutput`)."""
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
            self.logprobs.since = self.logprobs.since or time.monotonic()
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


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the requests of a step ask for, one row each; tensors are on the device of the logits.

    `temperature_b`: float32 [B]; rows below `SAMPLED_TEMPERATURE_MIN` take the likeliest token. None if all do.
    `some_greedy`: whether any row may. `top_k_b`, `top_p_b`: [B], or None where no request cuts. `generators`: of the
    requests with a seed, by row. `widths`: how many of the likeliest tokens requests ask for, by row. `lower`: applies
    penalties to logits, float32 [B, V], in place; None without any.
    """

    temperature_b: torch.Tensor | None
    some_greedy: bool
    top_k_b: torch.Tensor | None = None
    top_p_b: torch.Tensor | None = None
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)
    lower: Callable[[torch.Tensor], None] | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but temperatures is asked for."""
        cut = self.top_k_b is not None or self.top_p_b is not None
        return not (cut or self.generators or self.widths or self.lower)


class FullVocabularyDraw:
    """In place of vLLM's samplers.

    Logprobs are log softmax(logits / T) after penalties and before top-k and top-p, from the probabilities that the
    draw needs anyway: one softmax per step. Greedy rows are divided by 1. On CUDA most steps need neither:
    `one_pass_draw`.

    Unseeded requests draw from separate generators, seeded by the operating system: samples do not repeat when the
    program seeds torch's global generator, and do not change that program's random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_kernel = device.type == "cuda"
        self._unseeded = torch.Generator(device)
        self._unseeded.seed()
        self._seeds = torch.Generator()
        self._seeds.seed()

    def seed(self, seed: int) -> None:
        """Draw for unseeded requests as every other rank of this engine does."""
        self._unseeded.manual_seed(seed)
        self._seeds.manual_seed(seed)

    def __call__(self, logits_bv: torch.Tensor, asked: Asked) -> tuple[torch.Tensor, ChosenLogprobs]:
        """Token ids, int32 [B], and their logprobs. May change the logits, of any floating dtype."""
        if self._has_kernel and asked.plain:
            return self._in_one_pass(logits_bv, asked.temperature_b)
        logits_bv = logits_bv.float()
        if asked.lower is not None:
            asked.lower(logits_bv)
        scores: Scores
        if asked.temperature_b is None:
            ids_b, scores = logits_bv.argmax(dim=-1), Logits(logits_bv)
            likeliest = _likeliest(logits_bv, asked)
        else:
            greedy_b = logits_bv.argmax(dim=-1) if asked.some_greedy else None
            samples_b = asked.temperature_b >= SAMPLED_TEMPERATURE_MIN
            logits_bv.div_(asked.temperature_b.where(samples_b, 1.0).unsqueeze(-1))
            p_bv = logits_bv.softmax(dim=-1, dtype=torch.float32)
            likeliest = _likeliest(logits_bv, asked)
            ids_b, scores = self._drawn(logits_bv, p_bv, asked), Probabilities(p_bv)
            if greedy_b is not None:
                ids_b = ids_b.where(samples_b, greedy_b)
        return ids_b.int(), ChosenLogprobs(scores.of(ids_b), likeliest)

    def _in_one_pass(
        self, logits_bv: torch.Tensor, temperature_b: torch.Tensor | None
    ) -> tuple[torch.Tensor, ChosenLogprobs]:
        """Reads the logits once."""
        from tinker_local.backend.vllm_engine.one_pass_draw import draw

        if temperature_b is None:
            temperature_b = torch.zeros(len(logits_bv), device=logits_bv.device)
        ids_b, logprobs_b = draw(logits_bv, temperature_b, int(torch.randint(2**62, (), generator=self._seeds)))
        return ids_b, ChosenLogprobs(logprobs_b)

    def _drawn(self, logits_bv: torch.Tensor, p_bv: torch.Tensor, asked: Asked) -> torch.Tensor:
        """Ids int64 [B] from `p_bv`, the probabilities of `logits_bv`, after top-k and top-p, which cut the logits."""
        drawn = []
        for start in range(0, len(p_bv), ROWS):
            rows = slice(start, start + ROWS)
            kept_bv = p_bv[rows]
            if asked.top_k_b is not None or asked.top_p_b is not None:
                # Cuts in place; the logits are not needed after this.
                cut_bv = top_k_top_p(on_cpu=not self._has_kernel)(
                    logits_bv[rows],
                    None if asked.top_k_b is None else asked.top_k_b[rows],
                    None if asked.top_p_b is None else asked.top_p_b[rows],
                )
                kept_bv = kept_bv.masked_fill(cut_bv == -torch.inf, 0.0)
            seeded = asked.generators.keys() & range(rows.start, rows.stop)
            drawn.append(self._draw(kept_bv, {row - start: asked.generators[row] for row in seeded}))
        return torch.cat(drawn)

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

    def past(self, seed: int, draws: int, width: int) -> torch.Generator:
        """A generator of a request with `seed` that has sampled `draws` tokens of a vocabulary of `width`."""
        generator = torch.Generator(self._unseeded.device)
        generator.manual_seed(seed)
        if not draws:
            return generator
        if not self._has_kernel:
            torch.rand(draws, dtype=torch.float64, generator=generator)
            return generator
        torch.empty(width, device=generator.device).exponential_(generator=generator)
        generator.set_offset(draws * generator.get_offset())
        return generator


def _likeliest(logits_bv: torch.Tensor, asked: Asked) -> Likeliest | None:
    return Likeliest.of(logits_bv, asked.widths) if asked.widths else None
