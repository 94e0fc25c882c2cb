"""An adapter that comes from PEFT or from an export samples and trains on real engines as it did where it was made."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tinker_local.backend.exporting import export_checkpoint, import_adapter
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

from tests.conftest import TEXT, VISION
from tests.e2e.conftest import SdkDriver
from tests.float64 import assert_near, exactly

TOKENS = [5, 90, 33, 7, 120, 64, 81, 12, 250, 41]
DATUM = Datum(model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:]})


def scores(sdk: SdkDriver, sampler_path: str) -> np.ndarray:
    """The sampler's logprobs of `TOKENS`."""
    found = sdk.score(sdk.service.create_sampling_client(model_path=sampler_path), ModelInput.from_ints(TOKENS))
    return np.asarray(found[1:])


def trained(sdk: SdkDriver, model: Any) -> np.ndarray:
    """The trainer's."""
    (found,), _ = sdk.gradient(model, [DATUM], "cross_entropy", forward_only=True)
    return np.asarray(found)


@pytest.mark.parametrize("name", [TEXT, VISION])
def test_what_was_exported_and_imported_has_the_same_logprobs_and_trains_on_alike(
    real_sdk: SdkDriver, real_server: Any, tmp_path: Path, name: str
) -> None:
    sdk = real_sdk
    model = sdk.create(name, LoraConfig(rank=8, seed=2))
    for _ in range(2):
        sdk.gradient(model, [DATUM], "cross_entropy")
        sdk.step(model, AdamParams(learning_rate=0.02))
    path = sdk.save(model, "exported")
    sampler_path = model.save_weights_for_sampler("exported").result().path
    export_checkpoint(path, tmp_path / "peft", to="peft", data_dir=real_server.data_dir, check=False)
    imported = import_adapter(tmp_path / "peft", model=name, url=real_server.url)
    assert imported.notes == ()
    before, resumed = trained(sdk, model), sdk.resume(imported.path, optimizer=False)
    np.testing.assert_allclose(trained(sdk, resumed), before, atol=1e-6, rtol=0)
    np.testing.assert_allclose(scores(sdk, imported.sampler_path), scores(sdk, sampler_path), atol=1e-6, rtol=0)
    from_state = sdk.resume(path, optimizer=False)
    for again in (resumed, from_state):
        sdk.gradient(again, [DATUM], "cross_entropy")
        sdk.step(again, AdamParams(learning_rate=0.02))
    np.testing.assert_allclose(trained(sdk, resumed), trained(sdk, from_state), atol=1e-6, rtol=0)
    assert np.abs(trained(sdk, resumed) - before).max() > 0.01


def test_what_peft_wrote_samples_and_trains_as_pefts_model(
    real_sdk: SdkDriver, real_server: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    sdk = real_sdk
    torch.manual_seed(4)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_models[TEXT], dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    wrapped = peft.get_peft_model(base, config).eval()
    for weight_name, weight in wrapped.named_parameters():
        if "lora_B" in weight_name:
            torch.nn.init.normal_(weight, std=0.3)
    wrapped.save_pretrained(str(tmp_path))
    wrapped.double()

    @torch.no_grad()
    def of_peft() -> np.ndarray:
        logits = wrapped(input_ids=torch.tensor([TOKENS])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()

    expected, moved = exactly(of_peft)
    imported = import_adapter(tmp_path, model=TEXT, name="from-peft", url=real_server.url)
    assert "B was multiplied by 0.5, exactly" in imported.notes[-1]
    assert_near(scores(sdk, imported.sampler_path), expected, moved)
    model = sdk.resume(imported.path, optimizer=False)
    assert_near(trained(sdk, model), expected, moved)
    sdk.gradient(model, [DATUM], "cross_entropy")
    sdk.step(model, AdamParams(learning_rate=0.01))
    assert trained(sdk, model).sum() > expected.sum() + 0.1
    sample = sdk.service.create_sampling_client(model_path=imported.sampler_path)
    assert len(sdk.sample(sample, ModelInput.from_ints(TOKENS), 2, SamplingParams(max_tokens=3))) == 2
