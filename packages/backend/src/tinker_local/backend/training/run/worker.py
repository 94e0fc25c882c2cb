"""`HFTrainer`: many LoRA adapters on one Hugging Face model, in one process or in one of several that work together.

`forward_backward` refuses the requests that cannot run, fills micro-batches across requests and adapters (`passes.py`),
and runs each (`micro_batch.py`). It collects the gradients of a call separately and adds only those of successful
requests to the adapters, so that a failure leaves nothing behind.

On several ranks (`ranks.py`), each process has one of these, and all get the same calls. Their adapters are equal to
the bit: gradients are added up before they change an adapter, and optimizer steps are computed on each rank and
compared. A call that fails on one rank fails on all and changes nothing.

Call it from one thread at a time. It uses no global random generator and changes no global state of torch.
"""

import functools
import math
import secrets
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.adapters.adapter import WEIGHTS_VECTOR, AdapterDType, AdapterLayout, AdapterState
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.spare_memory import cached_bytes, leave_spare_memory, take_all_memory_again
from tinker_local.backend.stages import stage
from tinker_local.backend.training.kernels import delta_rule, flash_attention
from tinker_local.backend.training.lora import lora
from tinker_local.backend.training.lora.lora import Adapter, TensorSpec
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.losses.loss import check_train_datum
from tinker_local.backend.training.model.decoders import run_text
from tinker_local.backend.training.model.decoders.autograd import keys_as_values
from tinker_local.backend.training.model.decoders.transformers_positions import rotate_on
from tinker_local.backend.training.model.load_model import load_model
from tinker_local.backend.training.module_outputs import ModuleOutputs, watching
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.optimizers.optimizer import OptimizerState
from tinker_local.backend.training.parallel.ranks import ONE_RANK, Ranks, fingerprint
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import REPLAYED, Routes, replayed_share
from tinker_local.backend.training.run import nudging
from tinker_local.backend.training.run.micro_batch import MicroBatchRunner
from tinker_local.backend.training.run.packing import Item
from tinker_local.backend.training.run.passes import Passes, release_unused_memory
from tinker_local.backend.training.run.picture_check import check_pictures
from tinker_local.backend.training.run.tally import Tally
from tinker_local.backend.training.run.token_budget import TokenBudget
from tinker_local.backend.training.run.transfer import to_host
from tinker_local.backend.training.trainer import Replayed, Seat, TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weights.lent_weights import in_words
from tinker_local.types import (
    ApiError,
    InternalError,
    InvalidRequestError,
    LoraConfig,
    NotEnoughMemoryError,
    NotFoundError,
)
from tinker_local.types.base import Frozen

_NOT_FLAT = 1e-6
"""A first gradient of exactly zero is a bug if the derivative with respect to some target's logit exceeded this."""


class HFTrainer:
    """Implements `training.trainer.Trainer` as `config` says. `ranks`: the processes that share the work.

    A target outside the vocabulary is allowed where its coefficient is 0; its reported logprob is that of token 0.
    An `optim_step` without a gradient since the last one uses a zero gradient: AdamW's moments fade, weight decay
    applies, the step counts.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks = ONE_RANK) -> None:
        ranks.check_neighbours(config.shards, "shards")
        row_ranks = ranks.share_rows(config.context_parallel)
        loaded = load_model(config, row_ranks)
        self.name = config.name
        self.vocab_size = loaded.vocab_size
        self.max_context_length = loaded.max_positions
        reached = dict.fromkeys(target.projection for target in (*loaded.decoder.targets, loaded.head_target))
        self.trains = f"trained by the {loaded.decoder.name} decoder; adapters reach {', '.join(reached)}"
        if left := keys_as_values(loaded.model.get_submodule(loaded.family.decoder_path), loaded.family.lora):
            self.trains += f"; {left}"
        if "linear_attention" in (getattr(loaded.model.config.get_text_config(), "layer_types", None) or ()):
            self.trains += f"; linear attention is computed by {delta_rule.kernels_for(loaded.device, loaded.dtype)[1]}"
        if attention := flash_attention.in_words(loaded.device, loaded.dtype):
            self.trains += f"; {attention}"
        self.routed = loaded.decoder.routed if config.replay_routes else None
        self.max_rank = config.max_rank
        self._budget = TokenBudget(config.micro_batch_tokens)
        self._loaded = loaded
        self._runner = MicroBatchRunner(loaded, config, row_ranks)
        self._float = self._runner.float_dtype
        self._module_gradient_norms = config.module_gradient_norms
        self._spare_bytes = config.spare_bytes
        self._adapters: dict[str, Adapter] = {}
        self._ranks = ranks
        self._passes = Passes(
            self._runner,
            self._adapters,
            self._budget,
            self.vocab_size,
            loaded.device,
            ranks,
            row_ranks,
            share=config.share_prefixes,
        )
        self._too_small = 0
        vision = loaded.family.vision
        if vision is not None and vision.by_processor and config.shards == 1:
            with stage("pictures compared"):
                compared = check_pictures(loaded, self.logprobs, config.model)
            self._too_small = compared.too_small
            kind = type(loaded.model).__name__
            if loaded.family.logits_left_out:
                self.trains += (
                    f"; logits with {loaded.family.logits_left_out}, which transformers' {kind} leaves out, and the "
                    "class of its language model and vLLM do not"
                )
            found = f", {vision.found}" if vision.found else ""
            self.trains += f"; images by transformers' {kind}{found}, {compared}"

    @property
    def images_encoded(self) -> int:
        """How many images the vision tower has encoded so far; cached features are not encoded again."""
        return self._runner.images_encoded

    @property
    def cached_bytes(self) -> int:
        """Of the device, kept by torch's allocator for later."""
        return cached_bytes(self._loaded.device)

    def check_weights(self) -> tuple[int, str]:
        """See `Trainer.check_weights`."""
        shared = self._loaded.shared
        if shared is None:
            return 0, ""
        self._leave_spare_memory()
        changed = shared.changed()
        return len(shared.sums), in_words(changed) if changed else ""

    # Adapters -------------------------------------------------------------------------------------------------------

    def _leave_spare_memory(self) -> None:
        leave_spare_memory(self._loaded.device, self._spare_bytes)

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """Bytes of weights, gradient and optimizer state."""
        return self._layout(config)[-1].stop * OPTIMIZERS[optimizer].bytes_per_parameter(int(self._float.itemsize))

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        """Create an adapter with B = 0; InvalidRequestError if its rank or flags are invalid."""
        self._leave_spare_memory()
        if adapter_id in self._adapters:
            raise ValueError(f"adapter {adapter_id} exists")
        specs = self._layout(config)
        seed = self._ranks.gather([secrets.randbits(62)])[0][0] if config.seed is None else config.seed

        def make() -> Adapter:
            return Adapter(config, specs, self._place(lora.initial_weights(specs, seed)), OPTIMIZERS[optimizer])

        self._adapters[adapter_id] = self._ranks.together(make)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Create or replace an adapter; discards its accumulated gradient."""
        self._leave_spare_memory()
        self._adapters[adapter_id] = self._ranks.together(lambda: self._loaded_adapter(state))

    def _loaded_adapter(self, state: AdapterState) -> Adapter:
        specs = self._layout(state.lora_config)
        weights = self._place(lora.flatten(specs, state.tensors, "weights"))
        optimizer = OPTIMIZERS[state.optimizer_type]
        optimizer_state = None
        if state.optimizer is not None:
            flats = {
                name: self._place(lora.flatten(specs, lora.without_prefix(state.optimizer, name), f"optimizer.{name}"))
                for name in optimizer.state_names
            }
            optimizer_state = OptimizerState(flats, state.step)
        return Adapter(state.lora_config, specs, weights, optimizer, optimizer_state)

    def remove_adapter(self, adapter_id: str) -> None:
        """Free the adapter; unknown ids are ignored."""
        self._adapters.pop(adapter_id, None)

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """A host copy as it is now; a gradient not yet stepped is not part of it."""
        adapter, layout = self._adapter(adapter_id), self._layout_of(adapter_id)
        states = {name: lora.host_vector(adapter.vector(name)) for name in layout.states} if optimizer else None
        return layout.filled(lora.host_vector(adapter.weights, dtype), states)

    def copy_adapter(self, adapter_id: str, copy_id: str) -> AdapterLayout:
        """Where the device's memory is short, the copy is on the host."""
        self._leave_spare_memory()
        adapter = self._adapter(adapter_id)
        try:
            copied = adapter.copied(torch.clone)
        except torch.OutOfMemoryError:
            copied = adapter.copied(lambda flat: to_host(flat, flat.dtype))
        self._adapters[copy_id] = copied
        return self._layout_of(copy_id)

    def read_adapter(self, adapter_id: str, vector: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """See `Trainer.read_adapter`."""
        return lora.host_vector(self._adapter(adapter_id).vector(vector)[start:stop])

    def _layout_of(self, adapter_id: str) -> AdapterLayout:
        adapter = self._adapter(adapter_id)
        return lora.adapter_layout(adapter, self.name, self._target_modules(adapter))

    def export(self, adapter_id: str) -> AdapterState:
        """A host copy as it is now, by the names of the hosted service's exports."""
        adapter, loaded = self._adapter(adapter_id), self._loaded
        modules = self._target_modules(adapter)
        return lora.export(adapter, self.name, modules, loaded.family, tied_head=loaded.tied_head)

    def _target_modules(self, adapter: Adapter) -> tuple[str, ...]:
        paths = list(dict.fromkeys(spec.path for spec in adapter.specs))
        return lora.target_modules(self._loaded.model, paths)

    def discard_gradients(self, adapter_id: str) -> None:
        """Forget the gradients added up since the last step."""
        self._adapter(adapter_id).gradient = None

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        self._leave_spare_memory()
        adapter = self._adapter(adapter_id)
        gradient, adapter.gradient = adapter.gradient, None
        stepped, norms = self._ranks.together(lambda: self._stepped(adapter, gradient, params))
        self._ranks.compare(f"optim_step of model {adapter_id}", lambda: _fingerprints(stepped, norms["grad_norm"]))
        adapter.take(stepped)
        return norms

    def _stepped(
        self, adapter: Adapter, gradient: torch.Tensor | None, params: Frozen
    ) -> tuple[Adapter, dict[str, float]]:
        """The adapter after one update, and the norms of the gradient. On several ranks it is a copy: another rank may
        fail in the same update."""
        if gradient is None:
            gradient = torch.zeros_like(adapter.weights)
        norm = lora.gradient_norm(gradient)
        of_modules = lora.module_norms(adapter.specs, gradient) if self._module_gradient_norms else {}
        stepped = adapter if self._ranks.size == 1 else adapter.copied(torch.clone)
        stepped.step(gradient, params, norm)
        return stepped, {"grad_norm": norm, **{f"grad_norm/{path}": value for path, value in of_modules.items()}}

    def release_memory(self) -> None:
        """Release the memory that torch's allocator caches."""
        release_unused_memory(self._loaded.device)

    def close(self) -> None:
        """Free everything."""
        self._adapters.clear()
        take_all_memory_again(self._loaded.device)
        del self._loaded, self._runner, self._passes

    @property
    def micro_batch_tokens(self) -> int:
        """The current maximum of positions in a micro-batch."""
        return self._budget.tokens

    # Requests -------------------------------------------------------------------------------------------------------

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """See `Trainer.forward_backward`. Requests without a gradient are packed separately."""
        self._leave_spare_memory()
        forward, backward, results = self._ranks.together(lambda: self._sorted(work))
        tally = self._passes.run(forward, gradient=False)
        results |= {at: tally.result(at) for at in forward}
        results |= self._train(backward)
        return [self._with_share(results[at], each) for at, each in enumerate(work)]

    def _with_share(self, result: TrainResult | ApiError, work: TrainWork) -> TrainResult | ApiError:
        """`result` of `work`, of a model with routed experts with the share of positions that took recorded ones."""
        if self.routed is None or isinstance(result, ApiError):
            return result
        positions = sum(datum.input.length for datum in work.data)
        share = replayed_share([datum.routes for datum in work.data], positions)
        return replace(result, metrics={**result.metrics, REPLAYED: share})

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
        """log p(token[i+1] | tokens[..i]), float32 [N-1] of each input, concatenated. All inputs share one row.
        `nudge`: see `Trainer.logprobs`."""
        self._leave_spare_memory()
        adapters = {} if adapter_id is None else {adapter_id: self._adapter(adapter_id)}
        items = []
        for at, each in enumerate(inputs):
            self._check_input(each, "input")
            next_tokens = np.append(each.token_ids[1:], 0).astype(np.int64)
            given = nudging.images_nudged(each, self._loaded.dtype, nudge) if nudge else each
            items.append(Item(0, at, adapter_id, TrainDatum(given, next_tokens, {})))
        try:
            values = self._ranks.together(lambda: self._runner.logprobs(items, adapters, nudge)).numpy()
        except torch.OutOfMemoryError as error:
            positions, why = sum(each.length for each in inputs), str(error).partition("\n")[0]
            traceback.clear_frames(error.__traceback__)  # they hold what it has allocated
            release_unused_memory(self._loaded.device)
            raise NotEnoughMemoryError(f"logprobs of {positions} positions: {why}") from None
        ends = np.cumsum([each.length for each in inputs]) - 1
        return np.delete(values, ends).astype(np.float32)

    def replayed(self, inputs: Sequence[RenderedInput], routes: Sequence[Routes], nudge: int = 0) -> Replayed:
        """See `Trainer.replayed`."""
        self._leave_spare_memory()
        items = []
        for at, (each, taken) in enumerate(zip(inputs, routes, strict=True)):
            self._check_input(each, f"inputs[{at}]")
            self._check_routes(taken, each.length, f"routes[{at}]")
            next_tokens = np.append(each.token_ids[1:], 0).astype(np.int64)
            given = nudging.images_nudged(each, self._loaded.dtype, nudge) if nudge else each
            items.append(Item(0, at, None, TrainDatum(given, next_tokens, {}, taken)))
        values, own = self._ranks.together(lambda: self._runner.replayed(items, nudge))
        ends = np.cumsum([each.length for each in inputs]) - 1
        dtype = routes[0].own.dtype
        return Replayed(np.delete(values.numpy(), ends).astype(np.float32), own.numpy().astype(dtype))

    def rotations(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        """See `Trainer.rotations`. Ranks compute the same, and one may do it alone."""
        loaded = self._loaded
        return rotate_on(loaded.decoder, loaded.family, loaded.model.config, loaded.device)(layers, positions)

    def module_outputs(self, input: RenderedInput) -> ModuleOutputs:
        """See `Trainer.module_outputs`."""
        loaded = self._loaded
        with watching(loaded.model, input.length) as found:
            run_text(loaded.model, loaded.family, loaded.weights, input)
        return found

    def _sorted(
        self, work: Sequence[TrainWork]
    ) -> tuple[dict[int, TrainWork], dict[int, TrainWork], dict[int, TrainResult | ApiError]]:
        """The requests without and with a gradient, and what is refused, by index."""
        forward: dict[int, TrainWork] = {}
        backward: dict[int, TrainWork] = {}
        results: dict[int, TrainResult | ApiError] = {}
        for at, item in enumerate(work):
            try:
                (backward if item.backward else forward)[at] = self._checked(item)
            except ApiError as refusal:
                results[at] = refusal
        return forward, backward, results

    def _train(self, works: Mapping[int, TrainWork]) -> dict[int, TrainResult | ApiError]:
        """Run `works` and add the gradients of those that succeed to their adapters.

        A failed request poisons its adapter's gradient sum in this pass, and its NaNs may have reached adapters that
        shared matmuls with it. Poisoned sums are dropped, and their other requests run again without the failed ones;
        if none failed, one at a time to find the culprit. Nothing of a failed request remains.
        """
        tally = self._passes.run(works, gradient=True)
        results = {at: tally.result(at) for at in works}
        failed = {at for at in works if tally.works[at].error is not None}
        # Checking takes memory, adding does not: if memory runs out, nothing has been added yet.
        adapter_ids = dict.fromkeys(work.adapter_id for work in works.values())
        faults = self._ranks.together(functools.partial(self._gradient_faults, adapter_ids, tally))
        again: dict[int, TrainWork] = {}
        for adapter_id, fault in faults.items():
            members = {at: work for at, work in works.items() if work.adapter_id == adapter_id}
            if fault is None and failed.isdisjoint(members):
                self._add_gradient(adapter_id, tally)
            elif fault is not None and len(works) == 1 and not failed:
                results |= dict.fromkeys(works, fault)
            else:
                again |= {at: work for at, work in members.items() if at not in failed}
        del tally  # frees the poisoned sums
        for part in [again] if failed else [{at: work} for at, work in sorted(again.items())]:
            results |= self._train(part)
        return results

    def _gradient_faults(self, adapter_ids: Iterable[str], tally: Tally) -> dict[str, ApiError | None]:
        return {adapter_id: self._gradient_fault(adapter_id, tally) for adapter_id in adapter_ids}

    def _gradient_fault(self, adapter_id: str, tally: Tally) -> ApiError | None:
        """Why an adapter's gradient from a pass cannot be used; None if it can."""
        gradient = tally.gradients.get(adapter_id)
        lowest, highest = (0.0, 0.0) if gradient is None else lora.extremes(gradient)
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            return InvalidRequestError("the gradient is not finite; nothing of this request was added to it")
        adapter = self._adapter(adapter_id)
        adapter.gradient_seen = adapter.gradient_seen or lowest < 0 or highest > 0
        # Gradients of both signs may cancel, as for one completion with advantages of 1 and -1.
        low, high = tally.logit_gradients.get(adapter_id, (0.0, 0.0))
        if adapter.gradient_seen or low < 0 < high or max(-low, high) <= _NOT_FLAT:
            return None
        return InternalError("the adapter's gradient is zero although the loss is not flat")

    def _add_gradient(self, adapter_id: str, tally: Tally) -> None:
        gradient = tally.gradients.get(adapter_id)
        if gradient is None:
            return
        adapter = self._adapter(adapter_id)
        adapter.gradient = gradient if adapter.gradient is None else adapter.gradient.add_(gradient)

    # Checks and look-ups --------------------------------------------------------------------------------------------

    def _checked(self, work: TrainWork) -> TrainWork:
        """`work` with complete settings; ApiError if it cannot run, so that no other request fails with it."""
        if not self._adapter(work.adapter_id).computable:
            raise InvalidRequestError(
                f"model {work.adapter_id}: its weights are not finite any more; load a checkpoint, take smaller steps"
            )
        loss = loss_of(work.loss_fn)
        config = loss.complete_settings(work.loss_config)
        for i, datum in enumerate(work.data):
            self._check_input(datum.input, f"data[{i}].model_input")
            if datum.routes is not None:
                self._check_routes(datum.routes, datum.input.length, f"data[{i}]")
            check_train_datum(datum, loss, f"data[{i}]")
        return replace(work, loss_config=config)

    def _check_input(self, input: RenderedInput, where: str) -> None:
        tokens = input.token_ids
        if not 0 < len(tokens) <= self.max_context_length:
            raise InvalidRequestError(f"{where}: {len(tokens)} positions, allowed are 1 to {self.max_context_length}")
        # An id out of range would destroy the process's CUDA context, and with it all requests.
        outside = (tokens < 0) | (tokens >= self.vocab_size)
        if outside.any():
            raise InvalidRequestError(
                f"{where}: token {tokens[outside][0]} is outside the vocabulary of {self.vocab_size}"
            )
        if input.images and self._loaded.family.vision is None:
            raise InvalidRequestError(f"{where}: holds images, but {self.name} reads text only")
        self._check_images(input, where)

    def _check_routes(self, routes: Routes, positions: int, where: str) -> None:
        """An expert out of range would destroy the process's CUDA context."""
        if self.routed is None:
            raise InvalidRequestError(f"{where}: names experts, which {self.name} does not take here")
        if fault := self.routed.fault(routes, positions):
            raise InvalidRequestError(f"{where}: its routes {fault}")

    def _check_images(self, input: RenderedInput, where: str) -> None:
        """InvalidRequestError for images that transformers' class does not compute, which the start has found out."""
        vision = self._loaded.family.vision
        if vision is None or not vision.by_processor:
            return
        holds = input.holds_features
        for placed in input.images:
            at = placed.offset + int(placed.image.feature_places[0])
            if not vision.touching and at and holds[at - 1]:
                raise InvalidRequestError(
                    f"{where}: the image at position {placed.offset} follows another one without a token between them, "
                    f"and transformers' {type(self._loaded.model).__name__} cannot tell them apart"
                )
            if placed.image.num_features <= self._too_small:
                raise InvalidRequestError(
                    f"{where}: the image at position {placed.offset} takes {placed.image.num_features} positions, and "
                    f"transformers' {type(self._loaded.model).__name__} computes none below {self._too_small + 1}"
                )

    def _layout(self, config: LoraConfig) -> tuple[TensorSpec, ...]:
        if not 1 <= config.rank <= self.max_rank:
            raise InvalidRequestError(f"lora_config.rank: must be from 1 to {self.max_rank}, not {config.rank}")
        if config.train_vision and self._loaded.tower is None:
            raise InvalidRequestError(f"lora_config.train_vision: {self.name} reads text only")
        vision = self._loaded.family.vision
        if config.train_vision and vision is not None and vision.frozen:
            raise InvalidRequestError(
                f"lora_config.train_vision: the vision tower of {self.name} stays as it is: {vision.frozen}"
            )
        specs = lora.layout(self._runner.targets, config)
        if not specs:
            raise InvalidRequestError(
                "lora_config: train_attn, train_mlp and train_unembed are all false, nothing would be trained"
            )
        return specs

    def _place(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(self._loaded.device, self._float)

    def _adapter(self, adapter_id: str) -> Adapter:
        if adapter_id not in self._adapters:
            raise NotFoundError(f"model {adapter_id} is not in the trainer")
        return self._adapters[adapter_id]


def _fingerprints(stepped: Adapter, norm: float) -> dict[str, int]:
    """What an optimizer step computed, as numbers to compare between ranks, by name."""
    vectors = {WEIGHTS_VECTOR: stepped.weights, **stepped.optimizer_state.tensors}
    bits = int(np.float64(norm).view(np.int64))
    return {"gradient norm": bits, **{name: fingerprint(vector) for name, vector in vectors.items()}}


def trainer_of_rank(config: TrainerConfig, seat: Seat) -> HFTrainer:
    """An `HFTrainer` for one of several ranks, in its own process: the `TrainerFactory` of a `ProcessTrainer` with
    `ranks`. Waits for the others."""
    from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks

    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return HFTrainer(config, JoinedRanks(seat, device))
