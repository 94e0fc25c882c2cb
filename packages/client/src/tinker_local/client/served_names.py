"""`use_served_names`: programs find tokenizers and processors of a local server's models by their names, without a hub.

The SDK and the Tinker Cookbook load them from the hub by a base model's name, or from the folder that the server names.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
from tinker_local.client.encode_images import image_token_of, positions_of
from tinker_local.client.endpoint import Endpoint, connect, send
from tinker_local.types import InvalidRequestError
from tinker_local.types.processor_templates import processor_positions

CACHE = "TINKER_LOCAL_CACHE"
"""Environment variable: the folder for downloads, if not `~/.cache/tinker-local`."""

LOADERS = ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoConfig")
"""Of transformers: what takes a name or a folder."""

LLAMA_3, LLAMA_3_TOKENIZER = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The SDK loads the second for names that begin with the first."""

LIKE = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_vl": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "qwen3_vl_moe": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "qwen3_5": "Qwen/Qwen3.5-4B",
    "qwen3_5_moe": "Qwen/Qwen3.5-35B-A3B",
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "gpt_oss": "openai/gpt-oss-20b",
}
"""By `model_type`: a name of the cookbook whose renderer fits. It has none for the others, which get `role_colon`."""

_FILE = re.compile(r"\w[\w.-]{0,99}")

_folders: dict[str, Path] = {}
"""Of each name that is redirected."""


def use_served_names(*, base_url: str | None = None, api_key: str | None = None) -> dict[str, Path]:
    """Have this process load tokenizers, processors and configs of the models of a local server from copies of the
    server's own files, wherever a program names such a model, and tell the cookbook which renderer fits it.

    `python -m tinker_local.client -m PROGRAM` does it before an unmodified program. Call it again after the server has
    begun to serve other models.

    Args:
        base_url: As those of `ServiceClient`.
        api_key: As those of `ServiceClient`.

    Returns the folder of each base model. Files are kept in $TINKER_LOCAL_CACHE, else `~/.cache/tinker-local`, by their
    contents. Raises tinker.APIConnectionError if no server answers, tinker.APIStatusError if it refuses.
    """
    endpoint = connect(base_url, api_key, check_server=True)
    found: dict[str, Path] = {}
    with httpx.Client(timeout=60) as http:
        for model in send(endpoint, "GET", "tokenizers", http.request).json()["tokenizers"]:
            if model["files"]:
                name = model["base_model"]
                found[name] = _folders[name] = _download(http, endpoint, name, model["files"])
                _folders[model["tokenizer_id"]] = found[name]  # a folder on the server's disk
                if name.startswith(LLAMA_3):
                    _folders[LLAMA_3_TOKENIZER] = found[name]
    _redirect_loaders()
    if importlib.util.find_spec("tinker_cookbook") is not None:
        _tell_cookbook(found)
    return found


def _download(http: httpx.Client, endpoint: Endpoint, name: str, files: Mapping[str, int]) -> Path:
    """The folder with these files of the base model `name`, named by their contents."""
    if strange := [file for file in files if not _FILE.fullmatch(file)]:
        raise InvalidRequestError(f"{endpoint.base_url} names {strange[0]!r}, which is not the name of a file")
    contents = {
        file: send(endpoint, "GET", f"tokenizers/{file}", http.request, params={"base_model": name}).content
        for file in sorted(files)
    }
    digest = hashlib.sha256()
    for file, content in contents.items():
        digest.update(f"{file} {len(content)}\n".encode() + content)
    kept = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "tinker-local") / "tokenizers"
    folder = kept / digest.hexdigest()[:32]
    if folder.is_dir():
        return folder
    kept.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=kept, prefix="new-"))
    for file, content in contents.items():
        (new / file).write_bytes(content)
    with contextlib.suppress(OSError):  # another process was first
        new.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    return folder


def _redirect_loaders() -> None:
    """Have transformers' loaders take the folder of a served name."""
    transformers: Any = importlib.import_module("transformers")
    for loader in LOADERS:
        try:
            found = getattr(transformers, loader)
            original = found.from_pretrained
        except ImportError:  # without torchvision some versions have no loader of images
            continue
        if hasattr(original, "of_served_names"):
            continue

        def from_pretrained(
            pretrained_model_name_or_path: Any,
            *given: Any,
            _of: Any = original,
            _loader: str = loader,
            **more: Any,
        ) -> Any:
            name = pretrained_model_name_or_path
            folder = _folders.get(str(name))
            if folder is None:
                return _of(name, *given, **more)
            found = _of(folder, *given, **more)
            return _counting(found, folder) if _loader == "AutoImageProcessor" else found

        functools.update_wrapper(from_pretrained, original)
        from_pretrained.of_served_names = True  # type: ignore[attr-defined]
        found.from_pretrained = staticmethod(from_pretrained)


def _counting(processor: Any, folder: Path) -> Any:
    """`processor`, of images alone; with what the cookbook counts the positions of an image by, if it lacks it: all
    that the model's whole processor writes for an image of that size."""
    if getattr(processor, "merge_size", None) is not None or processor_positions(str(folder)) is not None:
        return processor
    transformers: Any = importlib.import_module("transformers")
    whole = transformers.AutoProcessor.from_pretrained(folder)
    if image_token_of(whole) is None:
        return processor

    def positions(height: int, width: int, images_kwargs: Any = None) -> int:
        return positions_of(whole, PIL.Image.new("RGB", (width, height)), "image")

    processor.whole, processor.merge_size, processor.get_number_of_image_patches = whole, 1, positions
    return processor


def _tell_cookbook(served: Mapping[str, Path]) -> None:
    """Give the cookbook the attributes of names that it does not know: those of a model of the same architecture."""
    model_info: Any = importlib.import_module("tinker_cookbook.model_info")
    original = model_info.get_model_attributes
    original = getattr(original, "before_served_names", original)

    def get_model_attributes(model_name: str) -> Any:
        name = model_name.split(":", 1)[0]
        try:
            return original(model_name)
        except Exception:
            if name not in served:
                raise
        organization, _, version = name.rpartition("/")
        kind = _model_type(served[name])
        if kind in LIKE:
            return replace(original(LIKE[kind]), organization=organization, version_str=version, size_str="")
        return model_info.ModelAttributes(organization, version, "", False, ("role_colon",))

    get_model_attributes.before_served_names = original  # type: ignore[attr-defined]
    model_info.get_model_attributes = get_model_attributes


def _model_type(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("model_type", "")).removesuffix("_text")
