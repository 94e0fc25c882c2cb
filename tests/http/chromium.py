"""A small client of Chromium's DevTools protocol: one page, one question after the other."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Debian: apt-get install chromium."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)

SECONDS = 60.0
"""That a page may take on a busy machine."""


class Browser:
    """Chromium with one page. `events`: what the page reported, in order."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self.events: list[dict[str, Any]] = []
        self._asked = 0
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        found = (re.search(r"listening on ws://([^/]+)/", line) for line in self._process.stderr)
        host = next(match[1] for match in found if match)
        with urllib.request.urlopen(f"http://{host}/json", timeout=SECONDS) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        self._socket = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol, and its result."""
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=SECONDS))
            if message.get("id") == self._asked:
                assert "error" not in message, message
                return dict(message["result"])
            if "method" in message:
                self.events.append(message)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Return when an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.1)

    def open(self, url: str, wait_for: str = "true") -> None:
        """A new page at `url`; the session storage of the tab is empty."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && ({wait_for})")

    def press(self, key: str, code: int, text: str | None = None, modifiers: int = 0) -> None:
        """A key goes down and up."""
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({} if text is None else {"text": text}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def looks(self, features: Mapping[str, str], width: int = 1280, height: int = 900) -> bytes:
        """Show the page with some media features; the picture of it."""
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def choose_files(self, selector: str, files: Sequence[Path]) -> None:
        """Give files to an input of the page."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def of(self, method: str) -> list[dict[str, Any]]:
        """What the page reported with one method."""
        return [event["params"] for event in self.events if event["method"] == method]

    def requested(self) -> list[str]:
        """The URLs that the page asked for."""
        return [str(event["request"]["url"]) for event in self.of("Network.requestWillBeSent")]

    def complaints(self) -> list[dict[str, Any]]:
        """Errors that were thrown, and everything that was logged: refused by the policy, missing, failed."""
        return [*self.of("Runtime.exceptionThrown"), *self.of("Runtime.consoleAPICalled"), *self.of("Log.entryAdded")]
