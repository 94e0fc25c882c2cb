"""What libraries say while they start that nobody who serves a model can act on. Each line is named by itself, so that
new warnings, and all of our own, are seen."""

import logging
import os
import sys
import warnings


def silence() -> None:
    """Call it before torch, transformers or vLLM is imported. What the user set in the environment stays."""
    # "NUMA binding: Using MEMBIND policy ...", of vLLM on CPU, which warns from C++ as nothing else does at start-up.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.stderr.isatty():  # a log keeps every step of a bar
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # vLLM looks at every attribute of torch.distributed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No CUDA runtime is found")  # said where there is no GPU, too
