"""`tinker-local import`: an adapter of PEFT, or an export, as checkpoints of a running server."""

from pathlib import Path

import click
from tinker_local.backend.cli.server_client import server_options


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--model", required=True, help="The base model, as the server names it.")
@click.option("--name", default="imported", show_default=True, help="Of both checkpoints.")
@click.option(
    "--other-base", is_flag=True, help="Import it although it names another base model than the one that is served."
)
@server_options
def import_(folder: Path, model: str, name: str, other_base: bool, url: str, api_key: str) -> None:
    """Make checkpoints of FOLDER, an adapter that PEFT's save_pretrained or an export wrote, on a running server.

    tinker-local import my-adapter --model Qwen/Qwen3-8B
    """
    import httpx
    from tinker_local.backend.exporting.import_adapter import import_adapter
    from tinker_local.types import ApiError

    try:
        imported = import_adapter(folder, model=model, name=name, other_base=other_base, url=url, api_key=api_key)
    except (ApiError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(
            f"no server answers at {url} ({error}); start one with tinker-local serve"
        ) from error
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"to train on: {imported.path}")
    click.echo(f"to sample:   {imported.sampler_path}")
