"""Float64 as the judge. A bound on rounding holds on one processor and fails on the next, which adds in another order.

A formula is compared in float64, where only a fault differs (`InFloat64`). What this
project's trainer, vLLM or transformers compute in float32 is compared with float64 too, and may differ by a few times
what rounding every result to float32 moves (`Exact`): a number of the model and the prompt, and not of the processor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DRAWS = 4
"""How often all results are rounded, each time in other directions."""

TIMES = 16.0
"""Float32 may be at most this many times farther off than the worst of these draws: a sum rounds once for each term."""


class InFloat64(TorchDispatchMode):
    """Float64 wherever code asks for float32, as norms, softmaxes, routers and the delta rule of transformers do; in
    forward and backward, for a model in float64. Torch has no product of groups in float64: each group is multiplied.

    `rounded`: draws for each number that is computed from others a relative error of at most half a step of float32;
    whole numbers, which may be places in a table, stay.
    """

    def __init__(self, rounded: torch.Generator | None = None) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.ops.aten.view.dtype:  # the bits of one dtype read as another
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default and {given[0].dtype, given[1].dtype} == {torch.float32, torch.float64}:
            given = [value.double() for value in given]  # frequencies are always float32 (transformers 5.17)
        if func is torch.ops.aten._grouped_mm.default and given[0].dtype == torch.float64:
            ends = (given[2] if len(given) > 2 else named["offs"]).tolist()
            places = zip([0, *ends[:-1]], ends, strict=True)
            result = torch.cat([given[0][start:stop] @ given[1][group] for group, (start, stop) in enumerate(places)])
        else:
            result = func(*given, **named)
        if self._rounded is not None and not func.is_view and _in_float64([given, named]):
            for tensor in _in_float64(result):
                errors = torch.rand(tensor.shape, generator=self._rounded, dtype=torch.float64) - 0.5
                tensor.mul_(1 + torch.finfo(torch.float32).eps * errors.mul_(tensor != tensor.trunc()))
        return result


def _in_float64(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64]


def exactly(compute: Callable[[], npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], float]:
    """What `compute` finds with a model in float64, and how far rounding to float32 moves what it moves most."""
    with InFloat64():
        exact = compute()
    moved = float(np.spacing(np.float32(np.abs(exact).max())))
    for seed in range(DRAWS):
        with InFloat64(torch.Generator().manual_seed(seed)):
            moved = max(moved, float(np.abs(compute() - exact).max()))
    return exact, moved


class Exact:
    """The model of `trainer` and its adapters, as they are when asked, in float64."""

    def __init__(self, trainer: HFTrainer, folder: str | None = None) -> None:
        """`folder`: of a dense model of the same numbers, if that of the trainer is packed."""
        self._trainer = trainer
        path = folder or trainer._loaded.model.name_or_path
        with InFloat64():
            self._exact = HFTrainer(
                TrainerConfig(path, name="exact", dtype="float64", device="cpu", image_cache_bytes=0)
            )

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput) -> tuple[npt.NDArray[Any], float]:
        """As `HFTrainer.logprobs`, and how far rounding moves the one that it moves most."""
        which = None
        if adapter_id is not None:
            which = "a"
            self._exact.load_adapter(which, self._trainer.capture(adapter_id, optimizer=False))
        found = exactly(lambda: self._exact.logprobs(which, *inputs))
        if which is not None:
            self._exact.remove_adapter(which)
        return found

    def assert_near(
        self, adapter_id: str | None, inputs: Sequence[RenderedInput], *found: npt.NDArray[Any], at: Any = ...
    ) -> None:
        """That all that was `found` in float32 are the logprobs of `inputs` with the adapter, at the positions `at`."""
        exact, moved = self.logprobs(adapter_id, *inputs)
        for each in found:
            assert_near(each, exact[at], moved, str(adapter_id))


def assert_near(found: npt.NDArray[Any], exact: npt.NDArray[Any], moved: float, what: str = "") -> None:
    """That `found` differs from `exact` by no more than rounding to float32 explains, which moves it by `moved`."""
    np.testing.assert_allclose(found, exact, rtol=0, atol=TIMES * moved, err_msg=what)


def assert_as_near(found: Mapping[str, Any], other: Mapping[str, Any], exact: Mapping[str, Any]) -> float:
    """That arrays of the same size, which were `found` in float32, are at most `TIMES` as far from `exact` as `other`
    is, which another library computed in float32; both by their worst value. Returns how far they may be."""
    assert found.keys() == other.keys() == exact.keys()
    step = float(np.spacing(np.float32(max(np.abs(values).max() for values in exact.values()))))
    bound = TIMES * max(step, *(float(np.abs(other[name] - values).max()) for name, values in exact.items()))
    for name, values in exact.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=bound, err_msg=name)
    return bound
