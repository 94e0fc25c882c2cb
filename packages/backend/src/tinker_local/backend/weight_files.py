"""The safetensors files that hold a model's weights, as Hugging Face lays them out."""

import json
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[str]:
    """Names in `folder`: those of its index, or the single file; empty if it has neither. Files of the index may be
    missing. ValueError, KeyError, TypeError or AttributeError for an index of another form."""
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    return [SINGLE] if (folder / SINGLE).is_file() else []
