"""Trainer and sampler are compared before a model is ready: on every kind of prompt that could differ."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models.agreement import DRAWS, judge, make_probes
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.rendering.decoding import image_size
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import ImageChunk, InvalidRequestError, ModelInput, SampleOutput

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
    **fields: Any,
) -> tuple[list[int], list[str]]:
    """Lengths of the prompts that the sampler was compared on, and what the server said."""
    samplers: list[WrongSampler] = []
    said: list[str] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        samplers.append(WrongSampler(model, wrong, error, blind))
        trainer = RoundingTrainer(model, rounding)
        return Engines(FakeRenderer(model), trainer, samplers[-1], arch="fake", tolerance=tolerance, **fields)

    backend = InProcessBackend(
        [ModelSource.parse("fake/bigram")], BackendOptions(data_dir=tmp_path), load=load, progress=said.append
    )
    await backend.start()
    await backend.close()
    return samplers[0].lengths, said


async def test_engines_that_agree_start_and_count_no_image_of_the_probe_on_fakes(tmp_path: Path) -> None:
    lengths, said = await start(tmp_path, lambda prompt: False)
    assert len(lengths) == 3
    assert "fake/bigram: trainer and sampler agree to" in said[-1]


@pytest.mark.mutation(
    "base-models-not-compared",
    "served_models.py",
    "            if comparison.problem is not None:\n",
    "            if False:\n",
)
@pytest.mark.mutation(
    "images-not-compared",
    "agreement.py",
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


@pytest.mark.mutation(
    "unknown-adapters-not-compared",
    "models/load_engines.py",
    "        if engines.unknown_adapters:\n",
    "        if False:\n",
)
async def test_a_sampler_without_effect_of_adapters_does_not_start_if_they_are_unknown_on_fakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer and sampler compute adapters of this model differently"):
        await start(tmp_path / "blind", NEVER, blind=True, unknown_adapters=True)
    lengths, _ = await start(tmp_path / "not", NEVER, unknown_adapters=True)
    assert len(lengths) == 6
    lengths, _ = await start(tmp_path / "known", NEVER, blind=True)
    assert len(lengths) == 3


async def test_without_a_window_no_long_prompt_is_computed_on_fakes(tmp_path: Path) -> None:
    lengths, _ = await start(tmp_path, lambda prompt: prompt.length > WINDOW and not prompt.images)
    assert max(lengths) < 2 * WINDOW


@pytest.mark.mutation(
    "rounding-not-measured",
    "agreement.py",
    "        min(tolerance, max(least, times * noise))",
    "        tolerance",
)
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
    "agreement.py",
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


@pytest.mark.mutation(
    "engines-outlive-a-probe",
    "models/load_engines.py",
    "models.add(model)  #",
    "pass  #",
)
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


@pytest.mark.mutation(
    "image-probe-of-any-size", "agreement.py", "min(IMAGE_HEIGHT, math.isqrt(max_pixels // 2))", "IMAGE_HEIGHT"
)
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
