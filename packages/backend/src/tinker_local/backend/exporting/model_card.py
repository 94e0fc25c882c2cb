"""The README.md of an export: what it is, what it was made from, and how to load it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinker_local.backend.adapters.peft_experts import PEFT_VERSION
from tinker_local.backend.exporting.base_model import BaseModel
from tinker_local.backend.exporting.peft_folder import vllm_rank
from tinker_local.backend.exporting.trained import Trained
from tinker_local.backend.storage.records import ELSEWHERE
from tinker_local.backend.weights.precision import BITS, DENSE, base_in, option_of, parts_of

if TYPE_CHECKING:
    from tinker_local.backend.exporting.gguf import GgufFiles

Target = Literal["peft", "vllm", "merged", "gguf"]

LIBRARIES: dict[Target, str] = {"peft": "peft", "vllm": "peft", "merged": "transformers", "gguf": "gguf"}
"""What hubs call the library that loads it."""

NORMALIZED = "--no-mm-device-do-normalize"
"""What tells vLLM to have pixels normalised by a model's processor (`Vision.raw_in_vllm`)."""


def _of_pixels(base: BaseModel) -> str:
    """The end of vLLM's command."""
    return f" {NORMALIZED}" if base.family.vision is not None and base.family.vision.raw_in_vllm else ""


def write_card(
    folder: Path, out: Path, trained: Trained, to: Target, checked: str, gguf: "GgufFiles | None" = None
) -> None:
    """`out`: where the folder will be. `checked`: what the comparison with the trainer found. `gguf`: what was written,
    of a GGUF file."""
    base, config = trained.base, trained.config
    hub_name = base.path if not Path(base.path).is_dir() else trained.source.base_name
    parts = [
        word
        for word, is_trained in (
            ("attention", config.train_attn),
            ("MLP", config.train_mlp),
            ("LM head", config.train_unembed),
            ("vision tower", config.train_vision),
        )
        if is_trained
    ]
    whole = to in ("merged", "gguf")
    tags = ["tinker-local"] if whole else ["tinker-local", "lora"]
    lines = [
        "---",
        f"library_name: {LIBRARIES[to]}",
        *([f"base_model: {hub_name}"] if hub_name.count("/") == 1 else []),
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
        f"# {out.name}",
        "",
        (
            f"A whole {base.config.model_type} model: {hub_name} with a LoRA adapter merged into its weights."
            if whole
            else f"A LoRA adapter of {hub_name} ({base.config.model_type}), for {_libraries(trained, to)}."
        ),
        "",
        f"- made from: `{trained.source.name}`",
        f"- base model: `{base.path}`",
        *([] if base.published is None else [f"- {_of_base(trained, base.published.told, to)}"]),
        f"- adapter: rank {config.rank}, on {', '.join(parts)}",
        *([f"- trained with {words}"] if (words := trained.source.layout.words()) else []),
        *_base_of_training(trained, to),
        f"- checked: {checked}",
        "",
        *(_usage(out, trained, to) if gguf is None else _usage_of_gguf(out, gguf)),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _base_of_training(trained: Trained, to: Target) -> list[str]:
    """On which bits of the base it was trained, unless that was dense from the first step on."""
    source, lines = trained.source, []
    if (precision := source.base_precision) is None and trained.base.published is not None:
        lines.append(f"- trained on {base_in(None)}, or by a server that did not record it")
    elif precision is not None and precision != trained.base.precision:
        option = option_of(parts_of(precision)[0])
        groups = "" if option is None else " and ".join(map(str, trained.base.groups(BITS[option])))
        told = base_in(precision, f", groups of {groups}" if groups else "")
        does = "was merged into" if to in ("merged", "gguf") else "is for"
        lines.append(
            f"- trained on {told}: it learned beside that rounding, and {does} the base as its files have it "
            f"({trained.base.dtype}), with which it was compared"
        )
    if source.began_on == ELSEWHERE:
        lines.append("- its first weights were imported, and trained elsewhere")
    elif source.began_on is not None:
        lines.append(
            f"- its first weights were trained on {base_in(None if source.began_on == DENSE else source.began_on)}"
        )
    return lines


def _of_base(trained: Trained, told: str, to: Target) -> str:
    """That the base has fewer bits, which are `told`."""
    if to in ("merged", "gguf"):
        return f"the base is quantized ({told}); here are the numbers that its codes stand for, in {trained.base.dtype}"
    does = "trained on" if trained.source.base_precision == trained.base.precision else "for"
    return f"{does} the quantized base ({told}), with activations that are not rounded"


def _libraries(trained: Trained, to: Target) -> str:
    """That load it: they have experts in different forms."""
    if not trained.has_experts:
        return "PEFT and vLLM"
    return "vLLM" if to == "vllm" else f"PEFT from {PEFT_VERSION}"


def _usage(out: Path, trained: Trained, to: Target) -> list[str]:
    base, auto = trained.base, trained.base.family.auto_class
    if to == "merged":
        lines = ["```python", f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("{out.name}")']
        lines += ["```", "", "```", f"vllm serve {out.name}{_of_pixels(base)}", "```"]
        if trained.has_head and base.tied_head:
            lines += [
                "",
                "The base model ties its LM head to its embedding. The head was trained, so here the two are separate "
                "matrices (`tie_word_embeddings` is false).",
            ]
        return lines
    lines = []
    if not trained.has_experts or to == "peft":
        lines += ["```python", "from peft import PeftModel", f"from transformers import {auto}", ""]
        lines += [f'base = {auto}.from_pretrained("{base.path}")']
        lines += [f'model = PeftModel.from_pretrained(base, "{out.name}")', "```", ""]
    if trained.has_experts and to == "peft":
        lines += [
            "PEFT warns that it ignores patterns for `gate_up_proj`, and applies them: it looks for a module of that "
            "name, and this is a parameter.",
            "",
            "vLLM has experts in another form: export with `--to vllm` or `--to merged` for it.",
        ]
    elif trained.has_head and not base.family.head_adapters_in_vllm:
        lines.append("vLLM takes no adapter of this model's LM head: serve a merged export there.")
    else:
        rank = vllm_rank(trained.largest_rank)
        serve = f"vllm serve {base.path} --enable-lora --max-lora-rank {rank} --lora-modules trained={out.name}"
        serve += " --enable-moe-shared-loras" if trained.has_experts else ""
        serve += " --enable-tower-connector-lora" if trained.config.train_vision else ""
        serve += _of_pixels(base)
        lines += ["```", serve, "```"]
        if trained.has_head and base.family.vllm_head is not None:
            declared_by = base.family.vllm_head.declared_by
            lines += ["", f"It trains the LM head: give it to vLLM {declared_by} or newer (some older ones refuse it)."]
    if trained.has_head and base.tied_head:
        lines += [
            "",
            "**Do not merge this adapter with PEFT's `merge_and_unload`**: it trains the LM head of a model that ties "
            "it to its embedding, and merging would change both. `tinker-local export ... --to merged` separates them.",
        ]
    return lines


def _usage_of_gguf(out: Path, files: "GgufFiles") -> list[str]:
    """The commands of llama.cpp and Ollama."""
    vision = " --mmproj mmproj.gguf" if files.vision else ""
    lines = ["```", f"llama-server -m {files.model}{vision}", f"ollama create {out.name.lower()} -f Modelfile", "```"]
    if files.vision:
        lines += ["", "Pictures go through `mmproj.gguf`; only text was compared with the trainer."]
    if not files.templated:
        lines += [
            "",
            "The Modelfile has no TEMPLATE, since the chat template is not of fixed texts around each message; "
            "`llama-server --jinja` runs the one in the file.",
        ]
    return lines
