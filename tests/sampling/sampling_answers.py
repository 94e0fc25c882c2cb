"""What a request asks beside its samples, and whether the answers are HF's in float32."""

from typing import Any

import numpy as np
import torch
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import SampleOutput, SamplingParams, TensorData

TEXT = list(range(20, 60))
EMPTY = (0, -99999.0)
EVERYTHING = r"self_attn\.(q|k|v|o)_proj$|mlp\.(gate|up|down)_proj$|^lm_head$"


async def ask(served: Any, prompt: Any, version: Any = None, **options: Any) -> SampleOutput:
    params = options.pop("params", SamplingParams(max_tokens=1))
    result: SampleOutput = await served.sampler.sample(SampleWork(prompt, version, params, **options))
    return result


def log_p(served: Any, prompt: Any, adapter: Any = None) -> torch.Tensor:
    """[P - 1, V]"""
    with served.hf.merged(adapter):
        result: torch.Tensor = served.hf.logits(prompt)[:-1].log_softmax(-1)
    return result


def same_topk(served: Any, topk: Any, expected: torch.Tensor, first_row: int = 0) -> None:
    """`topk` [P, k] has the likeliest of `expected` [P - 1, V] from `first_row` on and nothing before."""
    k = topk.token_ids.shape[1]
    assert topk.token_ids.shape == (len(expected) + 1, k)
    assert (topk.token_ids[: first_row + 1] == EMPTY[0]).all()
    assert (topk.logprobs[: first_row + 1] == EMPTY[1]).all()
    ids = torch.from_numpy(topk.token_ids[first_row + 1 :].astype(np.int64))
    assert all(len(set(row.tolist())) == k for row in ids)
    served.same(topk.logprobs[first_row + 1 :], expected[first_row:].topk(k).values.numpy())
    served.same(topk.logprobs[first_row + 1 :], expected[first_row:].gather(1, ids).numpy())


def targets(shape: tuple[int, int], seed: int = 0, share: float = 0.5) -> np.ndarray:
    """Random ids below 300, -1 in some cells."""
    random = np.random.default_rng(seed)
    return np.where(random.random(shape) < share, random.integers(0, 300, shape), -1)


def sparse(ids: np.ndarray) -> TensorData:
    rows, columns = np.nonzero(ids != -1)
    crow = np.searchsorted(rows, np.arange(len(ids) + 1))
    return TensorData(
        data=ids[rows, columns], dtype="int64", shape=ids.shape, sparse_crow_indices=crow, sparse_col_indices=columns
    )


def same_sampled_topk(served: Any, prompt: Any, sequence: Any, temperature: float, k: int, adapter: Any = None) -> None:
    with served.hf.merged(adapter):
        logits = served.hf.logits(prompt, sequence.tokens.tolist())[prompt.length - 1 : -1]
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    scale = 1 / (temperature or 1.0)
    chosen = torch.from_numpy(sequence.tokens.astype(np.int64))[:, None]
    served.same(sequence.logprobs, expected.gather(1, chosen)[:, 0].numpy(), scale)
    topk = sequence.topk_logprobs
    assert topk.token_ids.shape == (sequence.tokens.size, k)
    served.same(topk.logprobs, expected.topk(k).values.numpy(), scale)
    ids = torch.from_numpy(topk.token_ids.astype(np.int64))
    assert all(len(set(row.tolist())) == k for row in ids)
    served.same(topk.logprobs, expected.gather(1, ids).numpy(), scale)


def same_drawn(served: Any, output: SampleOutput, expected: torch.Tensor) -> np.ndarray:
    """The drawn tokens [P - 1, k], whose logprobs are the model's at temperature 1."""
    assert output.prompt_alt_tokens is not None
    drawn, logprobs = output.prompt_alt_tokens.tokens, output.prompt_alt_tokens.logprobs
    assert (drawn.dtype, logprobs.dtype) == ("int64", "float32")
    assert drawn.shape == logprobs.shape
    tokens: np.ndarray = drawn.to_numpy()
    served.same(logprobs.to_numpy(), expected.gather(1, torch.from_numpy(tokens.copy())).numpy())
    return tokens
