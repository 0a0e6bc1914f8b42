"""`ttapca serve` as a user meets it; `tests/serving` has the service itself."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

import ttapca
from ttapca import networks
from ttapca.benchmark import NetworkSource
from ttapca.cli.serve import picture_size, stated_names
from ttapca.datasets import TensorBatches, read_digits
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import OptionError
from ttapca.networks.external import HubNetwork
from ttapca.serving import StreamStore
from ttapca.serving.http_app import create_app
from ttapca.serving.service import Service

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")
SECRET = "a secret that is hard to guess"
Served = list[dict[str, Any]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Instead of serving, ask once what is served, and end as by SIGTERM."""
    found: Served = []

    def serve(service: Service, listening: socket.socket) -> int:
        async def ask() -> dict[str, Any]:
            transport = httpx.ASGITransport(create_app(service))
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as client:
                put = await client.put("/v1/streams/a", json={"mode": "shadow"})
                assert put.status_code in (200, 403)
                info: dict[str, Any] = (await client.get("/v1/info")).json()
                return info

        info = asyncio.run(ask())
        found.append({**info, "service": service, "address": listening.getsockname()})
        service.close()
        return signal.SIGTERM

    monkeypatch.setattr("ttapca.serving.http_server.serve", serve)
    return found


def test_from_nothing(
    served: Served, place: Path, monkeypatch: pytest.MonkeyPatch, command
) -> None:
    """The packaged network gets a filter that is fitted once, and its streams are kept."""
    told = command("serve digits --port 0 --state streams.sqlite --mode off")
    [first] = served
    host, port = first["address"]
    assert told.out == (
        f"http://{host}:{port}  serves digits with a filter at conv1, 60 components, folded\n"
        "  streams  0, kept in streams.sqlite\n"
        "  access   from this machine\n"
    )
    assert "fitting conv1" in told.err
    assert first["classes"] == list("0123456789")
    assert first["input_shape"] == [1, 8, 8]
    assert first["bands"][-1] == {"first": 32, "last": 60}
    assert first["service"].pool.mode == "off"
    assert first["service"].pool.closed
    [kept] = (place / "home" / "filters").iterdir()
    assert kept.name.startswith("digits-small-cnn-")

    monkeypatch.setattr(ttapca, "fit", lambda *_: pytest.fail("the filter was kept"))
    again = command("serve digits --port 0 --state streams.sqlite")
    assert "  streams  1, kept in streams.sqlite\n" in again.out
    assert served[1]["service"].pool.mode == "on"


def test_the_filter_that_ships(served: Served, monkeypatch: pytest.MonkeyPatch, command) -> None:
    """No data set, and no fit: a network whose filter ships is served at once."""
    monkeypatch.setattr(ttapca, "fit", lambda *_: pytest.fail("a filter ships"))
    told = command("serve cifar10-resnet20 --port 0")
    assert "with a filter at conv1, 3,072 components, dct\n" in told.out
    assert served[0]["classes"][0] == "airplane"


def test_ctrl_c_ends_as_other_commands_do(
    monkeypatch: pytest.MonkeyPatch, filter_of_digits: Path, command
) -> None:
    monkeypatch.setattr("ttapca.serving.http_server.serve", lambda *_: signal.SIGINT)
    told = command(f"serve digits --filter {filter_of_digits} --port 0", 130)
    assert told.err == "interrupted\n"
    assert "not kept: --state FILE keeps them" in told.out


def test_tokens_limits_and_names(
    served: Served, place: Path, filter_of_digits: Path, command
) -> None:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    (place / "t.toml").write_text(
        f'[[token]]\nname = "me"\nhash = "sha256:{digest}"\nrights = ["read"]\n'
    )
    told = command(
        f"serve digits --filter {filter_of_digits} --port 0 --host 0.0.0.0 --tokens t.toml "
        "--max-images 3 --max-body 500 --max-pixels 99 --timeout 2 --max-batch 7 "
        "--max-wait 0 --max-queue 9 --max-streams 5 --max-resident 4 --shorter-side 12 "
        "--max-memory 123456 --outputs multilabel"
    )
    assert "access   with the tokens of me" in told.out
    assert SECRET not in told.out + told.err
    [found] = served
    service: Service = found["service"]
    limits = service.limits
    assert (limits.max_images, limits.max_body, limits.max_pixels) == (3, 500, 99)
    assert limits.answer_seconds == 2
    pool = service.pool.limits
    assert (pool.max_batch, pool.max_wait, pool.max_queue) == (7, 0, 9)
    assert (pool.max_streams, pool.max_resident, pool.max_images) == (5, 4, 3)
    assert pool.max_memory == 123_456
    assert service.decoder.size is not None
    assert service.decoder.size.shorter_side == 12
    assert service.pool._network._adapter.predictor.outputs.found == "multilabel"


def test_a_network_of_ones_own(served: Served, weights: Path, place: Path, command) -> None:
    network = f"own:flat --weights {weights}"
    refused = command(f"serve {network} --port 0", 2).err
    assert f"Fit one with `ttapca fit own:flat --weights {weights} --data DATA" in refused
    command(f"fit {network} --data digits --layer 1 --components 20 --to f")
    asked = command(f"serve {network} --filter f --port 0", 2).err
    assert "--input CxHxW" in asked
    command(f"serve {network} --filter f --port 0 --input 1x8x8")
    [found] = served
    assert found["classes"] == []
    assert found["input_shape"] == [1, 8, 8]
    assert found["model"] == "own:flat"


def test_the_command_that_fits_a_filter_can_be_copied(served: Served, command) -> None:
    torch.save(networks.build("wrn-10-1").state_dict(), "my net.pth")
    words = "'my net.pth' --architecture wrn-10-1 --any-size --normalise none"
    refused = command(f"serve {words} --port 0", 2).err
    assert f"Fit one with `ttapca fit {words} --data DATA --to my-filter`" in refused
    assert served == []


def test_a_network_from_a_hub_says_its_size_and_its_classes() -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    normalisation, shape = networks.Normalisation((0.0,), (1.0,)), (3, 8, 8)
    network = HubNetwork(inner, 2, normalisation, shape, PictureSize(8, 12), ("cat", "dog"))
    assert stated_names(NetworkSource("hf:cats"), network) == ("cat", "dog")
    assert picture_size(network, shape, None) == PictureSize(8, 12)  # as its files say
    assert picture_size(network, shape, 20) == PictureSize(8, 20)
    said = "take square pictures, of which the centre is cut out; this one takes 3 x 8"
    with pytest.raises(OptionError, match=said):
        picture_size(network, (3, 8, 9), 20)


def test_a_port_in_use_is_said(served: Served, filter_of_digits: Path, command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = command(f"serve digits --filter {filter_of_digits} --port {port}", 2).err
    assert f"cannot listen at 127.0.0.1, port {port}" in said


def test_a_file_of_something_else_keeps_no_streams(
    served: Served, place: Path, filter_of_digits: Path, command
) -> None:
    (place / "s.sqlite").write_text("hello, this is no database, but text of some length " * 50)
    said = command(f"serve digits --filter {filter_of_digits} --port 0 --state s.sqlite", 1).err
    assert "s.sqlite is no file of streams" in said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_a_pipe_keeps_no_streams(place: Path, command) -> None:
    os.mkfifo(place / "pipe")
    said = command("serve digits --port 0 --state pipe", 2).err
    assert "must be a plain file" in said


def test_a_file_of_another_filter_is_refused_at_the_start(
    served: Served, place: Path, filter_of_digits: Path, command
) -> None:
    network = networks.load("digits-small-cnn")
    ttapca.fit(network, "conv1", TensorBatches(read_digits("test"), 250), 20).save(place / "g")
    command(f"serve digits --filter {filter_of_digits} --port 0 --state s.sqlite")
    said = command("serve digits --filter g --port 0 --state s.sqlite", 1).err
    assert "s.sqlite keeps others" in said
    assert len(served) == 1


def test_options_of_the_call_go_before_the_environment_and_the_file(
    served: Served,
    place: Path,
    filter_of_digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    command,
) -> None:
    (place / "s.toml").write_text(
        f'model = "digits"\nfilter = "{filter_of_digits}"\nport = 0\nmax-batch = 7\n'
        'max-queue = 70\nmax-wait = 0.5\nmode = "shadow"\nlog-json = true\n'
    )

    def found(words: str = "serve --config s.toml") -> tuple[Any, ...]:
        command(words)
        pool = served[-1]["service"].pool
        limits = pool.limits
        return served[-1]["model"], pool.mode, limits.max_batch, limits.max_queue, limits.max_wait

    assert found() == ("digits", "shadow", 7, 70, 0.5)
    monkeypatch.setenv("TTAPCA_SERVE_MAX_BATCH", "8")
    monkeypatch.setenv("TTAPCA_SERVE_MODE", "off")
    monkeypatch.setenv("TTAPCA_SERVE_MAX_QUEUE", "")  # as if it was not set
    assert found() == ("digits", "off", 8, 70, 0.5)
    assert found("serve --config s.toml --mode on") == ("digits", "on", 8, 70, 0.5)
    monkeypatch.setenv("TTAPCA_SERVE_CONFIG", "s.toml")
    assert found("serve --max-batch 9")[2:4] == (9, 70)
    monkeypatch.setenv("TTAPCA_SERVE_MODEL", "none")
    assert found("serve digits")[0] == found("serve --model digits")[0] == "digits"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('prot = 1\nmodel = "digits"', "Did you mean `port`?"),
        ("port = [1]", "must be text, a number, true or false"),
        ("port =", "is not readable TOML"),
        ("port = 99999", "--port"),
        ("config = 'other.toml'", "no names but"),
    ],
)
def test_a_file_with_a_mistake(content: str, said: str, place: Path, command) -> None:
    (place / "s.toml").write_text(content)
    assert said in command("serve --config s.toml --check", 2).err


def test_check_opens_everything_and_serves_nothing(
    served: Served, place: Path, filter_of_digits: Path, command
) -> None:
    words = f"serve digits --filter {filter_of_digits} --port 0 --state s.sqlite"
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a service may be running
        told = command(f"{words} --check --port {taken.getsockname()[1]}")
    assert told.out.startswith("all is well  serves digits with a filter at conv1")
    assert served == []
    assert not (place / "s.sqlite").exists()
    command(words)

    def kept() -> bytes | None:
        with StreamStore(place / "s.sqlite") as store:
            return store.read("a")

    before = kept()
    assert "  streams  1, kept in s.sqlite\n" in command(f"{words} --check").out
    assert kept() == before is not None
    assert len(served) == 1


def test_check_finds_what_is_wrong(
    served: Served, place: Path, filter_of_digits: Path, weights: Path, command
) -> None:
    words = f"serve digits --filter {filter_of_digits} --check"
    (place / "s.sqlite").write_text("no database, but text of some length " * 50)
    assert "is no file of streams" in command(f"{words} --state s.sqlite", 1).err
    (place / "t.toml").write_text("[[token]]")
    assert "t.toml" in command(f"{words} --tokens t.toml", 2).err
    assert "needs a file" in command(f"{words} --save-every 5", 2).err
    command(f"fit own:flat --weights {weights} --data digits --layer 1 --components 20 --to f")
    own = f"serve own:flat --weights {weights} --filter f --check --input"
    assert "all is well" in command(f"{own} 1x8x8").out
    assert "found (81,)" in command(f"{own} 1x9x9", 1).err
    assert served == []
