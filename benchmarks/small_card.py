"""Does a model run on a card with less memory than this one has? Another process takes all but GIB of each GPU.

    python benchmarks/small_card.py --gib 23.5 --out benchmarks/results       # as much as a 3090 or 4090 has
    python benchmarks/small_card.py --gib 17 --shape 4b-vl --context 8192     # with pictures of 448 x 448
    python benchmarks/small_card.py --gib 15.6 --base-precision int4 --context 8192
    python benchmarks/small_card.py --gib 0 --tiny [--shape 4b-vl]            # the same code on a CPU

`serve MODEL --max-context-length 7168 --max-rank 32`, nothing else, plans for what is free. Then SFT on the same eight
sequences of 2,048 tokens, whose loss has to fall, and RL: sixteen samples of 128 tokens, a step on them with
`importance_sampling`, again and again. A model with a tower has four pictures in each sequence of SFT, and one in
each prompt. Says the plan's words, what the first GPU has in use by the driver, contexts included, the losses, and how
the sampler's logprobs differ from the trainer's. Random weights.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker_local.client as tinker
from control_plane import served
from engine import room_for_models
from harness import machine, processes, workloads
from harness.model_shapes import SHAPES as FAMILIES
from harness.scale import SCALES
from one_copy import UsedMemory
from random_model import SHAPES
from stacks import MODEL
from tinker.types import ImageChunk

VISION = {name for name, (_, vision) in SHAPES.items() if vision}

BALLAST = """
import sys, torch
kept = []
for gpu in range(torch.cuda.device_count()):
    torch.zeros(1, device=gpu)
    free, _ = torch.cuda.mem_get_info(gpu)
    kept.append(torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device=gpu))
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ballast(gib: float) -> Iterator[None]:
    """While open, `gib` GiB of each GPU are free for others. Does nothing without a GPU."""
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


@dataclass(frozen=True, slots=True)
class Work:
    """What prompts and sequences are made of. `images`: of a sequence of SFT, each `image_tokens` long."""

    vocabulary: int
    length: int
    prompt: int
    images: int
    side: int
    image_tokens: int

    def opening(self, images: int, seed: int) -> list[Any]:
        """Pictures that were not sent before with another seed."""
        return [
            ImageChunk(
                data=workloads.picture(self.side, 100 * seed + number), format="jpeg", expected_tokens=self.image_tokens
            )
            for number in range(images)
        ]


def datum(opening: list[Any], tokens: list[int], **more: list[float]) -> Any:
    """`tokens` after the pictures of `opening`; `more`: a number for each of `tokens`."""
    before = sum(chunk.expected_tokens for chunk in opening)
    chunks = [*opening, tinker.EncodedTextChunk(tokens=tokens[:-1])]
    cut = 0 if opening else 1
    inputs = {"target_tokens": [*[0] * (before - 1), *tokens][cut:]}
    inputs |= {name: [*[0.0] * (before - 1), *values][cut:] for name, values in more.items()}
    return tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def sft(run: Any, work: Work, steps: int) -> list[float]:
    """Nats for each token, by step."""
    length = work.length - work.images * work.image_tokens
    ids = np.random.default_rng(0).integers(0, work.vocabulary, (8, length)).tolist()
    data = [datum(work.opening(work.images, seed), tokens, weights=[1.0] * length) for seed, tokens in enumerate(ids)]
    scored = 8 * (length if work.images else length - 1)
    losses = []
    for _ in range(steps):
        done = run.forward_backward(data, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        losses.append(done.result().metrics["loss:sum"] / scored)
    return losses


def rl(run: Any, work: Work, turn: int) -> float:
    """One iteration; the mean absolute difference of sampler and trainer, in nats for each sampled token."""
    rng = np.random.default_rng(turn)
    sampler = run.save_weights_and_get_sampling_client().result()
    opening = work.opening(min(1, work.images), 100 + turn)
    prompt = rng.integers(0, work.vocabulary, work.prompt).tolist()
    wanted = tinker.SamplingParams(max_tokens=128, temperature=1.0, seed=turn)
    asked = tinker.ModelInput(chunks=[*opening, tinker.EncodedTextChunk(tokens=prompt)])
    sampled = sampler.sample(asked, 16, wanted).result().sequences
    data = []
    for sequence in sampled:
        tokens, zeros = [*prompt, *sequence.tokens], [0.0] * len(prompt)
        advantages = [*zeros, *[float(rng.normal())] * len(sequence.tokens)]
        data.append(datum(opening, tokens, logprobs=[*zeros, *sequence.logprobs], advantages=advantages))
    outputs = run.forward_backward(data, "importance_sampling").result().loss_fn_outputs
    run.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
    differences = [
        np.abs(np.asarray(output["logprobs"].data)[-len(sequence.logprobs) :] - np.asarray(sequence.logprobs))
        for output, sequence in zip(outputs, sampled, strict=True)
    ]
    return float(np.concatenate(differences).mean())


def write_model(options: argparse.Namespace, folder: Path, logs: Path) -> None:
    """In a process, whose memory is free afterwards."""
    if options.tiny:
        command = ["measurements.models", "tiny", str(folder), "vl" if options.shape in VISION else "text"]
    elif options.shape in FAMILIES:
        layers = str(FAMILIES[options.shape].settings["num_hidden_layers"])
        command = ["measurements.cut_model", "full", options.shape, layers, str(folder / "model")]
    else:
        command = ["random_model", str(folder / "model"), "--shape", options.shape]
    with (logs / "model.log").open("w") as log:
        if fault := processes.run(command, processes.MODEL_SECONDS, log).fault:
            raise RuntimeError(f"the model was not written: {fault}")
    if options.tiny:
        (folder / command[-1]).rename(folder / "model")


def work_of(options: argparse.Namespace, model: Path) -> Work:
    scale, config = SCALES["tiny" if options.tiny else "full"], json.loads((model / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    length, prompt = (64, 16) if options.tiny else (2048, 256)
    if "vision_config" not in config:
        return Work(vocabulary, length, prompt, 0, 0, 0)
    side, ids = scale.image_side, {config[f"{name}_token_id"] for name in ("image", "video", "vision_start")}
    # Qwen3-VL: patches of 16 pixels, merged 2 x 2. The ids of pictures are the tiny tokenizer's last ones.
    return Work(min(ids), length, prompt, 4, side, (side // 32) ** 2)


def measure(options: argparse.Namespace, folder: Path, logs: Path) -> Iterator[str]:
    model = options.model or folder / "model"
    if options.model is None:
        write_model(options, folder, logs)
    work = work_of(options, model)
    with ballast(options.gib):
        before, began = UsedMemory.now(), time.monotonic()
        serve = ["--model", f"{MODEL}={model}", "--max-rank", str(options.rank)]
        serve += ["--base-precision", options.base_precision] if options.base_precision else []
        serve += ["--head-precision", options.head_precision] if options.head_precision else []
        serve += ["--kv-cache", "0.25"] if options.tiny else ["--max-context-length", str(options.context)]
        log_file = logs / "serve.log"
        with UsedMemory() as memory, served(folder / "data", *serve, "--verbose", log=log_file) as url:
            yield f"ready after {time.monotonic() - began:.0f} s, {UsedMemory.now() - before:.1f} GiB in use"
            yield from (
                line for line in log_file.read_text().splitlines() if f" {MODEL}: " in line or "KV cache" in line
            )
            service = tinker.ServiceClient(base_url=url, api_key="tml-local")
            run = service.create_lora_training_client(base_model=MODEL, rank=options.rank, train_unembed=False).result()
            losses = sft(run, work, 6)
            yield f"SFT, nats for each token by step: {', '.join(f'{loss:.3f}' for loss in losses)}"
            yield f"peak until here: {memory.peak - before:.1f} GiB"
            differences = [rl(run, work, turn) for turn in range(3)]
            yield f"RL, sampler and trainer differ by: {', '.join(f'{each:.4f}' for each in differences)} nats"
            yield f"peak: {memory.peak - before:.1f} GiB of {options.gib:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, required=True, help="that are left free")
    parser.add_argument("--context", type=int, default=7168, help="in positions; the plan for 23.5 GiB takes no more")
    parser.add_argument("--shape", choices=[*SHAPES, *FAMILIES], default="8b", help="of the model")
    parser.add_argument("--model", type=Path, help="a folder, instead of a shape's random weights")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter, and --max-rank")
    parser.add_argument("--base-precision", choices=("int8", "int4"), help="of the server; by default bfloat16")
    parser.add_argument("--head-precision", choices=("int8",), help="the same of embedding and LM head")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for a dated file of the result")
    options = parser.parse_args()
    os.environ.update(processes.environment())
    kept = f"{options.base_precision or ''} {'head ' + options.head_precision if options.head_precision else ''}"
    lines = [*machine.describe(), f"{options.model or options.shape} {kept}, {options.gib} GiB free", ""]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        logs = (options.out or Path(folder)) / f"small-card-logs-{os.getpid()}"  # several may run, on a GPU each
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
