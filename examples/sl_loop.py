"""Supervised fine-tuning of a language model on questions and answers, with the loop written out.

    tinker-local serve --model NAME[=PATH]
    python examples/sl_loop.py --model NAME

Takes any language model with a chat template, also a mixture of experts: the same adapter then trains the experts.
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

        def chat(question: str, answer: str) -> tuple[list[int], list[int]]:
            """Prompt and answer in the model's chat format; the answer's last token ends the turn."""
            asked = [{"role": "user", "content": question}]
            answered = [*asked, {"role": "assistant", "content": answer}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            text = tokenizer.apply_chat_template(answered, tokenize=False).removeprefix(prompt).rstrip()
            before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
            return before, after

        def datum(before: list[int], after: list[int]) -> tinker.Datum:
            """Position i of the input predicts token i + 1 of the text; only the answer has weight."""
            tokens = before + after
            weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
            return tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.array(weights, dtype=np.float32)},
            )

        def answers(sampler: tinker.SamplingClient) -> list[list[int]]:
            """What the model says to each question at temperature 0."""
            futures = []
            for before, after in chats:
                greedy = tinker.SamplingParams(max_tokens=len(after) + 2, temperature=0.0, stop=[after[-1]])
                futures.append(sampler.sample(tinker.ModelInput.from_ints(before), 1, greedy))
            return [list(future.result().sequences[0].tokens) for future in futures]

        def right(said: list[list[int]]) -> int:
            return sum(tokens == after for tokens, (_, after) in zip(said, chats, strict=True))

        chats = [chat(question, answer) for question, answer in PAIRS]
        base = right(answers(service.create_sampling_client(base_model=options.model).result()))
        print(f"before training {base} of {len(PAIRS)} right")
        data = [datum(before, after) for before, after in chats]
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
        said = answers(sampler)
        for (question, _), tokens in zip(PAIRS, said, strict=True):
            print(f"{question:34s} {tokenizer.decode(tokens, skip_special_tokens=True).strip()!r}")
        print(f"{right(said)} of {len(PAIRS)} right; saved as {saved.state} and {saved.sampler}")
        if right(said) < len(PAIRS):
            raise SystemExit("the model did not learn its answers" if right(said) else RANDOM)


if __name__ == "__main__":
    main()
