"""Ranks on other hosts: stand-ins and relays in processes of this host, without Ray, on fakes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.models.placement import layouts
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.backend.process import relay
from tinker_local.backend.process.messages import Call
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.process.ray_hosts import RayHosts
from tinker_local.backend.training.process_trainer import ProcessTrainer

from tests.http.conftest import BASE, datum
from tests.http.supervised_apps import OTHER, apps, children, served, works_again
from tests.mutations import ROOT
from tests.training import relay_hosts
from tests.training.process_trainers import hanging_rank, rank_that_cannot_load
from tests.training.relay_hosts import RelayHosts, start_relay

pytestmark = pytest.mark.more

Start = Callable[..., ProcessTrainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(make, hosts=1)`: a trainer with a rank here, and one on each of so many "other hosts"."""
    started: list[ProcessTrainer] = []
    with socket.create_server(("127.0.0.1", 0)) as instead_of_ray:
        address = f"127.0.0.1:{instead_of_ray.getsockname()[1]}"

        def begin(make: Any, hosts: int = 1) -> ProcessTrainer:
            others = RelayHosts(address, hosts, 1, gpus=False, folder=tmp_path)
            started.append(ProcessTrainer(make, ranks=1 + hosts, others=others, timeout=30.0))
            return started[-1]

        yield begin
        for trainer in started:
            trainer.close()


def running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def gone(pids: list[int]) -> bool:
    """Whether all of them end within a minute, as they do at once on a quiet machine."""
    until = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(running, pids))


def relays(folder: Path) -> list[int]:
    return [pid for pid in (int(file.name) for file in folder.iterdir()) if running(pid)]


def test_ranks_elsewhere_get_every_call_with_arrays_of_all_sizes_on_fakes(start: Start, tmp_path: Path) -> None:
    trainer = start(relay_hosts.echoing, hosts=2)
    trainer.load()
    for size in (9, 2**16, 2**18, 2**21, 2**24 + 1):
        sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        seat, back = trainer._call("echo", sent)
        assert seat.rank == 0
        np.testing.assert_array_equal(back, sent)
        for rank, member in enumerate(trainer._calls.group.members):
            seat, back = trainer._calls._call([member], 60.0, Call(next(trainer._calls._numbers), "echo", (sent,)))
            assert (seat.rank, seat.size, seat.host) == (rank, 3, rank)
            np.testing.assert_array_equal(back, sent)
    there = relays(tmp_path)
    assert len(there) == 2
    trainer.close()
    assert gone(there)


@pytest.mark.parametrize(
    "victim",
    ["relay", *(pytest.param(each, marks=pytest.mark.more) for each in ("process", "stand-in", "rank here"))],
)
def test_whatever_ends_on_either_host_ends_all_ranks_and_new_ones_start_on_fakes(
    start: Start, tmp_path: Path, victim: str
) -> None:
    trainer = start(hanging_rank)
    trainer.load()
    (there,) = relays(tmp_path)
    (process,) = children(there)
    here, stand_in = trainer.pids
    victims = {"relay": there, "process": process, "stand-in": stand_in, "rank here": here}
    threading.Timer(0.2, os.kill, (victims[victim], signal.SIGKILL)).start()
    why = "on another host was lost" if victim == "relay" else "was ended by SIGKILL"
    with pytest.raises(ProcessEndedError, match=why):
        trainer._call("forward_backward", [_Hangs()])
    assert trainer.ended
    assert gone([there, process, here, stand_in])
    trainer.restart()
    trainer.load()
    trainer.release_memory()
    assert len(relays(tmp_path)) == 1


class _Hangs:
    """Enough of a `TrainWork` for `HangingTrainer`."""

    loss_fn = "importance_sampling"


async def test_a_lost_host_fails_the_step_with_the_last_checkpoint_and_another_model_never_notices_on_fakes(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as instead_of_ray:
        address = f"127.0.0.1:{instead_of_ray.getsockname()[1]}"

        def load(source: ModelSource, options: BackendOptions) -> Engines:
            folder = tmp_path / source.name.replace("/", "-")
            folder.mkdir()
            others = RelayHosts(address, 1, 1, gpus=False, folder=folder)
            trainer = ProcessTrainer(hanging_rank, ranks=2, others=others)
            trainer.load()
            model = FakeModel(source.name)
            return Engines(FakeRenderer(model), trainer, FakeSampler(model), arch="fake", tolerance=1e-4)

        async with apps(tmp_path / "data") as begin:
            api = await begin(load, (BASE, OTHER))
            session = await api.session()
            model, elsewhere = await api.model(session), await api.model(session, 1, base_model=OTHER)
            path = await api.save(model, 1, "one")
            other_trainer = served(api, OTHER).engines.trainer
            assert isinstance(other_trainer, ProcessTrainer)
            others_pids = other_trainer.pids
            data = [datum([5, 9, 20], logprobs=[-1.0] * 2, advantages=[1.0] * 2)]
            await api.result(await api.gradient(model, 2))
            await api.result(await api.step(model, 3))
            waiting = await api.gradient(model, 4, loss_fn="importance_sampling", data=data)
            await api.until(lambda: bool(served(api).scheduler.running))
            (there,) = relays(tmp_path / BASE.replace("/", "-"))
            os.kill(there, signal.SIGKILL)
            assert "the trainer's process on another host was lost" in await api.failure(waiting)
            later = await api.failure(await api.gradient(model, 5))
            assert "the trainer's process on another host was lost" in later
            assert f"Its last checkpoint is {path}" in later
            await api.result(await api.gradient(elsewhere, 1))
            assert other_trainer.pids == others_pids
            await works_again(api)
            await api.result(await api.gradient(await api.model(session, 2), 1))


def test_an_error_of_a_rank_elsewhere_is_that_of_the_load_on_fakes(start: Start) -> None:
    with pytest.raises(Exception, match="model_type 'gpt': not supported"):
        start(rank_that_cannot_load).load()


def test_a_relay_serves_no_one_without_its_secret_and_waits_for_the_one_with_it() -> None:
    process, address = start_relay(b"right")
    try:
        with pytest.raises(AuthenticationError):
            relay.connect(address, b"wrong")
        with socket.create_connection(address) as web:
            web.sendall(b"GET / HTTP/1.1\r\n\r\n")
        links = relay.connect(address, b"right")
        links.messages.close()
        links.status.close()
        assert process.wait(60) == 0
    finally:
        process.kill()


SILENT_HOST = """
import subprocess, sys, time
from tests.training.relay_hosts import start_relay
from tinker_local.backend.process import relay
from tinker_local.backend.process.messages import Call

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
process, address = start_relay(b"secret")
links = relay.connect(address, b"secret")
time.sleep(1)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
start = time.monotonic()
try:
    links.status.recv_bytes()
except OSError as error:
    print(f"{time.monotonic() - start:.2f} {type(error).__name__}")
process.wait(60)
print(f"{time.monotonic() - start:.2f} the relay has ended")
"""


def test_a_host_that_falls_silent_is_noticed_within_10_seconds_on_both_sides() -> None:
    own_network = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*own_network, "ip", "link", "show"], capture_output=True).returncode:
        pytest.skip("no network namespace of the test's own can be made here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*own_network, sys.executable, "-c", SILENT_HOST]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    here, there = found.stdout.splitlines()
    assert here.split()[1] == "TimeoutError"
    assert max(float(each.split()[0]) for each in (here, there)) < 10, found.stdout


def test_hosts_are_refused_without_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(address: str) -> str:
        with pytest.raises(ValueError) as refused:
            RayHosts(address, 1, 1, gpus=False).check()
        return str(refused.value)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert "Ray without a token" in refusal("192.0.2.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)
    assert "other hosts cannot reach this" in refusal("127.0.0.1:6379")
    for address in ("192.0.2.1", "192.0.2.1:0", "192.0.2.1:70000", ":6379"):
        assert "expected HOST:PORT" in refusal(address)


def test_train_hosts_and_ray_address_need_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--train-hosts 2: it needs --ray-address"):
        layouts(BackendOptions(train_hosts=2), 0, 1)
    with pytest.raises(ValueError, match="--ray-address h:1: it needs --train-hosts or --sample-hosts of at least 2"):
        layouts(BackendOptions(ray_address="h:1"), 0, 1)
    (one, *_) = layouts(BackendOptions(train_hosts=2, ray_address="h:1"), 1, 1)
    assert one.train_gpus == (0,), "one GPU has a rank in a process"
    inline = BackendOptions(data_dir=tmp_path, train_hosts=2, ray_address="h:1", trainer="inline")
    with pytest.raises(ValueError, match="--trainer inline"):
        load_fake(ModelSource("fake", "fake"), inline)


def test_one_host_does_not_import_ray_nor_do_stand_ins() -> None:
    program = (
        "import sys, tinker_local.backend.models.load_engines, tinker_local.backend.process.ray_hosts\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('ray', 'torch')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
