"""Adapters compute the same as PEFT on transformers' own forward, with files that PEFT loads."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import LoraConfig

from tests.float64 import InFloat64, assert_as_near

VISION = ("qwen2_5_vl", "qwen3_vl")
CONFIGS = {
    "all": {},
    "attention": {"train_mlp": False, "train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
    "unembed": {"train_attn": False, "train_mlp": False},
}


def peft_model(path: Path, state: Any, dtype: torch.dtype, folder: Path) -> Any:
    """The model with the adapter's files loaded by PEFT; every tensor must find its place."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(state.peft_config()))
    save_file(dict(state.tensors), folder / "adapter_model.safetensors")
    auto = transformers.AutoModelForCausalLM if "vl" not in path.name else transformers.AutoModelForImageTextToText
    base = auto.from_pretrained(path, dtype=dtype).eval()
    model = peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()
    assert peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys() == state.tensors.keys()
    return model


def peft_logprobs(model: Any, datum: TrainDatum) -> torch.Tensor:
    token_ids = torch.from_numpy(datum.input.token_ids.astype(np.int64))[None]
    arguments = {}
    if datum.input.images:
        images = [placement.image for placement in datum.input.images]
        is_image = torch.zeros_like(token_ids, dtype=torch.int32)
        for placement in datum.input.images:
            is_image[0, placement.offset : placement.offset + placement.image.num_tokens] = 1
        arguments = {
            "pixel_values": torch.from_numpy(np.concatenate([image.pixel_values for image in images])),
            "image_grid_thw": torch.tensor([image.grid_thw for image in images]),
            "mm_token_type_ids": is_image,
        }
    logits = model(input_ids=token_ids, **arguments).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "scale-without-rank",
    "Adapter.__init__",
    "self.scale = LORA_ALPHA / config.rank",
    "self.scale = 1.0",
    cases=("qwen3-attention-float64",),
)
@pytest.mark.mutation(
    "scale-forgotten-in-the-gradient",
    "LoraBatch.add_gradients",
    "columns.start : columns.stop], alpha=adapter.scale)",
    "columns.start : columns.stop])",
    cases=("qwen3-attention-float64",),
)
@pytest.mark.mutation(
    "residual-without-gradient",
    "TorchKernels.rms_norm_backward",
    "found if residual is None else residual + found",
    "found",
    cases=("qwen3-attention-float64",),
)
@pytest.mark.mutation(
    "trainers-positions",
    "text_position_ids",
    "np.arange(input.length, dtype=np.int64)[None]",
    "2 * np.arange(input.length, dtype=np.int64)[None]",
    cases=("qwen3-attention-float64",),
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied", "qwen2_5_vl", "qwen3_vl"])
def test_values_and_gradients_equal_peft(
    name: Any,
    config: Any,
    dtype: Any,
    trainer: Any,
    model_path: Any,
    make: Any,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    tmp_path: Path,
) -> None:
    """In float64; and in float32 about as nearly as PEFT's own float32 does."""
    ours = trainer(name, dtype=dtype)
    state = add_adapter(ours, "a", **CONFIGS[config])
    data = [make.datum(11), make.datum(5)]
    if name in VISION:
        data.append(make.datum(30, [(3, (4, 6)), (12, (4, 4))]))
        data.append(make.datum(9, [(0, (2, 4))]))
    with InFloat64() if dtype == "float64" else nullcontext():
        (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
    logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
    exact, of_gradients = values_of_peft(model_path(name), state, "float64", data, tmp_path / "float64")
    weights = np.concatenate([datum.loss_inputs["weights"] for datum in data])
    loss = -float((exact * weights).sum())
    if dtype == "float64":
        np.testing.assert_allclose(logprobs, exact, rtol=1e-7, atol=1e-7)
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-9)
        assert_close(gradients(ours, "a"), of_gradients, 1e-9)
        return
    theirs, their_gradients = values_of_peft(model_path(name), state, "float32", data, tmp_path / "float32")
    bound = assert_as_near({"logprobs": logprobs}, {"logprobs": theirs}, {"logprobs": exact})
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=bound * float(np.abs(weights).sum()))
    assert_as_near(gradients(ours, "a"), their_gradients, of_gradients)


def values_of_peft(
    path: Path, state: Any, dtype: str, data: list[TrainDatum], folder: Path
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logprobs of the targets of all data, and gradients of the adapter by name."""
    model = peft_model(path, state, getattr(torch, dtype), folder)
    with InFloat64() if dtype == "float64" else nullcontext():
        found = [peft_logprobs(model, datum) for datum in data]
        weights = [torch.from_numpy(datum.loss_inputs["weights"]) for datum in data]
        (-sum((each * weight).sum() for each, weight in zip(found, weights, strict=True))).backward()
    of_adapter = {
        key.replace(".default.", "."): parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return torch.cat(found).detach().numpy(), of_adapter


@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied", "qwen2_5_vl", "qwen3_vl"])
def test_files_have_the_names_of_transformers_modules(name: Any, trainer: Any) -> None:
    ours = trainer(name)
    ours.create_adapter("a", LoraConfig(rank=2))
    state = ours.capture("a", optimizer=False)
    decoder = "model.language_model" if name in VISION else "model"
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    modules = [f"{decoder}.layers.{layer}.{projection}" for layer in (0, 1) for projection in projections]
    wanted = {f"base_model.model.{m}.lora_{f}.weight" for m in [*modules, "lm_head"] for f in "AB"}
    assert state.tensors.keys() == wanted
    # If a frozen module shared a last name, PEFT would put adapters on the vision tower.
    whole_paths = name == "qwen2_5_vl"
    assert all(("." in module) == whole_paths for module in state.target_modules if module != "lm_head")
