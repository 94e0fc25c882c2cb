"""A server that a command starts for itself, on a free port, and ends with itself."""

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

STOP_SECONDS = 120.0
"""Within which the server ends after it was asked to; it saves what is in memory."""

COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""Variables with which libraries write colours into a pipe, too: its `ready:` would not be found."""

LAST_LINES = 12
"""Of a server that did not start, which are shown."""

PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
sys.argv[1:2] = ["serve"]
from tinker_local.backend.cli.main import main
main()
"""
"""`tinker-local serve` that Linux ends (PR_SET_PDEATHSIG) if the command that started it is killed."""


@contextmanager
def own_server(
    model: str, data_dir: Path, log: Path, say: Callable[[str], None], options: Sequence[str] = ()
) -> Iterator[str]:
    """The URL of a server of `model` (NAME or NAME=PATH), which ends with the context. Its output goes to `log`.

    It does not get Ctrl-C of the terminal, so that the command can save first. `TINKER_LOCAL_SERVE_...` of the
    environment are its options, and `options` go before them. ClickException with its last lines if it does not start.
    """
    arguments = ["--model", model, "--data-dir", str(data_dir), "--port", "0", *options]
    say(f"starting tinker-local serve --model {model}; its log is {log}")
    log.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in os.environ.items() if name not in COLOURS}
    with log.open("w", buffering=1) as file:
        server = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**plain, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            output = _Output(server, file.write)
            if (url := output.url()) is None:
                server.wait()
                raise click.ClickException("\n".join([f"the server of {model} did not start:", *output.last]))
            yield url
        finally:
            _end(server)


class _Output:
    """Reads what a server prints in a thread, until it ends."""

    def __init__(self, server: "subprocess.Popen[str]", write: Callable[[str], object]) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._server = server
        self._write = write
        self._known = threading.Event()
        self._url: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True, name="server output")
        self._thread.start()

    def url(self) -> str | None:
        """When it is ready; None if it ended before."""
        self._known.wait()
        return self._url

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            self._write(line)
            self.last.append(line.rstrip())
            if self._url is None and (found := re.search(r"ready: (http://\S+)", line)):
                self._url = found[1]
                self._known.set()
        self._known.set()


def _end(server: "subprocess.Popen[str]") -> None:
    """Ask it to end, and end it if it does not."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    except KeyboardInterrupt:  # a second Ctrl-C
        server.kill()
        server.wait()
        raise
