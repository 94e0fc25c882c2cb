"""The rows of `beside_trl.py` for `tinker-local train`, and what TRL gets of them: the same token ids, in the order in
which the command's plan visits them. Loads no model.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Question = tuple[str, str]
"""With its answer."""

SHOWN = "4 + 3 = 7\n15 - 6 = 9\n"
"""Before each question: a model of this size answers a sum in this form, and seldom one that it is asked in words."""


def prompt(question: str) -> str:
    """The sum that the question of `chain_sum` ends with, behind `SHOWN`."""
    return SHOWN + question.rpartition(": ")[2]


def first_line(reply: str) -> str:
    """Of a reply, what its scorer gets: a model that was not trained goes on with more sums."""
    return reply.strip().partition("\n")[0].strip()


def sft_row(question: str, answer: str) -> dict[str, Any]:
    """`answer`: what the judge compares with."""
    return {"prompt": prompt(question), "completion": f" {answer}", "answer": answer}


def pair_row(question: str, answer: str, samples: Sequence[str], scores: Sequence[float]) -> dict[str, Any] | None:
    """The sample with the best score, and the one with the worst, of each the first; None if all have the same score.
    Samples of blanks alone do not count as answers, and are left out."""
    scored = [(score, text) for score, text in zip(scores, samples, strict=True) if text.strip()]
    best, worst = (pick((score for score, _ in scored), default=0.0) for pick in (max, min))
    if best == worst:
        return None
    chosen, rejected = (next(text for score, text in scored if score == wanted) for wanted in (best, worst))
    return {"prompt": prompt(question), "chosen": chosen, "rejected": rejected, "answer": answer}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_order(path: Path, tokenizer: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """`examples` to train on, of all steps in order; `kept`: those held out, in the order in which they are evaluated;
    `asked`: ids of their prompts; `answers` to them; and the `stop` tokens of a reply. ValueError if `path` has not
    exactly the rows of `numbers`: all steps, and those held out."""
    from tinker_local.client.train.evaluate import ends_of
    from tinker_local.client.train.examples import Preference
    from tinker_local.client.train.rendering import Renderer
    from tinker_local.client.train.rows import read_rows
    from tinker_local.client.train.schedule import Plan, split_rows
    from tinker_local.client.train.settings import TrainSettings

    rows = read_rows(path, renderer=Renderer(tokenizer), most_tokens=numbers["longest"])
    learned = numbers["steps"] * numbers["batch"]
    if len(rows) != learned + numbers["held_out"]:
        raise ValueError(f"{path}: has {len(rows)} rows, not {learned} and {numbers['held_out']}")
    chosen = TrainSettings(
        learning_rate=numbers["learning_rate"], batch_size=numbers["batch"], held_out=numbers["held_out"]
    )
    trained, held_out = split_rows(len(rows), chosen.held_out, chosen.seed)
    plan = Plan(trained, chosen)
    order = [row for step in range(1, plan.total + 1) for row in plan.rows_of(step)]

    def example(row: int) -> dict[str, list[int]]:
        found = rows.examples(row)
        return _pair(found) if isinstance(found, Preference) else _labelled(found[0])

    return {
        "examples": [example(row) for row in order],
        "kept": [example(int(row)) for row in held_out],
        "asked": [rows.prompt(int(row))[0].to_ints() for row in held_out],
        "answers": [rows.raw(int(row))["answer"] for row in held_out],
        "stop": sorted({tokenizer.eos_token_id, *ends_of(rows, plan.rows_of(1))}),
    }


def _labelled(example: Any) -> dict[str, list[int]]:
    from measurements.beside_train import labelled

    tokens, labels = labelled(example.datum)
    return {"input_ids": tokens, "labels": labels}


def _pair(pair: Any) -> dict[str, list[int]]:
    """As TRL's collator of pairs takes it. The prompt is what comes before the first trained token."""
    chosen, rejected = (_labelled(each) for each in (pair.chosen, pair.rejected))
    begin = next(place for place, label in enumerate(chosen["labels"]) if label >= 0)
    return {
        "prompt_ids": chosen["input_ids"][:begin],
        "chosen_ids": chosen["input_ids"][begin:],
        "rejected_ids": rejected["input_ids"][begin:],
    }
