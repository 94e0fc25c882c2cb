"""GRPO over any environments, the loop written out: what `color_square.py` and `grid_walk.py` train with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tinker
from tinker_local.client import rl


@dataclass
class History:
    """`rewards`: mean return per step; `kl`: KL(sampler, trainer) at step 0, before anything was trained on it."""

    rewards: list[float] = field(default_factory=list)
    kl: float = float("nan")


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
    seed: int = 0,
) -> History:
    """Each step: sample the groups of `groups_of(step)` with the newest weights, then one step of policy gradient."""
    history = History()
    for step in range(steps):
        sampler = await client.save_weights_and_get_sampling_client()
        seeded = params.model_copy(update={"seed": seed * steps + step})
        rollouts = await rl.rollout(groups_of(step), sampler, chat, seeded)
        history.rewards.append(rollouts.mean_reward)
        if step == 0:
            everything = [datum for trajectory in rollouts.trajectories for datum in trajectory.data()]
            output = await client.forward(everything, "importance_sampling")
            history.kl = rl.sampler_trainer_kl(everything, output)
            print(f"KL(sampler, trainer) before training: {history.kl:.1e}")
        stats = rollouts.stats
        print(
            f"step {step:3d}   return {history.rewards[-1]:6.3f}   {stats.turns} turns, {stats.tokens} tokens", end=""
        )
        print(f"   failed: {rollouts.failures[0]}" if rollouts.failures else "", flush=True)
        if data := rollouts.data(advantages):
            gradient = client.forward_backward(data, "importance_sampling")
            rate = learning_rate * (1 - 0.7 * step / steps)
            update = client.optim_step(tinker.AdamParams(learning_rate=rate, beta2=0.99, eps=1e-8, grad_clip_norm=1.0))
            await gradient
            await update
    return history


def draw(history: History, path: Path, title: str, levels: dict[str, float]) -> None:
    """The returns as a PNG, with horizontal lines at `levels`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(history.rewards, label="sampled while training")
    for (name, level), style in zip(levels.items(), ("--", ":", "-."), strict=False):
        axes.axhline(level, linestyle=style, color="grey", label=f"{name}: {level:.2f}")
    axes.set(xlabel="step", ylabel="mean return", title=title)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
