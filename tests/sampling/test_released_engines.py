"""An engine that is let go leaves no weights behind, also where vLLM's compiler has taken the model apart."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine import build_engine, compat_vllm, patches, release_engine
from tinker_local.backend.vllm_engine.triton_on_cpu import INTERPRETER

pytestmark = pytest.mark.more

SCRIPT = """
import gc, sys, weakref
from tinker_local.backend.vllm_engine import build_engine, compat_vllm, release_engine

if sys.argv[2] == "compiled":  # as on CUDA, where the platform does not take it back
    build_engine.prepare_environment()
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def compile_anyway(platform, config):
        check(platform, config)
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
        compilation.ir_enable_torch_wrap, compilation.compile_sizes = False, []
        for name in ("fuse_norm_quant", "fuse_act_quant"):
            setattr(compilation.pass_config, name, False)

    CpuPlatform.check_and_update_config = classmethod(compile_anyway)

if sys.argv[2] == "eager":  # as in a process that imports before it knows of the engine
    import os

    build_engine.import_vllm()
    patch = build_engine.patches.apply_to_config
    name = "TRITON_CACHE_AUTOTUNING"
    print("imported", os.environ.get(name))
    build_engine.patches.apply_to_config = lambda *given: print("building", os.environ.get(name)) or patch(*given)

from vllm import SamplingParams

options = build_engine.EngineOptions(
    sys.argv[1], kv_cache_bytes=2**26, max_context_length=256, max_rank=8, enforce_eager=sys.argv[2] == "eager"
)
engine = build_engine.build_engine(options)
if sys.argv[2] == "eager":  # as a server does when all is loaded
    gc.freeze()
engine.add_request("0", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4))
while engine.has_unfinished_requests():
    engine.step()
print("mode", int(engine.vllm_config.compilation_config.mode))
from vllm.lora.ops.triton_ops import utils as kernels  # used on CUDA alone

import torch

for module in compat_vllm.lora_worker(engine)._adapter_manager.modules.values():
    stacked = module.lora_a_stacked
    kernels._get_lora_a_ptr(stacked if isinstance(stacked, tuple) else (stacked,), torch.device("cpu"))
slots = [weakref.ref(slot) for slot in release_engine.lora_slot_tensors(compat_vllm.lora_worker(engine))]
of_another = torch.empty(4, 1, 8, 64)
kernels._get_lora_a_ptr([of_another], torch.device("cpu"))
print("noted", len(kernels._LORA_A_PTR_DICT))
weights = [weakref.ref(weight) for weight in compat_vllm.model_runner(engine).model.parameters()]
module = stacked = None
shell = weakref.ref(engine)
release_engine.release_engine(engine)
print("frozen", gc.get_freeze_count(), "searched", len(gc.get_objects()))
del engine
gc.collect()
print("engines left", int(shell() is not None))
print("notes left", len(kernels._LORA_A_PTR_DICT), "slots left", sum(slot() is not None for slot in slots))
print("left", sum(weight() is not None for weight in weights), "of", len(weights))
"""


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("eager", 0),
        pytest.param(
            *("compiled", 3),
            marks=pytest.mark.skipif(
                os.environ.get(INTERPRETER) == "1",
                reason="Model Runner V2 compiles with adapters, which the operators for CPUs here do not allow",
            ),
        ),
    ],
)
def test_a_released_engine_leaves_no_weights(tiny_models: dict[str, Path], how: str, mode: int) -> None:
    command = (sys.executable, "-W", "ignore", "-c", SCRIPT, str(tiny_models["tiny/text"]), how)
    environment = {"TORCH_COMPILE_DISABLE": "0"} if how == "compiled" else {}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"mode {mode}\n" in done.stdout
    if how == "eager":  # what vLLM's import sets holds for engines alone
        assert "imported None\nbuilding 1\n" in done.stdout
    assert int(re.search(r"noted (\d+)", done.stdout).group(1)) > 4  # type: ignore[union-attr]
    assert "notes left 1 slots left 0\n" in done.stdout
    frozen, searched = map(int, re.search(r"frozen (\d+) searched (\d+)", done.stdout).groups())  # type: ignore[union-attr]
    if how == "eager":  # which was frozen
        assert frozen > 10 * searched, "full collections walk all modules again"
    left, of = re.search(r"left (\d+) of (\d+)", done.stdout).groups()  # type: ignore[union-attr]
    assert int(of) > 10
    assert int(left) == 0


def test_a_built_engine_leaves_the_heap_as_it_was(text: Any) -> None:
    """So that releasing an engine need not look at all objects of the process."""
    frozen = gc.get_freeze_count()
    engine = build_engine.build_engine(
        build_engine.EngineOptions(str(text.folder), kv_cache_bytes=2**24, max_context_length=128, max_rank=8)
    )
    assert gc.get_freeze_count() <= frozen
    assert any(each is engine for each in gc.get_objects())
    release_engine.release_engine(engine)
    assert gc.get_freeze_count() <= frozen


def test_a_layer_may_have_several_caches_on_a_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model runner: vLLM 0.26 has a list of them for each layer of linear attention."""
    monkeypatch.setattr(release_engine, "lora_slot_tensors", lambda _: iter(()))
    model, caches = torch.nn.Linear(2, 2), [torch.zeros(1), [torch.zeros(1), torch.zeros(1)]]
    runner = SimpleNamespace(model=model, kv_caches=caches, lora_manager=None)
    assert len(release_engine._tensors_that_have_to_go(runner)) == 5


@pytest.mark.parametrize("released", ["first", "last"])
def test_buffers_of_steps_end_with_their_engine_on_fakes(monkeypatch: pytest.MonkeyPatch, released: str) -> None:
    """Of two engines, which are fakes as their workers are; vLLM's manager of buffers is real. On a CPU it has none."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(workspace, "_manager", None)
    monkeypatch.setattr(release_engine, "_forget_lora_pointers", lambda _: None)
    monkeypatch.setattr(release_engine, "_tensors_that_have_to_go", lambda _: [])
    engines, workers, buffers = {}, {}, {}
    for name in ("first", "last"):
        engines[name], workers[name], buffers[name] = engine_on_a_fake()
    assert buffers["first"]() is not None, "the graphs of the first engine would write to what was freed"
    release_engine.release_engine(engines[released])
    gc.collect()
    assert [name for name, worker in workers.items() if worker() is None] == [released]
    assert [name for name, buffer in buffers.items() if buffer() is None] == [released]
    workspace.current_workspace_manager().get_simultaneous(((64,), torch.uint8))


def test_a_build_that_fails_leaves_no_worker_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake worker, and vLLM's real manager of buffers."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(workspace, "_manager", None)
    last, _, buffer = engine_on_a_fake()
    workers = []

    @release_engine.workspaces_of_failures_left()
    def build() -> None:
        workers.append(engine_on_a_fake()[1])
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        build()
    gc.collect()
    assert workers[0]() is None
    assert buffer() is not None, f"freed under {last}"
    workspace.current_workspace_manager().get_simultaneous(((64,), torch.uint8))


class FakeWorker:
    def __init__(self) -> None:
        compilation = SimpleNamespace(static_forward_context={})
        self.model_runner = SimpleNamespace(compilation_config=compilation, kv_caches=[], model=None, lora_manager=None)

    def pool(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def engine_on_a_fake() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """An engine that has made buffers of steps, and weak references to its worker and to the buffer."""
    from vllm.v1.worker import workspace

    worker = FakeWorker()
    knows_worker = {"alloc_context": worker.pool} if compat_vllm.version() >= (0, 32) else {}
    workspace.init_workspace_manager(torch.device("cpu"), **knows_worker)
    workspace.current_workspace_manager().get_simultaneous(((64,), torch.uint8))
    [buffer] = workspace.current_workspace_manager()._current_workspaces
    engine = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=worker),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        engine_core=SimpleNamespace(engine_core=None),
        kept_by_dynamo=set(),
    )
    patches._keep_workspaces(engine, patches.EngineEvents())
    return engine, weakref.ref(worker), weakref.ref(buffer)
