"""LoRA training on images and text as it is usually written over transformers and PEFT: batches that the processor
pads, gradient checkpointing, flash attention, the model's own loss.

Legend: B examples of a batch, S positions of its longest, D head size.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness.scale import Scale
from harness.timing import device

from baselines import loop_segments as segments
from baselines.peft_model import adamw, compute_dtype, trained, with_lora

if TYPE_CHECKING:
    from PIL.Image import Image

TORCH_FLASH = "torch_varlen"
"""FlashAttention 2 as torch has it, for machines without the packages that transformers calls. It looks for a package
where `flash` is in a name."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureExample:
    """`text` with the processor's token for `picture` in it; its last `answer` tokens are predicted."""

    text: str
    picture: "Image"
    answer: int


LARGEST_HEAD = 256
"""Of FlashAttention, whose versions refuse larger heads, as some layers of Gemma 4 have them."""


def attentions(head: int) -> list[str]:
    """Names of transformers' attention for heads of up to `head`, the fastest first. The tower's is always torch's:
    transformers 5.19 gives Pixtral's flash attention positions in two dimensions, which it takes for bounds."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.utils import is_flash_attn_2_available
    from transformers.utils.import_utils import is_flash_attn_4_available

    AttentionInterface.register(TORCH_FLASH, unpadded_attention)
    AttentionMaskInterface.register(TORCH_FLASH, flash_attention_mask)
    if head > LARGEST_HEAD:
        return ["sdpa"]
    found = [TORCH_FLASH, "sdpa"]
    if is_flash_attn_2_available():
        found.insert(0, "flash_attention_2")
    if is_flash_attn_4_available() and importlib.util.find_spec("flash_attn.cute") is not None:
        found.insert(0, "flash_attention_4")
    return found


def unpadded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention without the padding, as transformers calls it: `query` [B, heads, S, D], `key` and `value` [B, kv
    heads, S, D]. `attention_mask` [B, S] is 1 at tokens and 0 at padding; None if nothing is padded. Returns
    [B, S, heads, D], which is 0 at padding."""
    count, heads, length, size = query.shape
    mask = torch.ones(count, length, device=query.device) if attention_mask is None else attention_mask
    kept = mask.flatten().nonzero()[:, 0]
    lengths = [int(each) for each in mask.sum(1).tolist()]
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1)[kept].transpose(0, 1)[None] for tensor in (query, key, value)
    )
    bounds = segments.segment_arguments(lengths, query.device)
    found = segments.attention(module, query, key, value, None, scaling=scaling, **bounds)[0]
    output = found.new_zeros(count * length, heads, size).index_copy(0, kept, found[0])
    return output.view(count, length, heads, size), None


class PaddedLoop:
    """A model and its optimizer; `step` trains once on `examples`, whose pictures go through the tower each time.

    `batch`: examples in a batch. `tokens`: their ids without padding, int64 [N] of each. `padding`: the share of
    positions that is padding.
    """

    def __init__(self, scale: Scale, folder: Path, examples: Sequence[PictureExample], attention: str) -> None:
        from tinker_local.backend.rendering.hf_images import processor_of
        from transformers import AutoModelForImageTextToText

        self._examples = examples
        self._processor = processor_of(str(folder))
        self._model: Any = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=compute_dtype(),
            attn_implementation={"": attention, "text_config": attention, "vision_config": "sdpa"},
            device_map=device(),
        )
        self._wrapped = with_lora(self._model, scale.rank, within="language_model", in_compute_dtype=True)
        self._model.gradient_checkpointing_enable()
        self._optimizer = adamw(trained(self._wrapped))

    def take_batches_of(self, batch: int) -> None:
        """Process the examples as a data loader does, `batch` at a time, in the given order."""
        self.batch = batch
        self._batches = []
        self.tokens: list[torch.Tensor] = []
        for start in range(0, len(self._examples), batch):
            part = self._examples[start : start + batch]
            found = self._processor(
                text=[each.text for each in part],
                images=[[each.picture] for each in part],
                padding=True,
                padding_side="right",
                return_tensors="pt",
            )
            given = {name: value for name, value in found.items() if name != "token_type_ids"}
            real = given["attention_mask"].sum(1)
            places = torch.arange(given["input_ids"].shape[1])
            answers = real - torch.tensor([each.answer for each in part])
            predicted = (places >= answers[:, None]) & (places < real[:, None])
            given["labels"] = given["input_ids"].masked_fill(~predicted, -100)
            self._batches.append(given)
            self.tokens += [ids[:count] for ids, count in zip(given["input_ids"], real, strict=True)]
        positions = sum(given["input_ids"].numel() for given in self._batches)
        self.padding = 1 - sum(map(len, self.tokens)) / positions

    def step(self) -> torch.Tensor:
        """Gradients of all batches, then one update. Returns the mean loss of a predicted token before it."""
        total, count = torch.zeros((), device=device()), 0
        for given in self._batches:
            moved = {
                name: value.to(device(), compute_dtype() if value.is_floating_point() else value.dtype)
                for name, value in given.items()
            }
            loss = self._wrapped(**moved, use_cache=False).loss
            loss.backward()
            predicted = int((given["labels"] != -100).sum())
            total += loss.detach() * predicted
            count += predicted
        self._optimizer.step()
        self.forget()
        return total / count

    def forget(self) -> None:
        """Drop gradients."""
        self._optimizer.zero_grad(set_to_none=True)
