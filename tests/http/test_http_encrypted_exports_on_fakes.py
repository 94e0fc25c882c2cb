"""Exports encrypted with age, as `tinker_cookbook.weights.download` asks for them."""

import sys
from pathlib import Path
from typing import Any

import pyrage  # type: ignore[import-untyped]
import pytest
import tinker
from tinker_cookbook import weights
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake

from tests.http.conftest import Api, StartApi

FILES = ("adapter_config.json", "adapter_model.safetensors")


async def files(api: Api, model: str, seq_id: int, name: str, **fields: Any) -> dict[str, bytes]:
    """What the URLs of a new export give."""
    body = {"model_id": model, "seq_id": seq_id, "path": name, "type": "save_weights_external", **fields}
    await api.result(await api.submit("save_weights_external", body))
    path = f"/api/v1/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"
    urls = (await api.http.get(path)).json()["urls"]
    return {file: (await api.http.get(url)).content for file, url in urls.items()}


async def test_an_encrypted_export_opens_with_each_key_alone_and_is_the_plain_one_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.result(await api.step(model, 1))
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    sealed = await files(api, model, 2, "a", age_encryption_recipients=[str(key.to_public()) for key in keys])
    plain = await files(api, model, 3, "b")
    assert sorted(plain) == sorted(FILES)
    assert sorted(sealed) == sorted(f"{file}.age" for file in FILES)
    for key in keys:
        assert {name[:-4]: pyrage.decrypt(data, [key]) for name, data in sealed.items()} == plain
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed["adapter_config.json.age"], [pyrage.x25519.Identity.generate()])
    folders = api.backend.options.data_dir.glob("checkpoints/*/external_weights/a@*")
    assert [sorted(file.name for file in folder.iterdir()) for folder in folders] == [
        [*sorted(f"{file}.age" for file in FILES), "checkpoint.json"]
    ]


async def test_an_encrypted_export_is_adopted_if_the_database_is_lost_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model, key = await api.model(), pyrage.x25519.Identity.generate()
    before = await files(api, model, 1, "a", age_encryption_recipients=[str(key.to_public())])
    data_dir = api.backend.options.data_dir
    await api.backend.close()
    (data_dir / "metadata.sqlite3").unlink()
    again = await start_api()
    path = f"/api/v1/training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
    urls = (await again.http.get(path)).json()["urls"]
    assert {file: (await again.http.get(url)).content for file, url in urls.items()} == before


async def test_recipients_that_cannot_be_used_are_refused_by_place_and_reason_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    key = str(pyrage.x25519.Identity.generate().to_public())

    async def failure(seq_id: int, recipients: list[str]) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": "a", "age_encryption_recipients": recipients}
        return str(await api.failure(await api.submit("save_weights_external", body)))

    assert "age_encryption_recipients[1]: 'ssh-rsa AAAA' is neither" in await failure(1, [key, "ssh-rsa AAAA"])
    assert "age_encryption_recipients: 11 recipients; at most 10" in await failure(2, [key] * 11)
    monkeypatch.setitem(sys.modules, "pyrage", None)  # as where it is not installed
    refused = await failure(3, [key])
    assert "pip install pyrage" in refused
    assert "age -r RECIPIENT" in refused


def test_the_cookbook_downloads_a_training_checkpoint_on_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BackendOptions(data_dir=tmp_path / "data")
    server = LoopbackServer(InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake))
    try:
        monkeypatch.setenv("TINKER_API_KEY", server.api_key)
        with tinker.ServiceClient(base_url=server.url) as service:
            client = service.create_lora_training_client(base_model="fake/bigram", rank=4).result()
            client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
            path = client.save_state("final").result().path
            rest = service.create_rest_client()
            before = {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}
            weights.download(tinker_path=path, output_dir=str(tmp_path / "out"), base_url=server.url)
            assert {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints} == before
        (folder,) = (tmp_path / "data").glob("checkpoints/*/weights/final@*")
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(FILES)
        for file in FILES:
            assert (tmp_path / "out" / file).stat().st_size > 0
        assert (tmp_path / "out" / FILES[1]).stat().st_size == (folder / FILES[1]).stat().st_size
    finally:
        server.close()
