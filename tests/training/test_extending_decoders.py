"""docs/extending.md is true: its block and its kind of frozen matrix train as they stand there, registered here
alone."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.training.lora.lora import AdapterSlice, groups_of
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.decoders.written_out import take_layers
from tinker_local.backend.training.model.decoders.written_out.attention_block import AttentionBlock
from tinker_local.backend.training.model.decoders.written_out.block import RowContext
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weights.kinds import KINDS, maker_of
from tinker_local.types import LoraConfig, UnsupportedError

from tests.training.autograd_reference import norms_in_float64
from tests.training.conftest import TEXT, Maker
from tests.training.test_live_memory import Live

Guide = Callable[[str], ModuleType]


@pytest.fixture
def arcee(tmp_path: Path) -> Path:
    settings = {**TEXT, "intermediate_size": 512, "head_dim": 8, "initializer_range": 0.2, "attention_bias": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ArceeForCausalLM(transformers.ArceeConfig(**settings))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # which transformers makes 0
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "arcee")
    return tmp_path / "arcee"


def gradient(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Of an adapter whose B is not 0, by the names of its parameters, in float64."""
    config = TrainerConfig(str(folder), name="m", dtype="float64", device="cpu", micro_batch_tokens=32, **settings)
    trainer = HFTrainer(config)
    norms_in_float64(trainer._loaded.model)
    trainer.create_adapter("a", LoraConfig(rank=4, seed=1))
    adapter = trainer._adapters["a"]
    noise = np.random.default_rng(3).standard_normal(len(adapter.weights))
    adapter.weights.add_(torch.from_numpy(noise * 0.05))
    trainer.forward_backward([Maker(np.random.default_rng(4)).work("a", [9, 21, 14])])
    assert adapter.gradient is not None
    return {spec.name: spec.view(adapter.gradient).clone() for spec in adapter.specs}


@pytest.mark.parametrize("activation_memory_bytes", [None, 0])
def test_the_block_of_the_guide_trains_as_autograd_does(
    guide: Guide, arcee: Path, monkeypatch: pytest.MonkeyPatch, activation_memory_bytes: int | None
) -> None:
    with pytest.raises(UnsupportedError, match="layer 0: mlp: ArceeMLP is of no known kind"):
        gradient(arcee, decoder="written-out")
    block = guide("training/model/decoders/written_out/relu2_block.py").Relu2Block
    monkeypatch.setattr(take_layers, "BLOCKS", (*take_layers.BLOCKS, block))
    ours = gradient(arcee, decoder="written-out", activation_memory_bytes=activation_memory_bytes)
    exact = gradient(arcee, decoder="autograd")
    assert {name.rpartition(".layers.")[2] for name in ours} == {name.rpartition(".layers.")[2] for name in exact}
    assert any("up_proj" in name for name in ours)
    for name, wanted in exact.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@pytest.mark.parametrize("model", ["qwen3", "qwen2_5_vl"])
def test_the_kind_of_matrix_of_the_guide_trains_as_a_dense_one(
    guide: Guide, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, model: str, decoder: str
) -> None:
    module, made = guide("weights/transposed.py"), []

    def transposed(modules: Any) -> Any:
        made.append(modules)
        return module.transposed(modules)

    monkeypatch.setitem(KINDS, "transposed", transposed)  # type: ignore[arg-type]
    ours = gradient(model_path(model), decoder=decoder, weights="transposed")
    dense = gradient(model_path(model), decoder=decoder)
    assert len(made) > 8
    for name, wanted in dense.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-9, atol=1e-12)


def test_the_block_of_the_guide_takes_the_memory_that_it_says(
    guide: Guide, arcee: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_class = guide("training/model/decoders/written_out/relu2_block.py").Relu2Block
    monkeypatch.setattr(take_layers, "BLOCKS", (*take_layers.BLOCKS, block_class))
    trainer = HFTrainer(TrainerConfig(str(arcee), name="m", device="cpu", decoder="written-out"))
    trainer.create_adapter("a", LoraConfig(rank=16, seed=1))
    decoder: Any = trainer._loaded.decoder
    tokens, block = 1024, decoder.layers[0][1]
    x = torch.randn(tokens, TEXT["hidden_size"])
    slices = [AdapterSlice(trainer._adapters["a"], 0, tokens)]
    batch = LoraBatch(groups_of(decoder.targets), slices, x.dtype, torch.float32, gradient=True)
    context = RowContext(trainer._loaded.kernels, Segments((tokens,), x.device), {}, batch)
    grad = torch.randn_like(x)
    with torch.no_grad(), Live([x, grad, *batch._grad_a.values(), *batch._grad_b.values()]) as live:
        run = block.start(x, context)
        run.forward()
        run.restore()
        run.backward(grad)
    said = block.memory(tokens, batch.columns, 4)
    wanted = said.lean + said.large + said.transient
    assert 0.8 * wanted <= live.peak <= wanted + 4 * x.nbytes  # the decoder counts rows of the hidden size itself


def test_two_blocks_that_would_share_an_adapter_are_refused(
    guide: Guide, arcee: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classes with one name of a group count their blocks each from 0."""
    first = guide("training/model/decoders/written_out/relu2_block.py").Relu2Block
    other = guide("training/model/decoders/written_out/relu2_block.py").Relu2Block
    monkeypatch.setattr(first, "recognises", classmethod(lambda _, part: "layers.0." in part.path))
    monkeypatch.setattr(take_layers, "BLOCKS", (AttentionBlock, first, other))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj and .*layers\.1\.mlp\.up_proj are both up_proj 0"):
        gradient(arcee, decoder="written-out")


def test_kinds_that_are_unknown_divided_or_wrong_are_refused(
    guide: Guide, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = guide("weights/transposed.py")

    def without_head(modules: Any) -> Any:
        made = module.transposed(modules)
        if modules[0].out_features == TEXT["vocab_size"]:
            made.columns.zero_()
        return made

    monkeypatch.setitem(KINDS, "transposed", without_head)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="its LM head gives differs from transformers' by 1 of its norm"):
        gradient(model_path("qwen3"), weights="transposed")
    with pytest.raises(UnsupportedError, match="weights 'int3' is none of dense, int8, int4, published, transposed"):
        gradient(model_path("qwen3"), weights="int3")
    with pytest.raises(UnsupportedError, match="transposed weights cannot be divided over 2 ranks"):
        maker_of("transposed", shards=2, experts=False)
    with pytest.raises(UnsupportedError, match="transposed weights are not made of experts yet"):
        maker_of("transposed", shards=1, experts=True)
