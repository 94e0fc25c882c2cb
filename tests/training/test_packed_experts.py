"""Experts of 8 and 4 bits: what is stored, products with it, and training, beside a dense model of its numbers."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tinker_local.backend.families import family_of
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.kernels.grouped_products import RowGroups
from tinker_local.backend.training.model.decoders.packed_experts import weights_of
from tinker_local.backend.training.model.load_model import config_of, packable
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.weights.codes import to_codes
from tinker_local.backend.weights.dense import DenseStack
from tinker_local.backend.weights.packed_stack import PackedExperts, PackedMatrices, PackedStack, Stacks, pack_decoder
from tinker_local.backend.weights.precision import Bits, Packable

from tests.dense_twin import write_twin
from tests.families.test_experts import ADAPTERS, DECODERS, Waits, data, new_trainer
from tests.float64 import InFloat64

Folder = Callable[[str], Path]
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text")
"""Stacks as they are stored; transposed ones with biases, in which gate and up take turns; beside a shared expert."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny model of a family, made once, with experts whose rows 32 divides."""

    @cache
    def made(family: Any) -> Path:
        shape = TextShape(intermediate_size=256, num_layers=4 if "5" in family else 2)
        return make_tiny_text_model(tmp_path_factory.mktemp(family) / "model", family=family, shape=shape)

    return made


@pytest.fixture(scope="module")
def twin(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The dense model of the numbers of a family's in a precision; in `InFloat64` of those that float64 finds, where a
    number that is equally near to two codes may get another one."""

    def made(family: str, precision: str) -> Path:
        return write_twin(folder(family), precision, tmp_path_factory.mktemp(f"{family}-{precision}") / "twin")

    return made


def numbers(count: int, outputs: int, inputs: int) -> torch.Tensor:
    """With one matrix that is 100 times larger, and one of zeros."""
    made = torch.randn(count, outputs, inputs, generator=torch.Generator().manual_seed(0))
    made[1] *= 100
    made[2] = 0
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_a_packed_stack_are_those_of_its_numbers(bits: Bits, dtype: torch.dtype) -> None:
    """To the bit, whether all matrices are made at once or one by one; groups of rows may be empty."""
    weight = numbers(5, 24, 64).to(dtype)
    packed = PackedMatrices.rounded(weight, bits, None)
    stack = packed.stack()
    expected = torch.stack([to_codes(each, bits).numbers(dtype) for each in weight])
    assert torch.equal(stack.numbers(), expected)
    assert all(torch.equal(stack.matrix(e), expected[e]) for e in range(5))
    dense = DenseStack(expected)
    assert (stack.count, stack.outputs, stack.inputs, stack.dtype) == (5, 24, 64, dtype)
    assert stack.stored.codes.data_ptr() == packed.qweight.data_ptr()
    assert packed.qweight.nbytes == weight.numel() * bits // 8
    groups = RowGroups(torch.tensor([3, 3, 4, 4, 9], dtype=torch.int32))
    x, grad = torch.randn(9, 64).to(dtype), torch.randn(9, 24).to(dtype)
    assert torch.equal(stack.times(x, groups), dense.times(x, groups))
    assert torch.equal(stack.back(grad, groups), dense.back(grad, groups))


def test_a_stack_is_packed_some_matrices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result, however many, and from a stack that is transposed in memory."""
    weight = numbers(5, 24, 64)
    whole = PackedMatrices.rounded(weight, 4, None)
    monkeypatch.setattr("tinker_local.backend.weights.packed_stack._PIECE", 2 * 24 * 64)
    pieces = PackedMatrices.rounded(weight.transpose(1, 2).contiguous().transpose(1, 2), 4, None)
    assert torch.equal(pieces.qweight, whole.qweight)
    assert torch.equal(pieces.scales, whole.scales)


def decoder_of(path: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    family = family_of(config.model_type, str(path))
    model = getattr(transformers, family.auto_class).from_pretrained(path, dtype=torch.float32)
    return model.get_submodule(family.decoder_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_take_the_place_of_transformers_and_are_counted(
    family: str, folder: Folder, twin: Callable[[str, str], Path]
) -> None:
    """Their forward is transformers' own, on the dense model of their numbers."""
    decoder, dense = decoder_of(folder(family)), decoder_of(twin(family, "int4"))
    pack_decoder(decoder, "int4")
    found = [(path, each) for path, each in decoder.named_modules() if isinstance(each, PackedExperts)]
    assert [path for path, _ in found] == [f"layers.{layer}.mlp.experts" for layer in range(len(decoder.layers))]
    x = torch.randn(7, 64)
    chosen, scores = torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
    for path, module in found:
        assert torch.equal(module(x, chosen, scores), dense.get_submodule(path)(x, chosen, scores))
        weights = weights_of(module)
        assert weights is not None
        assert isinstance(weights.gate_up, PackedStack)
        names = {name for name, each in module.named_parameters() if each is not None}
        assert names >= {f"{stack}.{kind}" for stack in ("gate_up_proj", "down_proj") for kind in ("qweight", "scales")}
        assert not any(each.is_meta for each in module.parameters())
    codes = [each for each in decoder.parameters() if each.dtype == torch.uint8]
    counted = packable(config_of(str(folder(family))))
    assert counted is not None
    assert counted.stack == 8 * 192 * 64
    assert counted.bytes(4) == sum(each.nbytes for each in codes) + sum(
        each.nbytes for name, each in decoder.named_parameters() if name.endswith(".scales")
    )


def test_experts_whose_rows_cannot_be_divided_are_not_packed(tmp_path: Path) -> None:
    path = make_tiny_text_model(tmp_path / "model", family="qwen3_moe")
    decoder = decoder_of(path)
    stacks = Stacks.of(decoder.layers[0].mlp.experts)
    assert stacks is not None
    assert not stacks.packable
    assert packable(config_of(str(path))) is None
    pack_decoder(decoder, "int8")
    assert not any(isinstance(each, PackedExperts) for each in decoder.modules())


def test_stacks_count_beside_the_largest_matrix() -> None:
    found = Packable.of([(24, 64)], [(8, 16, 64), (8, 64, 32)])
    scales = {8: 24 + 8 * 16 + 8 * 64, 4: 2 * 24 + 2 * 8 * 16 + 8 * 64}
    assert found == Packable(24 * 64 + 8 * 16 * 64 + 8 * 64 * 32, scales, 24 * 64, stack=8 * 64 * 32)
    assert Packable.of([(24, 64)], [(8, 16, 48)]) is None


Arrays = Mapping[str, npt.NDArray[np.float64]]


def trained(trainer: HFTrainer) -> tuple[Arrays, Arrays]:
    """Logprobs and gradients of several adapters in one row."""
    works = [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
    results: Any = trainer.forward_backward(works)
    logprobs = {
        f"{work.adapter_id} {at}": np.asarray(output["logprobs"], np.float64)
        for work, result in zip(works, results, strict=True)
        for at, output in enumerate(result.outputs)
    }
    gradients = {
        f"{name} {spec.name}": spec.view(adapter.gradient).double().numpy()
        for name, adapter in trainer._adapters.items()
        if adapter.gradient is not None
        for spec in adapter.specs
    }
    return logprobs, gradients


@pytest.mark.rotated(2)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("family", "precision"), [("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("gpt_oss", "int8"), (FAMILIES[2], "int4")]
)
def test_training_on_packed_experts_equals_training_on_their_numbers(
    family: str, precision: str, decoder: Any, folder: Folder, twin: Callable[[str, str], Path]
) -> None:
    """But for the order of sums. In float64: in float32 a token whose scores of two experts are nearly equal may go to
    either."""
    packed: dict[str, Any] = {"decoder": decoder, "weights": precision}
    with InFloat64():
        ours = trained(new_trainer(folder(family), dtype="float64", **packed))
        exact = trained(new_trainer(twin(family, precision), dtype="float64", decoder=decoder))
    for found, wanted, allowed in zip(ours, exact, (1e-7, 1e-9), strict=True):  # logprobs are reported in float32
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            size = np.abs(array).max()
            assert size > 0
            np.testing.assert_allclose(found[name], array, rtol=0, atol=allowed * size, err_msg=name)


def test_products_with_packed_experts_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's grouped products, as on a GPU: they equal those with the numbers."""
    monkeypatch.setattr(compat_torch, "grouped_mm_works", lambda x: True)
    packed = PackedMatrices.rounded(numbers(8, 192, 64).bfloat16(), 8, None).stack()
    dense, groups = DenseStack(packed.numbers()), RowGroups(torch.arange(4, 36, 4, dtype=torch.int32))
    x, grad = torch.randn(32, 64).bfloat16(), torch.randn(32, 192).bfloat16()
    with (waits := Waits()):
        found = packed.times(x, groups), packed.back(grad, groups)
    assert waits.count == 0
    assert torch.equal(found[0], dense.times(x, groups))
    assert torch.equal(found[1], dense.back(grad, groups))
