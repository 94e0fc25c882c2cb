"""LoRA training on images and text, a packed loop written by hand over Hugging Face's model.

Legend: T positions of a row, I images of a step.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.scale import Scale
from harness.timing import device

from baselines import loop_segments as segments
from baselines.chunked_head import chunked_cross_entropy
from baselines.peft_model import adamw, compute_dtype, trained, with_lora


@dataclass(frozen=True, slots=True, eq=False)
class ImageExample:
    """One example on the host. `tokens` int64 [N] with the pad id at image positions; `labels` int64 [N], -100 where
    nothing is predicted; `pixels` float32 [patches, patch_dim] and `grid` (time, height, width) of its only image."""

    tokens: torch.Tensor
    labels: torch.Tensor
    pixels: torch.Tensor
    grid: tuple[int, int, int]


class ImageLoop:
    """A model and its optimizer; `step` trains once on `examples`, whose images go through the tower each time."""

    def __init__(self, scale: Scale, folder: Path, examples: Sequence[ImageExample], *, recompute: bool) -> None:
        segments.register()
        self._model = _vl_model(folder)
        for module in self._model.modules():
            if isinstance(module, torch.nn.Conv3d) and not torch.backends.cudnn.enabled:
                module.forward = functools.partial(_product, module)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._wrapped = with_lora(self._model, scale.rank, within="language_model", in_compute_dtype=True)
        if recompute:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._optimizer = adamw(trained(self._wrapped))
        per_row = max(1, scale.micro_batch_tokens // max(len(example.tokens) for example in examples))
        self._rows = [list(examples[start : start + per_row]) for start in range(0, len(examples), per_row)]
        self._positions = [torch.cat([self._position_ids(example) for example in row], dim=2) for row in self._rows]

    def step(self) -> None:
        """Gradients of all examples, then one update."""
        for row, positions in zip(self._rows, self._positions, strict=True):
            self._loss(row, positions).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, row: list[ImageExample], positions: torch.Tensor) -> torch.Tensor:
        place = positions.device
        tokens = torch.cat([example.tokens for example in row]).to(place)
        labels = torch.cat([example.labels for example in row]).to(place)
        hidden = self._model.model(
            input_ids=tokens[None],
            position_ids=positions,
            pixel_values=torch.cat([example.pixels for example in row]).to(place),
            image_grid_thw=torch.tensor([example.grid for example in row], device=place),
            use_cache=False,
            **segments.segment_arguments([len(example.tokens) for example in row], place),
        ).last_hidden_state[0]
        predicted = labels != -100
        return chunked_cross_entropy(self._model.lm_head, hidden[predicted], labels[predicted])

    def _position_ids(self, example: ImageExample) -> torch.Tensor:
        """Position ids, int64 [3, 1, N], by the model's own rule."""
        kinds = (example.tokens == self._model.config.image_token_id).int()
        positions, _ = self._model.model.get_rope_index(
            example.tokens[None], mm_token_type_ids=kinds[None], image_grid_thw=torch.tensor([example.grid])
        )
        return positions.to(device())


def _product(convolution: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """`convolution` of patches as large as its kernel. Without cuDNN it would take seconds, which users do not see."""
    product = torch.nn.functional.linear(patches.flatten(1), convolution.weight.flatten(1), convolution.bias)
    return product[:, :, None, None, None]


def _vl_model(folder: Path) -> Any:
    """The model of the configuration in `folder`, with weights as transformers initialises them, on the device."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    attention = {"": segments.NAME, "text_config": segments.NAME, "vision_config": "sdpa"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype())
    try:
        with torch.device(device()):
            return AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(folder), dtype=compute_dtype(), attn_implementation=attention
            )
    finally:
        torch.set_default_dtype(before)
