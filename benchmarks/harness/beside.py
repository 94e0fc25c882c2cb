"""The work that `beside_trl.py` gives to TRL and to this project, and what it says of their results. Loads no model.

A `Row` is the result of one job, a line of the results.
"""

import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

Row = dict[str, Any]
"""`job`: the words of a `Job`. `steps`: a dict for each, with `loss`, `grad_norm`, `s` and, of GRPO, `reward` and
`tokens` (the mean length of an answer), of DPO `margin` and `accuracy`. `held_out`: right answers before and after, of
all but `sft`, of `rows` and `dpo` the mean `score`, and of `dpo` the same of its pairs as of steps. `server_s`: from
the start of the server until it is ready, of ours. `start_s`: from the start of the program until the first step, or
measurement. `total_s`: of all, the server included. `peak_gib`: of the resident memory of all processes.
`others_cores`: how many cores other programs had meanwhile, on average. `device_gib`: of the GPU's, of all that uses
it."""


class Job(NamedTuple):
    """One run. `variant`: "" for the run that is compared; `checkpointing`: TRL with its default, which computes
    activations again; `same`: ours from TRL's first adapter; `replay`: ours on TRL's samples, from that adapter;
    `forward`: ours with the logprobs that the trainer has before the step, so that the ratio is 1, as in TRL."""

    task: str
    side: str
    seed: int
    variant: str = ""

    @property
    def name(self) -> str:
        return ".".join([self.task, self.side, str(self.seed), *([self.variant] if self.variant else [])])

    def first(self) -> "Job | None":
        """The run of TRL whose adapter this one begins with."""
        return Job(self.task, "trl", self.seed) if self.variant in ("same", "replay") else None


JOBS = (
    Job("sft", "trl", 0),
    Job("sft", "trl", 1),
    Job("sft", "trl", 0, "checkpointing"),
    Job("sft", "ours", 0),
    Job("sft", "ours", 1),
    Job("sft", "ours", 0, "same"),
    Job("rows", "trl", 0),
    Job("rows", "trl", 1),
    Job("rows", "ours", 0),
    Job("rows", "ours", 1),
    Job("rows", "ours", 0, "same"),
    Job("dpo", "trl", 0),
    Job("dpo", "trl", 1),
    Job("dpo", "ours", 0),
    Job("dpo", "ours", 1),
    Job("dpo", "ours", 0, "same"),
    Job("grpo", "trl", 0),
    Job("grpo", "trl", 1),
    Job("grpo", "ours", 0),
    Job("grpo", "ours", 1),
    Job("grpo", "ours", 0, "replay"),
)
"""In their order: a run of TRL comes before those that begin with its adapter, and ours of a task share a server."""


def place(job: Job) -> tuple[int, bool, int]:
    """Its place among all jobs, which keeps the order of `JOBS` and puts further seeds of a side after them."""
    place = JOBS.index(job) if job in JOBS else len(JOBS) + job.seed
    return list(TASKS).index(job.task), job.side != "trl", place


def chosen(names: Sequence[str], seeds: int = 2) -> list[Job]:
    """The jobs with these names, or of these tasks, with so many seeds of each side; without a name, all but those
    of the variant `forward`. Raises ValueError for an unknown one."""
    further = [Job(task, side, seed) for task in TASKS for side in ("trl", "ours") for seed in range(2, seeds)]
    jobs, named = sorted([*JOBS, *further], key=place), [Job("grpo", "ours", seed, "forward") for seed in range(seeds)]
    if unknown := set(names) - {job.name for job in [*jobs, *named]} - set(TASKS):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such job")
    return [
        *(job for job in jobs if not names or job.name in names or job.task in names),
        *(job for job in named if job.name in names),
    ]


COMMON = {
    "rank": 16,
    "alpha": 32,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "clip": 1.0,
}
"""AdamW and clipping are TRL's defaults; a scale of 32 is the one that this project has."""

ROWS = {"held_out": 64, "max_tokens": 8, "longest": 512}
"""Of tasks of `tinker-local train`: held-out rows, tokens of an answer at most, and of a row."""

TRAINED = ("rows", "dpo")
"""Tasks that `tinker-local train` does: answers to learn, and pairs that the model sampled."""

TASKS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 5e-4, "batch": 8, "steps": 16},
    "rows": {"learning_rate": 1e-3, "batch": 8, "steps": 24, **ROWS},
    "dpo": {"learning_rate": 3e-4, "batch": 8, "steps": 16, "dpo_beta": 0.1, "group": 8, **ROWS},
    "grpo": {
        "learning_rate": 1e-3,
        "batch": 48,
        "steps": 8,
        "group": 8,
        "temperature": 1.0,
        "epsilon": 0.2,
        "max_tokens": 8,
        "held_out": 100,
    },
}
"""`batch`: sequences of a step, or pairs. `group`: samples for each prompt."""

TINY: dict[str, dict[str, Any]] = {
    "sft": {"batch": 4, "steps": 2},
    "rows": {"batch": 4, "steps": 2, "held_out": 4},
    "dpo": {"batch": 4, "steps": 2, "held_out": 4},
    "grpo": {"batch": 8, "steps": 2, "group": 4, "held_out": 4},
}

CHECKPOINTED_STEPS = 4
"""Of the run for its time and memory alone."""


def worked_sum(chance: random.Random) -> tuple[str, str]:
    """A question with two to twelve numbers, and its answer, which adds them one by one."""
    numbers = [chance.randint(2, 99) for _ in range(chance.randint(2, 12))]
    question = f"Add {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}."
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return question, f"{', '.join(lines)}. The sum is {total}."


def chat(tokenizer: Any, question: str) -> str:
    """The question in the model's chat format; no system message, as in `examples/rl_sums.py`."""
    asked = [{"role": "system", "content": ""}, {"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))


def sft_examples(tokenizer: Any, count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """`input_ids`, and `labels` with -100 for each token that is not of the answer."""
    chance, examples = random.Random(seed), []
    for _ in range(count):
        question, answer = worked_sum(chance)
        before = tokenizer.encode(chat(tokenizer, question), add_special_tokens=False)
        after = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        examples.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return examples


def grpo_problems(tokenizer: Any, learned: int, held_out: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The sums of `examples/rl_sums.py`: `text` and `ids` of the prompt, and the right `answer`."""
    import rl_sums  # type: ignore[import-not-found]

    def made(problem: Any) -> dict[str, Any]:
        text = chat(tokenizer, problem.question) + problem.start
        first, second = problem.start.rstrip("= ").split(" + ")
        ids = tokenizer.encode(text, add_special_tokens=False)
        return {"text": text, "ids": ids, "answer": str(int(first) + int(second))}

    problems = rl_sums.sums(learned, seed)
    return {
        "learned": [made(problem) for problem in problems.learned],
        "held_out": [made(problem) for problem in problems.held_out[:held_out]],
    }


def stop_tokens(tokenizer: Any) -> list[int]:
    """The end of a turn, and every token with a newline: the answers of `examples/rl_sums.py` end there."""
    newlines = [token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])]
    return sorted({tokenizer.eos_token_id, *newlines})


def curve(row: Row, key: str) -> list[float]:
    return [step[key] for step in row["steps"]]


def mean_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean over the steps of the absolute difference."""
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def largest_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference of a step."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def pair_lines(trl: Sequence[Row], ours: Sequence[Row], key: str, digits: int) -> list[str]:
    """How far two runs of the same program are from each other, and one of each: the mean over all such pairs, and the
    largest of a step."""
    pairs = {
        "two seeds of TRL": itertools.combinations(trl, 2),
        "two seeds of tinker-local": itertools.combinations(ours, 2),
        "one of each, mean of all pairs": itertools.product(trl, ours),
    }
    lines = []
    for name, chosen_pairs in pairs.items():
        if curves := [(curve(one, key), curve(other, key)) for one, other in chosen_pairs]:
            middle = statistics.fmean(mean_distance(one, other) for one, other in curves)
            largest = max(largest_distance(one, other) for one, other in curves)
            lines.append(f"    {name:<42}{middle:.{digits}f}, at most {largest:.{digits}f}")
    return lines


def step_table(rows: Sequence[Row], key: str) -> list[str]:
    """A line for each step, with what each run has there."""
    names = [".".join(Job(*row["job"]).name.split(".")[1:]) for row in rows]
    columns = [curve(row, key) for row in rows]
    lines = ["    step" + "".join(f"{name:>13}" for name in names)]
    for step, values in enumerate(itertools.zip_longest(*columns), start=1):
        cells = (f"{'-' if value is None else f'{value:.5f}':>13}" for value in values)
        lines.append(f"    {step:>4}" + "".join(cells))
    return lines


def mean_curve(rows: Sequence[Row], key: str) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(curve(row, key) for row in rows), strict=True)]


def found(rows: Sequence[Row], task: str, side: str, variant: str = "") -> list[Row]:
    """The rows of all seeds, by seed."""
    named = [Job(*row["job"]) for row in rows]
    mine = [(job.seed, row) for job, row in zip(named, rows, strict=True) if job[:2] == (task, side)]
    return [row for seed, row in sorted(mine, key=lambda each: each[0]) if Job(*row["job"]).variant == variant]


def cost_table(rows: Sequence[Row]) -> list[str]:
    """Time and memory of each job. The first step is not in the median, as buffers are made in it."""
    widths = {"steps": 6, "s/step": 9, "all steps, s": 14, "server, s": 11, "start, s": 10, "all, s": 8, "peak GiB": 10}
    on_gpu = any(row.get("device_gib") for row in rows)
    widths |= {"others": 8} | ({"GPU, GiB": 10} if on_gpu else {})
    lines = [f"{'job':<24}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
    for row in sorted(rows, key=lambda row: place(Job(*row["job"]))):
        seconds = curve(row, "s")
        server = f"{row['server_s']:.1f}" if row.get("server_s") else "-"
        device = f"{row['device_gib']:10.2f}" if row.get("device_gib") else ""
        lines.append(
            f"{Job(*row['job']).name:<24}{len(seconds):>6}{statistics.median(seconds[1:] or seconds):>9.2f}"
            f"{sum(seconds):>14.1f}{server:>11}{row['start_s']:>10.1f}{row['total_s']:>8.1f}{row['peak_gib']:>10.2f}"
            f"{row['others_cores']:>8.2f}{device}"
        )
    return lines


LOSSES = {
    "sft": "SFT: loss (nats for each token of an answer)",
    "rows": "`tinker-local train`, SFT on rows: loss (nats for each token of an answer)",
    "dpo": "`tinker-local train`, DPO on pairs that the model sampled: loss (nats for each pair)",
}


def loss_report(rows: Sequence[Row], task: str) -> list[str]:
    """Losses of a task beside each other; empty without both sides."""
    trl, ours = found(rows, task, "trl"), found(rows, task, "ours")
    if not trl or not ours:
        return []
    lines = ["", LOSSES[task]]
    for name, group in (("TRL", trl), ("tinker-local", ours)):
        for seed, row in enumerate(group):
            losses = curve(row, "loss")
            lines.append(f"  {name:<13} seed {seed}   first {losses[0]:.4f}   last {losses[-1]:.4f}{_scored(row)}")
    lines.append("  mean over the steps of the absolute difference of losses, and the largest:")
    lines += pair_lines(trl, ours, "loss", 5)
    middle = mean_curve(trl, "loss")
    for seed, row in enumerate(ours):
        distance = mean_distance(curve(row, "loss"), middle)
        lines.append(f"    {f'tinker-local seed {seed} and the mean of TRL':<42}{distance:.5f}")
    same = found(rows, task, "ours", "same")
    for row in same:
        one, other = curve(row, "loss"), curve(trl[0], "loss")
        name = "both from TRL's first adapter of seed 0"
        lines.append(
            f"    {name:<42}{mean_distance(one, other):.7f}, at most {largest_distance(one, other):.7f}{_scored(row)}"
        )
        lines.append(f"    {'  norm of the gradient, relative':<42}{_relative(row, trl[0])}")
    lines += ["  loss of each step:", *step_table([*trl, *ours, *same], "loss")]
    if all("margin" in row["steps"][0] for row in (*trl, *ours, *same)):
        lines.append("  margin of rewards, chosen less rejected: mean absolute difference, and the largest:")
        lines += pair_lines(trl, ours, "margin", 5)
        for row in same:
            one, other = curve(row, "margin"), curve(trl[0], "margin")
            name = "both from TRL's first adapter of seed 0"
            lines.append(f"    {name:<42}{mean_distance(one, other):.7f}, at most {largest_distance(one, other):.7f}")
        lines += ["  margin of each step:", *step_table([*trl, *ours, *same], "margin")]
    return lines


def _scored(row: Row) -> str:
    """Held-out answers before and after by the task's scorer; empty where none were asked for."""
    if "held_out" not in row:
        return ""
    before, after = row["held_out"]
    told = (
        f"   held out {before['right']} -> {after['right']} of {after['of']} right, "
        f"mean score {before['score']:.3f} -> {after['score']:.3f}"
    )
    if "margin" in before:
        told += (
            f", loss {before['loss']:.4f} -> {after['loss']:.4f}, margin {after['margin']:.3f}, "
            f"{after['accuracy']:.0%} of pairs won"
        )
    return told


def _relative(row: Row, other: Row) -> str:
    """How far the norms of the gradient differ, over the other's."""
    shares = [abs(a - b) / b for a, b in zip(curve(row, "grad_norm"), curve(other, "grad_norm"), strict=True) if b]
    return f"{statistics.fmean(shares):.2e}, at most {max(shares):.2e}" if shares else "no gradient"


def grpo_report(rows: Sequence[Row]) -> list[str]:
    """Rewards beside each other; empty without both sides."""
    trl, ours = found(rows, "grpo", "trl"), found(rows, "grpo", "ours")
    if not trl or not ours:
        return []
    sides = {"TRL": trl, "tinker-local": ours, "  ratio 1": found(rows, "grpo", "ours", "forward")}
    lines = ["", "GRPO: reward of the samples, and held-out sums that are right at temperature 0"]
    for name, group in sides.items():
        for seed, row in enumerate(group):
            rewards = curve(row, "reward")
            before, after = row["held_out"]
            held_out = f"held out {before['right']} -> {after['right']} of {after['of']}"
            first, last = statistics.fmean(rewards[:3]), statistics.fmean(rewards[-3:])
            lines.append(f"  {name:<13} seed {seed}   steps 1-3 {first:.3f}   last 3 {last:.3f}   {held_out}")
            if "apart" in row["steps"][0]:
                apart, clipped = (statistics.fmean(curve(row, key)) for key in ("apart", "clipped"))
                lines[-1] += f"   apart {apart:.4f} nats, clipped {clipped:.2%}"
    for name, group in list(sides.items())[1:]:
        if min(len(trl), len(group)) > 2:
            lines += held_out_lines(trl, group, name)
    lines.append("  mean over the steps of the absolute difference of rewards:")
    lines += pair_lines(trl, ours, "reward", 3)
    for row in found(rows, "grpo", "ours", "replay"):
        lines.append("  trained on TRL's samples of seed 0, from its first adapter:")
        lines.append(f"    norm of the gradient, relative: {_relative(row, trl[0])}")
    return lines


def held_out_lines(trl: Sequence[Row], ours: Sequence[Row], ours_name: str) -> list[str]:
    """How many held-out answers are right after the training, by side, and the 95 % interval of the difference of the
    means by Welch's t."""
    from scipy import stats  # type: ignore[import-untyped]

    right = [[row["held_out"][1]["right"] for row in group] for group in (trl, ours)]
    lines = [
        f"  {name:<13} held out after, {len(values)} seeds: mean {statistics.fmean(values):.1f}, "
        f"standard deviation {statistics.stdev(values):.1f}"
        for name, values in zip(("TRL", ours_name), right, strict=True)
    ]
    low, high = stats.ttest_ind(right[1], right[0], equal_var=False).confidence_interval(0.95)
    difference = statistics.fmean(right[1]) - statistics.fmean(right[0])
    return [*lines, f"  {ours_name} less TRL: {difference:+.1f}, 95 % between {low:+.1f} and {high:+.1f}"]


def text(rows: Sequence[Row], head: Sequence[str]) -> str:
    losses = [line for task in LOSSES for line in loss_report(rows, task)]
    return "\n".join([*head, "", *cost_table(rows), *losses, *grpo_report(rows)]) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Losses, their distance from TRL's first seed, and rewards by step, as a picture; second seeds are dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [
        (side, name, colour, width, style, row)
        for side, name, colour, width in (("trl", "TRL", "tab:orange", 4), ("ours", "tinker-local", "tab:blue", 1.5))
        for style, row in zip("-:", found(rows, "sft", side), strict=False)
    ]
    with_rewards = bool(found(rows, "grpo", "trl") and found(rows, "grpo", "ours"))
    figure, places = pyplot.subplots(
        1, 2 + with_rewards, figsize=(11 if with_rewards else 8, 3.2), layout="constrained"
    )
    losses, distances, *others = places
    base = next((curve(row, "loss") for side, *_, row in groups if side == "trl"), [])
    for _, name, colour, width, style, row in groups:
        values = curve(row, "loss")
        steps, label = range(1, len(values) + 1), name if style == "-" else f"{name}, another adapter"
        losses.plot(steps, values, color=colour, linewidth=width, linestyle=style)
        if len(values) == len(base) and values != base:
            distances.plot(steps, [a - b for a, b in zip(values, base, strict=True)], style, color=colour, label=label)
    for row in found(rows, "sft", "ours", "same"):
        values = curve(row, "loss")
        losses.plot(range(1, len(values) + 1), values, "x", color="black", markersize=4)
        if len(values) == len(base):
            distance = [a - b for a, b in zip(values, base, strict=True)]
            distances.plot(
                range(1, len(values) + 1), distance, "x-", color="black", label="tinker-local, TRL's adapter"
            )
    for axes in others:
        for side, name, colour in (("trl", "TRL", "tab:orange"), ("ours", "tinker-local", "tab:blue")):
            for style, row in zip("-:", found(rows, "grpo", side), strict=False):
                values = curve(row, "reward")
                axes.plot(range(1, len(values) + 1), values, style, color=colour, label=name if style == "-" else "")
        axes.set(xlabel="step", title="GRPO: mean reward, two seeds")
    losses.set(xlabel="step", title="SFT: loss")
    distances.set(xlabel="step", title="SFT: loss less that of TRL, seed 0")
    for axes in (distances, *others):
        if axes.lines:
            axes.legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
