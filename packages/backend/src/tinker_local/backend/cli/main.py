"""The `tinker-local` command. Heavy libraries are imported only when a command needs them."""

import click
from tinker_local.backend.cli.backup import backup, restore
from tinker_local.backend.cli.chat_command import chat
from tinker_local.backend.cli.check_command import check
from tinker_local.backend.cli.completion_command import completion
from tinker_local.backend.cli.export_command import export
from tinker_local.backend.cli.import_command import import_
from tinker_local.backend.cli.install_engine import install_engine
from tinker_local.backend.cli.models_command import models
from tinker_local.backend.cli.report_command import report
from tinker_local.backend.cli.serve import serve
from tinker_local.backend.cli.small_model_command import small_model
from tinker_local.backend.cli.status_command import status
from tinker_local.backend.cli.tiny_model import tiny_model
from tinker_local.backend.cli.train_command import train
from tinker_local.backend.threads import spin_briefly

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "auto_envvar_prefix": "TINKER_LOCAL"}


@click.group(context_settings=SETTINGS)
@click.version_option(package_name="tinker-local")
def main() -> None:
    """The Tinker API on your own machine."""
    spin_briefly()


main.add_command(serve)
main.add_command(check)
main.add_command(status)
main.add_command(chat)
main.add_command(backup)
main.add_command(restore)
main.add_command(train)
main.add_command(export)
main.add_command(import_)
main.add_command(tiny_model)
main.add_command(small_model)
main.add_command(models)
main.add_command(report)
main.add_command(install_engine)
main.add_command(completion)


if __name__ == "__main__":
    main()
