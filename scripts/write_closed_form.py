"""Put the tables of docs/closed-form-evidence.md in their places, from what was measured.

    python scripts/write_closed_form.py

A table goes between `<!-- NAME -->` and `<!-- end -->`; the numbers come from scripts/results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "closed-form-evidence.md"
PLACE = re.compile(r"<!-- (?P<name>[\w-]+) -->.*?<!-- end -->", re.S)
Errors = dict[str, dict[str, float]]

# A heading, and the rows below it; a name on the page where it differs from that in the file.
ABLATION = {
    "": {"source": "untouched network", "bn": "`bn`", "wiener": "**`wiener`**"},
    "parts": {
        "filter alone": "filter, source statistics",
        "statistics alone": "mixed statistics, gains of 1",
        "filter, batch statistics": "filter, statistics of the batch",
        "filter, even mixture 0.3": "filter, 0.3 of the batch in every layer",
    },
    "exponents (shrink, restore)": {
        "exponents (1, 0)": "(1, 0), Wiener's filter alone",
        "exponents (1, 1/2)": "(1, 1/2)",
        "exponents (1/2, 1/2)": "(1/2, 1/2), matching",
    },
    "components": {
        "components 50": "50",
        "components 500": "500",
        "components 1000": "1,000",
        "wiener": "2,000",
        "all": "all 3,072",
    },
    "under a gradient": {
        "tent online": "`tent`, online",
        "tent online over wiener": "`tent` over `wiener`, online",
    },
}
SIZES = (200, 64, 16, 4)


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(PLACE.sub(lambda place: filled(place["name"]), page))


def filled(name: str) -> str:
    """A place with its table."""
    made = {"ablation": ablation, "sizes": sizes}[name]()
    return f"<!-- {name} -->\n\n{made}\n\n<!-- end -->"


def read(name: str) -> dict[str, Errors]:
    found: dict[str, Errors] = json.loads((HERE / "results" / name).read_text())
    return found


def only(name: str, start: str) -> Errors:
    """What a file has of the network whose name starts so."""
    return next(rows for key, rows in read(name).items() if key.startswith(start))


def mean(errors: dict[str, float]) -> float:
    chosen = [error for name, error in errors.items() if name != "clean"]
    return sum(chosen) / len(chosen)


def ablation() -> str:
    rows = only("ablation.json", "own,") | {"all": only("ablation-all.json", "own,")["wiener"]}
    lines = ["| | mean of 15 | clean |", "|---|--:|--:|"]
    for heading, members in ABLATION.items():
        if heading:
            lines.append(f"| *{heading}* | | |")
        for name, shown in members.items():
            errors = rows[name]
            lines.append(f"| {shown} | {mean(errors):.1f} | {errors['clean']:.1f} |")
    return "\n".join(lines)


def sizes() -> str:
    rows = only("ablation.json", "own,")
    head = ["| batch |", *(f" {size} |" for size in SIZES)]
    lines = ["".join(head), "|---|" + "--:|" * len(SIZES)]
    for shown, stem in (
        ("`wiener`, episodic", "wiener"),
        ("`wiener`, online", "wiener online"),
        ("`bn`", "bn"),
    ):
        found = [rows[stem if size == SIZES[0] else f"{stem}, batch {size}"] for size in SIZES]
        cells = " | ".join(f"{mean(each):.1f} ({each['clean']:.1f})" for each in found)
        lines.append(f"| {shown} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
