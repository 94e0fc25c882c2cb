"""`tinker-local chat` against a server, as a program that reads lines and as a person at a terminal."""

import base64
import io
import os
import pty
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tinker_local import client
from tinker_local.backend.cli.main import main
from tinker_local.backend.hosting.server import LoopbackServer

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


GREEDY = ("--temperature", "0")
"""What is drawn at another temperature depends on the whole conversation."""


def test_pictures_stay_in_the_conversation_until_reset_on_fakes(loopback_server: LoopbackServer, picture: Path) -> None:
    """The fake's reply depends on the last picture that it has seen."""
    (plain,) = replies(chat(loopback_server, "hi\n", "--system", "be", *GREEDY))
    (option,) = replies(chat(loopback_server, "hi\n", "--image", str(picture), *GREEDY))
    assert option != plain
    lines = f"/image {picture}\nhi\nhi\n\n/reset\nhi\n/quit\nnever\n"
    assert replies(chat(loopback_server, lines, "--system", "be", *GREEDY)) == [option, option, plain]


def test_a_picture_in_another_format_than_the_servers_is_sent_as_one_on_fakes(
    loopback_server: LoopbackServer, picture: Path, tmp_path: Path
) -> None:
    answer = replies(chat(loopback_server, "hi\n", "--image", str(picture)))
    for suffix in ("bmp", "tiff"):
        other = tmp_path / f"red.{suffix}"
        Image.open(picture).save(other)
        assert replies(chat(loopback_server, "hi\n", "--image", str(other))) == answer


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("/image nothing.png\n", "nothing.png: No such file"),
        ("/image\n", "the file is missing"),
        (f"/image {__file__}\n", "no picture that can be read"),
        ("/text\n", "the text is missing"),
        ("/send\n", "there is nothing to send"),
        ("/what\n", "/what is not a command"),
        ("\u4f60\n", "the fake has no token"),
    ],
)
def test_what_is_wrong_is_one_line_on_fakes(loopback_server: LoopbackServer, lines: str, reason: str) -> None:
    result = chat(loopback_server, lines)
    assert result.exit_code == 1
    assert reason in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("command", [("chat", ""), ("export", "", "out", "--to", "peft")])
def test_a_variable_that_is_not_set_is_said_on_fakes(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "'CHECKPOINT': it is empty, as a variable is that this terminal has not set" in done.output
    assert "$SAMPLER" in done.output


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


def asked(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str, model: str = MODEL
) -> tuple[list[list[Any]], str]:
    """The content of each message of the user, a picture as its size; and what the command prints beside replies."""
    bodies: list[dict[str, Any]] = []
    real = httpx.Client.stream

    def stream(self: httpx.Client, *given: Any, **options: Any) -> Any:
        bodies.append(options["json"])
        return real(self, *given, **options)

    monkeypatch.setattr(httpx.Client, "stream", stream)
    options = ["--url", server.url, "--api-key", server.api_key, "--max-tokens", "2"]
    result = CliRunner().invoke(main, ["chat", model, *options, *arguments], input=lines)
    assert result.exit_code == 0, result.output

    def part(one: dict[str, Any]) -> Any:
        if one["type"] == "text":
            return one["text"]
        return Image.open(io.BytesIO(base64.b64decode(one["image_url"]["url"].partition(",")[2]))).size

    contents = [body["messages"][-1]["content"] for body in bodies]
    return [[content] if isinstance(content, str) else [*map(part, content)] for content in contents], result.stderr


def test_parts_are_sent_in_the_order_given_or_chosen_on_fakes(
    loopback_server: LoopbackServer, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, lines = (32, 32), f"/image {picture}\nhi\n/text a\n/image {picture}\n/text b\n/image {picture}\n/send\nhi\n"
    given, _ = asked(loopback_server, monkeypatch, lines)
    assert given == [[shown, "hi"], ["a", shown, "b", shown], ["hi"]]
    first, _ = asked(loopback_server, monkeypatch, lines, "--order", "picture-first")
    assert first == [[shown, "hi"], [shown, shown, "a", "b"], ["hi"]]
    last, _ = asked(loopback_server, monkeypatch, lines, "--order", "text-first")
    assert last == [["hi", shown], ["a", "b", shown, shown], ["hi"]]
    option, _ = asked(loopback_server, monkeypatch, "hi\n", "--image", str(picture), "--order", "text-first")
    assert option == [["hi", shown]]


def test_a_checkpoint_is_asked_as_it_was_trained_unless_told_otherwise_on_fakes(
    loopback_server: LoopbackServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = client.ServiceClient(base_url=loopback_server.url, api_key=loopback_server.api_key)
    layout = client.PromptLayout("text-first", 32).as_metadata()
    run = service.create_lora_training_client(MODEL, rank=2, user_metadata=layout).result()
    path = run.save_weights_for_sampler("final").result().path
    for name, size in (("large", (96, 48)), ("small", (20, 10))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    lines = f"/image {tmp_path}/large.png\nhi\n/image {tmp_path}/small.png\nhi\n"
    as_trained, said = asked(loopback_server, monkeypatch, lines, model=path)
    assert as_trained == [["hi", (32, 16)], ["hi", (20, 10)]]
    assert "large.png: sent as 32 x 16 pixels instead of 96 x 48" in said
    assert "small.png" not in said
    chosen, said = asked(loopback_server, monkeypatch, lines, "--order", "given", "--side", "0", model=path)
    assert chosen == [[(96, 48), "hi"], [(20, 10), "hi"]]
    assert said == ""
    base, _ = asked(loopback_server, monkeypatch, lines, "--side", "16")
    assert base == [[(16, 8), "hi"], [(16, 8), "hi"]]
