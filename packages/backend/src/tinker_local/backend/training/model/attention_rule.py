"""How attention makes weights from scores."""

from dataclasses import dataclass, replace

import torch
from tinker_local.backend.training.parallel.shared_rows import SharedRow


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How scores become weights: softmax(scaling q k), with extensions in some families.

    `window`: a position attends to itself and the `window` - 1 positions before it (None: all before it). `softcap` c:
    scores become c tanh(score / c) (arXiv 2408.00118). `sinks` [N]: one frozen logit per head that takes a share of the
    softmax but has no value (arXiv 2309.17453). `whole_images`: whether positions of `Segments.images` see all of it;
    layers of Gemma 4 without a window read them as text.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    whole_images: bool = True

    def of_heads(self, shared: SharedRow) -> "AttentionRule":
        """The rule for this rank's heads."""
        ranks = shared.ranks
        return self if self.sinks is None else replace(self, sinks=self.sinks.chunk(ranks.size)[ranks.rank])
