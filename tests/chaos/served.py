"""What the server of a chaos run serves, and how closely the checker's own trainer can tell what it should answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.training.trainer import Trainer
from tinker_local.types import AdamParams


@dataclass(frozen=True, slots=True)
class Served:
    """A base model.

    Attributes
    ----------
    name: as clients know it.
    arguments: options of `tinker-local serve`.
    limit: seconds after which the server ends an engine's process that does not answer.
    pause: least and most seconds between two faults.
    make_trainer: another trainer of this model. For users' threads, one each.
    render: `ModelRenderer.render`.
    adam: what users step with.
    real: vLLM and transformers. There are images among training data. How requests are batched changes logprobs by
        less than `CLOSE`; the fakes' are equal to the last bit.
    close_norm: relative difference of gradients' norms.
    """

    name: str
    arguments: Sequence[str]
    limit: int
    pause: tuple[float, float]
    make_trainer: Callable[[], Trainer]
    render: Callable[..., Any]
    adam: AdamParams
    real: bool
    close_norm: float

    def same(self, expected: npt.NDArray[np.float32], got: npt.NDArray[np.float32]) -> bool:
        """Whether both are logprobs of one trainer, or of one sampler."""
        return np.allclose(expected, got, rtol=0, atol=CLOSE) if self.real else np.array_equal(expected, got)


CLOSE = 2e-4
"""Logprobs of the sampler differ from those of the trainer by less; a command more or less moves them by far more."""


def adam(learning_rate: float, eps: float) -> AdamParams:
    return AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=eps, weight_decay=0.0, grad_clip_norm=0.0)


def served_fake() -> Served:
    """The fakes. Norms are sums in float64, whose order is that of the BLAS; all else is exact."""
    from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeTrainer

    name = "fake/bigram"
    return Served(
        name,
        ("--fake", "--model", name),
        limit=3,
        pause=(0.5, 3.0),
        make_trainer=lambda: FakeTrainer(FakeModel(name)),
        render=FakeRenderer(FakeModel(name)).render,
        adam=adam(0.03, 1e-8),
        real=False,
        close_norm=1e-12,
    )


def served_tiny(folder: Path) -> Served:
    """A tiny Qwen3-VL, which is made in `folder`, on vLLM and transformers.

    How requests are batched changes the last bits of float32. Adam divides by its second moment, so a gradient near 0
    that changes its sign moves a weight by 2 x the learning rate, and two trainers part ways within 20 steps. With an
    eps above all gradients a step is nearly linear in them: after 200 steps the logprobs of two trainers that were
    given the same data in other batches differ by 4e-6 and their norms by 5e-7 of themselves, and a step more or less
    changes logprobs by about 1.
    """
    import torch
    from tinker_local.backend.models.load_engines import load_renderer
    from tinker_local.backend.tiny_models import make_tiny_vl_model
    from tinker_local.backend.training.run.worker import HFTrainer
    from tinker_local.backend.training.trainer_config import TrainerConfig

    torch.set_num_threads(1)
    make_tiny_vl_model(folder)
    name, context, rank = "tiny/vl", 256, 8
    return Served(
        name,
        (
            *("--model", f"{name}={folder}", "--dtype", "float32", "--kv-cache", "0.25"),
            *("--max-rank", f"{rank}", "--max-context-length", f"{context}"),
        ),
        limit=15,
        pause=(1.0, 6.0),
        make_trainer=partial(
            HFTrainer,
            TrainerConfig(
                str(folder),
                name=name,
                dtype="float32",
                max_context_length=context,
                micro_batch_tokens=1024,
                max_rank=rank,
            ),
        ),
        render=load_renderer(str(folder), dtype="float32").render,
        adam=adam(0.003, 100.0),
        real=True,
        close_norm=2e-5,
    )
