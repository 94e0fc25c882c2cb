"""`tinker-local serve`: checks its options, loads the models and serves until Ctrl-C, which saves."""

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tinker_local.backend.cli.backend_options import (
    GroupedCommand,
    Option,
    WholeNumber,
    backend_options,
    each_value,
)
from tinker_local.backend.cli.config_file import config_option
from tinker_local.backend.options import LOGS, BackendOptions, ModelSource

if TYPE_CHECKING:
    from rich.console import Console
    from tinker_local.backend.cli.terminal_log import TerminalLog
    from tinker_local.backend.cli.working import Bar
    from tinker_local.backend.hosting.forwarded import Network
    from tinker_local.backend.hosting.key_file import KeyFile
    from tinker_local.backend.hosting.log_files import LogFile
    from tinker_local.backend.hosting.request_logs import Logs


def read_keys(path: Path) -> "KeyFile":
    """The API keys of a file, and who has them."""
    from tinker_local.backend.hosting.key_file import KeyFile

    try:
        keys = KeyFile(path)
    except (ValueError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--api-key-file") from None
    keys.watch()
    return keys


def _proxy(text: str) -> "Network":
    from tinker_local.backend.hosting.forwarded import parse_proxy

    return parse_proxy(text)


@dataclass(frozen=True, slots=True)
class ServerLogs:
    """The log on standard error, and those of requests."""

    terminal: "TerminalLog"
    access: "LogFile | None"
    audit: "LogFile | None"

    @property
    def of_requests(self) -> "Logs":
        """What gets each request and each change: the files, and the log on standard error."""
        from tinker_local.backend.hosting.notices import tell_change, tell_request
        from tinker_local.backend.hosting.request_logs import Logs

        access, audit = ([] if file is None else [file.write] for file in (self.access, self.audit))
        return Logs([*access, tell_request], [*audit, tell_change])

    def close(self) -> None:
        """Write what waits, and give later records to Python's own handler."""
        logging.getLogger().removeHandler(self.terminal)
        self.terminal.end()
        for file in (self.access, self.audit):
            if file is not None:
                file.close()


def open_logs(
    files: "Mapping[str, str | None]", *, verbose: bool, as_objects: bool, bar: "Bar | None" = None
) -> ServerLogs:
    """The logs of requests, each in the file of its option (two options may name one file), and standard error, above
    `bar`, for warnings, for what the server tells its operator, and if `verbose` for more."""
    from tinker_local.backend.cli.terminal_log import TerminalLog
    from tinker_local.backend.hosting.log_files import LogFile
    from tinker_local.backend.hosting.notices import NOTICES

    opened: dict[str, LogFile] = {}
    for option, path in files.items():
        if path is not None and path not in opened:
            try:
                opened[path] = LogFile(path)
            except OSError as error:
                raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    terminal = TerminalLog(as_objects=as_objects, bar=bar)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[terminal])
    NOTICES.setLevel(logging.DEBUG if verbose else logging.INFO)
    access, audit = (None if path is None else opened[path] for path in files.values())
    return ServerLogs(terminal, access, audit)


@click.command(cls=GroupedCommand)
@click.option(
    "--model",
    "models",
    cls=Option,
    multiple=True,
    required=True,
    callback=each_value(ModelSource.parse),
    metavar="NAME[=PATH]",
    help="A base model: a hub name, or a name and a local folder. Repeat for more models or more names.",
)
@config_option
@click.option("--host", default="127.0.0.1", show_default=True, cls=Option, help="Address to listen on.")
@click.option(
    "--port",
    cls=Option,
    default=8000,
    show_default=True,
    type=WholeNumber(0, 65535),
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--api-key-file",
    cls=Option,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of API keys, `KEY` or `NAME KEY` a line, read again when it changes. Required if other machines can "
    "reach the address.",
)
@click.option(
    "--trusted-proxy",
    "proxies",
    cls=Option,
    group=LOGS,
    multiple=True,
    callback=each_value(_proxy),
    metavar="ADDRESS",
    help="A proxy in front of this server, or a network of several: its `X-Forwarded-For` has the address of the "
    "client, by which wrong keys are slowed down and which the logs have. Repeat for more. Default: none.",
)
@click.option(
    "--access-log",
    cls=Option,
    group=LOGS,
    metavar="FILE",
    help="Append a line of JSON for each request; `-` is standard output. Keys, URLs and contents are left out.",
)
@click.option(
    "--audit-log",
    cls=Option,
    group=LOGS,
    metavar="FILE",
    help="Append a line of JSON for each thing that is created, saved, published, deleted or downloaded; `-` as above.",
)
@backend_options
@click.option(
    "--fake", is_flag=True, help="Serve a stand-in written in numpy instead of the models, to try out the protocol."
)
@click.option(
    "-v", "--verbose", is_flag=True, cls=Option, group=LOGS, help="Log each request, and more of what the server does."
)
@click.option(
    "--log-json",
    is_flag=True,
    cls=Option,
    group=LOGS,
    help="Log to standard error as a JSON object a line, for machines.",
)
def serve(
    models: tuple[ModelSource, ...],
    host: str,
    port: int,
    api_key_file: Path | None,
    proxies: "tuple[Network, ...]",
    access_log: str | None,
    audit_log: str | None,
    fake: bool,
    verbose: bool,
    log_json: bool,
    **options: Any,
) -> None:
    """Serve the Tinker API over HTTP.

    Prints `ready: URL` when training and sampling work, and logs to standard error what happens. Point the official
    SDK at it:

        TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python program.py
    """
    if not log_json:
        click.echo(f"{time.strftime('%H:%M:%S')} starting", err=True)  # the log opens when more is imported
    from tinker_local.backend.heap import keep_freed_memory

    if not fake:
        keep_freed_memory()  # what is imported below starts threads

    from rich.console import Console
    from tinker_local.backend.cli.working import Bar, on_terminal

    with Bar("starting") if on_terminal() and not log_json else nullcontext() as bar:
        from tinker_local.backend.cli.start_up_noise import silence
        from tinker_local.backend.http.access import is_loopback

        console = Console(highlight=False, soft_wrap=True, emoji=False)
        silence()
        if not is_loopback(host) and api_key_file is None:
            raise click.UsageError(f"--host {host} can be reached by other machines; pass --api-key-file")
        keys = None if api_key_file is None else read_keys(api_key_file)
        files = {"--access-log": access_log, "--audit-log": audit_log}
        logs = open_logs(files, verbose=verbose, as_objects=log_json, bar=bar)
        chosen = BackendOptions(**options)
        _tell_unused(click.get_current_context())
        try:
            _check(models, chosen, fake)
        except click.UsageError:
            logs.close()
            raise
        _serve(console, models, chosen, host, port, keys, proxies, fake, logs, bar)


def _tell_unused(context: click.Context) -> None:
    """Warn of an option that was given and changes nothing here."""
    from tinker_local.backend.heap import memory_of_gpus
    from tinker_local.backend.hosting.notices import NOTICES

    of_gpus = "gpu_memory_utilization"
    if context.get_parameter_source(of_gpus) != click.core.ParameterSource.DEFAULT and not memory_of_gpus():
        NOTICES.warning("--gpu-memory-utilization changes nothing: this machine has no NVIDIA GPU")
    for option in ("base_precision", "head_precision"):
        if context.params["fake"] and context.params[option]:
            flag = f"--{option.replace('_', '-')}"
            NOTICES.warning(f"{flag} packs nothing: --fake has no matrices; records name it all the same")


def _check(models: Sequence[ModelSource], options: BackendOptions, fake: bool) -> None:
    """Reject what cannot work before loading anything, and tell what will not work well."""
    from tinker_local.backend.cli.check_command import check_machine, check_model
    from tinker_local.backend.hosting.notices import NOTICES
    from tinker_local.backend.models.served_models import by_path

    try:
        by_path(models)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    findings = [*check_machine(options, None, None, fake=fake)]
    for source in () if fake else models:
        findings += check_model(source, options)
    if problems := [f"{finding.what}: {finding.text}" for finding in findings if finding.level == "problem"]:
        raise click.UsageError("\n".join(problems))
    for finding in findings:
        if finding.level == "warning":
            NOTICES.warning("%s: %s", finding.what, finding.text)


def _serve(
    console: "Console",
    models: Sequence[ModelSource],
    options: BackendOptions,
    host: str,
    port: int,
    keys: "KeyFile | None",
    proxies: "Sequence[Network]",
    fake: bool,
    logs: "ServerLogs",
    bar: "Bar | None",
) -> None:
    from tinker_local.backend.backend import InProcessBackend
    from tinker_local.backend.hosting.listening import bind, url_of
    from tinker_local.backend.hosting.notices import NOTICES, Notices
    from tinker_local.backend.hosting.server import allow_many_connections, event_loop, let_threads_alternate, run
    from tinker_local.backend.models.load_engines import load_fake
    from tinker_local.types import ApiError

    def say(text: str) -> None:
        logs.terminal.flush()
        with suppress(OSError, SystemExit):  # the terminal is closed, or the pipe behind us: no reason to lose training
            console.print(text)

    if (too_few := allow_many_connections()) is not None:
        NOTICES.warning(too_few)
    let_threads_alternate()
    try:
        listening = bind(host, port)
    except OSError as error:
        what = f"--host {host}" if isinstance(error, socket.gaierror) else f"--port {port} on {host}"
        way_out = "" if isinstance(error, socket.gaierror) else "; --port 0 takes a free one"
        raise click.UsageError(f"{what}: {error.strerror}{way_out}") from None
    backend = InProcessBackend(models, options, load=load_fake if fake else None, progress=NOTICES.info)
    notices = Notices(backend)

    def ready() -> None:
        if bar is not None:
            bar.end()
        say(f"data folder: {options.data_dir}")
        say(f"[bold green]ready:[/bold green] {url_of(listening)}")

    serving = run(
        backend,
        listening,
        api_keys=keys,
        on_ready=ready,
        logs=logs.of_requests,
        proxies=proxies,
        beside=notices.tell_numbers,
    )
    try:
        with event_loop() as runner:
            loaded = runner.run(serving)
    except (ApiError, ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        if bar is not None:
            bar.end()
        logs.close()
    say("stopped" if loaded else "stopped while models were loading")
    if loaded:  # else a thread still loads models, and uses what these take away
        atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(0)  # everything is closed; with torch and vLLM loaded, the interpreter's own exit takes seconds
