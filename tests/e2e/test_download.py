"""What is downloaded is what was trained: the SDK's own command, against a server as users start it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.numpy import load_file

from tests.conftest import tinker_command

pytestmark = pytest.mark.skipif(not hasattr(tinker, "RestClient"), reason="this SDK downloads archives, which are gone")

TEXT, VISION = "tiny/text", "tiny/vision"
KEY_MAPPING = {
    TEXT: {r"^model\.unembed_tokens": "lm_head"},
    VISION: {r"^model\.(?=layers\.)": "model.language_model.", r"^model\.unembed_tokens": "lm_head"},
}
"""What PEFT has to be told of a tied head and of vision-language models (docs/futures-and-exports.md)."""
TOKENS = [21, 34, 55, 89, 17, 40, 63, 28]
TOLERANCE = 0.1 if torch.cuda.is_available() else 1e-4
"""Nats; on CUDA the trainer computes in bfloat16, and PEFT here in float32."""


@pytest.fixture(scope="module", params=[TEXT, VISION])
def trained(request: pytest.FixtureRequest, real_server: Any) -> tuple[str, str, np.ndarray, str]:
    """Tinker paths of a training checkpoint and of an export of the same weights, their logprobs of `TOKENS`, and the
    base model."""
    base_model: str = request.param
    service = tinker.ServiceClient(base_url=real_server.url, api_key="tml-local")
    client = service.create_lora_training_client(base_model=base_model, rank=4, seed=1)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:])},  # type: ignore[dict-item]
    )
    before = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    state = client.save_state("trained").result().path
    export = client.save_weights_external("export", ttl_seconds=7200).result().path
    after = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.abs(after - before).max() > 0.5
    return state, export, after, base_model


@pytest.mark.parametrize("which", ["weights", "external_weights"])
def test_checkpoint_downloaded_by_the_command_is_what_peft_loads_and_was_trained(
    real_server: Any, trained: Any, tiny_models: dict[str, Path], tmp_path: Path, which: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    name = trained[3]
    path = trained[0] if which == "weights" else trained[1]
    rest = tinker.RestClient(base_url=real_server.url, api_key="tml-local")
    before = {c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints}
    command = ("-f", "json", "checkpoint", "download", path, "--output", str(tmp_path))
    done = tinker_command(*command, url=real_server.url, api_key="tml-local", home=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Warning" not in done.stderr
    (folder,) = [config.parent for config in tmp_path.rglob("adapter_config.json")]
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, name)
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert "base_model.model.model.unembed_tokens.lora_B.weight" in names  # both models tie their heads
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert {c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints} == before
    auto = AutoModelForCausalLM if name == TEXT else AutoModelForImageTextToText
    base = auto.from_pretrained(tiny_models[name], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder), key_mapping=KEY_MAPPING[name]).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    logprobs = logits.log_softmax(-1)[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])].numpy()
    np.testing.assert_allclose(logprobs, trained[2], atol=TOLERANCE, rtol=0)


def test_urls_of_an_export_are_of_the_server_and_listed_with_its_kind(real_server: Any, trained: Any) -> None:
    rest = tinker.RestClient(base_url=real_server.url, api_key="tml-local")
    found = rest.get_external_weights_urls(trained[1]).result()
    assert found.urls.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(url.startswith(f"{real_server.url}/api/v1/") for url in found.urls.values())
    listed = rest.list_checkpoints(trained[1].split("/")[2]).result().checkpoints
    assert {c.checkpoint_type for c in listed if c.tinker_path == trained[1]} == {"external"}
    for path in (trained[0], trained[1].replace("export", "none")):
        with pytest.raises((tinker.NotFoundError, ValueError)):
            rest.get_external_weights_urls(path).result()
