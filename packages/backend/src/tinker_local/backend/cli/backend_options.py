"""Makes the options of `tinker-local serve` from the fields of `BackendOptions`."""

import math
import os
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from tinker_local.backend.options import GROUPS, USUAL_OPTIONS, BackendOptions, CommandOption, default_data_dir

Command = TypeVar("Command", bound=Callable[..., Any])


def backend_options(command: Command) -> Command:
    """Decorate `command` with them; it gets their values by the names of the fields."""
    return _with_options(command, lambda option: True)


def plan_options(command: Command) -> Command:
    """The same with those alone on which the plan of a GPU's memory depends."""
    return _with_options(command, lambda option: option.planned)


def _with_options(command: Command, wanted: Callable[[CommandOption], bool]) -> Command:
    hints = get_type_hints(BackendOptions, include_extras=True)
    for each in reversed(fields(BackendOptions)):
        if get_origin(hint := hints[each.name]) is Annotated and wanted(get_args(hint)[1]):
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


def not_empty(_context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The callback of an argument that a shell's variable may give."""
    if not value.strip():
        raise click.BadParameter(
            "it is empty, as a variable is that this terminal has not set; with $SAMPLER and $STATE of an example, "
            "first read the paths.sh in its folder: `. runs/pictures/paths.sh`"
        )
    return value


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
    settings: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "cls": Option, "group": option.group}
    if option.parse is not None:
        settings |= {"multiple": True, "callback": each_value(option.parse)}
    elif option.parse_one is not None:
        settings["callback"] = _one_value(option.parse_one, each.default)
    elif option.gib:
        default = None if each.default is None else each.default / 2**30  # type: ignore[operator]
        settings |= {"type": Number(0, min_open=True), "metavar": "GIB", "callback": _bytes}
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
        number: Any = WholeNumber if kind is int else Number
        settings |= {"type": number(option.least, option.most), "default": each.default, "show_default": True}
    return click.option(option.flag or f"--{each.name.replace('_', '-')}", each.name, **settings)


LARGEST, LARGEST_WHOLE = 1e9, 10**12
"""The most where an option sets no limit. In seconds, the first is 30 years."""


class WholeNumber(click.IntRange):
    """A range of whole numbers, with messages for people."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        if (problem := _outside(number, self.min, self.max, LARGEST_WHOLE)) is not None:
            self.fail(f"{problem}, not {value}.", param, ctx)
        return number


class Number(click.FloatRange):
    """The same of all finite numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        problem = _outside(number, self.min, self.max, LARGEST)
        if self.min_open and number <= 0:
            problem = "must be more than 0"
        if problem is not None:
            self.fail(f"{problem}, not {value}.", param, ctx)
        return number


def _outside(number: float, least: float | None, most: float | None, largest: float) -> str | None:
    """What a number must be that is not between `least` and `most`, or beyond `largest`; None if it is right."""
    if (least is None or least <= number) and number <= (largest if most is None else most):
        return None
    if least is not None and most is not None:
        return f"must be from {least:.4g} to {most:.6g}"
    return (
        f"must be at least {least:.4g}" if least is not None and number < least else f"must be at most {largest:,.0f}"
    )


class Option(click.Option):
    """One that takes no empty value, as `--data-dir $NOTHING` is a mistake and not the working folder, and that has the
    name of its flag in the environment: `--kv-cache` is `TINKER_LOCAL_SERVE_KV_CACHE`. `group`: as of
    `CommandOption`."""

    def __init__(self, *args: Any, group: str = USUAL_OPTIONS, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        flag = max(self.opts, key=len).lstrip("-").replace("-", "_").upper()
        return os.environ.get(f"{ctx.auto_envvar_prefix}_{flag}") or None

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        if value == "" or (isinstance(value, tuple | list) and "" in value):
            raise click.BadParameter("the value is empty; give one, or leave the option out.", ctx, self)
        return super().type_cast_value(ctx, value)


class GroupedCommand(click.Command):
    """One whose help lists its options by their groups, what is most used first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        listed: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                listed[getattr(param, "group", USUAL_OPTIONS)].append(record)
        for group, records in listed.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _bytes(_context: click.Context, _parameter: click.Parameter, gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
