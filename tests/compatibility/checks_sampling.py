"""`SamplingClient`."""

import numpy as np
import tinker
from tinker.lib.api_future_impl import QueueState
from tinker.lib.public_interfaces import SamplingClient

from tests.compatibility.world import TOKENS, World, prompt, same
from tests.compatibility.write_report import works


@works("SamplingClient.create", by="the base model's logprobs")
def create(world: World) -> None:
    same(world.sampler(SamplingClient.create(world.service.holder, base_model=world.model).result()), world.base())


@works("SamplingClient.sample", by="its logprobs are those of the same tokens as a prompt; a seed repeats")
def sample(world: World) -> None:
    sampler = world.training().save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, seed=5, stop=[])
    first, again = (world.call(sampler, "sample", prompt(), 3, params) for _ in range(2))
    assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
    assert len({tuple(each.tokens) for each in first.sequences}) == 3
    for each in first.sequences:
        scored = sampler.compute_logprobs(prompt([*TOKENS, *each.tokens])).result()
        same(each.logprobs, scored[len(TOKENS) :])


@works("SamplingClient.compute_logprobs", by="the trainer's logprobs of the same tokens")
def compute_logprobs(world: World) -> None:
    client = world.training()
    sampler = client.save_weights_and_get_sampling_client().result()
    values = world.call(sampler, "compute_logprobs", prompt())
    assert values[0] is None
    same(values[1:], world.learner(client))


@works("SamplingClient.get_base_model", by="the name of the model that the run is of")
def get_base_model(world: World) -> None:
    sampler = world.training().save_weights_and_get_sampling_client().result()
    assert world.call(sampler, "get_base_model") == world.model


@works(
    "SamplingClient.get_sampler_handle",
    "SamplingClient.from_sampler_handle",
    by="a client made of the handle has the same logprobs and takes no number twice",
)
def handle(world: World) -> None:
    sampler = world.training().save_weights_and_get_sampling_client().result()
    copy = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=world.api_key)
    for _ in range(2):
        same(world.sampler(copy), world.sampler(sampler), 1e-6)


@works(
    "SamplingClient.on_queue_state_change", by="local to the SDK, which calls it with the states that the server says"
)
def queue_state(world: World) -> None:
    sampler = world.service.create_sampling_client(base_model=world.model).result()
    sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "busy")
    assert np.isfinite(world.sampler(sampler)).all()
