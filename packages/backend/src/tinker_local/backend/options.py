"""What a backend is told when it starts."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DType = Literal["float32", "bfloat16"]
TrainerPlace = Literal["inline", "process"]


def default_data_dir() -> Path:
    """Where checkpoints go unless told otherwise: `$XDG_DATA_HOME/tinker-local` or `~/.local/share/tinker-local`."""
    import os

    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "tinker-local"


_IMAGE_HOST = re.compile(r"[^\s/\\@?#*:\[\]]+(:\d{1,5})?")


def check_image_host(text: str) -> None:
    """ValueError unless a URL can match it: `HOST` or `HOST:PORT`, or an IPv6 address without brackets."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        if not _IMAGE_HOST.fullmatch(text):
            raise ValueError(f"a host of images is HOST or HOST:PORT, not {text!r}") from None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model: the name that clients use, and a local folder or hub name that holds its weights."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "ModelSource":
        """`NAME=PATH`, or `NAME` alone for a hub name or a folder; ValueError if a side is empty."""
        name, separator, path = text.partition("=")
        if not name or (separator and not path):
            raise ValueError(f"expected NAME or NAME=PATH, got {text!r}")
        return cls(name, path or name)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Limits and places. Times in seconds, lengths in positions (tokens, image positions included), sizes in bytes.

    `dtype` None: float32 on CPU, bfloat16 on CUDA. `trainer`: in a thread of this process, or in a process of its own,
    where it shares the GIL with nobody; None: "process" on CUDA, "inline" on CPU and for fakes.
    `max_context_length` None: the model's own. `micro_batch_tokens`: most positions in one forward of the trainer;
    `batch_tokens`: in one round of the scheduler.
    `image_folder`, `image_hosts`: where images may come from that a prompt names by path or URL (`ImageAssets`).
    `kv_cache_bytes` None: 256 MiB on CPU; on CUDA by `gpu_plan.py`, which divides `gpu_memory_utilization` of what is
    free on the card between trainer and vLLM.
    `sampler_sleeps`: vLLM gives its part to the trainer when a request does not fit otherwise, and takes it back when
    somebody samples; its weights are in host memory meanwhile. It does so only where one base model is served (vLLM
    can do it for one engine of a process).
    `module_gradient_norms`: the metrics of an optimizer step hold the norm of each module's gradient, too.
    """

    data_dir: Path = field(default_factory=default_data_dir)
    dtype: DType | None = None
    trainer: TrainerPlace | None = None
    max_adapters: int = 64
    max_rank: int = 128
    max_adapter_bytes: int | None = None
    max_context_length: int | None = None
    micro_batch_tokens: int = 8192
    batch_tokens: int = 65536
    max_image_pixels: int = 64 * 2**20
    image_folder: Path | None = None
    image_hosts: tuple[str, ...] = ()
    max_num_samples: int = 1024
    max_queued_samples: int = 20000
    max_queued_requests: int = 8192
    max_queued_requests_per_session: int = 2048
    max_queued_bytes: int = 4 * 2**30
    max_queued_bytes_per_session: int = 2**30
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.95
    sampler_sleeps: bool = True
    module_gradient_norms: bool = False
    session_timeout: float = 300.0
    result_retention: float = 900.0
    hole_patience: float = 360.0
