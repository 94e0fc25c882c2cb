"""A dense model of the numbers that another one's codes stand for."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tinker_local.backend.families import family_of
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.backend.weights.packed import PackedLinear
from tinker_local.backend.weights.packed_stack import PackedExperts, pack_decoder


def write_twin(folder: Path, precision: str, out: Path) -> Path:
    """Write to `out` what the model in `folder` computes with where its base has this precision: float32 holds each
    product of a code and a scale."""
    config = transformers.AutoConfig.from_pretrained(folder)
    family = family_of(config.model_type, str(folder))
    auto: Any = getattr(transformers, family.auto_class)
    model, packed = (auto.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    pack_decoder(packed.get_submodule(family.decoder_path), precision)
    with torch.no_grad():
        for path, module in packed.named_modules():
            if isinstance(module, PackedLinear):
                model.get_submodule(path).weight.copy_(module.weight)
            elif isinstance(module, PackedExperts):
                for name in (EXPERTS_GATE_UP, EXPERTS_DOWN):
                    numbers = getattr(module, name).stack().numbers()
                    there = model.get_submodule(path).get_parameter(name)
                    there.copy_(numbers.transpose(1, 2) if module.transposed else numbers)
    shutil.copytree(folder, out)
    model.save_pretrained(out)
    return out
