"""Fixtures of the whole suite: tiny models made once, and servers started as users start them."""

import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import certifi
import pytest
from hypothesis import HealthCheck, settings
from tinker_local.backend.options import BackendOptions

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A client that a test left open warns of its server's end for as long as this process lives: not in others' `caplog`.
logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)
# Each client reads all the certificates that there are, for 35 ms, and no test asks for one: leave one there.
ONE_CERTIFICATE = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115, which ends with this process
print(
    certifi.contents().partition("-----END")[0], "-----END CERTIFICATE-----", sep="", file=ONE_CERTIFICATE, flush=True
)
os.environ["SSL_CERT_FILE"] = ONE_CERTIFICATE.name
# A start compares long texts for up to 30 s on these cores: here where a test asks for it alone.
os.environ["TINKER_LOCAL_SERVE_COMPARE_SECONDS"] = "0"
_given = [each.name for each in fields(BackendOptions)].index("compare_seconds")
_defaults: tuple[Any, ...] = vars(BackendOptions)["__init__"].__defaults__
vars(BackendOptions)["__init__"].__defaults__ = (*_defaults[:_given], 0.0, *_defaults[_given + 1 :])


def few(examples: int) -> int:
    """A quarter of so many examples of Hypothesis; EXAMPLES=4 in the environment makes all, and EXAMPLES=100 many."""
    return max(5, round(examples * float(os.environ.get("EXAMPLES", "1")) / 4))


# How long an example takes says how busy the machine is.
busy = settings(settings.default, max_examples=few(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("busy", busy)
settings.load_profile("busy")
os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))

TOGETHER = {
    "tests/compatibility": "real_server",
    "tests/e2e": "real_server",
    "tests/examples": "real_server",
    "tests/real_tokenizers": "tests/real_tokenizers",
    "tests/rl/test_rl_cookbook.py": "real_server",
    "tests/sampling": "tests/sampling",
    "tests/real_weights": "tests/real_weights",
}
"""Tests that one worker runs when several share the suite, because they share what takes long to start."""

WALK = "tests/examples/test_examples_rl.py::test_walker_learns_the_way_to_a_goal_that_only_the_newest_picture_shows"
DEMO = "tests/examples/test_examples.py::test_demo_takes_another_family"
RESTARTS = (
    "tests/e2e/test_sampler_restarts.py",
    "tests/e2e/test_trainer_restarts.py",
    "tests/e2e/test_ranks_over_http.py",
)
APART = (WALK, DEMO, *RESTARTS)
"""Files and tests of these folders that start their servers themselves: another worker may run them."""

LONGEST = (
    "real_server",
    "tests/real_weights",
    *(WALK, RESTARTS[0], "tests/chaos/test_rank_kills.py", "tests/documentation/test_pages_run.py", "tests/sampling"),
    *(RESTARTS[2], "tests/storage/test_storage_kill.py", "tests/training/test_rank_processes_on_fakes.py", DEMO),
    "tests/training/test_triton_kernels_interpreted.py",
)
"""Scopes that come first, in this order: one that begins last is what all wait for in the end."""

TRACED = (
    "tests/rendering/test_decoding.py::test_an_image_of_too_many_pixels_is_refused_from_its_header",
    "tests/rendering/test_decoding.py::test_a_png_of_many_texts_is_read_without_inflating_them",
    "tests/http/test_http_body_turns.py::test_a_large_body_is_held_once",
    "tests/http/test_http_kept_results_on_fakes.py::"
    "test_many_short_sequences_count_for_the_memory_that_they_take_on_fakes",
    "tests/http/test_http_bad_input_on_fakes.py::test_zstd_bomb_is_refused_without_its_memory_on_fakes",
    "tests/http/test_http_bad_input_on_fakes.py::test_sparse_tensor_that_would_be_huge_is_refused_before_it_is_dense_on_fakes",
    "tests/sampling/test_alternative_tokens.py::test_random_numbers_of_a_few_rows_take_their_own_memory",
)
"""Tests that come last, together: what runs after one of them takes twice as long (`tests/traced.py`)."""

TURN = "TESTS_TURN"
"""The variable with the commit by which tests take turns; empty if they do not."""

MORE_IN_TURN = "MORE_IN_TURN"
"""The variable with n, if one of n tests with the mark `more` is to run, by the commit; 1 if it is not set."""

TESTS_SECONDS = "TESTS_SECONDS"
"""The variable with the seconds after which no further test of the whole suite begins; what is left is skipped."""

BEGAN = time.monotonic()

TEXT, VISION = "tiny/text", "tiny/vision"
"""Names under which tests serve the two tiny models."""


def scope(nodeid: str) -> str:
    """What one worker runs as a whole: a file, a group of `TOGETHER`, one of `APART`, or those of `TRACED`."""
    file = nodeid.partition("::")[0]
    if nodeid.partition("[")[0] in TRACED:
        return "traced"
    if apart := {file, nodeid.partition("[")[0]}.intersection(APART):
        return apart.pop()
    return next((group for path, group in TOGETHER.items() if f"{file}/".startswith(f"{path}/")), file)


def pytest_configure(config: pytest.Config) -> None:
    """Of the whole suite, tests marked `rotated` take turns by the commit; EVERY_TEST=1 runs all of them."""
    if not hasattr(config, "workerinput"):  # workers have the environment of the process that starts them
        turn = "" if not is_whole(config) or os.environ.get("EVERY_TEST") else commit()
        os.environ[TURN] = turn


def commit() -> str:
    """The first digits, in base 16, of the one that is checked out; "0" without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of `LONGEST` come first, of `TRACED` last. Of a test with the mark `rotated(n)` every nth case stays, by
    the commit, and so of all with the mark `more` if `MORE_IN_TURN` is n. Where there may be no time for the last ones,
    these are others at each commit."""
    places = {name: place for place, name in enumerate(LONGEST)} | {"traced": len(LONGEST) + 1}
    mixed = os.environ[TURN] if os.environ.get(TESTS_SECONDS) else ""

    def order(item: pytest.Item) -> tuple[int, int]:
        found = scope(item.nodeid)
        return places.get(found, len(LONGEST)), crc32(f"{mixed} {found}".encode()) if mixed else 0

    items.sort(key=order)
    if not os.environ[TURN]:
        return
    cases: defaultdict[str, int] = defaultdict(int)
    resting = []
    for item in items:
        every = turns(item)
        test = item.nodeid.partition("[")[0]
        place = crc32(test.encode()) + cases[test] + int(os.environ[TURN], 16)
        cases[test] += 1
        if place % every:
            resting.append(item)
    config.hook.pytest_deselected(items=resting)
    items[:] = [item for item in items if item not in resting]


def turns(item: pytest.Item) -> int:
    """At one of how many commits it runs."""
    mark = item.get_closest_marker("rotated")
    own = mark.args[0] if mark else 1
    return max(own, int(os.environ.get(MORE_IN_TURN, "1"))) if item.get_closest_marker("more") else own


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would begin too late for `TESTS_SECONDS`."""
    seconds = os.environ.get(TESTS_SECONDS) if os.environ[TURN] else None
    if seconds and time.monotonic() - BEGAN > float(seconds):
        pytest.skip(f"the {seconds} s for these tests are over")


def pytest_collection_finish() -> None:
    """Modules and tests stay, so that searches for garbage leave them out from now on."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How long the tests of each folder took, all workers together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.partition("::")[0]).parent.name] += report.duration
    if sum(seconds.values()) > 60:
        took = ", ".join(
            f"{folder} {taken:.0f} s" for folder, taken in sorted(seconds.items(), key=lambda each: -each[1])
        )
        terminalreporter.write_line(f"{sum(seconds.values()):.0f} s of workers: {took}")


def is_whole(config: pytest.Config) -> bool:
    """Whether this is `make test` or `make test-more`, and not a part of them."""
    marks = config.option.markexpr in ("", "more and not ray", "not more and not ray")
    return marks and not config.option.keyword and config.args_source is pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: three for `make test`, since tests of servers wait for a third of their time, two for
    `make test-more`, whose tests start processes, none (pytest's own process) for a part of them, which would pay for
    what all have to start; nor beside a GPU, whose memory the tests measure."""
    if not is_whole(config) or Path("/dev/nvidia0").exists():
        return 0
    return 3 if config.option.markexpr.startswith("not more") else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By `scope`. Not `--dist=loadgroup`, which pytest-xdist 3.8 forgets under pytest 9.2 (pytest-xdist#1386)."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # our order stays
    return ByScope(config, log)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models by the names they are served under."""
    from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model

    root = tmp_path_factory.mktemp("models")
    make_tiny_text_model(root / "text")
    make_tiny_vl_model(root / "vision")
    return {TEXT: root / "text", VISION: root / "vision"}


@pytest.fixture(scope="session")
def small_model() -> Path:
    """SmolLM2-135M-Instruct, real weights: made by the project's own command, never by a test, which has no network."""
    folder = Path(__file__).parents[1] / ".test-files" / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip("no real weights here: tinker-local small-model --out .test-files/smollm2")
    return folder


@dataclass
class Server:
    """A running `tinker-local serve`."""

    process: subprocess.Popen[str]
    data_dir: Path
    images: Path | None = None
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def healthy(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10) as answer:
            return bool(answer.status == 200)

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=280)


def without_time(line: str) -> str:
    """A line that a server printed or logged, without the time of a log."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", line.rstrip())


PATIENT = """
import sys
from tinker_local.backend.http import future_routes
future_routes.LONG_POLL_SECONDS = 1000.0
from tinker_local.backend.cli.main import main
main(sys.argv[1:])
"""
"""A program: `tinker-local` whose long polls do not end by themselves while a test lasts."""


def start_server(data_dir: Path, *arguments: str, seconds: float = 600, program: str | None = None) -> Server:
    """Start `tinker-local serve` (or `program` in its place) on a free port and wait for its `ready:` line."""
    command = ["-m", "tinker_local.backend.cli.main"] if program is None else ["-c", program]
    process = subprocess.Popen(
        [sys.executable, *command, "serve", "--port", "0", "--data-dir", str(data_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
    )
    server = Server(process, data_dir)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(without_time(line))
            if found := re.search(r"ready: (http://\S+)", line):
                server.url = found[1]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(seconds) or not server.url:
        process.kill()
        pytest.fail("the server did not become ready:\n" + "\n".join(server.lines))
    return server


SDK_COMMANDS = """
import json
import os
import sys
from tinker.cli.__main__ import main

for line in sys.stdin:
    order = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for stream, file in enumerate([os.devnull, *order["files"]]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(order["folder"])
    os.environ |= order["environment"]
    sys.argv[1:] = order["arguments"]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        print(end="", flush=True)
        os._exit(1 if isinstance(end.code, str) else end.code or 0)
    sys.exit("the command did not end with a status")
"""
"""A program: the SDK's command line, each command in a fork, since it takes seconds to import the SDK, and most of one
to take its interpreter apart."""


@cache
def sdk_commands() -> subprocess.Popen[str]:
    """`SDK_COMMANDS`, which ends with this process."""
    command = [sys.executable, "-c", SDK_COMMANDS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tinker_command(*arguments: str, url: str, api_key: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The SDK's command line."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "stdout", Path(folder) / "stderr"]
        environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": api_key, "HOME": str(home)}
        order = {
            "arguments": arguments,
            "environment": environment,
            "files": [*map(str, files)],
            "folder": str(Path.cwd()),
        }
        runner = sdk_commands()
        assert runner.stdin is not None
        assert runner.stdout is not None
        print(json.dumps(order), file=runner.stdin, flush=True)
        status = int(runner.stdout.readline())
        out, err = (file.read_text() for file in files)
    return subprocess.CompletedProcess(arguments, status, out, err)


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`serve --fake` under two names."""
    server = start_server(tmp_path_factory.mktemp("fake"), "--fake", "--model", "fake/bigram", "--model", "fake/other")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[Server]:
    """A server of both tiny models on real vLLM and HF; prompts may name images of `images`."""
    images = tmp_path_factory.mktemp("images")
    arguments = ["--image-folder", str(images)]
    arguments += [part for name, path in tiny_models.items() for part in ("--model", f"{name}={path}")]
    server = start_server(tmp_path_factory.mktemp("real"), "--kv-cache", "0.25", "--max-rank", "32", *arguments)
    server.images = images
    yield server
    server.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that end with the test; `data_dir=` chooses the folder, `program=` what runs."""
    started: list[Server] = []

    def start(*arguments: str, data_dir: Path | None = None, program: str | None = None) -> Server:
        server = start_server(data_dir or tmp_path / "data", *arguments, program=program)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="session")
def picture(tiny_models: dict[str, Path]) -> Callable[..., tuple[Any, int]]:
    """(width, height, seed) to a random PNG `ImageChunk` and its number of tokens in the tiny vision model."""
    import io

    import numpy as np
    from PIL import Image
    from tinker_local.types import ImageChunk
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tiny_models[VISION])

    def make(width: int, height: int, seed: int = 0) -> tuple[ImageChunk, int]:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        count = processor.get_number_of_image_patches(height, width, {}) // processor.merge_size**2
        return ImageChunk(data=buffer.getvalue(), format="png", expected_tokens=count), count

    return make


@pytest.fixture(scope="session")
def guide() -> Callable[[str], ModuleType]:
    """`guide(path)`: the code in docs/extending.md that begins with the comment `# path`, run as a module."""
    text = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
    found = re.finditer(r"^( *)```python\n( *# (\S+)\n.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    blocks = {match[3]: textwrap.dedent(match[2]) for match in found}

    def module(path: str) -> ModuleType:
        made = ModuleType(path.removesuffix(".py").replace("/", "."))
        exec(compile(blocks[path], f"docs/extending.md: {path}", "exec"), made.__dict__)
        return made

    return module
