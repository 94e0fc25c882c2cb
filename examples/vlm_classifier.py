"""Teach a vision-language model to read handwritten digits, through the official Tinker SDK.

    tinker-local serve --model NAME[=PATH]
    python examples/vlm_classifier.py --model NAME

Data: scikit-learn's 1,797 scanned digits of 8x8 pixels; the last 297 are held out. Supervised fine-tuning of a LoRA
adapter, then evaluation by sampling the answer at temperature 0, before and after, and on blank images as a control.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from tinker_local.client import model_input
from transformers import AutoImageProcessor

HELD_OUT = 297
QUESTION = "Which digit?"


@dataclass
class Report:
    """What a run found; accuracies are shares of held-out images, NLL in nats per answer."""

    base_accuracy: float
    accuracy: float
    blank_accuracy: float
    base_nll: float
    nll: float
    train_images_per_second: float
    sampled_images_per_second: float
    seconds: float


def enlarge(image: np.ndarray, side: int) -> np.ndarray:
    """An 8x8 image of values 0..16 as RGB uint8 [side, side, 3]."""
    scaled = np.clip(image * (255 / 16), 0, 255).astype(np.uint8)
    return np.repeat(np.repeat(scaled, side // 8, 0), side // 8, 1)[..., None].repeat(3, 2)


def shifted(image: np.ndarray, rng: random.Random) -> np.ndarray:
    """The image as it is or moved by one pixel: as a reader of digits would not mind."""
    moved = np.zeros_like(image)
    dy, dx = rng.choice([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])
    moved[max(dy, 0) : 8 + min(dy, 0), max(dx, 0) : 8 + min(dx, 0)] = image[
        max(-dy, 0) : 8 + min(-dy, 0), max(-dx, 0) : 8 + min(-dx, 0)
    ]
    return moved


class Task:
    """Prompts and training examples in the model's chat format."""

    def __init__(self, client: tinker.TrainingClient, side: int) -> None:
        self.tokenizer = client.get_tokenizer()
        self.processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)
        self.side = side
        self.end = self.tokenizer.encode("<|im_end|>", add_special_tokens=False)

    def prompt(self, image: np.ndarray) -> tinker.ModelInput:
        return model_input(
            f"<|im_start|>user\n{QUESTION}",
            enlarge(image, self.side),
            "<|im_end|>\n<|im_start|>assistant\n",
            tokenizer=self.tokenizer,
            image_processor=self.processor,
        )

    def datum(self, image: np.ndarray, label: int) -> tinker.Datum:
        """Prompt and answer; only the answer is trained."""
        prompt = self.prompt(image)
        answer = self.tokenizer.encode(str(label), add_special_tokens=False) + self.end
        inputs = prompt.append(tinker.EncodedTextChunk(tokens=answer[:-1]))
        before = prompt.length - 1
        return tinker.Datum(
            model_input=inputs,
            loss_fn_inputs={
                "target_tokens": np.array([0] * before + answer, dtype=np.int64),
                "weights": np.array([0.0] * before + [1.0] * len(answer), dtype=np.float32),
            },
        )

    def read(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def accuracy(sampler: tinker.SamplingClient, task: Task, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of images whose sampled text is the label."""
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    answers = [sampler.sample(task.prompt(image), 1, params) for image in images]
    right = [
        task.read(answer.result().sequences[0].tokens) == str(label)
        for answer, label in zip(answers, labels, strict=True)
    ]
    return float(np.mean(right))


def negative_log_likelihood(client: tinker.TrainingClient, task: Task, images: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood of an answer, in nats."""
    data = [task.datum(image, int(label)) for image, label in zip(images, labels, strict=True)]
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"] / len(data)


def train(client: tinker.TrainingClient, task: Task, options: argparse.Namespace, curves: dict) -> float:
    """Fine-tune on all but the held-out images; returns images per second."""
    digits = load_digits()
    images, labels = digits.images[:-HELD_OUT], digits.target[:-HELD_OUT]
    test_images, test_labels = digits.images[-HELD_OUT:][:100], digits.target[-HELD_OUT:][:100]
    rng = random.Random(options.seed)
    per_epoch = math.ceil(len(images) / options.batch_size)
    steps = math.ceil(options.epochs * per_epoch)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    trained, busy = 0, 0.0
    order: list[int] = []
    with Progress(*columns, TextColumn("nll {task.fields[nll]:.3f}"), console=options.console) as progress:
        bar = progress.add_task("", total=steps, nll=float("nan"))
        for step in range(steps):
            if len(order) < options.batch_size:
                order += rng.sample(range(len(images)), len(images))
            batch, order = order[: options.batch_size], order[options.batch_size :]
            start = time.monotonic()
            data = [task.datum(shifted(images[i], rng) if options.shift else images[i], int(labels[i])) for i in batch]
            warm = min(1.0, (step + 1) / options.warmup)
            rate = options.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            gradient = client.forward_backward(data, "cross_entropy")
            update = client.optim_step(
                tinker.AdamParams(learning_rate=rate, beta2=0.99, eps=1e-8, grad_clip_norm=options.clip)
            )
            nll = gradient.result().metrics["loss:sum"] / len(data)
            update.result()
            busy += time.monotonic() - start
            trained += len(data)
            curves["train_nll"].append((step + 1, nll))
            progress.update(bar, advance=1, nll=nll)
            if (step + 1) % options.eval_every == 0 or step + 1 == steps:
                held_out = negative_log_likelihood(client, task, test_images, test_labels)
                sampler = client.save_weights_and_get_sampling_client().result()
                curves["nll"].append((step + 1, held_out))
                curves["accuracy"].append((step + 1, accuracy(sampler, task, test_images, test_labels)))
    return trained / busy


def draw(curves: dict, path: Path) -> None:
    """The curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot(*zip(*curves["train_nll"], strict=True), alpha=0.4, label="training batch")
    left.plot(*zip(*curves["nll"], strict=True), marker="o", label="held out")
    left.set(xlabel="step", ylabel="nll of the answer (nats)", ylim=(0, None))
    left.legend()
    right.plot(*zip(*curves["accuracy"], strict=True), marker="o")
    right.set(xlabel="step", ylabel="accuracy, held out", ylim=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def run(options: argparse.Namespace) -> Report:
    """Everything, in the order of the report."""
    start = time.monotonic()
    digits = load_digits()
    images, labels = digits.images[-HELD_OUT:], digits.target[-HELD_OUT:]
    curves: dict = {"train_nll": [], "nll": [], "accuracy": []}
    with tinker.ServiceClient(base_url=options.base_url) as service:
        client = service.create_lora_training_client(
            base_model=options.model, rank=options.rank, seed=options.seed
        ).result()
        task = Task(client, options.side)
        base = service.create_sampling_client(base_model=options.model).result()
        base_accuracy = accuracy(base, task, images, labels)
        base_nll = negative_log_likelihood(client, task, images, labels)
        speed = train(client, task, options, curves)
        sampler = client.save_weights_and_get_sampling_client().result()
        sampling = time.monotonic()
        final = accuracy(sampler, task, images, labels)
        sampling = time.monotonic() - sampling
        blank = accuracy(sampler, task, np.zeros_like(images), labels)
        nll = negative_log_likelihood(client, task, images, labels)
        client.save_state("digits").result()
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out / "curves.png")
    return Report(base_accuracy, final, blank, base_nll, nll, speed, len(images) / sampling, time.monotonic() - start)


def show(report: Report, options: argparse.Namespace) -> None:
    """The report as a table."""
    table = Table(title=f"{options.model}: handwritten digits, {HELD_OUT} held out")
    for column in ("", "base model", "after training"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("held-out accuracy", f"{report.base_accuracy:.1%}", f"{report.accuracy:.1%}")
    table.add_row("held-out NLL (nats)", f"{report.base_nll:.3f}", f"{report.nll:.3f}")
    table.add_row("accuracy on blank images", "", f"{report.blank_accuracy:.1%}")
    table.add_row("images/s, training", "", f"{report.train_images_per_second:.0f}")
    table.add_row("images/s, sampling", "", f"{report.sampled_images_per_second:.0f}")
    options.console.print(table)
    options.console.print(f"curves: {options.out / 'curves.png'}    {report.seconds:.0f} s in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", required=True, help="a vision-language model that the server serves")
    parser.add_argument("--out", type=Path, default=Path("runs/vlm_classifier"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=5, help="steps")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm; 0 is off")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--side", type=int, default=64, help="pixels; a multiple of 8")
    parser.add_argument("--shift", action="store_true", help="augment by shifts of a pixel")
    parser.add_argument("--eval-every", type=int, default=90, help="steps")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="fail below this held-out accuracy")
    parser.add_argument("--max-blank-accuracy", type=float, default=1.0, help="fail above this on blank images")
    options = parser.parse_args()
    options.console = Console()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    report = run(options)
    show(report, options)
    (options.out / "report.json").write_text(json.dumps(asdict(report), indent=1))
    if report.accuracy < options.min_accuracy:
        print(f"accuracy {report.accuracy:.1%} is below {options.min_accuracy:.0%}", file=sys.stderr)
        return 1
    if report.blank_accuracy > options.max_blank_accuracy:
        print(f"accuracy on blank images {report.blank_accuracy:.1%} is above {options.max_blank_accuracy:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
