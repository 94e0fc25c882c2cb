"""Ollama's Modelfile for a GGUF file: https://docs.ollama.com/modelfile (FROM, TEMPLATE, SYSTEM, PARAMETER).

Ollama's templates are Go's, and a model's are Jinja's. A chat template is translated only where that takes no guess: it
has to put each message between a fixed text before and a fixed text after, by role, and the answer's beginning at the
end. What these are is read off conversations that the tokenizer renders, and further ones have to come out the same.
Otherwise the Modelfile says that it has no template.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MARK = "\N{WHITE SQUARE}tinker-local\N{WHITE SQUARE}"
"""A content that no template has."""

ROLES = ("system", "user", "assistant")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Settings of a model's `generation_config.json` that Ollama has by the same names."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TurnTemplate:
    """`around`: the texts before and after a message of each role. `system`: what the template inserts as the system's
    message where a conversation has none; empty if it inserts nothing. `answer`: what it puts before an answer.
    `apart`: what the model's own template does besides, in sentences."""

    around: Mapping[str, tuple[str, str]]
    system: str
    answer: str
    apart: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        """With the beginning of an answer, as Ollama would."""
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        turns = (f"{self.around[m['role']][0]}{m['content']}{self.around[m['role']][1]}" for m in messages)
        return "".join(turns) + self.answer

    @property
    def go(self) -> str:
        """As a template of Ollama. Go's text/template takes text outside of braces as it is."""
        branches = []
        for number, role in enumerate(ROLES):
            before, after = (_literal(text) for text in self.around[role])
            branches.append(
                f'{{{{ {"else if" if number else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            )
        return f"{{{{- range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{_literal(self.answer)}"


def _literal(text: str) -> str:
    """Text outside of a template's braces; those that it has itself become quoted strings inside."""
    return text.replace("{{", '{{ "{{" }}')


def read_turns(tokenizer: Any) -> TurnTemplate | None:
    """The template of `tokenizer` if it is of that kind, without the BOS token that llama.cpp puts first by itself."""
    try:
        found = _read_turns(tokenizer)
        if found is None or any(_rendered(tokenizer, each) != found.render(each) for each in _CONVERSATIONS):
            return None
        apart = tuple(words for words, talk in _BESIDES.items() if _rendered(tokenizer, talk) != found.render(talk))
    except Exception:
        # Templates raise whatever they like about conversations that they do not take, as without a system's message.
        return None
    return replace(found, apart=apart)


_CONVERSATIONS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief.\nAlways."}, {"role": "user", "content": "some\n\nlines"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "Five"},
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "{{ U }}"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": ""},
    ],
)

_BESIDES: dict[str, list[Message]] = {
    "That one leaves the thoughts of earlier answers out of the prompt; here they stay in it.": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nIt is two.\n</think>\n\nTwo"},
        {"role": "user", "content": "Three"},
    ],
    "That one strips blanks around each message; here they stay.": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": " spaces \n and lines\n"},
        {"role": "assistant", "content": "  Four \n"},
        {"role": "user", "content": "Five "},
    ],
}
"""What a template may do besides, and a conversation that shows it."""


def _rendered(tokenizer: Any, messages: Sequence[Message], answer: bool = True) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    begins = tokenizer("a")["input_ids"]
    own_bos = tokenizer.bos_token is not None and begins[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(tokenizer.bos_token) if own_bos else text


def _read_turns(tokenizer: Any) -> TurnTemplate | None:
    system: Message = {"role": "system", "content": MARK}
    user: Message = {"role": "user", "content": MARK}
    alone = _rendered(tokenizer, [system], answer=False)
    before, found, after = alone.partition(MARK)
    if not found:
        return None
    around = {"system": (before, after)}
    talk = _rendered(tokenizer, [system, user, {"role": "assistant", "content": MARK}, user], answer=False)
    parts = talk.removeprefix(alone).split(MARK)
    if not talk.startswith(alone) or len(parts) != 4:
        return None
    # after the system: [before user] [after user + before assistant] [after assistant + before user] [after user]
    user_after = parts[3]
    assistant_after = parts[2].removesuffix(parts[0])
    around["user"] = (parts[0], user_after)
    around["assistant"] = (parts[1].removeprefix(user_after), assistant_after)
    answer = _rendered(tokenizer, [system, user]).removeprefix(f"{alone}{parts[0]}{MARK}{user_after}")
    without = _rendered(tokenizer, [user], answer=False).removesuffix(f"{parts[0]}{MARK}{user_after}")
    default = without.removeprefix(before).removesuffix(after) if without else ""
    return TurnTemplate(around, default, answer)


def stops(tokenizer: Any, generation: Mapping[str, Any], turns: TurnTemplate | None) -> list[str]:
    """The texts that end an answer: tokens of the model's settings, and what its template puts after an answer."""
    ids = generation.get("eos_token_id", tokenizer.eos_token_id)
    ids = ids if isinstance(ids, list) else [ids]
    found = [str(tokenizer.decode([each])) for each in ids if each is not None]
    after = turns.around["assistant"][1].strip() if turns is not None else ""
    known = [token for token in tokenizer.get_added_vocab() if after.startswith(token)]
    return list(dict.fromkeys([*found, *sorted(known, key=len)[-1:]]))


def write_modelfile(folder: Path, model: str, merged: Path) -> bool:
    """Write `folder`/Modelfile for the file `model` in it, of the whole model `merged`; whether it has a template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    settings = merged / "generation_config.json"
    generation = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
    turns = read_turns(tokenizer) if tokenizer.chat_template else None
    lines = ["# ollama create NAME -f Modelfile", f"FROM ./{model}"]
    if turns is None:
        lines += [
            "# No TEMPLATE: the model's chat template is not of fixed texts around each message, as Go's would have to",
            "# be. Ollama takes one that it knows by the template in the GGUF file, or else {{ .Prompt }}; llama.cpp's",
            "# own programs run the template in the file as it is.",
        ]
    else:
        lines.append("# The model's chat template, without its tools.")
        lines += [f"# {words}" for words in turns.apart]
        lines.append(f"TEMPLATE {_quoted(turns.go)}")
        if turns.system:
            lines.append(f"SYSTEM {_quoted(turns.system)}")
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops(tokenizer, generation, turns)]
    lines += [f"PARAMETER {name} {generation[name]}" for name in SAMPLING if generation.get(name) is not None]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n", "utf-8")
    return turns is not None


def _quoted(text: str) -> str:
    """In Ollama's quotes for several lines, which end at the first three quotes; a template with those is not written
    by models, and would end the Modelfile's text early."""
    if '"""' in text:
        raise ValueError(f'the chat template has """: {text!r}')
    return f'"""{text}"""'
