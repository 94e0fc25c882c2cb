"""Texts of numbers between two bounds."""

import math
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from tinker_local.backend.rendering.structured.ebnf import (
    EMPTY,
    NOTHING,
    Expression,
    Text,
    chars,
    either,
    optional,
    repeat,
    seq,
)

DIGITS = 30
"""Of an integer, at most, unless a bound has more: Python reads up to 4,300, and a float ends at 308."""

PRECISE = 15
"""Decimal digits that a float keeps."""

DIGIT, NONZERO = chars((48, 57)), chars((49, 57))


@dataclass(frozen=True, slots=True)
class Bound:
    """A number, and whether it is allowed itself."""

    value: Decimal
    allowed: bool = True


def numbers(low: Bound | None, high: Bound | None, *, integers: bool) -> Expression:
    """Numbers between `low` and `high`; integers have neither a fraction nor an exponent. With a bound no number has an
    exponent."""
    if low is None and high is None:
        sign, whole = optional(Text("-")), either(Text("0"), seq(NONZERO, repeat(DIGIT, 0, DIGITS - 1)))
        if integers:
            return seq(sign, whole)
        power = seq(chars((69, 69), (101, 101)), optional(chars((43, 43), (45, 45))), repeat(DIGIT, 1, 2))
        return seq(sign, whole, optional(seq(Text("."), repeat(DIGIT, 1, DIGITS))), optional(power))
    zero = Bound(Decimal(0))
    from_zero = zero if low is None or low.value < 0 else low
    positive = _unsigned(from_zero, high, integers) if high is None or high.value >= 0 else NOTHING
    if low is not None and low.value >= 0:
        return positive
    below = Bound(Decimal(0), not integers) if high is None or high.value > 0 else Bound(-high.value, high.allowed)
    return either(positive, seq(Text("-"), _unsigned(below, None if low is None else _opposite(low), integers)))


def _opposite(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.allowed)


def _unsigned(low: Bound, high: Bound | None, integers: bool) -> Expression:
    """From `low`, which is not negative."""
    first = int(low.value.to_integral_value(ROUND_FLOOR))
    last = None if high is None else int(high.value.to_integral_value(ROUND_FLOOR))
    if integers:
        least = first if low.allowed and low.value == first else first + 1
        if last is not None and high is not None and not high.allowed and high.value == last:
            last -= 1
        return whole_numbers(least, last)
    after_low = _digits_after(low.value, first)
    if last is None or high is None:
        return either(
            seq(Text(str(first)), _fraction(after_low, low.allowed, None, True, _budget(first))),
            seq(whole_numbers(first + 1, None), _any_fraction(PRECISE)),
        )
    if last < first:
        return NOTHING
    after_high = _digits_after(high.value, last)
    if first == last:
        return seq(Text(str(first)), _fraction(after_low, low.allowed, after_high, high.allowed, _budget(first)))
    return either(
        seq(Text(str(first)), _fraction(after_low, low.allowed, None, True, _budget(first))),
        seq(whole_numbers(first + 1, last - 1), _any_fraction(_budget(last))),
        seq(Text(str(last)), _fraction(None, True, after_high, high.allowed, _budget(last))),
    )


def _budget(whole: int) -> int:
    """Digits of a fraction after `whole`, so that different texts are different floats."""
    return max(0, PRECISE - len(str(whole)))


def _digits_after(value: Decimal, whole: int) -> tuple[int, ...]:
    """Those of the fraction."""
    text = f"{value - whole:f}"
    return tuple(int(digit) for digit in text.partition(".")[2].rstrip("0"))


def _any_fraction(digits: int) -> Expression:
    return optional(seq(Text("."), repeat(DIGIT, 1, digits))) if digits else EMPTY


Rest = tuple[int, ...] | None


def _fraction(low: Rest, low_allowed: bool, high: Rest, high_allowed: bool, budget: int) -> Expression:
    """A point and digits, or nothing: a fraction from `low` to `high`; None: as small, or as large, as any."""
    ends, more = _digits(low, low_allowed, high, high_allowed, budget)
    return either(EMPTY if ends else NOTHING, seq(Text("."), more))


def _digits(low: Rest, low_allowed: bool, high: Rest, high_allowed: bool, budget: int) -> tuple[bool, Expression]:
    """Whether the digits may end here, and what one or more further ones may be."""
    if low == () and low_allowed:
        low = None
    ends = low is None  # else something must follow: a digit of `low`, or one that is more than it
    if high == () and not high_allowed:
        return False, NOTHING
    if budget == 0:
        return ends, NOTHING
    if low is None and high is None:
        return True, repeat(DIGIT, 1, budget)
    options: list[Expression] = []
    free = []
    for digit in range(10):
        lower, least = _next(low)
        upper, most = _next(high)
        if low is not None and digit < least:
            continue
        if high is not None and digit > most:
            continue
        lower = None if low is None or digit > least else lower
        upper = None if high is None or digit < most else upper
        if lower is None and upper is None:
            free.append((48 + digit, 48 + digit))
            continue
        may_end, more = _digits(lower, low_allowed, upper, high_allowed, budget - 1)
        options.append(seq(Text(str(digit)), either(EMPTY if may_end else NOTHING, more)))
    options.append(seq(chars(*free), repeat(DIGIT, 0, budget - 1)))
    return ends, either(*options)


def _next(digits: Rest) -> tuple[Rest, int]:
    """The rest and the first; zeros follow the last."""
    return (digits[1:], digits[0]) if digits else (digits, 0)


def whole_numbers(low: int, high: int | None) -> Expression:
    """Digits of an integer from `low`, which is not negative, to `high`; None: of at most `DIGITS` digits."""
    options = []
    last = max(DIGITS, len(str(low))) if high is None else len(str(high))
    if high is not None and high < low:
        return NOTHING
    for length in range(len(str(low)), last + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = 10**length - 1 if high is None else min(high, 10**length - 1)
        if least <= most:
            options.append(_same_length(str(least), str(most)))
    return either(*options)


def _same_length(low: str, high: str) -> Expression:
    """Digits from `low` to `high`."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return seq(Text(low[0]), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    options: list[Expression] = []
    if set(low[1:]) <= {"0"}:
        first -= 1
    else:
        options.append(seq(Text(low[0]), _same_length(low[1:], "9" * rest)))
    upper: list[Expression] = []
    if set(high[1:]) <= {"9"}:
        last += 1
    else:
        upper.append(seq(Text(high[0]), _same_length("0" * rest, high[1:])))
    options.append(seq(chars((48 + first + 1, 48 + last - 1)), repeat(DIGIT, rest, rest)))
    return either(*options, *upper)


def exact(value: int | float) -> Decimal:
    """Of a number of JSON; ValueError for one that is infinite."""
    if not math.isfinite(value):
        raise ValueError("not finite")
    return Decimal(repr(value))
