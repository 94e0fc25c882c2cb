"""Triton's autotuner and compiler, for a GPU that only a fake of its driver knows: nothing is launched."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch


def test_all_choices_are_compiled_in_threads_before_the_first_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    from tinker_local.backend.autotuning import compile_choices_at_once
    from triton.runtime._async_compile import FutureKernel
    from triton.runtime.autotuner import Autotuner

    from tests.training.autotuned_kernel import Driver, halve

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # vLLM sets it where it is imported, and then a key goes into a file, which cannot name the tensor here.
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(Autotuner, "_bench", Autotuner._bench)  # restored after the test
    compile_choices_at_once.__wrapped__()
    compiled, timed = list[int](), list[int]()

    def do_bench(launch: Any, quantiles: Any) -> list[float]:
        timed.append(len(compiled))
        launch()
        return [float(len(timed))] * 3

    blocks = (16, 32, 64, 128)
    choices = [triton.Config({"block": block}) for block in blocks]
    kernel = triton.jit(halve)
    compile_one = triton.compiler.compile

    def noted(source: Any, **options: Any) -> Any:
        result = compile_one(source, **options)
        assert threading.current_thread() is not threading.main_thread()
        compiled.append(source.constants[(1,)])
        return result

    monkeypatch.setattr(triton.compiler, "compile", noted)
    tuner = triton.autotune(choices, key=["x"], do_bench=do_bench)(kernel)
    tuner.run(torch.zeros(128), grid=(1,), warmup=True)
    assert sorted(compiled) == [16, 64, 128]
    assert timed == [3, 3, 3, 3]
    assert tuner.best_config.kwargs == {"block": 16}
    assert tuner.configs_timings[choices[1]] == [float("inf")] * 3
    kernels = kernel.device_caches[0][0].values()
    assert len(kernels) == 3
    assert not any(isinstance(each, FutureKernel) for each in kernels), (
        "it would keep the error, and what that refers to"
    )
