"""Where Triton, vLLM and FlashInfer keep compiled kernels, so that only the first start of a model waits for them."""

import os
from collections.abc import Callable
from pathlib import Path

CACHES = {"TRITON_CACHE_DIR": "~/.triton/cache", "VLLM_CACHE_ROOT": "~/.cache/vllm", "FLASHINFER_WORKSPACE_BASE": "~"}
"""The variables of the environment that name these folders, and which are meant without them. FlashInfer, which vLLM
imports on a GPU, makes `.cache/flashinfer` below its own, and cannot be imported where it must not."""


def use_writable_caches(data_dir: Path, say: Callable[[str], None]) -> None:
    """Keep compiled kernels below `data_dir` where their own folder cannot be written, and `say` so. Holds for this
    process and those that it starts from now on; call it before Triton and vLLM are imported."""
    for variable, usual in CACHES.items():
        folder = Path(os.environ.get(variable) or Path(usual).expanduser())
        if not _can_be_written(folder):
            instead = data_dir.resolve() / "kernels" / variable.partition("_")[0].lower()
            os.environ[variable] = str(instead)
            say(f"{folder} cannot be written ({variable}): compiled kernels are kept in {instead}")


def _can_be_written(folder: Path) -> bool:
    """Whether `folder` is or could be made a folder with new files. Also on a file system that is read-only."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
