"""Hand-written LoRA training on text, from what most people run to the fastest known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness.scale import Scale
from harness.timing import device

from baselines import loop_segments as segments
from baselines.chunked_head import chunked_cross_entropy
from baselines.peft_model import adamw, text_model, trained, with_lora


@dataclass(frozen=True, slots=True)
class Variant:
    """How a loop is written. `packed`: concatenated sequences with variable-length attention and a chunked LM
    head, else padded batches through the model's own loss. `bf16_adapters`: no float32 masters."""

    packed: bool = True
    bf16_adapters: bool = False
    recompute: bool = False
    liger: bool = False


VARIANTS = {
    "padded_recompute": Variant(packed=False, recompute=True),
    "packed": Variant(),
    "packed_bf16": Variant(bf16_adapters=True),
    "packed_bf16_liger": Variant(bf16_adapters=True, liger=True),
    "packed_bf16_recompute": Variant(bf16_adapters=True, recompute=True),
    "packed_bf16_recompute_liger": Variant(bf16_adapters=True, recompute=True, liger=True),
}


class TextLoop:
    """A model and its optimizer; `step` trains once on the sequences it was made with.

    `sequences`: int64 [N] on the device. `parameters`: of the base model.
    """

    def __init__(self, scale: Scale, variant: Variant, sequences: Sequence[Any]) -> None:
        if variant.packed:
            segments.register()
        model = text_model(scale.text, segments.NAME if variant.packed else "sdpa")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        wrapped = with_lora(model, scale.rank, within="layers", in_compute_dtype=variant.bf16_adapters)
        if variant.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen3

            apply_liger_kernel_to_qwen3(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
        self._adopt(scale, variant, sequences, model, wrapped)

    def _adopt(self, scale: Scale, variant: Variant, sequences: Sequence[Any], model: Any, wrapped: Any) -> None:
        """Train `model`, which PEFT has `wrapped`."""
        self._wrapped = wrapped
        if variant.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = model
        self._optimizer = adamw(trained(self._wrapped))
        self._sequences = [torch.from_numpy(sequence).to(device()) for sequence in sequences]
        self._packed = variant.packed
        self._budget = scale.recompute_micro_batch_tokens if variant.recompute else scale.micro_batch_tokens
        if not variant.packed:
            self._budget = scale.micro_batch_tokens

    def step(self) -> None:
        """Gradients of all sequences, then one update."""
        if self._packed:
            for row in packed_rows(self._sequences, self._budget):
                self._packed_loss(row).backward()
        else:
            for batch in padded_batches(self._sequences, self._budget):
                self._wrapped(**batch, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _packed_loss(self, row: list[torch.Tensor]) -> torch.Tensor:
        lengths = [len(sequence) for sequence in row]
        tokens = torch.cat(row)
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        hidden = self._model.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            **segments.segment_arguments(lengths, tokens.device),
        ).last_hidden_state[0]
        labels = torch.cat([sequence.roll(-1) for sequence in row])
        return chunked_cross_entropy(self._model.lm_head, hidden, labels)


def packed_rows(sequences: Sequence[torch.Tensor], budget: int) -> list[list[torch.Tensor]]:
    """The sequences packed into rows of at most `budget` tokens, longest first."""
    rows: list[list[torch.Tensor]] = []
    free = 0
    for sequence in sorted(sequences, key=len, reverse=True):
        if not rows or len(sequence) > free:
            rows.append([])
            free = budget
        rows[-1].append(sequence)
        free -= len(sequence)
    return rows


def padded_batches(sequences: Sequence[torch.Tensor], budget: int) -> list[dict[str, torch.Tensor]]:
    """Batches in the given order, as many sequences in each as of the longest would fit in `budget` tokens; the
    model's own arguments."""
    count = max(1, budget // max(map(len, sequences)))
    batches = []
    for start in range(0, len(sequences), count):
        part = list(sequences[start : start + count])
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in part], batch_first=True)
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return batches
