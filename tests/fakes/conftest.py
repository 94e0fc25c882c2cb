"""What tests of fakes share."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `process_samplers`, as the processes import it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import process_samplers  # type: ignore[import-not-found]

    return process_samplers
