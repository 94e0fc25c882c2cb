"""Where the base models of a data folder were, for programs that read its checkpoints without a server."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

MODELS = "models.json"


def record_model_paths(data_dir: Path, sources: Mapping[str, Sequence[str]]) -> None:
    """Remember the folder or hub name of each base model by the names that clients use. `sources`: names by path. Later
    ones replace earlier ones. A server starts on a full disk, too."""
    known = model_paths(data_dir)
    found = known | {name: path for path, names in sources.items() for name in names}
    if found != known:
        unfinished = data_dir / f".{MODELS}"
        try:
            unfinished.write_text(json.dumps(found, indent=1))
            unfinished.replace(data_dir / MODELS)
        except OSError as error:
            log.warning("%s cannot be written: %s", data_dir / MODELS, error)


def model_paths(data_dir: Path) -> dict[str, str]:
    """What was recorded; empty if nothing was, or if it cannot be read."""
    try:
        found = json.loads((data_dir / MODELS).read_text())
    except (OSError, ValueError):
        return {}
    return {name: path for name, path in found.items() if isinstance(path, str)} if isinstance(found, dict) else {}
