"""Where the time of a start went is known, by engine and stage."""

import time
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.options import BackendOptions, EnginePlace, ModelSource
from tinker_local.backend.stages import Stage, in_words, stage, taken
from tinker_local.backend.vllm_engine import patches

pytestmark = pytest.mark.more

ENGINE = {"imports", "options", "device", "weights", "compiled", "KV cache", "kernels", "engine"}
TRAINER = {"weights", "numbers checked", "decoder compared"}


def test_a_stage_does_not_count_those_inside_it() -> None:
    taken()
    with stage("outer"):
        time.sleep(0.05)
        for _ in range(2):
            with stage("inner"):
                time.sleep(0.1)
    inner, outer = taken()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.seconds >= 0.2
    assert outer.seconds >= 0.05
    assert taken() == ()


def test_a_stage_that_fails_is_timed_and_leaves_the_one_around_it_right() -> None:
    taken()
    with stage("outer"):
        try:
            with stage("inner"):
                time.sleep(0.05)
                raise ValueError
        except ValueError:
            pass
    inner, outer = taken()
    assert inner.seconds >= 0.05
    assert outer.seconds >= 0
    assert in_words([inner, Stage("quick", 0.01)]) == f"inner {inner.seconds:.1f} s"


def test_kernels_that_are_compiled_show_no_progress_bar_in_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    patches.apply_to_process()
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel

    compiled = []

    class Kernel(VllmJitKernel[int]):
        def get_warmup_keys(self, *args: Any, **kwargs: Any) -> list[int]:
            return [1, 2, 3]

        def compile(self, compile_key: int) -> None:
            compiled.append(compile_key)

    registry = JitWarmupRegistry(None)
    with registry.activate():
        Kernel().register_warmup(rows=3)
    registry.warmup()
    assert compiled == [1, 2, 3]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("place", ["inline", "process"])
async def test_an_engine_says_where_the_time_of_its_start_went(
    tiny_models: dict[str, Path], tmp_path: Path, place: EnginePlace
) -> None:
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path, max_context_length=256, kv_cache_bytes=2**26, sampler=place, trainer=place
    )
    began = time.monotonic()
    async with InProcessBackend(
        [ModelSource("tiny", str(tiny_models["tiny/text"]))], options, progress=said.append
    ) as b:
        seconds = time.monotonic() - began
        found = {
            part: {each.name: each.seconds for each in stages} for part, stages in b.models.get("tiny").start.items()
        }
    assert list(found) == ["server", "sampler", "trainer", "comparisons"]
    assert found["sampler"].keys() >= ENGINE
    assert found["trainer"].keys() >= TRAINER
    assert found["comparisons"].keys() >= {"positions", "logprobs", "adapters"}
    assert all(0 <= took <= seconds for stages in found.values() for took in stages.values())
    assert ("imports" in found["trainer"]) == (place == "process")
    [words] = [line for line in said if "started in" in line]
    assert "trainer: " in words or "sampler: " in words
