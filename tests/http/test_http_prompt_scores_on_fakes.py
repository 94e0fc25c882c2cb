"""Every question about a prompt through the official SDK: what its users send, and what it decodes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.fakes.fake_model import log_softmax
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines

MODEL = FakeModel("fake/bigram")
TOKENS = [5, 9, 20, 33, 7, 120]
PROMPT = tinker.ModelInput.from_ints(TOKENS)
LOG_P = log_softmax(MODEL.base[TOKENS[:-1]])
"""[P - 1, V]"""


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.SamplingClient]:
    def load(source: ModelSource, options: BackendOptions) -> Engines:
        return Engines(FakeRenderer(MODEL), FakeTrainer(MODEL), FakeSampler(MODEL), arch="fake", tolerance=1e-4)

    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    backend = InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load)
    server = LoopbackServer(backend)
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
        yield client.create_sampling_client(base_model="fake/bigram")
    server.close()


def sample(sampler: Any, num_samples: int = 1, **options: Any) -> Any:
    params = tinker.SamplingParams(max_tokens=3, seed=1, stop=[])
    return sampler.sample(PROMPT, num_samples, params, **options).result(timeout=60)


def test_topk_on_fakes(sampler: Any) -> None:
    output = sample(sampler, 2, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1:] == pytest.approx([LOG_P[r, t] for r, t in enumerate(TOKENS[1:])], abs=1e-5)
    assert output.topk_prompt_logprobs[0] is None
    for row, pairs in enumerate(output.topk_prompt_logprobs[1:]):
        assert [token for token, _ in pairs] == np.argsort(-LOG_P[row])[:3].tolist()
        assert [logprob for _, logprob in pairs] == pytest.approx(np.sort(LOG_P[row])[:-4:-1].tolist(), abs=1e-5)
    for sequence in output.sequences:
        before = [TOKENS[-1], *sequence.tokens[:-1]]
        for previous, pairs in zip(before, sequence.topk_logprobs, strict=True):
            expected = log_softmax(MODEL.base[previous])
            assert [token for token, _ in pairs] == np.argsort(-expected)[:2].tolist()
            assert [logprob for _, logprob in pairs] == pytest.approx(np.sort(expected)[:-3:-1].tolist(), abs=1e-5)


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_targets_on_fakes(sampler: Any, layout: str) -> None:
    ids = torch.full((5, 4), -1)
    ids[1, 0], ids[1, 3], ids[4, 2] = 77, 0, 500
    tensors = tinker.TensorData
    asked = tensors.from_torch(ids) if layout == "dense" else tensors.from_torch_sparse(ids, pad_value=-1)
    answer = sample(sampler, target_prompt_logprobs=asked).target_prompt_logprobs
    assert (answer.sparse_crow_indices is None) == (layout == "dense")
    expected = np.zeros((5, 4))
    expected[1, 0], expected[1, 3], expected[4, 2] = LOG_P[1, 77], LOG_P[1, 0], LOG_P[4, 500]
    np.testing.assert_allclose(answer.to_torch().numpy(), expected, atol=1e-5)


def test_last_n_on_fakes(sampler: Any) -> None:
    output = sample(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2)
    assert output.prompt_logprobs[:4] == [None] * 4
    assert output.prompt_logprobs[4:] == pytest.approx([LOG_P[3, 7], LOG_P[4, 120]], abs=1e-5)
    assert output.topk_prompt_logprobs[:4] == [None] * 4
    assert [pairs[0][0] for pairs in output.topk_prompt_logprobs[4:]] == LOG_P[3:].argmax(1).tolist()


def test_alternative_tokens_on_fakes(sampler: Any) -> None:
    first, again = (sample(sampler, prompt_alt_tokens_k=50).prompt_alt_tokens for _ in range(2))
    tokens = first.tokens.to_torch().numpy()
    assert tokens.shape == (5, 50)
    np.testing.assert_allclose(first.logprobs.to_torch().numpy(), np.take_along_axis(LOG_P, tokens, 1), atol=1e-5)
    assert np.array_equal(tokens, again.tokens.to_torch().numpy())
    assert len(set(tokens[0].tolist())) > 5


def test_prompt_of_one_token_has_no_alternatives_on_fakes(sampler: Any) -> None:
    params = tinker.SamplingParams(max_tokens=1)
    output = sampler.sample(tinker.ModelInput.from_ints([5]), 1, params, prompt_alt_tokens_k=3).result(timeout=60)
    assert output.prompt_alt_tokens.tokens.to_torch().shape == (0, 3)


def test_what_cannot_be_answered_is_refused_with_the_numbers_on_fakes(sampler: Any) -> None:
    for options, message in (
        ({"prompt_alt_tokens_k": 10**7}, "prompt_alt_tokens_k: 6 prompt tokens times 10000000 are 60000000"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 6}, "6 is not between 1 and 5"),
        ({"target_prompt_logprobs": tinker.TensorData.from_torch(torch.zeros(6, 1, dtype=torch.int64))}, r"\[6, 1\]"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            sample(sampler, **options)


def test_a_prompt_that_fills_the_context_is_scored_and_no_token_follows_it_on_fakes(sampler: Any) -> None:
    """As `compute_logprobs` asks for a sample that the context has ended."""
    context = MODEL.max_context_length
    params = tinker.SamplingParams(max_tokens=8, seed=1, stop=[])
    prompt = [5 + index % 90 for index in range(context - 8)]
    (sequence,) = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params).result(timeout=60).sequences
    whole = tinker.ModelInput.from_ints([*prompt, *sequence.tokens])
    assert whole.length == context
    assert sampler.compute_logprobs(whole).result()[-8:] == pytest.approx(sequence.logprobs, abs=1e-5)
    assert sampler.compute_logprobs(whole, prompt_logprobs_last_n=8).result()[-8:] == pytest.approx(
        sequence.logprobs, abs=1e-5
    )
    one = tinker.SamplingParams(max_tokens=1)
    output = sampler.sample(whole, 1, one, topk_prompt_logprobs=2, topk_sample_logprobs=2).result(timeout=60)
    assert len(output.topk_prompt_logprobs) == context
    assert [(each.tokens, each.stop_reason) for each in output.sequences] == [([], "length")]
    refusals: list[Callable[[], Any]] = [
        lambda: sampler.sample(whole, 1, one),
        lambda: sampler.sample(whole, 2, one, include_prompt_logprobs=True),
        lambda: sampler.sample(whole, 1, params, include_prompt_logprobs=True),
        lambda: sampler.compute_logprobs(tinker.ModelInput.from_ints([5, *whole.to_ints()])),
    ]
    for refused in refusals:
        with pytest.raises(tinker.BadRequestError, match="exceeds the model's context window"):
            refused().result(timeout=60)


def test_all_off_gives_none_of_it_on_fakes(sampler: Any) -> None:
    output = sample(sampler)
    assert output.prompt_logprobs is None
    assert output.topk_prompt_logprobs is None
    assert output.target_prompt_logprobs is None
    assert output.prompt_alt_tokens is None
    assert output.sequences[0].topk_logprobs is None
