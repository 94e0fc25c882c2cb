"""Chat templates as transformers renders them, in a third of the time.

Most of the time of a template goes into its sandbox, which asks of each `message.role` and `loop.first` whether a
template may read that. The answer is always the same for the objects that templates are about, so it is not asked here.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

_OF_DICTS = frozenset(dir(dict))
_OF_TEXTS = frozenset({"endswith", "lstrip", "replace", "rstrip", "split", "startswith", "strip"})


class _Sandbox(ImmutableSandboxedEnvironment):
    """Reads what its parent lets a template read, and nothing else."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a message, a number of a loop, a variable of a namespace or a method of a text; the parent has
        the rest."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICTS:  # Jinja looks for attributes of a dict before its entries
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext or kind is Namespace:
            if not attribute.startswith("_"):
                try:
                    return getattr(obj, attribute)
                except AttributeError:
                    pass
        elif kind is str and attribute in _OF_TEXTS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@lru_cache(16)
def _compiled(source: str) -> Any:
    """The template in transformers' environment, with its filters and functions, but for the sandbox."""
    given = chat_template_utils._compile_jinja_template(source).environment
    own = object.__new__(_Sandbox)
    own.__dict__.update(given.__dict__)
    own.cache = None  # of templates by name, which this is not
    return own.from_string(source)


@cache
def _arguments() -> frozenset[str]:
    """What `apply_chat_template` takes for itself, and does not hand to the template as it is."""
    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools"}


def can_render(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Whether `rendered` is what `tokenizer.apply_chat_template` returns for these variables."""
    own = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
    tools = variables.get("tools") or ()
    return own and not variables.keys() & _arguments() and all(isinstance(tool, dict) for tool in tools)


def rendered(
    tokenizer: Any, source: str, messages: Sequence[Mapping[str, Any]], generate: bool, variables: Mapping[str, Any]
) -> str:
    """`apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, chat_template=source,
    **variables)`, where `can_render` says so."""
    given: dict[str, Any] = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **variables}
    return str(_compiled(source).render(**given, messages=messages, add_generation_prompt=generate))
