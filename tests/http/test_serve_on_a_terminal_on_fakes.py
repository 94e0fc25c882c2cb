"""`tinker-local serve` on a terminal shows a bar below its log until it is ready, and leaves nothing of it behind."""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

STEP = """
import os, sys, time
from tinker_local.backend.models import load_engines
fast = load_engines.load_fake
def slow(source, options):
    os.write(2, b"a line that another process writes, longer than the bar is\\n")
    load_engines.log.warning("a line of the log")
    time.sleep({seconds})
    return fast(source, options)
load_engines.load_fake = slow
from tinker_local.backend.cli.main import main
main(sys.argv[1:])
"""

BAR = "━"


class Terminal:
    """A terminal of 80 columns in which `script` runs with `arguments`; `shown` is all that it got."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.shown = ""
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execve(sys.executable, [sys.executable, "-c", script, "serve", *arguments], environment)

    def until(self, seen: Callable[[str], bool]) -> None:
        """Read until `seen` holds of all that was shown, or until the end."""
        end = time.monotonic() + 120
        while not seen(self.shown):
            assert time.monotonic() < end, self.shown
            if not select.select([self.terminal], [], [], 1)[0]:
                continue
            try:
                part = os.read(self.terminal, 65536)
            except OSError:  # all programs of the terminal have ended
                return
            self.shown += part.decode()

    def interrupt(self) -> None:
        os.write(self.terminal, b"\x03")

    def end(self) -> int:
        self.until(lambda _: False)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def lines_on(text: str) -> list[str]:
    """What stands on a terminal of endless width after `text`, by line."""
    assert "\x1b[?25l" not in text  # hides the cursor, for good if the process is killed
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[2K|\x1b\[[0-9;]*m|[^\r\n\x1b]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif not part.startswith("\x1b"):
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


def serve(tmp_path: Path, seconds: float, *more: str) -> Terminal:
    arguments = ("--fake", "--model", "fake/bigram", "--port", "0", "--data-dir", str(tmp_path / "data"), *more)
    return Terminal(STEP.format(seconds=seconds), *arguments)


def test_a_bar_moves_below_the_log_until_the_server_is_ready_on_fakes(tmp_path: Path) -> None:
    server = serve(tmp_path, 1)
    server.until(lambda shown: "ready:" in shown)
    begun, _, loading = server.shown.partition("loading fake/bigram")
    assert BAR in begun  # while it imports
    assert loading.count("\rstarting ") + loading.count("\x1b[2Kstarting ") >= 3
    before_it_was_ready = len(server.shown)
    server.interrupt()
    assert server.end() == 0
    assert BAR not in server.shown[before_it_was_ready:]
    lines = [line for line in lines_on(server.shown) if line]
    assert lines[0] == "starting"
    assert "a line that another process writes, longer than the bar is" in lines
    assert "WARNING tinker_local.backend.models.load_engines: a line of the log" in lines
    assert not [line for line in lines if BAR in line]
    assert lines[-1].removeprefix("^C") == "stopped"


def test_ctrl_c_while_models_load_leaves_no_bar_on_fakes(tmp_path: Path) -> None:
    server = serve(tmp_path, 600)
    server.until(lambda shown: BAR in shown.partition("a line of the log")[2])
    server.interrupt()
    assert server.end() == 0
    lines = lines_on(server.shown)
    assert lines[-2:] == ["stopped while models were loading", ""]
    assert not [line for line in lines if BAR in line]


def test_a_refusal_takes_the_bar_away_on_fakes(tmp_path: Path) -> None:
    server = serve(tmp_path, 0, "--max-adapters", "1", "--host", "0.0.0.0")
    assert server.end() == 2
    assert BAR in server.shown
    lines = lines_on(server.shown)
    assert lines[-2:] == ["Error: --host 0.0.0.0 can be reached by other machines; pass --api-key-file", ""]
    assert not [line for line in lines if BAR in line]


def test_a_log_for_machines_has_no_bar_on_fakes(tmp_path: Path) -> None:
    server = serve(tmp_path, 1, "--log-json")
    server.until(lambda shown: "ready:" in shown)
    server.interrupt()
    assert server.end() == 0
    assert BAR not in server.shown
