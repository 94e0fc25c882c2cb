"""Fine-tune on pictures and look at the answers: a marimo notebook.

    tinker-local serve --model local/demo-vl=models/demo-vl
    marimo edit examples/notebooks/fine_tune_on_pictures.py

As a program: python examples/notebooks/fine_tune_on_pictures.py --model local/demo-vl --steps 100
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")

with app.setup:
    import random
    import sys
    from pathlib import Path

    import marimo as mo
    import numpy as np
    import PIL.Image
    import tinker_local.client as tinker
    from matplotlib import pyplot
    from tinker_local.client import as_rgb, model_input, open_picture
    from transformers import AutoImageProcessor

    sys.path.append(str(Path(__file__).parents[1]))
    from sample_pictures import KINDS, picture


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Fine-tune on pictures and look at the answers

    A vision-language model learns to name road signs. The notebook draws the signs, trains a LoRA adapter through the
    Tinker API, and shows what the model answers on pictures that it has not seen. Start a server first:

    ```sh
    .venv/bin/tinker-local tiny-model --kind vl --preset demo --out models/demo-vl
    .venv/bin/tinker-local serve --model local/demo-vl=models/demo-vl
    ```
    """)
    return


@app.cell
def _():
    given = mo.cli_args()
    model = given.get("model") or "local/demo-vl"
    steps = int(given.get("steps") or 100)
    question = "Which sign?"
    side = 32  # pixels; a real model takes 224 and more
    return model, question, side, steps


@app.cell
def _(side):
    rng = random.Random(0)
    signs = [(kind, picture(kind, rng).resize((side, side))) for kind in KINDS for _ in range(60)]
    rng.shuffle(signs)
    held_out, train = signs[:40], signs[40:]
    mo.hstack([mo.vstack([mo.image(sign.resize((96, 96))), kind], align="center") for kind, sign in train[:8]])
    return held_out, train


@app.cell
async def _(model, question, side):
    service = tinker.ServiceClient(display_name="fine_tune_on_pictures")
    layout = tinker.PromptLayout("picture-first", side)  # so that the console's playground asks what is trained
    client = await service.create_lora_training_client_async(
        base_model=model, rank=32, seed=0, user_metadata=layout.as_metadata()
    )
    tokenizer = client.get_tokenizer()
    processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)

    def prompt(image: PIL.Image.Image) -> tinker.ModelInput:
        """The question about an image, in the model's chat format."""
        before, after = "<|im_start|>user\n", f"{question}<|im_end|>\n<|im_start|>assistant\n"
        return model_input(before, image, after, tokenizer=tokenizer, image_processor=processor)

    def example(image: PIL.Image.Image, kind: str) -> tinker.Datum:
        """Image, question and answer. Only the answer has weights, so only it is learned."""
        asked, answer = prompt(image), tokenizer.encode(f"{kind}<|im_end|>", add_special_tokens=False)
        before = asked.length - 1
        return tinker.Datum(
            model_input=asked.append(tinker.EncodedTextChunk(tokens=answer[:-1])),
            loss_fn_inputs={"target_tokens": [0] * before + answer, "weights": [0.0] * before + [1.0] * len(answer)},
        )

    async def answers(images: list[PIL.Image.Image], sampler: tinker.SamplingClient) -> list[str]:
        """What a sampler says about each image, at temperature 0."""
        params = tinker.SamplingParams(max_tokens=8, temperature=0)
        futures = [sampler.sample(prompt(image), 1, params) for image in images]
        replies = [(await future).sequences[0].tokens for future in futures]
        return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in replies]

    mo.md(f"One adapter of rank 32 on `{model}`. [Its page in the server's console]({service.get_console_url()}).")
    return answers, client, example


@app.cell
async def _(client, example, steps, train):
    def plot(losses: list[float]) -> pyplot.Figure:
        figure, axes = pyplot.subplots(figsize=(6, 2.4), layout="constrained")
        axes.semilogy(range(1, len(losses) + 1), losses)
        axes.set(xlabel="step", ylabel="nats per answer", xlim=(0, steps))
        pyplot.close(figure)
        return figure

    losses: list[float] = []
    for step in range(steps):
        batch = [example(sign, kind) for kind, sign in random.Random(step).sample(train, 24)]
        rate = 3e-3 * min(1, (step + 1) / 5) * (1 - step / steps)
        gradient = client.forward_backward(batch, "cross_entropy")
        update = client.optim_step(tinker.AdamParams(learning_rate=rate, grad_clip_norm=0.5))
        losses.append((await gradient).metrics["loss:sum"] / len(batch))
        await update
        if step % 10 == 9:
            mo.output.replace(plot(losses))
    sampler = await client.save_weights_and_get_sampling_client()
    plot(losses)
    return losses, sampler


@app.cell
async def _(answers, held_out, losses, sampler):
    said = await answers([sign for _, sign in held_out], sampler)
    share = float(np.mean([answer == kind for answer, (kind, _) in zip(said, held_out, strict=True)]))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per answer; {share:.0%} of {len(said)} held-out signs")

    def card(answer: str, kind: str, sign: PIL.Image.Image) -> mo.Html:
        """A picture above the model's answer; a wrong one in red, with the right one."""
        right = mo.md(answer) if answer == kind else mo.md(f"<span style='color: #c33'>{answer}</span> ({kind})")
        return mo.vstack([mo.image(sign.resize((96, 96))), right], align="center")

    cards = [card(answer, kind, sign) for answer, (kind, sign) in zip(said, held_out[:16], strict=False)]
    mo.vstack([mo.md(f"**{share:.0%}** of {len(said)} held-out signs are named right."), mo.hstack(cards, wrap=True)])
    return


@app.cell
def _():
    upload = mo.ui.file(filetypes=[".png", ".jpg", ".jpeg", ".webp", ".gif"], label="Ask about a picture of yours")
    mo.vstack([upload])
    return (upload,)


@app.cell
async def _(answers, sampler, side, upload):
    mo.stop(not upload.value)
    given_picture = as_rgb(open_picture(upload.contents()))
    given_picture.thumbnail((side, side))
    (reply,) = await answers([given_picture], sampler)
    mo.hstack([mo.image(given_picture.resize((96, 96))), reply], justify="start")
    return


if __name__ == "__main__":
    app.run()
