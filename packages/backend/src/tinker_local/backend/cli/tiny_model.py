"""`tinker-local tiny-model`: creates a model with random weights in seconds, to try things out."""

import os
from pathlib import Path
from typing import Any

import click
from tinker_local.backend.cli.install_engine import require_torch
from tinker_local.backend.cli.working import working

TEXT_KINDS = (
    "qwen3",
    "qwen3_moe",
    "qwen2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "lfm2_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "qwen3_next",
)
VISION_KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "gemma3")
ALIASES = {"text": "qwen3", "vl": "qwen3_vl"}


@click.command("tiny-model")
@click.option(
    "--kind",
    type=click.Choice([*ALIASES, *TEXT_KINDS, *VISION_KINDS]),
    required=True,
    help="The model's family; `text` is qwen3, `vl` is qwen3_vl.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
@click.option(
    "--preset",
    type=click.Choice(["tiny", "demo", "mosaic", "drawings"]),
    default="tiny",
    show_default=True,
    help="What the model is laid out for: demo reads strokes (kinds with the vision tower of Qwen3-VL), mosaic sees "
    "where colours are (vl), drawings which colours and outlines there are (vl).",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
def tiny_model(kind: str, out: Path, preset: str, seed: int) -> None:
    """Write a tiny model with random weights, tokenizer and processor, without network access."""
    if (out / "config.json").exists():
        raise click.UsageError(f"--out: {out} already holds a model")
    require_torch("tiny-model")
    os.environ.setdefault("TQDM_DISABLE", "1")  # before anything imports it: transformers shows a bar for each file
    with working(f"making a model of {ALIASES.get(kind, kind)} with random weights"):
        _make(kind, out, preset, seed)
    click.echo(f"wrote {out}")


def _make(kind: str, out: Path, preset: str, seed: int) -> None:
    from tinker_local.backend import tiny_models

    family: Any = ALIASES.get(kind, kind)
    presets = {"demo": tiny_models.DEMO_FAMILIES, "mosaic": ("qwen3_vl",), "drawings": ("qwen3_vl",)}
    if preset != "tiny" and family not in presets[preset]:
        raise click.UsageError(f"--preset {preset}: only for --kind {', '.join(presets[preset])}, not {kind}")
    try:
        if preset == "demo":
            tiny_models.make_demo_vl_model(out, seed=seed, family=family)
        elif preset == "mosaic":
            tiny_models.make_mosaic_vl_model(out, seed=seed)
        elif preset == "drawings":
            tiny_models.make_drawings_vl_model(out, seed=seed)
        elif family in VISION_KINDS:
            tiny_models.make_tiny_vl_model(out, seed=seed, family=family)
        else:
            tiny_models.make_tiny_text_model(out, seed=seed, family=family)
    except OSError as error:
        raise click.UsageError(f"--out: {error}") from error
