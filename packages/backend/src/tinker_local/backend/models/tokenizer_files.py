"""The files that a client needs to turn text and images into tokens as a served model does."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

NAMES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Of a model's folder: what transformers' tokenizers, processors and configs are loaded from. Never weights."""


def tokenizer_files(path: str) -> dict[str, Path]:
    """Those that the model at `path` has, a folder or a name in the hub's cache, by name, without links. Looks at the
    disk. Leaves out a link to a file outside of the folder, or, in the hub's cache, outside of the repository."""
    folder = Path(path)
    if folder.is_dir():
        return _inside(folder.resolve(), {name: folder / name for name in NAMES})
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # a server without engines
        return {}
    found = {name: try_to_load_from_cache(path, name) for name in NAMES} if path.count("/") == 1 else {}
    files = {name: Path(file) for name, file in found.items() if isinstance(file, str)}
    return _inside(next(iter(files.values())).parent.resolve(), files) if files else {}


def _inside(folder: Path, files: dict[str, Path]) -> dict[str, Path]:
    """The real paths of the files that exist in `folder`, or in its repository if it is a snapshot in the hub's cache,
    whose files are links into `blobs`."""
    snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    root = folder.parent.parent if snapshot else folder
    real = {name: file.resolve() for name, file in files.items() if file.is_file()}
    for name in [name for name, file in real.items() if not file.is_relative_to(root)]:
        log.warning("%s is not served to clients: it is a link to %s", files[name], real.pop(name))
    return real
