"""Everything public of the SDK is called against a real server; what it says is docs/compatibility.md."""

import os
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.compatibility.surface import surface
from tests.compatibility.world import World
from tests.compatibility.write_report import CHECKS, Line, markdown, run_all
from tests.conftest import TEXT

pytestmark = pytest.mark.more

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.fixture(scope="module")
def lines(real_server: Any) -> list[Line]:
    return run_all(World(real_server.url, TEXT, os.environ["TINKER_API_KEY"]), surface())


def test_everything_of_the_sdk_works_or_is_refused_by_name(lines: list[Line]) -> None:
    assert [line for line in lines if line.status == "fails"] == []
    assert len(lines) > 120


def test_the_document_is_what_the_checks_say(lines: list[Line]) -> None:
    """Also that no line gets worse: what worked and is refused now changes the document."""
    if tinker.__version__ not in DOCUMENT.read_text():
        pytest.skip(f"the document is of another SDK than {tinker.__version__}")
    assert markdown(lines) == DOCUMENT.read_text(), (
        "run `python -m tests.compatibility --write`, and look at the change"
    )


def test_no_check_is_of_something_that_the_sdk_does_not_have(lines: list[Line]) -> None:
    assert set(CHECKS) <= {line.name for line in lines}
