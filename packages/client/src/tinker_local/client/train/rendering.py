"""Rows to data, with the loss on the answers and on nothing else.

For each answer the template renders the messages before it with the beginning of a reply, which is what a server
gives to the model, and the messages with the answer. The first text must be the beginning of the second; what follows,
up to the token that ends the turn, is what the model is to write. A later answer continues the datum of an earlier one
if the tokens of its prompt begin with the tokens of that datum, and otherwise has a datum to itself. So every answer is
trained behind exactly the tokens that a server would read before it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
import tinker
from tinker_local.client.rl.chat import END_THINK, MARK, THINK, Chat, files_of
from tinker_local.client.rl.conversation import behind_prefill, marked, squeezed
from tinker_local.client.rl.environment import Message
from tinker_local.client.rl.trajectory import Turn, turns_to_data
from tinker_local.client.train.examples import Example
from tinker_local.client.train.forms import Answered, Dialogue, Picture, RowMessage, Written
from tinker_local.client.train.media import Media, ReadPicture
from tinker_local.client.train.picture_places import PicturePlaces, places_of
from tinker_local.types import InvalidRequestError

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A template without a format: only the rules of `Chat` for tokens are used of it."""

_FURTHER_ENDS = ("<|call|>", "<|eom_id|>")
"""What ends an answer that calls a tool in the formats of gpt-oss and Llama 3.1, beside their end of turn."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates call thoughts."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation"})


class CannotRender(Exception):
    """A row cannot become data without a guess; `field` and `reason` say why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to train. `prompt`: what a server gives to the model. `tokens`: what the model is to write, with the
    end of turn; `trained`: which of them. `field`: of the row. `text`: what `decode` makes of the first `said` tokens,
    which are those without the end."""

    prompt: tinker.ModelInput
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    field: str
    decode: Callable[[Sequence[int]], str]
    said: int

    @property
    def text(self) -> str:
        """The tokens as text, without special ones."""
        return self.decode(self.tokens[: self.said])

    @property
    def length(self) -> int:
        """Positions of prompt and answer."""
        return int(self.prompt.length) + len(self.tokens)

    def turns(self) -> Iterator[Turn]:
        """Its runs of trained tokens, each behind all that comes before."""
        if all(self.trained):
            yield Turn(self.prompt, self.tokens, np.zeros(len(self.tokens), np.float32), "", "stop", "")
            return
        begin = 0
        for is_trained, run in groupby(self.trained):
            end = begin + len(list(run))
            if is_trained:
                said = [tinker.EncodedTextChunk(tokens=list(self.tokens[:begin]))] if begin else []
                prompt = tinker.ModelInput(chunks=[*self.prompt.chunks, *said])
                tokens = self.tokens[begin:end]
                yield Turn(prompt, tokens, np.zeros(len(tokens), np.float32), "", "stop", "")
            begin = end


def examples_of(answers: Sequence[Answer], place: str) -> list[Example]:
    """Answers of one row, in order, as data for "cross_entropy"."""
    turns = [turn for answer in answers for turn in answer.turns()]
    found = []
    for datum in turns_to_data(turns, 1.0, "cross_entropy"):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        found.append(Example(place, datum, int(np.count_nonzero(weights)), int(datum.model_input.length) + 1))
    return found


class Renderer:
    """The format of one model.

    Args:
        tokenizer: HF's. Rows of messages need a chat template; rows of texts do not.
        image_processor: The model's HF processor of images; None for a language model.
        template: The processor's chat template, or another one to use instead of the tokenizer's.
        options: Variables of the template for all rows, e.g. {"enable_thinking": False}.
        image_positions: Of every picture, where the model's processor has one number for all (Gemma 3).
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any = None,
        *,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        image_positions: int | None = None,
    ) -> None:
        self._places = places_of(tokenizer, image_positions, image_processor)
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._template = template
        self._options = dict(options or {})
        self._plain = Chat(tokenizer, template=_PLAIN)
        self._chat = lru_cache(16)(self._make_chat)

    @classmethod
    def of(cls, client: tinker.TrainingClient, **settings: Any) -> "Renderer":
        """The format of the model that `client` trains, from the files that the server names; `settings` as for the
        constructor."""
        tokenizer, processor, template, positions = files_of(client)
        return cls(tokenizer, processor, **{"template": template, "image_positions": positions, **settings})

    def answers(self, form: Answered, media: Media) -> list[Answer]:
        """The answers to train of a row, in order. Reads its pictures. Raises CannotRender."""
        return self.begin(form, media).answers()

    def begin(self, form: Answered, media: Media) -> "Begun":
        """A row as text, with its pictures read; `encode_ahead` takes many of them. Raises CannotRender."""
        if isinstance(form, Written):
            return _BegunText(self._written, form)
        with _as_refused():
            chat, in_text = self._chosen(form)
            return self._talk(form, media, chat, in_text)

    def encode_ahead(self, rows: Iterable["Begun"]) -> None:
        """Make the tokens of many rows at once, on all cores, where their `answers` find them."""
        by_chat: dict[Chat, list[tuple[str, bool]]] = {}
        for row in rows:
            if isinstance(row, _Talk):
                by_chat.setdefault(row.chat, []).extend(row.texts())
        for chat, texts in by_chat.items():
            chat.encode_ahead(texts)

    # Texts -----------------------------------------------------------------------------------------------------------

    def _written(self, row: Written) -> Answer:
        """The prompt as a server reads that of a completion; special tokens written in either text count as such."""
        prompt = list(self.tokenizer.encode(row.prompt))
        tokens = self._plain.encode(row.completion, continued=True)
        if not self._plain.ends_turn(tokens[-1]):
            if self.tokenizer.eos_token_id is None:
                reason = "the tokenizer has no end-of-sequence token, so the answer must end in a special token"
                raise CannotRender(row.fields[1], reason)
            tokens = [*tokens, int(self.tokenizer.eos_token_id)]
        given, trained = tinker.ModelInput.from_ints(prompt), (True,) * len(tokens)
        return Answer(given, tuple(tokens), trained, row.fields[1], self._plain.decode, len(tokens))

    # Conversations ---------------------------------------------------------------------------------------------------

    def _make_chat(self, template: str | None, variables: tuple[tuple[str, str, Any], ...]) -> Chat:
        """`variables`: name, type (True is not 1 in a template) and value."""
        options = self._options | {name: value for name, _, value in variables}
        place = self._places.pad
        return Chat(self.tokenizer, self.image_processor, template=template, options=options, image_token=place)

    def _chosen(self, row: Dialogue) -> tuple[Chat, bool]:
        """The chat of a row, and whether its template takes pictures as text. As on a server, it is the processor's
        template, unless only the tokenizer's has the tools that the row needs."""
        if self._template is None and not getattr(self.tokenizer, "chat_template", None):
            raise CannotRender("messages", "this model has no chat template; write prompt and completion as texts")
        variables = tuple((name, type(value).__name__, value) for name, value in (row.variables or {}).items())
        needed = {"tools": bool(row.tools), "tool_calls": any(message.calls for message in row.messages)}
        needed["tool"] = any(message.role == "tool" for message in row.messages)
        words = {word for word, is_needed in needed.items() if is_needed}
        chat, in_text = self._chat(self._template, variables), False
        if words - chat.words(row.tools) and self._template is not None and self.tokenizer.chat_template:
            other = self._chat(None, variables)
            if not words - other.words(row.tools):
                chat, in_text = other, True
        known = chat.words(row.tools)
        if missing := sorted(words - known):
            field = "tools" if "tools" in missing else "messages"
            raise CannotRender(field, f"the chat template of this model has no {', '.join(missing)}")
        if unknown := [name for name, _, _ in variables if name not in known or name in _RESERVED]:
            raise CannotRender("chat_template_kwargs", f"the chat template has no variable {', '.join(unknown)} to set")
        return chat, in_text

    def _talk(self, row: Dialogue, media: Media, chat: Chat, in_text: bool) -> "_Talk":
        thoughts = next((name for name in _THOUGHTS if chat.reads(name, row.tools)), None)
        contents: list[dict[str, Any]] = []
        images: list[list[tinker.types.ImageChunk]] = []
        digests: list[bytes] = []
        for message in row.messages:
            content, found = chat.content(self._message(message, media, thoughts, digests), message.field)
            contents.append(self._in_text(content) if in_text else content)
            images.append(found)
        tools = [chat.protect_all(tool) for tool in row.tools] or None
        return _Talk(chat, self._places, row, contents, images, digests, {"tools": tools})

    def _message(self, message: RowMessage, media: Media, thoughts: str | None, digests: list[bytes]) -> Message:
        """As `Chat` takes it, with its pictures read. `thoughts`: what the template calls them. `digests`: gets those
        of the pictures' files."""
        parts: list[str | tinker.types.ImageChunk] = []
        for part in message.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            read = self._picture(part, media)
            parts.append(read.chunk)
            digests.append(read.digest)
        further: dict[str, Any] = {}
        if message.calls:
            further["tool_calls"] = list(message.calls)
        if message.answers is not None:
            names = zip(("tool_call_id", "name"), message.answers, strict=True)
            further |= {name: value for name, value in names if value is not None}
        if message.thoughts is not None:
            if thoughts is None:
                raise CannotRender(f"{message.field}.{_THOUGHTS[0]}", _NO_THOUGHTS)
            further[thoughts] = message.thoughts
        return Message(message.role, tuple(parts), further)

    def _picture(self, picture: Picture, media: Media) -> ReadPicture:
        try:
            return media.picture(picture.value, self.image_processor, picture.field, self._places.positions)
        except InvalidRequestError as error:
            raise CannotRender(picture.field, str(error).removeprefix(f"{picture.field}: ")) from error

    def _in_text(self, content: dict[str, Any]) -> dict[str, Any]:
        """For a template of the language model alone: pictures as what stands for them, in one text."""
        if isinstance(content["content"], str):
            return content
        picture = self._places.written or self._places.in_text
        texts = [part["text"] if part["type"] == "text" else picture for part in content["content"]]
        return {**content, "content": "".join(texts)}


_NO_THOUGHTS = "the chat template of this model shows no thoughts; write them into content as the model does"


class Begun(Protocol):
    """A row as text. `pictures`: bytes of those that are held. `digests`: of their files, in order."""

    @property
    def pictures(self) -> int: ...

    @property
    def digests(self) -> Sequence[bytes]: ...

    def answers(self) -> list[Answer]:
        """Raises CannotRender."""
        ...


@dataclass(frozen=True, slots=True)
class _BegunText:
    """A row without a chat format."""

    write: Callable[[Written], Answer]
    row: Written
    pictures: int = 0
    digests: Sequence[bytes] = ()

    def answers(self) -> list[Answer]:
        return [self.write(self.row)]


@contextmanager
def _as_refused() -> Iterator[None]:
    """What the chat or its template refuses, as CannotRender of the whole row."""
    try:
        yield
    except InvalidRequestError as error:
        raise CannotRender("", str(error)) from error


class _Talk:
    """One conversation: `contents` are the messages as the template takes them, `images` the pictures of each, and
    `digests` those of their files.

    Raises CannotRender if the template leaves out the text of a message other than an answer, and what it raises.
    """

    def __init__(
        self,
        chat: Chat,
        places: PicturePlaces,
        row: Dialogue,
        contents: Sequence[dict[str, Any]],
        images: Sequence[Sequence[tinker.types.ImageChunk]],
        digests: Sequence[bytes],
        options: Mapping[str, Any],
    ) -> None:
        self.chat = chat
        self._places = places
        self._row = row
        self._contents = contents
        self._images = images
        self.digests = digests
        self._options = options
        names = [chat.end_of_turn, chat.tokenizer.eos_token_id]
        names += [chat.tokenizer.convert_tokens_to_ids(name) for name in _FURTHER_ENDS]
        self._ends = {int(token) for token in names if token is not None} - {chat.tokenizer.unk_token_id}
        self._check_heard()
        trained = (at for at, message in enumerate(row.messages) if message.role == "assistant" and message.weight)
        # Of each answer, the template's text before it, and with it.
        self._texts = {
            at: (self._render(contents[:at], generate=True), self._render(contents[: at + 1], generate=False))
            for at in trained
            if at >= row.given
        }

    @property
    def pictures(self) -> int:
        return sum(len(image.data) for each in self._images for image in each)

    def texts(self) -> Iterator[tuple[str, bool]]:
        """What `answers` is going to encode, and whether it follows other tokens."""
        for prompt, whole in self._texts.values():
            yield self._places.complete(prompt), False
            if whole.startswith(prompt):
                yield whole[len(prompt) :], True

    def answers(self) -> list[Answer]:
        """Raises CannotRender."""
        with _as_refused():
            return [self._answer(at, prompt, whole) for at, (prompt, whole) in self._texts.items()]

    def _render(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str:
        return self.chat.render(messages, generate=generate, options=self._options)

    def _check_heard(self) -> None:
        asked = [at for at, message in enumerate(self._row.messages) if message.role != "assistant"]
        if self._shown(asked) < sum(marked(self._contents[at]) != self._contents[at] for at in asked):
            for at in asked:
                if marked(self._contents[at]) != self._contents[at] and not self._shown([at]):
                    message = self._row.messages[at]
                    raise CannotRender(message.field, f"the chat template leaves out this message ({message.role})")
            raise CannotRender("", "the chat template leaves out the text of a message")

    def _shown(self, places: Sequence[int]) -> int:
        messages = [marked(each) if at in places else each for at, each in enumerate(self._contents)]
        return self._render(messages, generate=False).count(MARK)

    def _answer(self, at: int, prompt: str, whole: str) -> Answer:
        """The answer that is message `at`, behind those before it."""
        chat, field = self.chat, self._row.messages[at].field
        images = [image for each in self._images[:at] for image in each]
        given = tinker.ModelInput(chunks=chat.chunks(self._places.complete(prompt), images))
        if self._is_plain(at, prompt, whole):
            tokens, trained = self._as_rendered(at, whole, len(prompt))
        else:
            tokens, trained = self._with_thoughts(at, prompt, whole)
        end = len(tokens) - (tokens[-1] in self._ends)
        return Answer(given, tuple(tokens), tuple(trained), field, chat.decode, end)

    def _is_plain(self, at: int, prompt: str, whole: str) -> bool:
        """Whether the template continues its prompt with all of the answer, and not with a thought behind another one:
        most rows, of which nothing more needs to be rendered."""
        if not whole.startswith(prompt):
            return False
        continued = whole[len(prompt) :]
        if THINK in prompt and continued.lstrip().startswith(THINK):
            return False
        return not self._hidden(at, squeezed(continued))

    def _with_thoughts(self, at: int, prompt: str, whole: str) -> tuple[list[int], list[bool]]:
        """The tokens of an answer that is or may be written otherwise than the template shows it."""
        before = self._render(self._contents[:at], generate=False)
        begun = prompt.removeprefix(before) if prompt.startswith(before) else prompt
        begun = begun[begun.find(THINK) :] if THINK in begun else ""
        shown = squeezed(whole[len(before) :] if whole.startswith(before) else whole)
        begins = whole.startswith(prompt)
        hidden = self._hidden(at, shown)
        if begins and not hidden and not (END_THINK in begun and whole[len(prompt) :].lstrip().startswith(THINK)):
            return self._as_rendered(at, whole, len(prompt))
        why = f"leaves out {hidden}" if hidden else "begins the answer otherwise than its prompt does"
        tokens = self._as_written(at, shown, begun or self.chat.prefill, why)
        return tokens, [True] * len(tokens)

    def _hidden(self, at: int, shown: str) -> str:
        """What the template does not show of an answer; "" if it shows all."""
        content = self._contents[at]
        if squeezed(content["content"]) not in shown:
            return "a part of its text"
        if any(squeezed(content.get(name) or "") not in shown for name in _THOUGHTS):
            return "its thoughts"
        if any(squeezed(call["function"]["name"]) not in shown for call in content.get("tool_calls", ())):
            return "a call"
        return ""

    def _as_written(self, at: int, shown: str, begun: str, why: str) -> list[int]:
        """The tokens of an answer that is all text, as a model writes it behind the template's prompt: templates drop
        thoughts from what a model reads again, and not from what it writes. All but the thoughts must be `shown`.
        `begun`: the thought that the prompt opens, or has closed."""
        message, chat = self._row.messages[at], self.chat
        hint = "; chat_template_kwargs may set enable_thinking" if begun and "enable_thinking" in chat.words() else ""
        if message.calls or message.thoughts:
            name = "tool_calls" if message.calls else _THOUGHTS[0]
            reason = f"the chat template {why}; write all of it into content, as the model writes it{hint}"
            raise CannotRender(f"{message.field}.{name}", reason)
        if not chat.stop:
            raise CannotRender(message.field, _NO_END)
        text = "".join(map(str, message.parts))
        if squeezed(chat.protect_reply(text.rpartition(END_THINK)[2])) not in shown:
            raise CannotRender(f"{message.field}.content", f"the chat template {why}, and changes what it shows")
        try:
            text = behind_prefill(text, begun)
        except InvalidRequestError as error:
            raise CannotRender(f"{message.field}.content", f"{error}{hint}".removeprefix("reply: ")) from error
        return [*chat.encode(chat.protect_reply(text), continued=True), *chat.stop]

    def _as_rendered(self, at: int, whole: str, begin: int) -> tuple[list[int], list[bool]]:
        """The tokens of `whole` behind `begin`, up to the end of the turn, and which of them are trained."""
        chat, field = self.chat, self._row.messages[at].field
        pieces = [(whole[begin:], True)]
        if (found := chat.render_marked(self._contents[: at + 1], options=self._options)) is not None:
            pieces = _cut(whole, begin, found[1])
        tokens: list[int] = []
        trained: list[bool] = []
        for text, is_marked in pieces:
            some = chat.encode(text, continued=True)
            tokens += some
            trained += [is_marked] * len(some)
        if len(pieces) > 1 and tokens != chat.encode(whole[begin:], continued=True):
            raise CannotRender(field, "a token crosses the border of what the chat template marks as the answer")
        if not any(trained):
            raise CannotRender(field, "the chat template marks nothing of this answer as the assistant's")
        ends = [place for place, token in enumerate(tokens) if token in self._ends]
        if not ends:
            return self._ended(field, tokens, trained)
        last = ends[0]
        while tokens[last + 1 : last + 2] and tokens[last + 1] in self._ends:  # an end of the answer and of the turn
            last += 1
        behind = [token for token in tokens[last + 1 :] if token not in self._ends]  # Phi-3 has EOS behind a blank
        if text := chat.decode(behind, special=True).strip():
            raise CannotRender(field, f"the chat template writes {text[:40]!r} behind the end of the answer")
        # The end is trained also where the template's marks leave it out: the model would never learn to stop.
        return tokens[: last + 1], [*trained[:last], True]

    def _ended(self, field: str, tokens: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        """An answer for which the template writes no end: EOS ends it, as when it is sampled."""
        chat = self.chat
        if chat.end_of_turn is not None:
            end = chat.decode([chat.end_of_turn], special=True)
            raise CannotRender(field, f"the chat template ends other answers with {end}, and not this one")
        if not chat.stop:
            raise CannotRender(field, _NO_END)
        while tokens and not chat.decode(tokens[-1:], special=True).strip():
            tokens, trained = tokens[:-1], trained[:-1]
        return [*tokens, *chat.stop], [*trained, True]


_NO_END = "neither the chat template nor the tokenizer has a token that ends an answer"


def _cut(text: str, begin: int, marks: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """`text` behind `begin` in pieces, each of them inside or outside of `marks`."""
    borders = sorted({begin, len(text), *(max(place, begin) for mark in marks for place in mark)})
    return [(text[start:end], any(first <= start < last for first, last in marks)) for start, end in pairwise(borders)]
