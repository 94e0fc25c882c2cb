"""Images by path or URL come from where the operator allows it, and from nowhere else."""

import asyncio
import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tinker_local.backend.rendering import image_assets
from tinker_local.backend.rendering.image_assets import ImageAssets
from tinker_local.backend.threads import acting_for
from tinker_local.types import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)

from tests.web_site import Site, public_site


def png(color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def named(location: str, kind: Any = "png") -> ModelInput:
    return ModelInput(chunks=(EncodedTextChunk(tokens=[1, 2]), ImageAssetPointerChunk(location=location, format=kind)))


async def bytes_of(assets: ImageAssets, location: str) -> bytes:
    chunk = (await assets.resolved(named(location), "prompt")).chunks[1]
    assert isinstance(chunk, ImageChunk)
    return chunk.data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images" / "deep").mkdir(parents=True)
    (tmp_path / "images" / "red.png").write_bytes(png("red"))
    (tmp_path / "images" / "deep" / "a b.png").write_bytes(png("blue"))
    (tmp_path / "secret.png").write_bytes(png("black"))
    return tmp_path / "images"


async def test_without_permission_nothing_is_read_and_the_message_says_what_to_do(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"prompt\.chunks\[1\]\.location: .*--image-folder"):
        await ImageAssets().resolved(named(str(folder / "red.png")), "prompt")


async def test_files_of_the_folder_are_read_by_every_kind_of_path(folder: Path) -> None:
    assets = ImageAssets(folder)
    for location in ("red.png", str(folder / "red.png"), f"file://{folder}/red.png", "deep/../red.png"):
        assert await bytes_of(assets, location) == png("red")
    assert await bytes_of(assets, f"file://{folder}/deep/a%20b.png") == png("blue")
    assert await bytes_of(assets, "deep/a b.png") == png("blue")


async def test_what_is_not_below_the_folder_is_refused_whatever_leads_there(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.png")
    assets = ImageAssets(folder)
    locations = (
        "../secret.png",
        str(folder.parent / "secret.png"),
        f"file://{folder.parent}/secret.png",
        "link.png",
        "up/secret.png",
        "pipe.png",
        "deep",
        "missing.png",
        "red.png\0",
        "/dev/zero",
        "/proc/self/environ",
    )
    for location in locations:
        with pytest.raises(InvalidRequestError, match="is not a file below the folder of images"):
            await bytes_of(assets, location)
    with pytest.raises(InvalidRequestError, match="names no host"):
        await bytes_of(assets, "file://elsewhere/red.png")


async def test_a_file_is_read_as_what_its_bytes_are(folder: Path) -> None:
    resolved = await ImageAssets(folder).resolved(named("red.png", "jpeg"), "prompt")
    (image,) = [chunk for chunk in resolved.chunks if isinstance(chunk, ImageChunk)]
    assert (image.data, image.format) == (png(), "png")


async def test_a_file_that_is_too_large_or_no_image_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=rf"red\.png has {len(png())} bytes or more, the limit is 10"):
        await bytes_of(ImageAssets(folder, max_bytes=10), "red.png")
    (folder / "text.png").write_text("no image")
    with pytest.raises(InvalidRequestError, match="no PNG, JPEG, WebP or GIF file"):
        await bytes_of(ImageAssets(folder), "text.png")


async def test_a_folder_that_hangs_holds_up_nobody_who_reads_no_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(ImageAssets, "_read", lambda *_: answer.wait(60) and png())
    assets = ImageAssets(folder)
    reading = [asyncio.create_task(bytes_of(assets, "red.png")) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(answer.is_set), 10) is False
    finally:
        answer.set()
    assert set(await asyncio.gather(*reading)) == {png()}


async def test_a_folder_that_hangs_is_given_up_after_the_seconds_and_keeps_threads_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, read = threading.Event(), ImageAssets._read
    monkeypatch.setattr(ImageAssets, "_read", lambda *given: answer.wait(60) if "lost" in given[1] else read(*given))
    with acting_for("alice", "s"):
        lost = [asyncio.create_task(bytes_of(ImageAssets(folder, seconds=0.3), "lost.png")) for _ in range(16)]
    await asyncio.sleep(0)
    try:
        with acting_for("bob", "s"):
            assert await bytes_of(ImageAssets(folder), "red.png") == png()
        for error in await asyncio.gather(*lost, return_exceptions=True):
            assert str(error) == "prompt.chunks[1].location: lost.png was not there within 0.3 seconds"
    finally:
        answer.set()


# URLs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from public_site(monkeypatch)


def assets_of(site: Site, **options: Any) -> ImageAssets:
    hosts = ["pictures.example", f"pictures.example:{site.port}"]
    return ImageAssets(hosts=hosts, addresses=lambda host, port: ["93.184.216.34"], **options)


def url(site: Site, path: str, host: str = "pictures.example") -> str:
    return f"http://{host}:{site.port}{path}"


async def test_an_allowed_host_is_asked_by_its_name_at_the_address_that_was_looked_at(site: Site) -> None:
    site.page("/red.png", png())
    assert await bytes_of(assets_of(site), url(site, "/red.png")) == png()
    assert site.hosts == [f"pictures.example:{site.port}"]


@pytest.mark.parametrize(
    "location", ["http://other.example/a.png", "http://pictures.example.evil/a", "ftp://pictures.example/a", "data:,x"]
)
async def test_other_hosts_and_schemes_are_not_asked(site: Site, location: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"location: the (host|scheme)"):
        await bytes_of(assets_of(site), location)
    assert site.hosts == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.3",
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "fec0::1",
        "2002:7f00:1::",
    ],
)
async def test_an_allowed_name_with_a_private_address_is_not_asked(site: Site, address: str) -> None:
    hosts = [f"pictures.example:{site.port}"]
    assets = ImageAssets(hosts=hosts, addresses=lambda host, port: ["93.184.216.34", address])
    with pytest.raises(InvalidRequestError, match="private address"):
        await bytes_of(assets, url(site, "/red.png"))
    assert site.hosts == []


async def test_a_port_may_be_part_of_the_permission(site: Site) -> None:
    site.page("/red.png", png())
    exact = ImageAssets(hosts=[f"pictures.example:{site.port}"], addresses=lambda host, port: ["93.184.216.34"])
    assert await bytes_of(exact, url(site, "/red.png")) == png()
    with pytest.raises(InvalidRequestError, match="not one that this server asks"):
        await bytes_of(exact, "http://pictures.example:1/red.png")


async def test_a_host_without_a_port_is_asked_at_the_ports_of_http_and_https_alone(site: Site) -> None:
    """Otherwise a client could look for whatever else the host serves."""
    assets = ImageAssets(hosts=["pictures.example"], addresses=lambda host, port: ["93.184.216.34"])
    for scheme, port in (("http", site.port), ("http", 443), ("https", 80), ("https", 22)):
        with pytest.raises(InvalidRequestError, match="not one that this server asks"):
            await bytes_of(assets, f"{scheme}://pictures.example:{port}/red.png")
    assert site.hosts == []


async def test_a_link_that_leads_to_itself_is_not_a_file(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "pool")
    (folder / "pool").symlink_to(folder / "loop")
    with pytest.raises(InvalidRequestError, match="loop is not a file below the folder"):
        await bytes_of(ImageAssets(folder), "loop")


async def test_redirects_are_followed_on_the_same_host_alone_and_not_for_ever(site: Site) -> None:
    site.page("/red.png", png())
    site.page("/here", status=302, Location="/red.png")
    site.page("/away", status=302, Location="http://169.254.169.254/latest/meta-data")
    site.page("/round", status=302, Location="/round")
    assert await bytes_of(assets_of(site), url(site, "/here")) == png()
    with pytest.raises(InvalidRequestError, match="redirects to another host"):
        await bytes_of(assets_of(site), url(site, "/away"))
    with pytest.raises(InvalidRequestError, match="redirects more than 3 times"):
        await bytes_of(assets_of(site), url(site, "/round"))


HEAD = "HTTP/1.1 200 OK\r\n\r\n"


async def test_size_is_bounded_whatever_the_host_says(site: Site) -> None:
    site.page("/large", png() + bytes(10**6))
    with pytest.raises(InvalidRequestError, match="the limit is 1000"):
        await bytes_of(assets_of(site, max_bytes=1000), url(site, "/large"))


@pytest.mark.parametrize("begins", ["", "HTTP/1.1 200 OK\r\nX-", "HTTP/1.1 302 Found\r\nLocation: /", HEAD])
async def test_a_host_that_drips_is_given_up_in_time_wherever_it_drips(site: Site, begins: str) -> None:
    def drip(handler: Any) -> None:
        handler.wfile.write(begins.encode())
        with contextlib.suppress(OSError):  # the client has gone
            while not over.wait(0.05):
                handler.wfile.write(b"x")
                handler.wfile.flush()

    over = threading.Event()
    site.pages["/slow"] = drip
    location = url(site, "/slow")
    try:
        with pytest.raises(InvalidRequestError, match=rf"location: {location} was not there within 0\.3 seconds"):
            async with asyncio.timeout(60):
                await bytes_of(assets_of(site, seconds=0.3), location)
    finally:
        over.set()


async def test_redirects_that_take_their_time_share_one_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(image_assets, "time", SimpleNamespace(monotonic=lambda: now))

    def later(handler: Any) -> None:
        nonlocal now
        now += 35
        handler.send_response(302)
        handler.send_header("Location", "/later")
        handler.end_headers()

    site.pages["/later"] = later
    with pytest.raises(InvalidRequestError, match="within 60 seconds"):
        await bytes_of(assets_of(site, seconds=60), url(site, "/later"))
    assert len(site.hosts) == 2


async def test_look_ups_of_names_end_in_time_and_hold_no_more_threads_than_they_may(site: Site) -> None:
    answer, asked = threading.Event(), []

    def stuck(host: str, port: int) -> list[str]:
        asked.append(host)
        assert answer.wait(60)
        return ["93.184.216.34"]

    site.page("/red.png", png())
    assets = ImageAssets(hosts=[f"pictures.example:{site.port}"], addresses=stuck, seconds=0.2)
    for _ in range(image_assets.MAX_LOOK_UPS + 2):
        with pytest.raises(InvalidRequestError, match=r"/red\.png was not there within 0\.2 seconds, as the name pict"):
            await bytes_of(assets, url(site, "/red.png"))
    assert len(asked) == image_assets.MAX_LOOK_UPS
    assert site.hosts == []
    assert len([each for each in threading.enumerate() if each.name == "look_up"]) == len(asked)
    answer.set()
    await asyncio.gather(*assets._looking_up)
    assets._seconds = 20
    assert await bytes_of(assets, url(site, "/red.png")) == png()
    assert not assets._looking_up


async def test_a_host_that_does_not_answer_holds_up_nobody_who_reads_elsewhere(folder: Path, site: Site) -> None:
    site.page("/red.png", png())
    answer = threading.Event()

    def addresses(host: str, port: int) -> list[str]:
        if host == "dead.example":
            assert answer.wait(60)
        return ["93.184.216.34"]

    hosts = [f"dead.example:{site.port}", f"pictures.example:{site.port}", "2001:db8::1"]
    assets = ImageAssets(folder, hosts, addresses=addresses, seconds=30)

    async def read(*locations: str) -> list[bytes]:
        chunks = tuple(chunk for location in locations for chunk in named(location).chunks)
        async with assets.turn(ModelInput(chunks=chunks)):
            found = await assets.resolved(ModelInput(chunks=chunks), "prompt")
        return [chunk.data for chunk in found.chunks if isinstance(chunk, ImageChunk)]

    dead = url(site, "/red.png", "Dead.Example")
    stuck = [asyncio.create_task(read(dead)) for _ in range(3 * image_assets.MAX_PROMPTS)]
    stuck += [
        asyncio.create_task(read(dead, url(site, "/red.png"), "red.png")) for _ in range(2 * image_assets.MAX_PROMPTS)
    ]
    try:
        for _ in range(2 * image_assets.MAX_PROMPTS):
            assert await asyncio.wait_for(read(url(site, "/red.png"), "red.png"), 10) == [png(), png()]
        assert len(assets._looking_up) == image_assets.MAX_LOOK_UPS
        with pytest.raises(InvalidRequestError, match="the host of"):
            await asyncio.wait_for(read("http://[2001:db8::2]/red.png"), 10)
    finally:
        answer.set()
    assert {data for task in stuck for data in await task} == {png()}


async def test_a_name_without_an_address_is_said(site: Site) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(InvalidRequestError, match=r"/red\.png: no such name"):
        await bytes_of(ImageAssets(hosts=[f"pictures.example:{site.port}"], addresses=unknown), url(site, "/red.png"))


async def test_what_the_host_refuses_is_said(site: Site) -> None:
    site.page("/gone", status=404)
    with pytest.raises(InvalidRequestError, match="answers 404"):
        await bytes_of(assets_of(site), url(site, "/gone"))
    with pytest.raises(InvalidRequestError, match="name or password"):
        await bytes_of(assets_of(site), f"http://me:word@pictures.example:{site.port}/red.png")


@pytest.mark.parametrize("location", ["http://[", "file://[x", "//[", "http://\u2100/"])
async def test_what_is_no_url_is_the_clients_fault(folder: Path, location: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt\.chunks\[1\]\.location: "):
        await ImageAssets(folder, ["pictures.example"]).resolved(named(location), "prompt")


async def test_a_redirect_to_nowhere_is_the_clients_fault(site: Site) -> None:
    site.page("/nowhere", status=302)
    site.page("/broken", status=302, Location="http://[")
    with pytest.raises(InvalidRequestError, match="answers 302"):
        await bytes_of(assets_of(site), url(site, "/nowhere"))
    with pytest.raises(InvalidRequestError, match=r"location: .*/broken"):
        await bytes_of(assets_of(site), url(site, "/broken"))


async def test_size_and_time_of_all_images_of_a_prompt_are_bounded(folder: Path, site: Site) -> None:
    size = len(png())
    many = ModelInput(chunks=tuple(ImageAssetPointerChunk(location="red.png", format="png") for _ in range(5)))
    assert len((await ImageAssets(folder, max_prompt_bytes=5 * size).resolved(many, "prompt")).chunks) == 5
    with pytest.raises(InvalidRequestError, match=rf"chunks\[3\].*have {4 * size} bytes.* is {4 * size - 1}"):
        await ImageAssets(folder, max_prompt_bytes=4 * size - 1).resolved(many, "prompt")

    def slow(handler: Any) -> None:
        time.sleep(0.2)
        with contextlib.suppress(OSError):  # the client has gone
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(png())

    site.pages["/slow"] = slow
    chunk = ImageAssetPointerChunk(location=url(site, "/slow"), format="png")
    with pytest.raises(InvalidRequestError, match=r"within 0\.5 seconds"):
        await assets_of(site, seconds=0.5).resolved(ModelInput(chunks=(chunk,) * 10), "prompt")
    assert len(site.hosts) <= 4
