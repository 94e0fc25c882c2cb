"""The first module that two engines compute differently, by what modules gave."""

import numpy as np
import pytest
import torch
from tinker_local.backend.training.module_outputs import ModuleOutputs, first_difference, watching


class Attention(torch.nn.Module):
    """One projection, whose result a kernel overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.q_proj(x)
        return found.mul_(0)


class Model(torch.nn.Module):
    """A decoder of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention()])
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.norm(self.layers[0](x)), None


def outputs() -> ModuleOutputs:
    """Of a trainer's model."""
    random = np.random.default_rng(0)
    names = ("model.embed_tokens", *(f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"), "model.norm", "model")
    return {name: random.standard_normal((5, 4)).astype(np.float32) for name in names}


def of_sampler(ours: ModuleOutputs) -> ModuleOutputs:
    """The same as vLLM names it: the decoder elsewhere, and query, key and value in one."""
    found = {name.replace("model.", "language_model.model."): output.copy() for name, output in ours.items()}
    parts = [found.pop(f"language_model.model.layers.0.self_attn.{part}_proj") for part in "qkv"]
    return {"language_model.model.layers.0.self_attn.qkv_proj": np.concatenate(parts, axis=1), **found}


def test_modules_are_watched_once_and_what_is_overwritten_later_is_kept() -> None:
    model, x = Model(), torch.ones(3, 4)
    with watching(model, 3) as found:
        model(x)
        first = {name: output.copy() for name, output in found.items()}
        model(2 * x)
    model(x)
    assert [*found] == ["layers.0.q_proj", "layers.0", "norm", ""]
    assert np.array_equal(found["layers.0.q_proj"], model.layers[0].q_proj(x).detach().numpy())
    assert all(np.array_equal(output, first[name]) for name, output in found.items())
    assert not model._forward_hooks


@pytest.mark.parametrize("part", ["q", "k", "v", "o"])
def test_the_first_module_that_differs_is_named_also_if_the_sampler_has_it_joined(part: str) -> None:
    ours = outputs()
    changed = {**ours, f"model.layers.0.self_attn.{part}_proj": -ours[f"model.layers.0.self_attn.{part}_proj"]}
    changed["model.norm"] = changed["model.norm"] + 1
    told = first_difference(ours, of_sampler(changed), 1e-3)
    assert told == f"the first module to differ on a text is model.layers.0.self_attn.{part}_proj, by 2 of its output"


def test_what_differs_behind_the_decoder_is_the_head_and_nothing_seen_says_nothing() -> None:
    ours = outputs()
    assert first_difference(ours, of_sampler(ours), 1e-3) == "on a text its modules agree up to the LM head"
    assert first_difference(ours, {}, 1e-3) == ""
    graph = {"model.embed_tokens": ours["model.embed_tokens"]}
    assert first_difference(ours, graph, 1e-3) == ""


def test_nan_differs_and_a_scaled_embedding_does_not() -> None:
    """Gemma's embedding is scaled in transformers' module, and behind that of vLLM."""
    ours = outputs()
    name, scaled = "model.layers.0.self_attn.o_proj", {"model.embed_tokens": 8 * ours["model.embed_tokens"]}
    theirs = of_sampler({**ours, **scaled, name: np.full_like(ours[name], np.nan)})
    assert f"is {name}, by nan of its output" in first_difference(ours, theirs, 1e-3)
    assert (
        first_difference(ours, of_sampler({**ours, **scaled}), 1e-3) == "on a text its modules agree up to the LM head"
    )
