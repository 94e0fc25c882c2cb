"""Compare one draw of next tokens and their logprobs: ours against vLLM's sampler, without a model.

    python benchmarks/draw.py [--rows 256] [--vocab 151936]

Runs on the GPU if there is one, else on the CPU with fewer rows. Prints the milliseconds of the median step and the
peak memory of a step without its logits. Both samplers get the same logits and settings; vLLM applies the temperature
in both cases. `prompt`: logprobs of prompt tokens, one row each.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tinker_local.backend.vllm_engine.build_engine import prepare_environment

CASES = {
    "T = 1": {"temperature": 1.0},
    "T = 0.7, top_p = 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 1, top_k = 50": {"temperature": 1.0, "top_k": 50},
    "T = 0": {"temperature": 0.0},
    "half T = 0, half T = 1": {"temperature": None},
}


def main() -> None:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256 if on_cuda else 16)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=50 if on_cuda else 5)
    options = parser.parse_args()
    prepare_environment()
    from tinker_local.backend.vllm_engine.draw_tokens import FullVocabularyDraw, Logits
    from tinker_local.backend.vllm_engine.runner_v1 import draw_rows
    from vllm.v1.sample.sampler import Sampler

    device = torch.device("cuda" if on_cuda else "cpu")
    ours = Sampler()
    draw_rows(ours, FullVocabularyDraw(device))
    samplers = {"ours": ours, "vLLM raw": Sampler("raw_logprobs"), "vLLM processed": Sampler("processed_logprobs")}
    shape = (options.rows, options.vocab)
    logits = 3 * torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    logits = logits.to(torch.bfloat16 if on_cuda else torch.float32)
    table = Table("case", *samplers, title=f"{shape[0]} rows of {shape[1]}, {logits.dtype}, {device}, ms (MiB)")
    for name, case in CASES.items():
        metadata = sampling_metadata(options.rows, device, **case)
        table.add_row(
            name,
            *(cell(lambda s=s, m=metadata: s(logits.clone(), m), options.repeats) for s in samplers.values()),
        )
    ids = torch.randint(options.vocab, (options.rows,), device=device)
    table.add_row(
        "prompt",
        *(
            cell(
                (lambda: Logits(logits).of(ids))
                if s is ours
                else (lambda s=s: list(s.gather_logprobs(s.compute_logprobs(logits), 0, ids))),
                options.repeats,
            )
            for s in samplers.values()
        ),
    )
    Console(width=110).print(table)


def sampling_metadata(
    rows: int, device: torch.device, *, temperature: float | None, top_p: float | None = None, top_k: int | None = None
) -> object:
    """vLLM's settings of a step; a `temperature` of None alternates 0 and 1."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def column(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((rows,), value, dtype=dtype, device=device)

    values = torch.arange(rows, device=device) % 2 if temperature is None else torch.full((rows,), temperature)
    empty = torch.empty(0, device=device)
    return SamplingMetadata(
        temperature=None if temperature == 0 else values.to(device, torch.float32),
        all_greedy=temperature == 0,
        all_random=bool(temperature),
        top_p=column(top_p, torch.float32),
        top_k=column(top_k, torch.int32),
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def cell(step: Callable[[], object], repeats: int) -> str:
    """Median milliseconds, and MiB at the peak on a GPU (the copy of the logits that a step works on included)."""
    step()
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if on_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak = f" ({(torch.cuda.max_memory_allocated() - before) / 2**20:.0f})" if on_cuda else ""
    return f"{sorted(times)[len(times) // 2]:.2f}{peak}"


if __name__ == "__main__":
    main()
