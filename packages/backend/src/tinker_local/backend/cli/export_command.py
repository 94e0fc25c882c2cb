"""`tinker-local export`: a checkpoint for PEFT, for vLLM, or merged into a whole model, also as a GGUF file."""

import logging
from pathlib import Path
from typing import Any

import click
from tinker_local.backend.cli.backend_options import data_dir_option, not_empty
from tinker_local.backend.cli.install_engine import require_torch
from tinker_local.backend.cli.working import working


@click.command()
@click.argument("checkpoint", callback=not_empty)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["peft", "vllm", "merged", "gguf"]),
    required=True,
    help="An adapter that PEFT or vLLM loads as it is, or a whole model with the adapter in its weights, "
    "for transformers and vLLM or as a GGUF file for llama.cpp and Ollama.",
)
@data_dir_option("The data folder of the server that saved a tinker:// path; the server may run or not.")
@click.option("--base", metavar="FOLDER_OR_NAME", help="The base model. Default: the one that the server served.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the check computes."
)
@click.option(
    "--llama-cpp",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="For gguf: llama.cpp's source, whose converter and quantiser are used. Default: from the PATH or a package.",
)
@click.option(
    "--gguf-type",
    metavar="TYPE",
    help="For gguf: f32, f16, bf16 or q8_0, or any type of the quantiser, as q4_k_m. Default: the model's numbers.",
)
@click.option("--no-check", is_flag=True, help="Do not load the result and compare its logprobs with the trainer's.")
def export(
    checkpoint: str,
    out: Path,
    to: Any,
    data_dir: Path,
    base: str | None,
    device: Any,
    llama_cpp: Path | None,
    gguf_type: str | None,
    no_check: bool,
) -> None:
    """Write CHECKPOINT, a tinker:// path or an adapter's folder, into the new folder OUT.

    tinker-local export tinker://RUN/weights/final my-model --to merged
    """
    from tinker_local.backend.cli.start_up_noise import silence
    from tinker_local.types import ApiError

    silence()
    logging.basicConfig(level=logging.ERROR)
    require_torch("export")
    try:
        with working("importing torch") as now:
            from tinker_local.backend.exporting import export_checkpoint

            exported = export_checkpoint(
                checkpoint,
                out,
                to=to,
                data_dir=data_dir,
                base=base,
                device=device,
                check=not no_check,
                llama_cpp=llama_cpp,
                gguf_type=gguf_type,
                progress=now,
            )
    except (ApiError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for warning in exported.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"checked: {exported.found}" if exported.found else "not checked")
    click.echo(f"wrote {exported.folder} (base model: {exported.base_model})")
