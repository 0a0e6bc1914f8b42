"""Calls that make no sense: each gets a reason and an exit code, and leaves nothing behind."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli.conftest import cifar_c
from ttapca.datasets import load
from ttapca.networks import build

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")

# By how the call begins: how it goes on, the exit code, and a part of what is said.
CALLS = {
    "eval": [
        ("wrn.pth --data digits --normalise none", 1, "of shape 3x32x32; found 1x8x8"),
        ("cut.pth --data digits --normalise none", 1, "it was cut short"),
        ("wrn.pth --data digits", 2, r"State it: --normalise NAME \(none, half"),
        ("wrn.pth --data digits --mean 0.5", 2, "or both --mean and --std"),
        ("wrn.pth --data digits --mean a --std 1", 2, "takes numbers with commas"),
        ("wrn.pth --data digits --normalise hal", 2, "Did you mean `half`"),
        ("wrn.pth --data digits --architecture resnet20 --normalise none", 1, "`wrn-10-1`"),
        ("wrn.pth --data digit --normalise none", 2, "Did you mean `digits`"),
        ("wrn.pth --data digits --weights wrn.pth", 2, "--weights FILE has no meaning for"),
        ("--data digits", 2, "Name one network, as MODEL or with --model; found neither"),
        ("wrn.pth --model a:b --data digits", 2, "found both"),
        ("resnet20 --data digits", 2, "is an architecture, which has no weights"),
        ("nothing.pth --data digits", 2, "neither a packaged network nor a file"),
        ("torch.nn:Identity --data digits", 2, "one logit for each of the 10 classes"),
        ("torch.nn:Identity --data digits --eps 0.1", 2, "--eps has no meaning"),
        ("own:flat --weights log.csv --data digits", 1, "log.csv is not a whole"),
        ("own:flat --weights none.pth --data digits", 2, "(?s)--weights.*does not.*exist"),
        ("own:one --outputs regression --data images", 2,
         "must be one of multiclass, binary, multilabel;"),
        ("own:one --outputs multiclass --data images", 1,
         "--outputs multiclass needs two logits or more"),
        ("own:classes --outputs multilabel --method shot --data images", 2,
         "found --outputs multilabel. Choose a method that serves"),
        ("digits --data digits --method tent --option lr=1 --option lr=2", 2,
         "`lr` is given twice; the first of the two would be lost."),
    ],
    "eval {own}": [
        ("--data digits --method tnt", 2, "There is no method `tnt`"),
        ("--data digits --method ttapca-relu", 2, "`ttapca fit` and name it: --filter"),
        ("--data digits --method tent --option lrr=1", 2, "Did you mean `lr`"),
        ("--data digits --method tent --option lr", 2, "--option takes NAME=VALUE"),
        ("--data digits --method tent --option filter=true", 2, "give --filter instead"),
        ("--data digits --option forgetting=online", 2, "give --forgetting instead"),
        ("--data digits --option outputs=binary", 2, "give --outputs instead"),
        ("--data digits --option method=bn", 2, "give --method instead"),
        ("--data digits --method ttt", 2, "`ttapca train --rotation-head LAYER` wrote"),
        ("--data digits --forgetting never", 2, "episodic"),
        ("--data digits --filter nowhere", 2, "(?s)--filter.*does not.*exist"),
        ("--data mixed", 1, "have one size; .* Give --size N to resize them"),
        ("--data empty", 1, "has no known layout"),
        ("--data digits --batch-size 0", 2, "--batch-size"),
        ("--data digits --severity 9", 2, "--severity"),
        ("--data digits --severity 3", 2, "CIFAR-C layout only; .* `ttapca corrupt`"),
        ("--data digits --size 8", 2, "--size N and --shorter-side N are for folders"),
        ("--data cifarc", 2, "give --corruption NAME and --severity N"),
        ("--data cifarc/fog.npy --corruption snow --severity 5", 2, "with `fog`; asked"),
        ("--data cifarc --corruption fogg --severity 5", 2, "Did you mean `fog`"),
    ],
    "fit": [
        ("{own} --data cifar10 --to f", 2, "ttapca data get cifar10"),
        ("{own} --data corrupted --to f", 2, "CIFAR-C has a test split only"),
        ("{own} --data digits --to f --layer 9", 2, "no layer `9`"),
        ("{own} --data digits --to f --components 90", 2, "found --components 90. Ask for"),
        ("{own} --data digits --to f --limit 20", 2, "on at least 32 samples"),
        ("{own} --data digits --to log.csv", 2, "`log.csv` holds something else"),
        ("{own} --data digits --to f --dtype int8", 2, "`dtype` must be one of"),
        ("{own} --data small --layer 1 --to f", 1, "it does not.* with --size N"),
        ("torch.nn:Identity --data digits --to f", 2, "name one with --layer"),
        ("own:one --to f --outputs two --data images", 2,
         "one of multiclass, binary, multilabel, regression"),
        ("own:classes --to f --outputs binary --data images", 1,
         "--outputs binary needs one logit"),
    ],
    "layers": [
        ("resnet20 --weights wrn.pth", 2, "--weights FILE has no meaning for `resnet20`"),
        ("resnet20 --architecture wrn-10-1", 2, "--architecture has no meaning for"),
        ("resnet20 --input 3y32", 2, "a shape such as 3x32x32; found `3y32`"),
        ("nothing_here:make", 2, "no module `nothing_here`"),
        ("own:conv --input 32x32", 2, "Name it with --input CxHxW"),
        ("own:needy", 1, "has failed: TypeError: needy.* It is called without arguments"),
        ("own:raising", 1, "has failed: KeyError: 'gone' .*line "),
    ],
    "train digits": [
        ("--to f", 2, "one network: .* found neither"),
        ("small-cnn --model a:b --to f", 2, "found both"),
        ("small-cn --to f", 2, "Did you mean `small-cnn`"),
        ("small-cnn --schedule linear --to f", 2, "one of cosine, one-cycle; found"),
        ("small-cnn --epochs 0 --to f", 2, "`epochs` must be a whole number from 1"),
        ("small-cnn --batch-size 5000 --to f", 2, "one batch of 5000 images"),
        ("small-cnn --rotation-head conv9 --to f", 2, "no layer `conv9`"),
        ("small-cnn --start none.pth --to f", 2, "a packaged network nor a file"),
        ("resnet20 --start wrn.pth --to f", 1, "do not fit .*: missing .* `wrn-10-1`"),
        ("small-cnn --to f --warmup 3", 2, "--warmup would .* --schedule cosine"),
        ("small-cnn --to f --rotation 5", 2, "--rotation would .* --rotation-head LAYER"),
    ],
    "train": [
        ("none small-cnn --to f", 2, "neither a data set nor a path"),
    ],
    "corrupt": [
        ("none.npz --to f", 2, "is neither a data set nor a path"),
        ("torn.npz --to f", 1, "is not a plain `.npz` archive"),
    ],
    "export": [
        ("none.sqlite", 2, "no file of results at none.sqlite"),
    ],
    "bench digits --data digits": [
        ("--preset paper-tabel1", 2, "found `paper-tabel1`. Did you mean `paper-table1`"),
        ("--preset paper-table1 --plan x.toml", 2, "Give --plan FILE or --preset NAME"),
        ("--plan none.toml", 2, "Cannot read the plan none.toml"),
        ("--option tent", 2, "--option takes METHOD.NAME=VALUE"),
        ("--methods bn --option tent.lr=1", 2, "would have no effect: the methods .* are bn."),
        ("--methods source --corrupted none", 2, "in none. There are: none"),
        ("--methods ttt", 1, "rotation"),
        ("--corruptions fogg", 2, "Did you mean `fog`"),
        ("--route quick", 2,
         "`route` must be one of auto, pca, folded, exact, gram, randomised, dct"),
        ("--route dct --methods bn", 2, "--route NAME would have no effect: none of the methods"),
        ("--filter home --methods bn", 2, "--filter DIR would have no effect: none of the methods"),
        ("--route dct --filter home", 2, "--route NAME would have no effect: .* --filter DIR"),
        ("--outputs binary --methods source", 1, "--outputs binary needs one logit"),
        ("--seeds a", 2, "--seeds takes whole numbers, such as 1,3 or 0-2; found `a`"),
        ("--seeds 0-99999999999", 2, "--seeds takes at most 10,000 numbers"),
        ("--settings offline", 2, "must be one of episodic, episodic-sorted, online"),
        ("--images 1000000", 2, "has 596 test samples; asked for are 1,000,000"),
        ("--to foreign.sqlite", 1, "is another database"),
        ("--to none/r.sqlite", 2, "there is no .*none"),
        ("--to home", 2, "--to names a file; home is a folder"),
    ],
    "reproduce": [
        ("cifar100", 2, "No network for `cifar100` ships with ttapca"),
        ("digits nothing", 2, "`nothing` is neither a packaged network nor a file"),
        ("digits digits --quick", 2, "has 596 test samples; asked for are 1,000"),
    ],
    "tune": [
        ("digits", 2, "MODEL METHOD; found no method"),
    ],
    "tune digits": [
        ("tent", 2, "at least one option to choose; found none"),
        ("source --option lr=1", 2, "`source` has none that are plain values"),
        ("tent --option lr", 2, "--option takes NAME=V,V | NAME=LOW..HIGH[:log][:POINTS]"),
        ("tent --option tent.lr=1", 2, "`tent` has no option `tent.lr`"),
        ("tent --option lr=a..b", 2, "in numbers; found `a..b`"),
        ("tent --option lr=-1..1", 2, "must be a finite number above 0; found -1"),
        ("tent --option lr=1 --conditions fog:5", 2, "is; found fog:5. Take a severity below"),
        ("tent --option lr=1 --split test", 2, "`digits` has 1,201, and the test images were"),
        ("tent --option lr=1 --split all", 2, "`split` must be one of train, test"),
        ("tent --option lr=1 --trials 4", 2, "--trials N would have no effect"),
        ("tent --option lr=1 --settings mixed", 2, "the setting mixed, which joins them"),
        ("bn --option prior=0,16 --components 5", 2, "--components would have no effect"),
        ("tent --option lr=1,2 --option steps=1 --option lr=3", 2,
         "`lr` is given twice; the first of the two would be lost."),
    ],
    "feed": [
        ("nowhere:port --data digits", 2, "A server has an address"),
        ("--data nothing", 2, "`nothing` is neither a data set nor a path"),
        ("--data digits --schedule often", 2, "A schedule has conditions"),
        ("--data digits --schedule 'fog 1s' --schedule 'fog 1s'", 2, "at most one --schedule"),
        ("--data digits --stagger 5s", 2, "--stagger has no effect on one stream"),
        ("--data digits --wait soon", 2, "--wait takes a duration"),
        ("--data digits --rate 0", 2, "`rate`"),
        ("--data digits --order backwards", 2, "`order`"),
    ],
    "fit digits --layer conv1 --components 30 --to f --data": [
        ("part-*.npy --limit 10", 2, "--limit is for data that are read as a whole"),
        ("part-*.npy --in .", 2, "--in is for data that are read as a whole"),
        ("part-*.npy --size 8", 2, "--size N is for pictures in folders and tar files"),
        ("'part-9*.npy'", 2, r"Shards must exist; there is no part-9\*.npy"),
        ("digits --jobs 2", 2, "--jobs and --engine read shards, such as --data"),
        ("digits --jobs 2 --engine joblib:2", 2, "--jobs N, for processes of this machine, or"),
        ("part-*.npy --jobs 2 --route gram", 2, "Leave out --jobs and --engine, fit at a layer"),
    ],
    "serve digits": [
        ("--host 0.0.0.0", 2, "listens on this machine only, .* found --host 0.0.0.0"),
        ("--host example.invalid", 2, "--tokens FILE"),
        ("--save-every 5", 2, "--save-every needs a file"),
        ("--state no/s.sqlite", 2, "--state names a file in a folder that exists"),
        ("--tokens none.toml", 2, "none.toml cannot be read"),
        ("--mode of", 2, "^error: `mode` must be one of off, shadow, auto, on"),
        ("--timeout 0 --filter kept", 2, "`answer_seconds` must be"),
        ("--max-pixels 60000000 --filter kept", 2, "`max_pixels` must be"),
        ("--filter kept --input x", 2, "--input takes a shape"),
        ("--filter kept --outputs binary", 2, "found --outputs binary for one with 10"),
    ],
    "serve": [
        ("cifar10-cct2", 2, "they are not there: .*ttapca data get cifar10"),
        ("", 2, "Name one network"),
    ],
    "bench digits": [
        ("--methods bn --components 5", 2, "--components would .* methods has a filter"),
        ("--methods bn --steps 5", 2, "--steps would have no effect: no method learns"),
        ("--methods bn --lr 5", 2, "--lr would have no effect: no method learns"),
        ("--methods tent --lr 5 --option tent.lr=1", 2, "--lr would .* its own, tent.lr"),
        ("--corrupted c --corruption-seed 5", 2, r"--corruption-seed would .* from c\."),
        ("--corrupted c --table imagenet-c", 2, r"--table would .* from c\."),
        ("--table imagenet", 2, "A table is one of cifar-c, imagenet-c.*Did you mean `imagenet-c`"),
        ("--dry-run --json", 2, "--json would have no effect: a dry run measures nothi"),
        ("--option tent.lr=1 --option tent.lr=2", 2,
         "`tent.lr` is given twice; the first of the two would be lost."),
    ],
    "figure": [
        ("r.sqlite --to x.svg", 2, "--to FILE is for one figure; found no NAME"),
    ],
}  # fmt: skip


@pytest.fixture
def world(
    weights: Path, place: Path, pictures, filter_of_digits: Path, monkeypatch
) -> dict[str, str]:
    """All that the calls name."""
    torch.save({"state_dict": build("wrn-10-1").state_dict()}, place / "wrn.pth")
    (place / "cut.pth").write_bytes((place / "wrn.pth").read_bytes()[:5000])
    (place / "log.csv").write_text("epoch,loss\n1,2.0\n")
    (place / "torn.npz").write_bytes(b"PK")
    for name in ("empty", "home"):
        (place / name).mkdir()
    with sqlite3.connect("foreign.sqlite") as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    cifar_c(place / "corrupted")
    cifar_c(place / "cifarc", images=np.zeros((50000, 1, 1, 3), np.uint8))
    pictures(place / "images", each=20)
    pictures(place / "mixed", each=2)
    Image.new("RGB", (9, 8)).save(place / "mixed" / "dark" / "000.png")
    pictures(place / "small", each=20)
    for number, some in enumerate(np.array_split(load("digits", "train").images, 3)):
        np.save(f"part-{number}.npy", some)
    monkeypatch.setattr("ttapca.serving.http_server.serve", lambda *_: pytest.fail("it serves"))
    return {"own": f"own:flat --weights {weights}"}


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(f"{start} {words}", *told) for start, calls in CALLS.items() for words, *told in calls],
)
def test_a_mistake_has_a_reason_and_a_code(
    words: str, code: int, message: str, world: dict[str, str], place: Path, command
) -> None:
    before = files(place)
    said = command(words.replace("{own}", world["own"]), code)
    assert message in said.err or re.search(message, said.err), said.err
    assert said.out == ""
    assert "prepare=" not in said.err
    assert files(place) == before
