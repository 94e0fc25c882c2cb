"""Questions of `reasoning-gym`, and its scores of answers to them.

    PYTHON gym_rows.py rows COUNT SEED
    PYTHON gym_rows.py score FILE

A program of TRL's environment, with `reasoning-gym`: it imports nothing of this project. `rows` prints a JSON list of
`[question, answer]`, no question twice. FILE is a JSON list of `[answer, reply]`; `score` prints a JSON list of what
the task's own scorer gives each reply: 1 for the answer alone, less where it stands within more text, else 0 or little.
"""

import json
import sys
from pathlib import Path
from typing import Any

TASK: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Of `chain_sum`: sums and differences of two numbers below 100, which SmolLM2-135M gets right now and then."""


def made(count: int, seed: int) -> Any:
    """The data set: an entry has `question` and `answer`."""
    import reasoning_gym  # type: ignore[import-not-found]

    return reasoning_gym.create_dataset("chain_sum", seed=seed, size=count, **TASK)


def different(entries: Any, count: int) -> list[tuple[str, str]]:
    """The first `count` different questions, with their answers."""
    found: dict[str, str] = {}
    for entry in entries:
        found.setdefault(entry["question"], entry["answer"])
        if len(found) == count:
            return list(found.items())
    raise SystemExit(f"only {len(found)} different questions, not {count}")


def main() -> None:
    if sys.argv[1] == "rows":
        count, seed = int(sys.argv[2]), int(sys.argv[3])
        print(json.dumps(different(made(4 * count, seed), count)))
    else:
        entries = made(1, 0)
        replies = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps([float(entries.score_answer(reply, {"answer": answer})) for answer, reply in replies]))


if __name__ == "__main__":
    main()
