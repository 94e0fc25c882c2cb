"""`import tinker_local.client as tinker` is enough."""

import inspect
import subprocess
import sys

import pytest
import tinker
import tinker_local.client as local

LOCAL_DEFAULTS = {"ServiceClient", "RestClient", "AdminClient"}


def public_names() -> list[str]:
    listed = {*tinker.__all__, "APIResponse", "AsyncAPIResponse", "resources", "types", "lib", "proto"}
    # Modules, besides, are there as soon as anybody has imported them.
    found = {
        name for name, value in list(vars(tinker).items()) if not (name.startswith("_") or inspect.ismodule(value))
    }
    return sorted(listed | found)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_of_the_sdk_is_here(name: str) -> None:
    assert hasattr(local, name)
    if name in LOCAL_DEFAULTS:
        assert issubclass(getattr(local, name), getattr(tinker, name))
    elif name == "resources":  # a proxy in the SDK until somebody imports the module
        assert getattr(local, name).__name__ == "tinker.resources"
    else:
        assert getattr(local, name) is getattr(tinker, name)


def test_a_star_import_gives_what_the_sdk_gives() -> None:
    names: dict[str, object] = {}
    exec("from tinker_local.client import *", names)
    assert set(tinker.__all__) <= set(names)
    assert {"model_input", "text_chunk", "image_chunk"} <= set(names)
    assert names["ServiceClient"] is local.ServiceClient


def test_the_clients_keep_every_parameter_of_the_sdk() -> None:
    for name in LOCAL_DEFAULTS:
        official = inspect.signature(getattr(tinker, name).__init__).parameters
        ours = inspect.signature(getattr(local, name).__init__).parameters
        assert [(p.name, p.kind, p.default) for p in official.values()] == [
            (p.name, p.kind, p.default) for p in ours.values() if p.name in official
        ]


@pytest.mark.more
def test_importing_the_client_does_not_load_transformers_or_the_backend() -> None:
    code = (
        "import sys, tinker_local.client as c; c.model_input;"
        "print([m for m in ('transformers', 'vllm', 'tinker_local.backend', 'uvicorn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
