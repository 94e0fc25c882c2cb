"""Reinforcement learning with the loop written out: GRPO with `importance_sampling` on a reward that is easy to learn.

    tinker-local serve --model NAME[=PATH]
    python examples/rl_loop.py --model NAME

The reward is the share of sampled tokens that contain a digit. The answers to one prompt form a group and are compared
with its mean. The sampler's logprobs go back to the trainer with exactly the tokens that were sampled.
"""

import argparse
from statistics import mean

import numpy as np
import tinker_local.client as tinker
from saving import RANDOM, add_options, connect, first_step, save, training_client

PROMPTS = ["Count: ", "Numbers, please. ", "What is the code? ", "Tell me a number. "]


def divergence(data: list[tinker.Datum], output: tinker.ForwardBackwardOutput) -> float:
    """KL(sampler, trainer) in nats per token: the mean of r - 1 - log r, with r = p_trainer / p_sampler."""
    log_ratios = []
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        log_ratios.append((result["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy())[sampled])
    log_ratio = np.concatenate(log_ratios).astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="2e-5 suits a real model")
    options = parser.parse_args()

    with connect(options) as service:
        client = training_client(service, options, rank=16, seed=0)
        tokenizer = client.get_tokenizer()
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]

        def reward(tokens: list[int]) -> float:
            return mean(any(c.isdigit() for c in tokenizer.decode([token])) for token in tokens)

        def datum(prompt: list[int], sequence: tinker.SampledSequence, advantage: float) -> tinker.Datum:
            """Prompt positions carry advantage 0; sampled ones their advantage and the sampler's logprobs."""
            tokens, before = prompt + list(sequence.tokens), len(prompt) - 1
            sampled = len(sequence.tokens)
            return tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": np.array([0.0] * before + list(sequence.logprobs), dtype=np.float32),
                    "advantages": np.array([0.0] * before + [advantage] * sampled, dtype=np.float32),
                },
            )

        history = []
        for step in range(first_step(options), options.steps):
            sampler = client.save_weights_and_get_sampling_client().result()
            params = tinker.SamplingParams(max_tokens=options.max_tokens, seed=step)
            futures = [
                sampler.sample(tinker.ModelInput.from_ints(prompt), options.group_size, params) for prompt in prompts
            ]
            data, rewards = [], []
            for prompt, future in zip(prompts, futures, strict=True):
                sequences = future.result().sequences
                group = [reward(list(s.tokens)) for s in sequences]
                rewards += group
                baseline = mean(group)
                data += [
                    datum(prompt, s, (r - baseline) / options.group_size)
                    for s, r in zip(sequences, group, strict=True)
                    if r != baseline
                ]
            history.append(mean(rewards))
            print(f"step {step:3d}   reward {history[-1]:.3f}")
            if data:  # otherwise all rewards of each group are equal: there is nothing to learn
                gradient = client.forward_backward(data, "importance_sampling")
                update = client.optim_step(tinker.AdamParams(learning_rate=options.learning_rate, beta2=0.95, eps=1e-8))
                if step == 0:
                    print(f"KL(sampler, trainer) before training: {divergence(data, gradient.result()):.1e}")
                gradient.result()
                update.result()
            if options.save_every and (step + 1) % options.save_every == 0 and step + 1 < options.steps:
                save(client, "rl-loop", step + 1)
        saved = save(client, "rl-loop")
        print(f"saved as {saved.state} and {saved.sampler}")
        first, last = (mean(part) if part else 0.0 for part in (history[:3], history[-3:]))
        print(f"reward {first:.3f} in the first three steps, {last:.3f} in the last three")
        if last < first + 0.2:
            raise SystemExit("the reward did not rise" if last else RANDOM)


if __name__ == "__main__":
    main()
