"""Put the tables of the results in their places, from the files that scripts/results.sh fills.

    python scripts/write_results.py DIR

On each page of PAGES a table goes between `<!-- RUN SETTING -->` and `<!-- end -->`; with `paper`
between the two words it is the comparison with the paper, and for `RUN settings` one table of all
settings. Every result goes to docs/results/RUN.csv, and for the runs of PER_IMAGE to RUN.json too,
with the images that were right. The runs of PICTURES are drawn. What DIR has no run for stays.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from itertools import repeat
from pathlib import Path

from ttapca.benchmark import Results, Row
from ttapca.benchmark.comparisons import comparisons
from ttapca.benchmark.figures import figures
from ttapca.benchmark.svg import file_svg
from ttapca.benchmark.tables import error_tables, export, markdown, paper_tables

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("results.md", "paper-results.md")
PER_IMAGE = ("ten",)
PICTURES = ("rank", "steps", "cost")  # runs that are drawn, each in the figure of its name
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
    for name in filter(rows.__contains__, PER_IMAGE):
        records = ",\n".join(json.dumps(row.record()) for row in rows[name])
        (DOCS / "results" / f"{name}.json").write_text(f"[{records}]\n")
    for name in filter(rows.__contains__, PICTURES):
        (drawn,) = (figure for figure in figures(rows[name]) if figure.name == name)
        (DOCS / "pictures" / f"{name}.svg").write_text(file_svg(drawn))
    for name in PAGES:
        page = DOCS / name
        page.write_text(PLACE.sub(lambda place: filled(place, rows), page.read_text()))


def filled(place: re.Match[str], rows: dict[str, list[Row]]) -> str:
    """The place with its tables."""
    run, setting = place["run"], place["setting"]
    if run not in rows:
        print(f"no results of `{run}`, so its table stays; scripts/results.sh DIR {run} makes them")
        return place[0]
    chosen = [row for row in rows[run] if row.cell.setting == setting]
    if setting == "settings":
        tables = [by_setting(rows[run])]
    else:
        found = paper_tables(chosen) if place["paper"] else error_tables(chosen)
        tables = [markdown(table).strip() for table in found]
    opening = place[0].partition("\n")[0].partition(" -->")[0] + " -->"
    return "\n\n".join([opening, *tables, "<!-- end -->"])


def by_setting(rows: list[Row]) -> str:
    """Mean errors, with those of clean images in brackets: a line for a method, a column a setting.

    Bold: not told apart from the lowest of the column. If it is not known which images were right,
    there are neither intervals nor bold numbers.
    """
    lines: dict[str, dict[str, str]] = {}
    for each in comparisons(rows):
        ranked = each.standings()
        for number, line in each.lines.dropna(subset="mean").iterrows():  # others failed
            mean = f"{line['mean']:.1f}"
            if number in ranked:
                mean += f" ±{line.spread:.1f}"
                mean = f"**{mean}**" if ranked[number].rank == 1 else mean
            found = lines.setdefault(f"`{line.label}`", {})
            clean = "" if math.isnan(line.clean) else f" ({line.clean:.1f})"
            found[f"`{each.conditions.setting}`"] = mean + clean
    settings = list(dict.fromkeys(setting for found in lines.values() for setting in found))
    table = [["method", *settings], [":--", *("--:" for _ in settings)]]
    table += [[label, *map(found.get, settings, repeat(""))] for label, found in lines.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


if __name__ == "__main__":
    main()
