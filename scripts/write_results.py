"""Put the tables of docs/results.md in their places, from the files that scripts/results.sh fills.

    python scripts/write_results.py DIR

A table goes between `<!-- RUN SETTING -->` and `<!-- end -->`, `<!-- RUN paper SETTING -->` is the
comparison with the paper, and every result goes to docs/results/RUN.csv. Tables of runs that DIR
does not have stay as they are.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ttapca.benchmark import Results, Row
from ttapca.benchmark.exports import export, markdown
from ttapca.benchmark.paper_tables import paper_tables
from ttapca.benchmark.tables import error_tables

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(
    r"<!-- (?P<run>\w+) (?P<paper>paper )?(?P<setting>[\w.-]+) -->.*?<!-- end -->", re.S
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.sqlite")):
        with Results(path, readonly=True) as results:
            rows[path.stem] = results.rows()
        (DOCS / "results").mkdir(exist_ok=True)
        (DOCS / "results" / f"{path.stem}.csv").write_text(export(rows[path.stem], "csv"))
    page = DOCS / "results.md"
    page.write_text(PLACE.sub(lambda place: filled(place, rows), page.read_text()))


def filled(place: re.Match[str], rows: dict[str, list[Row]]) -> str:
    """The place with its tables."""
    run, setting = place["run"], place["setting"]
    if run not in rows:
        print(f"no results of `{run}`, so its table stays; scripts/results.sh DIR {run} makes them")
        return place[0]
    chosen = [row for row in rows[run] if row.cell.setting == setting]
    tables = paper_tables(chosen) if place["paper"] else error_tables(chosen)
    opening = place[0].partition("\n")[0].partition(" -->")[0] + " -->"
    return "\n\n".join([opening, *(markdown(table).strip() for table in tables), "<!-- end -->"])


if __name__ == "__main__":
    main()
