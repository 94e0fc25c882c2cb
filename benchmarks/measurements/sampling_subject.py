"""`python -m measurements.sampling_subject KIND SCALE MODEL ADAPTER GIB`: samples what each line of the standard input
asks for, a `Work` of `sampling_speed.py` as JSON, and prints `ANSWER` and the seconds that took.

KIND: `alone` (vLLM's `LLM`, with CUDA graphs as this project has them), `compiled` (the same with all of vLLM's
defaults), `engine` (this project's sampler in this process) or `sdk` (the official SDK against `tinker-local serve`).
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness.scale import SCALES, Scale
from sampling_speed import Work

MODEL = "bench/text"
SEQUENCES, POSITIONS = 1024, 8192
"""Of a step, as a server has them on a large GPU (`models/gpu_plan.py`)."""


class Subject(Protocol):
    """Samples. `close` ends what it started."""

    def sample(self, work: Work, prompts: Sequence[Sequence[int]]) -> int:
        """`work.samples` of each prompt; how many tokens came."""

    def close(self) -> None: ...


class Alone:
    """vLLM's `LLM`, in its two processes."""

    def __init__(self, scale: Scale, model: Path, adapter: Path, cache: int, *, compiled: bool) -> None:
        from harness.timing import device

        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        settings: dict[str, Any] = {}
        if device() == "cpu":
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
            settings = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}
        elif not compiled:
            graphs = {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [2**power for power in range(10)],
            }
            settings = {"compilation_config": {"mode": 0, **graphs}}
        import vllm
        from vllm.lora.request import LoRARequest

        self._llm = vllm.LLM(
            str(model), kv_cache_memory_bytes=cache, gpu_memory_utilization=0.01, enable_lora=True,
            max_lora_rank=scale.rank, **settings,
        )  # fmt: skip
        self._lora, self._params = LoRARequest("adapter", 1, str(adapter)), vllm.SamplingParams

    def sample(self, work: Work, prompts: Sequence[Sequence[int]]) -> int:
        params = self._params(
            n=work.samples, max_tokens=work.output_tokens, ignore_eos=True, temperature=1.0, detokenize=False,
            logprobs=0 if work.logprobs else None,
        )  # fmt: skip
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        lora = self._lora if work.adapter else None
        outputs = self._llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
        return sum(len(each.token_ids) for output in outputs for each in output.outputs)

    def close(self) -> None:
        core = getattr(self._llm.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()


THEIRS = "TINKER_LOCAL_BENCH_THEIR_LORA"
"""Set: `Engine` multiplies LoRA with vLLM's kernels."""
MAX_RANK = "TINKER_LOCAL_BENCH_MAX_RANK"
"""Set: ranks for which `Engine` and `Sdk` have room; else that of the adapter."""


class Engine:
    """`VLLMSampler`, in this process."""

    def __init__(self, scale: Scale, model: Path, adapter: Path, cache: int) -> None:
        from tinker_local.backend.adapters.adapter import AdapterVersion
        from tinker_local.backend.vllm_engine import lora_operators
        from tinker_local.backend.vllm_engine.build_engine import EngineOptions
        from tinker_local.backend.vllm_engine.engine_thread import EngineThread
        from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

        if os.environ.get(THEIRS):
            lora_operators.multiply_by_rows = lambda: None
        tiny = scale.name == "tiny"
        step = {} if tiny else {"max_sequences": SEQUENCES, "max_batched_tokens": POSITIONS}
        options = EngineOptions(
            str(model), max_rank=int(os.environ.get(MAX_RANK, scale.rank)), kv_cache_bytes=cache, **step
        )
        self._sampler = VLLMSampler(options, EngineThread())
        self._version = AdapterVersion("bench-random", adapter)
        self._runner = asyncio.Runner()
        self._runner.run(self._sampler.load_version(self._version))

    def sample(self, work: Work, prompts: Sequence[Sequence[int]]) -> int:
        from tinker_local.backend.rendering.rendered_input import RenderedInput
        from tinker_local.backend.sampling.sampler import SampleWork
        from tinker_local.types import SamplingParams

        version = self._version if work.adapter else None
        params = SamplingParams(max_tokens=work.output_tokens, stop=())

        async def all_of() -> int:
            works = [
                SampleWork(RenderedInput(np.array(prompt, np.int32)), version, params, num_samples=work.samples)
                for prompt in prompts
            ]
            outputs = await asyncio.gather(*map(self._sampler.sample, works))
            return sum(len(each.tokens) for output in outputs for each in output.sequences)

        return self._runner.run(all_of())

    def close(self) -> None:
        self._runner.run(self._sampler.close())


class Sdk:
    """The official SDK, in this process, against a server in another one."""

    def __init__(self, scale: Scale, model: Path, cache: int, stack: contextlib.ExitStack) -> None:
        from control_plane import served
        from harness.machine import gpu_count

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = [
            "--model",
            f"{MODEL}={model}",
            "--max-rank",
            os.environ.get(MAX_RANK, str(scale.rank)),
            "--kv-cache",
            str(cache / 2**30),
        ]
        if gpu_count():  # of what others have left
            arguments += ["--gpu-memory-utilization", "0.95", "--max-context-length", "4096"]
        url = stack.enter_context(served(folder / "data", *arguments))
        import tinker

        self._tinker, self._sizes = tinker, scale.text.vocab
        self._service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = self._service.create_lora_training_client(MODEL, rank=scale.rank, train_unembed=False).result()
        self._adapter = run.save_weights_and_get_sampling_client()
        self._base = self._service.create_sampling_client(base_model=MODEL)
        if hasattr(self._adapter, "result"):
            self._adapter = self._adapter.result()

    def sample(self, work: Work, prompts: Sequence[Sequence[int]]) -> int:
        types = self._tinker
        sampler = self._adapter if work.adapter else self._base
        params = types.SamplingParams(max_tokens=work.output_tokens, stop=[])
        inputs = self._pictured if work.side else [types.ModelInput.from_ints(list(prompt)) for prompt in prompts]
        sent = [sampler.sample(each, work.samples, params) for each in inputs]
        outputs = [future.result() for future in sent]
        if work.side:
            return len(outputs)
        found = sum(len(each.tokens) for output in outputs for each in output.sequences)
        assert all(np.isfinite(each.logprobs).all() for output in outputs for each in output.sequences)
        return found

    def draw_pictures(self, side: int, prompts: Sequence[Sequence[int]]) -> None:
        """Make the prompts of the next `sample`, which is not part of its time."""
        self._pictured = [
            self._tinker.types.ModelInput(chunks=self._with_picture(list(prompt), side)) for prompt in prompts
        ]

    def _with_picture(self, prompt: list[int], side: int) -> list[Any]:
        from PIL import Image

        pixels = np.random.default_rng(prompt).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((side, side)).save(file, "JPEG")
        picture = self._tinker.types.ImageChunk(data=file.getvalue(), format="jpeg")
        half = len(prompt) // 2
        text = [self._tinker.types.EncodedTextChunk(tokens=part) for part in (prompt[:half], prompt[half:])]
        return [text[0], picture, text[1]]

    def close(self) -> None:
        """The server ends with the stack."""


def subject_of(kind: str, scale: Scale, model: Path, adapter: Path, cache: int, stack: contextlib.ExitStack) -> Subject:
    if kind == "sdk":
        return Sdk(scale, model, cache, stack)
    if kind == "engine":
        return Engine(scale, model, adapter, cache)
    return Alone(scale, model, adapter, cache, compiled=kind == "compiled")


def main(kind: str, scale_name: str, model: str, adapter: str, gib: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    scale = SCALES[scale_name]
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        subject = subject_of(kind, scale, Path(model), Path(adapter), int(float(gib) * 2**30), stack)
        print(f"ANSWER {time.perf_counter() - began}", file=answers, flush=True)
        for line in sys.stdin:
            work = Work(**json.loads(line))
            shape = work.prompts, work.prompt_tokens
            high = scale.text.vocab if not work.side else min(200, scale.text.vocab)
            prompts = np.random.default_rng(work.seed).integers(5, high, shape).tolist()
            if work.side and isinstance(subject, Sdk):
                subject.draw_pictures(work.side, prompts)
            start = time.perf_counter()
            found = subject.sample(work, prompts)
            seconds = time.perf_counter() - start
            wanted = work.prompts * (1 if work.side else work.samples * work.output_tokens)
            if found != wanted:
                raise RuntimeError(f"{found} tokens came, not {wanted}")
            print(f"ANSWER {seconds}", file=answers, flush=True)
        subject.close()
    os._exit(0)  # engines' threads may go on


if __name__ == "__main__":
    main(*sys.argv[1:])
