"""Does a model run on a card with less memory than this one has? Another process takes all but GIB of the GPU.

    python benchmarks/small_card.py --gib 23.5 --out benchmarks/results       # as much as a 3090 or 4090 has
    python benchmarks/small_card.py --gib 0 --tiny                            # the same code on a CPU

`serve MODEL --max-context-length 7168 --max-rank 32`, nothing else, plans for what is free. Then SFT on the same eight
sequences of 2,048 tokens, whose loss has to fall, and RL: sixteen samples of 128 tokens, a step on them with
`importance_sampling`, again and again. Says the plan's words, what the GPU has in use by the driver, contexts included,
the losses, and how the sampler's logprobs differ from the trainer's. Random weights in the shape of Qwen3-8B.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker_local.client as tinker
from control_plane import served
from engine import room_for_models
from harness import machine, processes
from harness.scale import SCALES
from one_copy import UsedMemory
from stacks import MODEL

BALLAST = """
import sys, torch
torch.zeros(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ballast(gib: float) -> Iterator[None]:
    """While open, `gib` GiB of the first GPU are free for others. Does nothing without a GPU."""
    if not machine.gpu():
        yield
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", BALLAST, str(gib)], **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def datum(tokens: list[int], **more: list[float]) -> Any:
    inputs = {"target_tokens": tokens[1:], **{name: values[1:] for name, values in more.items()}}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sft(run: Any, vocabulary: int, length: int, steps: int) -> list[float]:
    """Nats for each token, by step."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (8, length)).tolist()
    data = [datum(tokens, weights=[1.0] * length) for tokens in ids]
    losses = []
    for _ in range(steps):
        done = run.forward_backward(data, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        losses.append(done.result().metrics["loss:sum"] / (8 * (length - 1)))
    return losses


def rl(run: Any, vocabulary: int, turn: int) -> float:
    """One iteration; the mean absolute difference of sampler and trainer, in nats for each sampled token."""
    rng = np.random.default_rng(turn)
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = rng.integers(0, vocabulary, 256).tolist()
    wanted = tinker.SamplingParams(max_tokens=128, temperature=1.0, seed=turn)
    sampled = sampler.sample(tinker.ModelInput.from_ints(prompt), 16, wanted).result().sequences
    data = []
    for sequence in sampled:
        tokens, zeros = [*prompt, *sequence.tokens], [0.0] * len(prompt)
        advantages = [*zeros, *[float(rng.normal())] * len(sequence.tokens)]
        data.append(datum(tokens, logprobs=[*zeros, *sequence.logprobs], advantages=advantages))
    outputs = run.forward_backward(data, "importance_sampling").result().loss_fn_outputs
    run.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
    differences = [
        np.abs(np.asarray(output["logprobs"].data)[len(prompt) - 1 :] - np.asarray(sequence.logprobs))
        for output, sequence in zip(outputs, sampled, strict=True)
    ]
    return float(np.concatenate(differences).mean())


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[str]:
    scale = SCALES["tiny" if options.tiny else "full"]
    processes.write_text_model(scale.name, folder, logs)
    with ballast(options.gib):
        before, began = UsedMemory.now(), time.monotonic()
        serve = [
            "--model",
            f"{MODEL}={folder / 'text'}",
            "--max-context-length",
            str(options.context),
            "--max-rank",
            "32",
        ]
        if options.tiny:
            serve = [*serve[:2], "--max-rank", "32", "--kv-cache", "0.25"]
        log_file = logs / "serve.log"
        with UsedMemory() as memory, served(folder / "data", *serve, "--verbose", log=log_file) as url:
            yield f"ready after {time.monotonic() - began:.0f} s, {UsedMemory.now() - before:.1f} GiB in use"
            yield from (
                line for line in log_file.read_text().splitlines() if f" {MODEL}: " in line or "KV cache" in line
            )
            service = tinker.ServiceClient(base_url=url, api_key="tml-local")
            run = service.create_lora_training_client(base_model=MODEL, rank=32, train_unembed=False).result()
            length = 64 if options.tiny else 2048
            losses = sft(run, scale.text.vocab, length, 6)
            yield f"SFT, nats for each token by step: {', '.join(f'{loss:.3f}' for loss in losses)}"
            yield f"peak until here: {memory.peak - before:.1f} GiB"
            differences = [rl(run, scale.text.vocab, turn) for turn in range(3)]
            yield f"RL, sampler and trainer differ by: {', '.join(f'{each:.4f}' for each in differences)} nats"
            yield f"peak: {memory.peak - before:.1f} GiB of {options.gib:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, required=True, help="that are left free")
    parser.add_argument("--context", type=int, default=7168, help="in positions; the plan for 23.5 GiB takes no more")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for a dated file of the result")
    options = parser.parse_args()
    os.environ.update(processes.environment())
    lines = [*machine.describe(), f"{options.gib} GiB free", ""]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / "small-card-logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for line in measure(options, Path(folder), logs):
                print(line, flush=True)
                lines.append(line)
        finally:
            if options.out:
                out = options.out / f"small_card-{time.strftime('%Y%m%d-%H%M%S')}.txt"
                out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
