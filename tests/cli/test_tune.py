"""`ttapca tune` as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ttapca.benchmark import Results

SMALL = "--images 40 --batch-sizes 20 --conditions fog:4,spatter:5 --to t.sqlite"


def test_from_nothing_to_options(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = f"tune digits bn --option prior=0..4000:3 {SMALL}"
    told = command(words)
    assert "tune: the last 40 of 1,201 samples of `digits, training images`\n" in told.err
    assert "tune: 12 measurements to make, 480 samples\n" in told.err
    assert "fog 4  online  bn  batch 20  prior=2000.0  error " in told.err
    lines = [re.findall(r"[\w.]+", line) for line in told.out.splitlines() if "│" in line]
    assert {line[0] for line in lines} == {"0", "2000", "4000", "source"}
    means = [float(line[1]) for line in lines[:-1]]
    assert means == sorted(means)
    facts = json.loads(command(f"{words} --json").out)
    best = facts["best"]["prior"]
    assert f"bench:  --option bn.prior={best}\n" in told.out
    assert f'Python: ttapca.adapt(model, "bn", prior={best})\n' in told.out
    assert "12 measurements of 3 trials and the source; 2 conditions x 40 training" in told.out
    assert [f"{one['mean']:.2f}" for one in facts["trials"]] == [line[1] for line in lines[:-1]]
    assert facts["trials"][0]["errors"].keys() == {"fog:4", "spatter:5"}

    again = command(words)
    assert "tune: 0 measurements to make, 0 samples; 12 runs were finished before\n" in again.err
    assert again.out == told.out
    with Results("t.sqlite", readonly=True) as results:
        rows = results.rows()
    for row in (rows[0], rows[-1]):  # the source in fog, and options on clean images
        Path("u.sqlite").unlink(missing_ok=True)
        same = row.outcome.command.replace("t.sqlite", "u.sqlite")
        command(shlex.join(shlex.split(same)[1:]))
        with Results("u.sqlite", readonly=True) as results:
            found = {other.cell: other.outcome.error for other in results.rows()}
        assert found[row.cell] == row.outcome.error


def test_the_method_alone_where_an_option_names_the_network(command) -> None:
    told = command(f"tune bn --model digits --option prior=0,16 {SMALL} --json")
    assert json.loads(told.out)["method"] == "bn"


def test_a_failure_is_told(command) -> None:
    words = f"tune digits shot --option classifier=nowhere,fc {SMALL}"
    told = command(words, 1)
    assert "failed" in told.out
    assert "bench:  --option 'shot.classifier=\"fc\"'" in told.out
    assert told.err.endswith("tune: 1 trial failed; --retry-failed repeats what failed\n")
