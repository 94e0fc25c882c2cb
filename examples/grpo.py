"""The training loop of `color_square.py` and `grid_walk.py`: GRPO over any environments, written out."""

import argparse
import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tinker_local.client as tinker
from saving import NOTHING, RANDOM, add_options, connect, first_step, save, training_client
from tinker_local.client import rl

LOSSES = ("importance_sampling", "ppo", "cispo", "stable_reinforce")


@dataclass
class History:
    """`rewards`: mean return per step; `kl`: KL(sampler, trainer) at step 0, before any training; `staleness`: of the
    tokens of each step that was sampled ahead, the most that it can be on average."""

    rewards: list[float] = field(default_factory=list)
    kl: float = float("nan")
    staleness: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """What an example saw: `success`, the mean return of the trained model on new starts, and `report`, in words.

    `wrong`: its `verdict`. `title`, `levels`, `shown`: of `draw`.
    """

    history: History
    success: float
    report: str
    wrong: str
    title: str
    levels: dict[str, float]
    shown: Sequence[tuple[str, np.ndarray]]


async def warm_start(
    client: tinker.TrainingClient, batches: Sequence[list[tinker.Datum]], learning_rate: float
) -> None:
    """Supervised steps that teach the form of an answer."""
    for data in batches:
        gradient = client.forward_backward(data, "cross_entropy")
        update = client.optim_step(tinker.AdamParams(learning_rate=learning_rate, beta2=0.99, grad_clip_norm=1.0))
        await gradient
        await update


async def train(
    client: tinker.TrainingClient,
    chat: rl.Chat,
    groups_of: Callable[[int], Sequence[rl.Group]],
    *,
    steps: int,
    learning_rate: float,
    params: tinker.SamplingParams,
    advantages: rl.Advantages = rl.centered_returns_to_go,
    loss: tinker.types.LossFnType = "importance_sampling",
    staleness: int = 0,
    steps_ahead: int = 0,
    seed: int = 0,
    begin: int = 0,
    save_every: int = 0,
) -> History:
    """Each step samples the groups of `groups_of(step)` and takes one policy gradient step on them.

    `staleness`: step t samples with the weights before step max(begin, t - staleness), as a trainer that runs ahead of
    its samplers sees them; 0: with the newest. `steps_ahead`: sample the groups of so many steps while one is trained,
    with weights that move under them (`rl.train_asynchronously`); 0: each step waits for its samples. Such samples have
    no seed, since time decides which weights draw a token. `begin`: the first step. `save_every`: also save after so
    many steps; 0: do not.

    Raises ValueError for `steps_ahead` with `staleness`, or with "stable_reinforce", whose records that loop does not
    ask for.
    """
    if steps_ahead and (staleness or loss == "stable_reinforce"):
        raise ValueError(f"steps_ahead {steps_ahead}: goes neither with staleness nor with stable_reinforce")
    if steps_ahead:
        return await _train_ahead(
            client,
            chat,
            groups_of,
            steps,
            learning_rate,
            params,
            advantages,
            loss,
            steps_ahead,
            begin,
            save_every,
        )
    history = History()
    samplers = deque[tinker.SamplingClient](maxlen=staleness + 1)
    recorded = loss == "stable_reinforce"  # it trains on what the server recorded of the samples
    for step in range(begin, steps):
        samplers.append(await client.save_weights_and_get_sampling_client(record_stability_info=recorded))
        seeded = params.model_copy(update={"seed": seed * steps + step})
        rollouts = await rl.rollout(groups_of(step), samplers[0], chat, seeded)
        history.rewards.append(rollouts.mean_reward)
        if step == begin:
            everything = [datum for trajectory in rollouts.trajectories for datum in trajectory.data()]
            output = await client.forward(everything, "importance_sampling")
            history.kl = rl.sampler_trainer_kl(everything, output)
            print(f"KL(sampler, trainer) before training: {history.kl:.1e}")
        stats = rollouts.stats
        print(
            f"step {step:3d}   return {history.rewards[-1]:6.3f}   {stats.turns} turns, {stats.tokens} tokens", end=""
        )
        print(f"   failed: {rollouts.failures[0]}" if rollouts.failures else "", flush=True)
        if data := rollouts.data(advantages, loss):
            gradient = client.forward_backward(data, loss)
            update = client.optim_step(adam(learning_rate, step, steps))
            await gradient
            await update
        if save_every and (step + 1) % save_every == 0 and step + 1 < steps:
            await asyncio.to_thread(save, client, "rl", step + 1)
    return history


def adam(learning_rate: float, step: int, steps: int) -> tinker.AdamParams:
    """The learning rate falls to 0.3 of itself."""
    rate = learning_rate * (1 - 0.7 * step / steps)
    return tinker.AdamParams(learning_rate=rate, beta2=0.99, eps=1e-8, grad_clip_norm=1.0)


async def _train_ahead(
    client: tinker.TrainingClient,
    chat: rl.Chat,
    groups_of: Callable[[int], Sequence[rl.Group]],
    steps: int,
    learning_rate: float,
    params: tinker.SamplingParams,
    advantages: rl.Advantages,
    loss: tinker.types.LossFnType,
    steps_ahead: int,
    begin: int,
    save_every: int,
) -> History:
    history = History()
    first = groups_of(begin)
    later = itertools.chain.from_iterable(groups_of(step) for step in range(begin + 1, steps))

    def on_step(found: rl.AsyncStep) -> None:
        step = begin + found.step
        history.rewards.append(found.mean_reward)
        history.staleness.append(found.metrics()["async/staleness_mean"])
        if found.step == 0 and found.gradient is not None:
            data = [datum for group in found.groups for datum in group.data(advantages, loss)]
            history.kl = rl.sampler_trainer_kl(data, found.gradient)
            print(f"KL(sampler, trainer) before training: {history.kl:.1e}")
        print(
            f"step {step:3d}   return {history.rewards[-1]:6.3f}   {sum(found.tokens)} tokens, "
            f"{history.staleness[-1]:.1f} steps old, waited {found.waited:.1f} of {found.seconds:.1f} s",
            flush=True,
        )
        if save_every and (step + 1) % save_every == 0 and step + 1 < steps:
            save(client, "rl", step + 1)

    await rl.train_asynchronously(
        client,
        itertools.chain(first, later),
        chat,
        params,
        lambda step: adam(learning_rate, begin + step, steps),
        steps=steps - begin,
        groups_per_step=len(first),
        steps_ahead=steps_ahead,
        advantages=advantages,
        loss_fn=loss,
        on_step=on_step,
    )
    return history


def draw(outcome: Outcome, path: Path) -> None:
    """Plot the returns as a PNG, with horizontal lines at `levels`, below the pictures and replies of `shown`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(6, 4.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 3])
    places = above.subplots(1, len(outcome.shown), squeeze=False)[0]
    for axes, (reply, picture) in zip(places, outcome.shown, strict=True):
        axes.imshow(picture)
        axes.set_title(reply, fontsize="small")
        axes.axis("off")
    axes = below.subplots()
    axes.plot(outcome.history.rewards, label="sampled while training")
    for (name, level), style in zip(outcome.levels.items(), ("--", ":", "-."), strict=False):
        axes.axhline(level, linestyle=style, color="grey", label=f"{name}: {level:.2f}")
    axes.set(xlabel="step", ylabel="mean return", title=outcome.title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def pictures_of(trajectory: rl.Trajectory, first: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Each reply with the picture before it; `first` is the first picture."""
    pictures = [first]
    for turn in trajectory.turns[:-1]:
        pictures += [part for part in turn.observation if isinstance(part, np.ndarray)]
    return [(turn.action.strip(), picture) for turn, picture in zip(trajectory.turns, pictures, strict=True)]


def verdict(success: float, reached: bool) -> str:
    """What is wrong with a result, "" if nothing is; `success`: a share of the episodes or of the return."""
    if reached:
        return ""
    return RANDOM if success < NOTHING else "the mark was missed"


def run_example(
    run: Callable[[tinker.TrainingClient, argparse.Namespace], Awaitable[Outcome]],
    name: str,
    description: str,
    defaults: dict[str, float],
    layout: tinker.PromptLayout,
) -> None:
    """Run the example `name`. `defaults` are for a tiny random model; `layout`: of the environment's messages."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser)
    parser.add_argument("--model", required=True, help="a vision-language model that the server serves")
    parser.add_argument("--steps", type=int, help="number of policy gradient steps")
    parser.add_argument("--groups", type=int, help="groups per step")
    parser.add_argument("--group-size", type=int, help="environments per group, all with the same start")
    parser.add_argument("--learning-rate", type=float, help="2e-5 suits a real model")
    parser.add_argument("--warm-steps", type=int, default=6, help="number of supervised steps; 0 suits a real model")
    parser.add_argument("--warm-rate", type=float, default=5e-3)
    parser.add_argument("--loss", choices=LOSSES, default=LOSSES[0], help="of the RL steps")
    parser.add_argument("--staleness", type=int, default=0, metavar="N", help="sample with the weights N steps ago")
    parser.add_argument(
        "--steps-ahead", type=int, default=0, metavar="N", help="sample N steps ahead while training (0: wait)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/rl"))
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    if options.steps_ahead and (options.staleness or options.loss == "stable_reinforce"):
        parser.error("--steps-ahead goes neither with --staleness nor with --loss stable_reinforce")
    options.begin = first_step(options)
    if options.begin:
        options.warm_steps = 0  # before the first step
    with connect(options) as service:
        client = training_client(service, options, rank=32, seed=0, layout=layout)
        outcome = asyncio.run(run(client, options))
        path = options.out / f"{name}.png"
        draw(outcome, path)
        print(f"{outcome.report}; {path}")
        saved = save(client, "rl")
        print(f"saved as {saved.state} and {saved.sampler}")
        if outcome.wrong:
            raise SystemExit(outcome.wrong)
