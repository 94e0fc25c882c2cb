"""Several ranks are one sampler: the others do what the first one does, and all end and start again together."""

import functools
import os
import signal
import socket
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.models.placement import check_shares, replica_gpus
from tinker_local.backend.sampling.process_sampler import ProcessSampler, SamplerSeat
from tinker_local.backend.vllm_engine import rank_follower, sleep_mode
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.rank_follower import Follower
from tinker_local.backend.vllm_engine.rank_leader import Leader, Prepare
from tinker_local.types import InternalError

from tests.fakes.test_replicas_on_fakes import all_work, replicas
from tests.fakes.test_sampler_supervision_on_fakes import tokens
from tests.http.conftest import BASE, Api
from tests.http.supervised_apps import apps, served

pytestmark = pytest.mark.more


def restarted(api: Api, times: int) -> bool:
    return served(api).sampler_supervisions[0].restarts == times


async def test_a_rank_that_is_killed_ends_its_replica_which_starts_again_while_the_other_answers_on_fakes(
    tmp_path: Path,
) -> None:
    async with apps(tmp_path / "data") as start:
        api = await start(load_fake, (BASE,), sample_gpus=(0, 1, 2, 3), sample_tp=2)
        model = await api.model(await api.session(), 1)
        sampler = await api.nameless(model, 1, 1)
        wanted = await tokens(api, await api.sample(sampler, 0, num_samples=3))
        for number, rank in enumerate((1, 0), 1):
            killed, other = replicas(api)
            before, untouched = killed.pids, other.pids
            assert len(before) == 2
            os.kill(before[rank], signal.SIGKILL)
            await api.until(functools.partial(restarted, api, number))
            for pid in before:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
            assert await tokens(api, await api.sample(sampler, number, num_samples=3)) == wanted
            await all_work(api)
            assert not set(killed.pids) & set(before)
            assert other.pids == untouched


def refusing(model: str, seat: SamplerSeat) -> Any:
    """The second rank cannot be made, while the first waits for it."""
    if seat.rank:
        raise ValueError(f"{model}: no room on rank {seat.rank}")
    socket.socket(fileno=seat.links[0]).recv(1)


def test_a_rank_that_cannot_load_is_an_error_and_the_others_do_not_wait_on_fakes() -> None:
    sampler = ProcessSampler(functools.partial(refusing, "m"), ranks=2)
    pids = sampler.pids
    with pytest.raises(ValueError, match="no room on rank 1"):
        sampler.load()
    sampler.end()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_gpus_are_divided_among_replicas_and_a_wrong_number_is_refused_in_one_line() -> None:
    assert replica_gpus((), 1) == []
    assert replica_gpus((4, 5, 6, 7), 2) == [(4, 5), (6, 7)]
    for gpus in ((), (0,), (0, 1, 2)):
        with pytest.raises(
            ValueError, match=f"^--sample-tp 2: --sample-gpus has to name a multiple of 2 GPUs, not {len(gpus)}$"
        ):
            replica_gpus(gpus, 2)
    check_shares(8, 4)
    with pytest.raises(ValueError, match=r"^--sample-tp 3: it must divide the 8 KV heads of this model"):
        check_shares(8, 3)


# What rank 0 tells --------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """Notes its calls, and in `heard` the masks of rank 0. A step ends one sequence, with `drawn`."""

    drawn: int = 1
    done: list[Any] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = types.SimpleNamespace(seed=lambda seed: self.done.append(("seed", seed)))
        runner = types.SimpleNamespace(lora_manager="worker")
        worker = types.SimpleNamespace(model_runner=runner)
        self.model_executor = types.SimpleNamespace(driver_worker=worker)
        config = types.SimpleNamespace(model_type="qwen3")
        self.model_config = types.SimpleNamespace(hf_config=config, model="m")
        self.grammar_masks = types.SimpleNamespace(tell=lambda: {"0-0": len(self.done)}, hear=self.heard.append)

    def add_request(self, name: str, *, lora_request: Any = None) -> None:
        if name == "refused":
            raise ValueError("refused")
        self.done.append(("add_request", name, lora_request))

    def abort_request(self, names: list[str]) -> None:
        self.done.append(("abort_request", *names))

    def compute_again(self, names: list[str], number: int) -> None:
        self.done.append(("compute_again", number, *names))

    def add_lora(self, request: Any) -> None:
        self.done.append(("add_lora", request.lora_name))

    def remove_lora(self, number: int) -> None:
        self.done.append(("remove_lora", number))

    def step(self) -> list[Any]:
        self.done.append("step")
        part = types.SimpleNamespace(token_ids=[self.drawn])
        return [types.SimpleNamespace(finished=True, outputs=[part])]


class Ranks:
    """Rank 0, and rank 1 in a thread until it raises `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drawn: int = 1) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        seats = [SamplerSeat(rank, 2, "", (end.detach(),), "") for rank, end in enumerate(pair)]
        self.first, self.second = Engine(), Engine(drawn)
        monkeypatch.setattr(rank_follower, "join", lambda seat: None)
        monkeypatch.setattr(rank_follower, "build_engine", lambda options, events: self.second)
        for name in ("put_to_sleep", "wake"):
            monkeypatch.setattr(sleep_mode, name, lambda engine, name=name: engine.done.append(name))
        self.leader = Leader(seats[0])
        self.follower = Follower(EngineOptions("m"), seats[1])
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        self.leader.lead(self.first)

    def _follow(self) -> None:
        try:
            self.follower.follow()
        except Exception as error:
            self.error = error

    def wait(self) -> None:
        """Until rank 1 has done everything."""
        self.leader.together("wake", lambda: self.first.done.append("wake"))

    def end(self) -> None:
        """Rank 0 ends."""
        for channel in self.leader._links:
            channel.close()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    found = Ranks(monkeypatch)
    yield found
    found.end()


def test_other_ranks_do_what_the_first_one_does_in_its_order_and_not_what_it_refused_on_fakes(ranks: Ranks) -> None:
    engine: Any = ranks.first
    engine.add_request("0-0", lora_request="a")
    with pytest.raises(ValueError, match="refused"):
        engine.add_request("refused")
    engine.step()
    engine.remove_lora(3)
    engine.add_request("0-1")
    engine.abort_request(["0-0", "0-1"])
    engine.step()
    ranks.wait()
    assert ranks.second.done == ranks.first.done
    assert ranks.first.done[0][0] == "seed"
    assert ranks.first.done[1:4] == [("add_request", "0-0", "a"), "step", ("remove_lora", 3)]
    assert ranks.second.heard == [{"0-0": 2}, {"0-0": 6}]


def test_all_ranks_sleep_before_a_sampler_does_on_fakes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = threading.Event()

    def put_to_sleep(engine: Engine) -> None:
        slept.wait(0.5)  # the other rank is slow
        engine.done.append("put_to_sleep")

    monkeypatch.setattr(sleep_mode, "put_to_sleep", put_to_sleep)
    ranks.leader.together("put_to_sleep", lambda: None)
    assert ranks.second.done[-1] == "put_to_sleep"
    ranks.leader.together("wake", lambda: None)
    assert ranks.second.done[-1] == "wake"


@pytest.mark.mutation("ranks-draw-apart", "Follower._step", "        if ended != self._ended:\n", "        if False:\n")
def test_a_rank_that_draws_other_tokens_ends_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, drawn=2)
    engine: Any = ranks.first
    engine.step()
    engine.step()
    ranks._thread.join(30)
    ranks.end()
    assert isinstance(ranks.error, InternalError)
    assert "rank 1 of the sampler drew other tokens than rank 0" in str(ranks.error)


def test_a_call_that_cannot_be_told_ends_the_ranks_on_fakes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread would build the engine anew after an exception, which cannot work here."""

    class EndedError(BaseException):
        """Instead of the end of this process."""

    def end(code: int) -> None:
        raise EndedError(code)

    def send(message: Any) -> None:
        raise OSError("no memory for a message")

    engine: Any = ranks.first
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", end)
        patch.setattr(ranks.leader._links[0], "send", send)
        with pytest.raises(EndedError):
            engine.step()
    assert "step" not in ranks.first.done


def test_an_adapter_is_made_ready_on_other_ranks_and_kept_until_the_first_one_has_dropped_it_on_fakes(
    ranks: Ranks,
) -> None:
    """vLLM's caches drop adapters in another order on each rank, so a rank may load one twice that rank 0 kept."""

    class Lora:
        id = 0

    made: list[str] = []

    def make(version: AdapterVersion, worker: Any) -> Lora:
        made.append(version.name)
        assert worker == "worker"
        return Lora()

    ranks.follower._adapters.make = make  # type: ignore[method-assign]
    engine: Any = ranks.first
    kept = []
    for name in ("used", "unused"):
        with ranks.leader.preparing(AdapterVersion(name, Path("/nowhere"))) as prepared:
            kept.append(prepared.kept_for(Lora()))
    with pytest.raises(ValueError, match="torn"), ranks.leader.preparing(AdapterVersion("torn", Path("/nowhere"))):
        raise ValueError("torn")
    loaded = []
    ranks.second.add_lora = lambda request: loaded.append(  # type: ignore[method-assign]
        (request.lora_name, ranks.follower._load(request).id)
    )
    for _ in range(2):
        engine.add_lora(types.SimpleNamespace(lora_name="used", lora_int_id=7, load_inplace=False))
    engine.step()
    end = time.monotonic() + 30
    while len(loaded) < 2 and time.monotonic() < end:  # a rank without the adapter would wait for it
        time.sleep(0.01)
    assert loaded == [("used", 7)] * 2
    ranks.wait()
    assert [name for name, _ in ranks.follower._prepared.values()] == ["used", "unused"]
    engine.add_lora(types.SimpleNamespace(lora_name="used", lora_int_id=7, load_inplace=False))
    kept.clear()
    engine.step()
    ranks.wait()
    assert loaded == [("used", 7)] * 3
    assert not ranks.follower._prepared
    ranks.follower._threads.shutdown()
    assert sorted(made) == ["torn", "unused", "used"]


def test_an_adapter_that_not_all_ranks_could_be_told_is_dropped_by_those_that_were_on_fakes(ranks: Ranks) -> None:
    class Unreachable:
        def send(self, message: Any) -> None:
            if isinstance(message, Prepare):
                raise OSError("no memory for a message")

        def receive(self) -> None:
            pass

        def close(self) -> None:
            pass

    made = threading.Event()
    ranks.follower._adapters.make = lambda version, worker: made.set()  # type: ignore[method-assign,assign,return-value]
    ranks.leader._links.append(Unreachable())  # type: ignore[arg-type]
    version = AdapterVersion("a", Path("/nowhere"))
    with pytest.raises(OSError, match="no memory"), ranks.leader.preparing(version):
        pass
    assert made.wait(30)
    ranks.first.step()
    ranks.wait()
    assert not ranks.follower._prepared
