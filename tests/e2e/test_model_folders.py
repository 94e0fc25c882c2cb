"""A folder that is not one model, the same for transformers and vLLM, is refused in a sentence.

By `check` and at a start; neither loads an engine for it, and the sentence names the file or the tensor, with numbers.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.cli.main import main
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.models.model_folder import look_at
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.model.checkpoint_fit import check_finite
from tinker_local.backend.training.model.load_model import check_weights, config_of, supported_family
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import ApiError, UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"

Weights = dict[str, torch.Tensor]
Change = Callable[[Path], None]


def with_weights(change: Callable[[Weights], object]) -> Change:
    """Rewrite the weights of a folder as `change` leaves them."""

    def rewrite(folder: Path) -> None:
        weights = load_file(folder / SINGLE)
        change(weights)
        save_file(weights, folder / SINGLE, metadata={"format": "pt"})

    return rewrite


def with_config(**fields: Any) -> Change:
    def rewrite(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return rewrite


def in_two_shards(folder: Path) -> list[Path]:
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = [folder / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(weights)
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: weights[name] for name in part}, file, metadata={"format": "pt"})
    index = {name: files[place % 2].name for place, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return files


def set_number(name: str, value: float) -> Change:
    def change(weights: Weights) -> None:
        weights[name][1, 2] = value

    return with_weights(change)


def adapter_left(folder: Path) -> None:
    in_two_shards(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))


def adapter_alone(folder: Path) -> None:
    for name in ("config.json", SINGLE):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))


def resized(weights: Weights) -> None:
    weights["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"]] * 2)


def single_beside_index(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    in_two_shards(folder)
    (folder / SINGLE).write_bytes(content)


def shards_beside_single(folder: Path) -> None:
    single_beside_index(folder)
    (folder / INDEX).unlink()


def shard_missing(folder: Path) -> None:
    in_two_shards(folder)[1].unlink()


def shard_cut_off(folder: Path) -> None:
    file = in_two_shards(folder)[1]
    file.write_bytes(file.read_bytes()[:-100])


def shard_empty(folder: Path) -> None:
    in_two_shards(folder)[0].write_bytes(b"")


def in_both_shards(folder: Path) -> None:
    first, second = in_two_shards(folder)
    weights, others = load_file(second), load_file(first)
    weights[min(others)] = others[min(others)] + 1
    save_file(weights, second, metadata={"format": "pt"})


def only_pointers(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_text(POINTER)


def token_beyond(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 515, "content": "<mine>"})
    path.write_text(json.dumps(tokenizer))


def shorter(weights: Weights) -> None:
    weights["model.layers.0.mlp.gate_proj.weight"] = weights["model.layers.0.mlp.gate_proj.weight"][:-1].clone()


FAULTS: dict[str, tuple[Change, str]] = {
    "adapter-left": (adapter_left, "adapter_config.json belongs to an adapter, which transformers would add"),
    "adapter-alone": (
        adapter_alone,
        "holds an adapter (adapter_config.json), and no model; serve its base model (Qwen/Q",
    ),
    "embeddings-resized": (with_weights(resized), "embed_tokens.weight is [1024, 64], and vocab_size in"),
    "single-beside-index": (single_beside_index, "has model.safetensors and also model.safetensors.index.json"),
    "shards-beside-single": (shards_beside_single, "has model-00001-of-00002.safetensors beside model.safetensors"),
    "no-head": (
        with_weights(lambda weights: weights.pop("lm_head.weight")),
        "its files have no lm_head.weight, for which",
    ),
    "nan": (
        set_number("model.layers.1.mlp.down_proj.weight", float("nan")),
        "model.layers.1.mlp.down_proj.weight has a number that is NaN or infinite, at [1, 2] of [64, 128]",
    ),
    "infinity": (
        set_number("model.embed_tokens.weight", -float("inf")),
        "model.embed_tokens.weight has a number that is NaN or infinite, at [1, 2]",
    ),
    "shard-missing": (shard_missing, "model-00002-of-00002.safetensors is missing"),
    "shard-cut-off": (shard_cut_off, "model-00002-of-00002.safetensors: it has "),
    "shard-empty": (shard_empty, "model-00001-of-00002.safetensors: it has 0 bytes"),
    "no-tensors": (with_weights(lambda weights: weights.clear()), "model.safetensors holds no tensors"),
    "tensor-missing": (
        with_weights(lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight")),
        "have no model.layers.0.mlp.up_proj.weight, for which transformers would make up random numbers",
    ),
    "layers-missing": (
        with_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "have no model.layers.2.input_layernorm.weight (and 10 more)",
    ),
    "layers-left-over": (
        with_config(num_hidden_layers=1, layer_types=["full_attention"]),
        "has model.layers.1.input_layernorm.weight (and 10 more), which Qwen3ForCausalLM does not have",
    ),
    "bias-left-over": (
        with_weights(lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(256)})),
        "model.safetensors has model.layers.0.self_attn.q_proj.bias, which Qwen3ForCausalLM does not have",
    ),
    "shape": (
        with_weights(shorter),
        "mlp.gate_proj.weight is [127, 64] in its files, and [128, 64] by its config.json",
    ),
    "in-both-shards": (
        in_both_shards,
        "is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors",
    ),
    "tied-with-another-head": (
        with_config(tie_word_embeddings=True),
        "lm_head.weight in model.safetensors is another matrix",
    ),
    "quantized": (
        with_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "quantized weights of quant_method 'bitsandbytes' cannot be trained; those of fp8, gptq",
    ),
    "quantized-by-config-alone": (
        with_config(quantization_config={"quant_method": "fp8"}),
        "says that the weights are quantized (FP8), and its files have no tensor *.weight in F8_E4M3",
    ),
    "quantized-without-a-word": (
        with_weights(lambda weights: weights.update(x=torch.zeros(4, dtype=torch.float8_e4m3fn))),
        "x is in F8_E4M3: quantized weights cannot be trained",
    ),
    "pointers": (only_pointers, "is a pointer of git-lfs, in place of the file; run `git lfs pull`"),
    "token-beyond": (token_beyond, "gives '<mine>' the id 515, and the embedding has 512 rows (1 tokens"),
    "config-of-nothing": (with_config(num_attention_heads="many"), "transformers makes no model of its config.json ("),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("folders") / "model", tie_word_embeddings=False)


async def start(path: str, data_dir: Path) -> None:
    options = BackendOptions(
        data_dir=data_dir, kv_cache_bytes=2**26, max_rank=8, trainer="inline", sampler="inline", sampler_sleeps=False
    )
    async with InProcessBackend([ModelSource("m", path)], options):
        pass


@pytest.mark.mutation(
    "nan-not-looked-for",
    "_fault_of_weights",
    "    return not_finite(stored_tensors(folder).values())",
    "    return None",
    cases=("nan",),
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_not_one_model_is_refused_in_a_sentence(whole: Path, tmp_path: Path, fault: str) -> None:
    change, words = FAULTS[fault]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    change(folder)
    done = CliRunner().invoke(main, ["check", f"m={folder}", "--port", "0", "--data-dir", str(tmp_path / "data")])
    (problem,) = (line for line in done.output.splitlines() if line.startswith("PROBLEM  model m: "))
    assert words in problem
    assert done.exit_code == 1
    if fault in ("nan", "infinity"):
        return  # a start sees it while it loads the weights: the next test
    with pytest.raises((ApiError, ValueError)) as refused:
        asyncio.run(start(str(folder), tmp_path / "data"))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", ["nan", "infinity"])
def test_a_number_that_is_none_is_named_with_its_place_when_weights_are_loaded(
    whole: Path, tmp_path: Path, fault: str
) -> None:
    change, words = FAULTS[fault]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    change(folder)
    with pytest.raises(UnsupportedError) as refused:
        HFTrainer(TrainerConfig(str(folder), name="m"))
    assert words in str(refused.value)


def test_large_numbers_that_add_up_to_infinity_are_finite() -> None:
    large = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    torch.nn.init.constant_(large.weight, 3e38)
    check_finite(large, "m", None)
    large.weight.data[3, 5] = float("inf")
    with pytest.raises(UnsupportedError, match=r"m: weight has a number that is NaN or infinite in torch\.bfloat16"):
        check_finite(large, "m", None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_models_of_all_families_pass(tmp_path: Path, family: Any, tied: bool) -> None:
    text = FAMILIES[family].vision is None
    make: Any = make_tiny_text_model if text else make_tiny_vl_model
    folder = make(tmp_path / "model", family=family, tie_word_embeddings=tied)
    config = config_of(str(folder))
    check_weights(str(folder), config, supported_family(config, "m"))
    assert look_at(ModelSource("m", str(folder))).problems == []
    if not tied:
        return
    names = load_file(folder / SINGLE)
    (embedding,) = (name for name in names if name.endswith("embed_tokens.weight"))
    with_weights(lambda weights: weights.update({"lm_head.weight": weights[embedding].clone()}))(folder)
    check_weights(str(folder), config, supported_family(config, "m"))  # a copy of the embedding, as some files have
    with_weights(lambda weights: weights["lm_head.weight"].mul_(2))(folder)
    with pytest.raises(UnsupportedError, match="is another matrix"):
        check_weights(str(folder), config, supported_family(config, "m"))


def test_flags_of_tied_embeddings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_vl_model(tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    with_config(tie_word_embeddings=True, text_config={**text, "tie_word_embeddings": False})(folder)
    config = config_of(str(folder))
    with pytest.raises(
        UnsupportedError, match=r"tie_word_embeddings is True in config\.json and False in its text_config"
    ):
        check_weights(str(folder), config, supported_family(config, "m"))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_tiny_text_model(tmp_path / "model", family="qwen3_moe")
    with_weights(lambda weights: weights.pop("model.layers.1.mlp.experts.2.up_proj.weight"))(folder)
    config = config_of(str(folder))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        check_weights(str(folder), config, supported_family(config, "m"))


def test_tokens_that_a_published_tokenizer_has_beyond_the_embedding_are_no_fault(tmp_path: Path) -> None:
    """google/gemma-3-1b-it has one for images, as the models with vision do."""
    folder = make_tiny_text_model(tmp_path / "model", family="gemma3_text")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<image_soft_token>"})
    path.write_text(json.dumps(tokenizer))
    assert look_at(ModelSource("m", str(folder))).problems == []


def test_pickles_beside_safetensors_are_a_warning(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / "pytorch_model.bin").touch()
    found = look_at(ModelSource("m", str(folder)))
    assert found.problems == []
    assert "pytorch_model" not in str(found.problems)
    assert "beside safetensors files, which alone are read" in found.warnings[0]


def test_a_model_in_the_hubs_cache_is_looked_at_as_a_folder_is(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--a--model"
    snapshot = Path(shutil.copytree(whole, repository / "snapshots" / "1"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    assert look_at(ModelSource("m", "a/model")).problems == []
    adapter_left(snapshot)
    (problem,) = look_at(ModelSource("m", "a/model")).problems
    assert "belongs to an adapter" in problem
    in_part = snapshot / "model-00002-of-00002.safetensors"
    in_part.unlink()
    assert look_at(ModelSource("m", "a/model")).problems == []  # it is not whole yet, and is downloaded
