"""The table of patches of vLLM is complete, and each row names tests that exist."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine import patches
from tinker_local.backend.vllm_engine.patches import PATCHES, Patch

TESTS = Path(__file__).parents[1]
FOLDER = Path(patches.__file__).parent

OWN_OBJECTS = {"engine_thread.py", "grammar_process.py", "host_memory.py", "vllm_sampler.py"}
"""Modules that only assign to their own objects."""

NOT_INTERNAL = {
    *("seed", "logprobs", "prompt_logprobs", "extra_args", "skip_reading_prefix_cache"),  # of SamplingParams
    "id",  # of LoRAModel
    *("kept_by_dynamo", "in_torch", "curved", "grammar_masks", "workspaces", "lent", "shared", "draw"),  # ours
    *("routed", "routes", "since"),  # ours
    *("disable", "set_num_threads", "_parameters", "_version"),  # torch's
    *("_cdata", "_schema", "_make_subclass"),  # torch's
    "_exit",  # of os
}
"""Names that are assigned to and are not internals of vLLM."""


def internals(module: Path) -> Iterator[str]:
    """Private names that a module reads of other objects, and any name that it assigns to on them."""
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private or (isinstance(node.ctx, ast.Store) and module.name not in OWN_OBJECTS):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                yield str(name.value)


def test_every_internal_of_vllm_that_is_used_stands_in_the_table() -> None:
    listed = {name for patch in PATCHES for name in patch.names}
    used = {name for module in FOLDER.glob("*.py") for name in internals(module)}
    assert used - listed - NOT_INTERNAL == set()
    assert used >= NOT_INTERNAL
    sources = "".join(module.read_text() for module in FOLDER.glob("*.py") if module.name != "patches.py")
    table = (FOLDER / "patches.py").read_text()
    assert {name for name in listed if name not in sources and table.count(name) < 2} == set()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.what[:40])
def test_a_patch_names_the_tests_that_fail_without_it(patch: Patch) -> None:
    assert patch.tests
    for test in patch.tests:
        module, name = test.split("::")
        tree = ast.parse((TESTS / module).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.what[:40])
def test_a_patch_is_applied_by_the_table_or_names_its_modules(patch: Patch) -> None:
    assert patch.used_in or patch.to_process or patch.to_config or patch.to_engine
    assert all((FOLDER / module).is_file() for module in patch.used_in)


def test_no_interpreter_is_started_to_look_at_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply_to_process()
    from vllm.model_executor.models import registry

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    # vLLM looks only once: what it saw is a file.
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_save_modelinfo_to_cache", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", refuse)
    found = registry._LazyRegisteredModel("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM").inspect_model_cls()
    assert found.architecture == "Qwen2ForCausalLM"


def test_features_of_pictures_are_cleared_without_a_picture() -> None:
    """Stands for a CUDA graph, which clears what it cleared when it was captured: in a step without a picture."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    def resolve_model_cls(*_: object) -> tuple[type, str]:
        return Qwen3VLForConditionalGeneration, "Qwen3VLForConditionalGeneration"

    model_config = SimpleNamespace(registry=SimpleNamespace(resolve_model_cls=resolve_model_cls), architectures=[])
    patches._clear_features_of_pictures(SimpleNamespace(model_config=model_config), 0)
    model = SimpleNamespace(
        deepstack_input_embeds=[torch.ones(5, 2), torch.ones(5, 2)],
        deepstack_input_embeds_num_tokens=0,
        deepstack_num_level=2,
    )
    clear: Any = Qwen3VLForConditionalGeneration._clear_deepstack_input_embeds
    clear(model, 4)
    for level in model.deepstack_input_embeds:
        assert level.tolist() == [[0, 0]] * 4 + [[1, 1]]
