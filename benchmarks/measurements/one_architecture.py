"""What a server makes of a tiny model of one architecture, beside transformers and PEFT."""

import asyncio
import functools
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import LORA_ALPHA, AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.model_card import Target
from tinker_local.backend.families.family import Family
from tinker_local.backend.models.load_engines import check_model
from tinker_local.backend.rendering.rendered_input import RenderedInput, Renderer
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import (
    AdamParams,
    ApiError,
    EncodedTextChunk,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    SamplingParams,
)
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "tiny/it"
ADAPTERS = {"all": LoraConfig(rank=4, seed=1), "attention": LoraConfig(rank=2, seed=2, train_mlp=False)}
LEAST_PICTURES = 3
"""Prompts with pictures that are compared at least."""
LENGTHS = (18, 34, 7)
"""Of texts, in tokens: two are longer than a sliding window, one is not."""

Report = Callable[[str, Any], None]
"""Takes the name of a column, and what was found."""
Batch = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """`rendered`: as the engines read it; `batch`: as transformers' forward does, by the model's own processor."""

    rendered: RenderedInput
    batch: Batch

    @property
    def is_text(self) -> npt.NDArray[np.bool_]:
        """Which of the N - 1 next tokens are text."""
        found = np.ones(self.rendered.length, np.bool_)
        for placed in self.rendered.images:
            found[placed.offset : placed.offset + placed.image.num_tokens] = False
        return found[1:]

    @property
    def datum(self) -> TrainDatum:
        ids = self.rendered.token_ids
        shown = RenderedInput(ids[:-1], self.rendered.images)
        return TrainDatum(shown, ids[1:].astype(np.int64), {"weights": self.is_text.astype(np.float32)})


def texts(vocabulary: int) -> list[Prompt]:
    """Of random tokens."""
    random = np.random.default_rng(0)
    drawn = [random.integers(20, min(380, vocabulary), length).astype(np.int32) for length in LENGTHS]
    return [Prompt(RenderedInput(ids), {"input_ids": torch.from_numpy(ids.astype(np.int64))[None]}) for ids in drawn]


def pictures(folder: Path, renderer: Renderer) -> list[Prompt]:
    """Chats with pictures of several shapes, two in one, and without. ValueError if the engines read other ids than the
    model's processor writes."""
    from architectures import as_written, prompts_of
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    found, refused = [], []
    for text, images in prompts_of(processor):
        try:
            batch = processor(text=text, images=images or None, return_tensors="pt", **as_written(processor, text))
            chunks = [_chunk(image) for image in images]
            alone = [renderer.render(ModelInput(chunks=(chunk,)), "a picture").token_ids for chunk in chunks]
        except ApiError as error:
            refused.append(str(error))
            continue
        ids = batch["input_ids"][0].numpy().astype(np.int32)
        parts: list[Any] = []
        done = 0
        for chunk, own in zip(chunks, alone, strict=True):
            at = next((at for at in range(done, len(ids)) if np.array_equal(ids[at : at + len(own)], own)), None)
            if at is None:
                raise ValueError(f"a prompt of transformers' processor has no {len(own)} ids of a picture")
            parts += [EncodedTextChunk(tokens=ids[done:at])] if at > done else []
            parts.append(chunk)
            done = at + len(own)
        parts += [EncodedTextChunk(tokens=ids[done:])] if done < len(ids) else []
        rendered = renderer.render(ModelInput(chunks=tuple(parts)), "a prompt")
        if not np.array_equal(rendered.token_ids, ids):
            raise ValueError(f"{rendered.length} ids, and {len(ids)} of transformers' processor, which differ")
        found.append(Prompt(rendered, batch))
    if not any(each.rendered.images for each in found):
        raise ValueError(f"no picture was read: {refused[0]}")
    return found


def _chunk(image: Any) -> ImageChunk:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ImageChunk(data=buffer.getvalue(), format="png")


# transformers' own forward and autograd, with each adapted matrix replaced by W + scale B A ---------------------------


def changed(model: Any, leaves: Mapping[str, torch.Tensor], scale: float, family: Family) -> dict[str, torch.Tensor]:
    """Parameters of `model` by name, with what adapters of `leaves`, by PEFT's names, add to them."""
    low_rank = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): scale
        * leaves[name.replace(".lora_A.", ".lora_B.")]
        @ leaf
        for name, leaf in leaves.items()
        if ".lora_A." in name
    }
    parts = {part: kind for kind, rows in family.lora.split.items() for part in rows.projections}
    found: dict[str, torch.Tensor] = {}
    experts = family.lora.experts
    for path in list(low_rank):
        if path not in low_rank:
            continue
        parent, _, last = path.rpartition(".")
        if last in parts:
            kind = parts[last]
            added = torch.cat([low_rank.pop(f"{parent}.{each}") for each in family.lora.split[kind].projections])
            found[f"{parent}.{kind}.weight"] = model.get_parameter(f"{parent}.{kind}.weight") + added
        elif experts is not None and low_rank[path].dim() == 3:
            gate, up, down = (low_rank.pop(f"{parent}.{each}") for each in experts.names)
            both = torch.stack([gate, up], 2).flatten(1, 2) if experts.interleaved else torch.cat([gate, up], 1)
            for name, added in {"gate_up_proj": both, "down_proj": down}.items():
                whole = model.get_parameter(f"{parent}.{name}")
                turned = added if whole.shape == added.shape else added.transpose(1, 2)
                found[f"{parent}.{name}"] = whole + turned
        else:
            weight = model.get_parameter(f"{path}.weight")
            found[f"{path}.weight"] = weight + low_rank.pop(path)
    return found


def by_transformers(
    model: Any, state: AdapterState, prompts: Sequence[Prompt], family: Family
) -> tuple[npt.NDArray[np.float64], Arrays]:
    """Logprobs of the next tokens of all prompts, and the gradient of the sum of those of text, negative, by tensor."""
    leaves = {
        name: torch.tensor(np.asarray(array), dtype=torch.float64).requires_grad_()
        for name, array in state.tensors.items()
    }
    logprobs = []
    for each in prompts:
        replaced = changed(model, leaves, LORA_ALPHA / state.lora_config.rank, family)
        forward = functools.partial(_replaced, model, replaced)
        found = _logprobs(forward, each, _divisor(model))
        (-found[torch.from_numpy(each.is_text)].sum()).backward()
        logprobs.append(found.detach().numpy())
    return np.concatenate(logprobs), {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for name, leaf in leaves.items()
    }


def _replaced(model: Any, parameters: Mapping[str, torch.Tensor], **given: Any) -> Any:
    return torch.func.functional_call(model, dict(parameters), (), given, tie_weights=False)


def _divisor(model: Any) -> float:
    """What the class of the language model alone divides logits by, and that of `model`, around it, does not:
    LLaVA-NeXT with Granite's, as vLLM computes it and Granite's own class with pictures, `granite4_vision`."""
    scale = getattr(model.config.get_text_config(), "logits_scaling", None)
    return 1.0 if scale is None or "logits_scaling" in inspect.getsource(type(model).forward) else float(scale)


def _logprobs(forward: Callable[..., Any], prompt: Prompt, divisor: float) -> torch.Tensor:
    """Of the next tokens of `prompt`, [N - 1]; logits are divided by `divisor`."""
    dtype = torch.float64
    given = prompt.batch  # classes convert pixels themselves, Gemma 4's after a sum in float32
    rows = (forward(**given, use_cache=False).logits[0, :-1].to(dtype) / divisor).log_softmax(-1)
    return rows.gather(1, given["input_ids"][0, 1:, None])[:, 0]


def load(folder: Path, family: Family, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' model at `folder`."""
    import transformers

    plainly = {} if family.lora.experts is None else {"experts_implementation": "eager"}
    auto_class = getattr(transformers, family.auto_class)
    return auto_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **plainly).eval()


class _InFloat64(TorchDispatchMode):
    """Float64 wherever code asks for float32, as norms, softmaxes and routers of transformers do: what differs then is
    a fault, and not rounding. Products of groups, which torch lacks in float64, are computed group by group."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype:  # the bits of one dtype read as another
            return func(*args, **(kwargs or {}))
        given = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        if func is torch.ops.aten.bmm.default and {each.dtype for each in given} == {torch.float32, torch.float64}:
            given = [each.double() for each in given]  # of rotary frequencies, which stay in float32
        if func is not torch.ops.aten._grouped_mm.default or given[0].dtype != torch.float64:
            return func(*given, **named)
        ends = (given[2] if len(given) > 2 else named["offs"]).tolist()
        places = zip([0, *ends[:-1]], ends, strict=True)
        return torch.cat([given[0][start:stop] @ given[1][group] for group, (start, stop) in enumerate(places)])


# A server ------------------------------------------------------------------------------------------------------------


def drawn(state: AdapterState) -> AdapterState:
    """`state` with random B, which changes logprobs by tenths."""
    random = np.random.default_rng(7)
    tensors = {
        name: np.asarray(array, np.float32)
        if ".lora_A." in name
        else random.normal(0, 0.02, array.shape).astype(np.float32)
        for name, array in state.tensors.items()
    }
    return replace(state, tensors=tensors)


def compare_training(folder: Path, family: Family, prompts: Sequence[Prompt], report: Report) -> None:
    """Loss and gradients of two adapters in the same rows, in float64, against transformers'."""
    with _InFloat64():
        _compare_training(folder, family, prompts, report)


def _compare_training(folder: Path, family: Family, prompts: Sequence[Prompt], report: Report) -> None:
    trainer = HFTrainer(TrainerConfig(str(folder), name=NAME, dtype="float64"))
    data = [each.datum for each in prompts]
    states = {}
    for name, config in ADAPTERS.items():
        trainer.create_adapter("fresh", config)
        states[name] = drawn(trainer.capture("fresh", optimizer=False))
        trainer.remove_adapter("fresh")
        trainer.load_adapter(name, states[name])
    results = trainer.forward_backward([TrainWork(name, data, "cross_entropy") for name in ADAPTERS])
    apart, worst = [], [(0.0, "")]
    model = load(folder, family)
    model.requires_grad_(False)
    keep = np.concatenate([each.is_text for each in prompts])
    for (name, state), result in zip(states.items(), results, strict=True):
        if isinstance(result, Exception):
            raise result
        trainer.optim_step(name, AdamParams(learning_rate=0.0, beta1=0.0))
        moments = trainer.capture(name, optimizer=True).optimizer
        assert moments is not None
        ours = np.concatenate([output["logprobs"] for output in result.outputs]).astype(np.float64)
        theirs, gradients = by_transformers(model, state, prompts, family)
        apart.append(abs(float((ours - theirs)[keep].sum() / keep.sum())))
        size = max(float(np.abs(each).max()) for each in gradients.values())
        for tensor, gradient in gradients.items():
            difference = np.abs(np.asarray(moments[f"exp_avg.{tensor}"], np.float64) - gradient).max()
            worst.append((float(np.nan_to_num(difference / size, nan=np.inf)), f"{name}: {tensor}"))
    trainer.close()
    report("loss", float(np.nan_to_num(max(apart), nan=np.inf)))
    report("gradient", max(worst)[0])
    report("worst_gradient", max(worst)[1])


async def compare_sampler(served: Any, folder: Path, prompts: Sequence[Prompt], report: Report) -> AdapterState:
    """Logprobs of both engines in float32, with an adapter on all that is trained."""
    trainer, call = served.engines.trainer, served.scheduler.call
    await call(trainer.create_adapter, "it", ADAPTERS["all"])
    state = drawn(await call(trainer.capture, "it", optimizer=False))
    await call(trainer.remove_adapter, "it")
    await call(trainer.load_adapter, "it", state)
    write_adapter(folder, state)
    version = AdapterVersion("it", folder)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    apart = []
    for name, of in (("it", version), (None, None)):
        for each in prompts:
            ours = await call(trainer.logprobs, name, each.rendered)
            output = await served.engines.sampler.sample(SampleWork(each.rendered, of, params, prompt_logprobs=True))
            difference = np.abs(ours - np.asarray(output.prompt_logprobs[1:]))[each.is_text]
            apart.append(float(np.nan_to_num(difference, nan=np.inf).max()))
    report("sampler", max(apart))
    return state


def compare_exports(
    root: Path, folder: Path, family: Family, prompts: Sequence[Prompt], ours: npt.NDArray[np.float32], report: Report
) -> None:
    """What PEFT and transformers load of the exports of the adapter in `root`, against the trainer's `ours`."""
    import peft

    keep = np.concatenate([each.is_text for each in prompts])
    exports: tuple[Target, ...] = ("peft", "merged")
    for to in exports:
        export_checkpoint(root / "adapter", root / to, to=to, base=str(folder), check=False)
        if to == "peft":
            model: Any = peft.PeftModel.from_pretrained(load(folder, family), str(root / to)).eval()
        else:
            model = load(root / to, family)
        divisor = _divisor(model.get_base_model() if to == "peft" else model)
        with torch.no_grad():
            theirs = np.concatenate([_logprobs(model, each, divisor).numpy() for each in prompts])
        report(to, float(np.nan_to_num(np.abs(theirs - ours)[keep], nan=np.inf).max()))


async def serve(root: Path, folder: Path, report: Report) -> None:
    """Start a server of the model, and compare what it does. Raises what refuses the model."""
    options = BackendOptions(
        data_dir=root / "data", dtype="float32", kv_cache_bytes=2**26, max_rank=8, trainer="inline", sampler="inline"
    )
    config, family = check_model(str(folder), options)
    report("checked", True)
    said: list[str] = []
    async with InProcessBackend([ModelSource(NAME, str(folder))], options, progress=said.append) as backend:
        served = backend.models.get(NAME)
        (trains,) = (line for line in said if "trained by the " in line)
        report("trained", re.search(r"trained by the ([\w-]+) decoder", trains)[1])  # type: ignore[index]
        report("rows", "alone" if "one at a time" in trains else "packed")
        if family.vision is None:
            prompts = texts(config.get_text_config().vocab_size)
        else:
            prompts = []
            for each in pictures(folder, served.engines.renderer):
                try:
                    await served.scheduler.call(served.engines.trainer.logprobs, None, each.rendered)
                except InvalidRequestError as error:  # of a request: transformers does not take such a picture either
                    report("left_out", str(error))
                else:
                    prompts.append(each)
        (root / "adapter").mkdir()
        if family.vision is not None and sum(bool(each.rendered.images) for each in prompts) < LEAST_PICTURES:
            raise ValueError(f"{LEAST_PICTURES} prompts with pictures are compared at least, and there are fewer")
        await compare_sampler(served, root / "adapter", prompts, report)
        rendered = [each.rendered for each in prompts]
        ours = await served.scheduler.call(served.engines.trainer.logprobs, "it", *rendered)
    compare_training(folder, family, prompts, report)
    compare_exports(root, folder, family, prompts, ours, report)
    report("outcome", "served")


def measure(root: Path, folder: Path, report: Report) -> None:
    """All of the model at `folder`; its files are put into `root`."""
    asyncio.run(serve(root, folder, report))
