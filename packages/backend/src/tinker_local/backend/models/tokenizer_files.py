"""The files that a client needs to turn text and images into tokens as a served model does."""

from pathlib import Path

NAMES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Of a model's folder: what transformers' tokenizers, processors and configs are loaded from. Never weights."""


def tokenizer_files(path: str) -> dict[str, Path]:
    """Those that the model at `path` has, a folder or a name in the hub's cache, by name. Looks at the disk."""
    folder = Path(path)
    if folder.is_dir():
        return {name: folder / name for name in NAMES if (folder / name).is_file()}
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # a server without engines
        return {}
    found = {name: try_to_load_from_cache(path, name) for name in NAMES} if path.count("/") == 1 else {}
    return {name: Path(file) for name, file in found.items() if isinstance(file, str)}
