"""An adapter that PEFT wrote, or an export, is the same adapter after its import; what cannot be is refused by name."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.peft_adapters import read_peft_adapter
from tinker_local.backend.adapters.whole_matrices import check_whole_matrices
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.families import family_of
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import InvalidRequestError

from tests.exporting.conftest import Tuned, asked, hf_logprobs, load, rendered
from tests.float64 import Exact, assert_near

Make = Callable[..., Tuned]
NEWER = ("mixtral", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "qwen3_next", "lfm2_moe")
"""Families with routed experts that came later."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@contextmanager
def imported(folder: Path, model: Path) -> Iterator[tuple[HFTrainer, AdapterState, tuple[str, ...]]]:
    """A trainer of `model` that has the adapter in `folder` as `a`, its state, and the notes."""
    family = family_of(transformers.AutoConfig.from_pretrained(model).model_type, "")
    adapter = read_peft_adapter(folder, family)
    check_whole_matrices(adapter.matrices, str(model))
    trainer = HFTrainer(TrainerConfig(str(model), name="tiny/served", dtype="float32", device="cpu"))
    trainer.create_adapter("a", adapter.config(family))
    state, notes = adapter.state(trainer.capture("a", optimizer=False), family)
    trainer.load_adapter("a", state)
    yield trainer, trainer.capture("a", optimizer=False), notes
    trainer.close()


def by_peft(folder: Path, model: Path, b: float = 0.3, **config: Any) -> np.ndarray:
    """Have PEFT write an adapter with random factors into `folder`; the logprobs of PEFT's model."""
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(load(model), peft.LoraConfig(**{"r": 4, "lora_alpha": 32, **config})).eval()
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=b)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return hf_logprobs(wrapped, asked(model))


def by_from_pretrained(folder: Path, model: Path) -> np.ndarray:
    """The logprobs of what PEFT loads, without a warning of tensors that are missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return hf_logprobs(peft.PeftModel.from_pretrained(load(model), str(folder)).eval(), asked(model))


def assert_computes(trainer: HFTrainer, model: Path, expected: np.ndarray) -> None:
    """That the trainer's adapter `a` and PEFT's model have the same logprobs."""
    prompt = rendered(model, asked(model))
    exact, moved = Exact(trainer).logprobs("a", prompt)
    for logprobs in (trainer.logprobs("a", prompt)[-12:], expected):
        assert_near(logprobs, exact[-12:], moved)


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "parts-of-an-export-in-another-order",
    "PeftAdapter._parts",
    'found[tensor_name(path, "A")] = a[columns]',
    'found[tensor_name(path, "A")] = a[columns][::-1]',
    cases=("qwen3_5-peft",),
)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "peft") for family in ("qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")),
        *((family, "hosted") for family in ("qwen3", "qwen3_5", "gpt_oss")),
        *((family, "checkpoint") for family in ("qwen3_moe", "qwen3_5_moe", "gpt_oss")),
        *((family, "peft") for family in ("qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss", *NEWER)),
        ("mixtral", "vllm"),
        ("qwen3_vl", "tower"),
    ],
)
def test_an_export_comes_back_bit_for_bit(tuned: Make, tmp_path: Path, family: str, layout: str) -> None:
    if layout == "tower":
        trained = tuned(family, True, True, True)
    else:
        experts = family.endswith("_moe") or family in ("gpt_oss", *NEWER)
        trained = tuned(family, not experts and (layout == "peft" or family in ("qwen3", "qwen3_5")))
    folder = {"hosted": trained.exported, "checkpoint": trained.checkpoint}.get(layout, tmp_path / "peft")
    if layout in ("peft", "tower", "vllm"):
        to: Any = "vllm" if layout == "vllm" else "peft"
        export_checkpoint(trained.checkpoint, folder, to=to, base=str(trained.model), check=False)
    with imported(folder, trained.model) as (trainer, state, notes):
        assert notes == ()
        tensors = {name: tensor.numpy() for name, tensor in load_file(trained.checkpoint / WEIGHTS).items()}
        assert tensors.keys() == state.tensors.keys()
        assert all(np.array_equal(state.tensors[name], tensor) for name, tensor in tensors.items())
        found = trainer.logprobs("a", rendered(trained.model, asked(trained.model)))[-12:]
        trained.assert_near(found)


def test_an_mlp_may_be_trained_without_experts_of_the_same_name(tuned: Make, tmp_path: Path) -> None:
    """As PEFT does by last names. The notes say that experts, in the other layers, are not."""
    model = tuned("lfm2_moe", True).model
    names = ["in_proj", "w1", "w2", "w3"]
    expected = by_peft(tmp_path / "peft", model, target_modules=names)
    with imported(tmp_path / "peft", model) as (trainer, state, notes):
        assert any("some layers only: of w1 (2 missing), w3 (2 missing), w2 (2 missing)" in note for note in notes)
        assert not any(array.any() for name, array in state.tensors.items() if ".experts." in name)
        assert_computes(trainer, model, expected)


LANGUAGE = r".*language_model.*\.(q_proj|o_proj|up_proj)"


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "alpha-of-peft-ignored", "PeftAdapter.state", "factor = module.alpha *", "factor = 32 *", cases=("qwen3-",)
)
@pytest.mark.mutation(
    "rslora-taken-for-lora", "PeftConfig.divisor", "if self.rslora else rank", "if False else rank", cases=("rslora",)
)
@pytest.mark.parametrize(
    ("family", "config", "notes"),
    [
        pytest.param("qwen3", {"target_modules": "all-linear", "lora_alpha": 16}, ["by 0.5, exactly"], id="qwen3-"),
        pytest.param(
            "qwen3",
            {"target_modules": ["q_proj", "v_proj", "lm_head"], "lora_alpha": 24, "lora_dropout": 0.1},
            ["lora_dropout 0.1", "has no k_proj, o_proj: A and B of these are 0", "by 0.75, rounded"],
            id="qwen3-some",
        ),
        pytest.param(
            "llama",
            {"target_modules": ["o_proj"], "use_rslora": True, "lora_alpha": 8, "init_lora_weights": "gaussian"},
            ["has no", "by 0.5, exactly"],
            id="rslora",
        ),
        pytest.param("qwen2_5_vl", {"target_modules": LANGUAGE}, ["has no k_proj"], id="qwen2_5_vl"),
        pytest.param("qwen3_vl", {"target_modules": LANGUAGE, "r": 3}, ["has no k_proj"], id="qwen3_vl"),
        pytest.param(
            "qwen3_5",
            {"target_modules": ["in_proj_qkv", "out_proj", "q_proj"], "lora_alpha": 64},
            ["an A for each", "has no", "by 2, exactly"],
            id="delta-net",
        ),
        pytest.param("qwen3_moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, [], id="qwen3_moe"),
        pytest.param("gpt_oss", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, [], id="gpt_oss"),
    ],
)
def test_what_peft_wrote_computes_what_pefts_model_does(
    tuned: Make, tmp_path: Path, family: str, config: dict[str, Any], notes: list[str]
) -> None:
    trained = tuned(family, False) if family in ("qwen3_moe", "gpt_oss") else tuned(family)
    expected = by_peft(tmp_path, trained.model, **config)
    assert np.abs(expected - trained.base).max() > 0.3
    with imported(tmp_path, trained.model) as (trainer, _, told):
        assert len(told) == len(notes)
        assert all(part in note for part, note in zip(notes, told, strict=True)), told
        assert_computes(trainer, trained.model, expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Qwen3, and an adapter of PEFT on its attention."""
    root = tmp_path_factory.mktemp("refused")
    make_tiny_text_model(root / "model", family="qwen3")
    by_peft(root / "adapter", root / "model", target_modules=["q_proj", "v_proj"])
    return root / "model", root / "adapter"


def assert_refused(
    written: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], change: Any, message: str
) -> None:
    """Importing into the model, the first of `written`, what `config` and `change` make of the adapter, the second."""
    model, adapter = written
    given = json.loads((adapter / CONFIG).read_text()) | config
    (tmp_path / CONFIG).write_text(json.dumps(given))
    tensors = load_file(adapter / WEIGHTS)
    if change is not None:
        change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(InvalidRequestError, match=re.escape(message)), imported(tmp_path, model):
        pass


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _without(tensors: dict[str, Any], *names: str) -> None:
    for name in names:
        del tensors[name]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        pytest.param({"use_dora": True}, None, "use_dora: True is not supported: DoRA", id="dora"),
        pytest.param({"bias": "lora_only"}, None, "bias: 'lora_only' is not one of ['none']", id="bias"),
        pytest.param({"modules_to_save": ["lm_head"]}, None, "modules_to_save: ['lm_head'] is not", id="whole"),
        pytest.param({"rank_pattern": {"q_proj": 2}}, None, "q_proj.lora_A.weight: has shape [4, 64]", id="ranks"),
        pytest.param({"rank_pattern": {"q_proj": 0}}, None, "rank_pattern: {'q_proj': 0}: is not a rank", id="rank-0"),
        pytest.param({"rank_pattern": [4]}, None, "rank_pattern: [4] is not an object", id="rank-list"),
        pytest.param({"alpha_pattern": {"q_proj": True}}, None, "{'q_proj': True}: is not between 0", id="alphas"),
        pytest.param({"alpha_pattern": {"q_proj(": 2}}, None, "(q_proj()' is not a regular expression", id="no-regex"),
        pytest.param({"layers_to_transform": ["1"]}, None, "['1'] are not numbers of layers", id="layers"),
        pytest.param({"target_modules": [1]}, None, "target_modules: [1] is not a list of names", id="targets"),
        pytest.param({"megatron_config": {"x": 1}}, None, "its modules are Megatron's", id="megatron"),
        pytest.param({"trainable_token_indices": [5]}, None, "rows of the embedding were trained", id="tokens"),
        pytest.param(
            {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
            None,
            "names gate_proj in target_modules, and adapter_model.safetensors has no tensor of it",
            id="lost",
        ),
        pytest.param(
            {},
            lambda t: t.update({f"{Q}.lora_A.other.weight": t[f"{Q}.lora_A.weight"].clone()}),
            "holds several adapters: None, other",
            id="two-adapters",
        ),
        pytest.param({"init_lora_weights": "pissa"}, None, "init_lora_weights: 'pissa' is not one of", id="pissa"),
        pytest.param(
            {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
            None,
            "parameters of routed experts alone",
            id="experts",
        ),
        pytest.param({"peft_type": None}, None, "peft_type: None is not one of", id="untyped"),
        pytest.param({"peft_type": "LOHA"}, None, "peft_type: 'LOHA' is not one of", id="loha"),
        pytest.param({"new_method": "x"}, None, "new_method: 'x' is not known here", id="unknown-field"),
        pytest.param({"r": 0}, None, "r: 0 is not a rank", id="rank"),
        pytest.param({"r": 10**700, "use_rslora": True}, None, "is not a rank", id="huge-rank"),
        pytest.param({"lora_alpha": True}, None, "lora_alpha: True is not between", id="alpha-is-true"),
        pytest.param({"lora_alpha": -1}, None, "lora_alpha: -1 is not between 0 and 2,147,483,648", id="alpha"),
        pytest.param(
            {},
            lambda t: t.update({"n" * 10**5: torch.zeros(1)}),
            "nnn...: 100000 characters are more than 512",
            id="long-name",
        ),
        pytest.param(
            {"r": 8},
            None,
            "q_proj.lora_A.weight: has shape [4, 64], and the base model and the adapter's r want [8, 64]",
            id="another-rank",
        ),
        pytest.param(
            {},
            lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(60, 4)}),
            "q_proj.lora_B.weight: has shape [60, 4]",
            id="shape",
        ),
        pytest.param(
            {},
            lambda t: _without(t, f"{Q}.lora_B.weight"),
            "has base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, and no factor B",
            id="missing-factor",
        ),
        pytest.param(
            {},
            lambda t: _without(t, f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
            "names model.layers.0.self_attn.q_proj in target_modules, and adapter_model.safetensors has no tensor",
            id="missing-layer",
        ),
        pytest.param(
            {},
            lambda t: t.update(
                {f"{Q.replace('0', '9')}.lora_{f}.weight": t[f"{Q}.lora_{f}.weight"].clone() for f in "AB"}
            ),
            "layers.9.self_attn.q_proj.lora_A.weight: adapters of this model do not train such a module",
            id="no-such-layer",
        ),
        pytest.param(
            {},
            lambda t: t.update({f"base_model.model.model.norm.lora_{f}.weight": torch.zeros(4, 64) for f in "AB"}),
            "model.norm.lora_A.weight: adapters of this model do not train the module 'model.norm'",
            id="target",
        ),
        pytest.param(
            {},
            lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(4, 64)}),
            "lm_head.base_layer.weight: has shape [4, 64], and the base model's model.embed_tokens.weight [",
            id="base-layer",
        ),
        pytest.param(
            {},
            lambda t: t.update({f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}),
            f"{Q}.lora_A.weight: 256 of 256 values are not finite",
            id="nan",
        ),
        pytest.param(
            {},
            lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros((4, 64), dtype=torch.int32)}),
            f"{Q}.lora_A.weight: I32 is not one of F32, F16, BF16",
            id="integers",
        ),
    ],
)
def test_what_would_not_be_the_same_adapter_is_refused_by_name(
    written: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], change: Any, message: str
) -> None:
    assert_refused(written, tmp_path, config, change, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (WEIGHTS, b"PK\x03\x04 a pickle of torch", "is not a whole safetensors file"),
        (CONFIG, b"{", "adapter_config.json: is not JSON"),
        (CONFIG, b"[]", "holds no object"),
        (f"{WEIGHTS}.age", b"", "is encrypted"),
    ],
)
def test_files_that_are_no_adapter_are_refused(
    written: tuple[Path, Path], tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    for each in (CONFIG, WEIGHTS):
        (tmp_path / each).write_bytes((written[1] / each).read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        read_peft_adapter(tmp_path, family_of("qwen3", ""))


@pytest.mark.parametrize(
    ("shape", "padding", "message"),
    [
        pytest.param([0] * 65, 0, "a: shape [0, 0, ", id="dimensions"),
        pytest.param([0, 2**62], 0, "a: shape [0, 4611686018427387904]: array is too big", id="no-values"),
        pytest.param([0], 2**24, "bytes is more than 16777216", id="long"),
    ],
)
def test_headers_that_safetensors_takes_and_numpy_or_the_server_would_not_are_refused(
    written: tuple[Path, Path], tmp_path: Path, shape: list[int], padding: int, message: str
) -> None:
    (tmp_path / CONFIG).write_bytes((written[1] / CONFIG).read_bytes())
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode() + b" " * padding
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        read_peft_adapter(tmp_path, family_of("qwen3", ""))


def test_joined_parts_with_rslora_have_the_scale_that_peft_gives_them(tuned: Make, tmp_path: Path) -> None:
    """PEFT scales them by alpha / sqrt(3 r) with three times the alpha, and the others by alpha / sqrt(r)."""
    trained = tuned("qwen3_5")
    export_checkpoint(trained.checkpoint, tmp_path / "p", to="peft", base=str(trained.model), check=False)
    given = json.loads((tmp_path / "p" / CONFIG).read_text()) | {"use_rslora": True}
    (tmp_path / "p" / CONFIG).write_text(json.dumps(given))
    expected = by_from_pretrained(tmp_path / "p", trained.model)
    with imported(tmp_path / "p", trained.model) as (trainer, _, notes):
        assert len(notes) == 2, notes
        assert_computes(trainer, trained.model, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(written: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / CONFIG).write_bytes((written[1] / CONFIG).read_bytes())
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(written[1] / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS)
    found = read_peft_adapter(tmp_path, family_of("qwen3", "")).tensors
    assert all(np.array_equal(found[name], tensor.float().numpy()) for name, tensor in tensors.items())


def test_joined_parts_with_more_beside_the_diagonal_are_refused(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3_5")
    export_checkpoint(trained.checkpoint, tmp_path / "p", to="peft", base=str(trained.model), check=False)
    tensors = load_file(tmp_path / "p" / WEIGHTS)
    name = next(name for name in tensors if name.endswith("in_proj_qkv.lora_B.weight"))
    tensors[name][0, -1] = 1
    save_file(tensors, tmp_path / "p" / WEIGHTS)
    with (
        pytest.raises(InvalidRequestError, match=rf"{re.escape(name)}: rank 12 is more than the adapter's 4"),
        imported(tmp_path / "p", trained.model),
    ):
        pass


@pytest.fixture(scope="module")
def of_experts(tuned: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Qwen3-MoE, and an adapter of its experts for PEFT."""
    trained, folder = tuned("qwen3_moe", False), tmp_path_factory.mktemp("experts") / "adapter"
    export_checkpoint(trained.checkpoint, folder, to="peft", base=str(trained.model), check=False)
    return trained.model, folder


E = "base_model.model.model.layers.0.mlp.experts"


def _changed(name: str, row: int, column: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][row, column] += 1

    return change


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        pytest.param({}, _changed(f"{E}.base_layer.lora_A.weight", 9, 0), "differs between experts", id="a-of-gate"),
        pytest.param({}, _changed(f"{E}.lora_B.weight", 0, 1), "differs between experts", id="b-of-down"),
        pytest.param({}, _changed(f"{E}.base_layer.lora_B.weight", 0, -1), "not 0 beside its two blocks", id="beside"),
        pytest.param(
            {}, lambda t: _without(t, f"{E}.lora_A.weight"), f"and lacks {E}.lora_A.weight", id="missing-factor"
        ),
        pytest.param(
            {},
            lambda t: t.update({f"{E}.base_layer.lora_A.weight": t[f"{E}.base_layer.lora_A.weight"][:-1].clone()}),
            "PEFT before 0.19.1 has another form",
            id="shape",
        ),
        pytest.param(
            {"target_parameters": ["experts.gate_up_proj"]}, None, "gate_up_proj and down_proj together", id="one"
        ),
        pytest.param({"target_parameters": "experts.*"}, None, "target_parameters: ['experts.*'] is not", id="pattern"),
        pytest.param(
            {"target_parameters": ["other.gate_up_proj", "other.down_proj"]}, None, "holds no tensor", id="elsewhere"
        ),
        pytest.param(
            {"rank_pattern": {"gate_up_proj": 4}}, None, "rank 4 of model.layers.0.mlp.experts.gate_up_proj", id="rank"
        ),
    ],
)
def test_experts_of_peft_that_would_not_be_the_same_adapter_are_refused(
    of_experts: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], change: Any, message: str
) -> None:
    assert_refused(of_experts, tmp_path, config, change, message)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss"])
def test_what_the_cookbook_makes_of_experts_is_refused_by_name(tuned: Make, tmp_path: Path, family: str) -> None:
    """PEFT leaves it out silently; the export that it was made of is taken."""
    weights = pytest.importorskip("tinker_cookbook.weights")
    trained = tuned(family, False)
    built = tmp_path / "built"
    weights.build_lora_adapter(
        base_model=str(trained.model), adapter_path=str(trained.exported), output_path=str(built)
    )
    message = r"layers\.0\.mlp\.experts\.0\.\w+\.lora_A\.weight is a module of one expert, as the cookbook's"
    with pytest.raises(InvalidRequestError, match=message):
        read_peft_adapter(built, family_of(family, ""))
    with pytest.raises(InvalidRequestError, match=message):
        export_checkpoint(built, tmp_path / "out", to="peft", base=str(trained.model), check=False)
    export_checkpoint(trained.exported, tmp_path / "out", to="peft", base=str(trained.model), check=False)


@pytest.mark.parametrize(
    ("family", "lacking"),
    [("qwen3_5", "in_proj_k, in_proj_q, in_proj_v"), ("qwen3_moe", "w1, w2, w3"), ("qwen3", "o_proj")],
)
def test_an_adapter_that_has_lost_what_it_says_it_trained_is_refused_by_name(
    tuned: Make, tmp_path: Path, family: str, lacking: str
) -> None:
    """As PEFT saves what it loaded of an adapter, if it does not know all of its tensors."""
    trained = tuned(family, False)
    tensors = {
        name: tensor
        for name, tensor in load_file(trained.exported / WEIGHTS).items()
        if name.split(".")[-3] not in lacking.split(", ")
    }
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((trained.exported / CONFIG).read_bytes())
    message = f"names {lacking} in target_modules, and adapter_model.safetensors has no tensor of it"
    with pytest.raises(InvalidRequestError, match=message), imported(tmp_path, trained.model):
        pass
    with pytest.raises(InvalidRequestError, match=message):
        export_checkpoint(tmp_path, tmp_path / "out", to="peft", base=str(trained.model), check=False)


def test_what_peft_trained_of_experts_is_refused_for_what_they_do_not_share(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3_moe", False)
    patterns = {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"gate_up_proj": 64}}
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    by_peft(tmp_path, trained.model, target_modules=["q_proj"], target_parameters=parameters, **patterns)
    with pytest.raises(InvalidRequestError, match="all experts share A of gate and up, and B of down"):
        read_peft_adapter(tmp_path, family_of("qwen3_moe", ""))
