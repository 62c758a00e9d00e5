"""A headless Chromium driven over its own pipe: no package, no port. Debian's `chromium` is enough (`make browser`)."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 120.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")


def find_browser() -> str | None:
    """Path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Every event that the browser sends is kept in `events`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol. Raises RuntimeError with the browser's words."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)
        raise TimeoutError(method)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises RuntimeError for what it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(script):
            assert time.monotonic() < deadline, f"never became true: {script}"
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        """As a person does: focus, select all, insert, and see it there."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus(), document.activeElement.select()")
        self.call("Input.insertText", text=text)
        self.until(f"document.querySelector({json.dumps(selector)}).value === {json.dumps(text)}")

    def click(self, selector: str) -> None:
        """At the middle of the element, by mouse, once it stands still with nothing over it: a busy page lays out late."""
        middle = (
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            " const at = [r.x + r.width / 2, r.y + r.height / 2];"
            " return [...at, !e.disabled && e.contains(document.elementFromPoint(...at))] })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        deadline, before = time.monotonic() + WAIT_S, None
        while (place := self.run(middle)) != before or not place[2]:
            assert time.monotonic() < deadline, f"cannot be clicked: {selector}"
            before = place
            time.sleep(0.05)
        x, y, _ = place
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, width: int = 1280, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def requests(self) -> list[str]:
        """Addresses that the page asked for so far."""
        self.call("Runtime.evaluate", expression="0")
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors of the console, refusals of the content policy among them."""
        self.call("Runtime.evaluate", expression="0")
        found = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        thrown = [str(e["params"]) for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [f"{e['text']} {e.get('url', '')}" for e in found if e["level"] == "error"] + thrown

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browsing(browser: str) -> Iterator[Page]:
    """A fresh browser with an empty profile, and its one tab."""
    browser_reads, we_write = os.pipe()
    we_read, browser_writes = os.pipe()
    # its helpers write for a moment longer than it lives
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the pipe is descriptors 3 and 4 of the browser
        script = f'exec "$0" "$@" 3<&{browser_reads} 4>&{browser_writes}'
        words = ["bash", "-c", script, browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            words,
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Page(we_write, we_read)
        finally:
            process.terminate()
            process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.close(we_write)
            os.close(we_read)
