"""The layers of Gemma 4 on the decoders that train them, against transformers, in float64.

The models have windows of 16 positions, which data are longer than.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.models.gpu_plan import model_sizes
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutDecoder
from tinker_local.backend.training.model.load_model import decoder_of_sizes
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig

from tests.families.test_experts import Merged
from tests.float64 import InFloat64
from tests.training.autograd_reference import assert_computes_like, attention_in_float64, norms_in_float64
from tests.training.gemma4_models import KINDS, make_gemma4

LENGTHS = (40, 7, 1, 40, 23)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model of each of `KINDS`, written on first use."""
    root = tmp_path_factory.mktemp("gemma4")

    def folder(kind: str) -> Path:
        out = root / kind.replace(" ", "_")
        return out if out.exists() else make_gemma4(out, kind)

    return folder


def in_float64(folder: Path, decoder: Any = "written-out") -> tuple[HFTrainer, Any]:
    """A trainer of the model, and transformers' model."""
    ours = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="float64", device="cpu", decoder=decoder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    norms_in_float64(theirs)
    attention_in_float64(theirs)
    if decoder == "autograd":
        norms_in_float64(ours._loaded.model)
    return ours, theirs


MORE = [(kind, decoder) for kind in KINDS if kind != "experts" for decoder in ("written-out", "autograd")]


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        pytest.param(
            *case, marks=() if case in (("large", "written-out"), ("small", "written-out")) else pytest.mark.more
        )
        for case in MORE
    ],
)
def test_adapters_in_one_row_equal_transformers_with_each_alone(
    kind: str, decoder: Any, folders: Any, make: Any, add_adapter: Any
) -> None:
    """Logprobs, and the gradients of every matrix of adapters of three ranks, to 1e-9."""
    ours, theirs = in_float64(folders(kind), decoder)
    for place, rank in enumerate((4, 1, 13)):
        add_adapter(ours, f"{place}", rank=rank, seed=place)
    assert_computes_like(ours, theirs, [make.work(adapter, LENGTHS) for adapter in "012"])


@pytest.mark.parametrize("decoder", ["written-out", pytest.param("autograd", marks=pytest.mark.more)])
def test_adapters_of_experts_beside_an_mlp_equal_transformers_with_each_merged(
    decoder: Any, folders: Any, make: Any, add_adapter: Any
) -> None:
    """Also what reaches the hidden states through the router."""
    with InFloat64():
        ours = HFTrainer(
            TrainerConfig(str(folders("experts")), name="tiny", dtype="float64", device="cpu", decoder=decoder)
        )
        for place, rank in enumerate((4, 1)):
            add_adapter(ours, f"{place}", rank=rank, seed=place, train_unembed=False)  # the head is the embedding
        theirs = Merged(ours)
        works = [make.work(adapter, LENGTHS) for adapter in "01"]
        for work, result in zip(works, ours.forward_backward(works), strict=True):
            assert isinstance(result, TrainResult)
            for datum, output in zip(work.data, result.outputs, strict=True):
                rows = theirs.logprobs(work.adapter_id, datum.input)
                wanted = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
                np.testing.assert_allclose(output["logprobs"], wanted.detach(), rtol=1e-7, atol=1e-7)
                (-(torch.from_numpy(datum.loss_inputs["weights"]) * wanted).sum()).backward()
    for name, adapter in ours._adapters.items():
        assert adapter.gradient is not None
        assert any(".experts.w2." in spec.name for spec in adapter.specs)
        for spec in adapter.specs:
            grad = theirs.leaves[name][spec.name].grad
            assert grad is not None
            scale = float(grad.abs().max())
            assert scale > 0, spec.name
            torch.testing.assert_close(spec.view(adapter.gradient), grad, rtol=0, atol=1e-9 * scale, msg=spec.name)


@pytest.mark.parametrize("kind", [pytest.param("large", marks=pytest.mark.more), "small", "experts"])
def test_gradients_are_the_same_whatever_layers_keep(
    kind: str,
    folders: Any,
    make: Any,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values that later layers read are there when those run backward."""
    with InFloat64():
        ours = HFTrainer(TrainerConfig(str(folders(kind)), name="tiny", dtype="float64", device="cpu"))
    add_adapter(ours, "a")
    layers, data, seen = 7 if kind == "small" else 2, [make.datum(9), make.datum(30)], {}
    for keep in Keep:
        monkeypatch.setattr(ours._runner, "_policy", lambda *_, keep=keep: [keep] * layers)
        with InFloat64():
            ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen[keep] = gradients(ours, "a")
        ours.discard_gradients("a")
    for found in seen.values():
        assert_close(found, seen[Keep.ALL], 1e-12)


@pytest.mark.parametrize("kind", [pytest.param("large", marks=pytest.mark.more), "small"])
def test_what_data_share_is_computed_once_with_the_same_gradients(
    kind: str, folders: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    """A prompt that is longer than the window, and one after which all is in it."""
    data = [*make.group(make.input(30), (5, 20, 1)), *make.group(make.input(4), (3, 2))]
    together, apart = (in_float64(folders(kind))[0] for _ in range(2))
    for ours, works in (
        (together, [[TrainWork("a", data, "cross_entropy")]]),
        (apart, [[TrainWork("a", [datum], "cross_entropy")] for datum in data]),
    ):
        add_adapter(ours, "a")
        for each in works:
            ours.forward_backward(each)
    assert_close(gradients(together, "a"), gradients(apart, "a"), 1e-10)


def test_adapters_leave_out_keys_that_are_values(folders: Any) -> None:
    """vLLM adds what an adapter of them makes to keys alone."""
    for decoder in ("written-out", "autograd"):
        ours, _ = in_float64(folders("large"), decoder)
        ours.create_adapter("a", LoraConfig(rank=2))
        names = {name for name in ours.capture("a", optimizer=False).tensors if "k_proj" in name}
        assert {name.partition(".layers.")[2].partition(".")[0] for name in names} == {"0"}


ATTENTION = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6}
PUBLISHED: dict[str, dict[str, Any]] = {
    "31B": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 4,
        "hidden_size_per_layer_input": 0,
    },
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "E4B": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 256,
    },
}
"""The shapes of published models, with six layers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_written_out_by_the_config_alone(name: str, tmp_path: Path) -> None:
    """Before weights are there, as `tinker-local models` asks."""
    fields = {**ATTENTION, **PUBLISHED[name]}
    transformers.Gemma4TextConfig(**fields).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    decoder, _ = decoder_of_sizes(config, "bfloat16", "auto")
    assert isinstance(decoder, WrittenOutDecoder)
    kinds = {target.projection for target in decoder.targets}
    assert ("w1" in kinds) == (name == "26B-A4B")
    sizes = model_sizes(config.to_dict(), 1, 2)
    assert (sizes.chosen, sizes.expert_width) == ((8, 704) if name == "26B-A4B" else (0, 0))
    assert sizes.q_width == 512 * PUBLISHED[name]["num_attention_heads"]
