"""What the site needs beyond MkDocs itself; `mkdocs.yml` names this file, `make docs` runs it.

- Pages that live outside docs/, such as CHANGELOG.md, and files that pages link to there become
  part of the site. Links stay as they are on disk, so they work for readers of the repository too.
- Equations become MathML when the site is built: no program has to run, or be loaded, to show them.
- Each tutorial can be downloaded as a notebook.
- A built page that would load anything from another machine ends the build.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Where pages of the repository that are not in docs/ go in the site.
PAGES = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
}
ON_DISK = {site: disk for disk, site in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
CELL = re.compile(r"^```python[^\n]*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LOADS = re.compile(
    r"<(?:script|img|iframe|source|link\b[^>]*\brel=\"?(?:stylesheet|preload|preconnect|icon))\b"
    r"[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+"
)


def in_repository(page: str) -> PurePosixPath:
    """Return where a page of the site lies in the repository."""
    return PurePosixPath(ON_DISK.get(page, f"docs/{page}"))


def in_site(path: str) -> str:
    """Return where a file of the repository lies in the site.

    Example:
        >>> in_site("docs/health.md"), in_site("CHANGELOG.md"), in_site("deploy/Dockerfile")
        ('health.md', 'changelog.md', 'files/deploy/Dockerfile.txt')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # A server would offer a file without a known ending for download; text is shown.
    return PAGES.get(path, f"files/{path}.txt")


def linked(page: str, markdown: str) -> list[str]:
    """Return the files of the repository, outside docs/, that a page links to."""
    folder = in_repository(page).parent
    paths = [os.path.normpath(folder / match["path"]) for match in LINK.finditer(markdown)]
    return [path for path in paths if not path.startswith("docs/") and (ROOT / path).is_file()]


def relinked(page: str, markdown: str) -> str:
    """Return the page with its links as they are in the site."""
    folder = in_repository(page).parent
    here = PurePosixPath(page).parent

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match["path"])
        if not (ROOT / path).is_file():
            return match[0]  # MkDocs says that it does not exist
        return os.path.relpath(in_site(path), here) + (match["anchor"] or "")

    return LINK.sub(link, markdown)


def notebook(markdown: str) -> str:
    """Return a page as a Jupyter notebook: prose and programs in turn, without results."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(CELL.split(markdown)):  # every second part is a program
        kind = "code" if number % 2 else "markdown"
        if part.strip():
            extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
            source = part.strip().splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
            cells.append({**cell, **extra})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps({**content, "nbformat_minor": 5}, indent=1, ensure_ascii=False)


def is_tutorial(page: str) -> bool:
    """Whether a page can be downloaded as a notebook."""
    return page.startswith("tutorials/") and page.endswith(".md") and page != "tutorials/index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, files and notebooks that are not in docs/."""
    for disk, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / disk)))
    wanted: set[str] = set()
    for file in list(files.documentation_pages()):
        wanted.update(linked(file.src_uri, file.content_string))
        if is_tutorial(file.src_uri):
            name = file.src_uri.removesuffix(".md") + ".ipynb"
            files.append(File.generated(config, name, content=notebook(file.content_string)))
    for path in sorted(wanted - PAGES.keys()):
        files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links into the site, and offer tutorials as notebooks."""
    del config, files
    name = page.file.src_uri
    markdown = relinked(name, markdown)
    if is_tutorial(name):
        target = PurePosixPath(name).with_suffix(".ipynb").name
        markdown += f"\n\n[This page as a Jupyter notebook]({target}){{ download }}\n"
    return markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the equations of a page, which arithmatex has marked, into MathML."""
    del page, config, files

    def mathml(match: re.Match[str]) -> str:
        block = match["tag"] == "div"
        formula = html.unescape(match["formula"]).strip()[2:-2].strip()
        shown: str = convert(formula, display="block" if block else "inline")
        return shown

    marked = r'<(?P<tag>span|div) class="arithmatex">(?P<formula>.*?)</(?P=tag)>'
    return re.sub(marked, mathml, content, flags=re.DOTALL)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that needs other machines to be read."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        found = LOADS.search(page.read_text(encoding="utf-8"))
        if found:
            raise PluginError(
                f"A page loads nothing from other machines; {page} has `{found[0]}`. "
                "Put what it needs into docs/assets."
            )
