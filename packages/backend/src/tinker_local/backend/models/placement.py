"""Which GPUs train and which sample: the layouts that options allow, and which GPUs each process sees."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_local.backend.options import BackendOptions, EnginePlace

FIRST_GPU = 0
"""The GPU of an engine that is not one of several."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the engines of a base model are. `train_gpus`: a rank of the trainer on each; `sample_gpus`: a replica of
    the sampler on each `sample_tp` of them. Empty: the engine is on `FIRST_GPU`, or on the CPU, at its place of
    `--trainer` or `--sampler`. `shards`: how many ranks of the trainer hold one copy of its layers together;
    `context_parallel`: how many compute each micro-batch together."""

    train_gpus: tuple[int, ...] = ()
    sample_gpus: tuple[int, ...] = ()
    sample_tp: int = 1
    shards: int = 1
    context_parallel: int = 1

    @property
    def trains_on(self) -> tuple[int, ...]:
        """The GPUs that have a trainer, if there are any."""
        return self.train_gpus or (FIRST_GPU,)

    @property
    def samples_on(self) -> tuple[int, ...]:
        """The GPUs that have a sampler, if there are any."""
        return self.sample_gpus or (FIRST_GPU,)

    def __str__(self) -> str:
        copies = "a copy of the weights on each" if self.shards == 1 else f"a copy of the layers on each {self.shards}"
        if self.context_parallel > 1:
            copies += f", each micro-batch on {self.context_parallel}"
        replicas = "a replica on each" if self.sample_tp == 1 else f"a replica on each {self.sample_tp}"
        trains = _names(self.trains_on) + (f" ({copies})" if len(self.trains_on) > 1 else "")
        samples = _names(self.samples_on) + (f" ({replicas})" if len(self.samples_on) > 1 else "")
        return f"trains on {trains} and samples on {samples}"


ONE_GPU = Layout()


def layouts(options: BackendOptions, gpus: int, kv_heads: int) -> list[Layout]:
    """The layouts that `options` allow where the server sees `gpus` GPUs (0: on a CPU) for a model with `kv_heads`, in
    the order in which they are tried until one fits the memory. ValueError in one line if there is none.

    By default every GPU trains and samples; with the GPUs of one engine named, the other one has the rest, or all if
    none are left. An engine in the server's process is on `FIRST_GPU`. Layouts that share less come first: whole
    copies, then the trainer's layers shared, then replicas on several GPUs. If nothing was chosen, one half of the GPUs
    may also train and the other sample, so that each holds one copy, and at last one GPU does both, as it does on a
    machine with one.
    """
    if gpus:
        check_gpus("--train-gpus", options.train_gpus, gpus)
        check_gpus("--sample-gpus", options.sample_gpus, gpus)
    check_hosts(options)
    train_gpus = options.train_gpus or _rest(options.sample_gpus, options.trainer, gpus)
    if options.train_hosts > 1:
        train_gpus = train_gpus or (FIRST_GPU,)
    sample_gpus = options.sample_gpus or _rest(options.train_gpus, options.sampler, gpus)
    if options.sample_hosts > 1:
        sample_gpus = sample_gpus or (FIRST_GPU,)
    if gpus and options.train_hosts > 1 < options.sample_hosts and (both := set(train_gpus) & set(sample_gpus)):
        raise ValueError(
            f"--train-hosts {options.train_hosts} --sample-hosts {options.sample_hosts}: on several hosts a GPU cannot "
            f"do both, and {_names(sorted(both))} would; name others with --train-gpus and --sample-gpus"
        )
    sizes = _sizes_of_a_replica(options.sample_tp, sample_gpus, kv_heads, gpus)
    shards = _shards(options, len(train_gpus), gpus)
    parts = options.context_parallel
    check_parts(parts, len(train_gpus), kv_heads)
    found = [Layout(train_gpus, sample_gpus, size, each, parts) for size in sizes for each in shards]
    several = max(options.train_hosts, options.sample_hosts, parts) > 1
    chosen = options.train_gpus or options.sample_gpus or 1 not in sizes or 1 not in shards or several
    return found if chosen or ONE_GPU in found else [*found, *_halves(options, gpus, kv_heads), ONE_GPU]


def shares_weights(options: BackendOptions, gpus: int, *, published: bool = False) -> bool:
    """Whether both engines are to read one copy of the weights, on the only GPU that the server sees or on a CPU (0),
    where it saves little, since vLLM packs most matrices. `published`: the files have them in fewer bits."""
    hosts = max(options.train_hosts, options.sample_hosts)
    if options.train_gpus or options.sample_gpus or gpus > 1 or hosts > 1:
        return False
    packed = options.base_precision or options.head_precision
    always = options.shared_weights == "always" or packed is not None or published
    return always or (options.shared_weights == "auto" and gpus == 1)


def chosen_precision(options: BackendOptions) -> str:
    """The options that put a base in fewer bits, as they were given; empty if none was."""
    given = {"--base-precision": options.base_precision, "--head-precision": options.head_precision}
    return " ".join(f"{option} {value}" for option, value in given.items() if value is not None)


def check_precision(options: BackendOptions, gpus: int, *, published: str | None = None) -> None:
    """ValueError in one line if the other options or the number of GPUs contradict `base_precision` or
    `head_precision`, or the fewer bits that the files have, which `published` tells in words: what is packed is in one
    copy, which both engines read."""
    chosen = chosen_precision(options)
    if published is not None and options.base_precision is not None:
        raise ValueError(
            f"--base-precision {options.base_precision}: the base is quantized already ({published}); leave the option "
            "out"
        )
    if published is None and not chosen:
        return
    if shares_weights(options, gpus, published=published is not None) and options.shared_weights != "off":
        return
    why = (
        "--shared-weights off"
        if options.shared_weights == "off"
        else f"{gpus} GPUs are visible, and CUDA_VISIBLE_DEVICES=0 leaves one"
        if gpus > 1
        else "--train-gpus, --sample-gpus, --train-hosts and --sample-hosts give each a copy"
    )
    what = chosen or f"a quantized base ({published})"
    raise ValueError(f"{what}: trainer and sampler have to read one copy; {why}")


def _halves(options: BackendOptions, gpus: int, kv_heads: int) -> list[Layout]:
    """One half of `gpus` trains and the other, which may be larger, samples."""
    if gpus < 2 or "inline" in (options.trainer, options.sampler):
        return []
    trains, samples = tuple(range(gpus // 2)), tuple(range(gpus // 2, gpus))
    sizes = _sizes_of_a_replica(options.sample_tp, samples, kv_heads, gpus)
    return [Layout(trains, samples, size, each) for size in sizes for each in _shards(options, len(trains), gpus)]


def _rest(others: Sequence[int], place: EnginePlace | None, gpus: int) -> tuple[int, ...]:
    """The GPUs of an engine whose GPUs are not chosen, beside those of `others`."""
    if gpus < 2 or place == "inline":
        return ()
    return tuple(gpu for gpu in range(gpus) if gpu not in others) or tuple(range(gpus))


def _sizes_of_a_replica(chosen: int | None, sample_gpus: Sequence[int], kv_heads: int, gpus: int) -> list[int]:
    """How many GPUs a replica may have: as chosen, or what divides `sample_gpus` and `kv_heads`, smallest first."""
    if chosen is not None:
        check_shares(kv_heads, chosen)
        replica_gpus(sample_gpus, chosen)
        return [chosen]
    most = len(sample_gpus) if gpus else 1
    return [1] + [size for size in range(2, most + 1) if len(sample_gpus) % size == kv_heads % size == 0]


def _shards(options: BackendOptions, ranks: int, gpus: int) -> list[int]:
    """How many ranks may hold a copy of the layers together: as chosen, or one or all."""
    if isinstance(options.shard, int):
        if not ranks or ranks % options.shard:
            raise ValueError(f"--shard {options.shard}: --train-gpus has to name a multiple of it, not {ranks} GPUs")
        return [options.shard]
    return [1, ranks] if options.shard == "auto" and gpus and ranks > 1 else [1]


def environment_of(gpus: Sequence[int]) -> dict[str, str]:
    """What the environment of a process has that sees only `gpus`, counted among those that this process sees. Where
    there are none, as on CPU, their numbers mean nothing."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = [seen[gpu] if any(seen) and gpu < len(seen) else str(gpu) for gpu in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def check_hosts(options: BackendOptions) -> None:
    """ValueError in one line if other hosts are chosen without `ray_address`, or the reverse."""
    chosen = {"--train-hosts": options.train_hosts, "--sample-hosts": options.sample_hosts}
    for option, hosts in chosen.items():
        if hosts > 1 and options.ray_address is None:
            raise ValueError(f"{option} {hosts}: it needs --ray-address, by which the others are found")
    if max(chosen.values()) == 1 and options.ray_address is not None:
        raise ValueError(f"--ray-address {options.ray_address}: it needs {' or '.join(chosen)} of at least 2")


def check_gpus(option: str, gpus: Sequence[int], count: int) -> None:
    """ValueError in one line if there are `count` GPUs and one of `gpus` is none of them."""
    if missing := [gpu for gpu in gpus if gpu >= count]:
        there = f"the only one is {_names([0])}" if count == 1 else f"there are {_names(range(count))}"
        raise ValueError(f"{option}: there is no GPU {missing[0]}; {there}")


def replica_gpus(gpus: Sequence[int], each: int) -> list[Sequence[int]]:
    """The GPUs of each replica on `gpus`, of `each`. ValueError in one line if they cannot be divided so."""
    if len(gpus) % each or (each > 1 and not gpus):
        raise ValueError(f"--sample-tp {each}: --sample-gpus has to name a multiple of {each} GPUs, not {len(gpus)}")
    return [gpus[at : at + each] for at in range(0, len(gpus), each)]


def check_shares(kv_heads: int, ranks: int) -> None:
    """ValueError in one line if `ranks` cannot have equal shares of the attention of a model with `kv_heads`."""
    if kv_heads % ranks:
        raise ValueError(f"--sample-tp {ranks}: it must divide the {kv_heads} KV heads of this model")


def check_parts(parts: int, ranks: int, kv_heads: int) -> None:
    """ValueError in one line if each `parts` of `ranks` of the trainer cannot compute a micro-batch together."""
    if parts > 1 and (not ranks or ranks % parts):
        raise ValueError(f"--context-parallel {parts}: --train-gpus has to name a multiple of it, not {ranks} GPUs")
    if kv_heads % parts:
        raise ValueError(f"--context-parallel {parts}: it must divide the {kv_heads} KV heads of this model")


def _names(gpus: Sequence[int]) -> str:
    """Such as "GPU 0" and "GPUs 0-2, 4 and 6"."""
    first = [gpu for gpu in gpus if gpu - 1 not in gpus]
    last = [gpu for gpu in gpus if gpu + 1 not in gpus]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(sorted(first), sorted(last), strict=True)]
    listed = " and ".join(filter(None, [", ".join(runs[:-1]), runs[-1]]))
    return f"GPU {listed}" if len(gpus) == 1 else f"GPUs {listed}"
