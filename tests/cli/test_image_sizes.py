"""Images of another size than that of the fit, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ttapca.benchmark import Results
from ttapca.networks import build


@pytest.fixture
def words(place: Path, pictures) -> str:
    """A network that is known for 32 x 32 pixels, and pictures of 16."""
    network = build("resnet20", classes=2)
    network.bn1.running_mean += 0.1  # as if it were trained
    torch.save(network.state_dict(), place / "net.pth")
    for split in ("train", "test"):
        pictures(place / "both" / split, each=20, side=16)
    return "net.pth --normalise none --data both"


def test_cosines_take_every_size(words: str, command) -> None:
    told = command(f"fit {words} --size 12 --layer conv1 --route dct --to f", 1).err
    assert "3x32x32; found 3x12x12. Resize the images (pictures: --size N), say --any-size" in told
    words += " --any-size"
    command(f"fit {words} --size 12 --layer conv1 --route dct --to f")
    for size, method in ((12, "wiener"), (16, "wiener"), (10, "ttapca-relu")):
        given = f"eval {words} --size {size} --method {method} --filter f --batch-size 20 --json"
        assert json.loads(command(given).out)["images"] == 40
    compared = "--methods wiener --corruptions fog --settings online --batch-sizes 20 --filter f"
    for size in (10, 16):
        command(f"bench {words} --size {size} {compared} --to r.sqlite")
    with Results(Path("r.sqlite"), readonly=True) as results:
        rows, seen = results.rows(), results.observations()
    assert [(row.cell.data, row.outcome.status) for row in rows] == [
        ("both 10", "done"), ("both 16", "done")
    ]  # fmt: skip
    assert all("--any-size" in row.outcome.command for row in rows)
    assert [len(each.after) for each in seen] == [6, 6]  # pictures after the filter


def test_principal_components_are_refused_before_the_work_begins(words: str, command) -> None:
    words += " --any-size"
    command(f"fit {words} --size 8 --layer conv1 --route folded --components 9 --to f")
    found = r"(3, 8, 8); found (3, 12, 12). Resize the input, or fit a filter for this shape, or "
    found += "fit it with --route dct, whose cosines take images of any size."
    words += " --size 12"
    assert found in command(f"eval {words} --method wiener --filter f", 1).err
    compared = "--methods wiener,bn --corruptions fog --settings online --filter f --to r.sqlite"
    assert found in command(f"bench {words} {compared}", 1).err
    assert list(Path().glob("r.sqlite*")) == []


def test_what_has_no_other_size(place: Path, words: str, command) -> None:
    told = command("eval own:mean --data both --any-size", 2).err
    assert "--any-size has no meaning for `own:mean`: your own network is given images" in told
    torch.save(build("cct-2", classes=2).state_dict(), place / "cct.pth")
    told = command("eval cct.pth --normalise none --data both --any-size", 2).err
    assert "CompactTransformer takes those of 3x32x32 only. Resize the images" in told
