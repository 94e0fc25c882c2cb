"""Questions about pictures: a vision-language model learns to answer them, and is asked again through two other APIs.

    python scripts/fetch_test_files.py easy-vqa    # 5,000 drawings and 48,000 questions (easy-vqa 1.0, MIT)
    tinker-local tiny-model --kind vl --preset drawings --out models/drawings-vl
    tinker-local serve --model local/drawings-vl=models/drawings-vl
    python examples/easy_vqa.py --model local/drawings-vl

Trains two LoRA adapters on questions in the same order: one sees the picture before each question, the other sees no
pictures, and takes fewer steps. Prints how many held-out questions each answers right at temperature 0, beside the
share of the most frequent answer. Then it asks some again, with `tinker-local chat` and with OpenAI's client, which
must give the same answers. Saves the adapter that sees, at the end and every --save-every steps.
"""

import argparse
import base64
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tinker_local.client as tinker
from openai import OpenAI
from saving import add_options, connect, first_step, save, training_client
from tinker_local.client import image_chunk, model_input
from transformers import AutoImageProcessor

FOLDER = Path(__file__).parents[1] / ".test-files" / "easy-vqa"
SIDE = 64
"""Pixels per side of the pictures."""

SHAPES = ("circle", "rectangle", "triangle")
MAX_TOKENS = 8
"""Of an answer. The longest has five tokens of the tiny model, with the one that ends it."""


class Question(NamedTuple):
    """`picture`: the file that it is about."""

    text: str
    answer: str
    picture: Path


def read(folder: Path, part: str) -> list[Question]:
    """The questions of `part`, train or test. The parts have no picture in common."""
    file = folder / part / "questions.json"
    if not file.exists():
        raise SystemExit(f"error: {file} does not exist; fetch it: python scripts/fetch_test_files.py easy-vqa")
    return [
        Question(text, answer, folder / part / "images" / f"{picture}.png")
        for text, answer, picture in json.loads(file.read_text())
    ]


def most_frequent(questions: Sequence[Question], group: Callable[[Question], str]) -> dict[str, str]:
    """The most frequent answer in each group."""
    counts: dict[str, Counter[str]] = {}
    for one in questions:
        counts.setdefault(group(one), Counter())[one.answer] += 1
    return {name: answers.most_common(1)[0][0] for name, answers in counts.items()}


class Reply(NamedTuple):
    """`prompt_tokens`: how many the prompt had. `logprob`: of all the answer's tokens, with the one that ends it."""

    text: str
    prompt_tokens: int
    logprob: float


class Task:
    """Prompts, training examples and answers in the model's chat format, the picture before the question."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self.tokenizer = client.get_tokenizer()
        processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)
        # Ten questions share a picture: it is read once here, and the server processes and encodes it once.
        self.picture: Callable[[Path], tinker.types.ImageChunk] = cache(lambda file: image_chunk(file, processor))

    def prompt(self, question: Question, *, picture: bool = True) -> tinker.ModelInput:
        text = f"{question.text}<|im_end|>\n<|im_start|>assistant\n"
        pictures = [self.picture(question.picture)] if picture else []
        return model_input("<|im_start|>user\n", *pictures, text, tokenizer=self.tokenizer)

    def datum(self, question: Question, *, picture: bool) -> tinker.Datum:
        """Prompt and answer; only the answer is trained on."""
        prompt = self.prompt(question, picture=picture)
        answer = self.tokenizer.encode(f"{question.answer}<|im_end|>", add_special_tokens=False)
        before = prompt.length - 1
        return tinker.Datum(
            model_input=prompt.append(tinker.EncodedTextChunk(tokens=answer[:-1])),
            loss_fn_inputs={
                "target_tokens": np.array([0] * before + answer, dtype=np.int64),
                "weights": np.array([0.0] * before + [1.0] * len(answer), dtype=np.float32),
            },
        )

    def replies(
        self, sampler: tinker.SamplingClient, questions: Sequence[Question], *, picture: bool = True
    ) -> list[Reply]:
        """What the model says to each question at temperature 0."""
        params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        prompts = [self.prompt(question, picture=picture) for question in questions]
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
        sequences = [future.result().sequences[0] for future in futures]
        texts = [str(self.tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in sequences]
        return [
            Reply(text.strip(), prompt.length, sum(each.logprobs or []))
            for text, prompt, each in zip(texts, prompts, sequences, strict=True)
        ]


def share_right(replies: Sequence[Reply], questions: Sequence[Question]) -> float:
    """Share of the replies that are the answer and nothing else."""
    return float(np.mean([reply.text == one.answer for reply, one in zip(replies, questions, strict=True)]))


def blind_accuracy(task: Task, sampler: tinker.SamplingClient, questions: Sequence[Question]) -> float:
    """Share of right answers without pictures. Equal questions then have equal answers: each is asked once."""
    different = list({one.text: one for one in questions}.values())
    said = dict(zip((one.text for one in different), task.replies(sampler, different, picture=False), strict=True))
    return share_right([said[one.text] for one in questions], questions)


def batches(questions: list[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """Endless: each question once, in random order, before any comes again."""
    rng, order = random.Random(seed), list[Question]()
    while True:
        while len(order) < size:
            order += rng.sample(questions, len(questions))
        yield order[:size]
        del order[:size]


def train(
    client: tinker.TrainingClient,
    task: Task,
    questions: list[Question],
    options: argparse.Namespace,
    steps: int,
    *,
    picture: bool,
    begin: int = 0,
) -> None:
    """Train from step `begin` to `steps` on batches of the questions; prints the loss, in nats per answer."""
    name = "with pictures" if picture else "questions alone"
    started, sent = time.monotonic(), deque[tuple[Any, Any]]()
    data = islice(batches(questions, options.batch_size, options.seed), begin, None)
    for step in range(begin + 1, steps + 1):
        rate = options.learning_rate * min(1.0, step / options.warmup)
        rate *= 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
        gradient = client.forward_backward([task.datum(one, picture=picture) for one in next(data)], "cross_entropy")
        adam = tinker.AdamParams(learning_rate=rate, beta2=0.99, eps=1e-8, grad_clip_norm=options.clip)
        sent.append((gradient, client.optim_step(adam)))
        if picture and options.save_every and step % options.save_every == 0 and step < steps:
            save(client, "easy_vqa", step)
        # The next step is made and sent while the server works on this one.
        while len(sent) > (1 if step < steps else 0):
            (gradient, update), at = sent.popleft(), step - len(sent)
            loss = gradient.result().metrics["loss:sum"] / options.batch_size
            update.result()
            if at % options.print_every == 0 or at == steps:
                took = f"{time.monotonic() - started:.0f} s"
                print(f"{name}: step {at} of {steps}   loss {loss:.3f}   {took}", flush=True)


def by_chat(url: str, sampler: str, questions: Sequence[Question]) -> list[str]:
    """What `tinker-local chat` prints, asked one question after the other."""
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "chat", sampler, "--url", url]
    lines = "".join(f"/reset\n/image {one.picture}\n{one.text}\n" for one in questions)
    settings = ["--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
    done = subprocess.run([*command, *settings], input=lines, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: tinker-local chat: {done.stderr}")
    return [line.strip() for line in done.stdout.splitlines()]


def by_openai(url: str, sampler: str, questions: Sequence[Question]) -> list[Reply]:
    """What OpenAI's client is answered; the picture travels in a data URL."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TINKER_API_KEY", "tml-local"))
    replies = []
    for one in questions:
        data = base64.b64encode(one.picture.read_bytes()).decode()
        answer = client.chat.completions.create(
            model=sampler,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                        {"type": "text", "text": one.text},
                    ],
                }
            ],
            temperature=0,
            max_tokens=MAX_TOKENS,
            logprobs=True,
        )
        choice, usage = answer.choices[0], answer.usage
        assert usage is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        logprob = sum(token.logprob for token in choice.logprobs.content)
        replies.append(Reply((choice.message.content or "").strip(), usage.prompt_tokens, logprob))
    return replies


def again(options: argparse.Namespace, sampler: str, replies: list[Reply], questions: list[Question]) -> dict[str, Any]:
    """Ask in two other ways; how many are right, and what differs from `replies`."""
    said, answered = by_chat(options.base_url, sampler, questions), by_openai(options.base_url, sampler, questions)
    if len(said) != len(questions):
        raise SystemExit(f"error: tinker-local chat printed {len(said)} lines for {len(questions)} questions")
    return {
        "asked_again": len(questions),
        "sdk": share_right(replies, questions),
        "chat": float(np.mean([text == one.answer for text, one in zip(said, questions, strict=True)])),
        "openai": share_right(answered, questions),
        "other_answers": sum(
            not reply.text == text == answer.text for reply, text, answer in zip(replies, said, answered, strict=True)
        ),
        "other_prompts": sum(
            reply.prompt_tokens != answer.prompt_tokens for reply, answer in zip(replies, answered, strict=True)
        ),
        "logprob_difference": max(
            abs(reply.logprob - answer.logprob) for reply, answer in zip(replies, answered, strict=True)
        ),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, measure, and ask again."""
    learned, held_out = read(options.data, "train"), read(options.data, "test")
    if options.held_out:
        held_out = random.Random(0).sample(held_out, min(options.held_out, len(held_out)))
    frequent = most_frequent(learned, lambda one: "")
    by_question = most_frequent(learned, lambda one: one.text)
    with connect(options) as service:
        layout = tinker.PromptLayout("picture-first", SIDE)
        client = training_client(service, options, rank=options.rank, seed=options.seed, layout=layout)
        task = Task(client)
        train(client, task, learned, options, options.steps, picture=True, begin=first_step(options))
        saved = save(client, "easy_vqa")
        sampler = service.create_sampling_client(model_path=saved.sampler).result()
        replies = task.replies(sampler, held_out)
        lora = {"rank": options.rank, "seed": options.seed}
        blind = service.create_lora_training_client(base_model=options.model, **lora).result()
        train(blind, task, learned, options, options.blind_steps, picture=False)
        blind_sampler = blind.save_weights_and_get_sampling_client().result()
        report = {
            "seed": options.seed,
            "held_out": len(held_out),
            "most_frequent": float(np.mean([one.answer == frequent[""] for one in held_out])),
            "most_frequent_by_question": float(np.mean([one.answer == by_question.get(one.text) for one in held_out])),
            "questions_alone": blind_accuracy(task, blind_sampler, held_out),
            "with_pictures": share_right(replies, held_out),
            "kinds": by_kind(replies, held_out),
        }
        if options.ask_again:
            count = options.ask_again
            report |= again(options, saved.sampler, replies[:count], held_out[:count])
    return report | {"checkpoint": saved.state, "sampler": saved.sampler}


def by_kind(replies: list[Reply], questions: list[Question]) -> dict[str, float]:
    """Share of right answers to yes or no, of shapes and of colours."""
    kinds: dict[str, list[bool]] = {}
    for reply, one in zip(replies, questions, strict=True):
        kind = {"yes": "yes or no", "no": "yes or no"}.get(one.answer, "shape" if one.answer in SHAPES else "colour")
        kinds.setdefault(kind, []).append(reply.text == one.answer)
    return {kind: float(np.mean(right)) for kind, right in sorted(kinds.items())}


def show(report: dict[str, Any]) -> None:
    print(f"of {report['held_out']:,} held-out questions, right:")
    print(f"  always the most frequent answer   {report['most_frequent']:.1%}")
    print(f"  the one of each question          {report['most_frequent_by_question']:.1%}")
    print(f"  trained on questions alone        {report['questions_alone']:.1%}")
    print(f"  trained with pictures             {report['with_pictures']:.1%}")
    print("  of these: " + ", ".join(f"{kind} {share:.1%}" for kind, share in report["kinds"].items()))
    if "asked_again" in report:
        print(f"the first {report['asked_again']} of them again:")
        print(f"  SDK {report['sdk']:.1%}, tinker-local chat {report['chat']:.1%}, openai {report['openai']:.1%}")
        print(f"  other answers: {report['other_answers']}; prompts of another length: {report['other_prompts']}")
        print(f"  logprobs of answers differ by {report['logprob_difference']:.1e} nats at most")


def main() -> int:
    options = arguments()
    report = run(options)
    show(report)
    print(f"saved as {report['checkpoint']} and {report['sampler']}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report) + "\n")
    if report["with_pictures"] < options.min_accuracy:
        print(f"error: {report['with_pictures']:.1%} right is below {options.min_accuracy:.0%}", file=sys.stderr)
        return 1
    if report.get("other_answers") or report.get("other_prompts"):
        print("error: the same questions have other answers or other prompts through the endpoints", file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", default="local/drawings-vl")
    parser.add_argument("--data", type=Path, default=FOLDER, help="the folder of easy-vqa")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--blind-steps",
        type=int,
        default=300,
        help="steps without pictures. Default: 300, after which the most frequent answer of each question is learned",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="questions per step")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--clip", type=float, default=0.5, help="maximum gradient norm")
    parser.add_argument("--held-out", type=int, default=4000, metavar="N", help="ask N of 9,673; 0: all")
    parser.add_argument(
        "--ask-again", type=int, default=300, metavar="N", help="ask N of these again in two other ways"
    )
    parser.add_argument("--print-every", type=int, default=50, metavar="N", help="print the loss every N steps")
    parser.add_argument("--min-accuracy", type=float, default=0.85, help="end with status 1 below this")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
