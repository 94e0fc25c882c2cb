"""The official client's requests and this server's answers have the shapes that were recorded: the wire does not change
by accident. A change on purpose: `python -m tests.compatibility.record`, and look at the difference."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.record import SHAPES, record

pytestmark = pytest.mark.more


def test_requests_and_answers_have_the_shapes_that_were_recorded_on_fakes(tmp_path: Path) -> None:
    recorded: dict[str, Any] = json.loads(SHAPES.read_text())
    found = record(tmp_path)
    assert found.keys() == recorded.keys()
    for endpoint, shapes in found.items():
        assert shapes == recorded[endpoint], endpoint
