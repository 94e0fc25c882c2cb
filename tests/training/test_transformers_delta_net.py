"""Packages with kernels for GPUs may be installed where tensors are on a CPU: transformers' layers compute there too.

`fla` and `causal_conv1d` are stand-ins here: packages that transformers imports and whose functions fail, as the real
ones do without a GPU."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tinker_local.backend.families import family_of
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.training.kernels.choose_kernels import kernels_for
from tinker_local.backend.training.model.decoders import make_decoder, transformers_delta_net
from tinker_local.backend.training.model.load_model import config_of

FAILING = '__version__ = "0.6.0"\n' + "".join(
    f"def {name}(x, *args, **kwargs):\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
    for name in (
        *("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        *("causal_conv1d_fn", "causal_conv1d_update"),
    )
)
FILES = ("fla/__init__.py", "fla/ops/__init__.py", "fla/ops/gated_delta_rule/__init__.py", "causal_conv1d/__init__.py")


def is_of_package(module: str) -> bool:
    return module.partition(".")[0] in ("fla", "causal_conv1d")


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in FILES:
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path / "site")
    real = {name: sys.modules.pop(name) for name in [*sys.modules] if is_of_package(name)}
    yield
    for name in [*filter(is_of_package, sys.modules)]:
        del sys.modules[name]
    sys.modules.update(real)


def imported_again(family: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """transformers' module of the family, which looks for the packages while it is imported. Under another name: the
    process may have it already."""
    package = f"transformers.models.{family}"
    found = importlib.util.find_spec(f"{package}.modeling_{family}")
    assert found is not None
    assert found.origin is not None
    name = f"{package}.again"
    spec = importlib.util.spec_from_file_location(name, found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    transformers_delta_net._change.cache_clear()
    return module


def wrapped(module: ModuleType) -> list[str]:
    """What transformers takes from the packages, while it has not been changed."""
    codes = {name: getattr(function, "__code__", None) for name, function in vars(module).items()}
    return [name for name, code in codes.items() if code is not None and "is_new_implementation" in code.co_freevars]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_of_linear_attention_loads_without_a_gpu_though_kernels_for_one_are_installed(
    device: str, stand_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, where the memory of a model is planned, no kernel can run either."""
    module = imported_again("qwen3_5", monkeypatch)
    for function in (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule):
        with pytest.raises(RuntimeError, match="active drivers"):
            function(torch.zeros(1))
    folder = str(make_tiny_vl_model(tmp_path / "model", family="qwen3_5"))
    config, place = config_of(folder), torch.device(device)
    with place:
        model = module.Qwen3_5ForConditionalGeneration._from_config(config).eval().requires_grad_(False)
    kernels = kernels_for(place, torch.float32)
    for choice in ("written-out", "autograd"):
        make_decoder(model, family_of(config.model_type, folder), kernels, choice, folder, max_positions=64)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_all_that_transformers_takes_from_the_packages_is_known(
    family: str, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported_again(family, monkeypatch)
    assert sorted(wrapped(module)) == sorted(transformers_delta_net._FUNCTIONS)
    transformers_delta_net._change(module.__name__)
    assert wrapped(module) == []


@pytest.mark.parametrize(
    ("cuda", "dtype", "called"),
    [
        (True, torch.bfloat16, "kernel"),
        (True, torch.float16, "kernel"),
        (True, torch.float32, "plain"),
        (False, torch.bfloat16, "plain"),
    ],
)
def test_16_bits_on_a_gpu_alone_go_to_the_kernels_on_fake_tensors(cuda: bool, dtype: torch.dtype, called: str) -> None:
    def kernel(x: Any, *, activation: str) -> tuple[str, str]:
        return "kernel", activation

    def plain(x: Any, *, activation: str) -> tuple[str, str]:
        return "plain", activation

    chosen = transformers_delta_net._chosen(kernel, plain)
    assert chosen(SimpleNamespace(is_cuda=cuda, dtype=dtype), activation="silu") == (called, "silu")
