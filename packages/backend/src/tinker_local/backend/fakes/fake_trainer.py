"""`FakeTrainer`: LoRA training of the bigram model with exact gradients."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import (
    LORA_ALPHA,
    WEIGHTS_VECTOR,
    AdapterDType,
    AdapterLayout,
    AdapterState,
    tensor_name,
)
from tinker_local.backend.adapters.adapter_tensors import bfloat16_bits
from tinker_local.backend.fakes import numpy_as_torch
from tinker_local.backend.fakes.fake_memory import FakeMemory
from tinker_local.backend.fakes.fake_model import (
    FakeModel,
    FakeTower,
    Features,
    Float64Array,
    LoraMatrices,
    log_softmax,
    parse_tensor_name,
)
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.losses.loss import Loss, Terms, any_of, check_train_datum
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.optimizers.optimizer import Limits, Optimizer, OptimizerState
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers, Routes
from tinker_local.backend.training.trainer import Replayed, Seat, TrainDatum, TrainResult, TrainWork
from tinker_local.types import ApiError, InvalidRequestError, LoraConfig, NotFoundError
from tinker_local.types.base import Frozen

Gradients = dict[str, Float64Array]

_LARGEST = float(np.finfo(np.float32).max)


def _round(array: Float64Array) -> Float64Array:
    """Round to float32."""
    return array.astype(np.float32).astype(np.float64)


class _Adapter:
    """The matrices are views of one flat vector, which the optimizer updates; so are those of the optimizer's state."""

    def __init__(self, config: LoraConfig, weights: Mapping[str, LoraMatrices], optimizer: Optimizer) -> None:
        self.config = config
        self.optimizer = optimizer
        self._shapes = {
            tensor_name(module, factor): array.shape
            for module, matrices in weights.items()
            for factor, array in (("A", matrices.a), ("B", matrices.b))
        }
        self.flat = np.concatenate(
            [array.ravel() for matrices in weights.values() for array in (matrices.a, matrices.b)]
        )
        self.state = optimizer.new_state(numpy_as_torch, self.flat)
        self.gradients: Gradients = {}
        tensors = self.tensors()
        self.weights = {
            module: LoraMatrices(tensors[tensor_name(module, "A")], tensors[tensor_name(module, "B")])
            for module in weights
        }

    def tensors(self, flat: Float64Array | None = None) -> dict[str, Float64Array]:
        """The matrices in `flat` (default: the weights), by PEFT's names."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = np.split(self.flat if flat is None else flat, np.cumsum(sizes)[:-1])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def state_tensors(self) -> dict[str, Float64Array]:
        """The optimizer's state, as `AdapterState.optimizer` names it."""
        return {
            f"{state}.{name}": tensor
            for state, flat in self.state.tensors.items()
            for name, tensor in self.tensors(flat).items()
        }

    def places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """As `AdapterLayout.places`."""
        starts = itertools.accumulate((math.prod(shape) for shape in self._shapes.values()), initial=0)
        return {
            name: (start, (shape[0], shape[1]))
            for start, (name, shape) in zip(starts, self._shapes.items(), strict=False)
        }

    def vector(self, name: str) -> Float64Array:
        """The weights, or a state of the optimizer, [n]."""
        flat: Float64Array = self.flat if name == WEIGHTS_VECTOR else self.state.tensors[name]
        return flat


class FakeTrainer:
    """Implements `training.trainer.Trainer` on a `FakeModel`.

    Targets outside the vocabulary are allowed where they are masked; their logprob is reported as 0. Without `memory`
    everything fits.
    """

    def __init__(
        self, model: FakeModel, memory: FakeMemory | None = None, *, module_gradient_norms: bool = False
    ) -> None:
        self._model = model
        self._memory = memory
        self._module_gradient_norms = module_gradient_norms
        self._adapters: dict[str, _Adapter] = {}
        self._tower = FakeTower()
        self.vocab_size = model.vocab_size
        self.max_context_length = model.max_context_length
        self.trains = "a fake: adapters are square matrices that change the logits of a bigram model"
        self.routed: RoutedLayers | None = None

    @property
    def images_encoded(self) -> int:
        """How many images a vision tower would have encoded."""
        return self._tower.images_encoded

    @property
    def cached_bytes(self) -> int:
        """None: it has no device."""
        return 0

    def check_weights(self) -> tuple[int, str]:
        """None: it shares nothing."""
        return 0, ""

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """float64 weights, gradients and optimizer state."""
        per_module = config.rank * (self._model.num_features + self._model.vocab_size)
        return len(self._model.modules(config)) * per_module * OPTIMIZERS[optimizer].bytes_per_parameter(8)

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        """A is uniform in [-1, 1) (features are one-hot), B is 0."""
        if adapter_id in self._adapters:
            raise ValueError(f"adapter {adapter_id} exists")
        if config.rank < 1:
            raise InvalidRequestError(f"lora_config.rank: must be at least 1, not {config.rank}")
        # SeedSequence takes no negative numbers; any integer is a seed here.
        seed = None if config.seed is None else [abs(config.seed), int(config.seed < 0)]
        rng = np.random.default_rng(seed)
        weights = {
            module: LoraMatrices(
                a=_round(rng.uniform(-1, 1, (config.rank, self._model.num_features))),
                b=np.zeros((self._model.vocab_size, config.rank)),
            )
            for module in self._model.modules(config)
        }
        self._adapters[adapter_id] = _Adapter(config, weights, OPTIMIZERS[optimizer])

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Create or replace; a replaced adapter loses its pending gradient."""
        if state.base_model != self._model.name:
            raise InvalidRequestError(f"the adapter belongs to {state.base_model}, not to {self._model.name}")
        weights = self._model.read_adapter(state.tensors, state.lora_config.rank)
        if set(weights) != set(self._model.modules(state.lora_config)):
            raise InvalidRequestError(f"the adapter has {sorted(weights)}, its lora_config asks for others")
        adapter = _Adapter(state.lora_config, weights, OPTIMIZERS[state.optimizer_type])
        if state.optimizer is not None:
            own = adapter.state_tensors()
            if state.optimizer.keys() != own.keys():
                raise InvalidRequestError("the optimizer's state does not have the names of the adapter's tensors")
            for name, tensor in own.items():
                tensor[...] = state.optimizer[name]
            adapter.state.step = state.step
        self._adapters[adapter_id] = adapter

    def remove_adapter(self, adapter_id: str) -> None:
        """Free the adapter; unknown ids are ignored."""
        self._adapters.pop(adapter_id, None)

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """One result per request; a request is all or nothing."""
        results: list[TrainResult | ApiError] = []
        for request in work:
            try:
                results.append(self._run(request))
            except ApiError as error:
                results.append(error)
        return results

    def _run(self, work: TrainWork) -> TrainResult:
        adapter = self._adapter(work.adapter_id)
        loss = loss_of(work.loss_fn)
        settings = loss.complete_settings(work.loss_config)
        gradients = {name: np.zeros_like(tensor) for name, tensor in adapter.tensors().items()}
        outputs = []
        total = 0.0
        for index, datum in enumerate(work.data):
            logprobs, values = self._datum(adapter, datum, loss, settings, f"data[{index}]", gradients)
            outputs.append({"logprobs": logprobs})
            if loss.gives_elementwise(work.data):
                outputs[-1]["elementwise_loss"] = values.astype(np.float32)
            total += float(values.sum())
        if work.backward:
            for name, gradient in gradients.items():
                adapter.gradients[name] = adapter.gradients.get(name, 0.0) + gradient
        return TrainResult(outputs=outputs, metrics=loss.metrics(total))

    def _datum(
        self,
        adapter: _Adapter,
        datum: TrainDatum,
        loss: Loss,
        settings: Mapping[str, float],
        where: str,
        gradients: Gradients,
    ) -> tuple[npt.NDArray[np.float32], Float64Array]:
        """Logprobs of one datum, and the loss of each; its gradient is added to `gradients`."""
        if datum.input.length > self.max_context_length:
            raise InvalidRequestError(
                f"{where}.model_input: {datum.input.length} positions, the limit is {self.max_context_length}"
            )
        check_train_datum(datum, loss, where)
        targets_n_k = datum.target_tokens.reshape(datum.input.length, -1)
        known = (targets_n_k >= 0) & (targets_n_k < self.vocab_size)
        wrong = ~known & any_of(datum.loss_inputs, loss.target_inputs).reshape(targets_n_k.shape)
        if wrong.any():
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.target_tokens: id {targets_n_k[wrong][0]} is outside the vocabulary of "
                f"{self.vocab_size} where it is not masked"
            )
        if self._memory is not None:
            self._memory.train(datum.input.length, where)
        self._tower.encode(datum.input)
        features = self._model.features(datum.input)
        log_p_n_v = log_softmax(self._model.logits(features, adapter.weights, adapter.config.rank))
        safe_n_k = np.where(known, targets_n_k, 0)
        logprobs_n_k = np.where(known, np.take_along_axis(log_p_n_v, safe_n_k, axis=1), 0.0)
        logprobs = logprobs_n_k.ravel()
        values, derivative = evaluate(loss, logprobs, datum.loss_inputs, settings)
        finite = np.isfinite(logprobs) & np.isfinite(values) & np.isfinite(derivative)
        if not finite.all():
            target = int(np.flatnonzero(~finite)[0])
            raise InvalidRequestError(
                f"{where}: the loss is not finite at position {target // targets_n_k.shape[1]}: "
                f"logprob {logprobs[target]}, loss {values[target]}"
            )
        # d logprob[target] / d logits = one-hot(target) - softmax
        derivative_n_k = derivative.reshape(targets_n_k.shape)
        d_logits_n_v = -derivative_n_k.sum(axis=1, keepdims=True) * np.exp(log_p_n_v)
        np.add.at(d_logits_n_v, (np.arange(datum.input.length)[:, None], safe_n_k), derivative_n_k)
        _add_lora_gradients(adapter, features, d_logits_n_v, gradients)
        return logprobs.reshape(datum.target_tokens.shape).astype(np.float32), values

    def discard_gradients(self, adapter_id: str) -> None:
        """Forget the gradients added up since the last step."""
        self._adapter(adapter_id).gradients = {}

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        """One step of the adapter's optimizer in float64, after which weights and state are rounded to float32."""
        adapter = self._adapter(adapter_id)
        given, adapter.gradients = adapter.gradients, {}
        gradients = {name: given.get(name, np.zeros_like(tensor)) for name, tensor in adapter.tensors().items()}
        flat = np.concatenate([gradient.ravel() for gradient in gradients.values()])
        tensors = {name: (start, start + math.prod(shape)) for name, (start, shape) in adapter.places().items()}
        with np.errstate(all="ignore"):
            norm = math.sqrt(float((flat**2).sum()))
            adapter.optimizer.step(
                numpy_as_torch, adapter.flat, flat, adapter.state, params, norm, tensors, Limits(_LARGEST, _LARGEST)
            )
        for array in (adapter.flat, *adapter.state.tensors.values()):
            array[...] = _round(array)
        metrics = {"grad_norm": norm}
        for name, gradient in gradients.items() if self._module_gradient_norms else ():
            key = f"grad_norm/{parse_tensor_name(name)[0]}"
            metrics[key] = math.hypot(metrics.get(key, 0.0), float(np.sqrt((gradient**2).sum())))
        return metrics

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """A copy under PEFT's names."""
        adapter, layout = self._adapter(adapter_id), self._layout_of(adapter_id)
        weights = adapter.flat.astype(np.float32)
        states = {name: adapter.vector(name).astype(np.float32) for name in layout.states} if optimizer else None
        return layout.filled(weights if dtype == "float32" else bfloat16_bits(weights), states)

    def copy_adapter(self, adapter_id: str, copy_id: str) -> AdapterLayout:
        """A copy without the gradient."""
        adapter = self._adapter(adapter_id)
        copied = _Adapter(adapter.config, adapter.weights, adapter.optimizer)
        copied.state = OptimizerState({n: flat.copy() for n, flat in adapter.state.tensors.items()}, adapter.state.step)
        self._adapters[copy_id] = copied
        return self._layout_of(copy_id)

    def read_adapter(self, adapter_id: str, vector: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """See `Trainer.read_adapter`."""
        return self._adapter(adapter_id).vector(vector)[start:stop].astype(np.float32)

    def _layout_of(self, adapter_id: str) -> AdapterLayout:
        adapter = self._adapter(adapter_id)
        return AdapterLayout(
            base_model=self._model.name,
            lora_config=adapter.config,
            target_modules=[module.rsplit(".", 1)[-1] for module in adapter.weights],
            places=adapter.places(),
            states=tuple(adapter.state.tensors),
            step=adapter.state.step,
            optimizer_type=adapter.optimizer.name,
        )

    def export(self, adapter_id: str) -> AdapterState:
        """The fake's modules already have the names of exports: `model.` and an untied `lm_head`."""
        return self.capture(adapter_id, optimizer=False)

    def rotations(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        """A bigram model has no attention."""
        return {}

    def module_outputs(self, input: RenderedInput) -> ModuleOutputs:
        """A bigram model has no modules."""
        return {}

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
        """log p(token[i+1] | token[i]), float32 [N-1] of each input, concatenated; `nudge` moves them by half a unit in
        their last place at most."""
        adapter = None if adapter_id is None else self._adapter(adapter_id)
        weights, rank = (adapter.weights, adapter.config.rank) if adapter else ({}, 1)
        found = []
        for each in inputs:
            self._tower.encode(each)
            log_p = log_softmax(self._model.logits(self._model.features(each), weights, rank))
            found.append(np.take_along_axis(log_p[:-1], each.token_ids[1:, None], axis=1)[:, 0].astype(np.float32))
        logprobs = np.concatenate(found)
        if nudge:
            unit = np.float32(np.finfo(np.float32).eps)
            logprobs *= 1 + unit * np.random.default_rng(nudge).integers(-1, 2, logprobs.shape)
        return logprobs

    def replayed(self, inputs: Sequence[RenderedInput], routes: Sequence[Routes], nudge: int = 0) -> Replayed:
        """A bigram model has no experts."""
        raise InvalidRequestError(f"routes: names experts, which {self._model.name} does not take here")

    def release_memory(self) -> None:
        """Release the cached memory."""
        if self._memory is not None:
            self._memory.release()

    def close(self) -> None:
        """Free everything."""
        self._adapters.clear()

    def _adapter(self, adapter_id: str) -> _Adapter:
        if adapter_id not in self._adapters:
            raise NotFoundError(f"model {adapter_id} is not in the trainer")
        return self._adapters[adapter_id]


def evaluate(
    loss: Loss, logprobs: Float64Array, inputs: Mapping[str, npt.NDArray[np.float32]], settings: Mapping[str, float]
) -> Terms:
    """`loss` of one datum in float64; all flat, [M]."""

    def datum_sum(values: npt.NDArray[Any]) -> Float64Array:
        return np.full(values.shape, values.sum(), np.float64)

    given = {name: values.ravel().astype(np.float64) for name, values in inputs.items()}
    with np.errstate(all="ignore"):
        given |= loss.per_datum(numpy_as_torch, logprobs, given, datum_sum)
        return loss.evaluate(numpy_as_torch, logprobs, given, settings)


def _add_lora_gradients(
    adapter: _Adapter, features: Features, d_logits_n_v: Float64Array, gradients: Gradients
) -> None:
    scale = LORA_ALPHA / adapter.config.rank
    for name, gradient in gradients.items():
        module, factor = parse_tensor_name(name)
        matrices = adapter.weights[module]
        if factor == "B":
            gradient += scale * d_logits_n_v.T @ features.gather(matrices.a.T)
        else:
            gradient += scale * features.scatter(d_logits_n_v @ matrices.b, matrices.a.shape[1]).T


def fake_of_rank(model: FakeModel, seat: Seat, **settings: Any) -> FakeTrainer:
    """A `FakeTrainer` for one of several ranks, each of which computes everything, so that all answer the same."""
    if seat.rank >= seat.size:
        raise ValueError(f"rank {seat.rank} is not one of {seat.size}")
    return FakeTrainer(model, **settings)
