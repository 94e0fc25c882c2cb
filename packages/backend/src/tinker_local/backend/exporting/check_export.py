"""Compares an export with the trainer: logprobs of a probe, text and an image, by the library that will load it."""

import gc
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.peft_experts import PEFT_VERSION
from tinker_local.backend.exporting.base_model import BaseModel
from tinker_local.backend.exporting.peft_folder import vllm_rank
from tinker_local.backend.exporting.trained import Trained
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.weights.precision import DENSE, base_in, option_of, parts_of
from tinker_local.backend.weights.published import WEIGHTS
from tinker_local.types import InternalError, InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

Library = Literal["transformers", "peft", "vllm"]

TEXT_LENGTH = 40
IMAGE_HEIGHT = 224
"""In pixels; the image is twice as wide, so that rows and columns cannot be mixed up."""

LIMITS = {"float32": 1e-4, "bfloat16": 0.3}
"""Nats: the largest difference of a logprob in float32; in bfloat16, which keeps 8 bits, the mean difference."""

DRAWS, TIMES = 4, 4.0
"""How often the trainer computes the probe again with other rounding, and how many times as much as that moves the
logprob that it moves most the library may differ in float32. Where models amplify rounding, as random weights of linear
attention do, kernels of another processor alone make 1.4e-4 nats."""

Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Checked:
    """`largest` and `mean`: differences of logprobs (nats) between trainer and export. `effect`: the largest
    difference that the adapter makes to the base model, without which the others say nothing. `library`: what loaded
    the export; `positions`: how many were compared, `images`: in how many images' prompts. `rounding`: how far other
    rounding moves the trainer's logprob that it moves most; 0 in bfloat16, where it is not asked for. `moved`: how far
    the trainer's logprobs on the packed base on which the adapter was trained are from those on this one, in words."""

    library: str
    dtype: str
    largest: float
    mean: float
    effect: float
    positions: int
    images: int
    rounding: float
    moved: str = ""

    @property
    def limit(self) -> float:
        """Of `largest` in float32, and of `mean` in bfloat16."""
        least = LIMITS[self.dtype]
        return max(least, TIMES * self.rounding) if self.dtype == "float32" else least

    @property
    def agrees(self) -> bool:
        """Whether the export computes what was trained."""
        found = self.largest if self.dtype == "float32" else self.mean
        return bool(found <= self.limit)

    def __str__(self) -> str:
        image = f" with {self.images} image" if self.images else ""
        limit = f"{'largest' if self.dtype == 'float32' else 'mean'} allowed {self.limit:.2g}"
        weak = "; that is little beside the difference, and proves little" if self.effect <= 10 * self.largest else ""
        return (
            f"{self.library} and the trainer differ by {self.largest:.1e} nats at most, {self.mean:.1e} on average, in "
            f"{self.positions} logprobs{image} ({self.dtype}, {limit}); the adapter changes them by up to "
            f"{self.effect:.2g}{weak}{self.moved}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """`prompts`: ordinary token ids; one with an image between two texts if the model reads images. `asked`: the same
    as vLLM takes them, with the ids that it replaces by the image. `picture`: that image."""

    prompts: tuple[RenderedInput, ...]
    asked: tuple[list[int], ...]
    picture: "Image | None"


def missing_library(to: str) -> Library | None:
    """The library that the check needs and that is not installed."""
    needed: Library = "transformers" if to == "merged" else "vllm" if to == "vllm" else "peft"
    return needed if find_spec(needed) is None else None


def check_peft_version() -> None:
    """InvalidRequestError if the installed PEFT reads adapters of experts in another form than an export has."""
    found = version("peft")
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < tuple(map(int, PEFT_VERSION.split("."))):
        raise InvalidRequestError(
            f"--to peft: peft {found} is installed, and it reads adapters of experts from {PEFT_VERSION} on: install a "
            "newer one, or leave the check out with --no-check"
        )


def make_probe(base: BaseModel) -> Probe:
    """Always the same for a model."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base.path)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ordinary = np.array([token for token in range(min(len(tokenizer), 50_000)) if token not in special])

    def text(length: int, first: int) -> npt.NDArray[np.int32]:
        found: npt.NDArray[np.int32] = ordinary[(np.arange(length) * 7919 + first) % len(ordinary)].astype(np.int32)
        return found

    only_text = RenderedInput(text(TEXT_LENGTH, 11))
    vision = base.family.vision
    if vision is None:
        return Probe((only_text,), (only_text.token_ids.tolist(),), None)
    from PIL.Image import fromarray

    pixels = np.random.Generator(np.random.Philox(12)).integers(0, 256, (IMAGE_HEIGHT, 2 * IMAGE_HEIGHT, 3), np.uint8)
    picture = fromarray(pixels)
    read = vision.processor(base.path, base.config).process(picture)
    image = RenderedImage(
        "probe", read.num_tokens, read.pixel_values, read.grid_thw, positions=read.positions, further=read.further
    )
    marks, before, after = vision.tokens(base.config), text(6, 23), text(18, 37)
    if image.positions is not None:
        ids = np.concatenate([before, image.positions.ids, after])
        with_image = RenderedInput(ids, (ImagePlacement(len(before), image),))
        asked = [*before, marks.pad, *after]
        return Probe((only_text, with_image), (only_text.token_ids.tolist(), list(map(int, asked))), picture)
    around = [] if marks.around is None else tokenizer.encode(marks.around, add_special_tokens=False)
    start, end = [*before, *around, marks.start], [marks.end, *around, *after]
    ids = np.array([*start, *[marks.pad] * image.num_tokens, *end], np.int32)
    with_image = RenderedInput(ids, (ImagePlacement(len(start), image),))
    asked = [*start, marks.pad, *end] if marks.around is None else [*before, marks.start, *after]
    return Probe((only_text, with_image), (only_text.token_ids.tolist(), list(map(int, asked))), picture)


class Reference:
    """The trainer with the adapter: what an export is compared with. Holds the base model until `close`, its layers in
    `weights`, or as its files have them, and embedding and LM head in `head_weights`."""

    def __init__(
        self, trained: Trained, device: str, weights: str | None = None, head_weights: str | None = None
    ) -> None:
        from tinker_local.backend.training.run.worker import HFTrainer
        from tinker_local.backend.training.trainer_config import TrainerConfig

        base = trained.base
        rank = trained.config.rank
        self._dtype = base.dtype
        weights = weights or (DENSE if base.published is None else WEIGHTS)
        config = TrainerConfig(
            base.path,
            name=base.path,
            dtype=base.dtype,
            device=device,
            max_rank=rank,
            weights=weights,
            head_weights=head_weights or DENSE,
        )
        self._trainer = HFTrainer(config)
        self._trainer.load_adapter("trained", trained.state())

    def logprobs(self, prompts: Sequence[RenderedInput]) -> tuple[Logprobs, Logprobs]:
        """With the adapter and without, at the positions that `_compared` keeps of each prompt."""
        found = [self._trainer.logprobs(adapter, *prompts) for adapter in ("trained", None)]
        keep = np.concatenate([_compared(prompt) for prompt in prompts])
        return found[0][keep], found[1][keep]

    def rounding(self, prompts: Sequence[RenderedInput], plain: Logprobs) -> float:
        """How far other rounding moves one of `plain`, the logprobs with the adapter, where it moves it most, in nats;
        0 in bfloat16."""
        if self._dtype != "float32":
            return 0.0
        keep = np.concatenate([_compared(prompt) for prompt in prompts])
        others = (self._trainer.logprobs("trained", *prompts, nudge=1 + draw)[keep] for draw in range(DRAWS))
        return float(max(np.abs(other - plain).max() for other in others))

    def close(self) -> None:
        """Free the model."""
        import torch

        self._trainer.close()
        del self._trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _compared(prompt: RenderedInput) -> npt.NDArray[np.bool_]:
    """Which of the N - 1 next tokens are text: a model gives the pads of an image no meaningful logprob."""
    is_text = np.ones(prompt.length, np.bool_)
    for placed in prompt.images:
        is_text[placed.offset : placed.offset + placed.image.num_tokens] = False
    return is_text[1:]


def check_by_transformers(folder: Path, trained: Trained, to: str, device: str) -> Checked:
    """Load the export as its users do, with PEFT or as a whole model. One model is in memory at a time."""
    probe = make_probe(trained.base)
    reference = Reference(trained, device)
    ours, without = reference.logprobs(probe.prompts)
    rounding = reference.rounding(probe.prompts, ours)
    reference.close()
    moved = _moved(trained, device, [probe.prompts], ours)
    theirs = _loaded_logprobs(folder, trained, to, device, probe)
    library = "transformers" if to == "merged" else "PEFT"
    images = _images(probe)
    return compare_logprobs(library, trained.base.dtype, ours, theirs, without, rounding, images, moved)


def _loaded_logprobs(folder: Path, trained: Trained, to: str, device: str, probe: Probe) -> Logprobs:
    import torch
    import transformers
    from tinker_local.backend.training.model.decoders.transformers_delta_net import use_kernels_on_gpus_alone
    from tinker_local.backend.training.model.load_published import load_published
    from tinker_local.backend.training.model.logit_rule import complete_logits

    base = trained.base
    auto = getattr(transformers, base.family.auto_class)
    dtype = getattr(torch, base.dtype)
    if to != "merged" and base.published is not None:  # transformers would need other packages, by the method
        model = load_published(base.path, type(base.model), base.config, dtype)[0].to(device)
    else:
        model = auto.from_pretrained(str(folder) if to == "merged" else base.path, dtype=dtype).to(device)
    complete_logits(model, base.family, base.path)
    use_kernels_on_gpus_alone(model)
    if to != "merged":
        from peft import PeftModel

        with warnings.catch_warnings():
            # Of merging, which this does not do, and of which `export_checkpoint` itself warns.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            model = PeftModel.from_pretrained(model, str(folder))
    model.eval()
    found = []
    for prompt in probe.prompts:
        ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None].to(device)
        further: dict[str, Any] = {}
        if prompt.images and base.family.vision is not None:
            is_image = torch.from_numpy(prompt.holds_features)[None].to(device, torch.int32)
            further = base.family.vision.arguments([placed.image for placed in prompt.images], is_image)
        with torch.no_grad():
            logits = model(input_ids=ids, **further).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(logprobs.cpu().numpy()[_compared(prompt)])
    return np.concatenate(found)


def check_by_vllm(folder: Path, trained: Trained, device: str) -> Checked:
    """Have vLLM, in its own process and without this project's patches, sample greedily after each prompt; compare the
    logprobs of what it sampled."""
    probe = make_probe(trained.base)
    asked = {
        "model": trained.base.path,
        "dtype": trained.base.dtype,
        "adapter": str(folder),
        "max_lora_rank": vllm_rank(trained.largest_rank),
        "experts": trained.has_experts,
        "tower": trained.config.train_vision,
        "raw": trained.base.family.vision is not None and trained.base.family.vision.raw_in_vllm,
        "prompts": probe.asked,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if probe.picture is not None:
            probe.picture.save(Path(scratch) / "picture.png")
        (Path(scratch) / "asked.json").write_text(json.dumps(asked))
        command = [sys.executable, "-m", "tinker_local.backend.vllm_engine.plain_vllm", scratch]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise InternalError(f"vLLM does not load the export: {said[-1] if said else f'status {done.returncode}'}")
        answers = json.loads((Path(scratch) / "answers.json").read_text())
    extended = [
        RenderedInput(np.append(prompt.token_ids, answer["tokens"]).astype(np.int32), prompt.images)
        for prompt, answer in zip(probe.prompts, answers, strict=True)
    ]
    reference = Reference(trained, device)
    found = [reference.logprobs([prompt]) for prompt in extended]
    rounding = max(reference.rounding([prompt], pair[0]) for prompt, pair in zip(extended, found, strict=True))
    reference.close()
    moved = _moved(trained, device, [[prompt] for prompt in extended], np.concatenate([pair[0] for pair in found]))
    counts = [len(answer["tokens"]) for answer in answers]
    ours, without = (
        np.concatenate([pair[which][-count:] for pair, count in zip(found, counts, strict=True)]) for which in (0, 1)
    )
    theirs = np.array([logprob for answer in answers for logprob in answer["logprobs"]], np.float32)
    return compare_logprobs("vLLM", trained.base.dtype, ours, theirs, without, rounding, _images(probe), moved)


def _moved(trained: Trained, device: str, prompts: Sequence[Sequence[RenderedInput]], ours: Logprobs) -> str:
    """How far `ours` are from the trainer's logprobs on the packed base on which the adapter was trained, in words;
    empty if that was as its files are, or is not made of them."""
    word = trained.source.base_precision
    layers, head = parts_of(word)
    made = option_of(layers) if trained.base.published is None else None
    if word == trained.base.precision or (made is None and layers != trained.base.precision):
        return ""
    packed = Reference(trained, device, made, head)
    apart = np.abs(np.concatenate([packed.logprobs(each)[0] for each in prompts]) - ours)
    packed.close()
    return (
        f"; on {base_in(word)}, where it was trained, the trainer's are {apart.max():.2g} nats from these at "
        f"most, {apart.mean():.2g} on average"
    )


def _images(probe: Probe) -> int:
    return sum(len(prompt.images) for prompt in probe.prompts)


def compare_logprobs(
    library: str,
    dtype: str,
    ours: Logprobs,
    theirs: Logprobs,
    without: Logprobs,
    rounding: float,
    images: int,
    moved: str = "",
) -> Checked:
    """`ours`: the trainer's logprobs (nats); `theirs`: of what `library` loaded; `without`: those of the base model."""
    difference = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
    return Checked(
        library,
        dtype,
        float(difference.max()),
        float(difference.mean()),
        float(np.abs(ours - without).max()),
        len(ours),
        images,
        rounding,
        moved,
    )
