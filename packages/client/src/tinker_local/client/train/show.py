"""A row token by token, with what is trained in colour, and the numbers of a data set: to look at before training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import tinker
from tinker_local.client.train.examples import Example, Preference, Rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_TRAINED, _GIVEN, _PICTURE = ("bold green", "bold bright_green"), ("bright_black", "white"), "cyan"
"""Styles of tokens in turn, so that neighbours can be told apart."""

_ENDS = 30
"""Tokens at the begin and at the end of a long run without trained tokens that are shown."""

_OF_A_CHARACTER = 8
"""Most tokens that are joined because a character is not complete."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token (or as many as make whole characters) as text, or a picture."""

    text: str
    trained: bool
    picture: bool = False


def shown_tokens(example: Example, tokenizer: Any) -> list[ShownToken]:
    """All tokens of an example in order, the last target too. A picture is one of them, with its positions."""
    inputs = example.datum.loss_fn_inputs
    weights = [0.0, *inputs["weights"].to_numpy().tolist()]  # of each token; the first cannot be a target
    found: list[ShownToken] = []
    at = 0
    for chunk in example.datum.model_input.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            found += _texts(chunk.tokens, weights[at : at + len(chunk.tokens)], tokenizer)
        else:
            found.append(ShownToken(f"picture, {chunk.length} positions", False, picture=True))
        at += int(chunk.length)
    last = int(inputs["target_tokens"].to_numpy()[-1])
    return [*found, *_texts([last], weights[at:], tokenizer)]


def _texts(tokens: Sequence[int], weights: Sequence[float], tokenizer: Any) -> list[ShownToken]:
    found: list[ShownToken] = []
    begin = 0
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(list(tokens[begin:end]), clean_up_tokenization_spaces=False))
        whole = not text.endswith("\ufffd") or end - begin == _OF_A_CHARACTER
        if whole or end == len(tokens) or (weights[end] > 0) != (weights[begin] > 0):
            found.append(ShownToken(text, weights[begin] > 0))
            begin = end
    return found


def shown_row(found: Sequence[Example] | Preference, tokenizer: Any, *, colour: bool = True) -> "Text":
    """A row as text for `rich`. Trained tokens are green, others grey; without `colour` trained ones are in brackets.
    Long runs that are not trained are cut in the middle. What is not printable, as an escape, is written out."""
    from rich.text import Text

    examples = [found.chosen, found.rejected] if isinstance(found, Preference) else list(found)
    names = ["chosen", "rejected"] if isinstance(found, Preference) else [""] * len(examples)
    shown = Text()
    for number, (example, name) in enumerate(zip(examples, names, strict=True), 1):
        several = f", {number} of {len(examples)}" if len(examples) > 1 else ""
        head = (
            f"{example.place}{several}{' ' * bool(name)}{name}: {example.trained} of {example.length} tokens trained\n"
        )
        shown.append(head, style="bold")
        for at, (text, style, trained) in enumerate(_lines(shown_tokens(example, tokenizer))):
            style = style if isinstance(style, str) else style[at % 2]
            shown.append(f"[{text}]" if trained and not colour else text, style=style if colour else "")
        shown.append("\n")
    return shown


def _lines(tokens: Iterable[ShownToken]) -> Iterable[tuple[str, str | tuple[str, str], bool]]:
    """Text, style and whether it is trained; runs that are not trained are cut."""
    for (trained, picture), group in groupby(tokens, key=lambda token: (token.trained, token.picture)):
        run = list(group)
        if picture:
            yield from ((f"<{token.text}>", _PICTURE, False) for token in run)
            continue
        cut = not trained and len(run) > 2 * _ENDS + 1
        style = _TRAINED if trained else _GIVEN
        yield from ((_printable(token.text), style, trained) for token in (run[:_ENDS] if cut else run))
        if cut:
            yield f" ... {len(run) - 2 * _ENDS} tokens ... ", _PICTURE, False
            yield from ((_printable(token.text), style, trained) for token in run[-_ENDS:])


def _printable(text: str) -> str:
    """Line feeds with a sign, and other control characters written out: a row must not steer the terminal."""
    return "".join(
        "⏎\n" if each == "\n" else each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def summary(rows: Rows) -> str:
    """The numbers of a data set in one or two lines."""
    lengths = np.array([pair for at in range(len(rows)) for pair in rows.lengths(at)], np.int64).reshape(-1, 2)
    tokens, trained = (int(value) for value in lengths.sum(0))
    kind = "pairs" if rows.kind == "preference" else "rows"
    share = 100 * trained / max(tokens, 1)
    lines = [
        f"{len(rows):,} {kind}, {len(lengths):,} sequences of {int(lengths[:, 0].min(initial=tokens)):,} to "
        f"{int(lengths[:, 0].max(initial=0)):,} tokens; {trained:,} of {tokens:,} tokens are trained ({share:.1f} %)"
    ]
    if rows.skipped:
        bad = len({problem.place for problem in rows.skipped})
        lines.append(f"{bad:,} bad rows are left out")
    if shortened := int(getattr(rows, "shortened", 0)):
        lines.append(f"{shortened:,} rows are shortened: answers at their ends do not fit and are left out")
    return "\n".join(lines)


def print_row(rows: Rows, index: int, tokenizer: Any, console: "Console | None" = None) -> None:
    """Print row `index` as `shown_row` has it, in colour where the console has colours."""
    from rich.console import Console

    console = console or Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    console.print(shown_row(rows.examples(index), tokenizer, colour=colour), soft_wrap=True)
