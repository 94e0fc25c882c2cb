"""`tinker-local serve`: checks what it was told, loads the models, serves until Ctrl-C."""

import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tinker_local.backend.options import (
    BackendOptions,
    DType,
    ModelSource,
    TrainerPlace,
    check_image_host,
    default_data_dir,
)

if TYPE_CHECKING:
    from rich.console import Console


def _sources(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[ModelSource]:
    try:
        return [ModelSource.parse(value) for value in values]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _image_hosts(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for value in values:
            check_image_host(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return values


def read_keys(path: Path) -> list[str]:
    """API keys, one per line; the SDK accepts only keys that begin with `tml-`, and a header holds no other letters."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{path} is no text", param_hint="--api-key-file") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise click.BadParameter(f"{path} holds no key", param_hint="--api-key-file")
    for number, key in enumerate(keys, 1):
        if not re.fullmatch(r"tml-[!-~]{8,}", key):
            raise click.BadParameter(
                f"key {number} of {path} must begin with 'tml-' and have at least 12 characters, all of ASCII and none "
                "a space (a comment has a line of its own)",
                param_hint="--api-key-file",
            )
    return keys


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    callback=_sources,
    metavar="NAME[=PATH]",
    help="A base model: a hub name, or a name for a local folder. Repeat for more models or more names.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir,
    show_default="~/.local/share/tinker-local",
    help="Where checkpoints are kept.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of API keys, one per line. Needed for any address that other machines reach.",
)
@click.option("--max-adapters", default=64, show_default=True, type=click.IntRange(1), help="Most models at once.")
@click.option("--max-rank", default=128, show_default=True, type=click.IntRange(1, 512), help="Largest LoRA rank.")
@click.option(
    "--max-adapter-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Most memory of all adapters with gradients and optimizer state.",
)
@click.option("--max-context-length", type=click.IntRange(16), help="Cut the context length of the models.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: float32 on CPU, bfloat16 on GPU.")
@click.option(
    "--trainer",
    type=click.Choice(["inline", "process"]),
    help="Train in the server's process or in one of its own. Default: process on GPU, inline on CPU.",
)
@click.option(
    "--micro-batch-tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Positions in one forward pass of the trainer.",
)
@click.option(
    "--image-folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Prompts may name images below this folder (`ImageAssetPointerChunk`). Default: none.",
)
@click.option(
    "--image-host",
    "image_hosts",
    multiple=True,
    callback=_image_hosts,
    metavar="HOST[:PORT]",
    help="Prompts may name images on this public host by http(s). Repeat for more hosts. Default: none.",
)
@click.option(
    "--max-queued-requests",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Training requests that wait to be run; beyond it clients are slowed down.",
)
@click.option(
    "--max-queued-requests-per-session",
    default=2048,
    show_default=True,
    type=click.IntRange(1),
    help="The same of one session.",
)
@click.option(
    "--max-queued-memory",
    default=4.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Bodies of training requests that wait to be run; beyond it clients are slowed down.",
)
@click.option(
    "--max-queued-memory-per-session",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="The same of one session.",
)
@click.option(
    "--kv-cache",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="vLLM's KV cache. Default: 0.25 on CPU; on GPU, what is left beside the trainer.",
)
@click.option(
    "--gpu-memory-utilization",
    default=0.95,
    show_default=True,
    type=click.FloatRange(0.05, 1.0),
    help="Share of the GPU's free memory that trainer and vLLM take together.",
)
@click.option(
    "--session-timeout",
    default=300.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds without a heartbeat after which a session ends.",
)
@click.option(
    "--module-gradient-norms",
    is_flag=True,
    help="Optimizer steps also report the norm of each module's gradient (`grad_norm/NAME`), before clipping.",
)
@click.option("--fake", is_flag=True, help="Serve a numpy stand-in instead of the models: for trying the protocol.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def serve(
    models: list[ModelSource],
    host: str,
    port: int,
    data_dir: Path,
    api_key_file: Path | None,
    max_adapters: int,
    max_rank: int,
    max_adapter_memory: float | None,
    max_context_length: int | None,
    dtype: DType | None,
    trainer: TrainerPlace | None,
    micro_batch_tokens: int,
    image_folder: Path | None,
    image_hosts: tuple[str, ...],
    max_queued_requests: int,
    max_queued_requests_per_session: int,
    max_queued_memory: float,
    max_queued_memory_per_session: float,
    kv_cache: float | None,
    gpu_memory_utilization: float,
    session_timeout: float,
    module_gradient_norms: bool,
    fake: bool,
    verbose: bool,
) -> None:
    """Serve the Tinker API over HTTP.

    Prints `ready: URL` when training and sampling work. Point the official SDK at it:

        TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python program.py
    """
    from rich.console import Console
    from tinker_local.backend.cli.start_up_noise import silence
    from tinker_local.backend.http.loopback import is_loopback

    console = Console(highlight=False, soft_wrap=True)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        silence()
    if not is_loopback(host) and api_key_file is None:
        raise click.UsageError(f"--host {host} is reached by other machines; give --api-key-file")
    keys = None if api_key_file is None else read_keys(api_key_file)
    options = BackendOptions(
        data_dir=data_dir,
        dtype=dtype,
        trainer=trainer,
        max_adapters=max_adapters,
        max_rank=max_rank,
        max_adapter_bytes=None if max_adapter_memory is None else int(max_adapter_memory * 2**30),
        max_context_length=max_context_length,
        micro_batch_tokens=micro_batch_tokens,
        image_folder=image_folder,
        image_hosts=image_hosts,
        max_queued_requests=max_queued_requests,
        max_queued_requests_per_session=max_queued_requests_per_session,
        max_queued_bytes=int(max_queued_memory * 2**30),
        max_queued_bytes_per_session=int(max_queued_memory_per_session * 2**30),
        kv_cache_bytes=None if kv_cache is None else int(kv_cache * 2**30),
        gpu_memory_utilization=gpu_memory_utilization,
        session_timeout=session_timeout,
        module_gradient_norms=module_gradient_norms,
    )
    _check_models(models, fake)
    _serve(console, models, options, host, port, keys, fake)


def _check_models(models: list[ModelSource], fake: bool) -> None:
    """Refuse what cannot work before anything is loaded."""
    from importlib.util import find_spec

    from tinker_local.backend.models.loading import check_source
    from tinker_local.backend.models.served_models import by_path

    try:
        by_path(models)
        if not fake:
            for source in models:
                check_source(source)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not fake and find_spec("vllm") is None:
        raise click.UsageError("vLLM is not installed: install tinker-local[cpu] or tinker-local[gpu]")


def _serve(
    console: "Console",
    models: list[ModelSource],
    options: BackendOptions,
    host: str,
    port: int,
    keys: list[str] | None,
    fake: bool,
) -> None:
    from tinker_local.backend.backend import InProcessBackend
    from tinker_local.backend.http.server import allow_many_connections, bind, event_loop, run, url_of
    from tinker_local.backend.models.loading import load_fake

    allow_many_connections()
    try:
        listening = bind(host, port)
    except OSError as error:
        raise click.UsageError(f"--port {port} on {host}: {error.strerror}") from None
    backend = InProcessBackend(
        models, options, load=load_fake if fake else None, progress=lambda text: console.print(f"[dim]{text}[/dim]")
    )

    def ready() -> None:
        console.print(f"data folder: {options.data_dir}")
        console.print(f"[bold green]ready:[/bold green] {url_of(listening)}")

    try:
        with event_loop() as runner:
            loaded = runner.run(run(backend, listening, api_keys=keys, on_ready=ready))
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    console.print("stopped")
    if not loaded:  # the loading thread would crash in the middle of the interpreter's end
        sys.stdout.flush()
        os._exit(0)
