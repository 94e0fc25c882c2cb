"""Architectures that see, tiny, with random weights: vLLM's logprobs against transformers', with adapters and without.

    python benchmarks/architectures.py --out benchmarks/results          # all of `SEEING`; a CPU, some minutes
    python benchmarks/architectures.py --only llava,gemma4

A line is the largest difference of a prompt's logprobs, over prompts with pictures of four shapes, with two pictures,
and without. vLLM gets the ids of the text, a mark for each picture, and the picture; what it makes of them must be the
ids of transformers' processor. The adapter changes all linear modules of the language model, the other one those of
tower and projector; what either moves is noted beside it.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import processes, report
from harness.lines import Line, failed

SECONDS = 3600.0
"""Most that all may take."""
SHAPES = ((64, 64), (200, 70), (70, 200), (24, 20))
"""Of single pictures, in pixels."""
RANK = 4

FAULTS = (ValueError, RuntimeError, AssertionError, LookupError, AttributeError, TypeError, NotImplementedError)

Prompt = tuple[str, list[Any]]
Logprobs = list[np.ndarray[Any, np.dtype[np.float32]] | None]


@dataclass(frozen=True, slots=True)
class Read:
    """What transformers makes of a prompt: `ids` None if it takes no such prompt, `why` then says so."""

    ids: list[int] | None
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    why: str = ""


def picture(width: int, height: int, seed: int) -> Any:
    """Noise, smooth over 8 pixels."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def prompts_of(processor: Any) -> list[Prompt]:
    """Chats in the model's template, and their pictures."""

    def chat(*parts: str | None) -> str:
        content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        chat = [{"role": "user", "content": content}]
        text: str = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return text

    single = [(chat(None, "What is in this image?"), [picture(*shape, seed)]) for seed, shape in enumerate(SHAPES)]
    two = [picture(64, 64, 7), picture(120, 50, 8)]
    return [*single, (chat("The quick brown fox", None, "jumps over", None), two), (chat("Is it a square?"), [])]


def as_written(processor: Any, text: str) -> dict[str, Any]:
    """A keyword of tokenizers: no BOS is added to a text that has one, as transformers does in chats."""
    bos = processor.tokenizer.bos_token
    return {"add_special_tokens": not (bos and text.startswith(bos))}


def read_by_transformers(model: Any, processor: Any, prompts: Sequence[Prompt]) -> list[Read]:
    """Each prompt alone."""
    import torch

    found = []
    for text, pictures in prompts:
        try:
            inputs = processor(text=text, images=pictures or None, return_tensors="pt", **as_written(processor, text))
            inputs = inputs.to(torch.float32)  # Llama 4's pixels have 16 bits
            with torch.no_grad():
                logprobs = model(**inputs).logits[0, :-1].log_softmax(-1)
        except (RuntimeError, ValueError) as error:
            found.append(Read(None, np.empty(0, np.float32), f"{type(error).__name__}: {error}"[:120]))
            continue
        ids = inputs["input_ids"][0]
        found.append(Read(ids.tolist(), logprobs.gather(1, ids[1:, None])[:, 0].numpy()))
    return found


def linear_of(model: Any) -> dict[str, list[str]]:
    """Names of the linear modules of the language model and of what is before it, without experts."""
    import torch

    decoder = model.model.get_decoder()
    (prefix,) = (name for name, module in model.named_modules() if module is decoder)
    linear = [
        name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "expert" not in name
    ]
    return {
        "adapter": [name for name in linear if name.startswith(prefix + ".")],
        "tower": [name for name in linear if not name.startswith((prefix + ".", "lm_head"))],
    }


@contextmanager
def adapted(model: Any, modules: Sequence[str], out: Path, renames: Mapping[str, str]) -> Iterator[Any]:
    """The model with random factors at `modules`, which are written to `out`; `renames`: parts of their names there."""
    import peft
    import torch
    from tinker_local.backend.tiny_models.make_models import rename_tensors

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(modules), init_lora_weights=False)
        changed = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(0, 0.1)
    changed.save_pretrained(out)
    rename_tensors(out, renames)
    try:
        yield changed
    finally:
        changed.unload()


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM on one model. `model_class`: vLLM's. `lora`, `tower`: whether it can take adapters, on the tower too."""

    llm: Any
    model_class: str
    lora: bool
    tower: bool


def start_vllm(folder: Path, *, tower: bool = False, plain: bool = False) -> Engine:
    """With adapters where the class takes them. `tower`: on the tower, too. `plain`: without any."""
    from tinker_local.backend.vllm_engine import build_engine
    from tinker_local.backend.vllm_engine.delta_net_on_cpu import take_float32
    from tinker_local.backend.vllm_engine.rotary_on_cpu import read_heads
    from tinker_local.backend.vllm_engine.vllm_experts import take_adapters_on_cpu
    from tinker_local.backend.vllm_engine.whole_images import see_whole_images

    build_engine.prepare_environment()
    take_float32()  # without these, vLLM has such layers on GPUs alone
    take_adapters_on_cpu()
    read_heads()
    see_whole_images()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.interfaces import supports_lora

    overrides = build_engine.query_scaling(str(folder))
    arguments = build_engine.model_arguments(str(folder), "float32") | {"max_model_len": 1024}
    arguments |= {"hf_overrides": {"text_config": overrides}} if overrides else {}
    config = EngineArgs(**arguments).create_model_config()
    model_class: Any = config.registry.resolve_model_cls(config.architectures, config)[0]
    lora = supports_lora(model_class)
    taking = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "enable_tower_connector_lora": tower}
    arguments |= {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**27}
    arguments |= {"gpu_memory_utilization": 0.01}
    llm = LLM(**arguments, **(taking if lora and not plain else {}))
    return Engine(llm, model_class.__name__, lora, lora and model_class.supports_tower_connector_lora)


def read_by_vllm(
    engine: Engine, processor: Any, prompts: Sequence[Prompt], expected: Sequence[Read], adapter: Any
) -> Logprobs:
    """Each prompt alone; None for one that transformers does not take."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found: Logprobs = []
    for (text, pictures), theirs in zip(prompts, expected, strict=True):
        if theirs.ids is None:
            found.append(None)
            continue
        asked: dict[str, Any] = {
            "prompt_token_ids": processor.tokenizer(text, **as_written(processor, text))["input_ids"]
        }
        if pictures:
            asked["multi_modal_data"] = {"image": pictures}
        (answer,) = engine.llm.generate([asked], params, use_tqdm=False, lora_request=adapter)
        if answer.prompt_token_ids != theirs.ids:
            raise ValueError(f"{len(answer.prompt_token_ids)} ids, and {len(theirs.ids)} of transformers, which differ")
        pairs = zip(answer.prompt_logprobs[1:], theirs.ids[1:], strict=True)
        found.append(np.array([each[token].logprob for each, token in pairs], np.float32))
    return found


def largest(ours: Logprobs, theirs: Sequence[Read]) -> float:
    """The largest difference, infinite where one is not a number."""
    apart = [np.abs(mine - other.logprobs).max() for mine, other in zip(ours, theirs, strict=True) if mine is not None]
    return float(np.nan_to_num(np.max(apart), nan=np.inf))


def moved(before: Sequence[Read], after: Sequence[Read]) -> float:
    """By how much logprobs of prompts with pictures differ, of those the least."""
    pairs = [(a, b) for a, b in zip(before[:-1], after[:-1], strict=True) if a.ids is not None]
    return float(min(np.abs(a.logprobs - b.logprobs).max() for a, b in pairs))


def apart(ours: Logprobs, theirs: Sequence[Read]) -> str:
    """The largest difference of each prompt."""
    pairs = zip(ours, theirs, strict=True)
    return ", ".join("-" if mine is None else f"{np.abs(mine - other.logprobs).max():.0e}" for mine, other in pairs)


def measure(name: str, folder: Path) -> Iterator[Line]:
    """The lines of an architecture, whose model is written to `folder`."""
    import torch
    from tinker_local.backend.tiny_models.seeing_models import SEEING, make_tiny_seeing_model
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from vllm.lora.request import LoRARequest

    make_tiny_seeing_model(folder, name)
    processor = AutoProcessor.from_pretrained(folder)
    load = AutoModelForImageTextToText.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = prompts_of(processor)
    base = read_by_transformers(model, processor, prompts)
    engine = start_vllm(folder)
    takes = "adapters, on the tower too" if engine.tower else "adapters" if engine.lora else "no adapters"
    lengths = ", ".join(each.why or str(len(each.ids or ())) for each in base)
    lora, tower = engine.lora, engine.tower
    try:
        ours = read_by_vllm(engine, processor, prompts, base, None)
    except (NotImplementedError, RuntimeError) as error:  # as of experts, which take no adapters on a CPU
        yield failed(f"{name}.adapter", error)
        lora = tower = False
        del engine
        gc.collect()  # what ends an engine would end the next one's groups of processes
        engine = start_vllm(folder, plain=True)
        ours = read_by_vllm(engine, processor, prompts, base, None)
    note = f"each: {apart(ours, base)}; vLLM's {engine.model_class}, {takes}; prompts of {lengths} ids"
    yield Line(f"{name}.base", largest(ours, base), "nats", note=note)
    for number, (part, modules) in enumerate(linear_of(model).items(), 1):
        if not (lora if part == "adapter" else tower):
            continue
        with adapted(model, modules, folder / part, SEEING[name].renames) as changed:
            theirs = read_by_transformers(changed, processor, prompts)
        try:
            if part == "tower":
                del engine
                gc.collect()
                engine = start_vllm(folder, tower=True)
            ours = read_by_vllm(engine, processor, prompts, theirs, LoRARequest(part, number, str(folder / part)))
        except FAULTS as error:
            yield failed(f"{name}.{part}", error)
            continue
        moves = f"{len(modules)} modules, which move logprobs by {moved(base, theirs):.2g}"
        note = f"each: {apart(ours, theirs)}; {moves}; from vLLM's without an adapter: {apart(ours, base)}"
        yield Line(f"{name}.{part}", largest(ours, theirs), "nats", note=note)


def here(names: Sequence[str]) -> None:
    """Measure in this process, and print the lines."""
    from tinker_local.backend.vllm_engine.build_engine import prepare_environment

    prepare_environment()
    for name in names:
        root = Path(tempfile.mkdtemp(prefix="architectures-"))
        try:
            for line in measure(name, root / "model"):
                line.emit()
        except Exception as error:  # a line of the table says what happened
            failed(f"{name}.base", error).emit()
        finally:
            shutil.rmtree(root)


def main() -> None:
    """Run the command."""
    from tinker_local.backend.tiny_models.seeing_models import SEEING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,…", default=",".join(SEEING), help=f"of {', '.join(SEEING)}")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only.split(",")
    for name in names:
        if name not in SEEING:
            parser.error(f"--only {name}: no such architecture; there are {', '.join(SEEING)}")
    if options.here:
        here(names)
        return
    start = time.monotonic()
    log = options.log or Path(tempfile.mkdtemp(prefix="architectures-")) / "log"
    with log.open("w") as file:
        outcome = processes.run(["architectures", "--here", "--only", ",".join(names)], SECONDS, file)
    measured = {line.name.partition(".")[0] for line in outcome.lines}
    lost = [Line(f"{name}.base", error=outcome.fault) for name in names if name not in measured]
    report.show("architectures", [*outcome.lines, *lost], options.out, tiny=True, seconds=time.monotonic() - start)
    if lost:
        sys.exit(f"the log is {log}")


if __name__ == "__main__":
    main()
