"""`tinker-local train`: fine-tune a model on rows of data, on a running server or one of the command's."""

import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from tinker_local.backend.cli.backend_options import Number, WholeNumber, data_dir_option, not_empty

if TYPE_CHECKING:
    from tinker_local.client.train import MediaRules, Rows, TrainReport

F = TypeVar("F", bound=Callable[..., Any])

ROWS_TO_TELL = 20_000
"""Rows of a data set from which on the command says how far it has read."""

INTERRUPTED = 130
"""The exit status after Ctrl-C, as of a shell."""

SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("rank", WholeNumber(min=1), "Of the LoRA adapter."),
    ("learning_rate", Number(min=0, min_open=True), "The peak learning rate."),
    ("batch_size", WholeNumber(min=1), "Rows, or pairs, of a step."),
    ("epochs", Number(min=0, min_open=True), "Passes over the rows; may be a fraction."),
    ("steps", WholeNumber(min=1), "End after so many steps, if that is earlier."),
    ("seed", WholeNumber(min=0), "Of first weights, order of rows, and held-out rows. Default: 0."),
    ("warmup", Number(min=0, max=1), "Share of the steps in which the learning rate rises. Default: 0.05."),
    ("shape", click.Choice(["cosine", "linear", "constant"]), "How it falls then, to 0. Default: cosine."),
    ("weight_decay", Number(min=0), "Of AdamW. Default: 0."),
    ("clip", Number(min=0), "The norm to which gradients are scaled down; 0: never. Default: 1."),
    ("beta1", Number(min=0, max=1), "Of AdamW. Default: 0.9."),
    ("beta2", Number(min=0, max=1), "Of AdamW. Default: 0.95."),
    ("eps", Number(min=0, min_open=True), "Of AdamW. Default: 1e-8."),
    (
        "dpo_beta",
        Number(min=0, min_open=True),
        "With pairs: how dear it is to differ from the reference. Default: 0.1.",
    ),
    ("held_out", Number(min=0), "Rows to measure on: a share below 1, or a number. Default: 0.05."),
    ("evaluate_every", WholeNumber(min=0), "Steps; 0: only before and after."),
    ("save_every", WholeNumber(min=0), "Steps from one checkpoint to the next; 0: only at the end."),
    ("keep_days", Number(min=0, min_open=True), "Lifetime of checkpoints that are not the last. Default: 7."),
    ("answer_tokens", WholeNumber(min=1), "The longest sampled answer. Default: by the held-out answers."),
    ("answer_rows", WholeNumber(min=1), "Held-out rows that are answered for --eval, at most. Default: 100."),
    ("samples_shown", WholeNumber(min=0), "Answers that each evaluation shows. Default: 2."),
)
"""Name, type and help of each of `TrainSettings`. One without a default here is chosen by model and data."""


def setting_options(command: F) -> F:
    """Decorate `command` with them; it gets None for each that is not given."""
    for name, kind, text in reversed(SETTINGS):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command


@click.command()
@click.argument("data", type=click.Path(path_type=Path), callback=lambda c, p, v: Path(not_empty(c, p, str(v))))
@click.option("--model", required=True, metavar="NAME[=PATH]", help="The base model, as of serve.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder. Default: runs/DATA.")
@click.option("--start-from", metavar="CHECKPOINT", help="Begin with its weights, as DPO does with those of SFT.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of the run in --out.")
@click.option(
    "--url",
    "--base-url",
    "url",
    envvar="TINKER_BASE_URL",
    help="A running server, or the environment's TINKER_BASE_URL. Default: start one for this run.",
)
@click.option("--api-key", envvar="TINKER_API_KEY", default="tml-local", help="Its key, or TINKER_API_KEY.")
@data_dir_option("Of the server that is started.")
@click.option("--eval", "evaluation", metavar="HOW", help="Score answers: exact, choice, or FILE.py:FUNCTION.")
@click.option("--skip-bad", is_flag=True, help="Go on without rows that cannot be used.")
@click.option("--too-long", type=click.Choice(["refuse", "shorten"]), default="refuse", help="Rows of too many tokens.")
@click.option("--max-tokens", type=WholeNumber(min=2), help="Tokens of a row at most. Default: the model's context.")
@click.option(
    "--media-folder", "folders", multiple=True, type=click.Path(path_type=Path), help="Rows may name pictures."
)
@click.option("--media-host", "hosts", multiple=True, metavar="HOST", help="Rows may have URLs of it.")
@click.option("--track", "trackers", multiple=True, type=click.Choice(["wandb", "tensorboard", "trackio"]))
@click.option(
    "--project", default="tinker-local", show_default=True, help="Under which wandb and trackio list the run."
)
@setting_options
def train(
    data: Path,
    model: str,
    out: Path | None,
    start_from: str | None,
    resume: bool,
    url: str | None,
    api_key: str,
    data_dir: Path,
    evaluation: str | None,
    skip_bad: bool,
    too_long: Any,
    max_tokens: int | None,
    folders: tuple[Path, ...],
    hosts: tuple[str, ...],
    trackers: tuple[str, ...],
    project: str,
    **settings: Any,
) -> None:
    """Fine-tune a model on DATA: a .jsonl or .parquet file, a saved data set, or a folder of such files.

    A row has `messages`, or `prompt` and `completion`; or `chosen` and `rejected` answers, for DPO. Ctrl-C saves a
    checkpoint; --resume goes on. docs/train.md has the rows and all options.
    """
    logging.basicConfig(level=logging.ERROR)
    if not data.exists():
        raise click.BadParameter(f"{data} does not exist", param_hint="DATA")
    name, _, path = model.partition("=")
    if path and url:
        raise click.BadParameter(f"the server at {url} has its models already; give {name} alone", param_hint="--model")
    folder = Path("runs") / data.stem if out is None else out
    given = {key: value for key, value in settings.items() if value is not None}
    with _errors_in_words(), ExitStack() as opened:
        from tinker_local.client.train import MediaRules, read_evaluation
        from tinker_local.client.train import train as run

        _check(folder, resume, given)
        how = None if evaluation is None else read_evaluation(evaluation)
        reading = Reading(data, MediaRules(folders, hosts), skip_bad, too_long, max_tokens)
        own, again = url is None, _again(click.get_current_context())
        if url is None:
            url = opened.enter_context(_server(model, data_dir, folder, given))
        _find_tokenizers(url, api_key)
        report = run(
            reading.rows,
            model=name,
            out=folder,
            settings=given,
            base_url=url,
            api_key=api_key,
            start_from=start_from,
            resume=resume,
            evaluation=how,
            trackers=trackers,
            project=project,
            before=_show,
            say=click.echo,
        )
    _tell(report, model, data_dir if own else None, again)
    if report.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of `data` are read."""

    data: Path
    rules: "MediaRules"
    skip_bad: bool
    too_long: Any
    most_tokens: int | None

    def rows(self, renderer: Any, context: int) -> "Rows":
        """Called by `train` when the model's chat format is known; `context`: of the model."""
        from tinker_local.client.train import read_rows

        click.echo(f"reading {self.data}")
        return read_rows(
            self.data,
            renderer=renderer,
            media=self.rules,
            skip_bad=self.skip_bad,
            most_tokens=min(context, self.most_tokens or context),
            too_long=self.too_long,
            progress=_told_of_rows,
        )


def _told_of_rows(done: int, rows: int) -> None:
    """A line for each tenth of a data set that takes a while to read."""
    if rows >= ROWS_TO_TELL and (done * 10) % rows < 10 and done < rows:
        click.echo(f"read {done:,} of {rows:,} rows", err=True)


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """What the user can mend becomes ClickException, with every problem of every bad row."""
    import tinker
    from tinker_local.client.train import BadRows
    from tinker_local.client.train.sources import RowError
    from tinker_local.types import ApiError

    try:
        yield
    except BadRows as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        bad = len({problem.place for problem in error.problems})
        told = f"{bad} of {error.rows} rows cannot be used; mend them, or go on without them with --skip-bad"
        raise click.ClickException(told) from None
    except RowError as error:
        raise click.ClickException(f"the data changed during training: {error}") from None
    except tinker.APIStatusError as error:
        detail = error.body.get("detail") if isinstance(error.body, dict) else None
        raise click.ClickException(detail if isinstance(detail, str) else str(error)) from error
    except (ApiError, tinker.TinkerError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _check(folder: Path, resume: bool, given: dict[str, Any]) -> None:
    """Whatever can be refused before a server is started."""
    from tinker_local.client.train.run_folder import RunFolder
    from tinker_local.client.train.settings import made_of
    from tinker_local.client.train.train_run import begun_in

    made_of({"learning_rate": 1e-4, "batch_size": 1, **given})
    begun_in(RunFolder(folder), resume)


def _server(model: str, data_dir: Path, folder: Path, given: dict[str, Any]) -> AbstractContextManager[str]:
    """One for this run, whose adapters may have the run's rank."""
    from tinker_local.backend.cli.install_engine import require_torch
    from tinker_local.backend.cli.own_server import own_server
    from tinker_local.backend.options import BackendOptions

    require_torch("train")
    more = ["--max-rank", str(given["rank"])] if given.get("rank", 0) > BackendOptions().max_rank else []
    return own_server(model, data_dir, folder / "server.log", click.echo, more)


def _find_tokenizers(url: str, api_key: str) -> None:
    """Have this process load tokenizers from the server's own files; a service that has none is asked by the SDK."""
    import tinker
    from tinker_local.client.served_names import use_served_names

    try:
        use_served_names(base_url=url, api_key=api_key)
    except tinker.NotFoundError:
        return
    except tinker.APIStatusError as error:
        if error.status_code != 404:
            raise


def _show(rows: "Rows", renderer: Any) -> None:
    """The numbers of the data, the rows that are left out, and one row with its mask in colour."""
    from tinker_local.client.train.show import print_row, summary

    for problem in rows.skipped:
        click.echo(f"left out: {problem}", err=True)
    click.echo(summary(rows))
    print_row(rows, 0, renderer.tokenizer)


def _again(context: click.Context) -> str:
    """The command that resumes: as it was given, without the key."""
    words = ["tinker-local", "train"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if not given or parameter.name in ("api_key", "resume"):
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(each)]
    return shlex.join([*words, "--resume"])


def _tell(report: "TrainReport", model: str, data_dir: Path | None, again: str) -> None:
    """Before and after, where the checkpoint is, and commands that go on from it. `data_dir`: of a server that this
    command started; None: of another, which may be elsewhere. `again`: the command that resumes."""
    names = sorted({name for row in report.curve for name in row if name.startswith("held_out_")})
    for name in names:
        if (pair := report.first_and_last(name)) is not None:
            click.echo(f"{name.replace('_', ' ')}: {pair[0]:.4f} before, {pair[1]:.4f} after")
    if report.interrupted:
        click.echo(f"stopped after step {report.steps}, with a checkpoint; go on with\n{again}")
        return
    click.echo(f"checkpoint {report.saved.state}; to sample from, {report.saved.sampler}; curve in {report.folder}")
    export = ["tinker-local", "export", report.saved.state, f"{report.folder}/adapter", "--to", "peft"]
    more = [] if data_dir is None else ["--data-dir", str(data_dir)]
    click.echo(f"export it: {shlex.join([*export, *more])}")
    click.echo(f"talk to it, with a server of {model}: {shlex.join(['tinker-local', 'chat', report.saved.sampler])}")
