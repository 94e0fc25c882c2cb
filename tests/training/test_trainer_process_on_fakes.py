"""A trainer in a separate process gives the same results as inline; however the process ends, the error is clear."""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.heap import memory_of_gpus
from tinker_local.backend.models.load_engines import engine_place, load_fake
from tinker_local.backend.process import calls
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.messages import KeepImage
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.backend.training.trainer import TrainDatum, Trainer, TrainResult, TrainWork
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    InternalError,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    NotEnoughMemoryError,
    NotFoundError,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    UnsupportedError,
)

from tests.test_heap import OF_MALLOC

pytestmark = pytest.mark.more

HERE = Path(__file__).parent
Make = Callable[..., ProcessTrainer]


@pytest.fixture
def start(trainers: ModuleType) -> Iterator[Make]:
    """`start(factory)`: a trainer (default: an `OddTrainer`) in a process that ends with the test."""
    started: list[ProcessTrainer] = []

    def make(factory: Any = None, **options: Any) -> ProcessTrainer:
        started.append(loaded(factory or trainers.odd, **options))
        return started[-1]

    yield make
    for trainer in started:
        trainer.close()


def loaded(factory: Any, **options: Any) -> ProcessTrainer:
    trainer = ProcessTrainer(factory, **options)
    trainer.load()
    return trainer


def pid_of(trainer: ProcessTrainer) -> int:
    (pid,) = trainer.pids
    return pid


def open_files(pid: str) -> set[str]:
    """What the file descriptors of a process refer to."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder
            found.add(str(link.readlink()))
    return found


def gone(pid: int, seconds: float = 60) -> bool:
    """Whether a process ends in time. If it is not our child, it may remain as a zombie."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False


def image(seed: int, numbers: int = 48) -> RenderedImage:
    pixels = np.random.default_rng(seed).standard_normal((numbers // 3, 3)).astype(np.float32)
    return RenderedImage(f"{seed:064x}", 2, pixels, (1, 2, 4), vllm_item=threading.Lock())


def with_images(*images: RenderedImage) -> RenderedInput:
    placements = tuple(ImagePlacement(1 + 3 * at, image) for at, image in enumerate(images))
    return RenderedInput(np.arange(3 * len(images) + 2, dtype=np.int32), placements)


def everything(trainer: Trainer) -> list[Any]:
    """Results and errors of every method."""
    seen: list[Any] = [trainer.vocab_size, trainer.max_context_length]

    def do(method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            value = getattr(trainer, method)(*args, **kwargs)
        except (InvalidRequestError, NotFoundError) as error:
            value = error
        seen.append(value)
        return value

    config = LoraConfig(rank=3, seed=5, train_attn=False)
    seen += [trainer.adapter_bytes(LoraConfig(rank=rank)) for rank in (1, 3, 8, 32, 511, 800)]
    do("adapter_bytes", config)
    do("create_adapter", "a", config)
    do("create_adapter", "b", LoraConfig(rank=2, seed=6))
    text = TrainDatum(
        RenderedInput(np.arange(6, dtype=np.int32)), np.arange(6) + 1, {"weights": np.linspace(-1, 1, 6, dtype="f4")}
    )
    seen_image = TrainDatum(with_images(image(1), image(2)), np.arange(8), {"weights": np.ones(8, np.float32)})
    broken = TrainDatum(text.input, text.target_tokens, {"weights": np.full(6, np.nan, np.float32)})
    policy = TrainDatum(
        text.input, text.target_tokens, {name: np.full(6, -0.5, np.float32) for name in ("logprobs", "advantages")}
    )
    for _ in range(3):
        do(
            "forward_backward",
            [
                TrainWork("a", [text, seen_image], "cross_entropy"),
                TrainWork("b", [text, broken], "cross_entropy"),
                TrainWork("b", [policy], "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
                TrainWork("a", [seen_image], "cross_entropy", backward=False),
            ],
        )
        do("optim_step", "a", AdamParams(learning_rate=0.1, weight_decay=0.01))
        do("discard_gradients", "b")
        do("optim_step", "b", AdamParams())
    state = do("capture", "a", optimizer=True)
    do("capture", "a", optimizer=False)
    do("export", "a")
    do("load_adapter", "c", state)
    do("optim_step", "c", AdamParams(learning_rate=0.1))
    do("capture", "c", optimizer=True)
    do("logprobs", None, text.input)
    do("logprobs", "c", seen_image.input)
    do("remove_adapter", "a")
    do("remove_adapter", "a")
    do("capture", "a", optimizer=True)
    seen.append(trainer.images_encoded)
    return seen


def assert_same(one: Any, other: Any) -> None:
    """Check that both are equal to the last bit, with the same types."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    else:
        assert str(one) == str(other)


def test_every_method_gives_the_same_inline_and_in_a_process_on_fakes(start: Make, trainers: ModuleType) -> None:
    inline = everything(trainers.fake())
    assert_same(everything(start(trainers.fake)), inline)
    assert any(isinstance(value, NotFoundError) for value in inline)


def test_lack_of_memory_keeps_its_error_type_across_processes_on_fakes(start: Make, trainers: ModuleType) -> None:
    trainer = start(trainers.short_of_memory)
    trainer.create_adapter("a", LoraConfig(rank=1))
    data = [
        TrainDatum(RenderedInput(np.zeros(n, np.int32)), np.zeros(n, np.int64), {"weights": np.ones(n, np.float32)})
        for n in (40, 41)
    ]
    fits, lacks = trainer.forward_backward([TrainWork("a", [datum], "cross_entropy") for datum in data])
    assert isinstance(fits, TrainResult)
    assert isinstance(lacks, NotEnoughMemoryError)
    assert str(lacks) == "data[0]: 41 positions do not fit in the trainer's memory"
    trainer.release_memory()


# What is sent --------------------------------------------------------------------------------------------------------


def test_results_of_any_size_own_their_memory_on_fakes(start: Make) -> None:
    trainer = start()
    counts = (8, 5_000, 100_000, 3_000_000)
    states = [trainer.capture(str(count), optimizer=False) for count in counts for _ in range(2)]
    trainer.close()
    for count, state in zip(np.repeat(counts, 2), states, strict=True):
        np.testing.assert_array_equal(state.tensors["all"], np.arange(count, dtype=np.float32))
        np.testing.assert_array_equal(state.tensors["odd"], np.arange(1, count, 2, dtype=np.float32))
        np.testing.assert_array_equal(state.tensors["square"], np.eye(3))
        assert state.tensors["none"].shape == (0,)
        assert all(array.flags.writeable and array.flags.aligned for array in state.tensors.values())


@pytest.fixture
def images_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Content hashes of the images that go to a process, in order."""
    sent: list[str] = []
    send = Channel.send

    def noting(channel: Channel, message: Any) -> None:
        if isinstance(message, KeepImage):
            sent.append(message.content_hash)
        send(channel, message)

    monkeypatch.setattr(Channel, "send", noting)
    return sent


@pytest.mark.parametrize("numbers", [48, 90_000, 600_000])
def test_an_image_travels_once_while_it_is_used_on_fakes(start: Make, images_sent: list[str], numbers: int) -> None:
    one, two, three, four = (image(seed, numbers) for seed in range(4))
    trainer = start(image_bytes=2 * one.pixel_values.nbytes)

    def check(*images: RenderedImage) -> None:
        expected = np.array([[i.pixel_values.size, i.pixel_values.sum()] for i in images], np.float32)
        np.testing.assert_array_equal(trainer.logprobs(None, with_images(*images)), expected)

    check(one, one, two)
    check(two, one)
    assert images_sent == [one.content_hash, two.content_hash]
    check(three)  # replaces `two`, which was used longer ago
    check(one, three)
    assert images_sent[2:] == [three.content_hash]
    check(two, one, three, four)  # more than fit
    check(four, two)
    assert images_sent[3:] == [two.content_hash, four.content_hash]
    check(one)
    assert images_sent[5:] == [one.content_hash]


def test_nothing_is_left_behind_by_many_calls_on_fakes(start: Make) -> None:
    trainer = start(image_bytes=10**7)
    pids = (os.getpid(), pid_of(trainer))

    def held() -> list[int]:
        gc.collect()
        descriptors = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
        mappings = [Path(f"/proc/{pid}/maps").read_text().count("memfd:") for pid in pids]
        return [*descriptors, *mappings]

    def shared_files() -> int:
        return len(list(Path("/dev/shm").iterdir()))

    def calls(number: int, first_seed: int) -> None:
        for i in range(number):
            trainer.capture(str(3 * 10 ** (2 + i % 4)), optimizer=False)
            trainer.logprobs(None, with_images(replace(image(0, 600_000), content_hash=str(first_seed + i))))
            with pytest.raises(InternalError):
                trainer.discard_gradients("mute")

    calls(10, 0)
    before, files = held(), shared_files()
    calls(200, 100)
    assert held() == before
    assert shared_files() - files < 50  # other programs have files there too
    assert before[3] <= 5  # 10 MB of images of 2.4


def test_the_process_has_no_socket_of_the_server_on_fakes(start: Make) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.set_inheritable(True)
        mine = f"socket:[{os.fstat(listening.fileno()).st_ino}]"
        pid = pid_of(start())
        assert mine in open_files("self")
        assert mine not in open_files(str(pid))


def test_the_process_keeps_what_it_frees_on_fakes(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel need not clear the same pages for each step (`heap.keep_freed_memory`)."""
    if memory_of_gpus():
        pytest.skip("what is freed is kept where no GPU computes")
    for name in OF_MALLOC:
        monkeypatch.delenv(name, raising=False)
    trainer = start()

    def resident() -> int:
        pages = int(Path(f"/proc/{pid_of(trainer)}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    before = resident()
    trainer.discard_gradients("fill 200")
    assert resident() - before > 190


# How it fails --------------------------------------------------------------------------------------------------------


def test_an_exception_that_cannot_travel_is_an_internal_error_with_its_traceback_logged_on_fakes(
    start: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    with pytest.raises(InternalError, match="StubbornError: torn"):
        trainer.discard_gradients("stubborn torn")
    assert "in do_stubborn" in caplog.text
    with pytest.raises(InternalError, match="MuteError: "):
        trainer.discard_gradients("mute")
    assert "in do_mute" in caplog.text
    assert trainer.capture("3", optimizer=False).tensors["all"].tolist() == [0, 1, 2]


def test_logs_of_the_process_are_logged_here_and_its_prints_stay_out_of_the_output_on_fakes(
    start: Make, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = start()
    trainer.discard_gradients("log 100 % slow")
    trainer.discard_gradients("print hello")
    # The SDK of other tests in this process may log from threads that are still ending.
    (record,) = [record for record in caplog.records if record.name.startswith("tinker_local.")]
    assert (record.name, record.levelno) == ("tinker_local.backend.training.run.worker", logging.WARNING)
    assert record.getMessage() == "100 % slow"
    assert record.process == pid_of(trainer)
    assert capfd.readouterr() == ("", "hello\n")


def later(seconds: float, act: Callable[[], Any]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def test_kill_in_the_middle_of_a_call_fails_it_and_later_ones_at_once_on_fakes(start: Make) -> None:
    trainer = start()
    trainer.logprobs(None, with_images(image(1)))
    later(0.3, lambda: os.kill(pid_of(trainer), signal.SIGKILL))
    with pytest.raises(InternalError, match="SIGKILL"):
        trainer.discard_gradients("sleep 600")  # longer than a test may take
    with pytest.raises(InternalError, match="SIGKILL"):
        trainer.forward_backward([])
    trainer.close()
    assert trainer.adapter_bytes(LoraConfig()) > 0
    assert trainer.images_encoded == 0


def test_the_size_of_an_adapter_counts_the_vision_tower_on_fakes(start: Make, trainers: ModuleType) -> None:
    """Limits of memory depend on it."""
    seeing, blind = start(trainers.seeing), start()
    config = LoraConfig(rank=6, train_vision=True)
    without = blind.adapter_bytes(LoraConfig(rank=6))
    assert seeing.adapter_bytes(config) == without + 6000
    assert blind.adapter_bytes(config) == without


def test_the_exit_code_is_reported_on_fakes(start: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start()
    with pytest.raises(InternalError, match=r"exit code 9$"):
        trainer.discard_gradients("exit 9")
    assert "exit code 9" in caplog.text


def test_death_between_two_calls_is_reported_by_the_next_on_fakes(start: Make) -> None:
    trainer = start()
    os.kill(pid_of(trainer), signal.SIGSEGV)
    assert gone(pid_of(trainer))
    with pytest.raises(InternalError, match="SIGSEGV"):
        trainer.remove_adapter("a")


def test_a_device_error_ends_the_process_on_fakes(start: Make) -> None:
    trainer = start()
    with pytest.raises(InternalError, match="illegal memory access"):
        trainer.discard_gradients("lose_device")
    with pytest.raises(InternalError, match=r"exit code 70\).*illegal memory access"):
        trainer.remove_adapter("a")
    assert gone(pid_of(trainer))


def test_lack_of_locked_host_memory_is_not_a_device_error_on_fakes(start: Make) -> None:
    """CUDA reports it like errors that make the device unusable, after which all models would be lost."""
    trainer = start()
    with pytest.raises(InternalError, match="out of memory"):
        trainer.discard_gradients("lack_locked_memory")
    trainer.remove_adapter("a")
    assert not gone(pid_of(trainer), 1)


def test_errors_of_the_factory_are_raised_on_fakes(trainers: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match="model_type 'gpt': not supported"):
        loaded(trainers.no_such_model)
    with pytest.raises(FileNotFoundError) as missing:
        loaded(trainers.no_file)
    assert str(missing.value) == "[Errno 2] No such file or directory: '/nowhere/config.json'"
    assert "in no_file" in missing.value.__notes__[0]
    with pytest.raises(RuntimeError, match="StubbornError: weights are torn"):
        loaded(trainers.stubborn)
    failed = ProcessTrainer(trainers.exits)
    with pytest.raises(InternalError, match="exit code 3"):
        failed.load()
    assert gone(pid_of(failed))


# How it ends ---------------------------------------------------------------------------------------------------------


def test_signals_meant_for_the_server_leave_the_process_alone_on_fakes(start: Make) -> None:
    trainer = start()
    os.kill(pid_of(trainer), signal.SIGINT)
    os.kill(pid_of(trainer), signal.SIGTERM)
    assert trainer.capture("3", optimizer=False).tensors["all"].tolist() == [0, 1, 2]
    assert os.getpgid(pid_of(trainer)) != os.getpgid(0)


def test_close_ends_the_process_and_may_come_twice_on_fakes(start: Make) -> None:
    trainer = start()
    trainer.close()
    trainer.close()
    assert gone(pid_of(trainer), 0.1)
    with pytest.raises(InternalError, match="was closed"):
        trainer.remove_adapter("a")


@pytest.mark.parametrize("stuck", [False, True])
def test_close_ends_a_call_that_does_not_end_on_fakes(
    start: Make, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.5)
    trainer = start()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            trainer.discard_gradients("sleep 600")
        except InternalError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    if not stuck:
        thread.start()
        time.sleep(0.2)
    else:
        os.kill(pid_of(trainer), signal.SIGSTOP)
    trainer.close()
    assert gone(pid_of(trainer), 0.1)
    if not stuck:
        thread.join(60)
        assert [str(error) for error in errors] == ["the trainer was closed"]


def test_a_released_trainer_ends_its_process_on_fakes(trainers: ModuleType) -> None:
    trainer = loaded(trainers.odd)
    pid = pid_of(trainer)
    del trainer
    gc.collect()
    assert gone(pid)


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_the_process_ends_when_its_server_is_killed_on_fakes(state: str) -> None:
    server = subprocess.Popen(
        [sys.executable, str(HERE / "process_trainers.py"), state], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    time.sleep(0.2)
    assert not gone(pid, 0)
    server.kill()
    server.wait()
    server.stdout.close()
    assert gone(pid)


def test_an_interrupted_call_does_not_affect_the_next_on_fakes(start: Make) -> None:
    trainer = start()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.discard_gradients("sleep 0.5")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert trainer.capture("3", optimizer=False).tensors["all"].tolist() == [0, 1, 2]


# In a server ---------------------------------------------------------------------------------------------------------


async def test_sampling_goes_on_without_the_trainer_on_fakes(tmp_path: Path) -> None:
    options = BackendOptions(data_dir=tmp_path, trainer="process")
    async with InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake) as backend:
        session = await backend.sessions.create()
        created = await backend.runs.create(
            CreateModelRequest(session_id=session, model_seq_id=0, base_model="fake/bigram")
        )
        model_id = (await created)["model_id"]
        trainer = backend.models.get("fake/bigram").engines.trainer
        assert isinstance(trainer, ProcessTrainer)
        os.kill(pid_of(trainer), signal.SIGKILL)
        step = await backend.training.optim_step(
            OptimStepRequest(model_id=model_id, seq_id=1, adam_params=AdamParams())
        )
        with pytest.raises(InternalError, match="SIGKILL"):
            await step
        sampler = await backend.sampling.create_session(
            CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, base_model="fake/bigram")
        )
        sample = await backend.sampling.sample(
            SampleRequest(
                sampling_session_id=sampler,
                seq_id=0,
                prompt=ModelInput.from_ints([5, 6]),
                num_samples=1,
                sampling_params=SamplingParams(max_tokens=4),
            )
        )
        assert len((await sample).sequences[0].tokens) > 0


def test_an_engine_gets_a_separate_process_on_a_gpu_unless_configured_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    for cuda, expected in ((True, "process"), (False, "inline")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert engine_place(None) == expected
        assert engine_place("inline") == "inline"
        assert engine_place("process") == "process"
