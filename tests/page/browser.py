"""A window of the browser on the service's page, with what went wrong in it."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

Chromium = Any
"""playwright's Browser: the package is imported only where there is a Chromium."""

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_MS = 40_000


class Screen:
    """One page. `errors` holds what the console and scripts complained of."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.errors: list[str] = []
        page.set_default_timeout(DEADLINE_MS)
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, chromium: Chromium, base: str, width: int = 1280, height: int = 800, **options: object
    ) -> Iterator[Self]:
        """A window in a context of its own: nothing is kept from another."""
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        try:
            yield cls(context.new_page(), base)
        finally:
            context.close()

    def visit(self, run_id: str = "") -> None:
        """Open the page, at a run where one is named."""
        from urllib.parse import urlencode

        self.page.goto(f"{self.base}/{'#' + urlencode({'run': run_id}) if run_id else ''}")

    def at(self, selector: str) -> Any:
        """Return what the selector finds."""
        return self.page.locator(selector)

    def row(self, table: str, first: str) -> Any:
        """The row of a table's body that is headed so."""
        heading = self.page.get_by_role("rowheader", name=first, exact=True)
        return self.page.locator(f"{table} tr").filter(has=heading)

    def until(self, selector: str, text: object) -> None:
        """Wait until it reads so: a string for what it contains, a pattern for what it matches."""
        from playwright.sync_api import expect

        expect(self.at(selector)).to_contain_text(text, timeout=DEADLINE_MS)

    def until_shown(self, selector: str, *, shown: bool = True) -> None:
        """Wait until it is there to see, or is not."""
        self.at(selector).wait_for(state="visible" if shown else "hidden")

    def fits(self) -> bool:
        """Nothing is to be scrolled sideways."""
        fits: bool = self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        return fits

    def style(self, selector: str, name: str) -> str:
        """A computed style."""
        value: str = self.at(selector).evaluate("(node, name) => getComputedStyle(node)[name]", name)
        return value

    def focused(self) -> str:
        """The id of what has the keyboard, its class where it has none."""
        name: str = self.page.evaluate("document.activeElement.id || document.activeElement.className")
        return name
