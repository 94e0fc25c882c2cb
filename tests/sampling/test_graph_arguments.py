"""Which CUDA graphs vLLM is asked for. Needs no GPU: vLLM reads the arguments, and none is captured."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.vllm_engine import build_engine, compat_vllm
from tinker_local.backend.vllm_engine.compat_vllm import graph_arguments, version

NAME = compat_vllm.BREAKABLE_GRAPHS


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(compat_vllm, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(build_engine, "runs_on_cpu", lambda: False)
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "0")
    monkeypatch.setenv(NAME, "1")
    monkeypatch.delenv(NAME)
    return monkeypatch


def read_by_vllm(folder: Path, arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(folder), **arguments)


def test_graphs_need_no_compiler_and_are_filled_up_by_a_quarter_at_most(
    on_a_gpu: pytest.MonkeyPatch, tiny_models: dict[str, Path]
) -> None:
    on_a_gpu.setattr(compat_vllm, "_distribution_version", lambda: (0, 32))
    build_engine.prepare_environment()
    assert os.environ[NAME] == "1"
    arguments = graph_arguments(1000, 288)
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == 896, "a step of 1000 positions has no graph of 1024"
    assert 288 in sizes, "all sequences together decode in a graph"
    assert all(larger <= max(1.25 * (size + 1), size + 8) for size, larger in pairwise(sizes))
    assert graph_arguments(2**20, 288)["compilation_config"]["cudagraph_capture_sizes"][-1] == 2048
    if version() >= (0, 32):
        import vllm.envs

        assert NAME in vllm.envs.environment_variables
        read = read_by_vllm(tiny_models["tiny/text"], arguments)
        assert read.compilation_config.cudagraph_capture_sizes == sizes
        assert read.compilation_config.mode == 0
        assert read.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
        assert read.kernel_config.enable_jit_warmup is False


@pytest.mark.parametrize("why", ["an older vLLM", "the user says so"])
def test_else_vllm_compiles_the_model(why: str, on_a_gpu: pytest.MonkeyPatch) -> None:
    on_a_gpu.setattr(compat_vllm, "_distribution_version", lambda: (0, 26) if why == "an older vLLM" else (0, 32))
    if why == "the user says so":
        on_a_gpu.setenv(NAME, "0")
    build_engine.prepare_environment()
    assert os.environ.get(NAME) == (None if why == "an older vLLM" else "0")
    assert graph_arguments(1000, 288)["compilation_config"] == {
        "mode": 3,
        "backend": "inductor",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
    }
