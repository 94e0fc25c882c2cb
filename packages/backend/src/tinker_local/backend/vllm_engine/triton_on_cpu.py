"""Triton's kernels on a CPU, one program after the other in Python: for vLLM's Model Runner V2, which has no others.

Triton has an interpreter for debugging. vLLM asks Triton's list of backends for one of CPUs, which only a build that is
on no index has, and otherwise takes Triton for missing.
"""

import sys
from types import SimpleNamespace


class _Driver:
    """What vLLM asks of a backend. Interpreted kernels are neither compiled nor launched."""

    @staticmethod
    def is_active() -> bool:
        return True


def interpret() -> None:
    """Have kernels that are defined from now on interpreted. RuntimeError if vLLM's exist already."""
    import triton
    import triton.backends

    if "cpu" in triton.backends.backends:
        return
    if "vllm.triton_utils" in sys.modules:
        raise RuntimeError("vLLM was imported without Model Runner V2: its kernels cannot run on this CPU any more")
    triton.knobs.propagate_env = False  # processes that this one starts choose for themselves
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
