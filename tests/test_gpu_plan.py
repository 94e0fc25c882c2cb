"""How trainer and sampler divide a GPU, in numbers alone."""

import dataclasses
import functools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.models.gpu_plan import GATHERED, USUAL, ModelSizes, StepSize, plan_gpu
from tinker_local.backend.sampling.sampler import RESERVED
from tinker_local.backend.training.run.block_memory import TowerSizes
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, LayerMemory

GIB = 2**30
EIGHT = ModelSizes(
    parameters=8_190_000_000,
    hidden=4096,
    intermediate=12288,
    layers=36,
    q_width=4096,
    kv_width=1024,
    vocabulary=151936,
    itemsize=2,
)
THIRTY_TWO = dataclasses.replace(
    EIGHT, parameters=32_800_000_000, hidden=5120, intermediate=25600, layers=64, q_width=8192
)
HALF = dataclasses.replace(EIGHT, parameters=600_000_000, hidden=1024, intermediate=3072, layers=28, q_width=2048)


def activations(sizes: ModelSizes, tokens: int) -> ActivationMemory:
    """What a decoder needs that keeps all inputs and outputs of the matrices."""
    inputs = tokens * sizes.hidden * sizes.itemsize * (sizes.layers + 1)
    widths = sizes.hidden + sizes.q_width + sizes.kv_width + sizes.intermediate
    layer = 2 * widths * sizes.itemsize * tokens
    return ActivationMemory(inputs + 4 * layer, [LayerMemory(layer, 0)] * sizes.layers)


def plan(sizes: Any, free_gib: Any, memory: Any = activations, **changes: Any) -> Any:
    settings = {
        "context": 40960,
        "micro_batch_tokens": 8192,
        "max_rank": 128,
        "adapter_slots": 4,
        "steps": [StepSize(256, 2048)],
        "image_cache": 0,
        "logits": 2**29,
    }
    return plan_gpu(sizes, functools.partial(memory, sizes), free=int(free_gib * GIB), **{**settings, **changes})


def test_on_a_large_card_the_trainer_computes_nothing_again_and_the_cache_gets_the_rest() -> None:
    found = plan(EIGHT, 134)
    assert found.activations >= activations(EIGHT, 8192).everything
    assert found.kv_cache > 40 * GIB
    assert 2 * EIGHT.weight_bytes + found.kv_cache + found.activations < 134 * GIB


def test_ranks_that_share_rows_need_memory_for_their_part_and_what_they_exchange() -> None:
    whole = plan(EIGHT, 200, context=8192, kv_cache=0, samples=False)
    part = plan(EIGHT, 200, context=8192, kv_cache=0, samples=False, context_parallel=2)
    assert part == whole, "all that is left, on a GPU that trains alone"
    exchanged = 3 * (EIGHT.q_width + EIGHT.kv_width) * EIGHT.itemsize
    for parts, least in ((1, activations(EIGHT, 8192).always), (4, activations(EIGHT, 2048).always + 2048 * exchanged)):
        needed = 200 - 1 - (whole.activations - least) / GIB
        fits = min(needed + 1, needed * 64 / 63)  # one part of 64, at most 1 GiB, is left to others
        arguments = {"context": 8192, "samples": False, "context_parallel": parts}
        assert plan(EIGHT, fits + 0.001, **arguments).activations == pytest.approx(least, abs=2**21)
        with pytest.raises(ValueError, match=f"the activations of {8192 // parts} positions"):
            plan(EIGHT, fits - 0.001, **arguments)
    most = plan(EIGHT, 134, context_parallel=2).activations
    assert most == plan(EIGHT, 134).activations + 8192 * exchanged


def test_a_decoder_that_keeps_more_gets_more() -> None:
    def twice(sizes: ModelSizes, tokens: int) -> ActivationMemory:
        return activations(sizes, 2 * tokens)

    found, more = plan(EIGHT, 200), plan(EIGHT, 200, twice)
    assert more.activations >= activations(EIGHT, 16384).everything > found.activations
    assert more.kv_cache < found.kv_cache


def test_a_vision_tower_that_is_trained_takes_its_memory_from_the_cache() -> None:
    """Of vLLM's slots, of the trainer's adapters, and of what a micro-batch of images keeps; its backward, if that
    takes more than the decoder, is what the activations have room for."""
    tower = TowerSizes(widths=552_928, kept=248_832, backward=285_184)
    with_tower = dataclasses.replace(EIGHT, tower=tower)
    before, found = plan(EIGHT, 134), plan(with_tower, 134)
    assert found.activations == before.activations
    slots = 4 * 128 * tower.widths * 2
    adapters = 32 * tower.widths * (4 * 4 * 4 + 2 * 2 + 4 * 2)
    assert before.kv_cache - found.kv_cache == slots + adapters + 8192 * tower.kept
    large = dataclasses.replace(EIGHT, tower=dataclasses.replace(tower, backward=2**22))
    assert plan(large, 134).activations == 8192 * 2**22
    sampler_alone = plan(EIGHT, 134, trains=False).kv_cache - plan(with_tower, 134, trains=False).kv_cache
    assert sampler_alone == slots


def test_a_model_whose_weights_fill_most_of_the_card_is_served_still() -> None:
    """A fixed share of the card for vLLM would not even hold its copy of the weights."""
    found = plan(THIRTY_TWO, 176, context=8192, max_rank=32)
    assert found.kv_cache >= THIRTY_TWO.sequence_bytes(8192, 2048)
    assert found.activations > 0


def test_the_cache_takes_no_more_than_its_sequences_can_fill() -> None:
    found = plan(HALF, 134, context=1024)
    assert found.kv_cache == 256 * HALF.sequence_bytes(1024, 2048)
    assert found.activations > 60 * GIB


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=re.escape("44.0 GiB of GPU memory are free")) as refusal:
        plan(EIGHT, 44)
    assert "15.3 GiB each" in str(refusal.value)
    assert "40960 positions (5.6 GiB)" in str(refusal.value)
    assert "max_context_length" in str(refusal.value)
    plan(EIGHT, 44, context=2048, max_rank=8)


@given(st.floats(20, 300), st.integers(512, 65536), st.integers(64, 32768), st.sampled_from([8, 64, 256]))
def test_parts_never_exceed_what_is_free(free: Any, context: Any, tokens: Any, rank: Any) -> None:
    for sizes in (HALF, EIGHT, THIRTY_TWO):
        try:
            found = plan(sizes, free, context=context, micro_batch_tokens=tokens, max_rank=rank)
        except ValueError:
            continue
        assert found.kv_cache >= sizes.sequence_bytes(context, 2048)
        assert found.activations > 0
        assert found.kv_cache + found.activations + 2 * sizes.weight_bytes < free * GIB


MIXTURE = dataclasses.replace(
    HALF, layers=48, q_width=4096, kv_width=512, chosen=10, expert_width=512, linear=36, route_bytes=2
)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("given", [None, 8 * GIB])
def test_the_experts_of_positions_have_room_beside_the_cache_and_the_trainer(ranks: int, given: int | None) -> None:
    """Two bytes each, of 48 layers that take 10, beside keys and values of 12 layers in as many bytes; the first rank
    keeps those of all positions, and has a part of their keys."""
    settings: dict[str, Any] = {"context": 4096, "sample_ranks": ranks, "kv_cache": given}
    found, without = (plan(sizes, 40, **settings) for sizes in (MIXTURE, dataclasses.replace(MIXTURE, route_bytes=0)))
    position = 12 * 2 * 512 * 2
    experts = found.kv_cache * ranks // position * 48 * 10 * 2
    assert experts > 0.03 * found.kv_cache * ranks
    assert found.kv_cache + experts + found.activations <= without.kv_cache + without.activations
    assert found.kv_cache == given or given is None


LARGE, SMALL = USUAL.steps(140 * GIB, "NVIDIA H200")


def test_steps_are_as_large_as_vllm_takes_them_on_a_card() -> None:
    assert USUAL.steps(140 * GIB, "NVIDIA H200") == (StepSize(1024, 8192), StepSize(256, 2048))
    assert USUAL.steps(79 * GIB, "NVIDIA H100 80GB HBM3") == (LARGE, SMALL)
    assert USUAL.steps(79 * GIB, "NVIDIA A100-SXM4-80GB") == (SMALL,)
    assert USUAL.steps(24 * GIB, "NVIDIA GeForce RTX 4090") == (SMALL,)


HYBRID = dataclasses.replace(EIGHT, layers=32, linear=24, state_bytes=2 * 2**20)


def test_a_step_has_no_more_sequences_than_the_cache_has_blocks() -> None:
    """Eight layers share a block, and vLLM refuses to start with fewer blocks than sequences."""
    block = HYBRID.block_bytes
    assert block == 8 * 2 * 2**20
    steps = [plan(HYBRID, gib, context=8192, steps=[LARGE, SMALL]) for gib in range(50, 134)]
    assert steps[-1].step == LARGE
    for found in steps:
        assert found.step.sequences == min(found.kv_cache // block - RESERVED, found.step.sequences)
    sequences = [found.step.sequences for found in steps]
    assert sequences == sorted(sequences), "more memory gives as many, or more"
    assert 1 < sequences[0] < 256 < sequences[10] < 1024
    for kv_cache in (2 * GIB, block):
        given = plan(HYBRID, 134, context=8192, kv_cache=kv_cache)
        assert given.step.sequences == max(1, kv_cache // block - RESERVED)
    halves = plan(HYBRID, 134, context=8192, kv_cache=2 * GIB, sample_ranks=2)
    assert halves.step.sequences == 4 * GIB // block - RESERVED


def test_windows_and_states_take_less_of_the_cache_than_whole_sequences() -> None:
    position = 2 * 1024 * 2
    assert EIGHT.sequence_bytes(131072, 2048) == 36 * (131072 + 16) * position
    windows = dataclasses.replace(EIGHT, sliding=30, window=1025)
    # A block of 16 positions that a window begins in, and one that vLLM leaves empty.
    kept = 6 * 131072 + 30 * (1024 + 2 * 2048 + 16) + 6 * 16
    assert windows.sequence_bytes(131072, 2048) == kept * position
    assert windows.sequence_bytes(992, 2048) == (36 * 992 + 30 * 16 + 6 * 16) * position
    states = dataclasses.replace(EIGHT, linear=27, state_bytes=2**21)
    assert states.sequence_bytes(131072, 2048) == (9 * 131072 + 2 * 27 * 512 + 9 * 512) * position


def test_a_large_step_takes_its_memory_from_the_cache_or_the_activations() -> None:
    large, small = plan(EIGHT, 134, steps=[LARGE, SMALL]), plan(EIGHT, 134, steps=[SMALL])
    assert (large.step, small.step) == (LARGE, SMALL)
    logits = 3 * 4 * EIGHT.vocabulary * (1024 - 256)
    layer = 2 * (4 * EIGHT.intermediate + 8 * EIGHT.hidden) * (8192 - 2048)
    assert small.kv_cache + small.activations - large.kv_cache - large.activations == logits + layer


def test_a_model_that_leaves_no_room_for_large_steps_takes_small_ones() -> None:
    for free in (x / 10 for x in range(440, 600)):
        try:
            small = plan(EIGHT, free, steps=[SMALL])
        except ValueError:
            continue
        break
    assert plan(EIGHT, free, steps=[LARGE, SMALL]) == small
    assert plan(EIGHT, free + 5, steps=[LARGE, SMALL]).step == LARGE


def test_a_cache_of_given_size_keeps_it_and_the_step_fits_beside_it() -> None:
    found = plan(EIGHT, 134, steps=[LARGE, SMALL], kv_cache=56 * GIB)
    assert found.step == LARGE
    assert found.kv_cache == 56 * GIB
    all_but = found.activations + found.kv_cache  # of which the trainer needs some for one sequence
    assert plan(EIGHT, 134, steps=[LARGE, SMALL], kv_cache=all_but - 4 * GIB).step == SMALL
    with pytest.raises(ValueError, match="KV cache"):
        plan(EIGHT, 134, steps=[LARGE, SMALL], kv_cache=all_but + 4 * GIB)


# Several GPUs ---------------------------------------------------------------------------------------------------------


def test_a_gpu_with_one_engine_holds_one_copy_and_gives_it_the_rest() -> None:
    both, sampler, trainer = plan(EIGHT, 80), plan(EIGHT, 80, trains=False), plan(EIGHT, 80, samples=False)
    assert (sampler.activations, trainer.kv_cache) == (0, 0)
    assert sampler.kv_cache > both.kv_cache + EIGHT.weight_bytes
    assert trainer.activations > both.activations + EIGHT.weight_bytes
    assert sampler.kv_cache + EIGHT.weight_bytes < 80 * GIB
    plan(THIRTY_TWO, 80, trains=False, context=8192, max_rank=32)  # 61.1 GiB of weights
    with pytest.raises(ValueError, match=re.escape("two copies of the weights (61.1 GiB each)")) as refusal:
        plan(THIRTY_TWO, 80, context=8192, max_rank=32)
    assert "so does a GPU for each (--sample-gpus)" in str(refusal.value)
    with pytest.raises(
        ValueError, match=re.escape("the weights (61.1 GiB), adapters, buffers and a KV cache")
    ) as alone:
        plan(THIRTY_TWO, 62, trains=False, context=8192, max_rank=32)
    assert "--sample-gpus" not in str(alone.value)
    assert "--train-gpus" not in str(alone.value)


def test_a_sampler_on_several_gpus_takes_its_part_of_weights_and_cache_from_each() -> None:
    one, half = plan(EIGHT, 80, trains=False), plan(EIGHT, 80, trains=False, sample_ranks=2)
    assert half.kv_cache - one.kv_cache == pytest.approx(EIGHT.weight_bytes // 2, rel=0.01)
    with pytest.raises(ValueError, match="more GPUs for each replica"):
        plan(THIRTY_TWO, 62, trains=False, context=8192, max_rank=32)
    assert plan(THIRTY_TWO, 62, trains=False, context=8192, max_rank=32, sample_ranks=2).kv_cache > 10 * GIB


def test_a_rank_that_shares_the_layers_holds_its_part_three_layers_and_all_else() -> None:
    layers = EIGHT.layers * EIGHT.layer_parameters * 2
    assert EIGHT.trainer_bytes(1) == EIGHT.weight_bytes
    for ranks in (2, 4, 8):
        expected = EIGHT.weight_bytes - layers + layers // ranks + GATHERED * EIGHT.layer_parameters * 2
        assert abs(EIGHT.trainer_bytes(ranks) - expected) <= 2
    with pytest.raises(ValueError, match=r"so do more GPUs that train and share the layers \(--train-gpus, --shard\)"):
        plan(THIRTY_TWO, 80, samples=False, context=8192, max_rank=32)
    assert plan(THIRTY_TWO, 80, samples=False, context=8192, max_rank=32, ranks=2).activations > 10 * GIB
