"""A kernel to tune, and a fake of the driver of an H100: what Triton's compiler asks of it."""

from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget


class Driver:
    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def halve(x, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(block != 32, "a choice that does not compile")
    at = tl.arange(0, block)
    tl.store(x + at, tl.load(x + at) / 2)
