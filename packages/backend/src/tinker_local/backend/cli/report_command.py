"""`tinker-local report`: a page on how right and how fast a model is on this machine, to be sent."""

import logging
from pathlib import Path
from typing import Any

import click
from tinker_local.backend.cli.backend_options import plan_options
from tinker_local.backend.cli.install_engine import require_torch
from tinker_local.backend.cli.working import working
from tinker_local.backend.options import BackendOptions, ModelSource


@click.command()
@click.argument("model", metavar="NAME[=PATH]")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the page here, not to the terminal."
)
@plan_options
def report(model: str, out: Path | None, **chosen: Any) -> None:
    """Serve MODEL, measure it, and write a page of Markdown.

    How trainer and sampler agree, by target and position; gradients beside those of transformers; the plan of the
    memory and what was used; speed; KL(sampler, trainer); versions. It has no paths, names or keys, and no text of
    yours, and is made to be sent. Takes some minutes, and the whole GPU. The exit status is 1 if a part failed.
    """
    require_torch("report")
    from tinker_local.backend.cli.check_command import check_machine, check_model
    from tinker_local.backend.cli.start_up_noise import silence

    silence()
    logging.basicConfig(level=logging.ERROR)
    try:
        source = ModelSource.parse(model)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODEL") from None
    options = BackendOptions(**chosen)
    findings = [*check_machine(options, None, None, fake=False), *check_model(source, options)]
    if problems := [f"{finding.what}: {finding.text}" for finding in findings if finding.level == "problem"]:
        raise click.ClickException("\n".join(problems))
    with working("importing torch") as now:
        from tinker_local.backend.report.make_report import make_report

        now("starting the engines")
        made = make_report(source, options, now)
    if out is None:
        click.echo(str(made), nl=False)
    else:
        out.write_text(str(made))
        click.echo(f"wrote {out}", err=True)
    if made.failed:
        raise click.exceptions.Exit(1)
