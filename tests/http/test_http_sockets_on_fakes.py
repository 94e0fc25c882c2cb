"""Promises 14 and 20 on a real socket: answers wait for nothing, and only this machine is listened to."""

import asyncio
import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from tinker_local.backend.hosting.listening import bind


def test_step_over_a_socket_takes_milliseconds_on_fakes(fake_server: Any) -> None:
    connection = http.client.HTTPConnection(fake_server.url.removeprefix("http://"), timeout=30)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", f"/api/v1/{path}", json.dumps(body))
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found

    session = post("create_session", {})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram", "lora_config": {"rank": 2}}
    model = post("retrieve_future", {"request_id": post("create_model", body)["request_id"]})["model_id"]
    took = []
    for seq_id in range(1, 41):
        began = time.perf_counter()
        step = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.0}}
        assert "metrics" in post("retrieve_future", {"request_id": post("optim_step", step)["request_id"]})
        took.append(time.perf_counter() - began)
    connection.close()
    # Submit and poll take 1 ms. What waits for a timer or an acknowledgement does so in each step, also in the fastest
    # of 40, which a busy machine does not slow down.
    assert min(took) < 0.025


async def test_connections_do_not_wait_for_nagle() -> None:
    """On some systems every answer would wait 40 ms for the client's delayed acknowledgement."""
    no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = bind("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await no_delay
        writer.close()


def test_server_listens_to_this_machine_alone_unless_told_otherwise_on_fakes(fake_server: Any) -> None:
    assert fake_server.url.startswith("http://127.0.0.1:")
    port = int(fake_server.url.rpartition(":")[2])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                listening.append(address.rpartition(":")[0])
    assert listening == ["0100007F"]  # 127.0.0.1, little-endian
