"""Trainer and sampler with an embedding and an LM head of 8 bits: one copy of the codes, tied or not, and the numbers
of transformers' own modules with what the codes stand for."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.vllm_engine.vocabulary_method import pack_vocabularies
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.backend.weights.packed import dense_name, tensors_of
from tinker_local.backend.weights.published import WEIGHTS
from tinker_local.types import UnsupportedError
from transformers import AutoModelForCausalLM

from tests.families.test_other_families import tiny
from tests.published_checkpoints import gptq, publish
from tests.sampling.conftest import Served
from tests.sampling.test_adapters import ALL, LM_HEAD, TEXT, expected_score
from tests.sampling.test_packed_sampling import OTHERS, TOKENS, expected_logprobs
from tests.sampling.test_shared_weights import GEMMA4, SEEING, lent_to, logprobs

ODD = 523
"""Tokens of a vocabulary to which vLLM would add rows: no multiple of 64."""


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    made = MemoryHolder()
    yield made
    made.close()


def written(family: Any, tied: bool, out: Path) -> str:
    if family in OTHERS:
        return str(tiny(family, out))
    if family in GEMMA4:
        return str(make_tiny_seeing_model(out, family))
    if family in SEEING:
        return str(make_tiny_vl_model(out, family=family, tie_word_embeddings=tied))
    return with_odd_vocabulary(make_tiny_text_model(out, family=family, tie_word_embeddings=tied))


def with_odd_vocabulary(folder: Path) -> str:
    """The model in `folder`, with more tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(ODD, mean_resizing=False)
    model.save_pretrained(folder)
    return str(folder)


def engines(
    folder: str, holder: MemoryHolder, dtype: Any = "float32", weights: str = "dense"
) -> tuple[HFTrainer, VLLMSampler]:
    shared: Any = {"dtype": dtype, "weights": weights, "head_weights": "int8", "shared_weights": holder.address}
    trainer = HFTrainer(TrainerConfig(folder, name="tiny", device="cpu", **shared))
    return trainer, VLLMSampler(EngineOptions(folder, max_rank=16, kv_cache_bytes=2**26, **shared), EngineThread())


def both(trainer: HFTrainer) -> dict[str, Any]:
    """The trainer's modules of its embedding and LM head, by their paths."""
    model = trainer._loaded.model
    wanted = (model.get_input_embeddings(), model.lm_head)
    return {path: each for path, each in model.named_modules() if each in wanted}


def numbers(module: Any) -> torch.Tensor:
    return tensors_of(module).numbers(torch.float64)


@pytest.mark.parametrize(
    ("family", "weights", "tied"),
    [
        ("qwen3", "int4", True),
        *(
            pytest.param(family, weights, tied, marks=pytest.mark.more)
            for family, weights, tied in (
                *(("qwen3", "dense", False), ("qwen3_vl", "int4", True), ("qwen3_vl", "dense", False)),
                *(("gemma3", "int8", True), ("gemma2", "dense", True)),
                *(("qwen3_5_text", "int8", True), ("qwen2_5_vl", "int4", False), ("llama", "int8", False)),
                *(("qwen3_moe", "dense", False), ("gemma4_text", "dense", True), ("gemma4_dense", "int8", True)),
                *(("gemma4_text", "int4", True),),
                *((family, "int4", False) for family in OTHERS),
            )
        ),
    ],
)
async def test_both_engines_look_up_and_multiply_by_one_copy_of_codes(
    family: Any, weights: str, tied: bool, holder: MemoryHolder, tmp_path: Path
) -> None:
    folder = written(family, tied, tmp_path / "model")
    trainer, sampler = engines(folder, holder, weights=weights)
    try:
        model: Any = served_model(sampler._engine._engine)
        memory = {piece.untyped_storage().data_ptr() for piece in lent_to(sampler).pieces}
        served = [each for each in model.modules() if hasattr(each, "org_vocab_size") and hasattr(each, "qweight")]
        of_trainer = both(trainer)
        embedding, head = trainer._loaded.model.get_input_embeddings(), trainer._loaded.model.lm_head
        assert trainer._loaded.tied_head == (len({id(each.qweight) for each in served}) == 1)
        assert len({id(each.qweight) for each in of_trainer.values()}) == (1 if trainer._loaded.tied_head else 2)
        vocabulary = torch.arange(embedding.num_embeddings)
        of_tokens, of_head = embedding(vocabulary), trainer._loaded.head.times(torch.eye(head.in_features)).T
        assert torch.equal(of_head, numbers(head).float())
        found = {"embedding": 0, "head": 0}
        for each in served:
            assert all(part.untyped_storage().data_ptr() in memory for part in (each.qweight, each.scales))
            looked_up = each.quant_method.embedding(each, vocabulary)
            multiplied = each.quant_method.apply(each, torch.eye(each.embedding_dim)).T
            found["embedding"] += torch.equal(looked_up, numbers(embedding).float())
            found["head"] += torch.equal(multiplied, of_head)
        assert min(found.values()) > 0
        scaled = of_tokens / numbers(embedding).float()  # by one number where a family multiplies, here or in vLLM
        assert scaled.nan_to_num(float(scaled.nanmedian())).max() <= 1.0001 * float(scaled.nanmedian())

        sampled = (await logprobs(sampler))[-len(TOKENS) + 1 :]
        trained = trainer.logprobs(None, RenderedInput(TOKENS.astype(np.int32)))[-len(sampled) :]
        lent_to(sampler).verify()
        paths = {f"{path}.{kind}" for path in of_trainer for kind in ("qweight", "scales")}
        assert len(lent_to(sampler).sums.keys() & paths) == (2 if trainer._loaded.tied_head else 4)  # stray writes
        if family == "qwen3_moe":  # whose experts transformers does not multiply in float64
            np.testing.assert_allclose(sampled, trained, atol=1e-4, rtol=0)
            return
        of_layers = {
            dense_name(f"{path}.qweight").removesuffix(".weight"): numbers(each)
            for path, each in trainer._loaded.model.named_modules()
            if hasattr(each, "qweight")
        }
        expected = expected_logprobs(folder, family in (*SEEING, *GEMMA4), of_layers, torch.float64)
        rounded = expected_logprobs(folder, family in (*SEEING, *GEMMA4), of_layers, torch.float32)
        allowed = max(1e-4, 4 * float(np.abs(rounded - expected).max()))  # as transformers' own float32
        np.testing.assert_allclose(sampled, expected, atol=allowed, rtol=0)
        np.testing.assert_allclose(trained, expected, atol=allowed, rtol=0)
    finally:
        await sampler.close()
        trainer.close()


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
async def test_files_may_have_a_tied_head_once_more(family: Any, holder: MemoryHolder, tmp_path: Path) -> None:
    """As those of Qwen3-0.6B."""
    folder = written(family, True, tmp_path / "model")
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    trainer, sampler = engines(folder, holder)
    try:
        model: Any = served_model(sampler._engine._engine)
        assert trainer._loaded.tied_head
        served = [each.qweight for each in model.modules() if hasattr(each, "qweight") and hasattr(each, "tp_size")]
        assert len({each.data_ptr() for each in served if len(each) == ODD}) == 1
        sampled = (await logprobs(sampler))[-len(TOKENS) + 1 :]
        trained = trainer.logprobs(None, RenderedInput(TOKENS.astype(np.int32)))[-len(sampled) :]
        np.testing.assert_allclose(sampled, trained, atol=1e-4, rtol=0)
    finally:
        await sampler.close()
        trainer.close()


@pytest.mark.more
async def test_a_published_base_may_have_its_head_in_8_bits(holder: MemoryHolder, tmp_path: Path) -> None:
    folder, _ = publish(Path(written("qwen3", True, tmp_path / "model")), tmp_path, gptq(4, 32))
    trainer, sampler = engines(folder, holder, weights=WEIGHTS)
    try:
        sampled = (await logprobs(sampler))[-len(TOKENS) + 1 :]
        trained = trainer.logprobs(None, RenderedInput(TOKENS.astype(np.int32)))
        np.testing.assert_allclose(sampled, trained[-len(sampled) :], atol=1e-4, rtol=0)
        kinds = {each.dtype for each in trainer._loaded.model.parameters() if each.dim() > 1}
        assert kinds == {torch.int8, torch.uint8, torch.bfloat16, torch.float16}  # and no dense matrix
    finally:
        await sampler.close()
        trainer.close()


@pytest.mark.more
async def test_in_bfloat16_both_engines_have_the_same_rows_and_agree(holder: MemoryHolder, tmp_path: Path) -> None:
    folder = written("qwen3", False, tmp_path / "model")
    trainer, sampler = engines(folder, holder, "bfloat16", "int4")
    try:
        model: Any = served_model(sampler._engine._engine)
        head, vocabulary = trainer._loaded.model.lm_head, torch.arange(ODD)
        for layer, module in (
            (model.model.embed_tokens.base_layer, trainer._loaded.model.get_input_embeddings()),
            (model.lm_head, head),
        ):
            rows = layer.quant_method.embedding(layer, vocabulary)
            assert rows.dtype == torch.bfloat16
            assert torch.equal(rows, numbers(module).bfloat16())
        eye = torch.eye(head.in_features, dtype=torch.bfloat16)
        multiplied = model.lm_head.quant_method.apply(model.lm_head, eye)
        assert torch.equal(multiplied, trainer._loaded.head.times(eye))
        sampled = (await logprobs(sampler))[-len(TOKENS) + 1 :]
        trained = trainer.logprobs(None, RenderedInput(TOKENS.astype(np.int32)))[-len(sampled) :]
        assert np.abs(sampled - trained).mean() < 0.3  # `load_engines.TOLERANCE`
    finally:
        await sampler.close()
        trainer.close()


@pytest.mark.more
@pytest.mark.parametrize("tied", [True, False])
async def test_adapters_of_a_packed_head_and_images_in_one_step(
    tied: bool, holder: MemoryHolder, tmp_path: Path, noise: Callable[..., Any]
) -> None:
    """Prompts are scored, and tokens drawn, with the adapter of each request."""
    folder = make_tiny_vl_model(tmp_path / "model", tie_word_embeddings=tied)
    shared: Any = {"dtype": "float32", "weights": "int4", "head_weights": "int8", "shared_weights": holder.address}
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu", **shared))
    served = Served(folder, "Qwen3VLForConditionalGeneration", EngineThread(), **shared)
    try:
        with torch.no_grad():
            for path, each in trainer._loaded.model.named_modules():
                if hasattr(each, "qweight"):
                    served.hf.model.get_submodule(path).weight.copy_(numbers(each))
        adapters = [None, *(served.adapter(tmp_path / f"v{at}", (LM_HEAD, ALL)[at % 2], 8, seed=at) for at in range(3))]
        prompts = [served.prompt(TEXT), served.prompt([5], noise(70, 70), TEXT[:10])]
        for adapter in adapters[1:]:
            assert adapter is not None
            await served.sampler.load_version(adapter.version)
        cases = [(adapter, prompt) for prompt in prompts for adapter in adapters]
        scores = await asyncio.gather(
            *(served.score(prompt, None if adapter is None else adapter.version) for adapter, prompt in cases)
        )
        for (adapter, prompt), score in zip(cases, scores, strict=True):
            served.same(score, expected_score(served, prompt, adapter))
        assert np.abs(scores[1] - scores[0]).max() > 0.05
    finally:
        await served.sampler.close()
        trainer.close()


def test_a_model_without_vllms_embedding_is_refused() -> None:
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(4, 32)})
    with pytest.raises(UnsupportedError, match=r"^m: --head-precision int8: this model has none of vLLM"):
        pack_vocabularies(model, "int8", torch.device("cpu"), "m")
