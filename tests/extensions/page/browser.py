"""A headless Chromium that is clicked, typed into and photographed over its debugging protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowRight": (39, ""), "ArrowLeft": (37, ""), "ArrowDown": (40, ""),
    "ArrowUp": (38, ""), "Home": (36, ""), "End": (35, ""),
}  # fmt: skip


class Page:
    """One page of a running browser."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.console: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for its answer; what the console says meanwhile is kept."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.console.append(json.dumps(answer["params"]))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"{script} did not become true"
            time.sleep(0.05)
        return value

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page in a window of this size, in light or dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def key(self, name: str, shift: bool = False) -> None:
        """Press a key."""
        code, text = KEYS[name]
        pressed = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def hover(self, selector: str, mark: str) -> None:
        """Move the pointer over an element, to where another one stands horizontally."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            f" const m = document.querySelector({json.dumps(mark)}).getBoundingClientRect(), b = e.getBoundingClientRect();"
            " return [m.x + m.width / 2, b.y + b.height / 2]; })()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag across an element, between two shares of its width."""
        x, y, width = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y + b.height / 2, b.width]; })()"
        )
        for kind, at, held in (("mousePressed", start, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)):
            place = {"x": x + at * width, "y": y, "button": "left", "buttons": held, "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **place)

    def picture(self, path: Path) -> None:
        """Photograph what the window shows."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile below ``folder``, and give its page."""
    from websockets.sync.client import connect

    profile = folder / "profile"
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = _port(profile / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            pages = [entry for entry in json.load(answer) if entry["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                page.send(f"{domain}.enable")
            yield page
    finally:
        process.kill()
        process.wait()


def _port(path: Path, process: subprocess.Popen) -> int:
    until = time.monotonic() + 60
    while True:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines:
            return int(lines[0])
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < until, "chromium did not start"
        time.sleep(0.05)
