"""A headless Chromium: what a page becomes in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

# runs before anything else of the page, so that no error is missed; the answer comes back in the document itself
_WATCH = """<script>
window.seen = {errors: [], requests: []};
addEventListener("error", (event) => seen.errors.push(String(event.message || event.target.outerHTML)), true);
addEventListener("securitypolicyviolation", (event) => seen.errors.push(String(event.blockedURI)));
</script>"""
_ASK = """<script>
addEventListener("load", () => {
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.answer = (%s)();
  const answer = document.createElement("pre");
  answer.id = "answer-of-the-test";
  answer.textContent = JSON.stringify(seen);
  document.body.append(answer);
});
</script>"""


def chromium() -> str:
    """The browser's command; without one the test is skipped, or fails where CI_CHROMIUM=1 says it must be there."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "Chromium is missing: install Debian's package `chromium`"
        if os.environ.get("CI_CHROMIUM") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


def ask(page: Path, script: str, *, dark: bool = False, width: int = 1280) -> dict[str, Any]:
    """Open a copy of the page, evaluate a JavaScript function in it: its answer, the errors, the requests, the log."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head>{_WATCH}", 1).replace("</body>", f"{_ASK % script}</body>", 1)
    copy = page.with_name(f"{page.stem}-asked.html")
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-extensions",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},1000",
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=2000",
            "--dump-dom",
            copy.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = re.search(r'<pre id="answer-of-the-test">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert answer, f"the page did not answer:\n{done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(unescape(answer[1]))
    seen["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return seen
