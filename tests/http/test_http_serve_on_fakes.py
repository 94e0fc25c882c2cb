"""`tinker-local serve`: refuses before it loads, says ready when it is, stops cleanly."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.options import BackendOptions, OwnerQuota
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import encode_forward_backward_request

from tests.conftest import PATIENT, without_time

pytestmark = pytest.mark.more

MAIN = [sys.executable, "-m", "tinker_local.backend.cli.main"]
FAKE = ["serve", "--fake", "--model", "fake/bigram"]

SLOW = """
import sys, time
from tinker_local.backend.models import load_engines
fast = load_engines.load_fake
def slow(source, options):
    time.sleep({seconds})
    {then}
    return fast(source, options)
load_engines.load_fake = slow
from tinker_local.backend.cli.main import main
main(sys.argv[1:])
"""

SLOW_DISK = f"""
import time
from tinker_local.backend.storage.store import Store
write = Store.write_checkpoint
def slowly(self, *args, **kwargs):
    time.sleep(5)
    return write(self, *args, **kwargs)
Store.write_checkpoint = slowly
{PATIENT}
"""

BROKEN_PIPE = f"""
import os
from tinker_local.backend.control.life_cycle import ControlPlane
stop = ControlPlane.stop
async def break_and_stop(self):
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 1)
    await stop(self)
ControlPlane.stop = break_and_stop
{PATIENT}
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *arguments], capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL
    )


TERMINAL = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""The tests themselves may run under nohup, which a child would inherit."""


class Scripted:
    """A server that `script` starts with the command's arguments."""

    def __init__(self, data_dir: Path, script: str) -> None:
        self.data_dir = data_dir
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL + script, *FAKE, "--port", str(self.port), "--data-dir", str(data_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(without_time(line) for line in self.process.stdout)

    def request(self, method: str, path: str) -> httpx.Response | None:
        try:
            url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
            return httpx.request(method, url, json={}, timeout=60, trust_env=False)
        except httpx.TransportError:
            return None

    def ready(self) -> str:
        """Wait for the line that says so; the URL in it."""
        end = time.monotonic() + 60
        while not (found := [line.split()[-1] for line in self.lines if line.startswith("ready: ")]):
            assert time.monotonic() < end
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        return found[0]

    def first_answer(self) -> httpx.Response:
        end = time.monotonic() + 60
        while (answer := self.request("GET", "healthz")) is None:
            assert time.monotonic() < end
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        return answer


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[str], Scripted]]:
    started: list[Scripted] = []

    def start(script: str) -> Scripted:
        started.append(Scripted(tmp_path / "data", script))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@pytest.fixture
def slow(scripted: Callable[[str], Scripted]) -> Callable[..., Scripted]:
    """A server whose models take `seconds` to load."""
    return lambda seconds, then="pass": scripted(SLOW.format(seconds=seconds, then=then))


def test_what_cannot_work_is_refused_before_anything_is_loaded_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def went_on(*_: Any) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", went_on)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "nemotron_h"}))
    for name, content in (("cut", b'{"model_type": '), ("list", b"[1]"), ("bytes", b"\xff\xfe")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    data = ["--data-dir", str(tmp_path / "data")]
    cases = [
        (["serve"], "--model"),
        (["serve", "--model", "=x"], "NAME"),
        (["serve", "--model", "x="], "NAME"),
        (["serve", "--model", f"m={tmp_path}/nothing"], "there is no folder"),
        (["serve", "--model", f"m={tmp_path}/empty"], "no config.json"),
        (["serve", "--model", f"m={tmp_path}/odd"], "Mamba-2 layers"),
        (["serve", "--model", f"m={tmp_path}/cut"], f"{tmp_path}/cut/config.json"),
        (["serve", "--model", f"m={tmp_path}/list"], f"{tmp_path}/list/config.json"),
        (["serve", "--model", f"m={tmp_path}/bytes"], f"{tmp_path}/bytes/config.json"),
        (["serve", "--fake", "--model", "m=a", "--model", "m=b"], "given twice"),
        ([*FAKE, "--port", "70000"], "--port"),
        ([*FAKE, "--max-rank", "0"], "--max-rank"),
        ([*FAKE, "--max-adapters", "0"], "--max-adapters"),
        ([*FAKE, "--api-key-file", str(tmp_path / "none")], "--api-key-file"),
        ([*FAKE, "--image-host", "https://pictures.example"], "--image-host"),
        ([*FAKE, "--image-host", "pictures.example/a"], "--image-host"),
        ([*FAKE, "--image-host", "*.pictures.example"], "--image-host"),
        ([*FAKE, "--image-host", "pictures.example:http"], "--image-host"),
        ([*FAKE, "--image-host", ""], "--image-host"),
        ([*FAKE, "--quota", "adapters=-1"], "--quota"),
    ]
    for arguments, words in cases:
        outcome = CliRunner().invoke(main, [*arguments, *data])
        assert outcome.exit_code == 2, (arguments, outcome.output)
        assert words in outcome.output
    assert not (tmp_path / "data").exists()


def test_options_of_the_command_are_those_of_a_backend_with_its_defaults_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BackendOptions] = []
    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", lambda *given: told.append(given[2]))
    given: dict[str, tuple[str, dict[str, Any]]] = {
        "--dtype": ("bfloat16", {"dtype": "bfloat16"}),
        "--trainer": ("process", {"trainer": "process"}),
        "--decoder": ("autograd", {"decoder": "autograd"}),
        "--max-adapters": ("3", {"max_adapters": 3}),
        "--max-rank": ("512", {"max_rank": 512}),
        "--max-adapter-memory": ("0.5", {"max_adapter_bytes": 2**29}),
        "--max-context-length": ("16", {"max_context_length": 16}),
        "--compare-seconds": ("2.5", {"compare_seconds": 2.5}),
        "--micro-batch-tokens": ("7", {"micro_batch_tokens": 7}),
        "--image-folder": (str(tmp_path), {"image_folder": tmp_path}),
        "--image-host": ("pictures.example", {"image_hosts": ("pictures.example", "::1")}),
        "--max-queued-requests": ("5", {"max_queued_requests": 5}),
        "--max-queued-requests-per-session": ("4", {"max_queued_requests_per_session": 4}),
        "--max-queued-memory": ("2", {"max_queued_bytes": 2**31}),
        "--max-queued-memory-per-session": ("0.25", {"max_queued_bytes_per_session": 2**28}),
        "--max-results": ("3", {"max_result_bytes": 3 * 2**30}),
        "--max-results-per-session": ("0.5", {"max_result_bytes_per_session": 2**29}),
        "--quota": ("bob:adapters=2", {"quotas": (OwnerQuota("bob", (("adapters", 2),)),)}),
        "--kv-cache": ("1.5", {"kv_cache_bytes": 3 * 2**29}),
        "--gpu-memory-utilization": ("0.5", {"gpu_memory_utilization": 0.5}),
        "--session-timeout": ("60", {"session_timeout": 60.0}),
        "--share-prefixes": ("off", {"share_prefixes": "off"}),
        "--replay-routes": ("off", {"replay_routes": "off"}),
        "--in-flight-cache": ("recompute", {"in_flight_cache": "recompute"}),
    }
    data = ["--data-dir", str(tmp_path)]
    flags = [word for flag, (value, _) in given.items() for word in (flag, value)]
    for arguments in ([], [*flags, "--image-host", "::1", "--module-gradient-norms"]):
        outcome = CliRunner().invoke(main, [*FAKE, *data, *arguments])
        assert outcome.exit_code == 0, outcome.output
    wanted: dict[str, Any] = {name: value for _, fields in given.values() for name, value in fields.items()}
    assert told == [
        BackendOptions(data_dir=tmp_path),
        BackendOptions(data_dir=tmp_path, module_gradient_norms=True, **wanted),
    ]


def test_data_folder_is_that_of_the_environment_on_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BackendOptions] = []
    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", lambda *given: told.append(given[2]))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert CliRunner().invoke(main, FAKE).exit_code == 0
    assert told == [BackendOptions(data_dir=tmp_path / "tinker-local")]


def test_port_in_use_is_refused_before_anything_is_loaded_on_fakes(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = run(*FAKE, "--port", port, "--data-dir", str(tmp_path / "data"))
    assert outcome.returncode == 2
    assert port in outcome.stderr
    assert "in use" in outcome.stderr
    assert "loading" not in outcome.stdout
    assert not (tmp_path / "data").exists()


def test_ready_is_said_when_it_is_and_health_is_503_before_on_fakes(slow: Any) -> None:
    server = slow(3)
    answer = server.first_answer()
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
    for method, path in (("POST", "create_session"), ("GET", "get_server_capabilities"), ("POST", "client/config")):
        early = server.request(method, path)
        assert early.status_code == 503  # the SDK tries again
        assert early.json()["detail"]
    assert not [line for line in server.lines if "ready" in line]
    end = time.monotonic() + 60
    while not [line for line in server.lines if line.startswith("ready")]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert f"ready: http://127.0.0.1:{server.port}" in server.lines
    assert server.request("GET", "healthz").json() == {"status": "ok"}
    assert server.request("POST", "create_session").status_code == 200


def test_models_that_cannot_be_loaded_end_the_server_with_the_reason_on_fakes(slow: Any) -> None:
    server = slow(0.1, "raise ValueError('these weights are torn')")
    assert server.process.wait(60) == 1
    server.reader.join(60)
    text = "\n".join(server.lines)
    assert "these weights are torn" in text
    assert "ready" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_models_load_stops_the_server_at_once_on_fakes(slow: Any, number: signal.Signals) -> None:
    server = slow(600)
    assert server.first_answer().status_code == 503
    server.process.send_signal(number)
    assert server.process.wait(120) == 0
    server.reader.join(60)
    assert not [line for line in server.lines if "Traceback" in line or "ready" in line]
    assert "stopped while models were loading" in server.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_long_polls_and_cleans_up_on_fakes(
    scripted: Callable[[str], Scripted], number: signal.Signals
) -> None:
    server = scripted(PATIENT)
    url = f"{server.ready()}/api/v1"
    with httpx.Client(trust_env=False, timeout=60) as http:
        session = http.post(f"{url}/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
        created = http.post(f"{url}/create_model", json=body).json()["request_id"]
        model = http.post(f"{url}/retrieve_future", json={"request_id": created}).json()["model_id"]
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        saved = http.post(f"{url}/save_weights_for_sampler", json=save).json()["request_id"]
        assert http.post(f"{url}/retrieve_future", json={"request_id": saved}).status_code == 200
        asking = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0, "num_samples": 64}
        asking |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"stop": []}}
        assert http.post(f"{url}/asample", json=asking).status_code == 200  # something is at work, too
        data = (Datum(model_input=ModelInput.from_ints([5, 9]), loss_fn_inputs={"target_tokens": [9, 20]}),)
        gradient = ForwardBackwardRequest(model_id=model, seq_id=3, data=data, loss_fn="cross_entropy")  # 2 is missing
        sent = http.post(f"{url}/forward_backward", content=encode_forward_backward_request(gradient))
    polled = json.dumps({"request_id": sent.json()["request_id"]})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(polled)}\r\n\r\n"
    polls = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(5)]
    for poll in polls:
        poll.sendall((head + polled).encode())
    for _ in range(10):  # answered after the polls were read
        answer = server.request("GET", "healthz")
        assert answer is not None
        assert answer.status_code == 200
    memory = version_folders(server.process.pid)
    assert len(memory) == 1
    server.process.send_signal(number)
    assert server.process.wait(120) == 0
    server.reader.join(60)
    for poll in polls:
        final = poll.recv(4096)  # training does not go on; a sample's poll gets 408 and is repeated
        assert final.startswith(b"HTTP/1.1 200")
        assert b"the server was stopped. It has no saved checkpoint." in final
        poll.close()
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line], server.lines
    assert server.lines[-1] == "stopped"
    assert not memory[0].exists()
    assert not (server.data_dir / "ephemeral").exists()


def test_a_terminal_that_is_closed_stops_the_server_once_and_saves_on_fakes(
    scripted: Callable[[str], Scripted],
) -> None:
    """A shell sends SIGHUP more than once, and nothing can be printed any more."""
    server = scripted(SLOW_DISK)
    model = trained(server)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP):
        server.process.send_signal(number)
        time.sleep(1)
    assert server.process.wait(120) == 0
    server.reader.join(60)
    assert f"saved tinker://{model}/weights/autosave after 1 optimizer step" in server.lines
    assert saved(scripted, model) == ["weights/autosave"]


def test_a_second_signal_skips_what_the_first_saves_on_fakes(scripted: Callable[[str], Scripted]) -> None:
    server = scripted(SLOW_DISK.replace("sleep(5)", "sleep(1000)"))
    model = trained(server)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):  # the second is that of a wrapper
        server.process.send_signal(number)
        time.sleep(0.05 if number == signal.SIGTERM else 2)
    assert server.process.wait(120) == 0
    server.reader.join(60)
    assert f"NOT saved: 1 optimizer step of {model}, which has no checkpoint: it was skipped" in server.lines, (
        server.lines
    )
    assert server.lines[-1] == "stopped"


def test_a_server_under_nohup_goes_on_when_the_terminal_is_closed_on_fakes(
    scripted: Callable[[str], Scripted],
) -> None:
    server = scripted(f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PATIENT}")
    server.ready()
    server.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    answer = server.request("GET", "healthz")
    assert answer is not None
    assert answer.json() == {"status": "ok"}


def test_a_broken_pipe_behind_the_server_loses_no_training_on_fakes(scripted: Callable[[str], Scripted]) -> None:
    """`tinker-local serve | tee log`: Ctrl-C ends `tee`, too."""
    server = scripted(BROKEN_PIPE)
    model = trained(server)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(120)
    assert saved(scripted, model) == ["weights/autosave"]


def saved(scripted: Callable[[str], Scripted], model: str) -> list[str]:
    """The checkpoints of a run that a next server lists."""
    again = scripted(PATIENT)
    again.ready()
    answer = again.request("GET", f"training_runs/{model}/checkpoints")
    assert answer is not None
    return [entry["checkpoint_id"] for entry in answer.json()["checkpoints"]]


def trained(server: Scripted) -> str:
    """A run that has taken a step."""
    url = f"{server.ready()}/api/v1"
    with httpx.Client(trust_env=False, timeout=60) as http:

        def result(path: str, **body: Any) -> httpx.Response:
            content = body.pop("content", None)
            sent = http.post(f"{url}/{path}", **({"json": body} if content is None else {"content": content}))
            return http.post(f"{url}/retrieve_future", json={"request_id": sent.json()["request_id"]})

        session = http.post(f"{url}/create_session", json={}).json()["session_id"]
        model = result("create_model", session_id=session, model_seq_id=0, base_model="fake/bigram").json()["model_id"]
        data = (Datum(model_input=ModelInput.from_ints([5, 9]), loss_fn_inputs={"target_tokens": [9, 20]}),)
        gradient = ForwardBackwardRequest(model_id=model, seq_id=1, data=data, loss_fn="cross_entropy")
        result("forward_backward", content=encode_forward_backward_request(gradient))
        step = result("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})
        assert "grad_norm" in step.json()["metrics"], step.text
    return str(model)


def version_folders(pid: int) -> list[Path]:
    """Folders of nameless versions in shared memory that a process holds the lock of."""
    found = []
    for folder in Path("/dev/shm").glob("tinker-local-*"):
        lock = folder / "lock"
        if lock.is_file() and lock.read_text().strip() == str(pid):
            found.append(folder)
    return found


def test_tiny_model_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a.txt").touch()
    for out in (tmp_path / "taken", Path("/proc/nowhere")):
        outcome = CliRunner().invoke(main, ["tiny-model", "--kind", "text", "--out", str(out)])
        assert outcome.exit_code == 2, outcome.output
        assert f"--out: {out}" in outcome.output or f"'{out}'" in outcome.output


def test_help_and_import_load_nothing_heavy() -> None:
    """Neither torch nor vLLM nor transformers, for `--help` or for who imports `InProcessBackend`; for `--help`, which
    is to be there at once, nothing of the server either."""
    helps = [[], ["serve"], ["tiny-model"]]
    program = (
        f"from tinker_local.backend.cli.main import main; [main([*a, '--help'], standalone_mode=0) for a in {helps}]"
    )
    heavy = {"torch", "vllm", "transformers"}
    server = {"numpy", "pydantic", "sqlalchemy", "fastapi", "httpx", "rich"}
    for code, unwanted in (
        (program, heavy | server),
        ("from tinker_local.backend import InProcessBackend", heavy),
        ("import tinker_local.backend.backend", heavy),
    ):
        command = [sys.executable, "-X", "importtime", "-c", code]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in outcome.stderr.splitlines()}
        assert "tinker_local" in imported
        assert not imported & unwanted, code


def test_fake_server_loads_no_torch_on_fakes(fake_server: Any) -> None:
    maps = Path(f"/proc/{fake_server.process.pid}/maps").read_text()
    assert "python" in maps
    assert not re.search(r"libtorch|vllm", maps)


def test_limits_of_the_command_line_reach_the_server_on_fakes(serve: Any) -> None:
    server = serve(
        *FAKE[1:], "--model", "fake/alias=fake/bigram", "--max-rank", "8", "--max-adapters", "1",
        "--max-adapter-memory", "0.01", "--session-timeout", "4",
    )  # fmt: skip
    url = f"{server.url}/api/v1"
    with httpx.Client(trust_env=False, timeout=60) as http:
        served = http.get(f"{url}/get_server_capabilities").json()["supported_models"]
        assert [model["model_name"] for model in served] == ["fake/bigram", "fake/alias"]

        def create(session: str, number: int, rank: int) -> httpx.Response:
            body = {"session_id": session, "model_seq_id": number, "base_model": "fake/bigram"}
            return http.post(f"{url}/create_model", json={**body, "lora_config": {"rank": rank}})

        session = http.post(f"{url}/create_session", json={}).json()["session_id"]
        assert "outside 1 to 8" in create(session, 0, 9).json()["detail"]
        assert create(session, 0, 4).status_code == 200
        assert "1 adapters are alive, the most is 1" in create(session, 1, 4).json()["detail"]
        end = time.monotonic() + 60
        while http.post(f"{url}/get_info", json={"model_id": f"{session}:train:0"}).status_code != 410:
            assert time.monotonic() < end
            time.sleep(0.05)
        other = http.post(f"{url}/create_session", json={}).json()["session_id"]
        assert create(other, 0, 4).status_code == 200
