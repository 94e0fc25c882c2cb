"""An embedding and an LM head of 8 bits: rows that are looked up, products in pieces, and training with them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.training.model.load_model import load_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weights import packed_vocabulary
from tinker_local.backend.weights.codes import Packed, to_codes
from tinker_local.backend.weights.packed_vocabulary import (
    PackedHead,
    VocabularyMatrix,
    is_tied,
    pack_vocabulary,
    packable_vocabulary,
    rows_of,
)
from tinker_local.backend.weights.precision import Packable, base_in, option_of, parts_of, word_of
from tinker_local.types import UnsupportedError
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from tests.training.conftest import Maker

ROWS, INPUTS = 1000, 64
ALL = {"train_attn": True, "train_mlp": True, "train_unembed": True}


def whole_numbers(*shape: int, most: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator)


def stored(device: str = "cpu") -> Packed:
    """Of whole numbers: so small that sums of the products below are exact, in whatever order."""
    scales = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, 2.0).bfloat16().unsqueeze(-1)
    return Packed(whole_numbers(ROWS, INPUTS, most=1).to(torch.int8).to(device), scales.to(device))


class Largest(TorchDispatchMode):
    """Notes the most numbers of a floating tensor that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        view = bool(func._schema.returns) and func._schema.returns[0].alias_info is not None
        if isinstance(found, torch.Tensor) and found.is_floating_point() and not view:
            self.numbers = max(self.numbers, found.numel())
        return found


def check_products(piece: int, dtype: torch.dtype, device: str) -> None:
    """They are rounded once, as those of a whole matrix: sums over a vocabulary are beyond what bfloat16 has bits
    for."""
    matrix = VocabularyMatrix(stored(device), dtype, piece)
    weight = matrix.stored.numbers(torch.float64)
    x = whole_numbers(3, INPUTS, most=1).to(device, dtype)
    grad = whole_numbers(3, ROWS, most=7, seed=1).to(device, dtype)
    product, back = x.double() @ weight.T, grad.double() @ weight
    assert product.abs().max() + grad.double().abs().max() < 256 < back.abs().max()
    bias = whole_numbers(ROWS, most=5).to(device, dtype)
    assert (matrix.outputs, matrix.inputs, matrix.dtype) == (ROWS, INPUTS, dtype)
    assert torch.equal(matrix.times(x), product.to(dtype))
    assert torch.equal(matrix.times_plus(x, bias), (product + bias.double()).to(dtype))
    assert torch.equal(matrix.times_plus(x, grad), (product + grad.double()).to(dtype))
    assert torch.equal(matrix.add_times(grad.clone(), x), (product + grad.double()).to(dtype))
    assert torch.equal(matrix.back(grad), back.to(dtype))
    assert torch.equal(matrix.add_back(x.clone(), grad), (x.double() + back).to(dtype))


@pytest.mark.parametrize("piece", [INPUTS, 100 * INPUTS, 333 * INPUTS, 2**25], ids=["1", "100", "333", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_the_same_whatever_the_piece(piece: int, dtype: torch.dtype) -> None:
    check_products(piece, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_same_whatever_the_piece_on_a_gpu(dtype: torch.dtype) -> None:
    for piece in (100 * INPUTS, 333 * INPUTS, 2**25):
        check_products(piece, dtype, "cuda")
    codes = to_codes(torch.randn(ROWS, 2 * INPUTS).cuda(), 8)
    ids = torch.randint(0, ROWS, (2, 3), device="cuda")
    assert torch.equal(rows_of(codes, ids, dtype), codes.numbers(dtype)[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_matrix_never_exists(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is packed, nor while one looks up rows or multiplies."""
    monkeypatch.setattr(packed_vocabulary, "PIECE", 100 * INPUTS)
    weight = torch.randn(ROWS, INPUTS, dtype=dtype)
    with Largest() as packing:
        codes = packed_vocabulary._codes(weight, "int8", None)
    whole = to_codes(weight, 8)
    for found, expected in ((codes.codes, whole.codes), (codes.scales, whole.scales)):
        assert torch.equal(found, expected)
    with Largest() as largest:
        matrix = VocabularyMatrix(codes, dtype, 100 * INPUTS)
        matrix.back(matrix.times(torch.randn(3, INPUTS, dtype=dtype)))
        rows_of(codes, torch.arange(20), dtype)
    assert max(packing.numbers, largest.numbers) <= 100 * INPUTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_rows_that_are_looked_up_are_those_of_the_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = to_codes(torch.randn(ROWS, 2 * INPUTS), 8)
    ids = torch.randint(0, ROWS, shape)
    assert torch.equal(rows_of(codes, ids, dtype), codes.numbers(dtype)[ids])


def small(tied: bool, **others: Any) -> Any:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.Qwen3Config(**{**sizes, **heads, **others}, tie_word_embeddings=tied)
    return transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_keeps_codes_in_place_of_both_matrices(tied: bool) -> None:
    model = small(tied)
    expected = {
        name: to_codes(each, 8).numbers(torch.float32)
        for name, each in model.state_dict().items()
        if name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    assert packable_vocabulary(model) == Packable.of([(100, 64)] * (1 if tied else 2))
    pack_vocabulary(model, "int8")
    names = {name: each.dtype for name, each in model.named_parameters() if "layers" not in name and each.numel()}
    codes = {"model.embed_tokens.qweight": torch.int8, "model.embed_tokens.scales": torch.bfloat16}
    of_head = {} if tied else {"lm_head.qweight": torch.int8, "lm_head.scales": torch.bfloat16}
    assert names == {**codes, **of_head, "model.norm.weight": torch.float32}
    assert is_tied(model) == tied
    assert torch.equal(model.get_input_embeddings()(torch.arange(100)), expected["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])
    hidden = torch.randn(1, 3, 64)
    assert torch.equal(model.lm_head(hidden), torch.nn.functional.linear(hidden, expected["lm_head.weight"]))


def test_an_embedding_that_multiplies_goes_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(tied=False)
    scaled = Gemma3TextScaledWordEmbedding(100, 64, 0, embed_scale=8.0)
    monkeypatch.setattr(model.model, "embed_tokens", scaled)
    rounded = to_codes(scaled.weight, 8).numbers(torch.float32)
    pack_vocabulary(model, "int8")
    assert isinstance(model.get_input_embeddings(), Gemma3TextScaledWordEmbedding)
    assert torch.equal(model.get_input_embeddings()(torch.arange(100)), rounded * 8)


class _ByItsMatrix(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]


class _OfTwo(torch.nn.Module):
    num_embeddings = 100

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(100, 64))


@pytest.mark.parametrize("embedding", [_ByItsMatrix(100, 64), _OfTwo()], ids=["own forward", "no embedding"])
def test_an_embedding_that_looks_up_no_rows_is_refused(embedding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(tied=False)
    monkeypatch.setattr(model.model, "embed_tokens", embedding)
    name = type(embedding).__name__
    with pytest.raises(UnsupportedError, match=rf"its embedding is a {name}, which is not packed: --head-precision"):
        pack_vocabulary(model, "int8")


def test_rows_that_no_group_divides_cannot_be_packed() -> None:
    model = small(tied=False, hidden_size=48)
    assert packable_vocabulary(model) is None
    with pytest.raises(ValueError, match=r"^rows of 48 numbers cannot be divided into groups of 32$"):
        pack_vocabulary(model, "int8")


def test_the_gradient_behind_a_packed_head_is_that_of_its_numbers() -> None:
    model = small(tied=False).double()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(100).double(), requires_grad=False)
    pack_vocabulary(model, "int8")
    head = model.lm_head
    assert isinstance(head, PackedHead)
    x = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(head(x).square().sum(), x)
    (expected,) = torch.autograd.grad(torch.nn.functional.linear(x, head.weight, head.bias).square().sum(), x)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_a_word_says_in_what_layers_and_head_are() -> None:
    words = {
        (None, None): (None, "a dense base"),
        ("int4", None): ("int4-curved", "a base in 4 bits (int4-curved)"),
        ("int4", "int8"): (
            "int4-curved+head-int8",
            "a base in 4 bits (int4-curved) with embedding and LM head in 8 bits (int8)",
        ),
        (None, "int8"): ("dense+head-int8", "a dense base with embedding and LM head in 8 bits (int8)"),
        ("gptq-int4-g32", "int8"): (
            "gptq-int4-g32+head-int8",
            "a base in gptq-int4-g32 with embedding and LM head in 8 bits (int8)",
        ),
    }
    for parts, (word, told) in words.items():
        assert word_of(*parts) == word
        layers, head = parts_of(word)
        assert (option_of(layers) or layers, head) == parts
        assert base_in(word) == told


def dense_twin(folder: Path, out: Path) -> Path:
    """The model in `folder`, with the numbers that its packed embedding and head stand for."""
    shutil.copytree(folder, out)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto: Any = getattr(transformers, config.architectures[0])
    model = auto.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.lm_head.weight}:
            weight.copy_(to_codes(weight, 8).numbers(torch.float64))
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied", "gemma2", pytest.param("qwen3_vl", marks=pytest.mark.more)])
def test_training_is_that_of_a_model_with_these_numbers(
    name: str,
    model_path: Callable[[str], Path],
    make: Maker,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    tmp_path: Path,
) -> None:
    """Gradients of several adapters, with those of the LM head, in float64."""
    folder = model_path(name)
    found: list[Any] = []
    works = [make.work(f"a{at}", (40, 9, 70)) for at in range(2)]
    packed = TrainerConfig(str(folder), name="m", dtype="float64", device="cpu", head_weights="int8")
    dense = TrainerConfig(str(dense_twin(folder, tmp_path / "twin")), name="m", dtype="float64", device="cpu")
    for config in (packed, dense):
        trainer = HFTrainer(config)
        for at in range(2):
            add_adapter(trainer, f"a{at}", seed=at + 1, **ALL)
        results: Any = trainer.forward_backward(works)
        logprobs = {
            f"{at}": np.concatenate([one["logprobs"] for one in each.outputs]) for at, each in enumerate(results)
        }
        found.append((logprobs, [gradients(trainer, f"a{at}") for at in range(2)]))
        trainer.close()
    assert_close(found[0][0], found[1][0], 1e-12)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert any("unembed" in tensor or "lm_head" in tensor for tensor in one)
        assert_close(one, other, 1e-11)


def test_a_packed_head_is_not_divided_over_ranks(model_path: Callable[[str], Path]) -> None:
    config = TrainerConfig(str(model_path("qwen3")), name="m", device="cpu", head_weights="int8", shards=2)
    with pytest.raises(UnsupportedError, match=r"^an LM head in int8 cannot be divided over 2 ranks: only a dense one"):
        load_model(config)
