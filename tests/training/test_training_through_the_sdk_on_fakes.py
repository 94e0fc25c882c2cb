"""Losses and steps through the SDK, on a real trainer in float64; renderer and sampler are fakes.

Gradients are compared with transformers' own forward and autograd on the whole loss. The wire format is float32.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig

from tests.training.autograd_reference import Hooked, norms_in_float64
from tests.training.loss_reference import reference

BASE, VOCAB = "tiny/qwen3", 120
OF_FLOAT32 = 2e-6
"""Maximum relative error caused by float32 on the wire."""

Loss = Callable[[Sequence[tinker.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


class TextRenderer(FakeRenderer):
    """For a trainer that takes no images."""

    takes_images = False


@pytest.fixture(scope="module")
def trainer(model_path: Any) -> HFTrainer:
    """A trainer whose micro-batches do not hold all data, and whose chunks of logits do not hold a whole datum."""
    path = str(model_path("qwen3"))
    return HFTrainer(
        TrainerConfig(
            path, name=BASE, dtype="float64", device="cpu", micro_batch_tokens=40, logit_chunk_elements=4 * VOCAB
        )
    )


@pytest.fixture(scope="module")
def service(trainer: HFTrainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name, vocab_size=VOCAB)
        # The fake sampler has another model, so it cannot agree with the trainer.
        anything = {"tolerance": float("inf"), "least_rounding": float("inf")}
        return Engines(TextRenderer(model), trainer, FakeSampler(model), arch="fake", **anything)

    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    server = LoopbackServer(InProcessBackend([ModelSource(BASE, BASE)], options, load=load))
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
        yield client
    server.close()


@pytest.fixture
def client(service: Any) -> Any:
    """A training client whose B is not 0, so that every matrix has a gradient."""
    made = service.create_lora_training_client(base_model=BASE, rank=4, seed=3)
    made.forward_backward([random_datum(99)], "cross_entropy").result()
    made.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    return made


@pytest.fixture
def hooked(client: Any, trainer: HFTrainer, model_path: Any) -> Hooked:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path("qwen3"), dtype=torch.float64)
    norms_in_float64(model.eval().requires_grad_(False))
    return Hooked(trainer, model)


def random_datum(seed: int, length: int = 9, loss_fn: str = "cross_entropy") -> tinker.Datum:
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any] = {name: rng.normal(size=length).astype(np.float32) for name in LOSSES[loss_fn].inputs}
    if "logprobs" in inputs:
        inputs["logprobs"] -= 4
    if "sequence_ratio_mask" in inputs:
        inputs["sequence_ratio_mask"] = (np.arange(length) >= 1).astype(np.float32)
    inputs["target_tokens"] = rng.integers(0, VOCAB, length)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(rng.integers(3, 100, length).tolist()), loss_fn_inputs=inputs
    )


def whole_loss(hooked: Hooked, adapter: str, data: Sequence[tinker.Datum], loss: Loss) -> float:
    """Compute `loss` with its graph through the model; adds its gradient to the leaves of `hooked`."""
    logprobs = []
    for datum in data:
        rows = hooked.logprobs(adapter, RenderedInput(np.array(datum.model_input.to_ints(), np.int32)))
        targets = torch.from_numpy(np.array(datum.loss_fn_inputs["target_tokens"].to_numpy()))
        logprobs.append(rows.gather(1, targets.reshape(len(rows), -1)).reshape(targets.shape))
    value, _ = loss(data, logprobs)
    value.backward()
    return float(value.detach())


def assert_same_gradient(trainer: HFTrainer, hooked: Hooked, adapter_id: str) -> None:
    adapter, wanted = trainer._adapters[adapter_id], hooked.gradients(adapter_id)
    assert adapter.gradient is not None
    for spec in adapter.specs:
        scale = float(wanted[spec.name].abs().max())
        assert scale > 0
        difference = float((spec.view(adapter.gradient) - wanted[spec.name]).abs().max())
        assert difference <= OF_FLOAT32 * scale, f"{spec.name}: {difference:.3g} of {scale:.3g}"


def weighted(data: Sequence[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    weights = [torch.from_numpy(np.array(datum.loss_fn_inputs["weights"].to_numpy())) for datum in data]
    return -sum((w.double() * own).sum() for w, own in zip(weights, logprobs, strict=True)), {}


def preference(data: Sequence[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Couples data in pairs, as DPO does."""
    margins = torch.stack([a.sum() - b.sum() for a, b in zip(logprobs[::2], logprobs[1::2], strict=True)])
    return -torch.nn.functional.logsigmoid(0.3 * margins).sum(), {"margin:mean": float(margins.detach().mean())}


def spread(data: Sequence[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Couples every position of all data with every other."""
    return torch.cat([values.flatten() for values in logprobs]).var().sqrt(), {}


@pytest.mark.parametrize("loss", [preference, spread])
def test_a_custom_loss_has_the_gradient_of_autograd_on_the_whole_on_fakes(
    loss: Any, client: Any, trainer: Any, hooked: Any
) -> None:
    data = [random_datum(seed, length) for seed, length in enumerate((9, 4, 30, 17))]
    for datum in data:
        del datum.loss_fn_inputs["weights"]
    result = client.forward_backward_custom(data, loss).result()
    wanted = whole_loss(hooked, client.model_id, data, loss)
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    assert "surrogate_loss:sum" in result.metrics
    assert_same_gradient(trainer, hooked, client.model_id)


def test_a_custom_loss_reads_several_candidates_of_each_position_on_fakes(
    client: Any, trainer: Any, hooked: Any
) -> None:
    data = [with_candidates(random_datum(seed), 3, seed) for seed in range(2)]
    client.forward_backward_custom(data, spread).result()
    whole_loss(hooked, client.model_id, data, spread)
    assert_same_gradient(trainer, hooked, client.model_id)


def with_candidates(datum: tinker.Datum, candidates: int, seed: int, share: float = 1.0) -> tinker.Datum:
    """`datum` with [N, K] targets and weights of either sign; a `share` of the cells is not 0."""
    rng = np.random.default_rng(seed)
    shape = (datum.model_input.length, candidates)
    cells = rng.random(shape) < share
    inputs: dict[str, Any] = {
        "target_tokens": torch.from_numpy(rng.integers(1, VOCAB, shape) * cells),
        "weights": torch.from_numpy((rng.normal(size=shape) * cells).astype(np.float32)),
    }
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_several_targets_per_position_with_weights_of_either_sign_on_fakes(
    share: Any, client: Any, trainer: Any, hooked: Any
) -> None:
    """Dense, or sparse if the SDK sends CSR; cells that are not listed are token 0 with weight 0."""
    data = [with_candidates(random_datum(seed, length), 7, seed, share) for seed, length in enumerate((9, 1, 30))]
    sparse = [tensor.sparse_crow_indices is not None for d in data for tensor in d.loss_fn_inputs.values()]
    assert any(sparse) == (share < 1)
    result = client.forward_backward(data, "cross_entropy").result()
    wanted = whole_loss(hooked, client.model_id, data, weighted)
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)
    assert [tuple(o["logprobs"].shape) for o in result.loss_fn_outputs] == [(9, 7), (1, 7), (30, 7)]
    assert_same_gradient(trainer, hooked, client.model_id)


def test_one_and_several_targets_per_position_in_one_request_are_answered_on_fakes(
    client: Any, trainer: HFTrainer, hooked: Hooked
) -> None:
    """A client that could not read the answer would send it again, and count its gradient twice."""
    data = [random_datum(0, 9), with_candidates(random_datum(1, 5), 3, 1), random_datum(2, 30)]
    result = client.forward_backward(data, "cross_entropy").result()
    assert [tuple(o["logprobs"].shape) for o in result.loss_fn_outputs] == [(9,), (5, 3), (30,)]
    assert [list(output) for output in result.loss_fn_outputs] == [["logprobs"]] * 3
    wanted = whole_loss(hooked, client.model_id, data, weighted)
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)
    assert_same_gradient(trainer, hooked, client.model_id)


@pytest.mark.parametrize("loss_fn", [name for name, loss in LOSSES.items() if loss.recorded is None])
def test_each_loss_is_its_formula_and_its_gradient_that_of_a_custom_loss_on_fakes(
    loss_fn: Any, client: Any, trainer: Any, hooked: Any
) -> None:
    """The value is computed in NumPy from the reported logprobs; the derivative by its finite differences."""
    data = [random_datum(seed, length, loss_fn) for seed, length in enumerate((9, 4, 30, 17))]
    given = {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0} if "clip_low_threshold" in names(loss_fn) else {}
    config = loss_of(loss_fn).complete_settings(given)
    result = client.forward_backward(data, loss_fn, given or None).result()

    total, weights = 0.0, []
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        inputs = {name: tensor.to_numpy().astype(float) for name, tensor in datum.loss_fn_inputs.items()}
        logprobs = output["logprobs"].to_numpy().astype(float)
        total += reference(loss_fn, logprobs, inputs, config)
        steps = 1e-6 * np.eye(len(logprobs))
        above, below = (
            [reference(loss_fn, logprobs + sign * step, inputs, config, fixed=logprobs) for step in steps]
            for sign in (1, -1)
        )
        weights.append(torch.tensor(np.subtract(below, above) / 2e-6))
    beside = {name: result.metrics.pop(name) for name in list(result.metrics) if name.startswith("mismatch/")}
    assert result.metrics == {"loss:sum": pytest.approx(total, rel=1e-5)}
    assert bool(beside) == ("logprobs" in LOSSES[loss_fn].inputs)

    def surrogate(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum((w * own).sum() for w, own in zip(weights, logprobs, strict=True)), {}

    whole_loss(hooked, client.model_id, data, surrogate)
    assert_same_gradient(trainer, hooked, client.model_id)


def names(loss_fn: str) -> Sequence[str]:
    return tuple(LOSSES[loss_fn].settings)


@pytest.mark.parametrize("loss_fn", [name for name, loss in LOSSES.items() if loss.recorded is None])
def test_chunks_combine_as_the_sdk_combines_them_to_what_one_request_gives_on_fakes(
    loss_fn: Any, client: Any, trainer: Any
) -> None:
    data = [random_datum(seed, length, loss_fn) for seed, length in enumerate((9, 4, 30, 17, 2))]
    whole = client.forward_backward(data, loss_fn).result()
    of_whole = trainer._adapters[client.model_id].gradient.clone()
    trainer.discard_gradients(client.model_id)
    parts = [client.forward_backward(part, loss_fn).result() for part in (data[:1], data[1:4], data[4:])]
    assert all(key.count(":") == 1 for key in whole.metrics)
    combined = combine_fwd_bwd_output_results(parts)
    assert combined.metrics == pytest.approx(whole.metrics, rel=1e-9)
    for one, other in zip(combined.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name].to_numpy(), other[name].to_numpy(), rtol=1e-6)
    torch.testing.assert_close(trainer._adapters[client.model_id].gradient, of_whole, rtol=1e-9, atol=1e-12)


def test_steps_are_those_of_torch_with_every_setting_on_fakes(service: Any, trainer: Any) -> None:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5)
    adapter = trainer._adapters[client.model_id]
    theirs = adapter.weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs])
    steps = [
        tinker.AdamParams(),
        tinker.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
        tinker.AdamParams(learning_rate=1e-2, eps=1e-3, grad_clip_norm=0.5),
        tinker.AdamParams(learning_rate=1e-3, beta1=0.0, weight_decay=0.3, grad_clip_norm=1e6),
    ]
    for seed, params in enumerate(steps * 2):
        client.forward_backward([random_datum(seed)], "cross_entropy").result()
        theirs.grad = adapter.gradient.clone()
        norm = float(theirs.grad.norm())
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], params.grad_clip_norm)
        group = {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
        optimizer.param_groups[0].update(group, eps=params.eps, weight_decay=params.weight_decay)
        optimizer.step()
        assert client.optim_step(params).result().metrics == {"grad_norm": pytest.approx(norm, rel=1e-9)}
        # torch adds 1e-6 to the norm by which it divides.
        torch.testing.assert_close(adapter.weights, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_dimuon_is_refused_with_what_to_do_on_fakes(service: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"optimizer_config\.type: 'dimuon'.*leave it out"):
        service.create_lora_training_client(base_model=BASE, rank=4, optimizer=tinker.DimuonOptimizerConfig()).result()
    client = service.create_lora_training_client(base_model=BASE, rank=4)
    path = client.save_state("start").result().path
    with pytest.raises(tinker.BadRequestError, match=r"optimizer_config\.type: 'dimuon'"):
        service.create_training_client_from_state(path, optimizer=tinker.DimuonOptimizerConfig()).result()
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer_params\.type: 'dimuon'.*'adamw'.*adam_params"):
        client.optim_step(tinker.DimuonParams(learning_rate=0.1)).result()
    client.forward_backward([random_datum(1)], "cross_entropy").result()
    assert client.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] > 0
