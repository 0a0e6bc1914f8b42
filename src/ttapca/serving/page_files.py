"""The files of the live page, read once: no address of a request ever becomes a path."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from importlib import resources

INDEX = "index.html"
PLAIN = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>ttapca serve</title>
<p>The service runs. What it offers is in <a href="openapi.json">openapi.json</a>.</p></html>
"""
# The table of the system may say otherwise, and browsers run no script of another type.
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


@dataclass(frozen=True)
class PageFile:
    """One file of the page, and what it is."""

    content: bytes
    media_type: str


def page_files() -> dict[str, PageFile]:
    """Return the files of the page by name.

    Example:
        >>> page_files()["index.html"].media_type
        'text/html'
    """
    folder = resources.files("ttapca.serving") / "page"
    found = {INDEX: PageFile(PLAIN, TYPES[".html"])}  # for a copy without the page
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.is_file():
            suffix = "." + file.name.rpartition(".")[2]
            guessed = mimetypes.guess_type(file.name, strict=True)[0]
            kind = TYPES.get(suffix) or guessed or "application/octet-stream"
            found[file.name] = PageFile(file.read_bytes(), kind)
    colours = resources.files("ttapca.support") / "page_colours.css"  # those of the report
    found[colours.name] = PageFile(colours.read_bytes(), TYPES[".css"])
    return found
