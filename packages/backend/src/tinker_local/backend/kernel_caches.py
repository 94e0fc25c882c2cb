"""Where Triton, vLLM, FlashInfer and FlashAttention 4 keep compiled kernels, so that only the first start of a model
waits for them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cache:
    """A library's folder. `variable`: of the environment, which names it. Without that it is `below` the folder that
    `root` names, and without both it is the `usual` one. `makes`: what the library makes in it."""

    variable: str
    root: str
    below: str
    usual: str
    makes: str = ""

    def folder(self, environment: Mapping[str, str]) -> Path | None:
        """None if it is in the home of somebody who has none."""
        if named := environment.get(self.variable):
            return Path(named, self.makes)
        if root := environment.get(self.root):
            return Path(root, self.below, self.makes)
        try:
            return Path(self.usual, self.makes).expanduser()
        except RuntimeError:
            return None


FLASH_ATTENTION = Cache(
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME", "flash_attention", "~/.cache/flash_attention"
)

CACHES = (
    Cache("TRITON_CACHE_DIR", "TRITON_HOME", ".triton/cache", "~/.triton/cache"),
    Cache("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "vllm", "~/.cache/vllm"),
    # vLLM imports it on a GPU, which fails where it cannot make its folder.
    Cache("FLASHINFER_WORKSPACE_BASE", "", "", "~", ".cache/flashinfer"),
    FLASH_ATTENTION,
)


def use_writable_caches(data_dir: Path, say: Callable[[str], None]) -> None:
    """Keep compiled kernels below `data_dir` where their own folder cannot be written, and `say` so. Holds for this
    process and those that it starts from now on; call it before Triton and vLLM are imported."""
    for cache in CACHES:
        folder = cache.folder(os.environ)
        if folder is None or not _can_be_written(folder):
            instead = data_dir.resolve() / "kernels" / cache.variable.partition("_")[0].lower()
            os.environ[cache.variable] = str(instead)
            say(f"{folder or cache.usual} cannot be written ({cache.variable}): compiled kernels are kept in {instead}")


def keep_flash_attention() -> None:
    """FlashAttention 4 keeps what it compiles only where it is asked to, and then in the folder for temporary files,
    where others could put kernels. Call it before its import; what the environment already says holds."""
    if (folder := FLASH_ATTENTION.folder(os.environ)) is not None:
        os.environ.setdefault(FLASH_ATTENTION.variable, str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _can_be_written(folder: Path) -> bool:
    """Whether `folder` is or could be made a folder with new files. Also on a file system that is read-only, and below
    a folder that may not be searched."""
    there = folder.absolute()
    while not os.access(there, os.F_OK):
        there = there.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
