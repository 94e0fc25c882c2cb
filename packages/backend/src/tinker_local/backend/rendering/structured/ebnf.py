"""Expressions of a grammar in EBNF, as xgrammar reads it, without what can never be completed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HIGHEST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Text:
    """These characters; none: the empty text."""

    text: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character of `ranges`, which are sorted, inclusive and disjoint; without ranges, nothing matches."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Concatenated:
    """One after the other."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of these; without any, nothing matches."""

    options: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part`, `least` to `most` times; None: without an end."""

    part: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of this name matches."""

    name: str


Expression = Text | OneOf | Concatenated | Either | Repeat | Rule

NOTHING = Either(())
EMPTY = Text("")


def chars(*ranges: tuple[int, int]) -> OneOf:
    """One character of `ranges`, in any order; they may overlap."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return OneOf(tuple((low, high) for low, high in merged))


def complement(ranges: Iterable[tuple[int, int]]) -> OneOf:
    """One character that is not in `ranges`."""
    found, start = [], 0
    for low, high in chars(*ranges).ranges:
        found.append((start, low - 1))
        start = high + 1
    return chars(*found, (start, HIGHEST))


def common(one: OneOf, other: OneOf) -> OneOf:
    """One character that is in both."""
    return chars(*((max(a, c), min(b, d)) for a, b in one.ranges for c, d in other.ranges))


def each_of(text: str) -> OneOf:
    """One of the characters of `text`."""
    return chars(*((ord(one), ord(one)) for one in text))


def seq(*parts: Expression) -> Expression:
    """`parts` one after the other."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Concatenated) else [part]
    flat = [part for part in flat if part != EMPTY]
    if any(is_nothing(part) for part in flat):
        return NOTHING
    return EMPTY if not flat else flat[0] if len(flat) == 1 else Concatenated(tuple(flat))


def either(*options: Expression) -> Expression:
    """One of `options`."""
    flat: list[Expression] = []
    for option in options:
        flat += option.options if isinstance(option, Either) else [option]
    kept = [option for option in dict.fromkeys(flat) if not is_nothing(option)]
    return kept[0] if len(kept) == 1 else Either(tuple(kept))


def repeat(part: Expression, least: int = 0, most: int | None = None) -> Expression:
    """`part`, `least` to `most` times."""
    if most is not None and most < least:
        return NOTHING
    if most == 0 or part == EMPTY or is_nothing(part):
        return NOTHING if least and is_nothing(part) else EMPTY
    return part if least == most == 1 else Repeat(part, least, most)


def optional(part: Expression) -> Expression:
    """`part` or the empty text."""
    return either(part, EMPTY)


def is_nothing(expression: Expression) -> bool:
    """Whether it is seen at once that nothing matches."""
    if isinstance(expression, Either):
        return not expression.options
    return isinstance(expression, OneOf) and not expression.ranges


def write(rules: Mapping[str, Expression], root: str) -> str | None:
    """The grammar that begins at the rule `root`, without rules and options that can never be completed, and without
    rules that nothing refers to. None if nothing matches it."""
    complete: set[str] = set()
    while True:
        more = {name for name, rule in rules.items() if name not in complete and _completes(rule, complete)}
        if not more:
            break
        complete |= more
    if root not in complete:
        return None
    lines, todo, seen = [], [root], {root}
    while todo:
        name = todo.pop()
        rule = _without(rules[name], complete)
        lines.append(f"{name} ::= {_text(rule, top=True)}")
        for other in _names(rule):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return "\n".join([f"root ::= {root}", *lines]) + "\n"


def _completes(expression: Expression, complete: set[str]) -> bool:
    match expression:
        case Rule(name):
            return name in complete
        case Concatenated(parts):
            return all(_completes(part, complete) for part in parts)
        case Either(options):
            return any(_completes(option, complete) for option in options)
        case Repeat(part, least, _):
            return least == 0 or _completes(part, complete)
        case OneOf(ranges):
            return bool(ranges)
        case Text():
            return True


def _without(expression: Expression, complete: set[str]) -> Expression:
    match expression:
        case Concatenated(parts):
            return seq(*(_without(part, complete) for part in parts))
        case Either(options):
            return either(*(_without(option, complete) for option in options if _completes(option, complete)))
        case Repeat(part, least, most):
            return repeat(_without(part, complete), least, most) if _completes(part, complete) else EMPTY
        case _:
            return expression


def _names(expression: Expression) -> Iterable[str]:
    match expression:
        case Rule(name):
            yield name
        case Concatenated(parts) | Either(parts):
            for part in parts:
                yield from _names(part)
        case Repeat(part):
            yield from _names(part)


def _text(expression: Expression, *, top: bool = False) -> str:
    match expression:
        case Rule(name):
            return name
        case Text(text):
            return f'"{"".join(map(_escaped, text))}"'
        case OneOf(ranges):
            pairs = (_escaped(chr(a)) if a == b else f"{_escaped(chr(a))}-{_escaped(chr(b))}" for a, b in ranges)
            return f"[{''.join(pairs)}]"
        case Repeat(part, least, most):
            inner = f"({_text(part)})" if isinstance(part, Repeat) else _text(part)
            return f"{inner}{_times(least, most)}"
        case Concatenated(parts):
            text = " ".join(map(_text, parts))
        case Either(options):
            text = _options(options)
    return text if top else f"({text})"


def _options(options: Sequence[Expression]) -> str:
    return " | ".join(_text(option, top=isinstance(option, Concatenated)) for option in options)


def _times(least: int, most: int | None) -> str:
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return plain or (f"{{{least},}}" if most is None else f"{{{least},{most}}}")


def _escaped(char: str) -> str:
    """As it stands if that is safe anywhere; xgrammar gives some others a meaning in classes."""
    if char.isascii() and (char.isalnum() or char in " _,:;{}()<>=/"):
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
