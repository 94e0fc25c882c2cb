"""What the official SDK sends in the compatibility checks: `corpus.jsonl` has one request of each structure."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "corpus.jsonl"


@dataclass(frozen=True)
class Sent:
    """One request; `path` with its query."""

    method: str
    path: str
    kind: str
    encoding: str
    body: bytes


def corpus() -> list[Sent]:
    """All of them."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    return [Sent(**{**line, "body": base64.b64decode(line["body"])}) for line in lines]
