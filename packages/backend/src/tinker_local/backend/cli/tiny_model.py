"""`tinker-local tiny-model`: a model of random weights, made in seconds, for trying things out."""

from pathlib import Path

import click


@click.command("tiny-model")
@click.option("--kind", type=click.Choice(["text", "vl"]), required=True, help="Text alone, or vision and language.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
@click.option("--preset", type=click.Choice(["tiny", "demo"]), default="tiny", show_default=True, help="Its size.")
@click.option("--seed", default=0, show_default=True, help="Of its random weights.")
def tiny_model(kind: str, out: Path, preset: str, seed: int) -> None:
    """Write a tiny Qwen3 or Qwen3-VL with random weights, tokenizer and processor: no network needed."""
    from tinker_local.backend.tiny_models import make_demo_vl_model, make_tiny_text_model, make_tiny_vl_model

    if (out / "config.json").exists():
        raise click.UsageError(f"--out: {out} holds a model already")
    if kind == "text" and preset != "tiny":
        raise click.UsageError("--preset demo: only for --kind vl")
    try:
        if kind == "text":
            make_tiny_text_model(out, seed=seed)
        elif preset == "demo":
            make_demo_vl_model(out, seed=seed)
        else:
            make_tiny_vl_model(out, seed=seed)
    except OSError as error:
        raise click.UsageError(f"--out: {error}") from error
    click.echo(f"wrote {out}")
