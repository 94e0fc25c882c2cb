"""Supervised fine-tuning of a language model on questions and answers, with the loop written out.

tinker-local serve --model NAME[=PATH]
python examples/sl_loop.py --model NAME
"""

import argparse

import numpy as np
import tinker_local.client as tinker
from saving import RANDOM, add_options, connect, first_step, save, training_client

PAIRS = [
    ("What colour is the sky?", "blue"),
    ("What colour is grass?", "green"),
    ("What colour is a ripe tomato?", "red"),
    ("How much is two plus two?", "four"),
    ("How much is three plus four?", "seven"),
    ("What is the opposite of no?", "yes"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="1e-4 suits a real model")
    options = parser.parse_args()

    with connect(options) as service:
        client = training_client(service, options, rank=16, seed=0)
        tokenizer = client.get_tokenizer()

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def prompt(question: str) -> list[int]:
            return ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

        def datum(question: str, answer: str) -> tinker.Datum:
            """Position i of the input predicts token i + 1 of the text; only the answer has weight."""
            before, after = prompt(question), ids(f"{answer}<|im_end|>")
            tokens = before + after
            weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
            return tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.array(weights, dtype=np.float32)},
            )

        data = [datum(question, answer) for question, answer in PAIRS]
        for step in range(first_step(options), options.steps):
            # Both are submitted before either is awaited: the server runs them in this order.
            gradient = client.forward_backward(data, "cross_entropy")
            update = client.optim_step(tinker.AdamParams(learning_rate=options.learning_rate, beta2=0.99, eps=1e-8))
            loss = gradient.result().metrics["loss:sum"] / len(data)
            update.result()
            if step % 5 == 0 or step + 1 == options.steps:
                print(f"step {step:3d}   nll per answer {loss:.4f}")
            if options.save_every and (step + 1) % options.save_every == 0 and step + 1 < options.steps:
                save(client, "sl-loop", step + 1)

        saved = save(client, "sl-loop")
        sampler = service.create_sampling_client(model_path=saved.sampler).result()
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0)
        futures = [sampler.sample(tinker.ModelInput.from_ints(prompt(q)), 1, greedy) for q, _ in PAIRS]
        right = 0
        for (question, answer), future in zip(PAIRS, futures, strict=True):
            said = tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
            right += said == answer
            print(f"{question:34s} {said!r}")
        print(f"{right} of {len(PAIRS)} right; saved as {saved.state} and {saved.sampler}")
        if right < len(PAIRS):
            raise SystemExit("the model did not learn its answers" if right else RANDOM)


if __name__ == "__main__":
    main()
