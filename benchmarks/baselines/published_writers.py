"""Writes a model in fewer bits by llm-compressor or AutoRound, and the logprobs that the numbers in the files give.

    python published_writers.py MODEL TEXT OUT NAME

Runs in an environment of these packages, without this project. OUT gets the folder, and `reference.json` beside it: the
token ids of TEXT, and the logprob of each but the first in transformers' model in float32, as it is (`dense`) and with
the numbers of the files (`file`). compressed-tensors makes these itself; GPTQ's and AWQ's are made here, by the layouts
that AutoGPTQ and AutoAWQ publish. Activations are not rounded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS, GROUP = 400, 64
CALIBRATION = 24
"""Texts of 256 tokens."""


def ints(bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **more}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-dynamic": ("plain", {"targets": "Linear", "scheme": "FP8_DYNAMIC"}),
    "fp8-block": ("plain", {"targets": "Linear", "scheme": "FP8_BLOCK"}),
    "w8a8": ("gptq", {"targets": "Linear", "scheme": "W8A8"}),
    "w8a16": ("plain", ints(8)),
    "w4a16": ("plain", ints(4)),
    "w4a16-gptq-weight": ("gptq", ints(4, actorder="weight")),
    "w4a16-gptq-zeros": ("gptq", ints(4, symmetric=False)),
}
"""Of llm-compressor: how numbers are rounded, and its recipe's arguments."""
ROUNDED: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "sym": True, "format": "auto_gptq"},
    "gptq-zeros": {"bits": 4, "sym": False, "format": "auto_gptq"},
    "gptq-8": {"bits": 8, "sym": True, "format": "auto_gptq"},
    "awq": {"bits": 4, "sym": False, "format": "auto_awq"},
}
"""Of AutoRound, rounded to nearest."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a column's code lies in its integer."""


def texts(tokenizer: Any, file: Path) -> list[list[int]]:
    ids = tokenizer(file.read_text()).input_ids
    return [ids[first : first + 256] for first in range(0, min(len(ids), 256 * CALIBRATION), 256)]


def by_llm_compressor(source: str, tokenizer: Any, text: Path, out: Path, name: str) -> None:
    import datasets  # type: ignore[import-untyped]
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import (  # type: ignore[import-not-found]
        GPTQModifier,
        QuantizationModifier,
    )
    from transformers import AutoModelForCausalLM

    way, arguments = COMPRESSED[name]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    recipe = (GPTQModifier if way == "gptq" else QuantizationModifier)(ignore=["lm_head"], **arguments)
    data: dict[str, Any] = {}
    if way == "gptq":
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts(tokenizer, text)]
        data = {"dataset": datasets.Dataset.from_list(rows), "num_calibration_samples": len(rows)}
    oneshot(model=model, recipe=recipe, tokenizer=tokenizer, max_seq_length=256, **data)
    model.save_pretrained(str(out), save_compressed=True)
    tokenizer.save_pretrained(str(out))


def by_auto_round(source: str, tokenizer: Any, out: Path, name: str) -> None:
    from auto_round import AutoRound  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    settings = dict(ROUNDED[name])
    wanted = settings.pop("format")
    rounding = {"iters": 0, "disable_opt_rtn": True, "nsamples": 4, "seqlen": 128, "device_map": "cpu"}
    AutoRound(model, tokenizer, group_size=GROUP, **settings, **rounding).quantize_and_save(str(out), format=wanted)
    (found,) = out.rglob("config.json")
    if found.parent != out:  # in a folder of a name that it made
        for file in list(found.parent.iterdir()):
            file.rename(out / file.name)


def spread(integers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """The codes of each integer, one after the other along `dim`."""
    places = order or tuple(range(32 // bits))
    codes = [(integers >> (bits * place)) & (2**bits - 1) for place in places]
    return torch.stack(codes, dim + 1).flatten(dim, dim + 1)


def unpacked(folder: Path, bits: int, *, awq: bool) -> dict[str, torch.Tensor]:
    """The matrices [out, in] of a GPTQ or AWQ folder, by their names."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    found = {}
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        codes, points, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        if awq:
            codes, points = spread(codes, bits, 1, AWQ_ORDER), spread(points, bits, 1, AWQ_ORDER)
        else:  # zero points are stored less one
            codes, points = spread(codes, bits, 0), spread(points, bits, 1) + 1
        groups = torch.arange(len(codes)) // (len(codes) // len(scales))
        found[f"{name}.weight"] = ((codes - points[groups]).float() * scales.float()[groups]).T.contiguous()
    return found


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    plain = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=plain)
    return {name: each.float() for name, each in model.state_dict().items()}


def main(source: str, text: str, out: str, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, folder = AutoTokenizer.from_pretrained(source), Path(out)
    if name in COMPRESSED:
        by_llm_compressor(source, tokenizer, Path(text), folder, name)
        own = decompressed(folder)
    else:
        by_auto_round(source, tokenizer, folder, name)
        own = unpacked(folder, ROUNDED[name]["bits"], awq="awq" in name)
    ids = tokenizer(Path(text).read_text()).input_ids[:TOKENS]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    def logprobs() -> list[float]:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    found = {"ids": ids, "dense": logprobs()}
    own = {key: value for key, value in own.items() if key in model.state_dict()}
    matrices = [key for key in own if key.endswith("_proj.weight")]
    if len(matrices) != sum(key.endswith("_proj.weight") for key in model.state_dict()):
        raise SystemExit(f"{name}: the files have {len(matrices)} projections")
    model.load_state_dict(own, strict=False)
    found["file"] = logprobs()
    folder.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
