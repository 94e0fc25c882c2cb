"""A version is served from memory before its folder is there, from its folder afterwards, with the same numbers."""

import asyncio
import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.vllm_engine import vllm_adapters
from tinker_local.backend.vllm_engine.host_memory import new_vector
from tinker_local.backend.vllm_engine.vllm_adapters import all_finite
from tinker_local.types import InvalidRequestError, LoraConfig

ALL = r"(q|k|v|o|gate|up|down)_proj$|^lm_head$"
TEXT = list(range(20, 60))


def state_of(adapter: Any) -> AdapterState:
    """What a trainer would have captured."""
    tensors = {}
    for module, pair in adapter.weights.items():
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = matrix.numpy().copy()
    modules = tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in adapter.weights))
    return AdapterState("m", LoraConfig(rank=adapter.rank), modules, tensors)


class Unwritten:
    """A version whose folder is written when `write` is called."""

    def __init__(self, adapter: Any) -> None:
        self.state: AdapterState | None = state_of(adapter)
        self.folder = adapter.version.path
        self.hidden = self.folder.with_suffix(".hidden")
        self.folder.rename(self.hidden)
        self.version = AdapterVersion(adapter.version.name, self.folder, lambda: self.state)

    def write(self) -> None:
        self.hidden.rename(self.folder)
        self.state = None


@pytest.mark.parametrize("model", ["text", "vl"])
async def test_a_version_without_a_folder_is_served_and_stays_the_same_when_it_is_read_again(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    served = request.getfixturevalue(model)
    adapter = served.adapter(tmp_path / "v1", ALL, 4)
    unwritten = Unwritten(adapter)
    captured = {name: array.copy() for name, array in unwritten.state.tensors.items()}  # type: ignore[union-attr]
    await served.sampler.load_version(unwritten.version)
    prompt = served.prompt(TEXT)
    first = await served.score(prompt, unwritten.version)
    with served.hf.merged(adapter):
        served.same(first, served.hf.prompt_logprobs(prompt))
    for name, array in captured.items():  # vLLM scales B where it lies: not where the trainer's copy lies
        assert np.array_equal(unwritten.state.tensors[name], array)  # type: ignore[union-attr]

    # Dropped from vLLM's memory: from the trainer's copy as long as there is no folder, then from the folder.
    for with_folder in (False, True):
        if with_folder:
            unwritten.write()
        await evict(served, unwritten.version)
        assert np.array_equal(await served.score(prompt, unwritten.version), first)
    await served.sampler.remove_version(unwritten.version)


async def evict(served: Any, version: AdapterVersion) -> None:
    """Let vLLM drop a version, as it does when others need the room; samples under it have ended."""
    sampler = served.sampler
    lora_id = sampler._adapters._requests[version.name].lora_int_id
    assert await asyncio.wrap_future(sampler._thread.call(sampler._engine, lambda engine: engine.remove_lora(lora_id)))
    await asyncio.wrap_future(sampler._thread.call(sampler._engine, lambda engine: engine.reset_prefix_cache()))


async def test_a_version_that_vllm_needs_again_within_a_step_is_made_there(text: Any, tmp_path: Path) -> None:
    adapter = text.adapter(tmp_path / "v1", ALL, 4)
    unwritten = Unwritten(adapter)
    await text.sampler.load_version(unwritten.version)
    prompt = text.prompt(TEXT)
    before = await text.score(prompt, unwritten.version)
    prepared = text.sampler._adapters.prepare

    async def dropped_meanwhile(version: AdapterVersion) -> Any:
        assert await prepared(version) is None
        await evict(text, version)

    text.sampler._adapters.prepare = dropped_meanwhile
    try:
        assert np.array_equal(await text.score(prompt, unwritten.version), before)
    finally:
        text.sampler._adapters.prepare = prepared
    await text.sampler.remove_version(unwritten.version)


async def test_samples_of_others_go_on_while_a_version_is_made_ready(
    text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that ask for a version at once share the work."""
    adapter = text.adapter(tmp_path / "v1", ALL, 4)
    made = []
    began, go_on = threading.Event(), threading.Event()
    original = vars(vllm_adapters)["host_adapter"]

    def slow(version: AdapterVersion, max_rank: int) -> Any:
        made.append(version.name)
        began.set()
        assert go_on.wait(60)
        return original(version, max_rank)

    monkeypatch.setattr(vllm_adapters, "host_adapter", slow)
    prompt = text.prompt(TEXT)
    loading = [asyncio.create_task(text.score(prompt, adapter.version)) for _ in range(3)]
    assert await asyncio.to_thread(began.wait, 60)
    for _ in range(2):
        await text.score(prompt)
    assert not any(task.done() for task in loading)
    go_on.set()
    assert len(await asyncio.gather(*loading)) == 3
    assert len(made) == 1
    await text.sampler.remove_version(adapter.version)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_captured_adapter_that_is_not_finite_is_refused(text: Any, tmp_path: Path, value: float) -> None:
    unwritten = Unwritten(text.adapter(tmp_path / "v1", ALL, 4))
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    unwritten.state.tensors[name][3, 1] = value  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match=r"layers\.1\.mlp\.down_proj hold NaN or infinity"):
        await text.sampler.load_version(unwritten.version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_is_told_exactly(dtype: torch.dtype) -> None:
    values = torch.full((10_000,), torch.finfo(dtype).max, dtype=dtype)  # any sum of them is infinite
    values[::2] *= -1
    assert all_finite(values)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 5_001, 9_999):
            spoilt = values.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_has_memory_of_its_own_until_the_last_view_of_it_is_gone(dtype: torch.dtype) -> None:
    values = torch.arange(10_000).to(dtype)
    vector = new_vector(10_000, dtype, lambda vector: vector.copy_(values), locked=False)
    another = new_vector(10_000, dtype, torch.Tensor.zero_, locked=False)
    view = vector[5_000:].view(50, 100)
    del vector
    gc.collect()
    assert torch.equal(view.flatten(), values[5_000:])
    assert not another.any()
    assert new_vector(0, dtype, torch.Tensor.zero_, locked=False).shape == (0,)


class Runtime:
    """What locking needs of CUDA's runtime."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert ctypes.string_at(address, size) == bytes(range(256)), "locked before it was written"
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        assert ctypes.string_at(address, 4) == bytes(range(4)), "the memory is gone"
        del self.locked[address]


def test_pages_are_locked_once_written_until_they_are_freed_on_a_fake_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    waits: list[bool] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(bool(runtime.locked)))
    values = torch.arange(256, dtype=torch.uint8)
    vector = new_vector(256, torch.uint8, lambda vector: vector.copy_(values), locked=True)
    assert list(runtime.locked.values()) == [256]
    view = vector[7:]
    del vector
    gc.collect()
    assert runtime.locked
    assert not waits
    del view
    gc.collect()
    assert not runtime.locked
    assert waits == [True], "what may still be read is unlocked"


def test_pages_that_cannot_be_locked_are_used_as_they_are_on_a_fake_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(801))
    values = torch.arange(256, dtype=torch.uint8)
    vector = new_vector(256, torch.uint8, lambda vector: vector.copy_(values), locked=True)
    assert torch.equal(vector, values)
