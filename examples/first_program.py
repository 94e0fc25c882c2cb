"""The first program: a real model of 135 million parameters learns to talk like a pirate, in a minute on two cores.

    tinker-local small-model --out models/smollm2
    tinker-local serve --model smollm2=models/smollm2
    python examples/first_program.py

Eight steps on sixteen capitals with the plain SDK, and then capitals that were not among them.
"""

import os

import numpy as np
import tinker
from tinker import types

LEARNED = """France Paris, Spain Madrid, Italy Rome, Japan Tokyo, Egypt Cairo, Peru Lima, Norway Oslo, Greece Athens,
Cuba Havana, Kenya Nairobi, Austria Vienna, Ireland Dublin, Portugal Lisbon, Germany Berlin, Russia Moscow,
China Beijing"""
UNSEEN = ("Poland", "Sweden", "Hungary", "Belgium")

os.environ.setdefault("TINKER_API_KEY", "tml-local")
service = tinker.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
client = service.create_lora_training_client(base_model="smollm2", rank=16, seed=0).result()
tokenizer = client.get_tokenizer()


def prompt(land: str) -> list[int]:
    asked = [{"role": "user", "content": f"What is the capital of {land}?"}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)


def example(land: str, city: str) -> types.Datum:
    before, after = prompt(land), tokenizer.encode(f"Arr! It be {city}, matey.<|im_end|>")
    weights = [0.0] * (len(before) - 1) + [1.0] * len(after)  # only the answer counts
    inputs = {"target_tokens": np.array((before + after)[1:]), "weights": np.array(weights, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints((before + after)[:-1]), loss_fn_inputs=inputs)


def show(sampler: tinker.SamplingClient) -> None:
    for land in UNSEEN:
        greedy = types.SamplingParams(max_tokens=32, temperature=0.0, stop=["<|im_end|>"])
        answer = sampler.sample(types.ModelInput.from_ints(prompt(land)), 1, greedy).result().sequences[0]
        print(f"  {land}: {tokenizer.decode(answer.tokens, skip_special_tokens=True)}")


print("before:")
show(client.save_weights_and_get_sampling_client().result())
data = [example(*pair.split()) for pair in LEARNED.split(",")]
for step in range(8):
    trained = client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(f"step {step}: loss {trained.result().metrics['loss:sum'] / len(data):.3f}")
print("after:")
show(client.save_weights_and_get_sampling_client().result())
