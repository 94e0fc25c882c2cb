"""One copy of the frozen base: vLLM's engine reads the trainer's memory, and computes what it would with its own."""

import contextlib
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.gpu_plan import model_sizes
from tinker_local.backend.options import DecoderChoice
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.model.checkpoint_fit import check_found
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.shared_weights import _Emptied
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.checksum import checksum
from tinker_local.backend.weights.lent_weights import LentWeights, Place, SharedMatrices, stored_tensors
from tinker_local.backend.weights.memory_holder import Deposit, MemoryHolder, get, put
from tinker_local.backend.weights.shared_memory import CannotShareError, write_shared
from tinker_local.types import SamplingParams

from tests.training.gemma4_models import make_gemma4

CPU = torch.device("cpu")
_EXPERTS = ("routed_experts.w13_weight", "routed_experts.w2_weight")
OWN: Mapping[str, tuple[str, ...]] = defaultdict(tuple, gpt_oss=_EXPERTS, qwen3_vl_moe=_EXPERTS)
"""How names of matrices end that stay vLLM's: experts that it transposes."""

GEMMA4 = ("gemma4", "gemma4_dense", "gemma4_moe")
"""With pictures."""
WITH_KEYS_AS_VALUES = ("gemma4_text", "gemma4_dense", "gemma4_moe", "shared keys that are values")
SHARED_KEYS = ("shared keys alone", "shared keys that are values")
"""Of Gemma 4 (`KINDS`)."""
SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "qwen2_5_vl", "gemma3")


def write_model(family: Any, folder: Path) -> str:
    """With six layers, so that there are more matrices than a coincidence of addresses spares."""
    if family in GEMMA4:
        return str(make_tiny_seeing_model(folder, family))
    if family in SHARED_KEYS:
        return str(make_gemma4(folder, family))
    if family in SEEING:
        return str(make_tiny_vl_model(folder, family=family))
    hidden = 128 if family == "lfm2_moe" else 64  # as wide as its attention
    return str(make_tiny_text_model(folder, family=family, shape=TextShape(hidden_size=hidden, num_layers=6)))


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    made = MemoryHolder()
    yield made
    made.close()


def trainer_of(model: str, holder: MemoryHolder, decoder: DecoderChoice = "auto") -> HFTrainer:
    config = TrainerConfig(model, name="tiny", dtype="float32", device="cpu", decoder=decoder)
    return HFTrainer(replace(config, shared_weights=holder.address))


def sampler_of(model: str, holder: MemoryHolder | None) -> VLLMSampler:
    path = None if holder is None else holder.address
    engine = EngineOptions(model, dtype="float32", max_rank=16, kv_cache_bytes=2**26, shared_weights=path)
    return VLLMSampler(engine, EngineThread())


def deposit_in(holder: MemoryHolder) -> Any:
    """What the trainer said of its memory."""
    deposit = get(holder.address, wait=False)
    assert deposit is not None
    for file in deposit.files:
        os.close(file)
    return deposit.said


def lent_to(sampler: VLLMSampler) -> SharedMatrices:
    engine: Any = sampler._engine._engine
    matrices: SharedMatrices = engine.lent.matrices
    return matrices


async def logprobs(sampler: VLLMSampler) -> Any:
    tokens = np.arange(5, 60, dtype=np.int32)
    work = SampleWork(
        RenderedInput(tokens), None, SamplingParams(max_tokens=8, temperature=0.0, stop=()), prompt_logprobs=True
    )
    return (await sampler.sample(work)).prompt_logprobs


def not_packed(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's function that packs the matrix of `layer` for a CPU, as there is none on a GPU."""
    layer.cpu_linear = torch.nn.functional.linear


def matrices(sampler: VLLMSampler) -> dict[str, torch.Tensor]:
    """Of vLLM's model, without adapters, by the names that they have without these."""
    engine: Any = sampler._engine._engine
    named = served_model(engine).named_parameters()
    return {name.replace("base_layer.", ""): each for name, each in named if each.dim() >= 2 and "lora" not in name}


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "decoder", "packed"),
    [
        *(
            (family, "auto", False)
            for family in (
                *("qwen3", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_text", "qwen2_vl", "qwen2_5_vl"),
                *("gpt_oss", "gemma2", "gemma3", "llama", "mixtral", "glm4_moe", "minimax_m2", "lfm2_moe"),
                *("gemma4_text", *GEMMA4, *SHARED_KEYS),
            )
        ),
        ("qwen3", "autograd", False),
        *((family, "auto", True) for family in ("qwen3", "gpt_oss")),
    ],
)
async def test_vllm_reads_the_trainers_matrices(
    family: str,
    decoder: Any,
    packed: bool,
    holder: MemoryHolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write_model(family, tmp_path / "model")
    if not packed:
        monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", not_packed)
    alone = sampler_of(model, None)
    try:
        expected = await logprobs(alone)
        numbers = {name: each.clone() for name, each in matrices(alone).items()}
    finally:
        await alone.close()
    trainer = trainer_of(model, holder, decoder)
    sampler = sampler_of(model, holder)
    try:
        np.testing.assert_array_equal(await logprobs(sampler), expected)
        found = matrices(sampler)
        assert found.keys() == numbers.keys()
        assert [name for name, each in found.items() if not torch.equal(each, numbers[name])] == []
        config = transformers.AutoConfig.from_pretrained(model).get_text_config().to_dict()
        twice = lent_to(sampler).again.values()
        assert model_sizes(config, 1, 1).doubled == sum(int(np.prod(place.shape)) for place in twice)
        assert bool(twice) == (family in WITH_KEYS_AS_VALUES)
        memory = {piece.untyped_storage().data_ptr() for piece in lent_to(sampler).pieces}
        own = {name for name, each in found.items() if each.untyped_storage().data_ptr() not in memory}
        assert holder.read is not None
        shared, whole = holder.read
        assert 0 < shared <= whole
        if not packed:
            assert own == {name for name in found if name.endswith(OWN[family])}
            assert bool(own) == bool(OWN[family])
            in_trainer = {(each.data_ptr(), each.nbytes) for name, each in found.items() if name not in own}
            assert shared == sum(size for _, size in in_trainer)
        lent_to(sampler).verify()
    finally:
        await sampler.close()
        trainer.close()


@pytest.mark.more
def test_the_kernel_refuses_a_write_into_shared_matrices(holder: MemoryHolder, tmp_path: Path) -> None:
    """By trainer or sampler, which end before anything is computed with it."""

    def sevens(memory: torch.Tensor) -> None:
        memory.fill_(7)

    file = write_shared(4096, CPU, sevens)
    try:
        put(holder.address, Deposit("bytes", [file]))
    finally:
        os.close(file)
    program = (
        "import sys, torch\n"
        "from tinker_local.backend.weights.memory_holder import get\n"
        "from tinker_local.backend.weights.shared_memory import map_shared\n"
        "found = get(sys.argv[1], wait=True)\n"
        "memory = map_shared(found.files[0], 4096, torch.device('cpu'))\n"
        "print(found.said, memory.sum().item(), flush=True)\n"
        "memory[5] = 1\n"
        "print('written', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, holder.address], capture_output=True, text=True, check=False)
    assert ran.stdout == "bytes 28672\n"
    assert ran.returncode == -signal.SIGSEGV
    deposit = get(holder.address, wait=False)
    assert deposit is not None
    with pytest.raises(PermissionError):  # a mapping for writing
        mmap.mmap(deposit.files[0], 4096)
    os.close(deposit.files[0])


def test_changed_matrices_are_found_by_their_sums(holder: MemoryHolder, tmp_path: Path) -> None:
    """On a GPU, for instance, where memory can fail."""
    model = write_model("qwen3", tmp_path / "model")
    trainer_of(model, holder).close()
    deposit = get(holder.address, wait=False)
    assert deposit is not None
    sums = deposit.said["sums"]
    assert len(sums) == 6 * 7 + 1  # a tied head
    changed = {name: each ^ (number in (3, 9)) for number, (name, each) in enumerate(sums.items())}
    try:
        SharedMatrices.mapped(deposit, CPU).verify()
        other = Deposit({**deposit.said, "sums": changed}, deposit.files)
        with pytest.raises(RuntimeError, match=r"the frozen weights have changed in memory: \S+ and 1 more$"):
            SharedMatrices.mapped(other, CPU).verify()
    finally:
        for file in deposit.files:
            os.close(file)


def test_a_changed_matrix_is_found_in_either_of_its_places(holder: MemoryHolder, tmp_path: Path) -> None:
    """Keys that are values: the trainer reads one, vLLM both."""
    model = write_model("gemma4_text", tmp_path / "model")
    trainer_of(model, holder).close()
    deposit = get(holder.address, wait=False)
    assert deposit is not None
    again = deposit.said["again"]
    assert [*again] == [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (1, 3, 5)]
    name, place = next(iter(again.items()))
    elsewhere = {**again, name: {**place, "offset": place["offset"] - 512}}
    try:
        SharedMatrices.mapped(deposit, CPU).verify()
        other = Deposit({**deposit.said, "again": elsewhere}, deposit.files)
        with pytest.raises(RuntimeError, match=rf"the frozen weights have changed in memory: {name}$"):
            SharedMatrices.mapped(other, CPU).verify()
    finally:
        for file in deposit.files:
            os.close(file)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_sums_see_every_bit_and_the_order(data: bytes, choices: st.DataObject) -> None:
    place, bit = choices.draw(st.integers(0, len(data) - 1)), choices.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    before = checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert checksum(torch.frombuffer(changed, dtype=torch.uint8)) != before
    turned = data[::-1]
    if turned != data:
        assert checksum(torch.frombuffer(bytearray(turned), dtype=torch.uint8)) != before


def test_sums_see_the_order_of_parts_and_not_how_a_matrix_lies() -> None:
    rows = torch.arange(2.0**21).view(2, -1)
    assert checksum(rows) != checksum(rows.flip(0))
    assert checksum(rows.T.contiguous().T) == checksum(rows)


async def test_what_a_trainer_cannot_share_is_said_and_not_waited_for(
    holder: MemoryHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("qwen3", tmp_path / "model")

    def unknown(*_: Any) -> None:
        raise ValueError("no names")

    monkeypatch.setattr("tinker_local.backend.training.model.file_names.revert_weight_conversion", unknown)
    with pytest.raises(CannotShareError):
        trainer_of(model, holder)
    with pytest.raises(CannotShareError, match="the trainer shares nothing"):
        sampler_of(model, holder)
    assert holder.refusal == "transformers' names of its files: ValueError: no names"


async def test_a_matrix_that_vllm_leaves_as_it_was_made_is_said(
    holder: MemoryHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost by then."""
    model = write_model("qwen3", tmp_path / "model")
    trainer = trainer_of(model, holder)
    of = LentWeights.of

    def missing(*arguments: Any) -> LentWeights:
        lent = of(*arguments)
        kept = {name: tensor for name, tensor in lent.tensors.items() if "o_proj" not in name}
        return LentWeights(kept, lent.lent & kept.keys(), lent.matrices)

    monkeypatch.setattr(LentWeights, "of", missing)
    with pytest.raises(CannotShareError):
        sampler_of(model, holder)
    assert holder.refusal == "ValueError: vLLM loads nothing into model.layers.0.self_attn.o_proj.weight"
    trainer.close()


@pytest.mark.more
@pytest.mark.parametrize(
    ("place", "shared", "cause"),
    [
        ("inline", "always", ""),
        ("process", "always", ""),
        ("inline", "auto", ""),
        ("inline", "off", ""),
        ("inline", "always", "no names"),
    ],
)
async def test_a_server_shares_what_it_is_asked_to(
    place: Any, shared: Any, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("qwen3", tmp_path / "model")
    if cause:

        def unknown(*_: Any) -> None:
            raise ValueError(cause)

        monkeypatch.setattr("tinker_local.backend.training.model.file_names.revert_weight_conversion", unknown)
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path / "data",
        kv_cache_bytes=2**26,
        max_rank=8,
        sampler_sleeps=False,
        shared_weights=shared,
        sampler=place,
        trainer=place,
    )
    backend = InProcessBackend([ModelSource("tiny", model)], options, progress=said.append)
    await backend.start()
    (base,) = backend.models.distinct()
    checks = [await base.check_weights()]
    if place == "inline" and shared == "always" and not cause:
        trainer: Any = base.engines.trainer
        sums = trainer._loaded.shared.sums
        sums[next(iter(sums))] ^= 1
        checks.append(await base.check_weights())
    await backend.close()
    assert any("trainer and sampler agree to" in line for line in said)
    assert (checks[0].problem, checks[0].matrices) == ("", 6 * 7 + 1 if shared == "always" and not cause else 0)
    for check in checks[1:]:
        assert check.problem.startswith("tiny: the frozen weights have changed in memory: ")
        assert check.problem.endswith("; start the server again")
    together = [line for line in said if "trainer and sampler share" in line]
    assert len(together) == (1 if shared == "always" and not cause else 0)  # auto is for a GPU
    apart = [line for line in said if "a copy of the weights each" in line]
    assert len(apart) == (1 if cause else 0)
    assert all(line.endswith(cause) for line in apart)


async def test_a_matrix_that_transformers_has_changed_comes_from_the_file(
    holder: MemoryHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that trainer and sampler still read the files each for themselves, and comparing them says something."""
    model = write_model("qwen3", tmp_path / "model")
    name = "model.layers.3.mlp.down_proj.weight"

    def changes(loaded: Any, *rest: Any) -> None:
        check_found(loaded, *rest)
        loaded.get_parameter(name).data[5, 7] += 1.0

    monkeypatch.setattr("tinker_local.backend.training.model.load_model.check_found", changes)
    trainer = trainer_of(model, holder)
    deposit = get(holder.address, wait=True)
    assert deposit is not None
    try:
        lent = LentWeights.of(deposit, model, CPU)
    finally:
        for file in deposit.files:
            os.close(file)
    assert name not in lent.lent
    assert len(lent.lent) == len(lent.tensors) - 6 * 4 - 2  # vectors, and this one
    loaded: Any = trainer._loaded.model
    assert not torch.equal(lent.tensors[name], loaded.get_parameter(name))
    assert torch.equal(lent.tensors[name], dict(stored_tensors(model, {}))[name])


def test_a_model_is_shared_in_another_dtype_than_that_of_its_files(holder: MemoryHolder, tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path / "model")
    config = TrainerConfig(model, name="tiny", dtype="bfloat16", device="cpu", shared_weights=holder.address)
    HFTrainer(config).close()
    files = deposit_in(holder)["files"]
    assert len(files) == 6 * 7 + 1
    assert {place["dtype"] for place in files.values()} == {"bfloat16"}


def test_a_trainer_that_comes_back_finds_its_matrices(
    holder: MemoryHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("qwen3", tmp_path / "model")
    first = trainer_of(model, holder)
    inputs = RenderedInput(np.arange(5, 60, dtype=np.int32))
    expected = first.logprobs(None, inputs)
    first.close()
    again = trainer_of(model, holder)
    np.testing.assert_array_equal(again.logprobs(None, inputs), expected)
    other = write_model("qwen3_moe", tmp_path / "other")
    read = deposit_in(holder)["read"]
    monkeypatch.setattr("tinker_local.backend.weights.share_matrices._read_from", lambda source: read)
    with pytest.raises(RuntimeError, match=r"the shared weights are not those of this model: \S+ differs"):
        trainer_of(other, holder)


def test_a_trainer_that_comes_back_to_other_files_does_not_start(holder: MemoryHolder, tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path / "model")
    trainer_of(model, holder).close()
    os.utime(tmp_path / "model" / "model.safetensors")
    with pytest.raises(RuntimeError, match="are not those that the sampler's weights were read from"):
        trainer_of(model, holder)


def test_matrices_of_two_dtypes_are_views_each_of_its_own_place(tmp_path: Path) -> None:
    """And one at an odd place has a checksum."""
    memory = torch.arange(64, dtype=torch.uint8)
    one = Place(0, 0, "float32", [2, 4], [4, 1]).tensor([memory])
    two = Place(0, 36, "bfloat16", [2, 4], [4, 1]).tensor([memory])
    assert torch.equal(one, memory[:32].view(torch.float32).view(2, 4))
    assert torch.equal(two.view(torch.int16), memory[36:52].view(torch.int16).view(2, 4))
    assert checksum(two) == checksum(two.clone())


@pytest.mark.parametrize("stranger", ["the holder", "the engine"])
def test_neither_end_talks_to_another_user(stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, this_user = MemoryHolder(), os.geteuid()
    served: list[socket.socket] = []
    monkeypatch.setattr(holder, "_serve", served.append)

    def whom_it_expects() -> int:
        in_engine = threading.current_thread() is threading.main_thread()
        return this_user + 1 if in_engine == (stranger == "the holder") else this_user

    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", whom_it_expects)
        with pytest.raises(
            RuntimeError, match="another user answers" if stranger == "the holder" else "does not answer"
        ):
            put(holder.address, Deposit("bytes", []))
    monkeypatch.undo()
    assert get(holder.address, wait=False) is None
    assert (stranger == "the holder") or not served, "it has no thread"
    holder.close()


def test_a_holder_goes_on_where_files_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, accept, failures = MemoryHolder(), socket.socket.accept, [OSError(24, "Too many open files")]

    def fails(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    get(holder.address, wait=False)
    monkeypatch.setattr(socket.socket, "accept", fails)
    get(holder.address, wait=False)
    assert get(holder.address, wait=False) is None
    assert not failures
    holder.close()


def test_a_holder_whose_queue_is_full_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = MemoryHolder()

    def fails(self: socket.socket) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fails)
    with contextlib.ExitStack() as strangers:
        found = 0
        while found != errno.EAGAIN:
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.setblocking(False)
            found = stranger.connect_ex("\0" + holder.address)
        closing = threading.Thread(target=holder.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def open_files() -> int:
    """Of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_holder_keeps_one_deposit_until_it_is_closed() -> None:
    holder = MemoryHolder()
    assert get(holder.address, wait=False) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, holder.address, wait=True)
        file = os.memfd_create("test")
        put(holder.address, Deposit({"many": 200}, [file] * 200))
        found = waiting.result()
    assert found is not None
    assert found.said == {"many": 200}
    assert {os.fstat(each).st_ino for each in found.files} == {os.fstat(file).st_ino}
    assert len({*found.files}) == 200
    assert not any(os.get_inheritable(each) for each in found.files)
    with pytest.raises(RuntimeError, match="does not answer"):
        put(holder.address, Deposit("another", [file]))
    with ThreadPoolExecutor(1) as pool, contextlib.suppress(RuntimeError):  # if it was not heard before
        other = MemoryHolder()
        waiting = pool.submit(get, other.address, wait=True)
        other.close()
        assert waiting.result() is None
    before = open_files()
    holder.close()
    holder.close()
    assert open_files() <= before - 200
    with pytest.raises(RuntimeError, match="does not answer"):
        get(holder.address, wait=False)
    for each in (*found.files, file):
        os.close(each)


def test_modules_of_other_threads_keep_their_memory() -> None:
    """torch's hook for parameters is one for the process."""
    with _Emptied().matrices():
        mine = torch.nn.Linear(2, 2)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(torch.nn.Linear, 2, 2).result()
    assert mine.weight.is_meta
    assert not other.weight.is_meta
