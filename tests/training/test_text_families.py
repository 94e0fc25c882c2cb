"""Llama, Mistral, Qwen2.5, Gemma 2 and Gemma 3 on the decoders that train them, against transformers and PEFT.

The models have windows of 16 positions, soft caps that take effect, and grouped heads; data are longer than the window.
"""

import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tinker_local.backend.training.model.attention import attend_backward
from tinker_local.backend.training.model.decoders.autograd import AutogradDecoder
from tinker_local.backend.training.model.decoders.recomputed_norm import RecomputedNorm
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutDecoder
from tinker_local.backend.training.model.lm_head import LmHead
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import UnsupportedError

from tests.float64 import InFloat64
from tests.training.autograd_reference import Hooked, attention_in_float64, norms_in_float64

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3_text")
DECODERS = [(family, decoder) for family in FAMILIES for decoder in ("written-out", "autograd")]
LENGTHS = (40, 7, 1, 40, 23)

every_decoder = pytest.mark.parametrize(("family", "decoder"), DECODERS)


def works_of(make: Any, adapters: Sequence[str]) -> list[TrainWork]:
    return [make.work(adapter_id, LENGTHS) for adapter_id in adapters]


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "norm-after-a-block-without-gradient",
    "NormAfter.backward",
    "return kernels.rms_norm_backward(grad, update, self.weight, self.epsilon, None)",
    "return grad.clone()",
    cases=("gemma2-written-out",),
)
@every_decoder
def test_several_adapters_in_one_row_equal_transformers_with_each_alone(
    family: str, decoder: Any, trainer: Any, make: Any, add_adapter: Any
) -> None:
    """Logprobs, loss, and gradients of every matrix of adapters of three ranks, in float64 to 1e-9."""
    ours = trainer(family, decoder=decoder, dtype="float64")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        ours._loaded.model.name_or_path, dtype=torch.float64
    ).requires_grad_(False)
    norms_in_float64(theirs)
    attention_in_float64(theirs)
    if decoder == "autograd":
        norms_in_float64(ours._loaded.model)
    for place, rank in enumerate((4, 1, 13)):
        add_adapter(ours, f"{place}", rank=rank, seed=place)
    hooked = Hooked(ours, theirs)
    works = works_of(make, "012")
    for work, result in zip(works, ours.forward_backward(works), strict=True):
        total = 0.0
        for datum, output in zip(work.data, result.outputs, strict=True):
            rows = hooked.logprobs(work.adapter_id, datum.input)
            logprobs = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
            np.testing.assert_allclose(output["logprobs"], logprobs.detach(), atol=1e-6)
            loss = -(torch.from_numpy(datum.loss_inputs["weights"]) * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-9)
        adapter = ours._adapters[work.adapter_id]
        wanted = hooked.gradients(work.adapter_id)
        for spec in adapter.specs:
            scale = float(wanted[spec.name].abs().max())
            assert scale > 0
            torch.testing.assert_close(spec.view(adapter.gradient), wanted[spec.name], rtol=0, atol=1e-9 * scale)


@every_decoder
def test_packed_sequences_equal_each_alone(
    family: str, decoder: Any, trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    ours = trainer(family, decoder=decoder, dtype="float64")
    add_adapter(ours, "a")
    (work,) = works_of(make, "a")
    (packed,) = ours.forward_backward([work])
    together = gradients(ours, "a")
    ours.discard_gradients("a")
    for datum, output in zip(work.data, packed.outputs, strict=True):
        (alone,) = ours.forward_backward([TrainWork("a", [datum], "cross_entropy")])
        np.testing.assert_allclose(output["logprobs"], alone.outputs[0]["logprobs"], rtol=1e-6, atol=1e-6)
    assert_close(together, gradients(ours, "a"), 1e-6)


@pytest.mark.rotated(3)
@every_decoder
def test_gradients_equal_peft_on_the_files_of_the_adapter(
    family: str,
    decoder: Any,
    trainer: Any,
    make: Any,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    tmp_path: Path,
) -> None:
    ours = trainer(family, decoder=decoder, dtype="float64")
    state = add_adapter(ours, "a")
    (work,) = works_of(make, "a")
    with InFloat64():
        (result,) = ours.forward_backward([work])

    (tmp_path / "adapter_config.json").write_text(json.dumps(state.peft_config()))
    save_file(dict(state.tensors), tmp_path / "adapter_model.safetensors")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        ours._loaded.model.name_or_path, attn_implementation="eager", dtype=torch.float64
    )
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True).double().eval()
    with InFloat64():
        loss = sum(
            -(peft_logprobs(theirs, datum) * torch.from_numpy(datum.loss_inputs["weights"])).sum()
            for datum in work.data
        )
        loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-9)
    wanted = {
        key.replace(".default.", "."): parameter.grad.numpy()
        for key, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert_close(gradients(ours, "a"), wanted, 1e-9)


def peft_logprobs(model: Any, datum: TrainDatum) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(datum.input.token_ids.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]


@pytest.mark.parametrize("family", ["gemma2", "qwen3_vl"])
def test_checkpointed_layers_of_autograd_give_the_same_gradients(
    family: str, trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    """With nothing kept, one layer kept and everything kept, also if image features are added between layers."""
    data = [make.datum(9), make.datum(30, [(2, (4, 4))] if family == "qwen3_vl" else [])]
    seen, policies = [], []
    for share in (0.0, 0.5, 1.0):
        ours = trainer(family, decoder="autograd", dtype="float64")
        memory = ours._loaded.decoder.memory(39, 16)
        kept = sum(layer.lean for layer in memory.layers)
        ours._runner.activation_bytes = memory.always + int(share * kept)
        add_adapter(ours, "a")
        policies.append(ours._loaded.decoder.memory(39, 16).policy(ours._runner.activation_bytes))
        ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen.append(gradients(ours, "a"))
    assert set(policies[0]) == {Keep.INPUT}
    assert set(policies[1]) == {Keep.INPUT, Keep.LEAN}, "this decoder has no large activations"
    assert set(policies[2]) == {Keep.ALL}
    for gradient in seen[:-1]:
        assert_close(gradient, seen[-1], 1e-6)


@pytest.fixture
def bytes_saved(
    trainer: Any,
    make: Any,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """Bytes per token that a layer keeps less without the modules that `recognised_by` finds, with the same gradients.
    `parts`: a constant of the decoders' folder and a value that cuts the row into several parts."""

    def saved(family: str, parts: tuple[str, int], recognised_by: str, dtype: str) -> int:
        kept, seen, data = [], [], [make.datum(9), make.datum(30)]
        decoders = "tinker_local.backend.training.model.decoders"
        monkeypatch.setattr(f"{decoders}.{parts[0]}", parts[1])
        for plain in (False, True):
            if plain:
                monkeypatch.setattr(f"{decoders}.autograd.{recognised_by}", lambda module: False)
            ours = trainer(family, decoder="autograd", dtype=dtype)
            add_adapter(ours, "a")
            kept.append(ours._loaded.decoder.memory(1, 0).layers[0].lean)
            ours.forward_backward([TrainWork("a", data, "cross_entropy")])
            seen.append(gradients(ours, "a"))
        assert_close(seen[0], seen[1], 1e-6)
        return int(kept[1] - kept[0])

    return saved


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_gated_mlp_keeps_gate_and_up_alone_with_the_same_gradients(
    family: str, bytes_saved: Callable[..., int]
) -> None:
    """The activation and the product are computed again, in place of the gradients of gate and up."""
    assert bytes_saved(family, ("gated_mlp._ROWS", 16), "is_gated", "float64") == 2 * 48 * 8


@pytest.mark.parametrize(
    ("family", "fewer"), [("llama", 2 * 132), ("gemma2", 4 * 132), ("gemma3_text", 732), ("qwen3", 352)]
)
def test_a_norm_in_bfloat16_keeps_its_input_and_no_float32_copy_with_the_same_gradients(
    family: str, fewer: int, bytes_saved: Callable[..., int]
) -> None:
    """`fewer`: two bytes for each number, and four for each row's reciprocal root."""
    assert bytes_saved(family, ("recomputed_norm._ELEMENTS", 256), "is_norm", "bfloat16") == fewer


def test_the_norm_of_heads_runs_backward_in_as_few_parts_as_that_of_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of 2,048 heads took 3 s of a step of an 8B model on a GPU."""
    monkeypatch.setattr("tinker_local.backend.training.model.decoders.recomputed_norm._ELEMENTS", 1 << 13)
    parts: list[int] = []

    def norm(x: torch.Tensor) -> torch.Tensor:
        parts.append(len(x))
        return x * 2

    for shape in ((16, 4096), (16, 32, 128)):
        x = torch.ones(shape, requires_grad=True)
        RecomputedNorm.apply(x, norm).sum().backward()
        assert x.grad is not None
        assert x.grad.eq(2).all()
    assert parts == [16, *8 * [2], 16, *8 * [64]]


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_layers_run_backward_without_hidden_states_and_their_gradient_in_memory(
    decoder: str, trainer: Any, make: Any, add_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    head = LmHead.logprobs_and_gradient

    def watched_head(self: LmHead, hidden: torch.Tensor, *rest: Any) -> Any:
        found = head(self, hidden, *rest)
        held.extend(weakref.ref(tensor) for tensor in (hidden, found[1]))
        return found

    def watched_attention(*given: Any) -> Any:
        alive.append(any(ref() is not None for ref in held))
        return attend_backward(*given)

    monkeypatch.setattr(LmHead, "logprobs_and_gradient", watched_head)
    for module in ("written_out.attention_block", "packed_attention"):
        monkeypatch.setattr(f"tinker_local.backend.training.model.decoders.{module}.attend_backward", watched_attention)
    ours = trainer("llama", decoder=decoder)
    add_adapter(ours, "a")
    ours.forward_backward([TrainWork("a", [make.datum(9)], "cross_entropy")])
    assert len(held) == 2
    assert alive == [False] * 3


def test_auto_takes_the_written_out_decoder_where_it_knows_the_layers(trainer: Any) -> None:
    for family in (*FAMILIES, "qwen3", "qwen3_vl"):
        assert isinstance(trainer(family)._loaded.decoder, WrittenOutDecoder), family


def test_a_model_that_the_chosen_decoder_cannot_train_is_refused_with_the_reason(
    trainer: Any, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """With another activation it has the autograd decoder."""
    folder = shutil.copytree(model_path("llama"), tmp_path / "relu")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(UnsupportedError, match=r"written-out .*layer.*0\.mlp: ReLU is none of silu, gelu_tanh"):
        HFTrainer(TrainerConfig(str(folder), name="relu", device="cpu", decoder="written-out"))
    assert isinstance(HFTrainer(TrainerConfig(str(folder), name="relu", device="cpu"))._loaded.decoder, AutogradDecoder)


def test_a_model_with_its_own_attention_is_refused(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers would let the sequences of a packed row see each other."""
    from transformers.models.llama import modeling_llama

    def eager(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.v_proj(hidden_states).repeat(1, 1, 2).cumsum(1)), None

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", eager)
    with pytest.raises(UnsupportedError, match="0 of 3 layers attend through the function that is registered"):
        trainer("llama")


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_a_model_that_computes_more_than_its_modules_show_is_refused(
    decoder: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor between the blocks, as in Granite, is not visible in the weights."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaDecoderLayer.forward

    def scaled(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factor = 0.3 if kwargs.get("packed") is None else 1.0
        return factor * original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", scaled)
    with pytest.raises(UnsupportedError, match=rf"{decoder} decoder cannot train it: its hidden states differ"):
        trainer("llama", decoder=decoder)
