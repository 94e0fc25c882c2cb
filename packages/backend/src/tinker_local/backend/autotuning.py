"""Triton's autotuner compiles the choices of a kernel one after the other, each just before it times it. For all
kernels of linear attention in a layer, `fla-core`'s or vLLM's, that takes minutes, so here all choices are compiled
first, on all cores."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner, Config


@functools.cache
def compile_choices_at_once() -> None:
    """From now on, in this process. With a Triton that cannot do it (before 3.5), nothing changes."""
    if not hasattr(triton, "AsyncCompileMode"):
        return
    time_one = Autotuner._bench

    def compile_and_time(tuner: Autotuner, *args: Any, config: Config, **kwargs: Any) -> Any:
        choices = tuner.prune_configs(kwargs)
        if len(choices) > 1 and config == choices[0]:
            _compile(tuner, choices, args, kwargs)
        return time_one(tuner, *args, config=config, **kwargs)

    Autotuner._bench = compile_and_time


def _compile(tuner: Autotuner, choices: Sequence[Config], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Compile `choices` for a launch with these arguments, in threads: most of it does not hold Python's lock. One that
    fails is compiled again when it is timed, and the autotuner expects that error."""
    launch = {name: value for name, value in kwargs.items() if name != "warmup"}
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for choice in choices:
            tuner.fn.warmup(*args, **launch, **choice.all_kwargs())
    kernel = tuner.fn
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    for kernels, *_ in kernel.device_caches.values():
        # Triton keeps what failed, with its error and thereby the tensors of this launch.
        for key in [key for key, found in kernels.items() if isinstance(found, triton.FutureKernel)]:
            del kernels[key]
