"""Triton's kernels on a CPU, one program after the other in Python: for vLLM's Model Runner V2, which has no others.

`TRITON_INTERPRET=1` chooses Triton's interpreter, before Triton is imported. vLLM looks for a backend of CPUs in
Triton's list, which only a build that is on no index has, and otherwise takes Triton for missing. The interpreter makes
NaN of some kernels in bfloat16 (the tower of Qwen3-VL, on V1 as well): it is for float32, and for tests.
"""

import os
import sys
from types import SimpleNamespace

from tinker_local.types import UnsupportedError

INTERPRETER = "TRITON_INTERPRET"


class _Driver:
    """What vLLM asks of a backend. Interpreted kernels are neither compiled nor launched."""

    @staticmethod
    def is_active() -> bool:
        return True


def interpret() -> None:
    """Let vLLM use Triton's interpreter. UnsupportedError if it was not chosen before Triton or vLLM was imported."""
    if os.environ.get(INTERPRETER) != "1":
        raise UnsupportedError(
            f"on a CPU, Model Runner V2 needs {INTERPRETER}=1, and is ten to fifty times as slow as V1"
        )
    import triton.backends
    from triton.runtime.jit import JITFunction

    if isinstance(triton.language.zeros, JITFunction):
        raise UnsupportedError(f"{INTERPRETER}=1 was set after Triton had been imported; set it before Python starts")
    if "cpu" in triton.backends.backends:
        return
    if "vllm.triton_utils" in sys.modules:
        raise UnsupportedError("vLLM was imported before it could find Triton's interpreter; start a new process")
    triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
