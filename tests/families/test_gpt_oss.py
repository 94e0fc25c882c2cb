"""What gpt-oss alone has; the rest is in `test_experts.py`."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker_local.backend.models.model_folder import look_at
from tinker_local.backend.options import ModelSource
from tinker_local.backend.tiny_models import TextShape, make_tiny_text_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.vllm_experts import interleaving
from tinker_local.types import UnsupportedError

ROOT = Path(__file__).parents[2]
PUBLISHED = "openai/gpt-oss-20b"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(seed: int, shape: tuple[int, int, int]) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.float32]]:
    """Random blocks of 32 numbers with one scale each, by OCP's definition, and the numbers, [E, out, in]."""
    rng, (count, height, width) = np.random.default_rng(seed), shape
    codes = rng.integers(0, 16, (count, height, width // 32, 32), dtype=np.uint8)
    scales = rng.integers(122, 126, (count, height, width // 32), dtype=np.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    numbers = FP4[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    files = {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}
    return files, numbers.reshape(shape).astype(np.float32)


@pytest.mark.parametrize("add_inputs", [True, False])
def test_adapters_of_gate_and_up_change_numbers_that_take_turns(add_inputs: bool) -> None:
    """With kernels of vLLM that have gate first, as its versions up to 0.26 do, and as they are for other models."""

    def add(self: Any, context: Any, *, y: torch.Tensor, add_inputs: bool, change: torch.Tensor) -> str:
        y.copy_(y + change if add_inputs else change)
        return "what vLLM returns"

    change, before = torch.tensor([[1.0, 2, 3, 10, 20, 30]]), torch.full((1, 6), 100.0 if add_inputs else 7)
    for activation, expected in {"swigluoai": [1, 10, 2, 20, 3, 30], "silu": [1, 2, 3, 10, 20, 30]}.items():
        experts = SimpleNamespace(moe_config=SimpleNamespace(activation=SimpleNamespace(value=activation)))
        y = before.clone()
        context = SimpleNamespace(w13_num_slices=2)
        found = interleaving(add)(experts, context, y=y, add_inputs=add_inputs, change=change)
        assert found == "what vLLM returns"
        assert y.tolist() == [[value + 100 * add_inputs for value in expected]]


def test_mxfp4_is_refused_and_what_the_documentation_makes_of_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts' numbers are those of MXFP4 exactly."""
    folder = make_tiny_text_model(tmp_path / "mxfp4", family="gpt_oss", shape=TextShape(intermediate_size=256))
    tensors, numbers = load_file(folder / "model.safetensors"), dict[str, npt.NDArray[np.float32]]()
    for seed, name in enumerate(name for name in [*tensors] if name.endswith(("experts.gate_up_proj", "down_proj"))):
        count, inputs, outputs = tensors.pop(name).shape
        files, numbers[name] = mxfp4(seed, (count, outputs, inputs))
        tensors |= {f"{name}_{kind}": tensor for kind, tensor in files.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))

    (problem,) = look_at(ModelSource("tiny", str(folder))).problems
    assert "docs/supported.md" in problem
    with pytest.raises(UnsupportedError, match=r"docs/supported\.md"):
        HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu"))

    page = (ROOT / "docs/supported.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Mxfp4Config" in block)
    monkeypatch.chdir(tmp_path)
    exec(code.replace(PUBLISHED, str(folder)), {})
    written = tmp_path / "gpt-oss-20b-bf16"
    assert look_at(ModelSource("tiny", str(written))).problems == []
    trainer: Any = HFTrainer(TrainerConfig(str(written), name="tiny", dtype="float32", device="cpu"))
    held = dict(trainer._loaded.model.named_parameters())
    for name, expected in numbers.items():
        np.testing.assert_array_equal(held[name].numpy(), expected.transpose(0, 2, 1), err_msg=name)
