"""`tinker-local chat` against a server, as a program that reads lines and as a person at a terminal."""

import os
import pty
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tinker_local.backend.cli.main import main
from tinker_local.backend.http.server import LoopbackServer

MODEL = "fake/bigram"


def chat(loopback_server: LoopbackServer, lines: str, *arguments: str, key: str | None = None) -> Result:
    options = [
        "--url",
        loopback_server.url,
        "--api-key",
        key or loopback_server.api_key,
        "--seed",
        "4",
        "--max-tokens",
        "6",
    ]
    return CliRunner().invoke(main, ["chat", MODEL, *options, *arguments], input=lines)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    return tmp_path / "red.png"


def replies(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.output.split("\n")[:-1]


def test_pictures_stay_in_the_conversation_until_reset_on_fakes(loopback_server: LoopbackServer, picture: Path) -> None:
    """The fake's reply depends on the last picture that it has seen."""
    (plain,) = replies(chat(loopback_server, "hi\n", "--system", "be"))
    (option,) = replies(chat(loopback_server, "hi\n", "--image", str(picture)))
    assert option != plain
    asked = f"/image {picture}\nhi\nhi\n\n/reset\nhi\n/quit\nnever\n"
    assert replies(chat(loopback_server, asked, "--system", "be")) == [option, option, plain]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("/image nothing.png\n", "nothing.png: No such file"),
        ("/image\n", "the file is missing"),
        (f"/image {__file__}\n", "neither a PNG nor a JPEG"),
        ("/what\n", "/what is not a command"),
        ("\u4f60\n", "the fake has no token"),
    ],
)
def test_what_is_wrong_is_one_line_on_fakes(loopback_server: LoopbackServer, lines: str, reason: str) -> None:
    result = chat(loopback_server, lines)
    assert result.exit_code == 1
    assert reason in result.output
    assert result.output.count("\n") == 1


def test_a_missing_server_or_a_wrong_key_is_one_line_on_fakes(loopback_server: LoopbackServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        missing = CliRunner().invoke(main, ["chat", MODEL, "--url", url], input="hi\n")
    assert missing.exit_code == 1
    assert f"no server answers at {url}" in missing.output
    assert missing.output.count("\n") == 1
    wrong = chat(loopback_server, "hi\n", key="tml-wrong-key-0000")
    assert "Bearer key is missing or unknown" in wrong.output
    unknown = CliRunner().invoke(
        main, ["chat", "no/model", "--url", loopback_server.url, "--api-key", loopback_server.api_key], input="a"
    )
    assert f"served are: {MODEL}" in unknown.output
    assert [wrong.exit_code, unknown.exit_code] == [1, 1]


def test_at_a_terminal_an_error_does_not_end_the_conversation_on_fakes(loopback_server: LoopbackServer) -> None:
    shown = bytearray()
    arguments = ["chat", MODEL, "--url", loopback_server.url, "--api-key", loopback_server.api_key, "--seed", "4"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "tinker_local.backend.cli.main", *arguments])

    def read() -> None:
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:
                return
            if not part:
                return
            shown.extend(part)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for prompts, line in enumerate(("/what", "hi", "/quit"), 1):
        for _ in range(6000):
            if shown.count(b"> ") >= prompts:
                break
            time.sleep(0.01)
        os.write(terminal, f"{line}\n".encode())
    _, status = os.waitpid(pid, 0)
    reading.join(10)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, bytes(shown)
    assert b"/what is not a command" in shown
    assert shown.count(b"> ") >= 3
