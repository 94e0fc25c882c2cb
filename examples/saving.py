"""What the examples share: where training begins, and what they save."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tinker_local.client as tinker

RANDOM = "random weights: too few steps"
"""What an example says if it learned nothing at all."""

NOTHING = 0.02
"""The share of right answers below which that is what happened."""


class Saved(NamedTuple):
    """`state`: the training state, to go on from or to export. `sampler`: the same weights, to sample from."""

    state: str
    sampler: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `training_client` and `save`."""
    parser.add_argument("--base-url", "--url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="also save every N steps")
    parser.add_argument("--resume", metavar="PATH", help="go on from this training state, tinker://RUN/weights/NAME")


def connect(options: argparse.Namespace) -> tinker.ServiceClient:
    """A session on the server; ends the program with one line if no server is there."""
    import tinker_local.client as tinker  # takes seconds: after what is said about the options

    try:
        return tinker.ServiceClient(base_url=options.base_url)
    except tinker.APIConnectionError as error:
        raise SystemExit(f"error: {error}") from None


def training_client(
    service: tinker.ServiceClient,
    options: argparse.Namespace,
    *,
    rank: int,
    seed: int,
    train_vision: bool = False,
    layout: tinker.PromptLayout | None = None,
) -> tinker.TrainingClient:
    """A new adapter on `--model`, or the one of `--resume` with its optimizer. `layout`: how the program puts pictures
    into prompts, so that `tinker-local chat` and the console ask what was trained."""
    metadata = layout.as_metadata() if layout else None
    if options.resume:
        return service.create_training_client_from_state_with_optimizer(options.resume, user_metadata=metadata).result()
    lora = {"rank": rank, "seed": seed, "train_vision": train_vision, "user_metadata": metadata}
    return service.create_lora_training_client(base_model=options.model, **lora).result()


def first_step(options: argparse.Namespace) -> int:
    """How many steps `--resume` has taken: the number that ends its name, as `save` writes it."""
    number = (options.resume or "").rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def save(client: tinker.TrainingClient, name: str, step: int | None = None) -> Saved:
    """Save both, under `name`, or `name-STEP` while training goes on, and print the paths."""
    named = name if step is None else f"{name}-{step:06d}"
    state, sampler = client.save_state(named), client.save_weights_for_sampler(named)
    saved = Saved(state.result().path, sampler.result().path)
    if step is not None:
        print(f"step {step}: saved {saved.state}", flush=True)
    return saved
