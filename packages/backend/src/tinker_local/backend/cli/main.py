"""The `tinker-local` command. Heavy libraries are imported only when a command needs them."""

import click
from tinker_local.backend.cli.backup import backup, restore
from tinker_local.backend.cli.chat_command import chat
from tinker_local.backend.cli.export_command import export
from tinker_local.backend.cli.serve import serve
from tinker_local.backend.cli.status_command import status
from tinker_local.backend.cli.tiny_model import tiny_model


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tinker-local")
def main() -> None:
    """The Tinker API on your own machine."""


main.add_command(serve)
main.add_command(status)
main.add_command(chat)
main.add_command(backup)
main.add_command(restore)
main.add_command(export)
main.add_command(tiny_model)


if __name__ == "__main__":
    main()
