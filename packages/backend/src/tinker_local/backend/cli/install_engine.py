"""`tinker-local install-engine`: vLLM, torch and all they need, in the versions that were tried together."""

import importlib.util
import shutil
import subprocess
import sys
from importlib.resources import as_file, files

import click

ENGINES = ("cpu", "gpu")


def engine_command(engine: str) -> str:
    """The line that installs an engine into this environment."""
    return f"tinker-local install-engine {engine}"


def require_torch(command: str) -> None:
    """UsageError, with what installs it, if torch or transformers is missing, which `command` needs."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        from tinker_local.backend.heap import memory_of_gpus

        run = engine_command("gpu" if memory_of_gpus() else "cpu")
        raise click.UsageError(f"{command} needs {missing[0]}, which is not installed; run `{run}`")


@click.command("install-engine")
@click.argument("engine", type=click.Choice(ENGINES))
@click.option("--dry-run", is_flag=True, help="Print the command that would run, and install nothing.")
def install_engine(engine: str, dry_run: bool) -> None:
    """Install vLLM and torch into this environment (about 6 GB).

    `tinker-local` alone has the server, the client and `serve --fake`. This adds what serves real models: `gpu` for an
    NVIDIA GPU, `cpu` for a machine without one. It uses uv if that is installed, else pip. All versions are those that
    the tests ran with; other versions of the same packages in this environment are replaced.
    """
    name = f"requirements-{engine}.txt"
    with as_file(files("tinker_local.backend") / "cli" / name) as requirements:
        command = [*_installer(), "--no-deps", "-r", str(requirements)]
        click.echo(" ".join(command))
        if dry_run:
            return
        if status := subprocess.run(command, check=False).returncode:
            raise click.ClickException(f"the command above ended with status {status}")
    click.echo("installed; `tinker-local check` says what else this machine lacks")


def _installer() -> list[str]:
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    raise click.ClickException(
        f"neither uv nor pip is there to install with; put uv on PATH, or run: {sys.executable} -m ensurepip"
    )
