"""The console in a real Chromium: what it shows, that texts stay texts, and that a keyboard is enough."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tinker
from PIL import Image
from tinker_local import client
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes.fake_model import EOS_ID
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake

from tests.conftest import Server
from tests.documentation.ask_held_out import playground_body
from tests.http.chromium import CHROMIUM, Browser

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]

EVIL = "<img src=x onerror=\"document.title='evil'\">"
REPLY = "<svg/OnloAd=f()>"
"""No character twice, so that the fake, which sees one character back, learns it."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def trained(fake_server: Server) -> Iterator[tuple[client.ServiceClient, str, str]]:
    """A live run with bad names that replies with markup: its client, its id, and its sampler checkpoint."""
    service = client.ServiceClient(base_url=fake_server.url, display_name=EVIL)
    run = service.create_lora_training_client("fake/bigram", rank=8).result()
    text = [*map(ord, f":{REPLY}"), EOS_ID]
    inputs = {
        "target_tokens": tinker.TensorData(data=text[1:], dtype="int64"),
        "weights": tinker.TensorData(data=[1.0] * (len(text) - 1), dtype="float32"),
    }
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs)]
    for step in range(1, 41):
        run.forward_backward(data, "cross_entropy").result()
        run.optim_step(tinker.AdamParams(learning_rate=0.3)).result()
        client.log_metrics(run, {EVIL: step / 2, "reward": step}, step, base_url=fake_server.url)
    path = run.save_weights_for_sampler("final").result().path
    yield service, run.get_info().model_id, path
    service.close("success").result()


def stayed_here(browser: Browser, url: str) -> None:
    """Nothing ran that should not, nothing failed, and no request left for another place."""
    assert browser.js("document.title") != "evil"
    assert browser.complaints() == []
    places = {urlsplit(one)[:2] for one in browser.requested() if not one.startswith(("data:", "blob:"))}
    assert places == {urlsplit(url)[:2]}


def test_runs_and_curves_are_shown_and_names_are_texts_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str]
) -> None:
    service, run, _ = trained
    shown = f"document.body.innerText.includes({json.dumps(EVIL)})"
    browser.open(fake_server.url, shown)
    live = "document.querySelector('tbody tr')"
    browser.until(f"{live}.innerText.includes('680')")  # tokens
    assert browser.js(f"{live}.querySelector('a').textContent") == run
    browser.js(f"{live}.querySelector('a').click()")
    browser.until("document.querySelectorAll('figure polyline').length === 6")
    titles = browser.js("[...document.querySelectorAll('figcaption')].map((node) => node.textContent)")
    assert titles == ["loss", "gradient norm", "trained tokens/s", "learning rate", EVIL, "reward"]
    assert browser.js("document.querySelectorAll('figure')[5].querySelector('.values').textContent") == "40 at step 40"
    ticks = "[...document.querySelectorAll('figure')[5].querySelectorAll('.tick')].map((node) => node.textContent)"
    assert browser.js(ticks) == ["0", "10", "20", "30", "40", "10", "20", "30", "40"]
    browser.js("document.querySelectorAll('figure svg')[5].focus()")
    browser.press("Home", 36)
    assert browser.js("document.querySelectorAll('.values')[5].textContent") == "1 at step 1"
    browser.js(
        "{ const by = document.querySelector('#by'); by.value = 'time'; by.dispatchEvent(new Event('change')); }"
    )
    assert re.fullmatch(r"40 at [0-9.]+ s", browser.js("document.querySelectorAll('.values')[5].textContent"))
    browser.until(shown)  # the session's name, and later its new facts
    browser.until("document.querySelector('.facts').innerText.includes('40, ')")
    stayed_here(browser, fake_server.url)
    browser.open(service.get_console_url(), "document.querySelectorAll('figure polyline').length === 6")
    assert run.replace(":", "%3A") in browser.js("location.hash")


def test_the_playground_streams_text_and_pictures_of_two_models_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str], tmp_path: Path
) -> None:
    _, _, path = trained
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    browser.open(f"{fake_server.url}/#view=checkpoints", "document.querySelector('tbody tr')")
    row = f"[...document.querySelectorAll('tbody tr')].find((row) => row.innerText.includes({json.dumps(path)}))"
    browser.js(f"{row}.querySelector('button').click()")
    assert f"tinker-local chat {path} --url {fake_server.url}" in browser.js("document.body.innerText")
    browser.js(f"{row}.querySelector('a').click()")
    browser.until(f"document.querySelector('#first')?.value === {json.dumps(path)}")
    assert browser.js("document.querySelector('#second').value") == "fake/bigram"
    browser.js("document.querySelector('#both').click(); document.querySelector('#temperature').value = 0")
    browser.choose_files("#files", [tmp_path / "red.png"])
    browser.until("document.querySelectorAll('.thumbs img').length === 1")
    browser.js("document.querySelector('#message').focus()")
    browser.write(EVIL)
    browser.press("Enter", 13, modifiers=2)
    browser.until("document.querySelectorAll('article[aria-busy=false]').length === 2")
    said = "document.querySelector('article .said')"
    assert browser.js(f"{said}.textContent") == REPLY
    assert browser.js(f"{said}.childNodes.length") > 4  # as it came, piece by piece
    assert "17 tokens" in browser.js("document.querySelector('article').innerText")
    assert browser.js("document.querySelectorAll('.error:not([hidden])').length") == 0
    assert browser.js("document.querySelector('.asked').innerText") == EVIL
    assert browser.js("document.querySelector('.asked img').naturalWidth") == 8
    stayed_here(browser, fake_server.url)


WATCH = """window.sent = []; const real = fetch; window.fetch = (path, options) => {
    const body = options.body ? JSON.parse(options.body) : {};
    if (body.messages) sent.push(body);
    return real(path, options);
}"""
"""Remembers the messages that the page sends."""


def ask_with(browser: Browser, steps: tuple[str, ...], picture: Path) -> list[tuple[str, tuple[int, ...] | str]]:
    """The parts of the message that the playground sends after these steps: pictures by their size, and texts."""
    for step in steps:
        if step == "picture":
            browser.choose_files("#files", [picture])
            browser.until("document.querySelectorAll('.thumbs img').length === 1")
        else:
            browser.js("document.querySelector('#message').focus()")
            browser.write(step)
    browser.js("sent.length = 0; document.querySelector('#temperature').value = '0'")
    browser.press("Enter", 13, modifiers=2)
    browser.until("sent.length === 1 && document.querySelectorAll('article[aria-busy=true]').length === 0")
    found: list[tuple[str, tuple[int, ...] | str]] = []
    body = browser.js("sent[0]")
    content = body["messages"][-1]["content"]
    assert {**body, "messages": []} == {**playground_body(body["model"], content), "messages": []}
    for part in content:
        if part["type"] == "text":
            found.append(("text", part["text"]))
        else:
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            found.append(("picture", Image.open(io.BytesIO(data)).size))
    return found


def test_the_playground_keeps_the_order_given_or_chosen_or_trained_and_the_trained_size_on_fakes(
    browser: Browser, fake_server: Server, tmp_path: Path
) -> None:
    Image.new("RGB", (96, 48), "red").save(tmp_path / "red.png")
    paths = {}
    with client.ServiceClient(base_url=fake_server.url) as service:
        for order, side in (("picture-first", None), ("text-first", 32)):
            layout = client.PromptLayout(order, side).as_metadata()
            run = service.create_lora_training_client("fake/bigram", rank=2, user_metadata=layout).result()
            paths[order] = run.save_weights_for_sampler("final").result().path
    file, whole, small = tmp_path / "red.png", ("picture", (96, 48)), ("picture", (32, 16))
    given, hi = {"picture": ("picture", "hi"), "text": ("hi", "picture")}, ("text", "hi")

    def opened(model: str) -> None:
        browser.open(f"{fake_server.url}/#view=checkpoints", "document.querySelector('tbody tr')")
        address = f"{fake_server.url}/#view=playground&model={model}"
        browser.open(address, f"document.querySelector('#first')?.value === {json.dumps(model)}")
        browser.js(WATCH)

    opened("fake/bigram")
    assert ask_with(browser, given["picture"], file) == [whole, hi]
    assert ask_with(browser, given["text"], file) == [hi, whole]
    browser.js("document.querySelector('#order').value = 'text-first'")
    assert ask_with(browser, given["picture"], file) == [hi, whole]
    opened(paths["picture-first"])
    browser.until("document.body.innerText.includes('Trained with pictures before the text.')")
    assert ask_with(browser, given["text"], file) == [whole, hi]
    opened(paths["text-first"])
    browser.until("document.body.innerText.includes('after the text and pictures of at most 32 pixels a side.')")
    browser.choose_files("#files", [file])
    browser.until("document.body.innerText.includes('the text, red.png (32 x 16 pixels instead of 96 x 48)')")
    browser.js("document.querySelector('.thumbs button').click()")
    assert ask_with(browser, given["picture"], file) == [hi, small]
    browser.js("document.querySelector('#side').value = '0'; document.querySelector('#order').value = 'picture-first'")
    assert ask_with(browser, given["text"], file) == [whole, hi]
    browser.open(f"{fake_server.url}/#view=checkpoints", "document.querySelector('tbody tr')")
    row = f"[...document.querySelectorAll('tr')].find((row) => row.innerText.includes('{paths['text-first']}'))"
    browser.js(f"{row}.querySelector('button').click()")
    browser.until("document.body.innerText.includes('tinker_local.prompt_order')")
    browser.open(f"{fake_server.url}/#run={paths['text-first'].split('/')[2]}", "document.querySelector('.facts dd')")
    browser.until("document.body.innerText.includes('tinker_local.picture_side')")
    stayed_here(browser, fake_server.url)


def tabbed(browser: Browser, most: int) -> list[str]:
    """What Tab reaches from the top of the page: ids or texts, all with a visible focus."""
    found: list[str] = []
    browser.js("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(most):
        browser.press("Tab", 9)
        name, outline = browser.js(
            "(() => { const at = document.activeElement; const look = getComputedStyle(at);"
            "return [at.id || at.ariaLabel || at.textContent, look.outlineStyle + look.outlineWidth]; })()"
        )
        assert outline == "solid2px", name
        found.append(name)
    return found


def test_a_keyboard_reaches_every_control_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str]
) -> None:
    _, run, _ = trained
    browser.open(fake_server.url, f"document.body.innerText.includes({json.dumps(run)})")
    top = ["skip", "tinker-local", "Runs", "Checkpoints", "Playground", "Live runs"]
    assert tabbed(browser, 8) == [*top, f"Compare {run}", run]
    browser.js("document.querySelector('tbody a').focus()")
    browser.press("Enter", 13, "\r")
    browser.until("location.hash.startsWith('#run=') && document.querySelector('figure polyline')")
    browser.open(f"{fake_server.url}/#view=playground", "document.querySelector('#first option')")
    found = tabbed(browser, 19)
    of_view = ["first", "both", "kind", "system", "order", "side", "tokens", "temperature", "top-p", "seed"]
    assert found[5:] == [*of_view, "message", "files", "Send", "New conversation"]
    unnamed = "[...document.querySelectorAll('input, select, textarea')].filter((one) => !one.labels.length).length"
    assert browser.js(f"{unnamed} === document.querySelectorAll('dialog input:not([id])').length")


def luminance(color: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable_wide_and_narrow_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str], scheme: str
) -> None:
    browser.open(f"{fake_server.url}/#run={trained[1]}", "document.querySelectorAll('figure polyline').length === 6")
    features = {"prefers-color-scheme": scheme}
    for width in (1280, 380):
        assert browser.looks(features, width).startswith(b"\x89PNG")
        assert browser.js("document.documentElement.scrollWidth") <= width
        browser.until("[...document.querySelectorAll('figure')].every((one) => one.scrollWidth <= one.clientWidth)")
    colors = "(() => { const look = getComputedStyle(document.querySelector(%r)); return [look.color, look.fill]; })()"
    back = luminance(browser.js("getComputedStyle(document.body).backgroundColor"))
    assert (back > 0.9) if scheme == "light" else (back < 0.02)
    for selector, at in (("body", 0), (".values", 0), ("td", 0), ("a[aria-current]", 0), ("button.danger", 0)):
        front = luminance(browser.js(colors % selector)[at])
        contrast = (max(front, back) + 0.05) / (min(front, back) + 0.05)
        assert contrast > 4.5, (selector, contrast)
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_lost_server_is_a_line_and_the_page_goes_on_on_fakes(browser: Browser, fake_server: Server) -> None:
    browser.open(fake_server.url, "document.querySelector('#about').textContent")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.call("Network.emulateNetworkConditions", offline=True, **offline)
    browser.until("document.querySelector('#lost').innerText.startsWith('No answer from the server since')")
    browser.call("Network.emulateNetworkConditions", offline=False, **offline)
    browser.until("document.querySelector('#lost').hidden")
    stayed_here_but_lost = [one for one in browser.complaints() if "ERR_INTERNET_DISCONNECTED" not in json.dumps(one)]
    assert stayed_here_but_lost == []


def test_a_hidden_page_asks_nothing_on_fakes(browser: Browser, fake_server: Server) -> None:
    browser.open(fake_server.url, "document.querySelector('#about').textContent")

    def hide(hidden: str) -> None:
        given = f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }});"
        browser.js(f"{given} document.dispatchEvent(new Event('visibilitychange'))")

    wait = "new Promise((done) => setTimeout(done, 2500))"
    hide("true")
    browser.js(wait)
    asked = len(browser.requested())
    browser.js(wait)
    assert len(browser.requested()) == asked
    hide("false")
    browser.js(wait)
    assert len(browser.requested()) > asked


@pytest.fixture
def server_with_keys(tmp_path: Path) -> Iterator[LoopbackServer]:
    options = BackendOptions(data_dir=tmp_path / "data")
    served = InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake).serve_in_thread()
    yield served
    served.close()


def test_the_page_asks_once_for_a_key_and_keeps_it_in_the_tab_on_fakes(
    browser: Browser, server_with_keys: LoopbackServer
) -> None:
    browser.open(server_with_keys.url, "document.querySelector('#ask-key').open")

    def give(key: str) -> None:
        browser.js("document.querySelector('#key').focus()")
        browser.write(key)
        browser.press("Enter", 13, "\r")

    assert "fake/bigram" not in browser.js("document.body.innerText")

    def asked_after_three_seconds() -> int:
        browser.call("Runtime.evaluate", expression="new Promise((done) => setTimeout(done, 3000))", awaitPromise=True)
        return len(browser.requested())

    asked = asked_after_three_seconds()  # those that were under way when the page asked for a key have come
    assert asked_after_three_seconds() == asked, "requests without a key go on"
    give("tml-wrong")
    browser.until("document.querySelector('#ask-key').innerText.includes('does not know this key')")
    browser.until("document.querySelector('#ask-key').open")
    give(server_with_keys.api_key)
    browser.until("document.body.innerText.includes('fake/bigram')")
    assert not browser.js("document.querySelector('#ask-key').open")
    assert server_with_keys.api_key not in "".join(browser.requested())
    stored: Any = browser.js("[localStorage.length, Object.values(sessionStorage), document.cookie]")
    assert stored == [0, [server_with_keys.api_key], ""]


def test_a_hundred_thousand_steps_are_drawn_with_their_peak_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str]
) -> None:
    service = client.ServiceClient(base_url=fake_server.url)
    run = service.create_lora_training_client("fake/bigram", rank=1).result().get_info().model_id
    (known,) = (fake_server.data_dir).rglob(f"{trained[1].replace(':', '%3A')}.jsonl")
    point = {"time": 0.0, "tokens": 0, "gradient_norm": 1.0, "learning_rate": 1e-4}
    lines = [{**point, "step": at, "loss": 900.0 if at == 54_321 else 1.0} for at in range(1, 100_001)]
    (known.parent / f"{run.replace(':', '%3A')}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    browser.open(f"{fake_server.url}/#run={run}")
    browser.until("document.querySelector('.values')?.textContent === '1 at step 100,000'")
    drawn = browser.js("document.querySelector('polyline').getAttribute('points').split(' ')")
    assert len(drawn) < 4 * 1280
    heights = [float(one.partition(",")[2]) for one in drawn]
    assert max(heights) - min(heights) > 100
    assert "900" in browser.js("document.querySelector('figure').textContent") or min(heights) < 30
    service.close("success").result()


def test_the_distance_of_the_sampler_is_a_line_for_each_group_of_tokens_on_fakes(
    browser: Browser, fake_server: Server, trained: tuple[client.ServiceClient, str, str]
) -> None:
    service = client.ServiceClient(base_url=fake_server.url)
    run = service.create_lora_training_client("fake/bigram", rank=1).result().get_info().model_id
    (known,) = (fake_server.data_dir).rglob(f"{trained[1].replace(':', '%3A')}.jsonl")

    def step(number: int, **groups: float) -> str:
        mismatch = {
            name: {"kl": kl, "largest_ratio": 1 + kl, "beyond_share": 0.5, "tokens": 8} for name, kl in groups.items()
        }
        line = {"time": float(number), "step": number, "tokens": 8 * number, "loss": 1.0, "mismatch": mismatch}
        return f"{json.dumps(line)}\n"

    lines = step(1, all=0.125), step(2, all=0.25, staleness_0=0.125, staleness_3_on=0.375)
    (known.parent / f"{run.replace(':', '%3A')}.jsonl").write_text("".join(lines))
    browser.open(f"{fake_server.url}/#run={run}")
    browser.until("document.querySelectorAll('figure').length === 5")
    titles = browser.js("[...document.querySelectorAll('figcaption')].map((node) => node.textContent)")
    assert titles == [
        "loss",
        "trained tokens/s",
        "KL(sampler, trainer), nats/token",
        "largest ratio, trainer to sampler",
        "share of ratios beyond 1 ± 0.2",
    ]
    legend = "[...document.querySelectorAll('figure')[2].querySelectorAll('li')].map((node) => node.textContent)"
    assert browser.js(legend) == [
        "all: 0.25 at step 2",
        "newest weights: 0.125 at step 2",
        "3 steps old or more: 0.375 at step 2",
    ]
    assert browser.js("document.querySelectorAll('figure')[2].querySelectorAll('polyline').length") == 1
    assert browser.js("document.querySelectorAll('figure')[2].querySelectorAll('circle').length") >= 2
    browser.open(f"{fake_server.url}/#run={trained[1]}&run={run}")
    browser.until("document.querySelectorAll('figcaption').length > 7")
    alone = "[...document.querySelectorAll('figure')].find((node) => node.textContent.startsWith('KL('))"
    assert browser.js(f"{alone}.querySelectorAll('polyline, circle.dot').length") == 1, (
        "of several runs only all tokens"
    )
    stayed_here(browser, fake_server.url)
    service.close("success").result()


def test_watched_logs_are_curves_beside_their_run_and_their_names_are_texts_on_fakes(
    browser: Browser, tmp_path: Path
) -> None:
    folder = tmp_path / "logs" / EVIL.replace("/", "")
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step, EVIL: step, "reward": 2}) + "\n" for step in range(5)))
    options = BackendOptions(data_dir=tmp_path / "data", watch_logs=tmp_path / "logs")
    backend = InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake)
    with client.ServiceClient(backend=backend) as service:
        assert service._loopback is not None
        url, key = service._loopback.url, service._loopback.api_key
        run = service.create_lora_training_client("fake/bigram", rank=8).result()
        saved = {"state_path": run.save_state("one").result().path}
        run.save_weights_and_get_sampling_client()
        (folder / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
        browser.open(url, "document.querySelector('#ask-key').open")
        browser.js(f"document.querySelector('#key').value = {json.dumps(key)}")
        browser.js("document.querySelector('#ask-key button').click()")
        link = "document.querySelector('a[href^=\"#log=\"]')"
        browser.until(f"{link}?.textContent === {json.dumps(folder.name)}")
        browser.js(f"{link}.click()")
        browser.until("document.querySelectorAll('figure polyline').length === 2")
        titles = browser.js("[...document.querySelectorAll('figcaption')].map((node) => node.textContent)")
        assert titles == [EVIL, "reward"]
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 5, EVIL: 7}) + "\n")
        browser.until("document.querySelector('.values').textContent === '7 at step 5'")
        metrics.write_text('{"step": 0, "loss": 3}\n')  # a program that begins again
        browser.until("document.querySelectorAll('figure').length === 1")
        assert browser.js("document.querySelector('.values').textContent") == "3 at step 0"
        browser.js(f"location.hash = new URLSearchParams({{ run: {json.dumps(run.get_info().model_id)} }})")
        browser.until("document.querySelector('.values')?.textContent === '3 at step 0'")
        browser.until("document.body.innerText.includes('Ephemeral sampler versions')")
        assert browser.js("document.title") != "evil"
        assert {urlsplit(one)[:2] for one in browser.requested()} == {urlsplit(url)[:2]}
