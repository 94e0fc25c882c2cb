"""What may be wrong with a machine's GPUs, its driver or its compiler, before anything is loaded on them."""

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

LEAST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
"""The lowest driver on Linux for all versions of CUDA with that number before the point ("CUDA Toolkit and Minimum
Required Driver Version" in the release notes of CUDA 13.0)."""


def driver_problem(driver: str, runs: int, cuda: str) -> str | None:
    """Why a `driver` ("575.57.08") that `runs` CUDA up to a version (12090: 12.9) cannot run what was built for `cuda`
    ("13.0"), all versions of which with the same number before the point can; None if it can, or if that is not
    known."""
    major = int(cuda.partition(".")[0] or 0)
    if major not in LEAST_DRIVERS or not runs or runs >= 1000 * major:
        return None
    return (
        f"NVIDIA's driver {driver} runs CUDA up to {runs // 1000}.{runs % 1000 // 10}, and torch was built for {cuda}: "
        f"it needs driver {LEAST_DRIVERS[major]} or newer"
    )


def cuda_of_driver() -> int:
    """The newest CUDA that the driver runs, 13000 for 13.0, with NVIDIA's compatibility package if that is used; 0
    without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


@functools.cache
def cuda_of_torch() -> str:
    """The version of CUDA for which the torch that is installed was built; empty without one. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        told = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", told, re.MULTILINE)
    return found[1] if found else ""


def compiler_problem() -> str | None:
    """Why Triton could not compile the code that starts its kernels, which it does with a C compiler and Python's
    headers; None if it could."""
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return (
            "no C compiler was found. Triton compiles kernels with it (Debian, Ubuntu: apt-get install gcc; or set CC)"
        )
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not headers.is_file():
        return (
            f"{headers} is not there. Triton needs it to compile kernels (Debian, Ubuntu: apt-get install python3-dev)"
        )
    return None


def unlike(names: Mapping[int, str]) -> str | None:
    """What to know of GPUs of different kinds, by their numbers; None if all are of one."""
    if len(set(names.values())) < 2:
        return None
    listed = ", ".join(f"GPU {at} is a {name}" for at, name in names.items())
    return f"{listed}: the slowest sets the pace of all that share a run; CUDA_VISIBLE_DEVICES chooses among them"
