"""A checkpoint as a GGUF file, for llama.cpp and what is built on it: llama.cpp's converter reads a merged model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.exporting.check_gguf import CheckedGguf, check_converted, check_quantized
from tinker_local.backend.exporting.llama_cpp import CONVERTED, LlamaCpp
from tinker_local.backend.exporting.merged_model import write_merged
from tinker_local.backend.exporting.modelfile import write_modelfile
from tinker_local.backend.exporting.trained import Trained

MMPROJ = "mmproj.gguf"
"""The file of a vision tower and its projector, which llama.cpp loads beside the model's."""

MERGED = "merged"


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """`model`: the name of the model's file in the folder. `vision`: whether MMPROJ is beside it. `templated`: whether
    the Modelfile has the chat template."""

    model: str
    vision: bool
    templated: bool
    checked: CheckedGguf | None


def plain_type(trained: Trained) -> str:
    """The type of llama.cpp that has the merged model's numbers as they are."""
    return "f32" if trained.base.dtype == "float32" else "bf16"


def write_gguf(
    folder: Path,
    name: str,
    trained: Trained,
    kind: str,
    found: LlamaCpp,
    device: str,
    check: bool,
    progress: Callable[[str], None],
) -> GgufFiles:
    """Write `model-KIND.gguf`, the Modelfile and for a model that reads images MMPROJ into `folder`. `name`: what the
    file calls the model. `kind`: one of CONVERTED, or a type that the quantiser makes of a plain file.

    The merged model lies in `folder` meanwhile, and takes its size on the disk once more.
    """
    merged = folder / MERGED
    merged.mkdir()
    write_merged(merged, trained)
    for code in merged.rglob("*.py"):
        code.unlink()  # the converter reads tokenizers with trust_remote_code, and would run it
    first = kind if kind in CONVERTED else plain_type(trained)
    file = folder / f"model-{first}.gguf"
    progress(f"converting it with {found.called}")
    found.write(merged, file, first, name)
    vision = trained.base.family.vision is not None
    if vision:
        found.write(merged, folder / MMPROJ, "f16" if first == "q8_0" else first, name, "--mmproj")
    checked = None
    if check:
        progress("comparing the file with the merged model and the trainer")
        checked = check_converted(file, first, merged, trained, device, found)
    if first != kind:
        plain, file = file, folder / f"model-{kind}.gguf"
        progress(f"quantising it to {kind}")
        found.requantize(plain, file, kind)
        if checked is not None:
            said = check_quantized(file, kind, plain, trained, device, found)
            checked = CheckedGguf(checked.numbers, checked.logprobs, said)
        plain.unlink()
    templated = write_modelfile(folder, file.name, merged)
    shutil.rmtree(merged)
    return GgufFiles(file.name, vision, templated, checked)
