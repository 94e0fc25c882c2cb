"""Which GPUs train and which sample: by options, by the GPUs that there are, and by their memory."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend import InProcessBackend
from tinker_local.backend.models import load_engines
from tinker_local.backend.models import place_engines as place_engines_module
from tinker_local.backend.models.gpu_plan import SMALLER, USUAL, model_sizes
from tinker_local.backend.models.load_engines import Replicas, load_fake, load_real
from tinker_local.backend.models.place_engines import CPU_SEQUENCES, PlacedEngines, place_engines
from tinker_local.backend.models.placement import ONE_GPU, Layout, check_gpus, check_precision, layouts
from tinker_local.backend.options import BackendOptions, ModelSource, parse_shard
from tinker_local.backend.sampling.sampler import RESERVED
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.backend.vllm_engine import compat_vllm
from tinker_local.backend.vllm_engine.build_engine import EngineOptions

GIB = 2**30
CHOICES: dict[str, list[Any]] = {
    "train_gpus": [(), (0,), (1, 2), (0, 1, 2, 3)],
    "sample_gpus": [(), (1,), (0, 3), (0, 1, 2, 3)],
    "trainer": [None, "inline", "process"],
    "sampler": [None, "inline", "process"],
    "shard": ["auto", "never", 2],
    "sample_tp": [None, 1, 2],
    "context_parallel": [1, 2],
}


def gpus_of(found: list[Layout]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(layout.train_gpus, layout.sample_gpus) for layout in found}


def test_by_default_every_gpu_trains_and_samples_and_shares_only_what_has_to_be_shared() -> None:
    found = layouts(BackendOptions(), 4, kv_heads=8)
    shared = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4)]
    together = [Layout((0, 1, 2, 3), (0, 1, 2, 3), tp, shards) for tp, shards in shared]
    halves = [Layout((0, 1), (2, 3), tp, shards) for tp in (1, 2) for shards in (1, 2)]
    assert found == [*together, *halves, ONE_GPU]
    assert [each.sample_tp for each in layouts(BackendOptions(shard="never"), 6, kv_heads=2)] == [1, 2, 1, 1]
    assert layouts(BackendOptions(), 2, kv_heads=8)[-2:] == [Layout((0,), (1,)), ONE_GPU]
    assert layouts(BackendOptions(), 3, kv_heads=8)[-3:] == [Layout((0,), (1, 2)), Layout((0,), (1, 2), 2), ONE_GPU]
    assert layouts(BackendOptions(sample_tp=2), 2, kv_heads=8) == [Layout((0, 1), (0, 1), 2, n) for n in (1, 2)]
    assert layouts(BackendOptions(shard=2), 4, kv_heads=1) == [Layout((0, 1, 2, 3), (0, 1, 2, 3), 1, 2)]


def test_with_the_gpus_of_one_engine_named_the_other_has_the_rest() -> None:
    def found(gpus: int, **options: Any) -> Any:
        (both,) = gpus_of(layouts(BackendOptions(**options), gpus, kv_heads=8))
        return both

    assert found(8, train_gpus=(0, 1)) == ((0, 1), (2, 3, 4, 5, 6, 7))
    assert found(4, sample_gpus=(1, 2, 3)) == ((0,), (1, 2, 3))
    assert found(2, sample_gpus=(0, 1)) == ((0, 1), (0, 1)), "there is no rest"
    assert found(4, train_gpus=(0,), sample_gpus=(0,)) == ((0,), (0,)), "as named"
    assert found(4, sample_gpus=(1, 2), trainer="inline") == ((), (1, 2))


def test_an_engine_in_the_server_s_process_is_on_the_first_gpu() -> None:
    def found(**options: Any) -> Any:
        return gpus_of(layouts(BackendOptions(**options), 2, kv_heads=8)) - {((), ())}

    assert found(trainer="inline") == {((), (0, 1))}
    assert found(sampler="inline") == {((0, 1), ())}
    assert layouts(BackendOptions(trainer="inline", sampler="inline"), 2, kv_heads=8) == [ONE_GPU]
    with pytest.raises(ValueError, match=r"^--sample-tp 2: --sample-gpus has to name a multiple of 2 GPUs, not 0$"):
        found(sampler="inline", sample_tp=2)
    with pytest.raises(ValueError, match=r"^--shard 2: --train-gpus has to name a multiple of it, not 0 GPUs$"):
        found(trainer="inline", shard=2)


def test_gpus_compute_micro_batches_together_if_their_number_and_the_kv_heads_can_be_divided() -> None:
    (four, *_, last) = layouts(BackendOptions(context_parallel=2), 4, kv_heads=8)
    assert four == Layout((0, 1, 2, 3), (0, 1, 2, 3), context_parallel=2)
    assert last != ONE_GPU, "which cannot"
    both = layouts(BackendOptions(context_parallel=2, train_gpus=(0, 1), shard=2), 0, kv_heads=8)
    assert both == [Layout((0, 1), (), 1, 2, 2)]
    for options, gpus, kv_heads, reason in (
        ({"context_parallel": 3}, 4, 6, "--train-gpus has to name a multiple of it, not 4 GPUs"),
        ({"context_parallel": 2, "trainer": "inline"}, 4, 8, "--train-gpus has to name a multiple of it, not 0 GPUs"),
        ({"context_parallel": 2}, 0, 8, "--train-gpus has to name a multiple of it, not 0 GPUs"),
        ({"context_parallel": 8}, 8, 4, "it must divide the 4 KV heads of this model"),
    ):
        with pytest.raises(ValueError, match=f"^--context-parallel [238]: {reason}$"):
            layouts(BackendOptions(**options), gpus, kv_heads)


def test_every_combination_of_options_keeps_what_is_named_and_uses_every_gpu() -> None:
    for gpus, *values in itertools.product([0, 1, 2, 4, 8], *CHOICES.values()):
        options = BackendOptions(**dict(zip(CHOICES, values, strict=True)))
        named = {*options.train_gpus, *options.sample_gpus}
        case = (gpus, *values)
        try:
            found = layouts(options, gpus, kv_heads=8)
        except ValueError as error:
            missing = gpus and max(named, default=0) >= gpus
            indivisible = ("--shard 2: ", f"--sample-tp {options.sample_tp}: ", "--context-parallel 2: ")
            known = str(error).startswith(indivisible)
            assert missing or known, case
            continue
        assert not gpus or max(named, default=0) < gpus, case
        assert len(set(found)) == len(found) > 0, case
        for layout in found:
            at_all = {*layout.trains_on, *layout.samples_on}
            assert layout.train_gpus == options.train_gpus or not options.train_gpus, case
            assert layout.sample_gpus == options.sample_gpus or not options.sample_gpus, case
            assert options.sample_tp in (None, layout.sample_tp), case
            assert layout.context_parallel == options.context_parallel, case
            assert len(layout.samples_on) % layout.sample_tp == 8 % layout.sample_tp == 0, case
            allowed: dict[Any, set[int]] = {"never": {1}, "auto": {1, len(layout.train_gpus)}}
            assert layout.shards in allowed.get(options.shard, {options.shard}), case
            if gpus < 2:
                assert (layout.train_gpus, layout.sample_gpus) == (options.train_gpus, options.sample_gpus), case
                assert gpus or layout.shards == (2 if options.shard == 2 else 1), case
                continue
            inline = "inline" in (options.trainer, options.sampler)
            whole = inline or at_all == {*range(gpus)} or (options.train_gpus and options.sample_gpus)
            assert whole or (layout == ONE_GPU == found[-1] and not named), case


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    check_gpus("--sample-gpus", [0, 2], 3)
    for count, sentence in (
        (3, "there is no GPU 3; there are GPUs 0-2"),
        (1, "there is no GPU 3; the only one is GPU 0"),
    ):
        with pytest.raises(ValueError, match=f"^--sample-gpus: {sentence}$"):
            check_gpus("--sample-gpus", [0, 3], count)


def test_shard_is_auto_never_or_a_number_of_gpus() -> None:
    assert [parse_shard(text) for text in ("auto", "never", "2", "16")] == ["auto", "never", 2, 16]
    for wrong in ("always", "1", "0", "-2", "2.0", ""):
        with pytest.raises(ValueError, match=r"^expected auto, never or a number of GPUs from 2, got "):
            parse_shard(wrong)


def test_a_layout_is_said_in_words() -> None:
    assert str(ONE_GPU) == "trains on GPU 0 and samples on GPU 0"
    assert str(Layout((0, 1), (0, 1))) == (
        "trains on GPUs 0-1 (a copy of the weights on each) and samples on GPUs 0-1 (a replica on each)"
    )
    assert str(Layout((0, 1, 2, 3), (5,), shards=2)) == (
        "trains on GPUs 0-3 (a copy of the layers on each 2) and samples on GPU 5"
    )
    assert str(Layout((0, 1, 2, 3), (0,), context_parallel=4)) == (
        "trains on GPUs 0-3 (a copy of the weights on each, each micro-batch on 4) and samples on GPU 0"
    )
    assert str(Layout((4,), (0, 1, 2, 3, 5, 6), 2)) == (
        "trains on GPU 4 and samples on GPUs 0-3 and 5-6 (a replica on each 2)"
    )


# By the memory of the GPUs --------------------------------------------------------------------------------------------

Place = Callable[..., PlacedEngines]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """GiB that are free on each GPU."""
    import torch

    found: dict[int, float] = {}
    monkeypatch.setattr(place_engines_module, "free_on_gpu", lambda gpu: (int(found[gpu] * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=None: "NVIDIA H100 80GB HBM3")
    return found


@pytest.fixture
def place(tiny_models: dict[str, Path], free: dict[int, float]) -> Place:
    """Places a model on the GPUs of `free`: a tiny one, or one with `layers` of the shape of Qwen3-32B."""
    from transformers import AutoConfig

    def placed(
        layers: int = 0, kv_cache: int | None = None, gpus: int | None = None, *, shared: bool = False, **options: Any
    ) -> PlacedEngines:
        config = AutoConfig.from_pretrained(str(tiny_models["tiny/text"]))
        config.max_position_embeddings = 2**20
        if layers:
            config.update(
                {
                    "num_hidden_layers": layers,
                    "layer_types": ["full_attention"] * layers,
                    "hidden_size": 5120,
                    "intermediate_size": 25600,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "vocab_size": 151936,
                    "tie_word_embeddings": False,
                    "max_position_embeddings": 16384,
                }
            )
        engine = EngineOptions("m", dtype="bfloat16", max_rank=8, sleeps=True, kv_cache_bytes=kv_cache)
        engine = dataclasses.replace(engine, shared_weights="holder" if shared else None)
        chosen = BackendOptions(**{"gpu_memory_utilization": 1.0, "max_rank": 8, **options})
        return place_engines(config, engine, chosen, len(free) if gpus is None else gpus)

    return placed


def test_each_replica_gets_the_cache_that_fits_its_gpu_and_sleeps_only_beside_the_trainer(
    place: Place, free: dict[int, float]
) -> None:
    free |= {0: 40, 1: 20, 2: 12}
    alone = place(train_gpus=(0,), sample_gpus=(0,))
    assert alone.engines == place(gpus=1).engines
    beside, one, two = (placed := place(train_gpus=(0,), sample_gpus=(0, 1, 2))).engines
    assert beside.kv_cache_bytes == alone.engines[0].kv_cache_bytes
    assert 12 * GIB < (one.kv_cache_bytes or 0) < 20 * GIB
    assert (two.kv_cache_bytes or 0) < 12 * GIB
    assert {each.max_sequences for each in placed.engines} == {two.max_sequences}
    assert [each.sleeps for each in placed.engines] == [True] * 3
    apart = place(sample_gpus=(1, 2))
    assert not apart.engines[0].sleeps
    assert apart.engines[0].kv_cache_bytes == one.kv_cache_bytes
    assert (apart.activation_bytes or 0) > (alone.activation_bytes or 0)

    def activations(*train: int) -> int:
        return place(train_gpus=train, sample_gpus=(0,), shard="never").activation_bytes or 0

    assert activations(0, 1) == alone.activation_bytes, "each rank has the limit of the one with the least memory"
    assert activations(1, 2) < activations(1)
    assert [each.sleeps for each in place(train_gpus=(1, 2), sample_gpus=(0, 1)).engines] == [True] * 2
    free[2] = 1
    for gpus in ({"train_gpus": (0, 1, 2), "sample_gpus": (0,)}, {"train_gpus": (0,), "sample_gpus": (0, 1, 2)}):
        with pytest.raises(ValueError, match=r"^GPU 2: 1.0 GiB of GPU memory are free, but the weights"):
            place(**gpus)
    given = place(kv_cache=2**20, train_gpus=(0,), sample_gpus=(0, 1, 2), sample_tp=1)
    assert (given.activation_bytes, [each.kv_cache_bytes for each in given.engines]) == (None, [2**20] * 3)


def test_as_much_is_shared_as_the_memory_of_the_gpus_asks_for(place: Place, free: dict[int, float]) -> None:
    """17.4 GiB of weights."""

    def shared(gib: float, **options: Any) -> tuple[int, int]:
        free.update(dict.fromkeys(range(4), gib))
        layout = place(16, **options).layout
        assert layout.train_gpus == layout.sample_gpus == (0, 1, 2, 3)
        return layout.shards, layout.sample_tp

    assert shared(50) == (1, 1)
    assert shared(40) == (4, 1)
    assert shared(40, shard="never") == (1, 2)
    assert shared(32) == (4, 2)
    assert shared(28) == (4, 4)
    assert shared(50, sample_tp=4, shard=2) == (2, 4)
    free.update(dict.fromkeys(range(4), 20))
    assert place(16).layout == Layout((0, 1), (2, 3), 2, 2), "one half trains"
    free.update(dict.fromkeys(range(4), 10))
    with pytest.raises(ValueError, match=r"^GPU 0: 10.0 GiB .* \(10.2 GiB and 4.4 GiB\)"):
        place(16)
    with pytest.raises(ValueError, match=r"^GPU 0: 10.0 GiB .* \(17.4 GiB and 4.4 GiB\)"):
        place(16, shard="never")


def test_ranks_that_share_layers_take_twice_the_tokens_where_they_train_alone_and_have_room(
    place: Place, free: dict[int, float]
) -> None:
    def tokens(gib: float, **options: Any) -> int:
        free.update(dict.fromkeys(range(4), gib))
        return place(16, **{"train_gpus": (0, 1), "sample_gpus": (2, 3), "shard": 2, **options}).micro_batch_tokens

    assert tokens(79) == 16384
    assert tokens(79, shard="never") == 8192
    assert tokens(79, sample_gpus=(1, 2)) == 8192
    assert tokens(79, micro_batch_tokens=5000) == 5000
    assert tokens(24) == 8192


def test_where_not_all_gpus_have_room_one_has_both_engines_and_the_line_says_why(
    place: Place, free: dict[int, float]
) -> None:
    free |= {0: 40, 1: 1}
    placed = place()
    assert placed.layout == ONE_GPU
    assert placed.engines == place(gpus=1).engines
    assert str(placed).startswith(
        "trains on GPU 0 and samples on GPU 0; on all GPUs it does not fit: GPU 1: 1.0 GiB of GPU memory are free"
    )
    free |= {0: 43, 1: 1}
    assert "; on all GPUs it does not fit: GPU 1: 1.0 GiB" in str(place(16)), "though GPU 0 has less set aside"
    assert str(placed).endswith("; --train-gpus, --sample-gpus, --shard and --sample-tp choose another layout")
    with pytest.raises(ValueError, match=r"^GPU 1: 1.0 GiB"):
        place(train_gpus=(0, 1))
    free[0] = 1
    with pytest.raises(ValueError, match=r"^GPU 0: 1.0 GiB"):
        place()


def test_where_memory_is_short_less_is_set_aside(place: Place, free: dict[int, float]) -> None:
    """17.4 GiB of weights, once: both engines read them. With copies, as much memory is short for more."""

    def placed(gib: float, **options: Any) -> PlacedEngines:
        free[0] = gib
        return place(16, gpus=1, **{"shared": True, **options})

    by_memory = [placed(gib) for gib in (40, 28, 24.75, 24.25, 23.5)]
    assert [each.reserves for each in by_memory] == [USUAL, *SMALLER]
    last = by_memory[-1]
    (engine,) = last.engines
    assert (engine.adapters_per_step, engine.max_sequences, engine.max_batched_tokens) == (1, 16, 1024)
    assert (engine.image_cache_bytes, last.micro_batch_tokens) == (2**27, 2048)
    assert str(last.reserves) == (
        "for adapters that are sampled in one step: 1, for image features: 128 MiB, for a micro-batch: 2,048 "
        "positions, for sequences that are sampled at a time: 16"
    )
    assert placed(25.6, micro_batch_tokens=2000).micro_batch_tokens == 2000
    with pytest.raises(ValueError, match=r"^38.0 GiB of GPU memory are free, but two copies of the weights"):
        placed(38, shared=False)
    with pytest.raises(ValueError, match=r"^18.0 GiB of GPU memory are free, but the weights \(17.4 GiB\), adapters"):
        placed(18)


def test_a_cache_of_given_size_is_never_refused_and_shares_what_does_not_fit(
    place: Place, free: dict[int, float]
) -> None:
    free |= {0: 1, 1: 1}

    def shared(**options: Any) -> int:
        placed = place(kv_cache=2**20, **options)
        assert ({each.kv_cache_bytes for each in placed.engines}, placed.activation_bytes) == ({2**20}, None)
        return placed.layout.shards

    assert [shared(), shared(train_gpus=(0, 1)), shared(train_gpus=(0,)), shared(shard="never")] == [2, 2, 1, 1]
    assert place(kv_cache=2**20, gpus=1).layout == ONE_GPU


def test_a_trainer_on_a_cpu_takes_as_many_positions_as_its_caches_hold(place: Place) -> None:
    assert place(gpus=0).micro_batch_tokens == 1024


def test_a_cache_that_is_too_small_for_the_states_of_linear_attention_is_refused(
    free: dict[int, float], tmp_path: Path
) -> None:
    """One that is large enough is taken, with as many sequences as it has blocks, also where nothing fits."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(make_tiny_text_model(tmp_path / "m", family="qwen3_5_text"))
    block = model_sizes(config.get_text_config().to_dict(), parameters=1, itemsize=2).block_bytes

    def placed(gib: float, blocks: int) -> PlacedEngines:
        free[0] = gib
        engine = EngineOptions("m", dtype="bfloat16", max_rank=8, kv_cache_bytes=blocks * block)
        return place_engines(config, engine, BackendOptions(max_rank=8), 1)

    for gib in (79.0, 0.1):
        least = RESERVED + 1
        with pytest.raises(
            ValueError, match=f"kv_cache_bytes is {RESERVED * block} .* take {least * block} at least"
        ) as refusal:
            placed(gib, RESERVED)
        named = float(str(refusal.value).rpartition(" ")[2].rstrip(")"))
        assert placed(gib, math.floor(named * 2**30 / block)), "the size that the error names is enough"
        assert [each.max_sequences for each in placed(gib, least).engines] == [1]
        assert [each.max_sequences for each in placed(gib, least + 9).engines] == [10]


def test_on_a_cpu_there_are_as_many_processes_as_gpus_are_named(place: Place) -> None:
    placed = place(gpus=0, train_gpus=(0, 1), sample_gpus=(0, 1, 2, 3), sample_tp=2)
    assert placed.layout == Layout((0, 1), (0, 1, 2, 3), 2)
    assert [(each.ranks, each.max_sequences) for each in placed.engines] == [(2, CPU_SEQUENCES)] * 2
    assert place(gpus=0).layout == ONE_GPU


# The start ------------------------------------------------------------------------------------------------------------


class StartedError(Exception):
    """What would run where."""


def test_a_start_on_two_gpus_says_its_layout_and_starts_it(
    tiny_models: dict[str, Path], free: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def starting(options: BackendOptions, *places: Any) -> Any:
        raise StartedError(options, *places)

    monkeypatch.setattr(compat_vllm, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(load_engines, "starting", starting)
    said: list[str] = []

    def started(**options: Any) -> tuple[Any, ...]:
        said.clear()
        with pytest.raises(StartedError) as found:
            load_real(ModelSource("tiny", str(tiny_models["tiny/text"])), BackendOptions(**options), said.append)
        return found.value.args

    free |= {0: 40, 1: 40}
    options, sampler_place, sampler, trainer_place, trainer = started()
    assert (options.train_gpus, options.sample_gpus, options.sample_tp) == ((0, 1), (0, 1), 1)
    assert (sampler_place, trainer_place) == ("process", "process")
    assert isinstance(sampler, Replicas)
    assert len(sampler.factories) == 2
    assert (trainer.func.__name__, trainer.args[0].shards) == ("trainer_of_rank", 1)
    (line,) = said
    assert line == (
        "tiny trains on GPUs 0-1 (a copy of the weights on each) and samples on GPUs 0-1 (a replica on each); "
        "--train-gpus, --sample-gpus, --shard and --sample-tp choose another layout"
    )
    assert started(shard=2)[-1].args[0].shards == 2
    options, sampler_place, sampler, trainer_place, trainer = started(trainer="inline", sampler="inline")
    assert (options.train_gpus, options.sample_gpus, trainer_place, sampler_place) == ((), (), "inline", "inline")
    del free[1]
    options, _, sampler, _, trainer = started()
    assert (options.train_gpus, options.sample_gpus, trainer.func.__name__, said) == ((), (), "HFTrainer", [])
    assert not isinstance(sampler, Replicas)


@pytest.mark.more  # two ranks, and two processes with vLLM
@pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="sees GPUs that are not there")
async def test_a_start_with_two_gpus_has_two_ranks_and_two_replicas_that_agree(
    tiny_models: dict[str, Path], tmp_path: Path, free: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes run on the CPU."""
    import torch

    free |= {0: 40, 1: 40}
    monkeypatch.setattr(compat_vllm, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path, dtype="float32", max_rank=8, max_context_length=256, kv_cache_bytes=2**26
    )
    sources = [ModelSource("tiny", str(tiny_models["tiny/text"]))]
    async with InProcessBackend(sources, options, progress=said.append) as backend:
        model = backend.models.get("tiny")
        assert isinstance(model.engines.trainer, ProcessTrainer)
        assert len(model.engines.trainer.pids) == 2
        assert model.pool is not None
        assert len(model.pool.replicas) == 2
    assert [line for line in said if "trains on GPUs 0-1" in line and "samples on GPUs 0-1" in line]
    assert [line for line in said if "agree to" in line]


def test_options_of_several_processes_are_checked_with_fake_engines_too(tmp_path: Path) -> None:
    options = BackendOptions(data_dir=tmp_path)
    wrong: dict[str, Any]
    for wrong in ({"shard": 2}, {"train_gpus": (0, 1, 2), "shard": 2}, {"sample_tp": 2}):
        with pytest.raises(ValueError, match=r"^--(shard|sample-tp) 2: "):
            load_fake(ModelSource("m", "m"), dataclasses.replace(options, **wrong))


def test_in_fewer_bits_both_engines_read_one_copy_on_one_gpu(place: Place, free: dict[int, float]) -> None:
    """The matrices of layers, 14.5 of 17.4 GiB, in 8 and 4 bits; and one in the dtype of the model in each engine."""
    free[0] = 14
    with pytest.raises(ValueError, match=r"the weights \(17.4 GiB\), .*; --base-precision int4 fits$"):
        place(16, gpus=1, shared=True)
    packed = place(16, gpus=1, shared=True, base_precision="int4")
    assert packed.layout == ONE_GPU
    with pytest.raises(ValueError, match=r"the weights \(10.3 GiB\), .*--shard\)$"):
        place(16, gpus=1, shared=True, base_precision="int8")
    for gpus in (0, 1):
        check_precision(BackendOptions(base_precision="int8"), gpus)
    check_precision(BackendOptions(shared_weights="off"), 2)
    for options, gpus, why in (
        ({"shared_weights": "off"}, 1, "--shared-weights off"),
        ({}, 2, "2 GPUs are visible, and CUDA_VISIBLE_DEVICES=0 leaves one"),
        ({"sample_gpus": (0,)}, 1, "--train-gpus, --sample-gpus, --train-hosts and --sample-hosts give each a copy"),
    ):
        with pytest.raises(ValueError, match=rf"^--base-precision int8: .* one copy; {why}$"):
            check_precision(BackendOptions(base_precision="int8", **options), gpus)


def test_embedding_and_head_in_8_bits_take_half(place: Place, free: dict[int, float]) -> None:
    """Beside layers in any precision, and the plan says so where it fits and nothing less does."""
    free[0] = 12.4
    with pytest.raises(
        ValueError, match=r"the weights \(17.4 GiB\), .*; --base-precision int4 --head-precision int8 fits$"
    ):
        place(16, gpus=1, shared=True)
    with pytest.raises(ValueError, match=r"the weights \(7.0 GiB\), .*; --head-precision int8 fits$"):
        place(16, gpus=1, shared=True, base_precision="int4")
    assert place(16, gpus=1, shared=True, base_precision="int4", head_precision="int8").layout == ONE_GPU
    with pytest.raises(ValueError, match=r"the weights \(16.0 GiB\), .*; --base-precision int4 fits$"):
        place(16, gpus=1, shared=True, head_precision="int8")
    for told, options in (
        ("--head-precision int8", {}),
        ("--base-precision int4 --head-precision int8", {"base_precision": "int4"}),
    ):
        chosen: Any = {"head_precision": "int8", **options}
        check_precision(BackendOptions(**chosen), 1)
        with pytest.raises(
            ValueError, match=rf"^{told}: trainer and sampler have to read one copy; 2 GPUs are visible"
        ):
            check_precision(BackendOptions(**chosen), 2)
        with pytest.raises(ValueError, match=rf"^{told}: trainer and sampler have to read one copy; --shared-weights"):
            check_precision(BackendOptions(**chosen, shared_weights="off"), 1)
    check_precision(BackendOptions(head_precision="int8"), 1, published="GPTQ in 4 bits")
