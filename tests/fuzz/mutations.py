"""What is fuzzed, and ways to damage a file. A seed gives the same damage on every machine."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Mutate = Callable[[Path, Random], None]  # damages a file, or something in a folder, in place
MutateBytes = Callable[[bytes, Random], bytes]

EXTREMES = (0, 1, -1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
EXTREMES += (2**64 - 1, 10**6, 10**9, 10**12)
EDGE = 512  # bytes at both ends of a file, where formats describe the rest


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """Make one to four random changes, half of them near the beginning or the end."""
    for _ in range(random.randint(1, 4)):
        content = random.choice(_STEPS)(content, random)
    return content


def _place(content: bytes, random: Random) -> int:
    size, where = len(content), random.random()
    if where < 0.35:
        return random.randint(0, min(size, EDGE))
    if where < 0.5:
        return random.randint(max(0, size - EDGE), size)
    return random.randint(0, size)


def _part(content: bytes, random: Random) -> bytes:
    start = _place(content, random)
    return content[start : start + random.choice((1, 2, 4, 16, 100, 1000))]


def _overwrite(content: bytes, random: Random) -> bytes:
    """Put noise, or a number that is extreme in some format, over what is there."""
    size = random.choice((1, 2, 4, 8))
    number = (random.choice(EXTREMES) % (1 << 8 * size)).to_bytes(
        size, random.choice(("little", "big"))
    )
    new = random.choice((number, random.randbytes(1), random.randbytes(random.randint(1, 16))))
    place = _place(content, random)
    return content[:place] + new + content[place + len(new) :]


def _insert(content: bytes, random: Random) -> bytes:
    """Add noise, zeros, or parts of the content itself."""
    noise, zeros = random.randbytes(random.randint(1, 20)), bytes(random.randint(1, 600))
    repeated = _part(content, random) * random.choice((1, 1, 2, 50, 1000))
    place = _place(content, random)
    return content[:place] + random.choice((noise, zeros, repeated)) + content[place:]


def _flip_bit(content: bytes, random: Random) -> bytes:
    place = _place(content, random)
    flipped = bytes(byte ^ (1 << random.randrange(8)) for byte in content[place : place + 1])
    return content[:place] + flipped + content[place + 1 :]


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: _place(content, random)]


def _delete(content: bytes, random: Random) -> bytes:
    place = _place(content, random)
    return content[:place] + content[place + random.choice((1, 2, 4, 16, 100, 1000)) :]


def _change_digits(content: bytes, random: Random) -> bytes:
    """Change a number that is written in digits, with or without changing its length."""
    found = list(re.finditer(rb"[0-9]+", content[:20_000]))
    if not found:
        return content
    start, stop = random.choice(found).span()
    digits = str(random.choice(EXTREMES)).encode()
    if random.random() < 0.5:
        digits = digits[: stop - start].rjust(stop - start, b"0")
    return content[:start] + digits + content[stop:]


_STEPS: tuple[MutateBytes, ...] = (
    *(_overwrite, _overwrite, _overwrite, _insert, _insert, _insert),
    *(_flip_bit, _truncate, _delete, _change_digits),
)


# JSON -------------------------------------------------------------------------------------------

HOSTILE_JSON = (
    "null", "true", "-1", "0", "0.5", "1e999", "-1e999", "1e-400", "NaN", "Infinity", "-Infinity",
    str(2**31), str(2**63), str(10**6), str(10**12), "9" * 5000, '""', '"x"',
    '"' + "long " * 20_000 + '"', '"\\ud800"', '"../../escape"', '"\\u0000"', "[]", "{}", "[[]]",
    '{"a": {"b": [1, "two", null]}}', "[" + "1000000," * 50 + "1]", "[" * 500 + "]" * 500,
    "[" * 100_000 + "]" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000,
)  # fmt: skip
_VALUE, _KEY = "\N{SNOWMAN}value", "\N{SNOWMAN}key"  # stand for text that is put in afterwards


def mutate_json(content: bytes, random: Random) -> bytes:
    """Change what a JSON text says: types, sizes, nesting, keys. It stays JSON, or nearly.

    Text that is no JSON is damaged as bytes.
    """
    try:
        root = [json.loads(content)]
    except ValueError:
        return mutate_bytes(content, random)
    key = ""
    for _ in range(random.randint(1, 2)):
        holder, place = random.choice(_places(root))
        how = random.choice(("replace", "replace", "replace", "drop", "wrap", "keys", "repeat"))
        if how == "drop" and holder is not root:
            del holder[place]
        elif how == "wrap":
            holder[place] = random.choice(([holder[place]], {"a": holder[place]}))
        elif how == "keys" and isinstance(holder, dict):
            if random.random() < 0.5:
                key, holder[_KEY] = place, _VALUE  # one key twice
            else:
                new = random.choice(("", "unknown", "__class__", place.upper()))
                holder[new] = holder.pop(place)
        elif how == "repeat" and isinstance(holder[place], list):
            holder[place] = holder[place] * random.choice((0, 2, 300))
        else:
            holder[place] = _VALUE
    text = json.dumps(root[0], ensure_ascii=False).replace(_KEY, key)
    return text.replace(f'"{_VALUE}"', random.choice(HOSTILE_JSON)).encode("utf-8", "surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """List every value of a tree, as the container that holds it and its key there."""
    found, open_ends = [], [tree]
    while open_ends:
        holder = open_ends.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                open_ends.append(holder[key])
    return found


# Files, folders and archives ---------------------------------------------------------------------


def files_in(path: Path, pattern: str = "*") -> list[Path]:
    """List the files of a target, in an order that is the same everywhere."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob(pattern) if each.is_file())


def in_some_file(mutate: MutateBytes, pattern: str = "*") -> Mutate:
    """Damage one of the files, chosen at random."""

    def damage(path: Path, random: Random) -> None:
        chosen = random.choice(files_in(path, pattern))
        chosen.write_bytes(mutate(chosen.read_bytes(), random))

    return damage


def _splice_files(path: Path, random: Random) -> None:
    """Continue one file with the end of another, or of itself."""
    files = files_in(path)
    head, tail = random.choice(files), random.choice(files)
    start, stop = head.read_bytes(), tail.read_bytes()
    head.write_bytes(start[: _place(start, random)] + stop[_place(stop, random) :])


def _lose_file(path: Path, random: Random) -> None:
    """Empty one of the files, or take it away if there are others."""
    files = files_in(path)
    chosen = random.choice(files)
    if len(files) > 1 and random.random() < 0.5:
        chosen.unlink()
    else:
        chosen.write_bytes(b"")


def in_zip_member(mutate: MutateBytes) -> MutateBytes:
    """Damage one member of a zip and write the archive again, so that its checksums are right."""

    def damage(content: bytes, random: Random) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(each, archive.read(each)) for each in archive.infolist()]
        chosen = random.randrange(len(members))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for number, (info, data) in enumerate(members):
                archive.writestr(info, mutate(data, random) if number == chosen else data)
        return buffer.getvalue()

    return damage


ANY_FILE: tuple[Mutate, ...] = (*(in_some_file(mutate_bytes),) * 6, _splice_files, _lose_file)


@dataclass(frozen=True)
class Target:
    """One kind of foreign file.

    Attributes:
        name: What it is called.
        make: Writes a valid file, or a folder of files, into an empty folder; returns its path.
        read: Reads it as a user would, and uses what it read.
        mutators: The kinds of damage, of which one is chosen at random; a kind that is listed
            twice is chosen twice as often.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    mutators: tuple[Mutate, ...] = ANY_FILE
