"""The documentation as a site: what `make docs` adds to the pages, and the site that it built."""

from __future__ import annotations

import functools
import json
import re
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browsing import CHROMIUM, PATIENCE, needs_chromium

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package, reason="comes with the extra docs")
    return runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))


def test_links_out_of_docs_lead_into_the_site(hooks: dict[str, Any]) -> None:
    relinked = hooks["relinked"]
    assert relinked("health.md", "[a](../benchmarks/README.md#x)") == "[a](benchmarks.md#x)"
    assert relinked("start/camera.md", "[a](../data.md)") == "[a](../data.md)"
    assert relinked("changelog.md", "[a](docs/data.md#y)") == "[a](data.md#y)"
    assert relinked("production.md", "[a](../deploy/Dockerfile)") == (
        "[a](files/deploy/Dockerfile.txt)"
    )
    for link in ("[a](#here)", "[a](https://example.org/x.md)", "[a](missing.md)"):
        assert relinked("data.md", link) == link


def test_a_page_becomes_a_notebook(hooks: dict[str, Any]) -> None:
    page = '# Title\n\n```python exec="on"\na = 1\nprint(a)\n```\n\nEnd.\n'
    cells = json.loads(hooks["notebook"](page))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]
    assert "".join(cells[1]["source"]) == "a = 1\nprint(a)"
    assert len({cell["id"] for cell in cells}) == 3


def test_equations_become_mathml(hooks: dict[str, Any]) -> None:
    given = r'<p>Let <span class="arithmatex">\(a &lt; b\)</span> be.</p>'
    found = hooks["on_page_content"](given, None, None, None)
    assert found.startswith("<p>Let <math")
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in found


def test_a_page_that_loads_from_elsewhere_is_found(hooks: dict[str, Any]) -> None:
    loads = hooks["LOADS"]
    assert loads.search('<script src="https://example.org/a.js"></script>')
    assert loads.search('<link rel="stylesheet" href="//example.org/a.css">')
    assert not loads.search('<a href="https://example.org">elsewhere</a>')
    assert not loads.search('<script src="assets/a.js"></script>')


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_equations_are_whole(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert text.count("$$") % 2 == 0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@needs_chromium
def test_the_site_works_from_a_folder_without_a_network() -> None:
    """Every page fits a phone and loads only files; the search finds a page."""
    if not (SITE / "index.html").is_file():
        pytest.skip("no site/ here; `make docs` builds it")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    left_out = ("404.html", "decisions")  # which links to the server's root; prose alone
    pages = [page for page in SITE.rglob("*.html") if not {*page.parts} & {*left_out}]
    assert len(pages) > 30
    elsewhere: list[str] = []
    lost: list[str] = []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        page = browser.new_page(viewport={"width": 390, "height": 900}, offline=True)
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda asked: elsewhere.append(asked.url))
        page.on("requestfailed", lambda asked: lost.append(f"{asked.failure} {asked.url}"))
        wide = []
        for file in pages:
            page.goto(file.as_uri(), wait_until="domcontentloaded")
            if page.evaluate("document.documentElement.scrollWidth") > 390:
                wide.append(file.name)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.context.set_offline(False)  # the search asks a server for its index
        with served(SITE) as url:
            page.goto(f"{url}/index.html")
            page.get_by_role("textbox", name="Search").fill("jpeg artefacts")
            # They come one after the other, some of them below the edge of the list.
            page.wait_for_selector(
                ".md-search-result__link[href*='when-not.html']", state="attached"
            )
        browser.close()
    assert wide == []
    here = ("file:", "data:", "blob:", "http://127.0.0.1:")
    assert [asked for asked in elsewhere if not asked.startswith(here)] == []
    # Others are icons that were still on their way when the next page was opened. The search looks
    # for a copy of its index that only pages without a server would need.
    missing = [each for each in lost if "FILE_NOT_FOUND" in each]
    assert [each for each in missing if not each.endswith("/search/search_index.js")] == []
