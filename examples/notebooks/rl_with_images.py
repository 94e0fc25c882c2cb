"""RL with images, and watch the return: a marimo notebook.

    tinker-local serve --model local/tiny-vl=models/tiny-vl
    marimo edit examples/notebooks/rl_with_images.py

As a program: python examples/notebooks/rl_with_images.py --model local/tiny-vl --steps 20
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")

with app.setup:
    import sys
    from pathlib import Path
    from typing import Any

    import marimo as mo
    import numpy as np
    import tinker_local.client as tinker
    from matplotlib import pyplot
    from tinker_local.client import rl

    sys.path.append(str(Path(__file__).parents[1]))
    from red_square import square


@app.cell(hide_code=True)
def _():
    mo.md("""
    # RL with images: watch the return

    The model sees a square and names its colour; the right name is worth 1. No answer is ever shown during RL: GRPO
    compares 8 replies to the same picture. Start a server first:

    ```sh
    .venv/bin/tinker-local tiny-model --kind vl --out models/tiny-vl
    .venv/bin/tinker-local serve --model local/tiny-vl=models/tiny-vl
    ```
    """)
    return


@app.cell
def _():
    given = mo.cli_args()
    model = given.get("model") or "local/tiny-vl"
    steps = int(given.get("steps") or 20)
    return model, steps


@app.class_definition
class ColorSquare:
    """One turn: a picture and a question; the reward is 1 if the reply is the square's colour."""

    COLORS = ("red", "green", "blue", "yellow")

    def reset(self, *, seed: int | None = None) -> tuple[list[Any], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        self.color = str(rng.choice(self.COLORS))
        return [square(self.color, rng), "What colour is the square?"], {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, float(action.strip() == self.color), True, False, {}


@app.cell
async def _(model):
    service = tinker.ServiceClient(display_name="rl_with_images")
    layout = tinker.PromptLayout("picture-first")  # so that the console's playground asks what is trained
    client = await service.create_lora_training_client_async(
        base_model=model, rank=32, seed=0, user_metadata=layout.as_metadata()
    )
    chat = rl.Chat.of(client)  # the model's own chat template
    rng = np.random.default_rng(0)

    def seeds(count: int) -> list[int]:
        return [int(seed) for seed in rng.integers(2**31, size=count)]

    mo.md(f"[The run in the server's console]({service.get_console_url()}).")
    return chat, client, seeds


@app.cell
async def _(chat, client, seeds):
    # A model with random weights does not speak yet. Six supervised steps on colours drawn at random, whatever the
    # picture shows, teach the form of an answer; the return stays at chance. A real model needs none of this.
    for _ in range(6):
        batch = []
        for seed in seeds(32):
            contents, _ = ColorSquare().reset(seed=seed)
            color = np.random.default_rng(seed + 1).choice(ColorSquare.COLORS)
            turns = [{"role": "user", "content": contents}, {"role": "assistant", "content": str(color)}]
            batch += rl.conversation_data(chat, turns)
        gradient = client.forward_backward(batch, "cross_entropy")
        await client.optim_step(tinker.AdamParams(learning_rate=5e-3, beta2=0.99, grad_clip_norm=1.0))
    formed = (await gradient).metrics["loss:sum"] / len(batch)
    mo.md(f"Form of an answer: {formed:.2f} nats; a colour by chance has {np.log(4):.2f}.")
    return (formed,)


@app.cell
async def _(chat, client, formed, seeds, steps):
    assert formed  # after the cell above

    def plot(returns: list[float]) -> pyplot.Figure:
        figure, axes = pyplot.subplots(figsize=(6, 2.4), layout="constrained")
        axes.plot(range(1, len(returns) + 1), returns, marker=".")
        axes.axhline(0.25, linestyle=":", color="grey", label="chance")
        axes.set(xlabel="step", ylabel="mean return", xlim=(0, steps + 1), ylim=(0, 1.02))
        axes.legend()
        pyplot.close(figure)
        return figure

    params = tinker.SamplingParams(max_tokens=4)
    returns: list[float] = []
    for _ in range(steps):
        sampler = await client.save_weights_and_get_sampling_client()
        groups = [rl.Group(ColorSquare, 8, seed) for seed in seeds(16)]  # 8 replies each to 16 pictures
        rollouts = await rl.rollout(groups, sampler, chat, params, progress=None)
        returns.append(rollouts.mean_reward)
        mo.output.replace(plot(returns))
        if data := rollouts.data():  # empty if all replies of each group had the same return
            client.forward_backward(data, "importance_sampling")
            update = client.optim_step(tinker.AdamParams(learning_rate=2.5e-3, beta2=0.99, grad_clip_norm=1.0))
            await update
    print(f"mean return {returns[0]:.2f} -> {returns[-1]:.2f}")
    plot(returns)
    return params, rollouts


@app.cell
async def _(chat, client, params, seeds):
    final = await client.save_weights_and_get_sampling_client()
    new = seeds(12)
    episodes = await rl.rollout([rl.Group(ColorSquare, 1, seed) for seed in new], final, chat, params, progress=None)
    cards = [
        mo.vstack([mo.image(ColorSquare().reset(seed=seed)[0][0], width=72), episode.turns[0].action], align="center")
        for seed, episode in zip(new, episodes.trajectories, strict=True)
    ]
    mo.vstack([mo.md(f"New squares: mean return {episodes.mean_reward:.2f}"), mo.hstack(cards, wrap=True)])
    return


if __name__ == "__main__":
    app.run()
