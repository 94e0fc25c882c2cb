"""Memory that Python takes, as tracemalloc counts it."""

import os
import tracemalloc

from tests.conftest import TRACED, scope


def start_tracing() -> None:
    """From here on `tracemalloc.get_traced_memory` counts, from 0, in a test of `TRACED`.

    Tracing goes on, so that these tests come last: in Python 3.11 `tracemalloc.stop` ends the process if a thread
    allocates at that moment without the interpreter's lock (CPython's issue 128679).
    """
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    assert scope(test) == "traced", f"{test} is none of {TRACED}"
    tracemalloc.start()
    tracemalloc.clear_traces()
