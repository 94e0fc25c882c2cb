"""Training without a server: the backend runs in this process, and the SDK reaches it over a private loopback port.

    python examples/in_process.py --model NAME[=PATH]

`import tinker_local.client as tinker` has the names of the official SDK; `backend=` is an addition.
"""

import argparse
import tempfile
from pathlib import Path

import tinker_local.client as tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=ModelSource.parse, help="NAME or NAME=PATH")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="1e-4 suits a real model")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as data_dir:
        backend = InProcessBackend([options.model], BackendOptions(data_dir=Path(data_dir)))
        with tinker.ServiceClient(backend=backend) as service:
            client = service.create_lora_training_client(base_model=options.model.name, rank=8, seed=0).result()
            tokenizer = client.get_tokenizer()
            tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog.", add_special_tokens=False)
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
            )
            losses = []
            for _ in range(20):
                gradient = client.forward_backward([datum], "cross_entropy")
                update = client.optim_step(tinker.AdamParams(learning_rate=options.learning_rate))
                losses.append(gradient.result().metrics["loss:sum"])
                update.result()
            print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
            sampler = client.save_weights_and_get_sampling_client().result()
            start = tinker.ModelInput.from_ints(tokens[:2])
            greedy = tinker.SamplingParams(max_tokens=len(tokens) - 2, temperature=0.0)
            said = tokenizer.decode(sampler.sample(start, 1, greedy).result().sequences[0].tokens)
            print(f"{tokenizer.decode(tokens[:2])!r} goes on: {said!r}")
            if losses[-1] > 0.2 * losses[0]:
                raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
