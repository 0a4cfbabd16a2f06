"""A headless Chromium over its debugging pipe: what the browser tests and the screenshots need, and no more.

The standard library alone: messages are JSON, ended by a zero byte, on two pipes that the browser expects as file
descriptors 3 and 4. The browser gets an empty profile and flags that keep it from talking to anybody.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
#: Seconds after which a browser that does not answer is given up; a loaded machine needs many.
PATIENCE_S = 60.0
#: Moves the pipes to where the browser looks for them, then becomes the browser.
_LAUNCH = "import os,sys;os.dup2(int(sys.argv[1]),3);os.dup2(int(sys.argv[2]),4);os.execv(sys.argv[3],sys.argv[3:])"


class BrowserError(Exception):
    """The browser is missing, died or did not answer."""


def find() -> str | None:
    """The Chromium of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One tab. What went wrong in it is collected while it is open.

    Attributes:
        errors: uncaught exceptions, console errors and warnings of the security policy, as text.
        requests: addresses that the page asked for.
    """

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loaded: bool = False

    def open(self, address: str) -> None:
        """Go to ``address`` and wait until it has loaded. Raises BrowserError where it cannot be opened."""
        self.loaded = False
        answer = self.browser.call("Page.navigate", {"url": address}, self.session)
        if answer.get("errorText"):
            raise BrowserError(f"{address}: {answer['errorText']}")
        if "loaderId" in answer:  # otherwise only the fragment changed, and nothing is loaded
            self.browser.wait(lambda: self.loaded, f"{address} to load")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.browser.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True},
            self.session,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {_exception(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.run(script):
            if time.monotonic() > deadline:
                raise BrowserError(f"never became true: {script}")
            time.sleep(0.05)

    def look(self, width: int, height: int, theme: str) -> None:
        """Size of the window in CSS pixels, and what the system's theme is said to be (``light`` or ``dark``)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.call("Emulation.setDeviceMetricsOverride", size, self.session)
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.call("Emulation.setEmulatedMedia", {"features": scheme}, self.session)

    def press(self, key: str) -> None:
        """Press and release a key, named as in ``KeyboardEvent.key``."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        text = {"text": "\r"} if key == "Enter" else {}
        self.browser.call("Input.dispatchKeyEvent", {"type": "keyDown", **common, **text}, self.session)
        self.browser.call("Input.dispatchKeyEvent", {"type": "keyUp", **common}, self.session)

    def screenshot(self, target: Path, *, most: int = 6000) -> None:
        """A picture of the whole page, at most ``most`` pixels high."""
        metrics = self.browser.call("Page.getLayoutMetrics", {}, self.session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": metrics["width"], "height": min(metrics["height"], most), "scale": 1}
        answer = self.browser.call(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}, self.session
        )
        target.write_bytes(base64.b64decode(answer["data"]))


def _exception(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))


class Browser:
    """A running Chromium; a context manager, because it must be ended."""

    def __init__(self, path: str | None = None) -> None:
        found = path or find()
        if found is None:
            raise BrowserError("no chromium on this machine; install Debian's package chromium")
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._out = _pipe()
        self._in, from_browser = _pipe()
        command = [
            *(sys.executable, "-c", _LAUNCH, str(to_browser), str(from_browser), found),
            *FLAGS,
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self._send("Browser.close", {}, None)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab, closed in the end."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", {}, session)
        try:
            yield page
        finally:
            with contextlib.suppress(BrowserError):
                self.call("Target.closeTarget", {"targetId": target})
            del self._pages[session]

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        number = self._send(method, parameters, session)
        self.wait(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, condition: Any, what: str) -> None:
        """Read messages until ``condition()`` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise BrowserError(f"the browser did not answer in {PATIENCE_S:.0f} s: waited for {what}")
            self._read(left)

    def _send(self, method: str, parameters: dict[str, Any], session: str | None) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        rest = json.dumps(message).encode() + b"\0"
        try:
            while rest:
                rest = rest[os.write(self._out, rest) :]
        except OSError as error:
            raise BrowserError(f"the browser is gone: {error}") from error
        return self._number

    def _read(self, patience: float) -> None:
        ready, _, _ = select.select([self._in], [], [], patience)
        if not ready:
            return
        data = os.read(self._in, 1 << 20)
        if not data:
            raise BrowserError(f"the browser ended by itself with exit code {self._process.wait()}")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in messages:
            self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        page = self._pages.get(message.get("sessionId", ""))
        if page is None:
            return
        method, about = message["method"], message["params"]
        if method == "Page.loadEventFired":
            page.loaded = True
        elif method == "Runtime.exceptionThrown":
            page.errors.append(_exception(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            page.errors.append(" ".join(str(item.get("value", item.get("description"))) for item in about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            page.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            page.requests.append(about["request"]["url"])


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have high numbers, so that moving them to 3 and 4 closes neither."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
