"""What follows the LM head, asked of transformers' own forward: a scale and a soft cap, by whatever fields of a config.

The comparison of a decoder with transformers ends at the hidden states; this is the rest of the way to the logits."""

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import transformers
from tinker_local.backend.families import OTHER
from tinker_local.backend.families.family import Family, LogitRule
from tinker_local.types import UnsupportedError
from transformers.modeling_outputs import BaseModelOutputWithPast

_NEAR, _FAR, _BETWEEN = 1e-3, 1e6, 100.0
"""Outputs of the LM head up to which a soft cap changes nothing, at which it holds whatever it is, and for the rest."""
_TOLERANCE = 1e-5
"""Of logits, relative to the largest: transformers computes some in float32."""


class _Outputs(BaseModelOutputWithPast):
    """Of a decoder of any class, whose own outputs have more."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@torch.no_grad()
def logit_rule(model: Any, family: Family, where: str) -> LogitRule:
    """The rule of `family` for transformers' `model`, or without one the rule that the model follows. UnsupportedError
    if the model computes other logits, or if its LM head does not read a multiple of what its decoder gives. Reads no
    large weights. `where`: the model's name."""
    size = model.lm_head.out_features

    def logits(largest: float) -> tuple[torch.Tensor, torch.Tensor]:
        place = "cpu" if model.device.type == "meta" else model.device
        outputs = torch.linspace(-largest, largest, size, dtype=torch.float64, device=place)
        return outputs, _after_head(model, family, outputs, where)

    rule = _found(logits) if family.logits is None else family.logits(model.config.get_text_config())
    for largest in (_NEAR, _BETWEEN, _FAR):
        outputs, theirs = logits(largest)
        ours = rule.of(outputs)
        if theirs.shape != ours.shape or not bool((theirs - ours).abs().max() <= _TOLERANCE * ours.abs().max()):
            followed = "logits that are" if family.logits is None else "the logits of its family,"
            raise UnsupportedError(
                f"{where}: transformers does not compute {followed} the LM head's output times {rule.scale:.6g}"
                f"{'' if rule.softcap is None else f', capped at {rule.softcap:.6g}'}"
            )
    return rule


def complete_logits(model: Any, family: Family, where: str) -> None:
    """Have the forward of transformers' `model` compute what its class leaves out of its logits, as the class of its
    language model alone does. `where`: the model's name."""
    if not family.logits_left_out:
        return
    with torch.device("meta"):
        alone = transformers.AutoModelForCausalLM.from_config(deepcopy(model.config.get_text_config())).eval()
    rule, original = logit_rule(alone, OTHER, where), model.forward

    @functools.wraps(original)
    def forward(*args: Any, **given: Any) -> Any:
        output = original(*args, **given)
        output.logits = rule.of(output.logits)
        return output

    model.forward = forward


def _found(logits: Callable[[float], tuple[torch.Tensor, torch.Tensor]]) -> LogitRule:
    """A scale, and a cap if logits do not grow with the LM head's output."""
    outputs, near = logits(_NEAR)
    scale = float(near[-1] / outputs[-1])
    outputs, far = logits(_FAR)
    if abs(float(far[-1] / outputs[-1]) - scale) <= _TOLERANCE * abs(scale):
        return LogitRule(scale)
    return LogitRule(float(f"{scale:.7g}"), float(far[-1]))


def _after_head(model: Any, family: Family, outputs: torch.Tensor, where: str) -> torch.Tensor:
    """The logits of `model`, float64 [V], where its LM head gives `outputs` [V]."""
    decoder, head = model.get_submodule(family.decoder_path), model.lm_head
    hidden = torch.linspace(-1, 1, head.in_features, dtype=torch.float64, device=outputs.device)[None, None]

    def give_outputs(read: torch.Tensor) -> torch.Tensor:
        factor = read.flatten()[-1]  # of hidden states that end in 1; it passes through a matrix unchanged
        if not torch.allclose(read.double(), factor.double() * hidden) or (factor != 1 and head.bias is not None):
            raise UnsupportedError(f"{where}: in transformers its LM head does not read what its layers give")
        return factor * outputs[None, None]

    ids = torch.zeros(1, 1, dtype=torch.int64, device=outputs.device)
    # Instead of the modules' own: nothing is multiplied by their weights, which other ranks may hold.
    decoder.forward = lambda *_, **__: _Outputs(last_hidden_state=hidden)
    head.forward = give_outputs
    try:
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        del decoder.forward, head.forward
    return found.flatten().double()
