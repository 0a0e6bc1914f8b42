"""`ttapca corrupt`, as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from ttapca.cli.app import run
from ttapca.corruptions import TEXTURE_FILES, corrupt


@pytest.fixture
def data(images, tmp_path) -> str:
    path = tmp_path / "data.npz"
    np.savez(path, images=images, labels=np.arange(12))
    return str(path)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_it_writes_the_layout_and_goes_on_with_what_is_missing(data, images, tmp_path, capsys):
    to = tmp_path / "out"
    words = ["corrupt", data, "--to", str(to), "--corruptions", "fog,pixelate", "--jobs", "1"]
    assert run(words) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(to)
    assert "0 of 2 files are there\n" in said.err
    assert "fog: done\npixelate: done" in said.err
    assert (np.load(to / "fog.npy")[24:36] == corrupt(images, "fog", 3)).all()
    assert run(words) == 0
    assert "2 of 2 files are there\n" in capsys.readouterr().err
    words[3:] = [
        str(tmp_path / "few"),
        *["--corruptions", "fog", "--jobs", "1", "--severities", "5", "--limit", "3"],
    ]
    assert run([*words, "--seed", "7"]) == 0
    found = np.load(tmp_path / "few" / "fog.npy")
    assert (found == corrupt(images[:3], "fog", 5, seed=7)).all()


def test_the_table_is_chosen_by_size_or_by_name_and_said(data, make_images, tmp_path, capsys):
    large = tmp_path / "large.npz"
    np.savez(large, images=make_images(2, 100, 100), labels=np.array([0, 500]))
    words = ["--corruptions", "contrast", "--jobs", "1", "--severities", "3"]
    for source, given, table, said in (
        (data, [], "cifar-c", "severities of cifar-c, the default for 32 x 32\n"),
        (str(large), [], "imagenet-c", "severities of imagenet-c, the default for 100 x 100"),
        (str(large), ["--table", "cifar-c"], "cifar-c", "severities of cifar-c, as asked"),
    ):
        to = tmp_path / f"{table}{len(given)}"
        assert run(["corrupt", source, "--to", str(to), *words, *given]) == 0
        assert said in capsys.readouterr().err
        assert json.loads((to / "corruptions.json").read_text())["table"] == table
        with np.load(source) as stored:
            expected = corrupt(stored["images"], "contrast", 3, table=table)
        assert (np.load(to / "contrast.npy") == expected).all()


def test_downloaded_photographs_of_frost_are_taken(data, images, textures, home, tmp_path):
    (home / "frost").mkdir(parents=True)
    for name, texture in zip(TEXTURE_FILES, textures, strict=True):
        Image.fromarray(texture).save(home / "frost" / name)
    to = tmp_path / "out"
    words = ["--corruptions", "frost", "--severities", "5", "--jobs", "1"]
    assert run(["corrupt", data, "--to", str(to), *words]) == 0
    expected = corrupt(images, "frost", 5, textures=home / "frost")
    assert (np.load(to / "frost.npy") == expected).all()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "Missing option '--to'"),
        (["--to", "{out}", "--corruptions", "fogg"], 2, "Did you mean `fog`"),
        (["--to", "{out}", "--corruptions", "standart"], 2, "Did you mean `standard`"),
        (["--to", "{out}", "--corruptions", ","], 2, "`corruptions` must be"),
        (["--to", "{out}", "--severities", "0-5"], 2, "`severities` must be"),
        (["--to", "{out}", "--severities", ""], 2, "`severities` must be"),
        (["--to", "{out}", "--severities", "3-1"], 2, "takes whole numbers, such as 1,3 or 0-2"),
        (["--to", "{out}", "--table", "imagenet"], 2, "Did you mean `imagenet-c`"),
        (["--to", "{out}", "--seed", "-1"], 2, "`seed` must be a whole number from 0 on"),
        (["--to", "{out}", "--jobs", "0"], 2, "--jobs"),
        (
            ["--to", "{out}", "--corruptions", "frost", "--table", "imagenet-c"],
            2,
            "`ttapca data get frost`",
        ),
        (["--to", "{file}/out", "--corruptions", "fog"], 1, "Cannot write to"),
    ],
)
def test_bad_calls_have_a_code_and_a_reason(data, tmp_path, capsys, words, code, message):
    given = [word.format(out=tmp_path / "out", file=data) for word in words]
    assert run(["corrupt", data, *given]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_with_130_and_whole_files(tmp_path, jobs):
    data, to = tmp_path / "data.npz", tmp_path / "out"
    np.savez(data, images=np.full((8000, 32, 32, 3), 90, np.uint8), labels=np.zeros(8000, int))
    script = tmp_path / "script.py"
    script.write_text("from ttapca.cli import main\nif __name__ == '__main__':\n    main()\n")
    words = ["corrupt", str(data), "--to", str(to), "--corruptions", "shot_noise", "--jobs", jobs]
    with subprocess.Popen(
        [sys.executable, str(script), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while not (to / ".shot_noise.npy.ttapca-unfinished-").exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, said = process.communicate(timeout=1200)  # on a busy machine
    assert process.returncode == 130
    assert "Traceback" not in said
    assert {each.name for each in to.iterdir()} == {"corruptions.json", "labels.npy"}
