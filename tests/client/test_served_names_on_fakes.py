"""Programs find tokenizers and processors of served models without a hub or the server's disk; engines are fakes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
import tinker_local.client as local
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.client import served_names
from tinker_local.types import InvalidRequestError

pytestmark = pytest.mark.more

PROGRAM = """
import shutil
import sys

import tinker
from tinker_cookbook import model_info
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoTokenizer

folder, text = sys.argv[1], "a text that has a mark <|im_end|>"
expected = AutoTokenizer.from_pretrained(folder + "/text").encode(text)
shutil.rmtree(folder)  # as on another machine
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("local/text", rank=4).result()
sampler = service.create_sampling_client(base_model="local/text")
for tokenizer in (trainer.get_tokenizer(), sampler.get_tokenizer(), get_tokenizer("local/text")):
    assert tokenizer.encode(text) == expected
assert model_info.get_recommended_renderer_name("local/text") == "qwen3"
assert model_info.get_model_attributes("local/vision").is_vl
assert get_image_processor("local/vision").patch_size == 16
assert model_info.get_recommended_renderer_name("Qwen/Qwen3-8B-Base") == "role_colon"
print("found")
"""


@pytest.fixture
def served(tmp_path: Path, tiny_models: dict[str, Path]) -> Iterator[tuple[Any, Path]]:
    """A server of two tiny models and one without files, and the folder of both."""
    folder = tmp_path / "server"
    for name in ("text", "vision"):
        shutil.copytree(tiny_models[f"tiny/{name}"], folder / name)
    sources = [ModelSource(f"local/{name}", str(folder / name)) for name in ("text", "vision")]
    backend = InProcessBackend(
        [*sources, ModelSource("fake", "fake")], BackendOptions(data_dir=tmp_path / "data"), load=load_fake
    )
    server = backend.serve_in_thread()
    yield server, folder
    server.close()


def test_an_unmodified_program_finds_tokenizers_processors_and_renderers(served: Any, tmp_path: Path) -> None:
    server, folder = served
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **{"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.api_key, "HF_HUB_OFFLINE": "1"},
        **{"TINKER_LOCAL_CACHE": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"},
    }
    done = subprocess.run(
        [sys.executable, "-m", "tinker_local.client", str(program), str(folder)],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("found\n"), done.stderr
    kept = [file.name for file in (tmp_path / "cache" / "tokenizers").glob("*/*")]
    assert "tokenizer.json" in kept
    assert not [name for name in kept if name.endswith(".safetensors")]


def test_no_other_file_of_a_model_is_handed_out(served: Any) -> None:
    server, _ = served
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": server.api_key}, trust_env=False) as http:
        listed = {model["base_model"]: model["files"] for model in http.get("tokenizers").json()["tokenizers"]}
        assert listed["fake"] == {}
        assert listed["local/text"]["tokenizer.json"] > 1000
        assert "preprocessor_config.json" in listed["local/vision"]
        whole = http.get("tokenizers/tokenizer.json", params={"base_model": "local/text"})
        assert len(whole.content) == listed["local/text"]["tokenizer.json"]
        for file in ("model.safetensors", "..%2Fvision%2Fconfig.json", "no.json"):
            refused = http.get(f"tokenizers/{file}", params={"base_model": "local/text"})
            assert refused.status_code == 404, file
        assert http.get("tokenizers/config.json", params={"base_model": "local/other"}).status_code == 400


def test_a_missing_server_or_a_wrong_key_is_an_error_of_the_sdk(served: Any) -> None:
    server, _ = served
    with pytest.raises(tinker.APIConnectionError):
        local.use_served_names(base_url="http://127.0.0.1:9", api_key="tml-x")
    with pytest.raises(tinker.APIStatusError):
        local.use_served_names(base_url=server.url, api_key="tml-another")
    assert subprocess.run([sys.executable, "-m", "tinker_local.client"], capture_output=True).returncode == 1


def test_a_server_cannot_choose_where_files_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tinker_local.client import served_names
    from tinker_local.client.endpoint import Endpoint

    monkeypatch.setenv("TINKER_LOCAL_CACHE", str(tmp_path))
    for name in ("../evil", "/etc/x", "a/b", ".", ""):
        with pytest.raises(InvalidRequestError, match="not the name of a file"):
            served_names._download(httpx.Client(), Endpoint("http://127.0.0.1:9", "k"), "m", {name: 1})
    assert not list(tmp_path.iterdir())


def test_a_loader_that_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchvision some versions of transformers have no loader of images, which programs of text do without."""

    class Missing(type):
        def __getattr__(cls, name: str) -> Any:
            raise ImportError("AutoImageProcessor needs torchvision")

    class Loader:
        @staticmethod
        def from_pretrained(name: Any) -> Any:
            return name

    class WithoutLibrary(metaclass=Missing):
        pass

    loaders = dict.fromkeys(served_names.LOADERS, Loader) | {"AutoImageProcessor": WithoutLibrary}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**loaders))
    monkeypatch.setitem(served_names._folders, "local/m", Path("/kept"))
    served_names._redirect_loaders()
    assert Loader.from_pretrained("local/m") == Path("/kept")
    assert Loader.from_pretrained("other") == "other"
