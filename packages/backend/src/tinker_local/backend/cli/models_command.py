"""`tinker-local models`: which models fit GPUs, and with how long a context."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tinker_local.backend.cli.backend_options import each_value, plan_options
from tinker_local.backend.cli.install_engine import require_torch
from tinker_local.backend.options import BackendOptions, ModelSource

if TYPE_CHECKING:
    from tinker_local.backend.models.fitting import Fitting
    from tinker_local.backend.models.plan_layout import GpuMemory


@click.command()
@click.argument("models", nargs=-1, metavar="[NAME[=PATH]]...", callback=each_value(ModelSource.parse))
@click.option(
    "--gpu",
    metavar="[Nx]NAME|GIB",
    help="Plan for this GPU instead of this machine's: `RTX 4090`, `80` GiB, or `2xH200` for two.",
)
@plan_options
def models(models: tuple[ModelSource, ...], gpu: str | None, **options: Any) -> None:
    """Say which models fit, and with how long a context.

    MODELS are folders or names of a hub; without any, well-known ones. It is the plan that `serve` makes with the same
    options, by default in bfloat16 and for this machine's GPUs, as if nothing else used them. Nothing is loaded or
    downloaded but configs.
    """
    from tinker_local.backend.models.fitting import GIB, SHAPES

    chosen, gpus = BackendOptions(**options), _gpus(gpu)
    first, count = gpus[0], len(gpus)
    what = "one" if count == 1 else str(count)
    each = f"{first.name or 'GPU'}{' each' if count > 1 else ''} of {first.total / GIB:.1f} GiB"
    kept = f", layers in {chosen.base_precision}" if chosen.base_precision else ""
    kept += f", embedding and LM head in {chosen.head_precision}" if chosen.head_precision else ""
    click.echo(f"{what} {each}, trainer and sampler in {chosen.dtype or 'bfloat16'}{kept}")
    for source in models or [ModelSource.parse(each) for each in SHAPES]:
        fitting = _fitting(source, chosen)
        fit = fitting.on(gpus)
        size = f"{source.name}, {fit.parameters / 1e9:.3g}B parameters"
        size += f", layers in {fitting.published}" if fitting.published else ""
        where = f"; {fit.layout}" if count > 1 else ""
        option = f"; serve it with --max-context-length {fit.context}" if fit.context < fit.wanted else ""
        told = f"up to {fit.context:,} positions{where}{option}"
        click.echo(f"fits    {size}: {told}" if fit.context else f"NOT     {size}: {fit.least}")


def _fitting(source: ModelSource, options: BackendOptions) -> "Fitting":
    """Of a well-known model from its numbers, and of any other from its config, which takes torch."""
    from tinker_local.backend.models.fitting import SHAPES, Fitting, known_config

    of_numbers = not options.train_vision and options.decoder != "autograd"
    if source.path in SHAPES and of_numbers:
        return Fitting.known(source.path, options)
    require_torch("a plan of another model than the well-known ones")
    from tinker_local.backend.training.model.load_model import config_of
    from tinker_local.types import UnsupportedError

    try:
        if source.path in SHAPES:
            return Fitting.of(known_config(source.path), options)
        _check_where(source)
        return Fitting.of(config_of(source.path), options)
    except (ValueError, UnsupportedError) as error:
        raise click.UsageError(f"{source.name}: {error}") from None


def _check_where(source: ModelSource) -> None:
    """ValueError if there is neither a folder nor a hub that has the config."""
    from tinker_local.backend.cli.check_command import of_hub
    from tinker_local.backend.models.model_folder import no_folder

    if (problem := no_folder(source.path)) is not None:
        raise ValueError(problem)
    if not Path(source.path).exists() and (found := of_hub(source, source.name)).level == "problem":
        raise ValueError(found.text)


def _gpus(given: str | None) -> "list[GpuMemory]":
    """The GPUs to plan for."""
    from tinker_local.backend.heap import memory_of_gpus, names_of_gpus
    from tinker_local.backend.models.fitting import GIB, free_gpu

    if given is None:
        if not (there := memory_of_gpus()):
            raise click.UsageError("this machine has no NVIDIA GPU to plan for; name one with --gpu, as in --gpu H200")
        names = names_of_gpus()
        return [free_gpu(most / GIB, names.get(at, "")) for at, (_, most) in there.items()]
    several = re.fullmatch(r"\s*(\d{1,3})\s*[x\u00d7]\s*(.+)", given, re.IGNORECASE)
    count, one = (int(several[1]), several[2]) if several else (1, given)
    if not 1 <= count <= 64:
        raise click.BadParameter(f"{given!r}: 1 to 64 GPUs may be planned for", param_hint="--gpu")
    return [free_gpu(*_one_gpu(one))] * count


def _one_gpu(given: str) -> tuple[float, str]:
    """The GiB of a GPU, and its name if it has one."""
    from tinker_local.backend.models.fitting import GPUS

    by_name = {_letters(name): (gib, name) for name, gib in GPUS.items()}
    by_name |= {name.removeprefix("rtx"): found for name, found in by_name.items()}
    wanted = _letters(given)
    of_one_size = _letters(re.sub(r"\s\d+\s*gi?b$", "", given, flags=re.IGNORECASE))  # `H100 80GB`
    if (known := by_name.get(wanted, by_name.get(of_one_size))) is not None:
        return known
    begun = [found for name, found in by_name.items() if name.startswith(wanted)]
    if begun and re.search("[a-z]", wanted):  # of an A100, the smaller
        return min(begun)
    try:
        gib = float(re.sub(r"\s*gi?b\s*$", "", given, flags=re.IGNORECASE))
    except ValueError:
        gib = 0
    if not 1 <= gib <= 10_000:
        raise click.BadParameter(
            f"{given!r} is neither GiB (1 to 10000) nor one of {', '.join(GPUS)}", param_hint="--gpu"
        )
    return gib, ""


def _letters(name: str) -> str:
    """Of a GPU's name, what people do not leave out: `NVIDIA GeForce RTX 4090` is `rtx4090`."""
    return re.sub("nvidia|geforce|[^a-z0-9.]", "", name.lower())
