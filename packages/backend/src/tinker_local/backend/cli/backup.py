"""`tinker-local backup` and `tinker-local restore`: a data folder's database and checkpoints, copied and put back."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from tinker_local.backend.cli.backend_options import data_dir_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_local.backend.hosting.backups import Copied


@click.command()
@data_dir_option("The server's folder for checkpoints and metadata.")
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the backup: a new one, or an earlier backup, which is brought up to date.",
)
def backup(data_dir: Path, to: Path) -> None:
    """Copy the database and all checkpoints, while a server runs or not."""
    from tinker_local.backend.hosting.backups import back_up

    _copy(back_up, data_dir, to)


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    help="The backup.",
)
@data_dir_option("The server's folder for checkpoints and metadata.")
def restore(source: Path, data_dir: Path) -> None:
    """Copy a backup into a data folder that has neither a database nor checkpoints."""
    from tinker_local.backend.hosting.backups import restore as put_back

    _copy(put_back, source, data_dir)


def _copy(copy: "Callable[[Path, Path], Copied]", source: Path, target: Path) -> None:
    """Copy, and print the counts. ClickException if `copy` refuses, or at the end if a checkpoint is damaged."""
    try:
        copied = copy(source, target)
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    size = f"{copied.size_bytes / 2**20:.1f} MiB"
    click.echo(f"copied the database and {copied.checkpoints} checkpoints ({size}): {source} to {target}")
    for folder in copied.missing:
        click.echo(f"recorded without a folder: {folder}", err=True)
    if copied.damaged:
        raise click.ClickException(f"{len(copied.damaged)} checkpoints are damaged:\n" + "\n".join(copied.damaged))
