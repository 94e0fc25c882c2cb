"""An error about a checkpoint that is not there names some that its reader has, and never those of other owners."""

from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Api, StartApi
from tests.http.test_http_owners_on_fakes import ALICE, BOB, NAMELESS, key_file, new_session, world


@pytest.fixture
async def api(start_api: StartApi, tmp_path: Path) -> Api:
    return await start_api(api_keys=key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\n{NAMELESS}\n"))


async def refusals(api: Api, key: str, path: str) -> list[str]:
    """What `key` gets that samples from `path`, in a session and by name, or loads it into a new run."""
    session = await new_session(api, key)
    sampler = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/api/v1/create_sampling_session", sampler),
        ("/v1/chat/completions", {"model": path, "messages": [{"role": "user", "content": "a"}]}),
    ]
    if "/weights/" in path:
        bodies = [
            ("/api/v1/load_weights", {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False})
        ]
    said = []
    for route, body in bodies:
        answer = await api.http.post(route, json=body, headers={"Authorization": f"Bearer {key}", "X-API-Key": key})
        assert answer.status_code == 404, answer.text
        found = answer.json()
        said.append(str(found["detail"] if "detail" in found else found["error"]["message"]))
    return said


@pytest.mark.parametrize("kind", ["sampler_weights", "weights"])
async def test_names_of_other_owners_are_not_in_errors_on_fakes(api: Api, kind: str) -> None:
    name = {"sampler_weights": "s", "weights": "w"}[kind]
    alices, bobs = await world(api, ALICE), await world(api, BOB)
    her_path = f"tinker://{alices}:train:0/{kind}/{name}"
    there = [f"tinker://{run}/{kind}/{other}" for run in (f"{bobs}:train:0", "s-0:train:0") for other in (name, "x")]
    for path in (f"tinker://{alices}:train:0/{kind}/x", *there):
        for said in await refusals(api, ALICE, path):
            assert said.endswith(f": there is no checkpoint {path}; you have {her_path}"), said
    for said in await refusals(api, NAMELESS, her_path):
        assert said.endswith(f": there is no checkpoint {her_path}"), said


async def test_those_of_the_named_run_come_first_and_some_of_many_on_fakes(api: Api) -> None:
    alices, later = await world(api, ALICE), await world(api, ALICE)
    run = f"{alices}:train:0"
    api.http.headers["x-api-key"] = ALICE
    for seq_id in range(4, 8):
        body = {"model_id": run, "seq_id": seq_id, "path": f"at-{seq_id}"}
        await api.result(await api.submit("save_weights_for_sampler", body))
    for said in await refusals(api, ALICE, f"tinker://{run}/sampler_weights/x"):
        newest = ", ".join(f"tinker://{run}/sampler_weights/at-{number}" for number in (7, 6, 5))
        assert said.endswith(f"; you have {newest} and 2 more"), said
        assert later not in said
