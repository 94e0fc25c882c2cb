"""What a server says while it starts."""

import re
import subprocess
import sys
from typing import Any

import pytest

SAID = (
    r"starting|loading .*|tiny/\S+: still starting, \d+ s so far"
    r"|tiny/\S+: trainer and sampler (are up in .*|agree to .* nats, checked in .* s: .*)"
    r"|tiny/\S+: trained by the written-out decoder; adapters reach q_proj, .*, lm_head"
    r"; serves contexts of up to \d+ positions"
    r"|tiny/\S+: started in \d+\.\d s( \((\w+: [^;]* s(; )?)+\))?"
    r"|data folder: .*|ready: http://.*"
)


def test_a_server_says_at_its_start_what_helps_and_nothing_else(real_server: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("on a GPU vLLM and its kernels have more to say, which differs from machine to machine")
    ready = next(number for number, line in enumerate(real_server.lines) if line.startswith("ready:"))
    said = [line.strip() for line in real_server.lines[: ready + 1] if line.strip()]
    assert [line for line in said if not re.fullmatch(SAID, line)] == []
    assert len(said) >= 6


def test_other_warnings_of_libraries_and_all_of_ours_are_seen() -> None:
    program = """
import logging, warnings
from tinker_local.backend.cli.start_up_noise import silence
logging.basicConfig(level=logging.WARNING)
silence()
warnings.warn("`torch.distributed.reduce_op` is deprecated, use another", FutureWarning)
logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found, using CUDA_HOME=%r", "/usr")
warnings.warn("another is deprecated", FutureWarning)
logging.getLogger("torch.utils.cpp_extension").warning("the compiler is too old")
logging.getLogger("tinker_local.backend.storage").warning("a checkpoint is gone")
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert "reduce_op" not in said
    assert "CUDA runtime" not in said
    for seen in ("another is deprecated", "the compiler is too old", "a checkpoint is gone"):
        assert seen in said
