"""Users whose samples run while they train, on weights that move: the text tells which weights drew each token."""

import itertools
import re
from dataclasses import dataclass

import numpy as np
from tinker_local.types import Datum, ModelInput

from tests.chaos.chaos_users import Failed, Ledger, Owner, User, logprobs, text
from tests.chaos.possible_states import Violation
from tests.chaos.served import Served

WORDS = range(10, 60)
"""What versions say, one after the other; a word comes again after fifty saves."""
PROMPT = (5, 9, 62)
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
SURE = -0.01
"""Logprob of a word at each position, from which on its version says nothing else, whatever text it goes on with."""
TRIES = 60
LONGEST = 153
"""Tokens of a prompt and its sample on real engines; the fakes' model reads the last token alone."""
ALLOWED = re.compile(
    r"the server was (restarted|stopped)|there is no session|injected by the chaos run|"
    r"the second time that this request was in it|which weights drew \S+ is not known"
)
"""Why a sample may fail: its session went with a server, a fault was raised in it or in the check of its weights, or it
was in a process that ended for the second time. One end of an engine fails nothing, not even in a change of weights."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample of a client of save `since`, asked for after `saves` saves."""

    request: str
    sampler: str
    since: int
    saves: int


class MovesWeights(User):
    """An asynchronous loop: samples of new and older in-flight clients run while its run learns another word and saves,
    up to three times in a row. Sometimes it vanishes in the middle, without an end of its session.

    A run that lost a step or the answer of a save is given up, but its samples are not. Whatever becomes of the
    trainer, each token must be of the version that it is said to be, and of none before that of its client.
    """

    def __init__(self, url: str, served: Served, seed: int, owner: Owner, ledger: Ledger) -> None:
        super().__init__(url, served, seed, owner, ledger)
        self.lose()

    def lose(self) -> None:
        """Begin again with another session and run."""
        super().lose()
        self._model = ""
        self._seq_id, self._steps, self._word = 0, 0, 0
        self._saves: list[tuple[int, int]] = []  # the optimizer steps at each, and the word
        self._clients: list[tuple[str, int]] = []  # and the number of the save that made it
        self._samples = itertools.count()

    def round(self) -> None:
        if not self._clients:
            self._begin()
        asked, failed = [], None
        try:
            for _ in range(self.rng.randint(1, 3)):
                asked += [self._ask() for _ in range(self.rng.randint(1, 3))]
                self._learn()
                self._save(self.rng.choice((1, 1, 3)))
        except Failed as error:
            failed = error
        if self.rng.random() < 0.1:
            self.ledger.count("in-flight client vanished")
            self.lose()
            return
        for each in asked:
            try:
                self._check(each)
            except Failed as error:
                self.ledger.count("in-flight sample failed")
                self.ledger.say(f"in-flight sample failed: {str(error)[:400]}")
                if ALLOWED.search(str(error)) is None:
                    raise Violation(f"{each}: lost for another reason than a fault: {error}") from None
                failed = failed or error
        if failed is not None:
            self.lose()
            raise failed

    def _begin(self) -> None:
        self.lose()
        self.open_session()
        config = {"rank": 4, "seed": self.rng.randrange(1000)}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self.served.name, "lora_config": config}
        self._model = str(self.wire.result(self.wire.submit("create_model", body))["model_id"])
        self._learn()
        self._save(1)

    def _ids(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _data(self) -> list[Datum]:
        """Texts as long as samples, each token of which the new word is to follow: all words in any order, and words
        that are said again and again, as one version after the other does."""
        texts = []
        for _ in range(4):
            tokens = [*PROMPT, *self.rng.sample(WORDS, len(WORDS))]
            if self.served.real and self.rng.random() < 0.75:
                tokens = [*PROMPT]
                while len(tokens) < LONGEST:
                    word = self.rng.choice((self._word, self.rng.choice(WORDS)))
                    tokens += [word] * min(self.rng.choice((1, 10, 80, 150)), LONGEST - len(tokens))
            texts.append(tokens)
        return [
            Datum(
                model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": [self._word] * len(tokens)}
            )
            for tokens in texts
        ]

    def _learn(self) -> None:
        """Train until the run says another word after any text, and nothing else."""
        self._word = WORDS[(self._word - WORDS[0] + 1) % len(WORDS)] if self._word else self.rng.choice(WORDS)
        rate = 0.02 if self.served.real else 0.5
        for _ in range(TRIES):
            gradient = self.wire.gradient(self._model, self._ids(), self._data())
            body = {"model_id": self._model, "seq_id": self._ids(), "type": "optim_step"}
            step = self.wire.submit("optim_step", {**body, "adam_params": {**ADAM, "learning_rate": rate}})
            found = self.wire.gradient(self._model, self._ids(), self._data(), forward_only=True)
            self.wire.result(gradient)
            self.wire.result(step)
            self._steps += 1
            least = min(float(each.min()) for each in logprobs(self.wire.result(found)))
            if least > SURE:
                self.ledger.count("in-flight word learnt")
                return
        raise Violation(f"{self._model} did not learn to say {self._word} in {TRIES} steps: logprob {least:.3f}")

    def _save(self, count: int) -> None:
        """Save `count` times before waiting for any."""
        requests = []
        for _ in range(count):
            self._saves.append((self._steps, self._word))
            body = {"model_id": self._model, "seq_id": self._ids(), "kind": "inflight"}
            body["sampling_session_seq_id"] = len(self._saves)
            requests.append((self.wire.submit("save_weights_for_sampler", body), len(self._saves)))
        for request, number in requests:
            saved = self.wire.result(request)
            self._clients.append((str(saved["sampling_session_id"]), number))
            self.ledger.count("in-flight save")

    def _ask(self) -> Asked:
        """A sample of the newest client, or of any."""
        sampler, since = self._clients[-1] if self.rng.random() < 0.6 else self.rng.choice(self._clients)
        most = LONGEST - len(PROMPT) if self.served.real else 1000
        params = {"max_tokens": self.rng.choice((1, 20, most, most)), "temperature": 0.0, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": next(self._samples), "prompt": {"chunks": [text(PROMPT)]}}
        body |= {
            "num_samples": self.rng.choice((1, 4, 4 if self.served.real else 40)),
            "sampling_params": params,
            "type": "sample",
        }
        return Asked(self.wire.submit("asample", body), sampler, since, len(self._saves))

    def _check(self, asked: Asked) -> None:
        """Every token is of the weights that are said to have drawn it."""
        for index, sequence in enumerate(self.wire.result(asked.request).sequences):
            path = f"samplers/{asked.sampler}/weights_of_tokens?sequence_id={asked.request}:{index}"
            spans = self.wire.get(path)["drawn_under"]
            what = f"{asked.request}:{index} of a client of save {asked.since} of {len(self._saves)}: {spans}"
            numbers = [span["version"] for span in spans]
            if numbers != sorted(set(numbers)) or not asked.since <= numbers[0] <= numbers[-1] <= len(self._saves):
                raise Violation(f"{what}: versions out of order")
            if sum(span["tokens"] for span in spans) != len(sequence.tokens):
                raise Violation(f"{what}: not its {len(sequence.tokens)} tokens")
            tokens = iter(np.asarray(sequence.tokens).tolist())
            for span in spans:
                steps, word = self._saves[span["version"] - 1]
                drawn = set(itertools.islice(tokens, span["tokens"]))
                if span["optimizer_steps"] != steps or drawn != {word}:
                    raise Violation(f"{what}: save {span['version']} says {word} after {steps} steps, not {drawn}")
            self.ledger.count("in-flight sequence")
            if len(numbers) > 1:
                self.ledger.count("in-flight sequence that moved")
            if numbers[-1] > asked.saves:
                self.ledger.count("in-flight sequence of weights saved after it began")
