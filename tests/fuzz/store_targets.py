"""What the library itself writes and reads again: filters, networks, runs, results, plans."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

import ttapca
from fuzz.mutations import (
    ANY_FILE,
    Mutate,
    MutateBytes,
    Target,
    in_some_file,
    in_zip_member,
    mutate_bytes,
    mutate_json,
)
from oracles import group_norm_net, images, small_convnet
from ttapca import networks
from ttapca.benchmark import Cell, ImageSource, Observation, Outcome, Results, Row, Subject, expand
from ttapca.benchmark.plan import read_plan
from ttapca.benchmark.tables import FORMATS, export
from ttapca.corruptions import corrupt, load_table
from ttapca.corruptions.writing import check_manifest
from ttapca.datasets import Images
from ttapca.datasets.cifar import MANIFEST_FILE as MANIFEST
from ttapca.errors import CheckpointError, TtapcaError
from ttapca.fitting import store
from ttapca.networks.rotation import published_name
from ttapca.networks.runs import STATE, WEIGHTS, read_history
from ttapca.networks.weight_files import write_weights

SAVED = Path(__file__).parents[1] / "fitting" / "saved_filters"
SHAPE = (1, 8, 8)
SMALL = torch.zeros(2, *SHAPE)


def finite(tensors: dict[str, Tensor | None], what: str) -> None:
    """What was accepted may not hold NaN or infinity; an error here is a finding."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point():
            assert torch.isfinite(tensor).all(), f"accepted {what} whose {name} is not finite"


# Damage to safetensors ---------------------------------------------------------------------------


def split_safetensors(content: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def in_header(mutate: MutateBytes) -> MutateBytes:
    """Damage the JSON at the beginning of a safetensors file; its stated length stays right."""

    def damage(content: bytes, random: Random) -> bytes:
        header, body = split_safetensors(content)
        header = mutate(header, random)
        return struct.pack("<Q", len(header)) + header + body

    return damage


def in_metadata(name: str, mutate: MutateBytes) -> MutateBytes:
    """Damage one entry of a safetensors file's metadata."""

    def damage(content: bytes, random: Random) -> bytes:
        facts = json.loads(content)
        words = facts["__metadata__"]
        words[name] = mutate(words[name].encode(), random).decode("utf-8", "replace")
        return json.dumps(facts).encode()

    return in_header(damage)


def change_tensor(content: bytes, random: Random) -> bytes:
    """Give one tensor other values, another shape, another type or name, or take it away."""
    words = json.loads(split_safetensors(content)[0]).get("__metadata__")
    tensors = safetensors.torch.load(content)
    name = random.choice(sorted(tensors))
    tensors |= changed_tensor(name, tensors.pop(name), random)
    return safetensors.torch.save(tensors, words)


def changed_tensor(name: str, tensor: Tensor, random: Random) -> dict[str, Tensor]:
    types = (torch.float16, torch.int64, torch.uint8, torch.bool)
    shapes = ((-1,), (1, -1), (-1, 1), (1, 1, *tensor.shape))
    empty = ((0,), (0, 10**9), (10**9, 0), ())
    changed, place = tensor.clone(), random.randrange(tensor.numel() or 1)
    if changed.numel() and changed.dtype != torch.bool:
        with suppress(RuntimeError, OverflowError):  # whole numbers have no NaN
            values = (float("nan"), float("inf"), -1.0, 0.0, 1e30, 300.0)
            changed.view(-1)[place] = random.choice(values)
    return random.choice(
        (
            {},
            {f"{name}.other": tensor},
            {name: tensor.to(random.choice(types))},
            {name: tensor.reshape(random.choice(shapes)) if tensor.numel() else tensor},
            {name: tensor.new_zeros(random.choice(empty))},
            {name: tensor.flatten()[:place].clone()},
            {name: changed},
            {name: changed},
        )
    )


# Saved filters -----------------------------------------------------------------------------------


def copied_filter(kind: str, folder: Path) -> Path:
    return shutil.copytree(SAVED / kind, folder / "filter")


def read_filter(path: Path) -> None:
    fitted = ttapca.load(path)
    fields = {field.name: getattr(fitted, field.name) for field in dataclasses.fields(fitted)}
    fields |= fitted.group_norm_ | fitted.layer_norm_
    finite({name: t for name, t in fields.items() if isinstance(t, Tensor)}, "a filter")
    assert np.isfinite(fitted.total_variance_)
    repr(fitted)
    fitted.truncated(1)
    fitted.save(path.parent / "again")
    for gain in ("relu", "wiener") if fitted.energies_ is not None else ("relu",):
        filtered = fitted.spectral_filter(gain)(torch.rand(2, *fitted.shape))
        assert torch.isfinite(filtered).all()
    network = {"0": group_norm_net, "conv1": small_convnet, "bn2": small_convnet}.get(fitted.layer)
    if network is not None:
        adapted = network()
        with suppress(TtapcaError):  # it is of another network
            ttapca.attach(adapted, fitted, "relu")
            adapted(images(2))


def with_right_checksums(name: str, mutate: MutateBytes) -> Mutate:
    """Damage a file of a filter as an attacker would, who also corrects the checksums."""

    def damage(path: Path, random: Random) -> None:
        file = path / name
        file.write_bytes(mutate(file.read_bytes(), random))
        with suppress(ValueError, RecursionError, TypeError):
            config = json.loads((path / store.CONFIG).read_bytes())
            payload = (path / store.TENSORS).read_bytes()
            config["tensors_sha256"] = hashlib.sha256(payload).hexdigest()
            config["checksum"] = store._checksum(config)
            (path / store.CONFIG).write_text(json.dumps(config))

    return damage


FILTER_DAMAGE = (
    *ANY_FILE,
    *(with_right_checksums(store.CONFIG, mutate_json),) * 6,
    *(with_right_checksums(store.TENSORS, change_tensor),) * 8,
    *(with_right_checksums(store.TENSORS, mutate_bytes),) * 3,
    *(with_right_checksums(store.TENSORS, in_header(mutate_json)),) * 2,
)


# Networks ----------------------------------------------------------------------------------------

DESCRIPTION = {
    "architecture": "small-cnn",
    "classes": 10,
    "input_shape": list(SHAPE),
    "normalisation": {"mean": [0.3], "std": [0.4]},
    "rotation_split": "bn2",
    "class_names": [str(number) for number in range(10)],
    "data": {"name": "digits", "training_images": "0123"},
}


@cache
def twofold() -> networks.RotationNetwork:
    network = networks.build("small-cnn", input_shape=SHAPE)
    return networks.add_rotation_head(network, "bn2", torch.Generator().manual_seed(0), SHAPE)


def make_network(folder: Path) -> Path:
    tensors = {published_name(name): value for name, value in twofold().state_dict().items()}
    path = folder / "network.safetensors"
    write_weights(path, tensors, DESCRIPTION)
    return path


def read_network(path: Path) -> None:
    network = networks.load(path)
    finite(dict(network.state_dict()), "a network")
    assert network(torch.zeros(2, *network.input_shape)).shape[1] == network.classes
    finite(dict(networks.load_rotation(path).state_dict()), "a network")


NETWORK_DAMAGE = (
    *ANY_FILE,
    *(in_some_file(in_metadata("description", mutate_json)),) * 6,
    in_some_file(in_metadata("description", mutate_bytes)),
    *(in_some_file(in_header(mutate_json)),) * 3,
    *(in_some_file(change_tensor),) * 5,
)


def make_checkpoint(zipped: bool, folder: Path) -> Path:
    tensors = networks.build("small-cnn", input_shape=SHAPE).state_dict()
    content = {"state_dict": tensors, "epoch": 3, "best": 0.5} if zipped else tensors
    path = folder / "network.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def read_checkpoint(path: Path) -> None:
    """Torch asks for as much memory as a checkpoint says: that is refused, and no fault here."""
    refused = ""
    try:
        network = networks.load(path, normalisation="half", input_shape=SHAPE)
    except CheckpointError as error:
        refused = str(error)
    if refused:
        raise CheckpointError(refused)
    finite(dict(network.state_dict()), "a network")
    network(SMALL)


def change_state_dict(content: bytes, random: Random) -> bytes:
    """Change a tensor, or make of it a kind that is no plain tensor, and save with torch."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    tensors = state.get("state_dict", state)
    name = random.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: tensor.to_sparse(),
        lambda: tensor.to("meta"),
        lambda: tensor.to(torch.complex64),
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8),
        lambda: tensor.to(torch.float8_e4m3fn),
        lambda: tensor.flatten()[:1].expand(10**9),
        lambda: tensor.flatten()[:1].expand(10**15),
        lambda: nn.Parameter(tensor.float()),
        lambda: {"nested": {"deeper": tensor}},
        lambda: tensors,
        lambda: "text",
        lambda: 10**400,
    )
    if random.random() < 0.5:
        tensors.update(changed_tensor(name, tensor, random))
    else:
        tensors[random.choice((name, 3, "module." * 50 + name, ""))] = random.choice(kinds)()
    buffer = io.BytesIO()
    zipped = content[:2] == b"PK"
    with suppress(Exception):  # torch cannot save everything that it can make
        torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
        return buffer.getvalue()
    return content


LEGACY_DAMAGE = (*ANY_FILE, *(in_some_file(change_state_dict),) * 4)
ZIP_DAMAGE = (*LEGACY_DAMAGE, *(in_some_file(in_zip_member(mutate_bytes)),) * 6)


# Runs --------------------------------------------------------------------------------------------

OPTIONS = networks.TrainingOptions(
    epochs=2, batch_size=8, peak=0.01, padding=0, flip=False, average=0.5
)


@cache
def few_digits() -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 1), np.uint8)
    return Images(pixels, np.arange(16) % 10, tuple("0123456789"))


def train(folder: Path, on_epoch: Callable[[object], None] | None = None) -> None:
    network = networks.build("small-cnn", input_shape=SHAPE)
    networks.train(
        network, few_digits(), few_digits(), OPTIONS, folder,
        description={**DESCRIPTION, "rotation_split": None}, on_epoch=on_epoch,
    )  # fmt: skip
    finite(dict(network.state_dict()), "the state of a training run")


def make_run(folder: Path) -> Path:
    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train(folder / "run", stop)
    return folder / "run"


def read_run(path: Path) -> None:
    if not (path / STATE).exists():  # a run that begins anew
        return
    read_history(path)
    train(path)
    networks.load(path / WEIGHTS)


RUN_DAMAGE = (
    *(in_some_file(mutate_bytes, STATE),) * 2,
    in_some_file(in_header(mutate_json), STATE),
    *(in_some_file(in_metadata("facts", mutate_json), STATE),) * 5,
    *(in_some_file(change_tensor, STATE),) * 5,
)


# Results -----------------------------------------------------------------------------------------

CELL = Cell(
    "net", "0123456789abcdef", "digits", "generated, seed 0", "fog", 5, "online", "tent",
    '{"gain": "relu"}', "conv1", 40, 200, 1, 1e-3, 596, 0,
)  # fmt: skip
DONE = Outcome(
    "done", "", 12.5, 3.25, 0.3, (1 / 3, 2 / 3), (0.1, 0.7), 5, 1, 40, 0.5, 300.0,
    {"torch": "2"}, {"cpu": "fast"}, "2026-11-16T00:00:00+00:00", "ttapca bench 'a b'",
)  # fmt: skip
FAILED = dataclasses.replace(
    DONE, status="failed", reason="it broke", error=None, calibration_error=None, entropy=None,
    error_stream=(), entropy_stream=(),
)  # fmt: skip


def make_results(folder: Path) -> Path:
    path = folder / "results.sqlite"
    rows = [Row(dataclasses.replace(CELL, seed=seed), DONE) for seed in range(8)]
    rows += [Row(dataclasses.replace(CELL, method="bn", corruption="snow"), FAILED)]
    bits = dataclasses.replace(DONE, correct=b"\xff\xfc")  # two of sixteen are wrong
    rows += [Row(dataclasses.replace(CELL, images=16), bits)]
    seen = Observation(rows[0].cell, (3.0, 0.3), (2.0, 1.0), (1.0, 0.5), (b"\x89PNG",), (b"c",))
    with Results(path) as results:
        results.add(rows, [seen])
    return path


def make_results_with_log(folder: Path) -> Path:
    """As a run leaves it that was killed: with its last rows in the log beside it."""
    (folder / "first").mkdir()
    (folder / "killed").mkdir()
    with Results(make_results(folder / "first")) as results:
        results.add([Row(dataclasses.replace(CELL, seed=99), DONE)])
        for file in (folder / "first").glob("results.sqlite*"):
            shutil.copy(file, folder / "killed")
    shutil.rmtree(folder / "first")
    return folder / "killed"


def read_results(path: Path) -> None:
    if path.is_dir():
        path = path / "results.sqlite"
    with Results(path, readonly=True) as results:
        rows = results.rows()
        results.statuses()
        results.observations()
    for form in FORMATS:
        export(rows, form)
    with Results(path) as results:
        results.add([Row(dataclasses.replace(CELL, seed=1000), DONE)])


HOSTILE_VALUES = (
    "NULL", "-1", "0", "9e999", "-9e999", "1e300", "9223372036854775807", "'x'", "''", "'[1, 2'",
    "'[\"a\"]'", "'{}'", "'[NaN]'", "'[[[[1]]]]'", "'null'", "'{\"a\": {\"b\": 1}}'", "x'ff00'",
    "zeroblob(100000)", "hex(zeroblob(3000000))", "CAST(x'ff80' AS TEXT)", "'\U0001f600'",
    "replace(hex(zeroblob(20000)), '0', '[')", "'2026-13-45'", "char(0)",
)  # fmt: skip
HOSTILE_SCHEMAS = (
    "CREATE VIEW results_view AS SELECT * FROM results",
    "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END",
    "CREATE TABLE more (a)",
    "CREATE INDEX i ON results (abs(seed))",
    "ALTER TABLE results RENAME TO old; CREATE VIEW results AS WITH RECURSIVE c(x) AS (SELECT 1 "
    "UNION ALL SELECT x + 1 FROM c) SELECT x AS id, o.* FROM c, (SELECT * FROM old) o",
    "DROP TABLE pictures; CREATE VIEW pictures AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
    "SELECT x + 1 FROM c) SELECT x AS result, 'a' AS stage, 1 AS number, x'' AS png FROM c",
    "ALTER TABLE results DROP COLUMN machine",
    "ALTER TABLE results ADD COLUMN more TEXT DEFAULT 'x'",
    "DROP TABLE observations",
    "PRAGMA application_id = 7",
    "PRAGMA user_version = -7",
    "PRAGMA user_version = 1",
    "DROP TABLE labels; PRAGMA user_version = 2",  # which is a file of the second layout
    "DROP TABLE labels; DROP TABLE per_image; PRAGMA user_version = 1",  # and of the first
    "PRAGMA encoding = 'UTF-16'; VACUUM",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA page_size = 512; VACUUM",
)


def by_sql(path: Path, random: Random) -> None:
    """Change values or the schema, as an attacker with a valid file would."""
    file = path / "results.sqlite" if path.is_dir() else path
    connection = sqlite3.connect(file, isolation_level=None)
    with suppress(sqlite3.Error):
        if random.random() < 1 / 3:
            connection.executescript(random.choice(HOSTILE_SCHEMAS))
        else:
            table = random.choice(
                ("results",) * 3 + ("observations", "pictures", "per_image", "labels")
            )
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column, value = random.choice(columns), random.choice(HOSTILE_VALUES)
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = {value}")
    connection.close()


RESULTS_DAMAGE = (*ANY_FILE, *(by_sql,) * 12)


# Plans, tables and manifests ---------------------------------------------------------------------

PLAN = """\
model = "net.pth"
data = "digits"
methods = ["bn", "tent", "ttapca-relu", "wiener"]
method.bn.alpha = 0.3
method.tent = {logits = "after", steps = 2}
method.wiener = {memory = 100}
corruptions = ["fog", "clean"]
severities = [1, 5]
settings = ["episodic", "mixed"]
batch_sizes = [50]
seeds = [0, 1]
steps = [1]
lr = 0.001
components = [5]
layer = "conv1"
images = 50
corrupted = "folder"
corruption_seed = 0
"""
HOSTILE_TOML = (
    "nan", "inf", "-inf", "-1", "0", "1e308", "true", "'x'", "''", "[]", "{}", "[[]]", "[nan]",
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "9223372036854775808", "9" * 5000,
    "0x" + "f" * 20_000, "[" * 500 + "]" * 500, "[" * 10_000, "{a = {b = [1, {c = 2}]}}",
    "{a=" * 5000, "'" + "long " * 3000 + "'", "[1, 'two', [3]]", "[" + "1, " * 9000 + "]",
    "[" + ", ".join(map(str, range(5000))) + "]", "'\x7f'", '"\\ud800"', '"\\u0000"',
)  # fmt: skip


def mutate_toml(content: bytes, random: Random) -> bytes:
    """Give some keys another value, drop or double lines, put tables elsewhere."""
    lines = content.decode("utf-8", "replace").splitlines()
    for _ in range(random.randint(1, 3)):
        number = random.randrange(len(lines))
        line = lines[number]
        key, equals, _ = line.partition("=")
        other_key = random.choice(("", "unknown", key.upper()))
        values = [f"{key}= {random.choice(HOSTILE_TOML)}"] * 4 + [f"{other_key} = 1"]
        tables = ["a." * 3000 + "a = 1", "[" + "a." * 3000 + "a]", "[[a]]"]
        changes = ["", f"{line}\n{random.choice(lines)}", random.choice(tables)]
        lines[number] = random.choice(changes + values * bool(equals))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


TOML_DAMAGE = (*ANY_FILE, *(in_some_file(mutate_toml),) * 12)


def make_plan(folder: Path) -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN)
    return path


@cache
def subject() -> Subject:
    network = networks.build("small-cnn", input_shape=SHAPE).eval()
    noise = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    fitted = ttapca.fit(network, "conv1", noise, 10)
    return Subject("small", network, "digits", ImageSource(few_digits()), fitted)


def read_and_expand(path: Path) -> None:
    plan = read_plan(path)
    with suppress(TtapcaError):  # a plan may not fit what it is expanded for
        expand(plan, subject())


MANIFEST_OF = {
    "images": 5, "images_sha256": "ab" * 32, "labels_sha256": "cd" * 32, "severities": [1, 3, 5],
    "seed": 0, "table": "cifar-c", "table_sha256": "ef" * 32, "version": "1",
}  # fmt: skip


def make_manifest(folder: Path) -> Path:
    (folder / "set").mkdir()
    (folder / "set" / MANIFEST).write_text(json.dumps(MANIFEST_OF))
    return folder / "set"


def make_table(folder: Path) -> Path:
    source = Path(ttapca.__file__).parent / "corruptions" / "cifar_c.toml"
    return Path(shutil.copy(source, folder / "table.toml"))


def read_table(path: Path) -> None:
    table = load_table(path)
    few = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    textures = (np.zeros((64, 64, 3), np.uint8),) * 6
    for name in sorted(table.sections):
        with suppress(TtapcaError):  # some other benchmark
            corrupt(few, name, 3, table=table, textures=textures)


JSON_DAMAGE = (*ANY_FILE, *(in_some_file(mutate_json),) * 10)

TARGETS = [
    *(
        Target(f"filter-{kind}", partial(copied_filter, kind), read_filter, FILTER_DAMAGE)
        for kind in ("folded", "randomised", "dct")
    ),
    Target("network", make_network, read_network, NETWORK_DAMAGE),
    Target("checkpoint-zip", partial(make_checkpoint, True), read_checkpoint, ZIP_DAMAGE),
    Target("checkpoint-legacy", partial(make_checkpoint, False), read_checkpoint, LEGACY_DAMAGE),
    Target("training-run", make_run, read_run, RUN_DAMAGE),
    Target("results", make_results, read_results, RESULTS_DAMAGE),
    Target("results-with-log", make_results_with_log, read_results, RESULTS_DAMAGE),
    Target("plan", make_plan, read_and_expand, TOML_DAMAGE),
    Target("manifest", make_manifest, partial(check_manifest, now=MANIFEST_OF), JSON_DAMAGE),
    Target("corruption-table", make_table, read_table, TOML_DAMAGE),
]
