"""Servers of models that see on a GPU, as they start there: bfloat16, CUDA graphs, one copy of the weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinker_local.backend.tiny_models import make_experts_alike
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.types import LoraConfig, ModelInput, SamplingParams

from tests.conftest import start_server
from tests.e2e.conftest import SdkDriver
from tests.e2e.seeing_inputs import inputs_of, read_pictures
from tests.e2e.test_agreement import sampler_logprobs, train, trainer_logprobs
from tests.e2e.test_models_that_see import SERVED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COPIES = ("glm4v_moe", "gemma4", "gemma4_dense", "gemma4_moe")
"""Architectures whose trainer and sampler have a copy of the weights each."""


def known(logprobs: list[np.ndarray]) -> np.ndarray:
    """Of all inputs, where the next position is text."""
    found = np.concatenate(logprobs)
    return found[np.isfinite(found)]


@pytest.mark.parametrize("architecture", SERVED)
def test_a_server_in_bfloat16_agrees_with_its_trainer(architecture: str, tmp_path: Path) -> None:
    """Rounding may send a token to another expert, so the mean over positions counts. `slope` is the sampler's change
    by training along the trainer's: 0 for a sampler that ignores the adapter."""
    folder = make_tiny_seeing_model(tmp_path / architecture, architecture)
    if architecture == "gemma4_moe":  # rounding alone moves it by 0.6 nats, more than a start allows
        make_experts_alike(folder)
    server = start_server(
        tmp_path / "data", "--model", f"tiny/sees={folder}", "--max-rank", "8", "--kv-cache", "0.5", "--train-vision"
    )
    try:
        sdk, inputs = SdkDriver(server.url), inputs_of(read_pictures(folder))
        client = sdk.create("tiny/sees", LoraConfig(rank=4, seed=4))
        before = known(trainer_logprobs(client, inputs)), known(sampler_logprobs(sdk.base_sampler("tiny/sees"), inputs))
        train(client, inputs, 3)
        sampler = client.save_weights_and_get_sampling_client()
        after = known(trainer_logprobs(client, inputs)), known(sampler_logprobs(sampler, inputs))
        noise, gap = (float(np.abs(ours - theirs).mean()) for ours, theirs in (before, after))
        wanted, found = after[0] - before[0], after[1] - before[1]
        effect, slope = float(np.abs(wanted).mean()), float(found @ wanted / (wanted @ wanted))
        print(f"{architecture}: noise {noise:.4f}, gap {gap:.4f}, effect {effect:.3f}, slope {slope:.3f}")
        assert effect > 0.1
        assert noise < 0.1
        assert gap < max(effect / 4, 1.5 * noise)
        assert 0.5 < slope < 1.5
        # Graphs of several sequences, and the logprob of each drawn token beside the trainer's.
        prompts = [ModelInput(chunks=each.chunks) for each, _ in inputs]
        drawn = [sdk.sample(sampler, each, 2, SamplingParams(max_tokens=6, seed=1, stop=())) for each in prompts]
        assert all(len(tokens) == 6 and np.isfinite(logprobs).all() for of in drawn for tokens, logprobs, _ in of)
        (told,) = (
            line for line in server.lines if "trainer and sampler share" in line or "a copy of the weights each" in line
        )
        print(told)
        assert ("trainer and sampler share" in told) == (architecture not in COPIES), told
    finally:
        status = server.stop()
    assert status == 0
