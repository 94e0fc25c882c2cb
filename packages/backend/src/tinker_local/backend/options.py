"""Every option of a backend, with its default, its unit and its help text.

`BackendOptions` is the only place: `tinker-local serve` makes its command-line options from these fields.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

DType = Literal["float32", "bfloat16"]
Precision = Literal["int8", "int4"]
HeadPrecision = Literal["int8"]
EnginePlace = Literal["inline", "process"]
DecoderName = Literal["written-out", "autograd"]
DecoderChoice = Literal["auto", DecoderName]
SharedWeights = Literal["auto", "always", "off"]
InFlightCache = Literal["keep", "recompute"]
SharePrefixes = Literal["auto", "off"]
ReplayRoutes = Literal["auto", "off"]
GrammarChoice = Literal["auto", "always", "never"]
ShardChoice = Literal["auto", "never"] | int

MICRO_BATCH_TOKENS = 8192
"""Positions in one forward pass of the trainer, unless an option or the memory of the GPUs says otherwise."""

CPU_MICRO_BATCH_TOKENS = 1024
"""The same on a CPU: more positions do not fit its caches. With 8192, a step of models that are 64 to 2048 wide took 3
to 48 % longer."""

_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?")


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/tinker-local`, or `~/.local/share/tinker-local` if that variable is not set."""
    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "tinker-local"


def check_origin(text: str) -> str:
    """Return `text`; ValueError unless it is the origin of web pages, as browsers write it."""
    scheme, _, rest = text.partition("://")
    port = rest.rpartition(":")[2] if _ORIGIN.fullmatch(text) else "0"
    default = {"http": "80", "https": "443"}.get(scheme)
    if not _ORIGIN.fullmatch(text) or port == default or (port.isdecimal() and not 0 < int(port) < 2**16):
        raise ValueError(
            "an origin is http://HOST[:PORT] or https://HOST[:PORT] in small letters, without the scheme's own port, "
            f"not {text!r}"
        )
    return text


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model: the name that clients use, and the local folder or hub name that holds its weights."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "ModelSource":
        """Parse `NAME=PATH`, or `NAME` alone for a hub name or a folder; ValueError if a side is empty."""
        name, separator, path = text.partition("=")
        if not name or (separator and not path):
            raise ValueError(f"expected NAME or NAME=PATH, got {text!r}")
        return cls(name, path or name)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse different numbers and ranges of them (`0,2-4`); ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())):
            raise ValueError(f"expected numbers and ranges such as 0,2-4, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()} in {text!r} ends before it begins")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names a GPU twice")
    return tuple(found)


def parse_host_and_port(text: str) -> str:
    """`text` if it is HOST:PORT; ValueError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 2**16:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return text


def _check_image_host(text: str) -> str:
    # numpy and pydantic come with it, and `--help` is to be there at once.
    from tinker_local.types.named_pictures import check_image_host

    return check_image_host(text)


def parse_shard(text: str) -> ShardChoice:
    """Parse `auto`, `never` or a number from 2; ValueError for anything else."""
    if text in ("auto", "never"):
        return cast(ShardChoice, text)
    if not re.fullmatch(r"\d{1,4}", text) or int(text) < 2:
        raise ValueError(f"expected auto, never or a number of GPUs from 2, got {text!r}")
    return int(text)


QUOTAS = {
    "adapters": "adapters",
    "adapter-memory": "adapter_bytes",
    "queued-requests": "queued_requests",
    "queued-memory": "queued_bytes",
    "samples": "samples",
    "storage": "storage_bytes",
    "ephemeral-versions": "ephemeral_bytes",
}
"""What `--quota` can limit, and the field of `Amounts` that it is."""


@dataclass(frozen=True, slots=True)
class OwnerQuota:
    """Limits of `owner`, or of each owner (None), by the fields of `Amounts`; infinity is none."""

    owner: str | None
    most: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> "OwnerQuota":
        """Parse `[OWNER:]NAME=NUMBER[,NAME=NUMBER...]`, memory and storage in GiB, `none` for no limit; ValueError."""
        owner, separator, limits = text.rpartition(":")
        if bool(separator) != bool(owner):
            raise ValueError(f"expected [OWNER:]NAME=NUMBER[,NAME=NUMBER...], got {text!r}")
        most = {}
        for limit in limits.split(","):
            name, _, number = limit.partition("=")
            if name not in QUOTAS:
                raise ValueError(f"{name!r} in {text!r} is not one of {', '.join(QUOTAS)}")
            most[QUOTAS[name]] = math.inf if number == "none" else _amount(name, number)
        return cls(owner or None, tuple(most.items()))


def _amount(name: str, number: str) -> float:
    """A limit of `--quota`; GiB become bytes."""
    try:
        value = float(number) * 2**30 if QUOTAS[name].endswith("bytes") else int(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={number}: expected a number from 0, or none")
    return int(value)


USUAL_OPTIONS = "Options"
OF_ENGINES = "Memory and speed"
OF_GPUS = "Several GPUs and processes"
OF_CLIENTS = "What clients may do"
LIMITS = "Limits"
OF_SAVING = "Sessions and what is saved"
LOGS = "Logs"
GROUPS = (USUAL_OPTIONS, OF_ENGINES, OF_GPUS, OF_CLIENTS, LIMITS, OF_SAVING, LOGS)


@dataclass(frozen=True, slots=True)
class CommandOption:
    """How a field of `BackendOptions` appears on the command line.

    Attributes
    ----------
    flag: the option's name; None: the field's name with dashes.
    least, most: inclusive bounds of a number.
    gib: the command line takes GiB, the field holds bytes.
    shown_default: what `--help` shows as the default if the value depends on the machine.
    metavar: what `--help` shows as the value.
    must_exist: the folder has to exist.
    parse: parses one value of an option that may be repeated; ValueError if it is invalid.
    parse_one: parses the value of an option that may not be repeated; ValueError if it is invalid.
    group: where `--help` lists it, one of `GROUPS`.
    planned: the plan of a GPU's memory depends on it.
    """

    help: str
    flag: str | None = None
    least: float | None = None
    most: float | None = None
    gib: bool = False
    shown_default: str | None = None
    metavar: str | None = None
    must_exist: bool = False
    parse: Callable[[str], Any] | None = None
    parse_one: Callable[[str], Any] | None = None
    group: str = USUAL_OPTIONS
    planned: bool = False


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Limits and places. Times are in seconds, lengths in positions (tokens and image positions), sizes in bytes."""

    data_dir: Annotated[
        Path, CommandOption("Folder for checkpoints and metadata.", shown_default="~/.local/share/tinker-local")
    ] = field(default_factory=default_data_dir)
    dtype: Annotated[
        DType | None,
        CommandOption(
            "Element type of the base model. Default: float32 on CPU, bfloat16 on GPU.", group=OF_ENGINES, planned=True
        ),
    ] = None
    base_precision: Annotated[
        Precision | None,
        CommandOption(
            "Keep the matrices of the base model's layers in 8 or 4 bits, in one copy that trainer and sampler read, "
            "and multiply by in --dtype. They are made at the start, for one GPU or a CPU. Default: as --dtype.",
            group=OF_ENGINES,
            planned=True,
        ),
    ] = None
    head_precision: Annotated[
        HeadPrecision | None,
        CommandOption(
            "Keep the embedding and the LM head in 8 bits, in the same way, beside layers in any precision. Default: "
            "as --dtype.",
            group=OF_ENGINES,
            planned=True,
        ),
    ] = None
    trainer: Annotated[
        EnginePlace | None,
        CommandOption(
            "Train in the server's process, or in a separate one, which does not share the GIL, and is started again "
            "if it ends or hangs. "
            "Default: process on GPU, inline on CPU and with --fake.",
            group=OF_GPUS,
            planned=True,
        ),
    ] = None
    trainer_timeout: Annotated[
        float,
        CommandOption(
            "Seconds that a call of a separate trainer process may take, besides 0.01 for each position in it. After "
            "that the process is ended and started again.",
            least=1,
            group=OF_GPUS,
        ),
    ] = 120.0
    sampler: Annotated[
        EnginePlace | None,
        CommandOption(
            "Sample in the server's process, or in a separate one for each base model, which does not share the GIL, "
            "and is started again if it ends or hangs. Default: process on GPU, inline on CPU and with --fake.",
            group=OF_GPUS,
            planned=True,
        ),
    ] = None
    sampler_timeout: Annotated[
        float,
        CommandOption(
            "Seconds that a step of a separate sampler process may take, besides as many as its first start took. "
            "After that the process is ended and started again.",
            least=1,
            group=OF_GPUS,
        ),
    ] = 120.0
    train_gpus: Annotated[
        tuple[int, ...],
        CommandOption(
            "GPUs that train, such as 0,1 or 0-3: each runs a rank of the trainer in its own process, and they share "
            "the data of a step. On CPU and with --fake: as many processes. Default: the GPUs that --sample-gpus does "
            "not name, or all, or one half where memory is short; one trainer on CPU.",
            metavar="GPUS",
            parse_one=parse_gpus,
            group=OF_GPUS,
            planned=True,
        ),
    ] = ()
    train_hosts: Annotated[
        int,
        CommandOption(
            "Hosts that train, this one among them. On each there are as many ranks of the trainer as here, on GPUs "
            "that Ray has.",
            least=1,
            group=OF_GPUS,
        ),
    ] = 1
    sample_hosts: Annotated[
        int,
        CommandOption(
            "Hosts that sample, this one among them. On each there are as many replicas of the sampler as here, on "
            "GPUs that Ray has.",
            least=1,
            group=OF_GPUS,
        ),
    ] = 1
    ray_address: Annotated[
        str | None,
        CommandOption(
            "Ray's cluster, which starts ranks and replicas on other hosts (docs/scaling.md). It needs the extra ray "
            "and a token.",
            metavar="HOST:PORT",
            parse_one=parse_host_and_port,
            group=OF_GPUS,
        ),
    ] = None
    shard: Annotated[
        ShardChoice,
        CommandOption(
            "How many of --train-gpus hold a copy of the trainer's layers together, each a part of it (FSDP2). N must "
            "divide their number; never: each holds a whole copy; auto: all of them hold one together if whole copies "
            "do not fit beside the rest.",
            metavar="auto|never|N",
            parse_one=parse_shard,
            group=OF_GPUS,
            planned=True,
        ),
    ] = "auto"
    context_parallel: Annotated[
        int,
        CommandOption(
            "How many of --train-gpus compute each micro-batch together, each a part of its positions, so that it may "
            "have as many times --micro-batch-tokens, and a sequence be longer than one GPU has memory for. N must "
            "divide their number and the model's KV heads.",
            least=1,
            group=OF_GPUS,
            planned=True,
        ),
    ] = 1
    sample_gpus: Annotated[
        tuple[int, ...],
        CommandOption(
            "GPUs that sample, such as 0,2-4: each runs a replica of the sampler in its own process, and requests "
            "go to the replica that has read their prompt or has the fewest sequences. On CPU and with --fake: as many "
            "processes. Default: the GPUs that --train-gpus does not name, or all, or one half where memory is short; "
            "one sampler on CPU.",
            metavar="GPUS",
            parse_one=parse_gpus,
            group=OF_GPUS,
            planned=True,
        ),
    ] = ()
    sample_tp: Annotated[
        int | None,
        CommandOption(
            "How many GPUs of --sample-gpus share one replica, each with a part of every layer (tensor parallelism). "
            "It must divide their number and the model's KV heads. Default: as few as have room for the model; 1 on "
            "CPU.",
            least=1,
            group=OF_GPUS,
            planned=True,
        ),
    ] = None
    decoder: Annotated[
        DecoderChoice,
        CommandOption(
            "How layers are trained: with a hand-written forward and backward, with transformers' modules and "
            "autograd, or with the first where it supports the layers and the second otherwise.",
            group=OF_ENGINES,
            planned=True,
        ),
    ] = "auto"
    share_prefixes: Annotated[
        SharePrefixes,
        CommandOption(
            "Whether training computes once what the data of a request begin with, such as the prompt of a group of "
            "samples: auto, where a beginning is worth it; off, each datum by itself.",
            group=OF_ENGINES,
        ),
    ] = "auto"
    replay_routes: Annotated[
        ReplayRoutes,
        CommandOption(
            "Whether a gradient on recorded samples of a mixture of experts takes the experts that they took: auto, of "
            "all models whose engines can, and whose records the start finds right; off, the trainer's routers choose.",
            group=OF_ENGINES,
        ),
    ] = "auto"
    in_flight_cache: Annotated[
        InFlightCache,
        CommandOption(
            "What becomes of the keys and values of running samples when the weights of an in-flight client change: "
            "keep, they stay, as on the hosted service; recompute, they are computed again with the new weights.",
            group=OF_ENGINES,
        ),
    ] = "keep"
    shared_weights: Annotated[
        SharedWeights,
        CommandOption(
            "Whether trainer and sampler read one copy of the weights, of all matrices that vLLM keeps as they are: "
            "auto, where the server sees one GPU; always, on a CPU, too; off, each has a copy.",
            group=OF_ENGINES,
            planned=True,
        ),
    ] = "auto"
    strict_losses: Annotated[
        bool,
        CommandOption(
            "Refuse stable_reinforce, whose objective on the hosted service is not public, instead of training it by "
            "this project's definition.",
            group=OF_CLIENTS,
        ),
    ] = False
    record_sessions: Annotated[
        bool,
        CommandOption(
            "Let owners make sessions whose conversations, of any program that speaks OpenAI's or Anthropic's API, are "
            "kept in the data folder as tokens to train on: docs/recorded-sessions.md.",
            group=OF_CLIENTS,
        ),
    ] = False
    strict_hosted: Annotated[
        bool,
        CommandOption(
            "Refuse what the hosted service is known to refuse and this server takes: ranks that are not powers of 2, "
            "and training of vision towers.",
            group=OF_CLIENTS,
        ),
    ] = False
    max_adapters: Annotated[
        int, CommandOption("Maximum number of training runs in memory.", least=1, group=OF_ENGINES)
    ] = 64
    max_rank: Annotated[int, CommandOption("Maximum LoRA rank.", least=1, most=512, planned=True)] = 128
    train_vision: Annotated[
        bool,
        CommandOption(
            "Let clients also train the vision towers of models (`train_vision`). Adapters, and vLLM's slots for them, "
            "then take more memory. Default: towers are frozen.",
            group=OF_ENGINES,
            planned=True,
        ),
    ] = False
    max_adapter_bytes: Annotated[
        int | None,
        CommandOption(
            "Maximum memory for all adapters, with their gradients and optimizer state. Default: no limit.",
            flag="--max-adapter-memory",
            gib=True,
            group=OF_ENGINES,
        ),
    ] = None
    max_context_length: Annotated[
        int | None,
        CommandOption(
            "Limit the context length of the models. Default: the model's own, with longrope before its extension.",
            least=16,
            planned=True,
        ),
    ] = None
    compare_seconds: Annotated[
        float,
        CommandOption(
            "Seconds that the start may take to compare trainer and sampler on long texts; 0: only on short ones. What "
            "was found is kept in the data folder for later starts.",
            least=0,
            group=OF_ENGINES,
        ),
    ] = 30.0
    micro_batch_tokens: Annotated[
        int | None,
        CommandOption(
            "Maximum positions in one forward pass on each GPU of the trainer. Default: "
            f"{MICRO_BATCH_TOKENS}, or twice as many on GPUs that share the trainer's layers, do not sample, and have "
            f"the memory; {CPU_MICRO_BATCH_TOKENS} on a CPU.",
            least=1,
            group=OF_ENGINES,
            planned=True,
        ),
    ] = None
    image_folder: Annotated[
        Path | None,
        CommandOption(
            "Prompts may name images in this folder (`ImageAssetPointerChunk`). Default: none.",
            must_exist=True,
            group=OF_CLIENTS,
        ),
    ] = None
    image_hosts: Annotated[
        tuple[str, ...],
        CommandOption(
            "Prompts may name images on this public host, by http or https at their own ports, or at PORT. Repeat for "
            "more hosts. Default: none.",
            flag="--image-host",
            metavar="HOST[:PORT]",
            parse=_check_image_host,
            group=OF_CLIENTS,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        CommandOption(
            "Web pages of this origin, as https://app.example.org, may use the server from browsers (CORS), with a key "
            "where it asks for keys. Repeat for more origins. Default: none.",
            flag="--cors-origin",
            metavar="ORIGIN",
            parse=check_origin,
            group=OF_CLIENTS,
        ),
    ] = ()
    max_queued_requests: Annotated[
        int,
        CommandOption(
            "Maximum number of queued training requests. Beyond it, clients must slow down.", least=1, group=LIMITS
        ),
    ] = 8192
    max_queued_requests_per_session: Annotated[
        int, CommandOption("The same, for one session.", least=1, group=LIMITS)
    ] = 2048
    max_queued_bytes: Annotated[
        int,
        CommandOption(
            "Maximum size of all queued training requests, and of all requests for samples in flight. Beyond it, "
            "clients must slow down.",
            flag="--max-queued-memory",
            gib=True,
            group=LIMITS,
        ),
    ] = 4 * 2**30
    max_queued_bytes_per_session: Annotated[
        int, CommandOption("The same, for one session.", flag="--max-queued-memory-per-session", gib=True, group=LIMITS)
    ] = 2**30
    max_result_bytes: Annotated[
        int,
        CommandOption(
            "Maximum size of all results that clients may still read, in memory (32 MiB) and in files of the data "
            "folder. Beyond it, those are dropped that were read first, and then the oldest unread ones, of the "
            "session that has most, of the owner that has most.",
            flag="--max-results",
            gib=True,
            group=LIMITS,
        ),
    ] = 8 * 2**30
    max_result_bytes_per_session: Annotated[
        int, CommandOption("The same, for one session.", flag="--max-results-per-session", gib=True, group=LIMITS)
    ] = 2 * 2**30
    max_ephemeral_bytes: Annotated[
        int,
        CommandOption(
            "Maximum size of all ephemeral sampler versions, on disk and in memory. Beyond it, the least recently used "
            "are dropped, of the owner that has most.",
            flag="--max-ephemeral-versions",
            gib=True,
            group=LIMITS,
        ),
    ] = 64 * 2**30
    max_ephemeral_bytes_per_session: Annotated[
        int,
        CommandOption(
            "The same, for one session.", flag="--max-ephemeral-versions-per-session", gib=True, group=LIMITS
        ),
    ] = 16 * 2**30
    quotas: Annotated[
        tuple[OwnerQuota, ...],
        CommandOption(
            "Limits of each owner of keys, or of OWNER. NAME: adapters, adapter-memory (GiB), queued-requests, "
            "queued-memory (GiB), samples (requests in flight), storage (GiB of checkpoints), ephemeral-versions "
            "(GiB); NUMBER may be none. Repeat for more owners. Default: half of what all may have, and of the disk, "
            "if --api-key-file names several owners, otherwise none.",
            flag="--quota",
            metavar="[OWNER:]NAME=NUMBER[,...]",
            parse=OwnerQuota.parse,
            group=LIMITS,
        ),
    ] = ()
    kv_cache_bytes: Annotated[
        int | None,
        CommandOption(
            "Size of vLLM's KV cache. Default: 0.25 on CPU; on GPU, what the trainer leaves free.",
            flag="--kv-cache",
            gib=True,
            group=OF_ENGINES,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        CommandOption(
            "Share of the GPU's free memory for trainer and vLLM together.",
            least=0.05,
            most=1.0,
            group=OF_ENGINES,
            planned=True,
        ),
    ] = 0.98
    session_timeout: Annotated[
        float, CommandOption("Seconds without a heartbeat after which a session ends.", least=1, group=OF_SAVING)
    ] = 300.0
    autosave: Annotated[
        float | None,
        CommandOption(
            "Save each training run that has unsaved optimizer steps every so many minutes. Default: only when the "
            "server stops, or a session ends without success.",
            metavar="MINUTES",
            least=0.001,
            group=OF_SAVING,
        ),
    ] = None
    autosave_ttl: Annotated[
        float,
        CommandOption(
            "Days after which what the server saved by itself expires.",
            metavar="DAYS",
            least=1 / 24,
            most=3650,
            group=OF_SAVING,
        ),
    ] = 7.0
    stop_timeout: Annotated[
        float,
        CommandOption(
            "Seconds within which a stop ends. All but the last 10 of them (or half, if that is less) may go to saving "
            "training runs with unsaved optimizer steps; 0 saves none.",
            least=0,
            group=OF_SAVING,
        ),
    ] = 60.0
    expiry_grace: Annotated[
        float,
        CommandOption(
            "Seconds after the start, and after a jump of the machine's clock, for which nothing that has expired is "
            "deleted.",
            least=0,
            group=OF_SAVING,
        ),
    ] = 3600.0
    keep_sessions: Annotated[
        float,
        CommandOption(
            "Days for which the record of an ended session is kept. One with checkpoints is kept longer.",
            least=1,
            most=36500,
            group=OF_SAVING,
        ),
    ] = 365.0
    watch_logs: Annotated[
        Path | None,
        CommandOption(
            "Show the metrics of every `metrics.jsonl` below this folder in the console, as the Tinker Cookbook writes "
            "them, beside the run that the `checkpoints.jsonl` there names. Default: none.",
            must_exist=True,
            group=LOGS,
        ),
    ] = None
    module_gradient_norms: Annotated[
        bool,
        CommandOption(
            "Also report the norm of each module's gradient before clipping (`grad_norm/NAME`) in optimizer steps.",
            group=OF_CLIENTS,
        ),
    ] = False

    grammars: Annotated[
        GrammarChoice,
        CommandOption(
            "Serve structured output and tools in OpenAI's and Anthropic's APIs: auto, with vLLM 0.32 or newer, which "
            "has no known faults there; always, with an older one too; never.",
            group=OF_CLIENTS,
        ),
    ] = "auto"

    tool_parser: Annotated[
        str | None,
        CommandOption(
            "vLLM's parser for calls of tools, for all models (https://docs.vllm.ai/en/latest/features/tool_calling). "
            "Default: that of each model's family.",
            metavar="NAME",
            parse_one=str,
            group=OF_CLIENTS,
        ),
    ] = None

    # Not on the command line:
    batch_tokens: int = 65536
    """Maximum positions in one round of the training scheduler."""
    max_image_pixels: int = 64 * 2**20
    """Maximum pixels of one image."""
    max_num_samples: int = 1024
    """Maximum `num_samples` of one sampling request."""
    max_queued_samples: int = 20000
    """Maximum number of sampling requests that have not ended."""
    max_queued_samples_per_session: int = 10000
    """The same, for one session."""
    sampler_sleeps: bool = True
    """vLLM gives its GPU memory to the trainer when a training request would not fit otherwise. Its weights move to
    host memory until the next sample. Requires a single base model, because vLLM can put only one engine per process
    to sleep."""
    result_retention: float = 900.0
    """Seconds for which the result of a request can be retrieved."""
    result_memory_bytes: int = 32 * 2**20
    """Beyond it, results that clients may still read are put into files of the data folder, the oldest first."""
    gap_patience: float = 360.0
    """Seconds to wait for a missing `seq_id` before it is skipped."""
    failure_pause: float = 0.5
    """Seconds without another forward_backward of the run before the failure of one is answered."""
