"""A server that has stopped is gone."""

from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import atexit

class Costly:
    "Stands for the modules of torch and vLLM, which take seconds to destroy."

    def __del__(self):
        print("destroyed", flush=True)

costly = Costly()
atexit.register(print, "cleaned up", flush=True)

from tinker_local.backend.cli.main import main

main()
"""


@pytest.mark.more
def test_a_stopped_server_cleans_up_and_does_not_destroy_the_interpreter_on_fakes(serve: Callable[..., Any]) -> None:
    server = serve("--fake", "--model", "fake/bigram", program=PROGRAM)
    assert server.stop() == 0
    assert server.lines[-2:] == ["stopped", "cleaned up"]
