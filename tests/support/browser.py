"""Debian's Chromium, driven by Playwright, which downloads no browser here; and axe, for what keeps people out."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import pytest
from playwright.async_api import Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Debian's chromium is not installed: apt-get install chromium"
)
WIDE, NARROW = (1280, 900), (390, 844)
# Of axe: those of less impact are advice.
_SERIOUS = ("serious", "critical")
_WAIT_MS = 60_000
# The gateway's refusals are what a test asks for; an element may belong to no page any more.
_EXPECTED = re.compile(r"Failed to load resource")


@dataclass
class Opened:
    """A page, and what its scripts complained about: failures, and all that the policy has refused."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def go(self, state: str) -> None:
        """To a state of the console, as a link leads there: ``topics/dc1.nginx?sort=-size``."""
        await self.page.evaluate("state => { location.hash = `#/${state}`; }", state)

    async def axe(self) -> list[str]:
        """What axe finds that is serious, as ``rule: selector``. Not as a script of the page: its policy forbids it."""
        source = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        await self.page.evaluate(source)
        found: dict[str, Any] = await self.page.evaluate("() => axe.run()")
        return [
            f"{violation['id']}: {node['target']} {node['failureSummary']}"
            for violation in found["violations"]
            if violation["impact"] in _SERIOUS
            for node in violation["nodes"]
        ]


@asynccontextmanager
async def chromium(
    url: str,
    token: str | None = None,
    size: tuple[int, int] = WIDE,
    scheme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Opened]:
    """The console of a worker, with the token entered. Ends the browser, and fails where the scripts complained."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            width, height = size
            context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = await context.new_page()
            expect.set_options(timeout=_WAIT_MS)
            page.set_default_timeout(_WAIT_MS)
            opened = Opened(page)
            page.on("pageerror", lambda error: opened.complaints.append(str(error)))
            page.on(
                "console",
                lambda said: (
                    opened.complaints.append(said.text)
                    if said.type == "error" and not _EXPECTED.search(said.text)
                    else None
                ),
            )
            await page.goto(f"{url}/console/")
            if token is not None:
                await page.get_by_label("Token").fill(token)
                await page.get_by_role("button", name="Open").click()
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            yield opened
            assert opened.complaints == []
        finally:
            await browser.close()
