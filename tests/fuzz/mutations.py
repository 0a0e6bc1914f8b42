"""Ways to damage a file. A `random.Random` decides: a seed gives the same damage anywhere."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Mutate = Callable[[Path, Random], None]  # damages a file, or something in a folder, in place
MutateBytes = Callable[[bytes, Random], bytes]

EXTREMES = (0, 1, -1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
EXTREMES += (2**64 - 1, 10**6, 10**9, 10**12)
EDGE = 512  # bytes at both ends of a file, where formats keep what they say about the rest
MOST_STEPS = 4


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """One to four random changes, half of them near the beginning or the end."""
    for _ in range(random.randint(1, MOST_STEPS)):
        content = random.choice(_STEPS)(content, random)
    return content


def _place(content: bytes, random: Random) -> int:
    size = len(content)
    where = random.random()
    if where < 0.35:
        return random.randint(0, min(size, EDGE))
    if where < 0.5:
        return random.randint(max(0, size - EDGE), size)
    return random.randint(0, size)


def _slice(content: bytes, random: Random) -> tuple[int, int]:
    start = _place(content, random)
    return start, min(len(content), start + random.choice((1, 2, 4, 16, 100, 1000)))


def _overwrite(content: bytes, start: int, part: bytes) -> bytes:
    return content[:start] + part + content[start + len(part) :]


def _flip_bit(content: bytes, random: Random) -> bytes:
    if not content:
        return content
    place = min(_place(content, random), len(content) - 1)
    return _overwrite(content, place, bytes([content[place] ^ (1 << random.randrange(8))]))


def _change_byte(content: bytes, random: Random) -> bytes:
    return _overwrite(content, _place(content, random), random.randbytes(1))


def _noise(content: bytes, random: Random) -> bytes:
    return _overwrite(content, _place(content, random), random.randbytes(random.randint(1, 16)))


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: _place(content, random)]


def _insert(content: bytes, random: Random) -> bytes:
    place = _place(content, random)
    part = random.choice((random.randbytes(random.randint(1, 20)), bytes(random.randint(1, 600))))
    return content[:place] + part + content[place:]


def _delete(content: bytes, random: Random) -> bytes:
    start, stop = _slice(content, random)
    return content[:start] + content[stop:]


def _duplicate(content: bytes, random: Random) -> bytes:
    start, stop = _slice(content, random)
    place = _place(content, random)
    return content[:place] + content[start:stop] + content[place:]


def _repeat(content: bytes, random: Random) -> bytes:
    start, stop = _slice(content, random)
    return content[:stop] + content[start:stop] * random.choice((2, 50, 1000)) + content[stop:]


def _extreme_number(content: bytes, random: Random) -> bytes:
    size = random.choice((1, 2, 4, 8))
    number = random.choice(EXTREMES) % (1 << 8 * size)
    part = number.to_bytes(size, random.choice(("little", "big")))
    return _overwrite(content, _place(content, random), part)


def _extreme_digits(content: bytes, random: Random) -> bytes:
    """Change a number that is written in digits, with or without a change of the length."""
    found = list(re.finditer(rb"[0-9]+", content[:20_000]))
    if not found:
        return content
    start, stop = random.choice(found).span()
    digits = str(random.choice(EXTREMES)).encode()
    if random.random() < 0.5:
        digits = digits[: stop - start].rjust(stop - start, b"0")
    return content[:start] + digits + content[stop:]


_STEPS: tuple[MutateBytes, ...] = (
    _flip_bit,
    _change_byte,
    _noise,
    _truncate,
    _insert,
    _delete,
    _duplicate,
    _repeat,
    _extreme_number,
    _extreme_digits,
)


# JSON -------------------------------------------------------------------------------------------

HOSTILE_JSON = (
    "null",
    "true",
    "-1",
    "0",
    "0.5",
    "1e999",
    "-1e999",
    "1e-400",
    "NaN",
    "Infinity",
    "-Infinity",
    str(2**31),
    str(2**63),
    str(10**6),
    str(10**12),
    "9" * 5000,
    '""',
    '"x"',
    '"' + "long " * 20_000 + '"',
    '"\\ud800"',
    '"../../escape"',
    '"\\u0000"',
    "[]",
    "{}",
    "[[]]",
    '{"a": {"b": [1, "two", null]}}',
    "[" + "1000000," * 50 + "1]",
    "[" * 500 + "]" * 500,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
)
_VALUE, _KEY = "\N{SNOWMAN}value", "\N{SNOWMAN}key"


def mutate_json(content: bytes, random: Random) -> bytes:
    """Change what a JSON text says: types, sizes, nesting, missing keys. It stays JSON.

    Text that is no JSON is damaged as bytes.
    """
    try:
        tree = json.loads(content)
    except ValueError:
        return mutate_bytes(content, random)
    for _ in range(random.randint(1, 2)):
        holder, key = random.choice(_places([tree]))
        tree = _change_node(tree, holder, key, random)
    text = json.dumps(tree, ensure_ascii=False)
    text = text.replace(json.dumps(_VALUE, ensure_ascii=False), random.choice(HOSTILE_JSON))
    return text.encode("utf-8", "surrogatepass")


def _change_node(tree: Any, holder: Any, key: Any, random: Random) -> Any:
    how = random.choice(("replace", "replace", "replace", "drop", "wrap", "rename", "repeat"))
    root = [tree]
    if holder[key] is tree and isinstance(holder, list):
        holder = root
    if how == "drop" and holder is not root:
        del holder[key]
    elif how == "wrap":
        holder[key] = random.choice(([holder[key]], {"a": holder[key]}))
    elif how == "rename" and isinstance(holder, dict):
        holder[random.choice(("", "unknown", "__class__", key.upper()))] = holder.pop(key)
    elif how == "repeat" and isinstance(holder[key], list):
        holder[key] = holder[key] * random.choice((0, 2, 300))
    else:
        holder[key] = _VALUE
    return root[0]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a tree, as the container that holds it and its key there."""
    found, open_ends = [], [tree]
    while open_ends:
        holder = open_ends.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                open_ends.append(holder[key])
    return found


def double_key(content: bytes, random: Random) -> bytes:
    """Give one key of a JSON object twice, the second time with a hostile value."""
    try:
        tree = json.loads(content)
    except ValueError:
        return content
    if not isinstance(tree, dict) or not tree:
        return content
    key = random.choice(sorted(tree))
    tree[_KEY] = _VALUE
    text = json.dumps(tree, ensure_ascii=False)
    text = text.replace(json.dumps(_KEY, ensure_ascii=False), json.dumps(key))
    text = text.replace(json.dumps(_VALUE, ensure_ascii=False), random.choice(HOSTILE_JSON))
    return text.encode("utf-8", "surrogatepass")


# Files, folders and archives ---------------------------------------------------------------------


def files_in(path: Path, pattern: str = "*") -> list[Path]:
    """The files that a target consists of, in an order that is the same everywhere."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob(pattern) if each.is_file())


def in_some_file(mutate: MutateBytes, pattern: str = "*") -> Mutate:
    """Damage one of the files, chosen at random."""

    def damage(path: Path, random: Random) -> None:
        chosen = random.choice(files_in(path, pattern))
        chosen.write_bytes(mutate(chosen.read_bytes(), random))

    return damage


def splice_files(path: Path, random: Random) -> None:
    """Go on in one file with the end of another, or of itself."""
    files = files_in(path)
    head, tail = random.choice(files), random.choice(files)
    start, stop = head.read_bytes(), tail.read_bytes()
    head.write_bytes(start[: _place(start, random)] + stop[_place(stop, random) :])


def lose_file(path: Path, random: Random) -> None:
    """Empty one of the files, or take it away where there are others."""
    files = files_in(path)
    chosen = random.choice(files)
    if len(files) > 1 and random.random() < 0.5:
        chosen.unlink()
    else:
        chosen.write_bytes(b"")


def in_zip_member(mutate: MutateBytes) -> MutateBytes:
    """Damage one member of a zip and write the archive anew, so that its checksums are right."""

    def damage(content: bytes, random: Random) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = [(each, archive.read(each)) for each in archive.infolist()]
        except (zipfile.BadZipFile, NotImplementedError):  # damaged before
            return mutate(content, random)
        chosen = random.randrange(len(members))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for number, (info, data) in enumerate(members):
                archive.writestr(info, mutate(data, random) if number == chosen else data)
        return buffer.getvalue()

    return damage


def in_tar_member(mutate: MutateBytes) -> MutateBytes:
    """Damage one member of a plain tar and write the archive anew, its checksums right."""

    def damage(content: bytes, random: Random) -> bytes:
        buffer = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(content)) as archive,
            tarfile.open(fileobj=buffer, mode="w") as other,
        ):
            members = archive.getmembers()
            chosen = random.randrange(len(members))
            for number, member in enumerate(members):
                file = archive.extractfile(member)
                data = file.read() if file is not None else b""
                data = mutate(data, random) if number == chosen else data
                member.size = len(data)
                other.addfile(member, io.BytesIO(data))
        return buffer.getvalue()

    return damage


ANY_FILE: tuple[Mutate, ...] = (
    *(in_some_file(mutate_bytes),) * 6,  # most of the damage
    splice_files,
    lose_file,
)
