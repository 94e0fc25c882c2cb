"""Trainer and sampler are compared before a model is ready: on every kind of prompt that could differ."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models.adapter_check import LARGEST_EFFECT, TARGETS, adapter_on, largest_difference
from tinker_local.backend.models.agreement import DRAWS, judge, make_probes
from tinker_local.backend.models.positions import compare_parts
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.rendering.decoding import image_size
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.rotations import Rotations
from tinker_local.types import (
    CreateModelRequest,
    CreateSessionRequest,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    NotEnoughMemoryError,
    SampleOutput,
)

WINDOW = 100

Wrong = Callable[[RenderedInput], bool]
NEVER: Wrong = lambda prompt: False  # noqa: E731


class RoundingTrainer(FakeTrainer):
    """One whose logprobs move by `rounding` nats, in the root of their mean square, when it rounds otherwise."""

    def __init__(self, model: FakeModel, rounding: float) -> None:
        super().__init__(model)
        self._rounding = rounding

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> np.ndarray:
        exact = super().logprobs(adapter_id, *inputs)
        moves = np.random.default_rng(nudge).standard_normal(exact.shape)
        return (exact + self._rounding * moves * bool(nudge)).astype(np.float32)


class WrongSampler(FakeSampler):
    """Adds `error` to the logprobs of prompts that `wrong` selects. With `blind`, it samples the base model
    whatever the version."""

    def __init__(self, model: FakeModel, wrong: Wrong, error: float, blind: bool) -> None:
        super().__init__(model)
        self._wrong = wrong
        self._error = error
        self._blind = blind
        self.lengths: list[int] = []

    async def sample(self, work: SampleWork) -> SampleOutput:
        output = await super().sample(replace(work, version=None) if self._blind else work)
        self.lengths.append(work.prompt.length)
        if output.prompt_logprobs is None or not self._wrong(work.prompt):
            return output
        changed = output.prompt_logprobs + np.float32(self._error)
        return output.model_copy(update={"prompt_logprobs": changed})


async def start(
    tmp_path: Path,
    wrong: Wrong,
    error: float = 0.5,
    tolerance: float = 1e-4,
    *,
    rounding: float = 0.0,
    blind: bool = False,
    folder: Path | None = None,
    **fields: Any,
) -> tuple[list[int], list[str]]:
    """Lengths of the prompts that the sampler was compared on, and what the server said. `folder`: of the model."""
    samplers: list[WrongSampler] = []
    said: list[str] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        samplers.append(WrongSampler(model, wrong, error, blind))
        trainer = RoundingTrainer(model, rounding)
        return Engines(FakeRenderer(model), trainer, samplers[-1], arch="fake", tolerance=tolerance, **fields)

    source = ModelSource.parse("fake/bigram") if folder is None else ModelSource("fake/bigram", str(folder))
    backend = InProcessBackend([source], BackendOptions(data_dir=tmp_path), load=load, progress=said.append)
    await backend.start()
    await backend.close()
    return samplers[0].lengths, said


async def test_engines_that_agree_start_and_count_no_image_of_the_probe_on_fakes(tmp_path: Path) -> None:
    lengths, said = await start(tmp_path, lambda prompt: False)
    assert len(lengths) == 3
    assert "fake/bigram: trainer and sampler agree to" in said[-1]


@pytest.mark.mutation(
    "base-models-not-compared",
    "ServedModel._compared",
    "            if comparison.problem is not None and not comparison.worst.difference <= limit:\n",
    "            if False:\n",
)
@pytest.mark.mutation(
    "images-not-compared",
    "make_probes",
    "images = [rendered] if rendered.length <= limit else []",
    "images = []",
    cases=("image",),
)
@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda prompt: not prompt.images, r"positions of text is -\d"),
        (lambda prompt: bool(prompt.images), r"positions with an image is -\d"),
        (lambda prompt: prompt.length > WINDOW and not prompt.images, "116 positions of text"),
    ],
    ids=["text", "image", "beyond-the-window"],
)
async def test_engines_that_differ_on_one_kind_of_prompt_do_not_start_on_fakes(
    tmp_path: Path, wrong: Wrong, where: str
) -> None:
    with pytest.raises(ValueError, match=where) as no:
        await start(tmp_path, wrong, sliding_window=WINDOW)
    assert str(no.value).startswith("fake/bigram: trainer and sampler compute this model differently: the logprob at ")
    assert "they differ by 0.5 on average (at most 0.0001 is normal)" in str(no.value)


async def test_a_sampler_without_effect_of_adapters_does_not_start_if_they_are_unknown_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer and sampler compute adapters of this model differently"):
        await start(tmp_path / "blind", NEVER, blind=True, unknown_adapters=True)
    lengths, _ = await start(tmp_path / "not", NEVER, unknown_adapters=True)
    assert len(lengths) == 12  # the base model and an adapter on texts, and images of several shapes
    lengths, _ = await start(tmp_path / "known", NEVER, blind=True)
    assert len(lengths) == 3


class Partial(FakeSampler):
    """Leaves out adapters of the fields `left_out` of `LoraConfig`, and takes none of the fields `refused`."""

    def __init__(self, model: FakeModel, left_out: tuple[str, ...], refused: tuple[str, ...]) -> None:
        super().__init__(model)
        self._left_out, self._refused = left_out, refused

    async def sample(self, work: SampleWork) -> SampleOutput:
        state = None if work.version is None else work.version.unwritten()
        trained = (
            set() if state is None else {name for name, on in state.lora_config.model_dump().items() if on is True}
        )
        if trained.intersection(self._refused):
            raise InvalidRequestError("vLLM does not use the tensors of some layer")
        return await super().sample(replace(work, version=None) if trained.intersection(self._left_out) else work)


@pytest.mark.parametrize(
    ("left_out", "refused"),
    [(("train_mlp",), ()), ((), ("train_mlp",)), (("train_attn",), ("train_mlp",))],
    ids=["left-out", "refused", "both"],
)
async def test_a_run_of_what_the_sampler_leaves_out_is_refused_by_name_and_others_begin_on_fakes(
    left_out: tuple[str, ...], refused: tuple[str, ...], tmp_path: Path
) -> None:
    said: list[str] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        sampler = Partial(model, left_out, refused)
        return Engines(FakeRenderer(model), FakeTrainer(model), sampler, arch="fake", tolerance=1e-4, targets=TARGETS)

    options = BackendOptions(data_dir=tmp_path)
    source = ModelSource.parse("fake/bigram")
    async with InProcessBackend([source], options, load=load, progress=said.append) as backend:
        session = await backend.sessions.create(CreateSessionRequest())
        off = {*left_out, *refused}
        assert {line.split()[3] for line in said if "are refused" in line} == off
        assert any("runs with train_mlp are refused" in line and line.startswith("fake/bigram: ") for line in said)
        for number, target in enumerate(TARGETS):
            alone = LoraConfig(rank=1, **{each: each == target for each in TARGETS})
            request = CreateModelRequest(
                session_id=session, model_seq_id=number, base_model="fake/bigram", lora_config=alone
            )
            if target in off:
                with pytest.raises(
                    InvalidRequestError, match=f"^lora_config.{target}: fake/bigram would train it and "
                ):
                    await backend.runs.create(request)
            else:
                await backend.runs.create(request)


async def test_a_sampler_that_takes_no_adapter_at_all_does_not_start_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer and sampler compute adapters of this model differently"):
        await start(tmp_path, NEVER, blind=True, targets=TARGETS)


def test_an_adapter_that_is_left_out_shows_in_16_bits_whatever_rounding_it_adds() -> None:
    """Its effect is what the engines differ by then; in float32 the tolerance needs no help."""
    assert largest_difference(1e-3, 2.0) == 1e-3
    assert largest_difference(0.3, 0.2) == 0.3
    assert 0.3 < largest_difference(0.3, 2.0) < 2.0


def test_an_adapter_that_would_make_noise_of_a_model_is_made_weaker_on_fakes() -> None:
    class Excitable(FakeTrainer):
        """Adapters change logprobs forty times as much as usual."""

        def logprobs(self, adapter_id: str | None, *prompts: RenderedInput, nudge: int = 0) -> Any:
            base = super().logprobs(None, *prompts)
            return base + 40 * (super().logprobs(adapter_id, *prompts, nudge=nudge) - base)

    model = FakeModel()
    probes = make_probes(FakeRenderer(model), model.vocab_size, 4096, None, 10**6).base
    _, _, effect = adapter_on(TARGETS, Excitable(model), probes, "float32")
    assert 0.1 < effect <= LARGEST_EFFECT
    _, _, usual = adapter_on(TARGETS, FakeTrainer(model), probes, "float32")
    assert 40 * usual > LARGEST_EFFECT


async def test_without_a_window_no_long_prompt_is_computed_on_fakes(tmp_path: Path) -> None:
    lengths, _ = await start(tmp_path, lambda prompt: prompt.length > WINDOW and not prompt.images)
    assert max(lengths) < 2 * WINDOW


async def test_engines_may_differ_by_a_few_times_of_what_rounding_moves_and_no_more_on_fakes(tmp_path: Path) -> None:
    """Also where all prompts differ alike, as by an adapter that one engine alone has."""
    always: Wrong = lambda prompt: True  # noqa: E731
    with pytest.raises(ValueError, match=r"they differ by 0.08 on average \(at most 0.0001 is normal\)"):
        await start(tmp_path / "a", always, 0.08, 0.3)
    with pytest.raises(ValueError, match=r"they differ by 0.08 or more at half of all positions \(at most 0.02"):
        await start(tmp_path / "b", always, 0.08, 0.3, rounding=0.02)
    with pytest.raises(ValueError, match=r"0.08 or more at half of a prompt's positions \(at most 0.0[34]"):
        await start(tmp_path / "c", lambda prompt: bool(prompt.images), 0.08, 0.3, rounding=0.02)
    with pytest.raises(ValueError, match=r"they differ by 0.4 on average \(at most 0.3 is normal\)"):
        await start(tmp_path / "d", always, 0.4, 0.3, rounding=1.0)
    _, said = await start(tmp_path / "e", always, 0.08, 0.3, rounding=0.08)
    assert "trainer and sampler agree to 0.08 nats where rounding alone makes 0.0" in said[-1]
    await start(tmp_path / "f", always, 0.08, 0.3, least_rounding=0.1)


@pytest.mark.mutation(
    "rounding-of-experts-forgotten",
    "moved_by_rounding",
    "max(each.difference for draw in moved for each in draw),",
    "min(each.difference for draw in moved for each in draw),",
)
def test_a_token_that_rounding_sends_to_another_expert_is_no_fault_on_fakes() -> None:
    """One of 40 that moves by 3 nats makes a mean of 0.1, three times that of the others; rounding sends others too."""
    random = np.random.default_rng(0)
    probes = [RenderedInput(np.arange(length, dtype=np.int32)) for length in (16, 40)]
    base = np.full(15 + 39, -6.0)

    def moved(*sent: int) -> np.ndarray:
        changed = base + 0.03 * random.standard_normal(len(base))
        changed[list(sent)] -= 3.0
        return changed.astype(np.float32)

    draws = [base.astype(np.float32), moved(20), *(moved() for _ in range(DRAWS - 1))]
    assert judge(probes, draws, moved(50), 1e-4, 0.3).problem is None
    assert judge(probes, draws, moved(*range(40, 54)), 1e-4, 0.3).problem is not None


async def test_nan_is_a_difference_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is -.* in the trainer and nan in the sampler; they differ by nan on average"
    ):
        await start(tmp_path, lambda prompt: True, error=float("nan"))


async def test_engines_are_closed_if_no_probe_can_be_made_on_fakes(tmp_path: Path) -> None:
    closed: list[str] = []

    class Trainer(FakeTrainer):
        def close(self) -> None:
            closed.append("trainer")
            super().close()

    class Sampler(FakeSampler):
        async def close(self) -> None:
            closed.append("sampler")
            await super().close()

    class Renderer(FakeRenderer):
        def render(self, model_input: ModelInput, where: str) -> RenderedInput:
            raise InvalidRequestError(f"{where}: the processor is broken")

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(Renderer(model), Trainer(model), Sampler(model), arch="fake", tolerance=1e-4)

    backend = InProcessBackend([ModelSource.parse("fake/bigram")], BackendOptions(data_dir=tmp_path), load=load)
    with pytest.raises(ValueError, match=r"^fake/bigram: trainer and sampler could not be compared: probe: the proc"):
        await backend.start()
    assert sorted(closed) == ["sampler", "trainer"]


@pytest.mark.parametrize("limit", [64 * 2**20, 448 * 224 - 1, 3000])
def test_the_image_probe_keeps_to_the_limit_of_pixels_on_fakes(limit: int) -> None:
    """A server that refuses larger images must start."""
    sizes: list[tuple[int, int]] = []

    class Measuring(FakeRenderer):
        def render(self, model_input: ModelInput, where: str) -> RenderedInput:
            sizes.extend(image_size(chunk.data) for chunk in model_input.chunks if isinstance(chunk, ImageChunk))
            return super().render(model_input, where)

    model = FakeModel("fake/bigram")
    make_probes(Measuring(model), model.vocab_size, 1000, None, limit)
    ((width, height),) = sizes
    assert width == 2 * height
    assert 2800 < width * height <= limit


@pytest.mark.mutation(
    "long-texts-not-compared",
    "ServedModel.check_far",
    "        if not worst_part.difference <= normal:\n",
    "        if False:\n",
)
async def test_engines_that_differ_on_long_texts_alone_do_not_start_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^fake/bigram: trainer and sampler compute long texts differently: the log"):
        await start(tmp_path / "a", lambda prompt: prompt.length > WINDOW and not prompt.images, compare_seconds=60.0)
    lengths, said = await start(tmp_path / "b", NEVER, compare_seconds=60.0)
    assert f"logprobs of up to {max(lengths)} positions; " in said[-1]
    assert max(lengths) > WINDOW


async def test_texts_for_which_memory_is_short_are_compared_in_half_the_length_on_fakes(tmp_path: Path) -> None:
    class Trainer(FakeTrainer):
        def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
            if max(each.length for each in inputs) > 1000:
                raise NotEnoughMemoryError("logprobs need more memory")
            return super().logprobs(adapter_id, *inputs, nudge=nudge)

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), Trainer(model), FakeSampler(model), "fake", 1e-4, compare_seconds=600.0)

    said: list[str] = []
    options = BackendOptions(data_dir=tmp_path)
    async with InProcessBackend([ModelSource.parse("fake/bigram")], options, load=load, progress=said.append):
        reached = re.search(r"logprobs of up to (\d+) positions", said[-1])
    assert reached is not None
    assert 500 <= int(reached[1]) <= 1000


async def test_a_second_start_on_the_same_files_and_options_compares_no_long_text_on_fakes(tmp_path: Path) -> None:
    folder, data = tmp_path / "model", tmp_path / "data"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first, said = await start(data, NEVER, folder=folder, compare_seconds=60.0)
    assert "an earlier start" not in said[-1]
    again, said = await start(data, NEVER, folder=folder, compare_seconds=60.0)
    assert f"logprobs of up to {max(first)} positions, by an earlier start; " in said[-1]
    assert max(again) < 2 * WINDOW < max(first)
    (folder / "config.json").write_text('{"another": "model"}')
    changed, said = await start(data, NEVER, folder=folder, compare_seconds=60.0)
    assert "an earlier start" not in said[-1]
    assert max(changed) > 2 * WINDOW


def test_positions_that_agree_do_not_hide_a_few_that_differ() -> None:
    ours = np.zeros(9000, np.float32)
    theirs = ours.copy()
    theirs[8191:] = 0.01
    parts = compare_parts(ours, theirs, [])
    assert max(part.difference for part in parts) == pytest.approx(0.01, rel=0.01)
    theirs = ours.copy()
    theirs[4999:5050] = 0.01
    assert max(part.difference for part in compare_parts(ours, theirs, [5000, 5051])) == pytest.approx(0.01)


class Turning:
    """What a fake makes of positions: its table has so many `rows`, and queries double at `doubled`."""

    def __init__(self, rows: int = 10**6, doubled: int = 10**6) -> None:
        self.rows = rows
        self.doubled = doubled

    def __call__(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        angles = positions[0] * 0.5
        found = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[None].repeat(2, 0).astype(np.float32)
        found[:, positions[0] >= self.rows] = np.nan
        found[0, positions[0] >= self.doubled] *= 2
        return {0: found}


async def start_turning(tmp_path: Path, trainer_turns: Turning, sampler_turns: Turning) -> str:
    """What the server said last."""
    said: list[str] = []

    class Trainer(FakeTrainer):
        def rotations(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
            return trainer_turns(layers, positions)

    class Sampler(FakeSampler):
        async def rotations(
            self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
        ) -> Rotations:
            return sampler_turns(layers, positions)

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), Trainer(model), Sampler(model), arch="fake", tolerance=1e-4)

    options = BackendOptions(data_dir=tmp_path)
    async with InProcessBackend([ModelSource.parse("fake/bigram")], options, load=load, progress=said.append):
        return said[-1]


async def test_positions_that_the_engines_use_differently_are_refused_with_a_way_out_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compute position 500, of .* differently: the query or key of layer 0") as no:
        await start_turning(tmp_path / "a", Turning(), Turning(doubled=500))
    assert str(no.value).endswith("; --max-context-length 500 serves the positions before it")
    with pytest.raises(ValueError, match=r"compute position 300, of .*: the sampler's table of rotary embeddings ends"):
        await start_turning(tmp_path / "b", Turning(), Turning(rows=300))
    with pytest.raises(ValueError, match=r"compute position 3, of .* is rounding\)$"):
        await start_turning(tmp_path / "c", Turning(doubled=3), Turning())
    assert "rotary positions compared at all " in await start_turning(tmp_path / "d", Turning(), Turning())


async def test_a_model_that_another_one_changes_when_it_is_loaded_does_not_start_on_fakes(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        loaded.append(source.name)
        model = FakeModel(source.name)
        changes = source.name == "fake/first"
        sampler = WrongSampler(model, lambda prompt: changes and len(loaded) == 2, 0.5, blind=False)
        return Engines(FakeRenderer(model), FakeTrainer(model), sampler, arch="fake", tolerance=1e-4)

    sources = [ModelSource(f"fake/{name}", f"fake/{name}") for name in ("first", "second")]
    backend = InProcessBackend(sources, BackendOptions(data_dir=tmp_path), load=load)
    with pytest.raises(ValueError, match=r"^fake/first: trainer and sampler compute this model differently"):
        await backend.start()
    assert len(loaded) == 2
