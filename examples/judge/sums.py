"""Teaches a model sums, of which `sums.jsonl` keeps 100 to judge it by; docs/judge.md goes on from here.

    tinker-local serve --model NAME[=PATH]
    python examples/judge/sums.py --model NAME

Supervised fine-tuning in the model's chat format. The last line is the path of the trained sampler.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 100


def pairs() -> list[tuple[int, int]]:
    """All sums of two numbers from 2 to 49, in an order that never changes."""
    found = [(first, second) for first in range(2, 50) for second in range(2, 50)]
    random.Random(44).shuffle(found)
    return found


def held_out() -> Iterator[dict[str, Any]]:
    """The rows of `sums.jsonl`: a question, its answer, and four choices, of which `label` counts the right one."""
    for first, second in pairs()[:HELD_OUT]:
        draw, right = random.Random(100 * first + second), first + second
        choices = [right, *draw.sample([right - 10, right - 2, right - 1, right + 1, right + 2, right + 10], 3)]
        draw.shuffle(choices)
        yield {
            "question": f"What is {first} + {second}?",
            "answer": str(right),
            "choices": [str(each) for each in choices],
            "label": choices.index(right),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the rows that are held out, and train nothing"
    )
    options = parser.parse_args()
    if options.write:
        options.write.write_text("".join(json.dumps(row) + "\n" for row in held_out()))
        return
    import tinker_local.client as tinker  # takes seconds

    learned, draw = pairs()[HELD_OUT:], random.Random(1)
    with tinker.ServiceClient(base_url=options.base_url) as service:
        client = service.create_lora_training_client(base_model=options.model, rank=16, seed=0).result()
        tokenizer = client.get_tokenizer()

        def datum(first: int, second: int) -> tinker.Datum:
            """The answer alone has weight, with the token that ends the turn."""
            asked = [{"role": "user", "content": f"What is {first} + {second}?"}]
            answered = [*asked, {"role": "assistant", "content": str(first + second)}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            text = tokenizer.apply_chat_template(answered, tokenize=False).removeprefix(prompt).rstrip()
            before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
            tokens = before + after
            weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
            return tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
            )

        for step in range(options.steps):
            data = [datum(*pair) for pair in draw.choices(learned, k=options.batch_size)]
            loss = client.forward_backward(data, "cross_entropy")
            rate = options.learning_rate * (1 - step / options.steps)
            client.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            if step % 10 == 0 or step == options.steps - 1:
                tokens = sum(sum(each.loss_fn_inputs["weights"].data) for each in data)
                print(f"step {step}: loss {loss.result().metrics['loss:sum'] / tokens:.4f} a token", flush=True)
        print(client.save_weights_for_sampler("sums").result().path)


if __name__ == "__main__":
    main()
