"""A real browser, where there is one, for tests of what pages do."""

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LONG = 30.0
"""Seconds after which what must happen is taken not to."""
ENTER, SHIFT, ESCAPE, TAB = "\ue007", "\ue008", "\ue00c", "\ue004"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
DRIVER = shutil.which("chromedriver") or ""


def until(happens: Callable[[], Any], seconds: float = LONG) -> Any:
    """What it comes to, once that is true."""
    late = time.monotonic() + seconds
    while not (come := happens()):
        assert time.monotonic() < late, "it does not happen"
        time.sleep(0.02)
    return come


class Browser:
    """A headless one, by the protocol that every browser's driver speaks."""

    def __init__(self, port: int, folder: Path, *more: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder}",
        ]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--window-size=1400,900",
            *more,
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": BROWSER, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._session = ""
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        self._connection.request(
            method, self._session + path, None if body is None else json.dumps(body).encode()
        )
        answer = self._connection.getresponse()
        value = json.loads(answer.read())["value"]
        assert answer.status == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """As it is seen, empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        """Of those that are seen."""
        return int(
            self.run(
                "return [...document.querySelectorAll(arguments[0])].filter((one) => "
                "one.checkVisibility()).length",
                selector,
            )
        )

    def click(self, selector: str) -> None:
        [element] = self._ask("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._ask("POST", f"/element/{element}/click", {})

    def type(self, keys: str) -> None:
        """Into what has the focus. A key after SHIFT is pressed with it."""
        actions, shifted = [], False
        for key in keys:
            actions.append({"type": "keyDown", "value": key})
            if key == SHIFT:
                shifted = True
                continue
            actions.append({"type": "keyUp", "value": key})
            if shifted:
                actions.append({"type": "keyUp", "value": SHIFT})
                shifted = False
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def accept(self) -> None:
        """What a dialog asks."""
        self._ask("POST", "/alert/accept", {})

    def command(self, name: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def complaints(self) -> list[str]:
        """On the console, since the last time."""
        return [
            entry["message"]
            for entry in self._ask("POST", "/se/log", {"type": "browser"})
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def close(self) -> None:
        self._ask("DELETE", "")
        self._connection.close()


@contextmanager
def browsing(folder: Path, *flags: str) -> Iterator[Browser]:
    """One with these flags too. Where there is none, the test is skipped."""
    if not (BROWSER and DRIVER):
        pytest.skip(f"needs {'chromedriver' if BROWSER else 'chromium'}, which is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}", "--log-level=SEVERE"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:

        def listens() -> bool:
            with socket.socket() as there:
                return there.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        browser = Browser(port, folder, *flags)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()
