"""The chunked LM head with a bias, a scale and a soft cap, against autograd."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.families import FAMILIES, family_of
from tinker_local.backend.families.family import LogitRule
from tinker_local.backend.training.kernels.kernels import TorchKernels
from tinker_local.backend.training.model.lm_head import LmHead, Targets
from tinker_local.backend.training.model.logit_rule import logit_rule
from tinker_local.backend.weights.dense import DenseMatrix, dense
from tinker_local.types import UnsupportedError

ROWS, HIDDEN, VOCABULARY = 11, 6, 23


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0), LogitRule(0.3, 2.0)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [VOCABULARY, 4 * VOCABULARY, 10**6])
def test_logprobs_and_gradient_follow_the_rule_of_the_family(rule: Any, has_bias: Any, chunk: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden, bias = (
        2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((VOCABULARY, HIDDEN), (ROWS, HIDDEN), (VOCABULARY,))
    )
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(ROWS), 2)
    ids = rng.integers(0, VOCABULARY, len(rows))
    weights = torch.from_numpy(rng.standard_normal(len(rows)))
    head = LmHead(DenseMatrix(weight), TorchKernels(), chunk, torch.float64, bias if has_bias else None, rule)
    targets = Targets(rows, ids, active=np.ones(len(rows), bool), prepass=np.zeros(len(rows), bool))
    logprobs, grad_hidden = head.logprobs_and_gradient(hidden, targets, None, lambda places, _: -weights[places])

    leaf = hidden.clone().requires_grad_()
    logits = rule.scale * (leaf @ weight.T + (bias if has_bias else 0))
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    wanted = logits.log_softmax(-1)[torch.from_numpy(rows), torch.from_numpy(ids)]
    (-weights * wanted).sum().backward()
    torch.testing.assert_close(logprobs, wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad_hidden, leaf.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.logprobs(hidden, targets, None), logprobs, rtol=0, atol=1e-12)


RULED: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 0.3},  # multiplies
    "granite": {"logits_scaling": 3.0},  # divides
    "granite_swa": {"logits_scaling": 5.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.25},
    "minicpm3": {"dim_model_base": 16},  # before the LM head
    "nanochat": {},  # a cap of 15 that its config has by default
    "vaultgemma": {"final_logit_softcapping": 3.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "gemma4_text": {"final_logit_softcapping": 5.0},
    "phi": {},  # a bias
    "llama": {},
}
"""Families with a scale, a cap or a bias, with fields of their configs."""


def model_of(model_type: str) -> Any:
    """A tiny one of random weights, large enough that caps bite."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        num_key_value_heads=4,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
        **RULED[model_type],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if model.lm_head.bias is not None:
            torch.nn.init.normal_(model.lm_head.bias)
    return model.requires_grad_(False)


@pytest.mark.parametrize("model_type", RULED)
def test_logprobs_of_the_hidden_states_are_those_of_transformers_whole_model(model_type: str) -> None:
    model = model_of(model_type)
    tokens = torch.arange(3, 3 + ROWS)[None]
    with torch.no_grad():
        hidden = model.get_submodule("model")(input_ids=tokens, use_cache=False).last_hidden_state[0]
        wanted = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    rule = logit_rule(model, family_of(model_type, "tiny"), "tiny")
    head = LmHead(dense([model.lm_head]), TorchKernels(), 10**6, torch.float32, model.lm_head.bias, rule)
    rows, ids = np.repeat(np.arange(ROWS), VOCABULARY), np.tile(np.arange(VOCABULARY), ROWS)
    everything = Targets(rows, ids, np.ones(len(rows), bool), np.zeros(len(rows), bool))
    found = head.logprobs(hidden, everything, None).view(ROWS, VOCABULARY)
    assert float(wanted.max() - wanted.min()) > 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "rule"),
    [
        ("hyperclovax", LogitRule(1 / 0.3)),
        ("granite", LogitRule(3.0)),
        ("cohere", LogitRule()),
        ("minicpm3", LogitRule()),
        ("gemma2", LogitRule()),
        ("gemma2", LogitRule(softcap=2.1)),
        ("llama", LogitRule(softcap=1000.0)),
        ("llama", LogitRule(1.001)),
    ],
)
def test_a_family_with_another_rule_than_transformers_is_refused(model_type: str, rule: LogitRule) -> None:
    wrong = replace(FAMILIES["llama"], logits=lambda _: rule)
    with pytest.raises(UnsupportedError, match="tiny: transformers does not compute the logits of its family, the LM"):
        logit_rule(model_of(model_type), wrong, "tiny")


def test_an_lm_head_that_reads_something_else_is_refused() -> None:
    model = model_of("llama")
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
    with pytest.raises(UnsupportedError, match="tiny: in transformers its LM head does not read what its layers give"):
        logit_rule(model, FAMILIES["llama"], "tiny")
