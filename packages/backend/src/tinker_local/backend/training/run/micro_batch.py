"""Run one micro-batch: forward, losses, backward. A failure is harmless, since adapters and their gradients do not
change here.

Legend: T positions, H hidden size, M targets (positions times candidates).
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from tinker_local.backend.families.family import ImageFeatures
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.lora.lora import HEAD_GROUP, Adapter, AdapterSlice, groups_of
from tinker_local.backend.training.lora.lora_batch import LoraBatch, columns_of
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.losses.loss_evaluation import LossEvaluation
from tinker_local.backend.training.model.embedding import own_gradients, packed_row
from tinker_local.backend.training.model.lm_head import LmHead, Targets
from tinker_local.backend.training.model.load_model import LoadedModel
from tinker_local.backend.training.model.vision_tower import TowerPass
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL, RowRanks
from tinker_local.backend.training.run.block_memory import (
    CPU_LOGITS,
    CUDA_LOGITS,
    attention_widths,
    exchange_bytes,
    fork_bytes,
)
from tinker_local.backend.training.run.image_features import ImageFeatureCache
from tinker_local.backend.training.run.nudging import nudge_in_place
from tinker_local.backend.training.run.packing import Item, Packed, Part, pack, part_of, spans
from tinker_local.backend.training.run.recompute_policy import RecomputePolicy, free_bytes
from tinker_local.backend.training.run.transfer import to_device
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weights.large_weights import RESIDENT, Walk
from tinker_local.types import ApiError, InvalidRequestError

_PLANNED_SHARE = 0.9
"""Share of the free memory that activations may take; fragmentation makes the rest unusable."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A micro-batch whose results the device may still be computing. `numbers` [3, M]: logprobs of the targets, losses,
    and the derivatives of the losses with respect to the logprobs."""

    packed: Packed
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of one micro-batch for the adapters of `batch`, in the projections of `groups`."""

    batch: LoraBatch
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """`logprobs`, `losses` and `derivative` (of the loss with respect to the logprobs) of each target, [M] on the host.
    `errors` by request; the derivative of a failed request is 0."""

    packed: Packed
    logprobs: torch.Tensor
    losses: torch.Tensor
    derivative: torch.Tensor
    errors: Mapping[int, ApiError]


class MicroBatchRunner:
    """Runs micro-batches on `loaded`, with the limits of `config`; on a GPU activations never take more than is free.

    `float_dtype`: of logprobs, losses and adapters. `row_ranks`: the ranks that share each row, of whose positions this
    one then computes a part.
    """

    def __init__(self, loaded: LoadedModel, config: TrainerConfig, row_ranks: RowRanks = ONE_HAS_ALL) -> None:
        text_targets = [*loaded.decoder.targets, loaded.head_target]
        # The tower comes last, so that the same seed gives the others the same numbers with and without it.
        self.targets = [*text_targets, *(loaded.tower.targets if loaded.tower else [])]
        self.activation_bytes = config.activation_memory_bytes
        self._groups = groups_of(text_targets)
        self._usual_tokens = config.micro_batch_tokens
        self._row_ranks = row_ranks
        self._loaded = loaded
        self.float_dtype = torch.float64 if loaded.dtype == torch.float64 else torch.float32
        self._images = ImageFeatureCache(self._encode_images, config.image_cache_bytes)
        self._decoder = loaded.decoder
        head = loaded.model.lm_head
        bias = None if head.bias is None else head.bias.detach()
        chunk = config.logit_chunk_elements or (CUDA_LOGITS if loaded.device.type == "cuda" else CPU_LOGITS)
        self._head = LmHead(loaded.head, loaded.kernels, chunk, self.float_dtype, bias, loaded.logit_rule)

    @property
    def images_encoded(self) -> int:
        """How many images the vision tower has encoded so far."""
        return 0 if self._loaded.tower is None else self._loaded.tower.images_encoded

    @property
    def least_segment(self) -> int:
        """See `Decoder.least_segment`."""
        return self._decoder.least_segment

    def columns_of(self, adapter: Adapter) -> int:
        """Of R, the columns of all adapters of a micro-batch."""
        return columns_of(self._groups, adapter.config.rank)

    def goes_back(self, items: Sequence[Item], adapters: Mapping[str, Adapter], works: Mapping[int, TrainWork]) -> bool:
        """Whether the gradient of a micro-batch of `items` passes through the decoder."""
        configs = [(adapters[str(item.adapter_id)].config, item.datum.input.images) for item in items]
        return any(
            config.train_attn or config.train_mlp or (config.train_vision and images) for config, images in configs
        ) and any(LOSSES[works[item.work].loss_fn].active(item.datum.loss_inputs).any() for item in items)

    def walk(self, *, backward: bool) -> AbstractContextManager[Walk]:
        """Walk through the large weights; every rank must, for each round of micro-batches. `backward`: whether any of
        the round goes back through the decoder."""
        return self._loaded.weights.walk(backward=backward)

    @torch.no_grad()
    def run(
        self,
        packed: Packed,
        adapters: Mapping[str, Adapter],
        works: Mapping[int, TrainWork],
        walk: Walk = RESIDENT,
        *,
        gradient: bool,
    ) -> tuple[Pending, Sequence[Gradients]]:
        """Start the computation for `packed`, or for this rank's part of it; with `gradient`, also of its adapters'
        gradients. Ranks that share the row call this together."""
        part = part_of(packed, self._row_ranks)
        targets = _targets(part, works)
        gradient = gradient and bool(targets.active.any())
        batch = self._lora_batch(part, adapters, gradient=gradient)

        # 1. Tokens and images to hidden states [T, H].
        tower = self._tower_pass(part, adapters, gradient=gradient)
        own = None if tower is None else tower.features
        row = packed_row(self._loaded, self._images, part, own, gradient=gradient and tower is not None)
        del own
        groups = batch.trained() if gradient else []
        # By the whole row, since all of its ranks must do the same.
        through_decoder = any(group != HEAD_GROUP for group in groups) or (gradient and bool(packed.own_images))
        policy = self._policy(part, batch, row.segments.keys_seen) if through_decoder else None
        done = self._decoder.forward(row, batch, policy, walk)
        if tower is None:
            del row

        # 2. Hidden states to logprobs of the targets, and the gradient of all losses with respect to hidden states.
        losses = LossEvaluation(packed, works, self.float_dtype, self._loaded.device)
        walk.head()
        complete = self._row_ranks.add_up if targets.prepass.any() else lambda _: None
        if not gradient:
            logprobs = self._head.logprobs(done.hidden, targets, batch.group(HEAD_GROUP))
            complete(logprobs)
            losses.derive(part.targets, logprobs)
            return Pending(packed, _own(losses.numbers(logprobs), part)), ()
        slices = batch.group(HEAD_GROUP)
        found = [*self._head.logprobs_and_gradient(done.hidden, targets, slices, losses.derive, complete)]
        logprobs = found[0]

        # 3. Back through the decoder, which alone holds the gradient from here on, and the vision tower.
        gradients = [Gradients(batch, tuple(groups))]
        if through_decoder:
            grad_embeds = done.backward(found.pop())
            if tower is not None:
                tower.backward(own_gradients(part, row, grad_embeds))
                gradients.append(Gradients(tower.lora, tuple(tower.lora.trained())))
        return Pending(packed, _own(losses.numbers(logprobs), part)), gradients

    @staticmethod
    def finish(pending: Pending) -> Computed:
        """Wait for the numbers and check them: a request with a non-finite one fails."""
        packed = pending.packed
        numbers = pending.numbers.cpu()
        logprobs, losses, derivative = numbers
        errors: dict[int, ApiError] = {}
        for at, span in spans(packed):
            finite = np.isfinite(numbers.numpy()[:, span]).all(0)  # NumPy: see `Tally._add_logit_gradients`
            if not finite.all():
                errors[at] = _not_finite(packed, span.start + int(np.flatnonzero(~finite)[0]), logprobs, losses)
                derivative[span] = 0
        return Computed(packed, logprobs, losses, derivative, errors)

    @torch.no_grad()
    def logprobs(self, items: Sequence[Item], adapters: Mapping[str, Adapter], nudge: int = 0) -> torch.Tensor:
        """Compute only the logprobs of the targets of `items` in one row, [M] on the host. `nudge`: see
        `Trainer.logprobs`."""
        return self._logprobs(items, adapters, nudge)[0]

    @torch.no_grad()
    def replayed(self, items: Sequence[Item], nudge: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the base model, with the experts that routers choose themselves at the positions of `items`,
        which all name experts, [N, L, K] on the host."""
        logprobs, own = self._logprobs(items, {}, nudge, own_experts=True)
        assert own is not None, "what names no experts is refused before it is packed"
        return logprobs, own

    def _logprobs(
        self, items: Sequence[Item], adapters: Mapping[str, Adapter], nudge: int, *, own_experts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self.walk(backward=False) as walk, self._row_ranks.sharing():  # all that may fail on one rank
            packed = pack(items, self._loaded.vocab_size, towers_of(adapters))
            part = part_of(packed, self._row_ranks)
            batch = self._lora_batch(part, adapters, gradient=False)
            none = np.zeros(len(packed.target_rows), np.bool_)
            targets = Targets(packed.target_rows - part.start, packed.target_ids, active=none, prepass=none)
            tower = self._tower_pass(part, adapters, gradient=False)
            row = packed_row(self._loaded, self._images, part, None if tower is None else tower.features)
            if nudge:
                nudge_in_place(row.embeds, nudge, part.start)
            if own_experts and row.routes is not None:
                row = replace(row, routes=replace(row.routes, own=torch.zeros_like(row.routes.numbers)))
            done = self._decoder.forward(row, batch, None, walk)
            walk.head()
            logprobs = self._head.logprobs(done.hidden, targets, batch.group(HEAD_GROUP))
            self._row_ranks.add_up(logprobs)
            own = None if row.routes is None else row.routes.own
            return logprobs.cpu(), None if own is None else self._of_whole_row(own, part)

    def _of_whole_row(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """`own` [T, L, K] of this rank's part, of all positions without padding, int64 on the host."""
        positions = len(part.packed.token_ids)
        whole = torch.zeros(positions + part.padding, *own.shape[1:], dtype=torch.int64, device=own.device)
        whole[part.start : part.stop] = own
        self._row_ranks.add_up(whole)
        return whole[:positions].cpu()

    def _lora_batch(self, part: Part, adapters: Mapping[str, Adapter], *, gradient: bool) -> LoraBatch:
        slices = _slices(part, adapters)
        return LoraBatch(self._groups, slices, self._loaded.dtype, self.float_dtype, gradient=gradient)

    def _tower_pass(self, part: Part, adapters: Mapping[str, Adapter], *, gradient: bool) -> TowerPass | None:
        """The vision tower over the images of adapters that train it; None without any."""
        if not part.own_images or self._loaded.tower is None:
            return None
        images = [(adapters[adapter_id], image) for adapter_id, image in part.own_images]
        return self._loaded.tower.forward(images, self._loaded.dtype, self.float_dtype, gradient=gradient)

    def _encode_images(self, images: Sequence[RenderedImage]) -> ImageFeatures:
        assert self._loaded.tower is not None, "images for a text model are refused before they are packed"
        return self._loaded.tower.encode(images)

    def _policy(self, part: Part, batch: LoraBatch, keys: float) -> RecomputePolicy:
        """Choose what each layer keeps, alike on all ranks that share the row. `keys`: see `Decoder.memory`. Reserves
        the head's logits, which exist while activations are kept."""
        budget, free = self.activation_bytes, free_bytes(self._loaded.device)
        lengths = part.packed.places.lengths
        least = min(self.least_segment, max(lengths))
        padded = sum(least - length for length in lengths if length < least)
        positions = max(part.shared.counts) + -(-padded // self._row_ranks.size)
        if free is not None:
            free = int(_PLANNED_SHARE * free) - self._head.chunk_elements * self._loaded.dtype.itemsize
            usual = self._decoder.memory(self._usual_tokens, batch.columns).everything
            budget = self._row_ranks.least(max(0, min(free, usual if budget is None else budget)))
        if budget is not None:
            budget -= positions * self._copied_bytes(part)
        return self._decoder.memory(positions, batch.columns, keys).policy(budget)

    def _copied_bytes(self, part: Part) -> int:
        """Of each position, what attention takes besides what `Decoder.memory` counts."""
        counts = [
            *([exchange_bytes] if part.shared.or_none else []),
            *([fork_bytes] if part.packed.places.parents else []),
        ]
        if not counts:
            return 0
        widths = attention_widths(self._loaded.model.config.get_text_config().to_dict())
        return sum(count(*widths, self._loaded.dtype.itemsize) for count in counts)


def towers_of(adapters: Mapping[str, Adapter]) -> set[str | None]:
    """Those that train the vision tower."""
    return {adapter_id for adapter_id, adapter in adapters.items() if adapter.config.train_vision}


def _own(numbers: torch.Tensor, part: Part) -> torch.Tensor:
    """`numbers` [3, M] with 0 for the targets of other ranks."""
    if part.shared.or_none is None:
        return numbers
    others = np.ones(numbers.shape[1], np.bool_)
    others[part.targets] = False
    return numbers.masked_fill(to_device(others, numbers.device), 0)


def _targets(part: Part, works: Mapping[int, TrainWork]) -> Targets:
    """Those of the whole row, with rows counted from the first of this rank."""
    packed = part.packed
    active, prepass = [], []
    for item in packed.items:
        loss, inputs = LOSSES[works[item.work].loss_fn], item.datum.loss_inputs
        is_active = loss.active(inputs).reshape(-1)
        active.append(is_active)
        prepass.append(
            np.zeros_like(is_active)
            if loss.per_datum_input is None
            else is_active.any() & (inputs[loss.per_datum_input] != 0)
        )
    rows = packed.target_rows - part.start
    return Targets(rows, packed.target_ids, np.concatenate(active), np.concatenate(prepass))


def _slices(part: Part, adapters: Mapping[str, Adapter]) -> list[AdapterSlice]:
    """The rows of each adapter, also of those without any on this rank; an adapter's items are adjacent."""
    slices: list[AdapterSlice] = []
    at, rows = -part.start, part.stop - part.start
    items = zip(part.packed.items, part.packed.added, strict=True)
    for adapter_id, group in itertools.groupby(items, key=lambda pair: pair[0].adapter_id):
        start, at = at, at + sum(added for _, added in group)
        adapter = None if adapter_id is None else adapters[adapter_id]
        slices.append(AdapterSlice(adapter, min(max(start, 0), rows), min(max(at, 0), rows)))
    if part.padding:
        slices.append(AdapterSlice(None, slices[-1].stop, rows))
    return slices


def _not_finite(packed: Packed, target: int, logprobs: torch.Tensor, losses: torch.Tensor) -> InvalidRequestError:
    """The error for the first target that is not finite."""
    place = int(np.searchsorted(packed.target_starts, target, side="right")) - 1
    datum = packed.items[place].datum
    position = (target - packed.target_starts[place]) // datum.target_tokens[0].size
    return InvalidRequestError(
        f"data[{packed.items[place].index}]: the loss is not finite at position {position}: "
        f"logprob {float(logprobs[target])}, loss {float(losses[target])}"
    )
