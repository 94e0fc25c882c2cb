"""`tinker-local chat`: talk to a base model or a checkpoint of a running server in a terminal."""

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tinker_local.backend.cli.backend_options import Number, WholeNumber
from tinker_local.backend.cli.server_client import open_client, refusal, server_options, unreachable

if TYPE_CHECKING:
    import httpx

HELP = "/image FILE adds a picture to your next message, /reset forgets the conversation, /quit ends."

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a model could command the terminal."""


class Chat:
    """A conversation with `model` of the server behind `http`."""

    def __init__(self, http: "httpx.Client", model: str, system: str | None, settings: dict[str, Any]) -> None:
        self._http = http
        self._model = model
        self._system = system
        self._settings = settings
        self.pictures: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self._messages: list[dict[str, Any]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def add_picture(self, file: Path) -> None:
        """Send a picture with the next message; click.ClickException if the file cannot be."""
        from tinker_local.types import image_format

        try:
            data = file.read_bytes()
        except OSError as error:
            raise click.ClickException(f"{file}: {error.strerror}") from None
        if (found := image_format(data)) is None:
            raise click.ClickException(f"{file}: neither a PNG nor a JPEG file")
        self.pictures.append(f"data:image/{found};base64,{base64.b64encode(data).decode()}")

    def say(self, text: str) -> Iterator[str]:
        """The reply as it comes; click.ClickException if there is none. What is not answered is forgotten, with its
        pictures."""
        pictures, self.pictures = self.pictures, []
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self._messages, {"role": "user", "content": content}]
        reply = ""
        for piece in self._pieces({"model": self._model, "messages": messages, "stream": True, **self._settings}):
            reply += piece
            yield piece
        self._messages = [*messages, {"role": "assistant", "content": reply}]

    def _pieces(self, body: dict[str, Any]) -> Iterator[str]:
        import httpx

        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise click.ClickException(refusal(answer))
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise click.ClickException(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise click.ClickException(unreachable(self._http, error)) from None


@click.command()
@click.argument("checkpoint")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A picture for the first message. Repeat for more.",
)
@server_options
@click.option("--system", help="A system message.")
@click.option("--max-tokens", type=WholeNumber(min=1), help="The longest reply. Default: up to the context.")
@click.option("--temperature", type=Number(min=0), help="Default: 1.")
@click.option("--seed", type=int, help="Default: random.")
def chat(
    checkpoint: str, images: tuple[Path, ...], url: str, api_key: str, system: str | None, **settings: Any
) -> None:
    """Chat with CHECKPOINT: a `tinker://RUN/sampler_weights/NAME` path, or a base model's name.

    In a terminal, it asks for one message after the other; otherwise each line of the input is one. /image FILE adds a
    picture to the next message, /reset forgets the conversation, /quit ends.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    with open_client(url, {"Authorization": f"Bearer {api_key}"}) as http:
        talk = Chat(http, checkpoint, system, given)
        for image in images:
            talk.add_picture(image)
        _check(http)
        if sys.stdin.isatty():
            click.echo(f"{checkpoint} at {url}. {HELP}")
        _converse(talk, sys.stdin.isatty())


def _check(http: "httpx.Client") -> None:
    """ClickException unless a server takes the key."""
    import httpx

    try:
        answer = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise click.ClickException(unreachable(http, error)) from None
    if answer.status_code != 200:
        raise click.ClickException(refusal(answer))


def _lines(terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if not terminal and not line:
            return
        yield line.strip()


def _converse(talk: Chat, terminal: bool) -> None:
    """Until the end of the input. In a terminal an error is shown and the conversation goes on; else it ends."""
    if terminal:
        import readline  # noqa: F401  # `input` has a history then
    for line in _lines(terminal):
        try:
            if line == "/quit":
                return
            if line == "/reset":
                talk.reset()
            elif line == "/image" or line.startswith("/image "):
                if not (name := line.removeprefix("/image").strip()):
                    raise click.ClickException("/image FILE: the file is missing")
                talk.add_picture(Path(name).expanduser())
            elif line.startswith("/"):
                raise click.ClickException(f"{line.split()[0]} is not a command. {HELP}")
            elif line:
                for piece in talk.say(line):
                    click.echo(_CONTROL.sub("\ufffd", piece), nl=False)
                    sys.stdout.flush()
                click.echo()
        except click.ClickException as error:
            if not terminal:
                raise
            error.show()
        except KeyboardInterrupt:  # ends the reply alone
            click.echo()
