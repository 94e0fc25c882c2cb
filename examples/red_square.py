"""A vision-language model learns to name the colour of a square, also of squares that it has never seen.

    tinker-local serve --model NAME[=PATH]
    python examples/red_square.py --model NAME

Control: on blank images, the trained model must not know the answer.
"""

import argparse

import numpy as np
import tinker_local.client as tinker
from saving import RANDOM, add_options, connect, first_step, save, training_client
from tinker_local.client import model_input
from transformers import AutoImageProcessor

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 220),
    "yellow": (235, 220, 40),
    "black": (10, 10, 10),
    "white": (245, 245, 245),
}
SIDE = 64


def square(colour: str, rng: np.random.Generator) -> np.ndarray:
    """A square of one colour somewhere on grey noise, uint8 [SIDE, SIDE, 3]."""
    image = rng.integers(96, 160, (SIDE, SIDE, 1), dtype=np.uint8).repeat(3, 2)
    size = int(rng.integers(SIDE // 2, SIDE * 3 // 4))
    top, left = rng.integers(0, SIDE - size, 2)
    image[top : top + size, left : left + size] = COLOURS[colour]
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", required=True, help="a vision-language model of the server")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="1e-4 suits a real model")
    options = parser.parse_args()

    with connect(options) as service:
        client = training_client(service, options, rank=32, seed=0, layout=tinker.PromptLayout("picture-first", SIDE))
        tokenizer = client.get_tokenizer()
        processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)

        def prompt(image: np.ndarray) -> tinker.ModelInput:
            question = "What colour is the square?<|im_end|>\n<|im_start|>assistant\n"
            return model_input("<|im_start|>user\n", image, question, tokenizer=tokenizer, image_processor=processor)

        def datum(image: np.ndarray, colour: str) -> tinker.Datum:
            """Image and prompt positions carry weight 0, the answer's weight 1."""
            before = prompt(image)
            answer = tokenizer.encode(f"{colour}<|im_end|>", add_special_tokens=False)
            masked = before.length - 1
            return tinker.Datum(
                model_input=before.append(tinker.EncodedTextChunk(tokens=answer[:-1])),
                loss_fn_inputs={
                    "target_tokens": np.array([0] * masked + answer, dtype=np.int64),
                    "weights": np.array([0.0] * masked + [1.0] * len(answer), dtype=np.float32),
                },
            )

        rng = np.random.default_rng(0)
        names = list(COLOURS)
        for step in range(first_step(options), options.steps):
            batch = [datum(square(name, rng), name) for name in names * 4]
            gradient = client.forward_backward(batch, "cross_entropy")
            rate = options.learning_rate * (1 - step / options.steps)
            update = client.optim_step(tinker.AdamParams(learning_rate=rate, beta2=0.99, eps=1e-8, grad_clip_norm=1.0))
            loss = gradient.result().metrics["loss:sum"] / len(batch)
            update.result()
            if step % 10 == 0 or step + 1 == options.steps:
                print(f"step {step:3d}   nll per answer {loss:.4f}")
            if options.save_every and (step + 1) % options.save_every == 0 and step + 1 < options.steps:
                save(client, "red-square", step + 1)

        saved = save(client, "red-square")
        print(f"saved as {saved.state} and {saved.sampler}")
        sampler = service.create_sampling_client(model_path=saved.sampler).result()
        greedy = tinker.SamplingParams(max_tokens=6, temperature=0.0)

        def say(images: list[np.ndarray]) -> list[str]:
            futures = [sampler.sample(prompt(image), 1, greedy) for image in images]
            sequences = [future.result().sequences[0] for future in futures]
            return [tokenizer.decode(s.tokens, skip_special_tokens=True).strip() for s in sequences]

        unseen = np.random.default_rng(1)
        asked = names * 5
        right = np.mean([a == b for a, b in zip(asked, say([square(n, unseen) for n in asked]), strict=True)])
        blank = np.full((SIDE, SIDE, 3), 128, dtype=np.uint8)
        control = np.mean([a == b for a, b in zip(names, say([blank] * len(names)), strict=True)])
        print(f"a red square is {say([square('red', unseen)])[0]!r}")
        print(f"unseen squares: {right:.0%} right; blank images: {control:.0%} (chance {1 / len(names):.0%})")
        if right < 0.95 or control > 0.34:
            raise SystemExit("the model did not learn to see colours" if right else RANDOM)


if __name__ == "__main__":
    main()
