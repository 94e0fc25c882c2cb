"""`tinker-local models`: which models fit a GPU, and with how long a context."""

import importlib.util
from typing import TYPE_CHECKING

import click
from tinker_local.backend.cli.backend_options import each_value
from tinker_local.backend.options import ModelSource

if TYPE_CHECKING:
    from tinker_local.backend.models.fitting import Fitting


@click.command()
@click.argument("models", nargs=-1, metavar="[NAME[=PATH]]...", callback=each_value(ModelSource.parse))
@click.option("--gpu", metavar="NAME|GIB", help="Plan for this GPU instead of this machine's: `H200`, or `80` GiB.")
def models(models: tuple[ModelSource, ...], gpu: str | None) -> None:
    """Say which models fit one GPU, and with how long a context.

    MODELS are folders or names of a hub; without any, well-known ones. It is the plan that `serve` makes, in bfloat16
    with default options, for a GPU that nothing else uses. Nothing is loaded or downloaded but configs.
    """
    from tinker_local.backend.models.fitting import SHAPES

    name, gib = _gpu(gpu)
    click.echo(f"one {name or 'GPU'} of {gib:.1f} GiB, trainer and sampler in bfloat16")
    for source in models or [ModelSource.parse(each) for each in SHAPES]:
        fit = _fitting(source).on(gib, name)
        size = f"{source.name}, {fit.parameters / 1e9:.3g}B parameters"
        click.echo(
            f"fits    {size}: up to {fit.context:,} positions" if fit.context else f"NOT     {size}: {fit.least}"
        )


def _fitting(source: ModelSource) -> "Fitting":
    """Of a well-known model from its numbers, and of any other from its config, which takes torch."""
    from tinker_local.backend.models.fitting import SHAPES, Fitting

    if source.path in SHAPES:
        return Fitting.known(source.path)
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise click.UsageError(
            f"{missing[0]} is not installed, which plans of other models than the well-known ones need; run "
            "`tinker-local install-engine cpu`"
        )
    from tinker_local.types import UnsupportedError
    from transformers import AutoConfig

    try:
        return Fitting.of(AutoConfig.from_pretrained(source.path))
    except (OSError, ValueError, UnsupportedError) as error:
        raise click.UsageError(f"{source.name}: {error}") from None


def _gpu(given: str | None) -> tuple[str, float]:
    """The name, perhaps empty, and the GiB of the GPU to plan for."""
    from tinker_local.backend.heap import memory_of_gpus
    from tinker_local.backend.models.fitting import GIB, GPUS

    if given is None:
        if not (there := memory_of_gpus()):
            raise click.UsageError("this machine has no NVIDIA GPU to plan for; name one with --gpu, as in --gpu H200")
        return "", min(most for _, most in there.values()) / GIB
    by_name = {name.lower(): (name, gib) for name, gib in GPUS.items()}
    if (known := by_name.get(given.strip().lower())) is not None:
        return known
    try:
        gib = float(given)
    except ValueError:
        gib = 0
    if not 1 <= gib <= 10_000:
        raise click.BadParameter(
            f"{given!r} is neither GiB (1 to 10000) nor one of {', '.join(GPUS)}", param_hint="--gpu"
        )
    return "", gib
