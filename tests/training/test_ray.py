"""Ranks and replicas on two Ray nodes of this machine, on the CPU: the head, where the server is, and another host."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.version_content import version_content
from tinker_local.backend.models.load_engines import make_vllm_sampler
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.process.ray_hosts import RayHosts
from tinker_local.backend.process.ray_replicas import RayReplicas
from tinker_local.backend.sampling.process_sampler import Elsewhere, ProcessSampler
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.backend.training.run.worker import HFTrainer, trainer_of_rank
from tinker_local.backend.training.trainer import Trainer, TrainResult
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.types import AdamParams, LoraConfig, ModelInput, SamplingParams

from tests.conftest import TEXT, start_server
from tests.e2e.conftest import SdkDriver
from tests.e2e.test_ranks_over_http import GREEDY, LORA, healthy, of_one_rank, trained
from tests.http.supervised_apps import children

pytestmark = pytest.mark.ray

RAY = Path(sys.executable).with_name("ray")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0", "OMP_NUM_THREADS": "1"}
PORTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
OBJECT_STORE_BYTES = 80_000_000


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 1))  # sends nothing
        address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    pytest.skip("this machine has no address but the loopback's")


class Nodes:
    """`ray start --block`, each in a session that is ended as a whole."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
        self.host = own_address()
        (self._port,) = free_ports(1)
        self.address = f"{self.host}:{self._port}"
        self._started: list[subprocess.Popen[bytes]] = []

    def head(self) -> None:
        (client,) = free_ports(1)
        self._start(
            f"--head --port={self._port} --num-cpus=0 --include-dashboard=false --temp-dir={self.folder} "
            f"--ray-client-server-port={client}"
        )
        until = time.monotonic() + 300
        while time.monotonic() < until:
            with suppress(OSError):
                return socket.create_connection((self.host, self._port), 1).close()
            time.sleep(0.2)
        raise TimeoutError("Ray's head does not start")

    def other(self, processes: int = 1) -> subprocess.Popen[bytes]:
        """A node with room for so many ranks and replicas."""
        return self._start(f"--address={self.address} --num-cpus={processes}")

    def _start(self, options: str) -> subprocess.Popen[bytes]:
        ports = [f"--{name}-port={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
        command = [RAY, "start", "--block", *options.split(), f"--node-ip-address={self.host}", "--num-gpus=0"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", *ports]
        with Path(self.folder, f"node-{len(self._started)}.log").open("wb") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._started.append(started)
        return started

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """As if its host had ended: everything at once."""
        for pid in [*descendants(node.pid), node.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait(60)

    def close(self) -> None:
        for node in reversed(self._started):
            if node.poll() is None:
                self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for child in children(pid):
            found += [child, *descendants(child)]
    return found


def actors(node: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the node's actors."""
    return [pid for pid in descendants(node.pid) if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nodes = Nodes()
    yield nodes
    nodes.close()


def steps(trainer: Trainer, make: Any, state: AdapterState | None) -> tuple[dict[str, Any], AdapterState]:
    """Two steps from `state`, or from a new adapter: every number by name, and the state after them."""
    if state is None:
        trainer.create_adapter("a", LoraConfig(rank=4, seed=7))
    else:
        trainer.load_adapter("a", state)
    seen: dict[str, Any] = {}
    for step in range(2):
        (result,) = trainer.forward_backward([make()])
        assert isinstance(result, TrainResult)
        seen[f"loss {step}"] = result.metrics["loss:sum"]
        seen |= {f"logprobs {step} {at}": output["logprobs"] for at, output in enumerate(result.outputs)}
        seen[f"norm {step}"] = trainer.optim_step("a", AdamParams(learning_rate=0.01))["grad_norm"]
    last = trainer.capture("a", optimizer=True)
    return seen | dict(last.tensors), last


def equal(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference, relative to the largest number of each array."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(np.subtract(found[key], value)).max() / max(1.0, float(np.abs(value).max())))
        for key, value in expected.items()
    )


def test_ranks_on_two_ray_nodes_train_as_one_process_and_outlive_actor_and_host_but_no_other_token(
    nodes: Nodes, model_path: Callable[[str], Path], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(model_path("qwen3"))
    settings: dict[str, Any] = {"name": "qwen3", "dtype": "float32", "device": "cpu", "micro_batch_tokens": 32}
    work = make.work("a", [9, 5, 12, 7, 6, 30])
    one = HFTrainer(TrainerConfig(path, **settings))
    expected, between = steps(one, lambda: work, None)
    later, _ = steps(one, lambda: work, between)

    nodes.head()
    host = nodes.other()
    others = RayHosts(nodes.address, hosts=1, ranks=1, gpus=False)
    others.check()
    trainer = ProcessTrainer(partial(trainer_of_rank, TrainerConfig(path, **settings)), ranks=2, others=others)
    try:
        began = time.monotonic()
        trainer.load()
        print(f"two ranks on two nodes after {time.monotonic() - began:.1f} s")
        found, state = steps(trainer, lambda: work, None)
        print(f"largest difference {equal(found, expected):.1e}")
        assert equal(found, expected) < 1e-5

        def fails_within_10_seconds(end: Callable[[], None], why: str) -> None:
            begun = [0.0]

            def act() -> None:
                begun[0] = time.monotonic()
                end()

            def train_on() -> None:
                while True:
                    trainer.forward_backward([work])

            threading.Timer(0.5, act).start()
            with pytest.raises(ProcessEndedError, match="on another host was lost"):
                train_on()
            seconds = time.monotonic() - begun[0]
            print(f"{why}: noticed after {seconds:.2f} s")
            assert seconds < 10

        (actor,) = actors(host)
        fails_within_10_seconds(lambda: os.kill(actor, signal.SIGKILL), "an actor killed")
        trainer.restart()
        trainer.load()
        found, _ = steps(trainer, lambda: work, state)
        assert equal(found, later) < 1e-5

        fails_within_10_seconds(lambda: nodes.kill(host), "a host killed")
        trainer.restart()
        loading = threading.Thread(target=trainer.load)
        loading.start()
        loading.join(5)
        assert loading.is_alive(), "it should wait until there is another host"
        nodes.other()
        loading.join(300)
        assert not loading.is_alive()
        found, _ = steps(trainer, lambda: work, state)
        assert equal(found, later) < 1e-5
    finally:
        trainer.close()

    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    refused = ProcessTrainer(partial(trainer_of_rank, TrainerConfig(path, **settings)), ranks=2, others=others)
    try:
        with pytest.raises(ConnectionError, match="its token must be the same"):
            refused.load()
    finally:
        refused.close()


async def test_replicas_on_two_ray_nodes_sample_as_one_and_outlive_actor_and_host(
    nodes: Nodes, model_path: Callable[[str], Path], make: Any, tmp_path: Path
) -> None:
    path = str(model_path("llama"))
    trainer = HFTrainer(TrainerConfig(path, name="llama", dtype="float32", device="cpu", micro_batch_tokens=32))
    _, state = steps(trainer, lambda: make.work("a", [9, 5, 12]), None)
    version = AdapterVersion("a", tmp_path / "nowhere", lambda: state)
    work = SampleWork(
        make.work("a", [9]).data[0].input,
        version,
        SamplingParams(max_tokens=8, temperature=0.0),
        prompt_logprobs=True,
    )
    engine = EngineOptions(path, dtype="float32", kv_cache_bytes=2**26, max_rank=4)
    nodes.head()
    host = nodes.other()
    hosts = RayHosts(nodes.address, hosts=1, ranks=1, gpus=False)
    hosts.check()
    places = RayReplicas(hosts, 1)
    here = ProcessSampler(partial(make_vllm_sampler, engine), name="sampler replica 0")
    there = ProcessSampler(
        partial(make_vllm_sampler, engine), name="sampler replica 1", elsewhere=Elsewhere(places, 0, version_content)
    )
    try:
        began = time.monotonic()
        for replica in (here, there):
            await asyncio.to_thread(replica.load)
        print(f"two replicas on two nodes after {time.monotonic() - began:.1f} s")
        pool = ReplicaPool([here, there], 256)
        await pool.load_version(version)
        expected = await pool.sample(replace(work, replica=0))
        logprobs = trainer.logprobs("a", work.prompt)
        np.testing.assert_allclose(np.asarray(expected.prompt_logprobs)[1:], logprobs, rtol=0, atol=1e-4)

        async def agrees() -> None:
            found = await pool.sample(replace(work, replica=1))
            assert found.sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()
            np.testing.assert_allclose(found.sequences[0].logprobs, expected.sequences[0].logprobs, rtol=0, atol=1e-5)
            assert found.prompt_logprobs is not None
            np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, rtol=0, atol=1e-5)

        await agrees()

        async def fails_within_10_seconds(end: Callable[[], None], why: str) -> None:
            params = SamplingParams(max_tokens=100, stop=())
            long = replace(work, replica=1, params=params, num_samples=64)

            async def sample_on() -> None:
                while True:
                    await pool.sample(long)

            running = asyncio.create_task(sample_on())
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            await asyncio.to_thread(end)
            with pytest.raises(ProcessEndedError, match="replica 1's process on another host was lost"):
                await running
            print(f"{why}: noticed after {time.monotonic() - begun:.2f} s")
            assert time.monotonic() - begun < 10
            (answer,) = (await pool.sample(replace(work, replica=1))).sequences
            assert answer.tokens.tolist() == expected.sequences[0].tokens.tolist(), "the other one answers"

        (actor,) = actors(host)
        await fails_within_10_seconds(lambda: os.kill(actor, signal.SIGKILL), "a replica's actor killed")
        await asyncio.to_thread(there.restart)
        await asyncio.to_thread(there.load)
        await agrees()

        def kill_placer() -> None:
            assert places._calls is not None
            os.kill(places._calls.group.members[0].pid, signal.SIGKILL)

        await fails_within_10_seconds(kill_placer, "the placer killed, and Ray ends its actors")
        await asyncio.to_thread(there.restart)
        await asyncio.to_thread(there.load)
        await agrees()

        await fails_within_10_seconds(lambda: nodes.kill(host), "a replica's host killed")
        await asyncio.to_thread(there.restart)
        loading = asyncio.create_task(asyncio.to_thread(there.load))
        await asyncio.sleep(5)
        assert not loading.done(), "it should wait until there is another host"
        nodes.other()
        await asyncio.wait_for(loading, 300)
        await agrees()
    finally:
        await asyncio.gather(here.close(), there.close())


def test_a_server_on_two_ray_nodes_trains_and_samples_through_the_sdk_and_goes_on_after_the_other_host_ends(
    nodes: Nodes, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = "--max-rank 8 --kv-cache 0.25 --max-context-length 256 --train-hosts 2 --sample-hosts 2 --ray-address"
    nodes.head()
    host = nodes.other(processes=2)
    model_option = ["--model", f"{TEXT}={tiny_models[TEXT]}"]
    server = start_server(tmp_path / "data", *model_option, *options.split(), nodes.address)
    try:
        assert len(actors(host)) == 2
        driver = SdkDriver(server.url)
        model = driver.create(TEXT, LORA)

        first = trained(driver, model, 3)
        path = driver.save(model, "three-steps")
        sampler = driver.sampler(model)  # compared with the trainer on each replica
        prompts = [ModelInput.from_ints([5, 9 + at]) for at in range(4)]
        wanted = [driver.sample(sampler, prompt, 1, GREEDY)[0][0] for prompt in prompts]

        nodes.kill(host)
        while healthy(server):
            time.sleep(0.01)
        assert [driver.sample(sampler, prompt, 1, GREEDY)[0][0] for prompt in prompts] == wanted
        nodes.other(processes=2)
        until = time.monotonic() + 300
        while not healthy(server) and time.monotonic() < until:
            time.sleep(1)
        again = driver.resume(path, optimizer=True)
        np.testing.assert_allclose([*first, *trained(driver, again, 2)], of_one_rank(tiny_models[TEXT], 5), rtol=1e-5)
        other_prompts = [ModelInput.from_ints([6, 9 + at]) for at in range(4)]
        later = driver.sampler(again)
        assert all(driver.sample(later, prompt, 1, GREEDY)[0][0] for prompt in other_prompts)
    finally:
        server.stop()
        print("\n".join(server.lines))
