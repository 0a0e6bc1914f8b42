"""Write the tables of README.md, and the plots, from the JSON files.

    python benchmarks/report.py [--from benchmarks/results]

Only what stands between `<!-- results -->` and `<!-- end of results -->` is replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measuring
from measuring import Goal, Result, Table
from run import BENCHMARKS

HERE = Path(__file__).parent
README = HERE / "README.md"
PICTURES = HERE.parent / "docs" / "pictures"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Found = dict[str, tuple[Result, dict[str, Any]]]


def machine_line(facts: dict[str, Any]) -> str:
    """Where and when, and how busy the machine was."""
    machine = facts["machine"]
    clock = machine.get("clock", "perf_counter")
    clock = "" if clock == "perf_counter" else f" by {clock}"
    return (
        f"*{machine['cores']} cores of an {machine['processor']}, {machine['threads']} threads, "
        f"{machine['memory']}, torch {machine['torch']}, Python {machine['python']}; "
        f"{facts['date'][:16].replace('T', ' ')} UTC, load before {facts['load_before']:.1f}, "
        f"took {facts['seconds']:.0f} s{clock}.*"
    )


def section(result: Result, facts: dict[str, Any]) -> str:
    """One benchmark."""
    parts = [f"## {result.title}", result.text]
    parts += [table.markdown() for table in result.tables]
    return "\n\n".join([*parts, machine_line(facts)])


def all_goals(found: Found) -> str:
    """Every goal in one table."""
    goals: list[Goal] = [goal for result, _ in found.values() for goal in result.goals]
    missed = sum(not goal.reached for goal in goals)
    title = f"{len(goals) - missed} of {len(goals)} goals are reached."
    return Table(title, ["what", "measured", "goal", ""], [goal.row() for goal in goals]).markdown()


def replace(path: Path, text: str) -> None:
    """Put text between the two marks of a file."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path} must hold `{BEGIN}` and `{END}`, in this order.")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def draw_growth(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds of the fits over samples, outputs and components, one panel each."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ttapca"  # the same bytes for the same numbers
    from matplotlib import pyplot as plt

    panels = (
        ("samples", "samples N (p = 1,024, L = 128)", {"p": 1024, "components": 128}),
        ("p", "outputs p (N = 5,000, L = 128)", {"samples": 5000, "components": 128}),
        ("components", "components L (N = 5,000, p = 16,384)", {"samples": 5000, "p": 16384}),
    )
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, (key, label, fixed) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
        for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
            line = sorted((row[key], row["seconds"]) for row in chosen if row["way"] == way)
            if line:
                axis.plot(
                    *zip(*line, strict=True), "o-", color=f"C{number}", label=way, markersize=4
                )
        axis.set(xscale="log", yscale="log", xlabel=label)
        sizes = sorted({row[key] for row in chosen})
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds")
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    axes[0].legend(handles.values(), handles.keys(), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="folder", type=Path, default=measuring.RESULTS)
    folder = parser.parse_args().folder
    paths = {name: folder / f"{name}.json" for name in BENCHMARKS}
    found: Found = {name: measuring.read(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise SystemExit(f"{folder} holds no results; run benchmarks/run.py first.")
    if "fit" in found:
        draw_growth(found["fit"][0].numbers["rows"], PICTURES / "fit-growth.svg")
    sections = [section(*each) for each in found.values()]
    replace(README, "\n\n".join([all_goals(found), *sections]))


if __name__ == "__main__":
    main()
