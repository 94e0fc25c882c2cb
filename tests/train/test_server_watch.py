"""A run says when its server is silent, and when it answers again."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tinker_local.client.train.server_watch import ServerWatch


class Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(port: int = 0) -> Iterator[int]:
    """The port at which one refuses everything, while open."""
    with ThreadingHTTPServer(("127.0.0.1", port), Refuses) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield one.server_port
        finally:  # a test that fails must not leave a thread for which the process waits
            one.shutdown()
            thread.join()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_server_is_told_of_and_one_that_answers_again_too() -> None:
    said: list[str] = []
    with server() as port:
        url = f"http://127.0.0.1:{port}"
    with ServerWatch(url, said.append, every=0.3, patience=1.0):
        wait_for(lambda: bool(said))
        assert said[0].startswith(f"{url} has not answered for ")
        assert "--resume goes on from its last checkpoint" in said[0]
        with server(port):  # which refuses
            wait_for(lambda: said[-1] == f"{url} answers again")
            silent = len(said)
            time.sleep(0.5)
            assert len(said) == silent


def test_a_run_without_an_address_of_its_server_watches_none() -> None:
    said: list[str] = []
    with ServerWatch(None, said.append, every=0.0, patience=0.0):
        pass
    assert said == []
