"""`tinker-local completion`: what makes a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

PROGRAM = "tinker-local"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options: eval "$(tinker-local completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.find_root().command, {}, PROGRAM, "_TINKER_LOCAL_COMPLETE").source())
