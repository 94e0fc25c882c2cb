"""Makes the options of `tinker-local serve` from the fields of `BackendOptions`."""

import math
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from tinker_local.backend.options import BackendOptions, CommandOption, default_data_dir

Command = TypeVar("Command", bound=Callable[..., Any])


def backend_options(command: Command) -> Command:
    """Decorate `command` with them; it gets their values by the names of the fields."""
    hints = get_type_hints(BackendOptions, include_extras=True)
    for each in reversed(fields(BackendOptions)):
        if get_origin(hint := hints[each.name]) is Annotated:
            command = _click_option(each, *get_args(hint))(command)
    return command


def data_dir_option(text: str) -> Callable[[Command], Command]:
    """`--data-dir` of a command that is not a server; `text`: its help."""
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=default_data_dir,
        show_default="~/.local/share/tinker-local",
        help=text,
    )


def each_value(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], Any]:
    """The callback of an option that may be repeated: a tuple of what `parse` makes of each value."""

    def callback(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Any, ...]:
        try:
            return tuple(parse(value) for value in values)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _one_value(
    parse: Callable[[str], Any], default: Any
) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """The callback of an option with one value."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
        try:
            return default if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _click_option(each: "Field[Any]", hint: Any, option: CommandOption) -> Callable[[Command], Command]:
    kind = next(arm for arm in get_args(hint) if arm is not NoneType) if NoneType in get_args(hint) else hint
    settings: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.parse is not None:
        settings |= {"multiple": True, "callback": each_value(option.parse)}
    elif option.parse_one is not None:
        settings["callback"] = _one_value(option.parse_one, each.default)
    elif option.gib:
        default = None if each.default is None else each.default / 2**30  # type: ignore[operator]
        settings |= {"type": _FiniteRange(0, min_open=True), "metavar": "GIB", "callback": _bytes}
        settings |= {"default": default, "show_default": True}
    elif kind is bool:
        settings["is_flag"] = True
    elif kind is Path:
        settings["type"] = click.Path(path_type=Path, exists=option.must_exist, file_okay=False)
        if option.shown_default:
            settings |= {"default": each.default_factory, "show_default": option.shown_default}
    elif get_origin(kind) is Literal:
        settings |= {"type": click.Choice(get_args(kind)), "default": each.default}
    else:
        number: Any = click.IntRange if kind is int else _FiniteRange
        settings |= {"type": number(option.least, option.most), "default": each.default, "show_default": True}
    return click.option(option.flag or f"--{each.name.replace('_', '-')}", each.name, **settings)


class _FiniteRange(click.FloatRange):
    """A range without NaN, which compares with nothing, and without what is infinite, as a number or in bytes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number * 2**30):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def _bytes(_context: click.Context, _parameter: click.Parameter, gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
