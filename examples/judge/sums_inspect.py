"""The held-out sums as a task of inspect: the last number of the answer is compared with the sum."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def sums() -> Task:
    rows = str(Path(__file__).with_name("sums.jsonl"))
    dataset = json_dataset(rows, lambda row: Sample(input=row["question"], target=row["answer"]))
    return Task(dataset=dataset, solver=generate(), scorer=pattern(r"(-?\d+)\D*$"))
