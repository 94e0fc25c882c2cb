"""What the checks work with: a server, a client of it, and small things to do with both."""

import asyncio
import functools
import inspect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click.testing
import numpy as np
import tinker
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces import RestClient, TrainingClient

TOKENS = [40, 7, 91, 200, 15, 33, 120, 64]
ADAM = tinker.AdamParams(learning_rate=0.01)


@dataclass
class World:
    """`variant`: "" or "_async"; `call` adds it to a method's name and waits for the result in its way."""

    url: str
    model: str
    api_key: str
    variant: str = ""
    _numbers: Any = field(default_factory=itertools.count)

    def call(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """What `owner.name(...)` gives in the end."""
        if not self.variant:
            return settled(getattr(owner, name)(*args, **kwargs))

        async def awaited() -> Any:
            value = getattr(owner, name + self.variant)(*args, **kwargs)
            while inspect.isawaitable(value):
                value = await value
            return value

        return asyncio.run(awaited())

    def renew(self) -> None:
        """A new session for the next check; what belonged to the last one is freed."""
        service = self.__dict__.pop("service", None)
        self.__dict__.pop("rest", None)
        if service is not None:
            service.close("success").result()

    @functools.cached_property
    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.api_key, user_metadata={"of": "compatibility"})

    @functools.cached_property
    def rest(self) -> RestClient:
        return self.service.create_rest_client()

    def name(self) -> str:
        """A name that no other check uses."""
        return f"n{next(self._numbers)}"

    def training(self, **options: Any) -> TrainingClient:
        """A new run, a few steps away from its base model."""
        client = self.service.create_lora_training_client(base_model=self.model, rank=4, seed=1, **options).result()
        self.steps(client, 2)
        return client

    def steps(self, client: TrainingClient, count: int) -> None:
        for _ in range(count):
            client.forward_backward([datum(TOKENS)], "cross_entropy").result()
            client.optim_step(ADAM).result()

    def learner(self, client: TrainingClient) -> np.ndarray:
        """The trainer's logprobs of `TOKENS` after the first."""
        output = client.forward([datum(TOKENS)], "cross_entropy").result()
        return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy())

    def sampler(self, client: Any) -> np.ndarray:
        """The sampler's logprobs of the same."""
        return np.array(client.compute_logprobs(prompt()).result()[1:], np.float32)

    def base(self) -> np.ndarray:
        """The base model's."""
        return self.sampler(self.service.create_sampling_client(base_model=self.model).result())

    def command(self, *arguments: str, output: str = "json", typed: str = "", **environment: str | None) -> Any:
        """What a `tinker` command prints, JSON if `output` is so. Raises CommandError if it fails."""
        found = click.testing.CliRunner().invoke(
            main_cli,
            ["--format", output, *arguments],
            input=typed,
            env={"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.api_key, **environment},
        )
        error = found.exception
        if error is not None:
            told = getattr(error, "details", None) or str(error) or found.output
            raise CommandError(" ".join(told.split())) from error
        return json.loads(found.stdout) if output == "json" else found.output


class CommandError(Exception):
    """What a command says when it fails."""


def settled(value: Any) -> Any:
    """The result of a future of the SDK; other values as they are."""
    while hasattr(value, "result") and hasattr(value, "result_async"):
        value = value.result()
    return value


def prompt(tokens: Sequence[int] = TOKENS) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def datum(tokens: Sequence[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(
        model_input=prompt(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},  # type: ignore[dict-item]
    )


def same(ours: Any, expected: Any, tolerance: float = 2e-4) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(expected), atol=tolerance, rtol=0)


def differs(ours: Any, expected: Any) -> None:
    assert np.abs(np.asarray(ours) - np.asarray(expected)).max() > 1e-2
