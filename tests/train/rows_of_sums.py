"""Rows that a test makes by itself, without files and templates: sums of two digits as token ids, and pairs of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from tinker_local.client.train.examples import Example, Kind, Preference, Problem

ASK, END = 3, 4
"""Token ids; the digit d is FIRST + d, and the answer 0 to 18 is one token, too."""
FIRST = 5


class Sums:
    """Row i asks for the sum of two digits. As preferences, the rejected answer is one too large."""

    def __init__(self, count: int = 24, kind: Kind = "sft", seed: int = 0) -> None:
        self._kind = kind
        self._digits = np.random.RandomState(seed).randint(0, 10, size=(count, 2))

    @property
    def kind(self) -> Kind:
        return self._kind

    @property
    def skipped(self) -> Sequence[Problem]:
        return ()

    def __len__(self) -> int:
        return len(self._digits)

    def _prompt(self, index: int) -> list[int]:
        first, second = (int(digit) for digit in self._digits[index])
        return [ASK, FIRST + first, FIRST + second, ASK]

    def answer(self, index: int) -> int:
        """Its token."""
        return FIRST + int(self._digits[index].sum())

    def _example(self, index: int, answer: int) -> Example:
        tokens = [*self._prompt(index), answer, END]
        weights = np.array([0, 0, 0, 1, 1], np.float32)
        inputs: Any = {"target_tokens": np.array(tokens[1:], np.int64), "weights": weights}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        return Example(f"row {index}", datum, 2, len(tokens))

    def examples(self, index: int) -> Sequence[Example] | Preference:
        chosen = self._example(index, self.answer(index))
        if self._kind == "sft":
            return [chosen]
        return Preference(f"row {index}", chosen, self._example(index, self.answer(index) + 1))

    def lengths(self, index: int) -> Sequence[tuple[int, int]]:
        return [(6, 2)] * (1 if self._kind == "sft" else 2)

    def prompt(self, index: int) -> tuple[tinker.ModelInput, str]:
        return tinker.ModelInput.from_ints(self._prompt(index)), f"t{self.answer(index)}"

    def raw(self, index: int) -> Mapping[str, Any]:
        return {"a": int(self._digits[index][0]), "b": int(self._digits[index][1])}


class TokenNames:
    """Stands for a chat format: token 7 is "t7". It is its own tokenizer."""

    @property
    def tokenizer(self) -> "TokenNames":
        return self

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"t{token}" for token in tokens if token != END)
