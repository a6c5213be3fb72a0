"""A headless browser with one page, driven from Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.server import node_packages


class Browser:
    """A page of a Chromium. One thread may use it, in a `with` block.

    A call raises RuntimeError with the driver's message when it fails, or takes two minutes.
    """

    def __init__(self) -> None:
        """Installs the browser if need be, and starts it."""
        folder = node_packages.installed()
        self._process = subprocess.Popen(
            [
                node_packages.node_path(),
                str(node_packages.SOURCES / "browser.mjs"),
                str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Browser:
        """Returns the browser."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise

    def open(self, url: str, **options: Any) -> None:
        """Opens an address as a visitor who comes for the first time.

        Args:
            url: The address.
            **options: Of Playwright's `newContext`: viewport, colorScheme, deviceScaleFactor.
        """
        self._call("open", url, options)

    def click(self, selector: str) -> None:
        """Clicks on an element, as soon as it can be clicked on."""
        self._call("click", selector)

    def fill(self, selector: str, text: str) -> None:
        """Writes a text into a field, instead of what it held."""
        self._call("fill", selector, text)

    def select(self, selector: str, value: str) -> None:
        """Chooses an option."""
        self._call("select", selector, value)

    def press(self, key: str) -> None:
        """Presses a key, for example `Tab`."""
        self._call("press", key)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return self._call("text", selector)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        return self._call("evaluate", expression)

    def wait_for(self, expression: str) -> None:
        """Waits until an expression of JavaScript is true."""
        self._call("waitFor", expression)

    def screenshot(self, path: Path, **options: Any) -> None:
        """Writes a picture of the page; options are those of Playwright."""
        self._call("screenshot", str(path), options)

    def problems(self) -> list[str]:
        """Errors and warnings of the console, and exceptions, since the last call."""
        return self._call("problems")

    def skip(self, seconds: float) -> None:
        """Advances the page's clock; timers that are due by then run once."""
        self._call("skip", round(1000 * seconds))

    def _call(self, name: str, *args: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, *args]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the browser ended with status {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name}{args}: {answer['error']}")
        return answer["value"]
