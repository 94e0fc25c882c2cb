"""`--config FILE`: options of a command from a TOML file, by their names without the dashes in front."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click
from tinker_local.backend.cli.backend_options import Option


def read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Make the options in the file at `path` the defaults of the command; those of the command line and the environment
    go first. BadParameter names what is not an option, or has a wrong type."""
    if path is None:
        return
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", context, parameter) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        told = f"{path} is not TOML, as in `port = 8000`: {error}"
        raise click.BadParameter(told, context, parameter) from None
    options = {_name(option): option for option in context.command.params if option is not parameter}
    defaults: dict[str, Any] = {}
    for name, value in given.items():
        option = options.get(name)
        if option is None or option.name is None:
            close = difflib.get_close_matches(name, options, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise click.BadParameter(f"{path}: {name!r} is not an option{hint}", context, parameter)
        defaults[option.name] = _value(f"{path}: {name}", option, value)
    context.default_map = {**(context.default_map or {}), **defaults}


def _name(option: click.Parameter) -> str:
    """Its longest name, without dashes in front."""
    return max(option.opts, key=len).lstrip("-")


def _value(where: str, option: click.Parameter, value: Any) -> Any:
    """`value` as the command line has it; UsageError if it cannot be one."""
    if option.multiple:
        return [_text(where, one) for one in (value if isinstance(value, list) else [value])]
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise click.BadParameter(f"{where}: must be true or false, not {value!r}")
        return value
    if isinstance(value, list):  # GPUs
        return ",".join(_text(where, one) for one in value)
    return _text(where, value)


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter(f"{where}: must be a text or a number, not {value!r}")
    return str(value)


config_option = click.option(
    "--config",
    cls=Option,
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help='A TOML file with options, as `port = 8000` or `model = ["NAME=PATH"]`. The command line and the environment '
    "(`TINKER_LOCAL_SERVE_PORT`) go before it.",
)
