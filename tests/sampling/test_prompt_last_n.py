"""`prompt_logprobs_last_n` leaves out what is before, and lets it come from the prefix cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.types import TensorData

from tests.sampling.sampling_answers import EVERYTHING, TEXT, ask, log_p, same_drawn, same_topk, targets


@pytest.mark.parametrize("last_n", [1, 7, 16, 39])
async def test_last_n_leaves_out_what_is_before(text: Any, last_n: int) -> None:
    prompt = text.prompt(TEXT)
    expected, first = log_p(text, prompt), 39 - last_n
    ids = targets((39, 2))
    output = await ask(
        text,
        prompt,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_logprobs_last_n=last_n,
        target_prompt_logprobs=TensorData.from_numpy(ids),
        prompt_alt_tokens_k=2,
    )
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[: first + 1]).all()
    text.same(output.prompt_logprobs[first + 1 :], text.hf.prompt_logprobs(prompt)[first:])
    same_topk(text, output.topk_prompt_logprobs, expected, first)
    # What else is asked is not restricted.
    assert output.target_prompt_logprobs is not None
    scored = expected.gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
    text.same(output.target_prompt_logprobs.to_numpy(), np.where(ids == -1, 0.0, scored))
    same_drawn(text, output, expected)


@pytest.mark.mutation(
    "scored-rows-read-from-the-cache",
    "_UntilFirstRow.__init__",
    "self.num_tokens = first_row + 1  #",
    "self.num_tokens = request.num_tokens  #",
)
@pytest.mark.parametrize("with_adapter", [False, True])
async def test_last_n_reads_the_prefix_from_the_cache(
    vl: Any, tmp_path: Path, noise: Callable[..., Any], with_adapter: bool
) -> None:
    """All whole blocks before the first row that is asked for; also what comes before the first id that is named."""
    thread, engine = vl.sampler._thread, vl.sampler._engine
    block = thread.call(engine, lambda vllm: vllm.vllm_config.cache_config.block_size).result(10)
    adapter = vl.adapter(tmp_path / "v1", EVERYTHING, 4) if with_adapter else None
    version = adapter and adapter.version
    ids = np.random.default_rng(5 + with_adapter).integers(0, 300, 5 * block).tolist()
    prompt = vl.prompt(ids[:30], noise(70, 70, 40), ids[30:])
    await ask(vl, prompt, version)
    expected = log_p(vl, prompt, adapter)
    rows = len(expected)
    chosen = expected.gather(1, torch.from_numpy(prompt.token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    for first_row in (rows - 1, 4 * block, 2 * block + 1, 2 * block, 2 * block - 1, block // 2, 0):
        output = await ask(
            vl, prompt, version, prompt_logprobs=True, prompt_logprobs_last_n=rows - first_row, topk_prompt_logprobs=2
        )
        assert output.prompt_cache_hit_tokens == first_row // block * block
        assert output.prompt_logprobs is not None
        vl.same(output.prompt_logprobs[first_row + 1 :], chosen[first_row:])
        same_topk(vl, output.topk_prompt_logprobs, expected, first_row)
    named = np.full((rows, 1), -1)
    named[3 * block + 5 :] = 7
    output = await ask(vl, prompt, version, target_prompt_logprobs=TensorData.from_numpy(named))
    assert output.prompt_cache_hit_tokens == 3 * block
    assert output.target_prompt_logprobs is not None
    scored = output.target_prompt_logprobs.to_numpy()[:, 0]
    assert not scored[: 3 * block + 5].any()
    vl.same(scored[3 * block + 5 :], expected[3 * block + 5 :, 7].numpy())
