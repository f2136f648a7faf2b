"""A page in a headless Chromium, driven over pipes by the DevTools protocol, so that no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser, None if there is none."""

PATIENCE = 60.0  # seconds


class Page:
    """One page; `close()` ends its browser.

    Attributes:
        errors: errors and warnings of the console, and of resources that did not load, since the last `open`.
    """

    def __init__(self, profile: Path) -> None:
        """Start the browser, with a folder for its profile."""
        requests, answers = os.pipe(), os.pipe()
        # The browser reads file descriptor 3 and writes 4, numbers that may be taken here.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (requests[0], answers[1])]
        options = ["headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "remote-debugging-pipe"]
        command = [PROGRAM, *(f"--{option}" for option in (*options, f"user-data-dir={profile}"))]
        redirected = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *command], pass_fds=theirs, stderr=subprocess.DEVNULL
        )
        for fd in (requests[0], answers[1], *theirs):
            os.close(fd)
        self._requests, self._answers = requests[1], answers[0]
        self._read, self._sent, self._session = b"", 0, None
        self._loaded = False
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a request and return its result; events that come before it are recorded."""
        self._sent += 1
        request = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (message := self._receive()).get("id") != self._sent:
            self._record(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        """Load a page in a window of the given size, for a reader who prefers the "light" or the "dark" scheme."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.send("Emulation.setDeviceMetricsOverride", **size, mobile=phone)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.errors, self._loaded = [], False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._record(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        limit = time.monotonic() + PATIENCE
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < limit, f"never true: {condition}"
            time.sleep(0.05)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            assert chunk, f"the browser {'ended' if ready else 'does not answer'}"
            self._read += chunk
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _record(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(x.get("value", x.get("description"))) for x in given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
