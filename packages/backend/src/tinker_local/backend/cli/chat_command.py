"""`tinker-local chat`: talk to a base model or a checkpoint of a running server in a terminal."""

import base64
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from tinker_local.backend.cli.backend_options import Number, WholeNumber, not_empty
from tinker_local.backend.cli.server_client import open_client, refusal, server_options, unreachable

if TYPE_CHECKING:
    import httpx
    from tinker_local.types import PromptLayout
    from tinker_local.types.prompt_layout import PromptOrder

HELP = (
    "/image FILE adds a picture to your next message, /text TEXT a text, and /send sends it; a line is a text that is "
    "sent at once. /reset forgets the conversation, /quit ends."
)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a model could command the terminal."""


class Chat:
    """A conversation with `model` of the server behind `http`, in messages of the form `layout`."""

    def __init__(
        self, http: "httpx.Client", model: str, system: str | None, layout: "PromptLayout", settings: dict[str, Any]
    ) -> None:
        self._http = http
        self._model = model
        self._system = system
        self._layout = layout
        self._settings = settings
        self._parts: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self._messages: list[dict[str, Any]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def add_picture(self, file: Path) -> None:
        """Send a picture with the next message, shrunk to the layout's side; click.ClickException if the file cannot
        be sent."""
        from tinker_local.types import image_format

        try:
            data = file.read_bytes()
        except OSError as error:
            raise click.ClickException(f"{file}: {error.strerror}") from None
        if self._layout.side is not None or image_format(data) is None:
            data = as_sent(file, data, self._layout.side)
        url = f"data:image/{image_format(data)};base64,{base64.b64encode(data).decode()}"
        self._parts.append({"type": "image_url", "image_url": {"url": url}})

    def add_text(self, text: str) -> None:
        """Send a text with the next message."""
        self._parts.append({"type": "text", "text": text})

    def say(self) -> Iterator[str]:
        """The reply to what was added, as it comes; click.ClickException if there is none. What is not answered is
        forgotten, with its pictures."""
        parts, self._parts = in_order(self._parts, self._layout.order), []
        if not parts:
            raise click.ClickException("there is nothing to send")
        only_text = all(part["type"] == "text" for part in parts)
        content: Any = "\n".join(part["text"] for part in parts) if only_text else parts
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


def in_order(parts: list[dict[str, Any]], order: "PromptOrder | None") -> list[dict[str, Any]]:
    """Parts of a message with all pictures before or after the texts; None: as they are."""
    if order is None:
        return parts
    return sorted(parts, key=lambda part: (part["type"] == "text") == (order == "picture-first"))


def as_sent(file: Path, data: bytes, side: int | None) -> bytes:
    """A picture's file, or a PNG of it where the server does not take its format, or where it is larger than `side`
    pixels a side: then it is shrunk as by examples/image_folders.py, and that is said."""
    from tinker_local.types import as_rgb, image_format, open_picture

    try:
        picture = as_rgb(open_picture(data))
    except Exception as error:  # PIL documents no closed set
        raise click.ClickException(f"{file}: no picture that can be read: {error}") from None
    width, height = picture.size
    if side is not None and max(width, height) > side:
        picture.thumbnail((side, side))
        sent = f"{picture.width} x {picture.height} pixels instead of {width} x {height}"
        click.echo(f"{file}: sent as {sent}; --side 0 sends it as it is", err=True)
    elif image_format(data) is not None:
        return data
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


@click.command()
@click.argument("checkpoint", callback=not_empty)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A picture for the first message. Repeat for more.",
)
@server_options
@click.option(
    "--order",
    type=click.Choice(["picture-first", "text-first", "given"]),
    help="Where the pictures of a message stand. Default: as the checkpoint was trained, if its program said so; else "
    "as given.",
)
@click.option(
    "--side",
    type=WholeNumber(min=0),
    help="Pixels: larger pictures are shrunk to this longest side; 0: never. Default: the side that the checkpoint was "
    "trained with, if its program said so; else 0.",
)
@click.option("--system", help="A system message.")
@click.option("--max-tokens", type=WholeNumber(min=1), help="The longest reply. Default: up to the context.")
@click.option("--temperature", type=Number(min=0), help="Default: 1.")
@click.option("--seed", type=int, help="Default: random.")
def chat(
    checkpoint: str,
    images: tuple[Path, ...],
    url: str,
    api_key: str,
    order: str | None,
    side: int | None,
    system: str | None,
    **settings: Any,
) -> None:
    """Chat with CHECKPOINT: a `tinker://RUN/sampler_weights/NAME` path, or a base model's name.

    In a terminal, it asks for one message after the other; otherwise each line of the input is one. /image FILE adds a
    picture to the next message and /text TEXT a text, in the order given, and /send sends it. /reset forgets the
    conversation, /quit ends.
    """
    from tinker_local.types import PromptLayout

    given = {name: value for name, value in settings.items() if value is not None}
    with open_client(url, {"Authorization": f"Bearer {api_key}"}) as http:
        trained = _layout_of(http, checkpoint)
        layout = PromptLayout(_order(order, trained.order), (trained.side if side is None else side) or None)
        talk = Chat(http, checkpoint, system, layout, given)
        for image in images:
            talk.add_picture(image)
        if sys.stdin.isatty():
            click.echo(f"{checkpoint} at {url}. {HELP}")
            if words := trained.words():
                click.echo(f"It was trained with {words}; --order and --side ask it otherwise.")
        _converse(talk, sys.stdin.isatty())


def _order(chosen: str | None, trained: "PromptOrder | None") -> "PromptOrder | None":
    """Of a message's parts, by the option `--order`; None: as they are given."""
    match chosen:
        case "picture-first" | "text-first":
            return chosen
        case "given":
            return None
        case _:
            return trained


def _layout_of(http: "httpx.Client", checkpoint: str) -> "PromptLayout":
    """How its program said that it was trained. ClickException unless a server takes the key and has the model."""
    import httpx
    from tinker_local.types import PromptLayout

    try:
        answer = http.get(f"/v1/models/{quote(checkpoint, safe='')}")
    except httpx.HTTPError as error:
        raise click.ClickException(unreachable(http, error)) from None
    if answer.status_code != 200:
        raise click.ClickException(refusal(answer))
    return PromptLayout(**answer.json().get("prompt_layout", {}))


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
            elif line == "/text" or line.startswith("/text "):
                if not (text := line.removeprefix("/text").strip()):
                    raise click.ClickException("/text TEXT: the text is missing")
                talk.add_text(text)
            elif line.startswith("/") and line != "/send":
                raise click.ClickException(f"{line.split()[0]} is not a command. {HELP}")
            elif line:
                if line != "/send":
                    talk.add_text(line)
                for piece in talk.say():
                    click.echo(_CONTROL.sub("\ufffd", piece), nl=False)
                    sys.stdout.flush()
                click.echo()
        except click.ClickException as error:
            if not terminal:
                raise
            error.show()
        except KeyboardInterrupt:  # ends the reply alone
            click.echo()
