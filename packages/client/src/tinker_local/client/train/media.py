"""Pictures that rows name: from folders, and from hosts that were allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Where pictures of rows may come from. `folders`: beside the folder of the data file, whose files may be named.
    `hosts`: `name` or `name:port` that may be asked by http(s); empty: URLs are refused."""

    folders: Sequence[Path] = ()
    hosts: Sequence[str] = ()
