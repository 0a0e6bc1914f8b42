"""Tokens of clients, from a file that `docs/production.md` describes: their rights and streams.

`camera-7` of the token `shop` is the stream `shop.camera-7` of the pool. Names of tokens have no
dot, so no token can name a stream of another. A holder of the right `all` uses the full names.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ttapca._checks import ListOf, Maybe, Number, OneOf, Record, Such, Text, Whole, conform
from ttapca.errors import OptionError, TooManyStreamsError
from ttapca.serving.fairness import Client
from ttapca.serving.stream_record import LONGEST_NAME, check_name
from ttapca.support.parsing import parse_toml, read_bounded

Right = Literal["read", "predict", "control", "all"]
RIGHTS: tuple[Right, ...] = get_args(Right)

HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,29}")

NAME = Such(
    Text(30),
    lambda text: TOKEN_NAME.fullmatch(text) is not None,
    "1 to 30 of A-Z, a-z, 0-9, `_` and `-`, a letter or digit first",
)
SHA256 = Such(
    Text(100),
    lambda text: HASH.fullmatch(text) is not None,
    "`sha256:` and 64 hexadecimal digits, as sha256sum prints them",
)
TOKEN = Record(
    {"name": NAME, "hash": SHA256, "rights": ListOf(OneOf(RIGHTS), 1, len(RIGHTS))},
    {
        "max_streams": Maybe(Whole(1)),
        "requests_per_second": Maybe(Number(above=0)),
        "images_per_second": Maybe(Number(above=0)),
        "share": Number(0.001, 1000),
    },
)
FILE = Record({"token": ListOf(TOKEN, 1)})


@dataclass(frozen=True)
class Token:
    """The facts of one token, without its secret; its quotas are None for no limit."""

    name: str  # the first part of the names of its streams
    digest: bytes = field(repr=False)  # SHA-256 of the secret
    rights: frozenset[Right]
    max_streams: int | None = None
    requests_per_second: float | None = None
    images_per_second: float | None = None
    share: float = 1.0  # of the service, beside other tokens

    @property
    def client(self) -> Client:
        """Whose its requests are."""
        return Client(self.name, self.share)

    @property
    def prefix(self) -> str:
        """How the names of its streams begin in the pool; empty for the right `all`."""
        return "" if "all" in self.rights else f"{self.name}."

    def full_name(self, stream: str) -> str:
        """Return the name in the pool of the holder's stream, or raise `StreamNameError`."""
        check_name(stream, LONGEST_NAME - len(self.prefix))
        return self.prefix + stream

    def check_quota(self, streams: Collection[str]) -> None:
        """Raise `TooManyStreamsError` if the token has as many of these streams as it may."""
        most = self.max_streams
        if most is not None and sum(map(self.owns, streams)) >= most:
            raise TooManyStreamsError(
                f"The token `{self.name}` may have {most:,} streams, and has as many. Delete one."
            )

    def own_name(self, stream: str) -> str:
        """Return the holder's name of one of its streams in the pool."""
        return stream.removeprefix(self.prefix)

    def owns(self, stream: str) -> bool:
        """Return whether a stream of the pool is one that the holder can name."""
        return stream.startswith(self.prefix)


# For every client of a service without tokens, which are on this machine.
ANYBODY = Token("anybody", b"", frozenset(RIGHTS))


class Tokens:
    """All tokens of a service; without any, every client may do everything."""

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        self.all = tuple(tokens)
        for word, attribute in (("name", "name"), ("secret", "digest")):
            if len({getattr(token, attribute) for token in self.all}) < len(self.all):
                raise OptionError(f"Every token has a {word} of its own; found one {word} twice.")

    def find(self, secret: bytes) -> Token | None:
        """Return the token with a secret; it takes as long if there is none."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for token in self.all:  # all of them: the time must not tell how many were compared
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found


def read_tokens(path: Path) -> Tokens:
    """Read a file of tokens."""
    try:
        content = parse_toml(read_bounded(path, OptionError), str(path), OptionError)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from error
    conform(content, FILE, str(path), OptionError)
    return Tokens([_token(path, entry) for entry in content["token"]])


def _token(path: Path, entry: dict[str, Any]) -> Token:
    if "all" in entry["rights"] and entry.get("max_streams") is not None:
        raise OptionError(
            f"{path}: the token `{entry['name']}` has the right `all`, so no streams are its own "
            "and `max_streams` has no meaning. Leave one of them out."
        )
    digest = bytes.fromhex(entry.pop("hash").removeprefix("sha256:"))
    return Token(digest=digest, rights=frozenset(entry.pop("rights")), **entry)
