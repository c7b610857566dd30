"""A headless Chromium, driven over its debugging pipe: what a page logs, asks for, measures and looks like."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_INSTALL = "apt-get install -y --no-install-recommends chromium"
_PATIENCE_S = 60
_MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

# Text whose contrast with its background is below WCAG 2.2 AA: 4.5, and 3 for large text.
CONTRAST = """(() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return {c: [r, g, b], a}; };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, below) => top.c.map((v, i) => v * top.a + below[i] * (1 - top.a));
  const ground = (each) => {
    const layers = [];
    for (let at = each; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  let count = 0;
  for (const each of document.querySelectorAll("body *")) {
    const text = [...each.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!(text || each.matches("input, select")) || each.disabled || each.matches("option")) continue;
    if (!each.checkVisibility()) continue;
    const style = getComputedStyle(each), size = parseFloat(style.fontSize);
    const below = ground(each), ink = parse(each.closest("svg") ? style.fill : style.color);
    const [one, two] = [light(over(ink, below)), light(below)].sort((a, b) => b - a);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    count += 1;
    if ((one + 0.05) / (two + 0.05) < least) found.push(`${each.tagName} ${each.className}: ${text} ${ink.c} ${below}`);
  }
  return {count, found};
})()"""
_AXE = (files("axe_core_python") / "axe.min.js").read_text()
# What axe-core finds, of any impact: each as its rule and the element. Its file is run as the debugger's, which the
# page's own policy of scripts allows.
ACCESS = f"""(async () => {{
  {_AXE}
  const {{violations}} = await axe.run(document);
  return violations.flatMap((rule) => rule.nodes.map((node) => rule.id + ": " + node.html.slice(0, 120)));
}})()"""


class Opened(NamedTuple):
    messages: list[str]  # of the console, by the page or about it
    requests: list[str]  # but for the page itself
    scroll_width: int
    width: int
    background: str
    png: bytes  # empty if no picture was wanted
    value: Any  # of the script


def lacks_browser() -> str | None:
    return None if _program() else f"there is no Chromium here: {_INSTALL}"


def _program() -> str | None:
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


@contextmanager
def running_browser() -> Iterator["Browser"]:
    program = _program()
    assert program is not None, _INSTALL
    to_browser, from_browser = os.pipe(), os.pipe()
    switches = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
    )  # fmt: skip
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        argv = [program, *switches, "--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        # The browser expects its pipes as 3 and 4. No shell but bash redirects numbers of two digits.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "bash", *argv]
        ends = (to_browser[0], from_browser[1])
        process = subprocess.Popen(shell, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in ends:
            os.close(end)
        try:
            with os.fdopen(to_browser[1], "wb", 0) as writer, os.fdopen(from_browser[0], "rb", 0) as reader:
                yield Browser(writer, reader)
        finally:
            process.terminate()
            process.wait(timeout=20)


class Browser:
    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer, self._reader = writer, reader
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def open(
        self, page: Path | str, *, width: int, height: int | None = None, is_dark: bool = False,
        clip: str | None = None, until: str = "true", script: str = "null",
    ) -> Opened:  # fmt: skip
        """A file or an address at a width, in light or dark, and a picture if `height` or `clip`, a selector, is given.

        The page is looked at once `until` is true in it; `value` is that of `script`, a promise is waited for.
        """
        address = page if isinstance(page, str) else page.absolute().as_uri()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": height or 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        self._call("Page.navigate", session, url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        self._wait(session, until)
        facts = {
            "scroll_width": "document.documentElement.scrollWidth",
            "width": "window.innerWidth",
            "background": "getComputedStyle(document.body).backgroundColor",
            "value": script,
        }
        measured = {name: self._value(session, expression) for name, expression in facts.items()}
        png = self._picture(session, clip) if clip or height else b""
        messages = [json.dumps(event["params"]) for event in self._events if event["method"] in _MESSAGES]
        sent = [event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        self._call("Target.closeTarget", targetId=target)
        requests = [url for url in (each["request"]["url"] for each in sent) if url != address]
        return Opened(messages, requests, png=png, **measured)

    def _picture(self, session: str, clip: str | None) -> bytes:
        options: dict[str, Any] = {"format": "png"}
        if clip is not None:
            script = f"(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])({clip}.getBoundingClientRect())"
            box = self._value(session, f"JSON.stringify({script})")
            options["clip"] = {**dict(zip(("x", "y", "width", "height"), json.loads(box), strict=True)), "scale": 1}
            options["captureBeyondViewport"] = True
        return base64.b64decode(self._call("Page.captureScreenshot", session, **options)["data"])

    def _wait(self, session: str, until: str) -> None:
        """Also over a page that goes on to another one, where there is nothing to ask for a moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._value(session, f"!!({until})"):
            assert time.monotonic() < deadline, f"never true: {until}"
            time.sleep(0.02)

    def _value(self, session: str, script: str) -> Any:
        answer = self._call("Runtime.evaluate", session, expression=script, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            is_there, _, _ = select.select([self._reader], [], [], _PATIENCE_S)
            assert is_there, f"the browser sent nothing for {_PATIENCE_S} s"
            received = self._reader.read(1 << 16)
            assert received, "the browser has ended"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        if "method" in decoded:
            self._events.append(decoded)
        return decoded
