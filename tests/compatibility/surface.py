"""What the official SDK offers in public: methods of its clients, functions of `tinker.auth`, commands of `tinker`."""

from collections.abc import Iterator
from typing import Any

import click
import tinker
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces import AdminClient, RestClient, SamplingClient, ServiceClient, TrainingClient

CLIENTS = (ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient)


def surface() -> list[str]:
    """`Client.member`, `tinker.auth.function` and `tinker group command`, in the SDK's order."""
    members = [
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name, member in vars(client).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | staticmethod | classmethod))
    ]
    functions = [f"tinker.auth.{name}" for name in sorted(tinker.auth.__all__)]
    return [*members, *functions, *_commands(main_cli, "tinker")]


def _commands(command: Any, path: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _commands(found, f"{path} {name}")
