"""What rows of data become: data of the SDK with the loss on the answers only, and the problems of rows that cannot.

`rows.read_rows` makes `Rows` of a file. The loop reads them by number, in the order that it chooses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import tinker
from tinker_local.types import InvalidRequestError

Kind: TypeAlias = Literal["sft", "preference"]
"""Of all rows of a data set: answers to learn, or pairs of a chosen and a rejected answer."""

MOST_SHOWN = 20
"""Problems in the message of `BadRows`; `problems` has all of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a row cannot be used. `place`: "data.jsonl line 17". `field`: "messages[2].content", or "" for all of it."""

    place: str
    field: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.field, self.reason) if part)


class BadRows(InvalidRequestError):
    """Rows of a data set cannot be used. `problems`: every one, in the order of the rows. `rows`: how many there are,
    good and bad."""

    def __init__(self, problems: Sequence[Problem], rows: int) -> None:
        self.problems = tuple(problems)
        self.rows = rows
        bad = len({problem.place for problem in problems})
        lines = [f"{bad} of {rows} rows cannot be used:", *map(str, self.problems[:MOST_SHOWN])]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"... and {len(self.problems) - MOST_SHOWN} more problems")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Example:
    """One datum of a row, for the loss "cross_entropy": `target_tokens` int64 [T] and `weights` float32 [T] (1 where a
    target is part of an answer, 0 elsewhere), where T is the number of positions of the input, and target i follows
    position i. Pictures are chunks of the input; their positions are targets of weight 0.

    `trained`: targets with a weight above 0. `length`: positions of the text with its last token, T + 1.
    """

    place: str
    datum: tinker.Datum
    trained: int
    length: int


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to the same prompt, which both begin with the same tokens."""

    place: str
    chosen: Example
    rejected: Example


class Rows(Protocol):
    """The good rows of a data set. Rendering reads the row again, so a data set need not fit in memory; any thread may
    call it, several at once."""

    @property
    def kind(self) -> Kind:
        """The same for all rows."""
        ...

    @property
    def skipped(self) -> Sequence[Problem]:
        """Why bad rows were left out; empty unless `skip_bad`."""
        ...

    def __len__(self) -> int: ...

    def examples(self, index: int) -> Sequence[Example] | Preference:
        """Row `index` rendered: a `Preference` if `kind` says so, else one or more data (one for each answer, where
        the template rewrites earlier turns)."""
        ...

    def lengths(self, index: int) -> Sequence[tuple[int, int]]:
        """`length` and `trained` of each of the examples of a row (chosen, then rejected), without rendering it."""
        ...

    def prompt(self, index: int) -> tuple[tinker.ModelInput, str]:
        """What comes before the last answer of a row (the chosen one of a pair), with the template's beginning of a
        reply, and the answer as the model writes it, without its end of turn. To sample from, and to compare."""
        ...

    def raw(self, index: int) -> Mapping[str, Any]:
        """The row as it is in the file."""
        ...
