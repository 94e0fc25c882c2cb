"""Checkpoints in fewer bits as others publish them: what is read of them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.cli.check_command import check_model
from tinker_local.backend.models.model_folder import look_at
from tinker_local.backend.models.placement import check_precision
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.model.load_model import check_weights, config_of, supported_family
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weights.codes import Packed, in_pairs
from tinker_local.backend.weights.packed import PackedLinear, packed
from tinker_local.backend.weights.published import WEIGHTS, published_of
from tinker_local.types import UnsupportedError

from tests.published_checkpoints import Method, awq, compressed, compressed_blocks, fp8, gptq, publish, scheme

WIDE = TextShape(hidden_size=192, intermediate_size=320, num_heads=6)
WHOLE_BLOCKS = TextShape(hidden_size=256, intermediate_size=384, num_kv_heads=4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(scales: torch.dtype, *, zeros: bool, order: bool, bits: int = 4, inputs: int = 64) -> Packed:
    """[24, 64], in two groups of 32."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (24, inputs), generator=generator, dtype=torch.int8)
    groups = torch.randperm(inputs, generator=generator).int() % 2
    return Packed(
        in_pairs(codes) if bits == 4 else codes,
        (random(24, 2).abs() / 7).to(scales),
        torch.randint(-9, 10, (24, 2), generator=generator, dtype=torch.int16) if zeros else None,
        groups if order else None,
    )


def by_hand(matrix: Packed) -> torch.Tensor:
    """In float64, number by number."""
    codes = matrix.codes
    if codes.dtype == torch.uint8:
        codes = torch.cat([part.int() - 8 for each in codes.split(16, 1) for part in (each & 15, each >> 4)], 1)
    rows, inputs = codes.shape
    size = inputs // matrix.scales.shape[1]
    result = torch.zeros(rows, inputs, dtype=torch.float64)
    for column in range(inputs):
        group = column // size if matrix.order is None else int(matrix.order[column])
        zero = 0 if matrix.zeros is None else matrix.zeros[:, group].double()
        result[:, column] = (codes[:, column].double() - zero) * matrix.scales[:, group].double()
    return result


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_number_is_rounded_once_with_any_scales_and_zero_points(
    scales: torch.dtype, bits: int, zeros: bool, order: bool
) -> None:
    """Scales of 16 bits: of the exact product. Of 32: of the product in float32."""
    matrix = stored(scales, zeros=zeros, order=order, bits=bits)
    exact = by_hand(matrix)
    assert torch.equal(matrix.numbers(torch.float64), exact)
    assert torch.equal(matrix.numbers(torch.float32), exact.float())
    assert torch.equal(matrix.numbers(torch.bfloat16), exact.float().bfloat16())


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, False), (True, True)])
def test_a_compiler_takes_the_numbers_without_a_break(scales: torch.dtype, zeros: bool, order: bool) -> None:
    """As vLLM compiles a whole model on a GPU, and captures it as a graph."""
    matrix = stored(scales, zeros=zeros, order=order)

    def numbers(*tensors: torch.Tensor) -> torch.Tensor:
        return Packed(*tensors).numbers(torch.bfloat16)

    compiled: Any = torch.compile(numbers, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(disable=False):  # which engines of other tests in this process switch off
        found = compiled(matrix.codes, matrix.scales, matrix.zeros, matrix.order)
    assert torch.equal(found, matrix.numbers(torch.bfloat16))


def test_pieces_of_a_large_matrix_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = stored(torch.float16, zeros=True, order=False)
    whole = matrix.numbers(torch.bfloat16)
    monkeypatch.setattr("tinker_local.backend.weights.codes._PIECE", 5 * 64)
    assert torch.equal(matrix.numbers(torch.bfloat16), whole)


@pytest.mark.parametrize(("zeros", "order"), [(True, False), (True, True)])
def test_products_of_joined_matrices_and_gradients_are_those_of_the_numbers(zeros: bool, order: bool) -> None:
    linear = torch.nn.Linear(64, 24, bias=False).double()
    parts = [PackedLinear(linear, stored(torch.float16, zeros=zeros, order=order)) for _ in range(3)]
    weight = by_hand(stored(torch.float16, zeros=zeros, order=order))
    matrix, x, grad = packed(parts), random(5, 64).double(), random(5, 72).double()
    assert torch.equal(matrix.times(x), x @ torch.cat([weight] * 3).T)
    assert torch.equal(matrix.back(grad), grad @ torch.cat([weight] * 3))
    x.requires_grad_()
    (found,) = torch.autograd.grad(parts[1](x).square().sum(), x)
    (expected,) = torch.autograd.grad((x @ weight.T).square().sum(), x)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def trainer_of(folder: str) -> HFTrainer:
    return HFTrainer(TrainerConfig(folder, name="m", dtype="float32", device="cpu", weights=WEIGHTS))


def weights_of(trainer: HFTrainer) -> dict[str, torch.Tensor]:
    modules = trainer._loaded.model.named_modules()
    return {path: each.weight for path, each in modules if isinstance(each, torch.nn.Linear)}


METHODS: dict[str, Callable[[], Method]] = {
    "fp8-blocks": lambda: fp8((128, 128)),
    "fp8-tensor": lambda: fp8(None),
    "gptq-4": lambda: gptq(4, 32),
    "gptq-8-order-zeros": lambda: gptq(8, 64, v2=True, zeros=True, order=True),
    "awq": lambda: awq(64),
    "w4a16": lambda: compressed(scheme("group", 4, group_size=32)),
    "w4a16-zeros": lambda: compressed(scheme("group", 4, group_size=64, symmetric=False)),
    "w4a16-order": lambda: compressed(scheme("group", 4, group_size=32, actorder="group"), order=True),
    "w8a16-zeros": lambda: compressed(scheme("channel", 8, symmetric=False)),
    "w8a8-float": lambda: compressed(scheme("channel", 8, type="float"), pack=False),
    "w8a8-int": lambda: compressed(scheme("channel", 8), pack=False),
    "w8a8-blocks": compressed_blocks,
}


@pytest.mark.parametrize("method", METHODS)
def test_the_trainer_reads_the_numbers_that_their_writer_says(method: str, tmp_path: Path) -> None:
    """Of matrices that blocks of 128 do not divide."""
    source = make_tiny_text_model(tmp_path / "model", shape=WIDE)
    folder, dense = publish(source, tmp_path, METHODS[method]())
    numbers = load_file(Path(dense) / "model.safetensors")
    trainer = trainer_of(folder)
    found = {f"{path}.weight": each for path, each in weights_of(trainer).items() if ".layers." in path}
    assert len(found) == 14
    assert all(torch.equal(each, numbers[name].float()) for name, each in found.items())
    trainer.close()


def test_blocks_of_fp8_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """transformers takes whole blocks alone."""
    source = make_tiny_text_model(tmp_path / "model", shape=WHOLE_BLOCKS)
    folder, _ = publish(source, tmp_path, fp8((128, 128)))
    whole = transformers.FineGrainedFP8Config(dequantize=True)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=whole
    )
    trainer = trainer_of(folder)
    found = weights_of(trainer)
    for path, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(found[path], module.weight.float()), path
    trainer.close()


def test_what_is_packed_is_counted_for_the_plan(tmp_path: Path) -> None:
    source = make_tiny_text_model(tmp_path / "model")
    folder, _ = publish(source, tmp_path, gptq(4, 32), keep=r"o_proj")
    published = published_of(folder)
    assert published is not None
    trainer = trainer_of(folder)
    modules = [each for each in trainer._loaded.model.modules() if isinstance(each, PackedLinear)]
    stored_bytes = sum(each.qweight.nbytes + each.scales.nbytes for each in modules)
    trainer.close()
    assert published.packable.bytes(published.layout.bits) == stored_bytes
    assert published.packable.numbers == sum(each.in_features * each.out_features for each in modules)
    assert look_at(ModelSource("m", folder)).parameters == look_at(ModelSource("m", str(source))).parameters
    assert config_of(folder).to_dict().get("quantization_config") is None


def test_check_tells_how_the_layers_are_stored_and_what_contradicts_it(tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32))
    (found,) = check_model(ModelSource("m", folder), BackendOptions(), whole=True)
    assert found.level == "ok"
    assert "read one copy, its layers as the files have them: GPTQ in 4 bits, groups of 32" in found.text
    for options, words in (
        (BackendOptions(base_precision="int8"), "--base-precision int8: the base is quantized already (GPTQ in 4 bits"),
        (BackendOptions(shared_weights="off"), "a quantized base (GPTQ in 4 bits, groups of 32): trainer and sampler"),
    ):
        problem, *_ = (each for each in check_model(ModelSource("m", folder), options) if each.level == "problem")
        assert words in problem.text
    with pytest.raises(
        ValueError, match=r"^a quantized base \(FP8\): trainer and sampler have to read one copy; 2 GPUs"
    ):
        check_precision(BackendOptions(), 2, published="FP8")


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def changed(folder: str, change: Change) -> str:
    """The problem that `check` finds in `folder` after `change` of its tensors and its quantization_config."""
    path = Path(folder)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    problem, *_ = look_at(ModelSource("m", folder)).problems
    assert "\n" not in problem
    return problem


UP = "model.layers.0.mlp.up_proj"


def with_draft(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """As Qwen publishes Qwen3.5 in FP8: a layer that predicts several tokens at once is quantised too."""
    for name in [name for name in tensors if name.startswith(f"{UP}.")]:
        tensors[name.replace("model.layers.0", "mtp.layers.0")] = tensors[name].clone()
    tensors["mtp.fc.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    config.update(modules_to_not_convert=["lm_head", "mtp.fc", "model.layers.0.linear_attn.in_proj_b"])


def with_scales_of_a_cache(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """As AMD publishes Llama, and llm-compressor a KV cache of 8 bits."""
    config.update(kv_cache_scheme="static", activation_scheme="static")
    tensors[f"{UP}.input_scale"] = torch.tensor(0.5)
    for layer, name in ((0, "k_proj.output_scale"), (0, "v_proj.output_scale"), (1, "k_scale"), (1, "v_scale")):
        tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.5)
    tensors["model.layers.1.self_attn.k_zero_point"] = torch.tensor(3, dtype=torch.int8)


def with_rules(_: Any, config: dict[str, Any]) -> None:
    """As Qwen and AutoRound publish GPTQ: rules that leave modules out, say nothing, or repeat what holds for all."""
    config.update(
        dynamic={"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*visual.*": {}, "-:.*mtp.*": {}}
        | {"+:.*mlp.*": {"bits": 4, "group_size": 32}}
    )


def with_other_words(_: Any, config: dict[str, Any]) -> None:
    """The same scheme twice, as compressed-tensors reads it."""
    config.update(quant_method="compressed_tensors", kv_cache_scheme={"num_bits": 8, "type": "float"})
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], "strategy": None, "actorder": "static"}
    config["config_groups"]["group_1"] = {**group, "targets": ["re:.*mlp.*"], "weights": weights}
    group["weights"]["actorder"] = "weight"


SERVED: dict[str, tuple[Callable[[], Method], Change, str]] = {
    "draft": (lambda: fp8((128, 128)), with_draft, "qwen3_5_text"),
    "cache": (lambda: fp8(None), with_scales_of_a_cache, "llama"),
    "rules": (lambda: gptq(4, 32), with_rules, "qwen3"),
    "words": (lambda: compressed(scheme("group", 4, group_size=32)), with_other_words, "qwen3"),
}


@pytest.mark.parametrize("case", SERVED)
def test_what_is_published_beside_the_weights_is_left_out(case: str, tmp_path: Path) -> None:
    """Each logprob is that of the same files without it."""
    make, change, family = SERVED[case]
    shape = TextShape(num_layers=4)
    folder, _ = publish(make_tiny_text_model(tmp_path / "model", family=family, shape=shape), tmp_path, make())
    before = trainer_of(folder)
    path, config_path = Path(folder) / "model.safetensors", Path(folder) / "config.json"
    tensors, config = load_file(path), json.loads(config_path.read_text())
    change(tensors, config["quantization_config"])
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, {"format": "pt"})
    config_path.write_text(json.dumps(config))
    assert look_at(ModelSource("m", folder)).problems == []
    found = published_of(folder)
    assert found is not None
    assert len({*found.tails()}) == len(found.modules)
    after = trainer_of(folder)
    weights = [dict(one._loaded.model.named_parameters()) for one in (before, after)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name].float(), weights[1][name].float()) for name in weights[0])
    before.close()
    after.close()


def test_words_of_records_tell_layouts_apart(tmp_path: Path) -> None:
    source, words = make_tiny_text_model(tmp_path / "model"), []
    methods = (
        gptq(4, 32),
        gptq(4, 64),
        gptq(4, 32, zeros=True),
        awq(32),
        fp8(None),
        compressed(scheme("channel", 8, type="float"), pack=False),
        compressed(scheme("channel", 8), pack=False),
    )
    for number, method in enumerate(methods):
        (tmp_path / str(number)).mkdir()
        found = published_of(publish(source, tmp_path / str(number), method)[0])
        assert found is not None
        words.append(found.word)
    layouts = ("gptq-int4-g32", "gptq-int4-g64", "gptq-int4-g32-zeros", "awq-int4-g32-zeros")
    assert words == [*layouts, "fp8-float8", "compressed-float8", "compressed-int8"]


def test_matrices_of_linear_attention_that_are_multiplied_as_one_have_one_order_of_columns(tmp_path: Path) -> None:
    source = make_tiny_text_model(tmp_path / "model", family="qwen3_5_text")
    folder, _ = publish(source, tmp_path, gptq(4, 32, order=True))
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.linear_attn.in_proj_z.g_idx"
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, path, {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"^in_proj_qkv, in_proj_z have columns in different orders"):
        trainer_of(folder)


def rename(tensors: dict[str, torch.Tensor], start: str, end: str) -> None:
    for name in [name for name in tensors if name.startswith(f"{start}.")]:
        tensors[name.replace(start, end)] = tensors.pop(name)


OF_GPTQ: dict[str, tuple[Change, str]] = {
    "bits": (lambda _, config: config.update(bits=3), "GPTQ in 3 bits cannot be served: 4 and 8 can"),
    "no-bits": (lambda _, config: config.pop("bits"), "bits of its quantization_config is None, and a whole number is"),
    "format": (lambda _, config: config.update(checkpoint_format="marlin"), "checkpoint_format 'marlin' of GPTQ"),
    "dynamic": (
        lambda _, config: config.update(dynamic={"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}),
        "dynamic gives '+:.*up.*' other bits than the rest",
    ),
    "no-scales": (lambda tensors, _: tensors.pop(f"{UP}.scales"), f"there is no {UP}.scales; download the model again"),
    "no-zeros": (lambda tensors, _: tensors.pop(f"{UP}.qzeros"), f"there is no {UP}.qzeros (GPTQ in 4 bits, groups of"),
    "group": (
        lambda _, config: config.update(group_size=64),
        "down_proj.scales is [4, 64], and [2, 64] is due for GPTQ in 4",
    ),
    "other-modules": (
        lambda tensors, _: rename(tensors, UP, "x"),
        "x is quantized (GPTQ in 4 bits, groups of 32), and quantized modules other than",
    ),
    "head": (
        lambda tensors, _: rename(tensors, UP, "lm_head"),
        "lm_head is quantized (GPTQ in 4 bits, groups of 32), and a quantized LM head cannot be served",
    ),
    "tower": (
        lambda tensors, _: rename(tensors, UP, "model.visual.blocks.0.mlp.up_proj"),
        "model.visual.blocks.0.mlp.up_proj is quantized (GPTQ in 4 bits, groups of 32), and a quantized vision tower",
    ),
    "experts": (
        lambda tensors, _: rename(tensors, UP, "model.layers.0.mlp.experts.3.up_proj"),
        "and quantized experts cannot be served",
    ),
    "fp8-instead": (
        lambda _, config: config.update(quant_method="fp8"),
        "(FP8), and its files have no tensor *.weight in F8_E4M3",
    ),
    "floats": (
        lambda tensors, _: tensors.update({f"{UP}.qzeros": tensors[f"{UP}.qzeros"].float()}),
        f"{UP}.qzeros is in F32, and I32 is due for GPTQ in 4 bits, groups of 32; download the model again",
    ),
    "also-dense": (
        lambda tensors, _: tensors.update({f"{UP}.weight": torch.ones(128, 64)}),
        f"{UP} has qweight (GPTQ in 4 bits, groups of 32) and also weight, and one of them is due",
    ),
    "no-list": (lambda _, config: config.update(dynamic=5), "its quantization_config cannot be read: TypeError("),
    "awq-of-old": (lambda _, config: config.update(quant_method="awq_marlin"), "quant_method 'awq_marlin' cannot be"),
}


@pytest.mark.parametrize("case", OF_GPTQ)
def test_what_of_gptq_cannot_be_served_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32))
    change, words = OF_GPTQ[case]
    assert words in changed(folder, change)


OF_FP8: dict[str, tuple[Change, str]] = {
    "format": (lambda _, config: config.update(fmt="e5m2"), "FP8 of fmt 'e5m2' cannot be served: e4m3 can"),
    "blocks": (lambda _, config: config.update(weight_block_size=128), "weight_block_size is 128, and two sizes are"),
    "other-blocks": (
        lambda _, config: config.update(weight_block_size=[64, 64]),
        ".weight_scale_inv is [1, 1], and [1, 2] is due for FP8 in blocks of 64 x 64",
    ),
    "no-scales": (
        lambda tensors, _: tensors.pop(f"{UP}.weight_scale_inv"),
        f"{UP}.weight is in F8_E4M3 (FP8 in blocks of 128 x 128), and there is no {UP}.weight_scale_inv or {UP}",
    ),
    "two-scales": (
        lambda tensors, _: tensors.update({f"{UP}.weight_scale": torch.ones(())}),
        f"{UP} has weight_scale_inv and weight_scale (FP8 in blocks of 128 x 128), and one of them is due",
    ),
    "dtypes-of-scales": (
        lambda tensors, _: tensors.update({f"{UP}.weight_scale_inv": torch.ones(1, 1)}),
        f"and F32 of {UP}; all must have one dtype",
    ),
    "one-of-joined": (
        lambda tensors, _: tensors.update({f"{UP}.weight": torch.ones(128, 64)}),
        f"model.layers.0.mlp.gate_proj is quantized (FP8 in blocks of 128 x 128) and {UP} is not, and both engines",
    ),
    "integers": (
        lambda tensors, _: tensors.update({f"{UP}.weight": torch.ones(128, 64, dtype=torch.int32)}),
        f"{UP}.weight is in I32, and config.json says FP8",
    ),
    "gptq-instead": (
        lambda _, config: config.update(quant_method="gptq", bits=4, group_size=128),
        "(GPTQ in 4 bits, groups of 128), and its files have no tensor *.qweight in I32",
    ),
}


@pytest.mark.parametrize("case", OF_FP8)
def test_what_of_fp8_cannot_be_served_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, fp8((128, 128)))
    change, words = OF_FP8[case]
    assert words in changed(folder, change)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_that_the_model_has_not_are_left_out(value: float, tmp_path: Path) -> None:
    """AutoGPTQ writes some for each module; others than zeros would be missed."""
    source = make_tiny_text_model(tmp_path / "model")
    folder, _ = publish(source, tmp_path, gptq(4, 32))
    path = Path(folder) / "model.safetensors"
    save_file({**load_file(path), f"{UP}.bias": torch.full((128,), value).half()}, path, {"format": "pt"})
    config = config_of(folder)
    check_weights(folder, config, supported_family(config, folder))
    if value:
        with pytest.raises(UnsupportedError, match=r"has model\.layers\.0\.mlp\.up_proj\.bias, which Qwen3ForCausalLM"):
            trainer_of(folder)
    else:
        trainer_of(folder).close()


def test_zero_points_of_another_format_are_named(tmp_path: Path) -> None:
    """A folder in GPTQ's second format without its name: each number would be off by a scale."""
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32, v2=True))
    path = Path(folder) / "config.json"
    path.write_text(path.read_text().replace("gptq_v2", "gptq"))
    with pytest.raises(UnsupportedError, match=r"qzeros has the zero point 9, and sym of .* says that all are 8"):
        trainer_of(folder)


def test_a_zero_point_that_programs_read_in_two_ways_is_refused(tmp_path: Path) -> None:
    """GPTQ's first format stores zero points less one: the largest may have been 0, or one more than fits."""
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32, zeros=True))
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{UP}.qzeros"][0, 0] |= 15
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"up_proj\.qzeros has a zero point that is stored as 15, which .* 0 or"):
        trainer_of(folder)


OF_AWQ: dict[str, tuple[Change, str]] = {
    "bits": (lambda _, config: config.update(bits=8), "AWQ in 8 bits cannot be served: 4 can"),
    "version": (lambda _, config: config.update(version="gemv"), "AWQ of version 'gemv' cannot be served: gemm can"),
    "format": (
        lambda _, config: (config.pop("version"), config.update(format="gemv_fast")),
        "AWQ of version 'gemv_fast' cannot be served: gemm can",
    ),
    "group": (lambda _, config: config.update(group_size=128), ".scales is [4, 64], and [1, 64] is due for AWQ in 4"),
    "no-zeros": (lambda tensors, _: tensors.pop(f"{UP}.qzeros"), f"there is no {UP}.qzeros (AWQ in 4 bits, groups of"),
    "as-gptq": (
        lambda _, config: config.update(quant_method="gptq"),
        ".scales is [4, 64], and [32, 8] is due for GPTQ in 4 bits",
    ),
}


@pytest.mark.parametrize("case", OF_AWQ)
def test_what_of_awq_cannot_be_served_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, awq(32))
    change, words = OF_AWQ[case]
    assert words in changed(folder, change)


def with_weights(config: dict[str, Any], written: str = "pack-quantized", **fields: Any) -> None:
    config["format"] = written
    config["config_groups"]["group_0"]["weights"].update(fields)


OF_COMPRESSED: dict[str, tuple[Change, str]] = {
    "nvfp4": (
        lambda _, config: config.update(format="nvfp4-pack-quantized"),
        "compressed-tensors of format 'nvfp4-pack-quantized' cannot be served: pack-quantized, float-quantized",
    ),
    "several": (
        lambda _, config: config["config_groups"].update(group_1={"weights": scheme("channel", 8)}),
        "config_groups have several schemes of weights; modules in several precisions cannot be served",
    ),
    "no-groups": (lambda _, config: config.update(config_groups={}), "have no scheme of weights"),
    "rotated": (
        lambda _, config: config.update(transform_config={"config_groups": {"u": {}}}),
        "transform_config of compressed-tensors cannot be served",
    ),
    "sparse": (
        lambda _, config: config.update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse weights of compressed-tensors (sparse-24-bitmask) cannot be served",
    ),
    "bits": (
        lambda _, config: with_weights(config, num_bits=2),
        "int in 2 bits, groups of 32, cannot be served as pack-quantized: int in 4 or 8 bits by group or row can",
    ),
    "strategy": (lambda _, config: with_weights(config, strategy="token"), "strategy 'token' of compressed-tensors"),
    "zeros": (
        lambda _, config: with_weights(config, symmetric=False),
        "weight_zero_point (compressed-tensors, int in 4 bits, groups of 32, with zero points); download",
    ),
    "order": (
        lambda _, config: with_weights(config, actorder="group"),
        "weight_g_idx (compressed-tensors, int in 4 bits, groups of 32); download the model again",
    ),
    "blocks": (
        lambda _, config: with_weights(config, strategy="block", block_structure=[0, 128]),
        "block_structure is [0, 128], and two sizes are due, as [128, 128]",
    ),
    "float": (
        lambda _, config: with_weights(config, written="float-quantized", type="float"),
        "float in 4 bits, groups of 32, cannot be served as float-quantized: symmetric int or float in 8 bits can",
    ),
}


@pytest.mark.parametrize("case", OF_COMPRESSED)
def test_what_of_compressed_tensors_cannot_be_served_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    method = compressed(scheme("group", 4, group_size=32))
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, method)
    change, words = OF_COMPRESSED[case]
    assert words in changed(folder, change)


IN_ORDER: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "differing": (
        lambda tensors: tensors[f"{UP}.g_idx"].copy_(tensors[f"{UP}.g_idx"].flip(0)),
        r"^gate_proj, up_proj have columns in different orders \(desc_act\), and both engines multiply by them as one",
    ),
    "beyond": (
        lambda tensors: tensors[f"{UP}.g_idx"].__setitem__(0, 2),
        r"up_proj\.g_idx has groups from 0 to 2, and there are 2$",
    ),
}


@pytest.mark.parametrize("case", IN_ORDER)
def test_groups_of_columns_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32, order=True))
    path, (change, words) = Path(folder) / "model.safetensors", IN_ORDER[case]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedError, match=words):
        trainer_of(folder)


def test_an_order_of_columns_that_the_config_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32, order=True))
    path = Path(folder) / "config.json"
    path.write_text(path.read_text().replace('"desc_act": true', '"desc_act": false'))
    with pytest.raises(UnsupportedError, match=r"g_idx has columns of a group that are not side by side, and desc_act"):
        trainer_of(folder)


@pytest.mark.parametrize(("told", "read"), [(True, True), ("GROUP", True), ("weight", False), (None, False)])
def test_columns_that_name_their_groups_are_read_by_these_or_refused(told: Any, read: bool, tmp_path: Path) -> None:
    """compressed-tensors reads them whatever `actorder` is, and True as "group"."""
    method = compressed(scheme("group", 4, group_size=32, actorder="group"), order=True)
    folder, dense = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, method)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    with_weights(config["quantization_config"], actorder=told)
    path.write_text(json.dumps(config))
    if not read:
        with pytest.raises(UnsupportedError, match=r"weight_g_idx has columns of a group that are not .* actorder of"):
            trainer_of(folder)
        return
    trainer = trainer_of(folder)
    found = weights_of(trainer)[UP]
    trainer.close()
    assert torch.equal(found, load_file(Path(dense) / "model.safetensors")[f"{UP}.weight"].float())


@pytest.mark.parametrize("pack", [True, False])
def test_zero_points_of_codes_that_are_said_to_be_symmetric_are_refused_unless_0(pack: bool, tmp_path: Path) -> None:
    """Some versions of llm-compressor write zeros; others than these would be missed."""
    method = compressed(scheme("channel", 8), pack=pack)
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, method)
    path = Path(folder) / "model.safetensors"
    for value in (0, 3):
        zeros = torch.full((128, 1), value, dtype=torch.int8)
        save_file({**load_file(path), f"{UP}.weight_zero_point": zeros}, path, {"format": "pt"})
        if value:
            with pytest.raises(UnsupportedError, match=r"weight_zero_point has numbers other than 0, and the quant"):
                trainer_of(folder)
        else:
            trainer_of(folder).close()


def test_a_code_of_fp8_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, fp8((128, 128)))
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.up_proj\.qweight has a number that is NaN"):
        trainer_of(folder)


def test_activations_scales_of_fp8_are_left_out(tmp_path: Path) -> None:
    """Static ones, by which vLLM would round what a matrix is multiplied by."""
    folder, dense = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, fp8(None))
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    scales = {name.replace("weight_scale", "input_scale"): torch.ones(()) for name in tensors if "weight_scale" in name}
    save_file(tensors | scales, path, {"format": "pt"})
    trainer = trainer_of(folder)
    numbers = load_file(Path(dense) / "model.safetensors")
    found = {f"{path}.weight": each for path, each in weights_of(trainer).items() if ".layers." in path}
    assert all(torch.equal(each, numbers[name].float()) for name, each in found.items())
    trainer.close()
