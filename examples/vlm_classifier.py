"""Teach a vision-language model to say what is in an image, through the official Tinker SDK.

    tinker-local serve --model NAME[=PATH]
    python examples/vlm_classifier.py --model NAME                   handwritten digits
    python examples/vlm_classifier.py --model NAME --data FOLDER     your own images: FOLDER/<class name>/*.jpg

    python examples/vlm_classifier.py --model NAME --ask FILE --sampler tinker://RUN/sampler_weights/NAME

Fine-tunes a LoRA adapter on image, question and class name. On held-out images it measures the negative log-likelihood
(NLL) of the class name, and how often the model answers with that name at temperature 0. As a control, it finally does
the same on blank images. It writes to --out:

    metrics.jsonl    one line per step; step 0 is before training. train_nll: the step's batch, before its update;
                     validation_nll, validation_accuracy: a fixed part of the held-out images, after the update
    curves.png       the same as a plot, below held-out images with the model's answers, right and wrong
    report.json      all held-out images, before and after training
    held_out/        the images of the plot as files
    paths.sh         $STATE, $SAMPLER and $PICTURE (one of held_out) for a shell

It saves the training state and a sampler version when training ends, and every --save-every steps; --resume goes on
from such a state. `--ask` trains nothing: it asks a sampler version about one picture.
"""

# Imported where it is used is what takes long: what is wrong with options and pictures is said before.
from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
from image_folders import Dataset, digits, open_image, read_folder
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from saving import NOTHING, RANDOM, add_options, connect, first_step, save, training_client
from tinker_local.types import PromptLayout

if TYPE_CHECKING:
    import tinker_local.client as tinker

SECONDS_BETWEEN_LINES = 5.0
"""Without a terminal, which shows a bar."""

LEARNED = 0.1
"""An NLL below which answers are almost certain."""

DIGITS_SIDE = 64
DIGITS_QUESTION = "Which digit?"
QUESTION = "Which of these is in the image: {classes}?"

Asked = tuple["tinker.ModelInput", str]
"""A prompt and its answer."""


@dataclass
class Report:
    """The results of a run; accuracies are shares of all held-out images, NLL is in nats per answer: `nll` of held-out
    images, `train_nll` of the last batch, NaN if there was none."""

    base_accuracy: float
    accuracy: float
    blank_accuracy: float
    chance: float
    base_nll: float
    nll: float
    train_nll: float
    train_images_per_second: float
    sampled_images_per_second: float
    seconds: float
    checkpoint: str
    sampler: str


class Task:
    """Prompts, training examples and answers in the model's chat format."""

    def __init__(self, client: tinker.TrainingClient, question: str, classes: list[str]) -> None:
        from tinker_local.client import rl

        self.chat = rl.Chat.of(client)
        self.tokenizer, self.processor = self.chat.tokenizer, self.chat.image_processor
        # Others are asked as their chat template says, which for Qwen may add a system prompt or a thought.
        self.of_qwen = "<|image_pad|>" in self.tokenizer.get_vocab()
        self.question = question.replace("{classes}", ", ".join(classes))
        # A few tokens more than the longest name, to notice answers that only begin with a name.
        self.max_tokens = max(len(self.answer(name)) for name in classes) + 2

    def prompt(self, image: PIL.Image.Image | Path) -> tinker.ModelInput:
        import tinker_local.client as tinker
        from tinker_local.client import model_input, rl

        if not self.of_qwen:
            (message,) = rl.as_messages([image, self.question])
            content, images = self.chat.content(message, "the prompt")
            return tinker.ModelInput(chunks=self.chat.chunks(self.chat.render([content]), images))
        return model_input(
            "<|im_start|>user\n",
            image,
            f"{self.question}<|im_end|>\n<|im_start|>assistant\n",
            tokenizer=self.tokenizer,
            image_processor=self.processor,
        )

    def answer(self, name: str) -> list[int]:
        if not self.of_qwen:
            return [*self.chat.encode(name, continued=True), *self.chat.stop]
        return self.tokenizer.encode(f"{name}<|im_end|>", add_special_tokens=False)

    def datum(self, asked: Asked) -> tinker.Datum:
        """Prompt and answer; only the answer is trained on."""
        import tinker_local.client as tinker

        prompt, answer = asked[0], self.answer(asked[1])
        before = prompt.length - 1
        return tinker.Datum(
            model_input=prompt.append(tinker.EncodedTextChunk(tokens=answer[:-1])),
            loss_fn_inputs={
                "target_tokens": np.array([0] * before + answer, dtype=np.int64),
                "weights": np.array([0.0] * before + [1.0] * len(answer), dtype=np.float32),
            },
        )

    def nll(self, client: tinker.TrainingClient, asked: list[Asked]) -> float:
        """Mean negative log-likelihood of the answers, in nats."""
        data = [self.datum(one) for one in asked]
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"] / len(data)

    def answers(self, sampler: tinker.SamplingClient, asked: list[Asked]) -> list[str]:
        """What the model says to each prompt at temperature 0."""
        import tinker_local.client as tinker

        params = tinker.SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        futures = [sampler.sample(prompt, 1, params) for prompt, _ in asked]
        tokens = [future.result().sequences[0].tokens for future in futures]
        return [str(self.tokenizer.decode(t, skip_special_tokens=True)).strip() for t in tokens]

    def accuracy(self, sampler: tinker.SamplingClient, asked: list[Asked]) -> float:
        """Share of prompts for which the sampled text equals the answer."""
        return share_right(self.answers(sampler, asked), asked)


def share_right(texts: list[str], asked: list[Asked]) -> float:
    """Share of `texts` that equal the answers."""
    return float(np.mean([text == answer for text, (_, answer) in zip(texts, asked, strict=True)]))


def batches(task: Task, dataset: Dataset, options: argparse.Namespace) -> Iterator[list[tinker.Datum]]:
    """Endless training batches: every image once, in random order, before any repeats."""
    rng = random.Random(options.seed)
    order: list[int] = []
    while True:
        if len(order) < options.batch_size:
            order += rng.sample(range(len(dataset.train)), len(dataset.train))
        examples = [dataset.train[i] for i in order[: options.batch_size]]
        order = order[options.batch_size :]
        images = [dataset.image(example.source, rng if options.shift else None) for example in examples]
        yield [task.datum((task.prompt(image), e.name)) for image, e in zip(images, examples, strict=True)]


def train(
    client: tinker.TrainingClient,
    task: Task,
    dataset: Dataset,
    validation: list[Asked],
    options: argparse.Namespace,
) -> tuple[list[dict[str, float]], float]:
    """Fine-tune on the training images; returns the lines of metrics.jsonl, and images per second."""
    import tinker_local.client as tinker

    steps = options.steps or math.ceil(options.epochs * math.ceil(len(dataset.train) / options.batch_size))
    eval_every = options.eval_every or max(1, steps // 10)
    data = batches(task, dataset, options)
    batch = next(data)
    metrics: list[dict[str, float]] = []
    trained, busy = 0, 0.0
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=options.console)
    begin, told = first_step(options), time.monotonic()
    with progress, (options.out / "metrics.jsonl").open("a" if begin else "w") as file:
        bar = progress.add_task("", total=steps, note="")
        for step in range(begin, steps + 1):
            row: dict[str, float] = {"step": step}
            if step > begin:
                start = time.monotonic()
                rate = options.learning_rate * min(1.0, step / options.warmup)
                rate *= 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
                gradient = client.forward_backward(batch, "cross_entropy")
                update = client.optim_step(
                    tinker.AdamParams(
                        learning_rate=rate,
                        beta2=0.99,
                        eps=1e-8,
                        weight_decay=options.weight_decay,
                        grad_clip_norm=options.clip,
                    )
                )
                size, batch = len(batch), next(data)  # prepare the next one while the server works
                row |= {"learning_rate": rate, "train_nll": gradient.result().metrics["loss:sum"] / size}
                update.result()
                busy += time.monotonic() - start
                trained += size
                progress.update(bar, completed=step, note=f"nll {row['train_nll']:.3f}")
                if not options.console.is_terminal and time.monotonic() > told + SECONDS_BETWEEN_LINES:
                    told = time.monotonic()
                    options.console.print(f"step {step} of {steps}   nll {row['train_nll']:.3f}")
                if options.save_every and step % options.save_every == 0 and step < steps:
                    save(client, "vlm_classifier", step)
            if step % eval_every == 0 or step == steps:
                sampler = client.save_weights_and_get_sampling_client().result()
                row["validation_nll"] = task.nll(client, validation)
                row["validation_accuracy"] = task.accuracy(sampler, validation)
            metrics.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    return metrics, trained / max(busy, 1e-9)


Shown = tuple[PIL.Image.Image, str, str]
"""A picture, its class, and what the model says."""


def draw(metrics: list[dict[str, float]], dataset: Dataset, shown: list[Shown], options: argparse.Namespace) -> None:
    """Plot the curves as a PNG, below the pictures `shown` with the model's answers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    def curve(name: str) -> tuple[list[float], list[float]]:
        rows = [row for row in metrics if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    count = min(options.eval_images, len(dataset.held_out))
    figure = pyplot.figure(figsize=(11, 5.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 3.2])
    for axes, (picture, name, said) in zip(above.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.imshow(picture)
        right_answer = said == name
        axes.set_title(said if right_answer else f"{said or 'nothing'}\n({name})", fontsize="small")
        axes.title.set_color("tab:green" if right_answer else "tab:red")
        axes.axis("off")
    left, right = below.subplots(1, 2)
    figure.suptitle(
        f"{options.model}: {dataset.title}, {len(dataset.classes)} classes; above, held-out images with the model's "
        "answers (the class, where it is wrong)",
        fontsize="medium",
    )
    left.plot(*curve("train_nll"), color="tab:blue", alpha=0.6, linewidth=1, label="training batch")
    left.plot(*curve("validation_nll"), color="tab:orange", marker="o", label=f"validation ({count} images)")
    guess = math.log(len(dataset.classes))
    left.axhline(guess, color="grey", linestyle="--", label=f"guessing: ln {len(dataset.classes)} = {guess:.2f}")
    left.set(title="Negative log-likelihood of the answer", ylabel="NLL (nats per answer)", yscale="log")
    right.plot(*curve("validation_accuracy"), color="tab:orange", marker="o", label=f"validation ({count} images)")
    right.axhline(dataset.chance, color="grey", linestyle="--", label=f"chance: {dataset.chance:.0%}")
    right.set(title="Accuracy of the sampled answer", ylabel="accuracy (share of images)", ylim=(0, 1.03))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.set(xlabel=f"step (batch of {options.batch_size} images)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(options.out / "curves.png", dpi=120)
    pyplot.close(figure)


def choose_shown(images: list, asked: list[Asked], texts: list[str], count: int = 12) -> list[Shown]:
    """Some wrong answers, if there are any, and right ones."""
    wrong = [i for i, (_, name) in enumerate(asked) if texts[i] != name][: count // 3]
    right = [i for i, (_, name) in enumerate(asked) if texts[i] == name][: count - len(wrong)]
    opened = {i: open_image(images[i]) if isinstance(images[i], Path) else images[i] for i in (*right, *wrong)}
    return [(opened[i], asked[i][1], texts[i]) for i in (*right, *wrong)]


def blank(image: PIL.Image.Image | Path) -> PIL.Image.Image:
    """A black image of the same size."""
    return PIL.Image.new("RGB", (open_image(image) if isinstance(image, Path) else image).size)


def run(options: argparse.Namespace, dataset: Dataset) -> Report:
    """Measure, train, measure again."""
    start = time.monotonic()
    with connect(options) as service:
        vision = options.train_vision
        layout = PromptLayout("picture-first", options.side)
        client = training_client(
            service, options, rank=options.rank, seed=options.seed, train_vision=vision, layout=layout
        )
        task = Task(client, options.question, dataset.classes)
        held_out = random.Random(options.seed).sample(dataset.held_out, len(dataset.held_out))
        images = [dataset.image(example.source, None) for example in held_out]
        asked = [(task.prompt(image), example.name) for image, example in zip(images, held_out, strict=True)]
        blanks = [(task.prompt(blank(image)), example.name) for image, example in zip(images, held_out, strict=True)]
        base = service.create_sampling_client(base_model=options.model).result()
        base_accuracy = task.accuracy(base, asked)
        base_nll = task.nll(client, asked)
        metrics, speed = train(client, task, dataset, asked[: options.eval_images], options)
        saved = save(client, "vlm_classifier")
        sampler = service.create_sampling_client(model_path=saved.sampler).result()
        sampling = time.monotonic()
        texts = task.answers(sampler, asked)
        sampling = time.monotonic() - sampling
        shown = choose_shown(images, asked, texts)
        draw(metrics, dataset, shown, options)
        keep(shown, options.out / "held_out")
        control = task.accuracy(sampler, blanks)
        nll = task.nll(client, asked)
    return Report(
        base_accuracy=base_accuracy,
        accuracy=share_right(texts, asked),
        blank_accuracy=control,
        chance=dataset.chance,
        base_nll=base_nll,
        nll=nll,
        train_nll=metrics[-1].get("train_nll", math.nan),
        train_images_per_second=speed,
        sampled_images_per_second=len(images) / sampling,
        seconds=time.monotonic() - start,
        checkpoint=saved.state,
        sampler=saved.sampler,
    )


def keep(shown: list[Shown], folder: Path) -> None:
    """Write the pictures as files, to ask about."""
    folder.mkdir(exist_ok=True)
    for number, (picture, name, _) in enumerate(shown):
        safe = "".join(letter if letter.isalnum() else "-" for letter in name)
        picture.save(folder / f"{number:02d}-{safe}.png")


def ask(options: argparse.Namespace, dataset: Dataset) -> str:
    """What the model of `--sampler` says of the picture `--ask`."""
    with connect(options) as service:
        # Knows the folder of the tokenizer and of the image processor.
        client = service.create_lora_training_client(base_model=options.model, rank=1).result()
        sampler = service.create_sampling_client(model_path=options.sampler).result()
        task = Task(client, options.question, dataset.classes)
        run = service.create_rest_client().get_training_run_by_tinker_path(options.sampler).result()
        picture, side = open_image(options.ask), PromptLayout.of(run.user_metadata or {}).side
        if side is not None:
            picture.thumbnail((side, side))  # as in training; a smaller one stays as it is
        return task.answers(sampler, [(task.prompt(picture), "")])[0]


def show(report: Report, dataset: Dataset, options: argparse.Namespace) -> None:
    """Print the report as a table."""
    table = Table(title=f"{options.model}: {dataset.title}, {len(dataset.held_out)} held out")
    for column in ("", "base model", "after training"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("held-out accuracy", f"{report.base_accuracy:.1%}", f"{report.accuracy:.1%}")
    table.add_row("held-out NLL (nats)", f"{report.base_nll:.3f}", f"{report.nll:.3f}")
    table.add_row("accuracy on blank images", "", f"{report.blank_accuracy:.1%}")
    table.add_row("accuracy by chance", "", f"{report.chance:.1%}")
    table.add_row("images/s, training", "", f"{report.train_images_per_second:.0f}")
    table.add_row("images/s, sampling", "", f"{report.sampled_images_per_second:.0f}")
    options.console.print(table)
    options.console.print(f"checkpoint: {report.checkpoint}", soft_wrap=True)
    options.console.print(f"sampler version: {report.sampler}", soft_wrap=True)
    options.console.print(f"curves: {options.out / 'curves.png'}    {report.seconds:.0f} s in all")
    if report.accuracy <= max(report.blank_accuracy, dataset.chance):
        by_heart = report.train_nll < LEARNED < report.nll
        options.console.print(
            "The model has not learned to look: it is right as often on blank images, or by chance. "
            + (
                f"It has learned its {len(dataset.train)} training images by heart (NLL {report.train_nll:.3f}, and "
                f"{report.nll:.3f} on held-out ones): more images help, and more steps do not."
                if by_heart
                else "Where the curve of the NLL still falls, train longer (--steps)."
            )
        )


def prepare(options: argparse.Namespace) -> Dataset:
    """Read the images and set the options that depend on them. Raises ValueError for invalid options."""
    for name in ("batch_size", "eval_images", "eval_every", "warmup", "side", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.epochs <= 0 or not 0 < options.held_out < 1:
        raise ValueError("--epochs must be more than 0, --held-out between 0 and 1")
    if options.data is None:
        options.question, options.side = options.question or DIGITS_QUESTION, options.side or DIGITS_SIDE
        return digits(options.side, options.fold)
    if options.shift or options.fold is not None:
        raise ValueError("--shift and --fold are for the digits; leave them out with --data")
    options.question = options.question or QUESTION
    return read_folder(options.data, share=options.held_out, seed=options.seed, side=options.side)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", required=True, help="a vision-language model of the server")
    parser.add_argument("--ask", type=Path, metavar="FILE", help="train nothing: ask --sampler about this picture")
    parser.add_argument("--sampler", metavar="PATH", help="for --ask: tinker://RUN/sampler_weights/NAME")
    parser.add_argument("--data", type=Path, help="a folder with one folder of images per class; default: the digits")
    parser.add_argument("--held-out", type=float, default=0.2, help="share of each class in --data; default: 0.2")
    parser.add_argument(
        "--question",
        help="text after the image; {classes} is replaced by the class names (too long with many classes). "
        f"Default: {QUESTION!r}, for the digits {DIGITS_QUESTION!r}",
    )
    parser.add_argument(
        "--side",
        type=int,
        help="pixels: images of --data are shrunk to at most this side (default: unchanged), digits are enlarged to it "
        f"(a multiple of 8, default: {DIGITS_SIDE})",
    )
    parser.add_argument("--shift", action="store_true", help="augment the digits by shifts of one pixel")
    parser.add_argument(
        "--fold",
        type=int,
        choices=range(5),
        help="hold out a fifth of the training digits instead of the test digits: to choose settings",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/vlm_classifier"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument(
        "--train-vision",
        action="store_true",
        help="also train the vision tower; the server must allow it (tinker-local serve --train-vision)",
    )
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=5, help="warm-up steps")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="AdamW's, times the learning rate")
    parser.add_argument("--clip", type=float, default=0.0, help="maximum gradient norm; 0 turns clipping off")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, help="in place of --epochs, which means few steps where images are few")
    parser.add_argument("--eval-every", type=int, help="steps between points of the curves; default: a tenth of all")
    parser.add_argument(
        "--eval-images",
        type=int,
        default=100,
        help="number of held-out images for each point of the curves, chosen at random once. Default: 100, which takes "
        "the demo two seconds per point, with a standard error of at most 5 percentage points",
    )
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="fail below this held-out accuracy")
    parser.add_argument("--max-blank-accuracy", type=float, default=1.0, help="fail above this on blank images")
    options = parser.parse_args()
    options.console = Console()
    if (options.ask is None) != (not options.sampler):
        parser.exit(2, "error: --ask and --sampler belong together, and one of them is missing or empty\n")
    try:
        dataset = prepare(options)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    import tinker_local.client as tinker

    try:
        if options.ask is not None:
            print(ask(options, dataset) or "(nothing)")
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        report = run(options, dataset)
    except (tinker.TinkerError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    show(report, dataset, options)
    (options.out / "report.json").write_text(json.dumps(asdict(report), indent=1))
    picture = min((options.out / "held_out").iterdir())
    paths = {"STATE": report.checkpoint, "SAMPLER": report.sampler, "PICTURE": str(picture.resolve())}
    (options.out / "paths.sh").write_text("".join(f"{name}={shlex.quote(path)}\n" for name, path in paths.items()))
    if report.accuracy < NOTHING:
        print(RANDOM, file=sys.stderr)
        return 1
    if report.accuracy < options.min_accuracy:
        print(f"accuracy {report.accuracy:.1%} is below {options.min_accuracy:.0%}", file=sys.stderr)
        return 1
    if report.blank_accuracy > options.max_blank_accuracy:
        print(f"accuracy on blank images {report.blank_accuracy:.1%} is above {options.max_blank_accuracy:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
