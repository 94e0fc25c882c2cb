"""Losses, optimizers and options of samples: what one call can be asked for."""

import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pyrage  # type: ignore[import-untyped]
import pytest
import tinker
import tinker_local.client

from tests.compatibility.world import ADAM, TOKENS, World, datum, differs, prompt, same
from tests.compatibility.write_report import refused, works

N = len(TOKENS) - 1
ADVANTAGES = np.array([0.0, 1.5, -1.0, 0.5, -0.25, 2.0, -1.5], np.float32)
SAMPLED = (ADVANTAGES != 0).astype(np.float32)


def _clip(ratio: Any, low: float, high: float) -> Any:
    return np.clip(ratio, low, high)


FORMULAS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "importance_sampling": lambda p, q, a: -(np.exp(p - q) * a),
    "ppo": lambda p, q, a: -np.minimum(np.exp(p - q) * a, _clip(np.exp(p - q), 0.8, 1.2) * a),
    "cispo": lambda p, q, a: -(_clip(np.exp(p - q), 0.0, 4.0) * p * a),
}
"""Of logprobs, the sampler's logprobs and advantages; defaults as documented."""


def _loss(loss_fn: str, formula: Callable[[Any, Any, Any], Any]) -> None:
    @works(f"TrainingClient.forward_backward(loss_fn={loss_fn!r})", by="its loss, by the formula written in numpy")
    def check(world: World) -> None:
        client = world.training()
        learner = world.learner(client)
        sampler = (learner + np.linspace(-0.4, 0.4, N)).astype(np.float32)
        given = datum(TOKENS, logprobs=sampler, advantages=ADVANTAGES)
        output = client.forward_backward([given], loss_fn).result()  # type: ignore[arg-type]
        assert output.metrics["loss:sum"] == pytest.approx(float(formula(learner, sampler, ADVANTAGES).sum()), rel=1e-3)
        metrics = client.optim_step(ADAM).result().metrics
        assert metrics is not None
        assert metrics["grad_norm"] > 0


for _name, _formula in FORMULAS.items():
    _loss(_name, _formula)


@works("TrainingClient.forward_backward(loss_fn='dro')", by="its loss with beta 0.05, by the formula written in numpy")
def dro(world: World) -> None:
    client = world.training()
    learner = world.learner(client)
    sampler = (learner + np.linspace(-0.4, 0.4, N)).astype(np.float32)
    given = datum(TOKENS, logprobs=sampler, advantages=ADVANTAGES)
    output = client.forward_backward([given], "dro", {"beta": 0.05}).result()
    terms = learner * ADVANTAGES - 0.025 * (learner - sampler) ** 2
    assert output.metrics["loss:sum"] == pytest.approx(-float(terms.sum()), rel=1e-3)


@works("TrainingClient.forward_backward(loss_fn='gspo')", by="its loss with one ratio per datum, written in numpy")
def gspo(world: World) -> None:
    client = world.training()
    learner = world.learner(client)
    sampler = (learner + np.linspace(-0.4, 0.3, N)).astype(np.float32)
    given = datum(TOKENS, logprobs=sampler, advantages=ADVANTAGES, sequence_ratio_mask=SAMPLED)
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    output = client.forward_backward([given], "gspo", config).result()
    ratio = np.exp(((learner - sampler) * SAMPLED).sum() / SAMPLED.sum())
    assert output.metrics["loss:sum"] == pytest.approx(-float((ratio * ADVANTAGES).sum()), rel=1e-3)


@works(
    "TrainingClient.forward_backward(loss_fn='stable_reinforce')",
    by="its loss on recorded samples, by this project's definition (losses.md), written in numpy",
)
def stable_reinforce(world: World) -> None:
    client = world.training()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
    (sequence,) = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=5, stop=[])).result().sequences
    given, count = prompt().to_ints(), len(sequence.tokens)
    before = len(given) - 1
    spans: dict[str, Any] = {
        "model_input_spans": [
            tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=before + 1),
            tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count - 1),
        ],
        "loss_fn_input_spans": [
            tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=before),
            tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count),
        ],
    }
    inputs: Any = {
        "target_tokens": np.array([*given[1:], *sequence.tokens]),
        "logprobs": np.array([0.0] * before + list(sequence.logprobs), np.float32),
        "advantages": np.array([0.0] * before + [2.0] * count, np.float32),
    }
    model_input = tinker.ModelInput.from_ints([*given, *sequence.tokens[:-1]])
    data = [tinker.Datum(model_input=model_input, loss_fn_inputs=inputs, **spans)]
    output = client.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.0}).result()
    on_policy = -2.0 * float(output.loss_fn_outputs[0]["logprobs"].to_numpy()[before:].sum())
    assert output.metrics["loss:sum"] == pytest.approx(on_policy, rel=1e-3)


@refused("ServiceClient.create_lora_training_client(optimizer=dimuon)", saying="dimuon")
def dimuon(world: World) -> None:
    world.service.create_lora_training_client(
        base_model=world.model, rank=4, optimizer=tinker.types.DimuonOptimizerConfig()
    ).result()


@works("ServiceClient.create_sampling_client(record_stability_info=True)", by="an id on each sequence")
def stability(world: World) -> None:
    sampler = world.service.create_sampling_client(base_model=world.model, record_stability_info=True).result()
    (sequence,) = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=1)).result().sequences
    assert sequence.sequence_id


@works(
    "TrainingClient.save_weights_and_get_sampling_client(kind='inflight')",
    by="after another such save, the first client has the trainer's new logprobs, too, and a snapshot keeps its own",
)
def inflight(world: World) -> None:
    client = world.training()
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = client.save_weights_and_get_sampling_client().result()
    before = world.learner(client)
    same(world.sampler(first), before)
    world.steps(client, 1)
    second = client.save_weights_and_get_sampling_client(kind="inflight").result()
    after = world.learner(client)
    differs(after, before)
    for sampler in second, first:  # the second waits for the weights of its save, which both have then
        same(world.sampler(sampler), after)
    same(world.sampler(snapshot), before)
    (sequence,) = first.sample(prompt(), 1, tinker.SamplingParams(max_tokens=3)).result().sequences
    (span,) = tinker_local.client.weights_of_tokens(sequence, base_url=world.url, api_key=world.api_key)
    assert (span.version, span.optimizer_steps, span.tokens) == (2, 3, len(sequence.tokens))


@works(
    "TrainingClient.save_weights_external(age_encryption_recipients=…)",
    by="the files, decrypted with the key, are those of a plain export",
)
def age(world: World) -> None:
    client, identity = world.training(), pyrage.x25519.Identity.generate()
    rest = world.service.create_rest_client()

    def files(recipients: list[str] | None) -> dict[str, bytes]:
        saved = client.save_weights_external(world.name(), age_encryption_recipients=recipients).result()
        urls = rest.get_external_weights_urls(saved.path).result().urls
        return {name: urllib.request.urlopen(url).read() for name, url in urls.items()}

    sealed = files([str(identity.to_public())])
    opened = {name.removesuffix(".age"): pyrage.decrypt(data, [identity]) for name, data in sealed.items()}
    assert sorted(sealed) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    assert opened == files(None)


@works(
    "ServiceClient.create_training_client_from_state(weights_access_token=…)",
    by="a key of the server is one, and the weights are those saved",
)
def access_token(world: World) -> None:
    client = world.training()
    path = client.save_state(world.name()).result().path
    load = world.service.create_training_client_from_state
    same(world.learner(load(path, weights_access_token=world.api_key)), world.learner(client))


def scored(world: World, **options: Any) -> tuple[Any, Any]:
    """A sample of one token with `options`, and the prompt's logprobs."""
    sampler = world.training().save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=3, seed=3)
    output = sampler.sample(prompt(), 1, params, include_prompt_logprobs=True, **options).result()
    return output, np.array(sampler.compute_logprobs(prompt()).result()[1:])


@works("SamplingClient.sample(topk_prompt_logprobs=…)", by="with as many as the vocabulary, each row sums to 1")
def topk_prompt(world: World) -> None:
    output, logprobs = scored(world, topk_prompt_logprobs=512)
    for at, row in enumerate(output.topk_prompt_logprobs[1:]):
        found = dict(row)
        assert np.exp(list(found.values())).sum() == pytest.approx(1.0, abs=1e-3)
        assert found[TOKENS[at + 1]] == pytest.approx(logprobs[at], abs=1e-4)


@works("SamplingClient.sample(topk_sample_logprobs=…)", by="the sampled token's own logprob is among them")
def topk_sample(world: World) -> None:
    output, _ = scored(world, topk_sample_logprobs=512)
    (sequence,) = output.sequences
    for token, logprob, row in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert dict(row)[token] == pytest.approx(logprob, abs=1e-4)


@works("SamplingClient.sample(target_prompt_logprobs=…)", by="the prompt's own tokens have the prompt's logprobs")
def targets(world: World) -> None:
    ids = np.array([[token, -1] for token in TOKENS[1:]], np.int64)
    output, logprobs = scored(world, target_prompt_logprobs=tinker.TensorData.from_numpy(ids))
    found = output.target_prompt_logprobs.to_numpy()
    same(found[:, 0], logprobs)
    assert (found[:, 1] == 0).all()


@works("SamplingClient.sample(prompt_alt_tokens_k=…)", by="drawn ids have the logprobs that targets of them have")
def alternatives(world: World) -> None:
    sampler = world.training().save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=1, seed=3)
    drawn = sampler.sample(prompt(), 1, params, prompt_alt_tokens_k=4).result().prompt_alt_tokens
    assert drawn is not None
    ids = drawn.tokens.to_numpy()
    again = sampler.sample(prompt(), 1, params, target_prompt_logprobs=tinker.TensorData.from_numpy(ids)).result()
    assert again.target_prompt_logprobs is not None
    same(drawn.logprobs.to_numpy(), again.target_prompt_logprobs.to_numpy())
    assert len(np.unique(ids)) > 4


@works(
    "SamplingClient.compute_logprobs(prompt_logprobs_last_n=…)", by="the last ones are the same, earlier ones absent"
)
def last_n(world: World) -> None:
    sampler = world.training().save_weights_and_get_sampling_client().result()
    every = sampler.compute_logprobs(prompt()).result()
    last = sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (len(TOKENS) - 3)
    same(last[-3:], every[-3:])
