"""The report in a real browser. Without Chromium these tests skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmark.synthetic_rows import cell, everything, failed, observations, paper_grid, with_bits
from browsing import PATIENCE, contrast, luminance, needs_chromium
from ttapca.benchmark.report_page import report
from ttapca.benchmark.rows import CLEAN

pytestmark = needs_chromium

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report(everything(), observations()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def short_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all sections, each of them short."""
    path = tmp_path_factory.mktemp("page") / "short.html"
    names = ("fog", "snow", CLEAN)
    rows = [each for each in paper_grid() if each.cell.corruption in names]
    rows = [*with_bits(rows), failed(cell("bn", "frost", setting="online"))]
    path.write_text(report(rows, observations()), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Opener:
    """Open the page, and see at the end that it complained of nothing and asked for nothing."""

    @contextmanager
    def open_page(
        width: int = 1280, scheme: Literal["light", "dark"] = "light", file: Path = page_file
    ) -> Iterator[Any]:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, device_scale_factor=1
        )
        said: list[str] = []
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(file.as_uri())
        yield page
        context.close()
        assert [each for each in said if not each.startswith("data:")] == [file.as_uri()]

    return open_page


def column(page: Any, at: int, table: str = "#tables") -> list[str]:
    cells = page.locator(f"{table} table >> nth=0 >> tbody tr > :nth-child({at})")
    texts: list[str] = cells.all_inner_texts()
    return texts


@pytest.mark.parametrize("way", ["mouse", "keyboard"])
def test_tables_sort_both_ways(opened: Opener, way: str) -> None:
    with opened() as page:
        head = page.locator("#tables table >> nth=0 >> thead th >> nth=10")  # Frost: tent failed
        numbers = sorted((each for each in column(page, 11) if each != "failed"), key=float)
        assert len(numbers) == 4
        assert head.get_attribute("aria-sort") == "none"
        for order, expected in (("ascending", numbers), ("descending", numbers[::-1])):
            if way == "mouse":
                head.locator("button").click()
            else:
                head.locator("button").focus()
                page.keyboard.press("Enter")
            assert column(page, 11) == [*expected, "failed"]
            assert head.get_attribute("aria-sort") == order
        # Another column: only one is marked, and whole lines have moved.
        page.locator("#tables table >> nth=0 >> thead button >> nth=0").click()
        assert head.get_attribute("aria-sort") == "none"
        assert column(page, 1) == ["bn", "source", "tent", "ttapca-exp", "ttapca-relu"]
        assert column(page, 11)[2] == "failed"
        # Numbers sort as numbers.
        names = page.locator("#cost table >> nth=0 >> thead th")
        at = names.all_inner_texts().index("parameters")
        names.nth(at).locator("button").click()
        assert column(page, at + 1, "#cost") == ["0", "0", "1,376", "2,000", "2,000"]


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_nothing_is_cut_off(opened: Opener, width: int) -> None:
    with opened(width) as page:
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # What lies beyond the edge lies in a box of its own that scrolls.
        outside = page.evaluate(
            """width => [...document.querySelectorAll('body *')]
                .filter(each => !each.closest('.scroll, pre, svg'))
                .filter(each => each.getBoundingClientRect().right > width + 0.5)
                .map(each => each.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []
        for svg in page.locator(".figures svg").all():
            box = svg.bounding_box()
            assert box["width"] > 250
            assert box["height"] > 150
        # No word of a figure is cut off, in the font that the page has chosen.
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.figures svg')].flatMap(svg => {
                const frame = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1;
                }).map(text => text.textContent);
            })"""
        )
        assert cut == []


def test_the_first_column_stays_while_a_wide_table_scrolls(opened: Opener) -> None:
    with opened(360) as page:
        box = page.locator("#tables .scroll >> nth=0")
        first = box.locator("tbody th >> nth=0")
        left = first.bounding_box()["x"]
        box.evaluate("each => each.scrollTo(200, 0)")
        assert box.evaluate("each => each.scrollLeft") == 200
        assert first.bounding_box()["x"] == pytest.approx(left)
        assert box.locator("caption span").bounding_box()["x"] == pytest.approx(left)


COLOURS = """() => {
    const of = (query, what) => getComputedStyle(document.querySelector(query))[what];
    return {
        paper: of('body', 'backgroundColor'),
        text: ['body', '.note', 'td.best', 'td.failed', 'nav a', '.kicker', 'figcaption']
            .map(query => of(query, 'color')),
        figures: [of('.figures svg text', 'fill')],
        lines: [...document.querySelectorAll('.figures svg path')]
            .map(each => getComputedStyle(each).stroke).filter(each => each.startsWith('rgb')),
    };
}"""


def test_light_and_dark_can_both_be_read(opened: Opener) -> None:
    found = {}
    for scheme in ("light", "dark"):
        with opened(scheme=scheme) as page:
            found[scheme] = page.evaluate(COLOURS)
    assert found["light"]["paper"] != found["dark"]["paper"]
    assert luminance(found["dark"]["paper"]) < 0.05 < 0.8 < luminance(found["light"]["paper"])
    for colours in found.values():
        for colour in (*colours["text"], *colours["figures"]):
            assert contrast(colour, colours["paper"]) >= 4.5
        assert len(set(colours["lines"])) > 4
        for colour in set(colours["lines"]):
            assert contrast(colour, colours["paper"]) >= 3  # WCAG, for graphics


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_axe_finds_nothing(opened: Opener, short_page: Path, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed")
    with opened(width, scheme, short_page) as page:
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        page.evaluate(axe.AXE_SCRIPT)
        found = page.evaluate("axe.run({resultTypes: ['violations']})")
        assert len(found["passes"]) > 20  # it did look
        assert {
            (each["id"], each["impact"], node["html"][:120])
            for each in found["violations"]
            for node in each["nodes"]
        } == set()


def test_it_prints_whole(opened: Opener) -> None:
    with opened() as page:
        page.emulate_media(media="print")
        assert page.locator("nav").is_hidden()
        overflow = "getComputedStyle(document.querySelector('.scroll')).overflowX"
        assert page.evaluate(overflow) == "visible"
        assert page.pdf().startswith(b"%PDF")
