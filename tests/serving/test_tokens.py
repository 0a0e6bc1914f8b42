"""Who may do what, and whose streams are whose."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.clients import SECRETS, token
from ttapca.errors import OptionError, StreamNameError
from ttapca.serving.fairness import Client
from ttapca.serving.stream_record import check_name
from ttapca.serving.tokens import ANYBODY, Token, Tokens, read_tokens

SECRET = "correct horse battery staple"
HASH = f"sha256:{hashlib.sha256(SECRET.encode()).hexdigest()}"


ONE = f"[[token]]\nhash = '{HASH}'"


def written(folder: Path, text: str) -> Path:
    (folder / "tokens.toml").write_text(text)
    return folder / "tokens.toml"


def test_a_token_is_found_by_its_secret(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        [[token]]
        name = "shop"
        hash = "{HASH}"
        rights = ["read", "predict"]
        max_streams = 3
        requests_per_second = 0.5
        images_per_second = 20
        share = 2.5
        """,
    )
    tokens = read_tokens(path)
    shop = tokens.find(SECRET.encode())
    assert shop is not None
    assert (shop.name, shop.rights) == ("shop", {"read", "predict"})
    assert (shop.max_streams, shop.requests_per_second) == (3, 0.5)
    assert (shop.images_per_second, shop.client) == (20, Client("shop", 2.5))
    assert tokens.find(b"") is tokens.find(SECRET[:-1].encode()) is None


def test_the_documented_file_needs_no_other(tmp_path: Path) -> None:
    """The unit for systemd and the image of Docker are handed this file alone."""
    page = (Path(__file__).parents[2] / "docs" / "production.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    for number in range(example.count("sha256:...")):
        digest = hashlib.sha256(bytes([number])).hexdigest()
        example = example.replace("sha256:...", f"sha256:{digest}", 1)
    tokens = read_tokens(written(tmp_path, example))
    assert [each.name for each in tokens.all] == ["shop", "operator"]


def test_every_secret_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a search takes does not depend on which token it is, nor on whether any is."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("ttapca.serving.tokens.hmac.compare_digest", compare)
    tokens = Tokens([token(name, "read") for name in SECRETS])
    for secret in (*SECRETS.values(), "none"):
        compared.clear()
        tokens.find(secret.encode())
        assert compared == [each.digest for each in tokens.all]


def test_no_secret_is_shown() -> None:
    shown = repr(token("shop", "read"))
    assert "shop" in shown
    assert hashlib.sha256(SECRETS["shop"].encode()).hexdigest() not in shown
    assert "digest" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be an object with `token`"),
        ("token = 3", "`token` must be a list"),
        ("[[token]]\nrights = ['read']", r"`token\[0\]` must be an object with `name`"),
        (f"{ONE}\nname = 'a.b'\nrights = ['read']", "`token.0..name` must be 1 to 30 of A-Z"),
        (f"{ONE}\nname = 'a'\nrights = ['write']", "must be one of read, predict, control, all"),
        (f"{ONE}\nname = 'a'\nrights = []", "a list of 1 to 4 entries"),
        (f"{ONE}\nname = 'a'\nrights = ['read']\nsecret = 'x'", "found 'secret'"),
        ("[[token]]\nname = 'a'\nrights = ['read']", "an object with `hash`"),
        ("[[token]]\nname = 'a'\nrights = ['read']\nhash = 'abc'", "must be `sha256:` and 64"),
        (
            f"[[token]]\nname = 'a'\nrights = ['all']\nhash = '{HASH}'\nmax_streams = 1",
            "`max_streams` has no meaning",
        ),
        (
            f"[[token]]\nname = 'a'\nrights = ['all']\nhash = '{HASH}'\n" * 2,
            "Every token has a name of its own",
        ),
        (
            f"[[token]]\nname = 'a'\nrights = ['all']\nhash = '{HASH}'\n"
            f"[[token]]\nname = 'b'\nrights = ['all']\nhash = '{HASH}'\n",
            "Every token has a secret of its own",
        ),
    ],
)
def test_a_file_that_cannot_be_says_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        read_tokens(written(tmp_path, text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no\.toml cannot be read: No such file"):
        read_tokens(tmp_path / "no.toml")


NAMES = st.text("abAB09._-/ \0é", min_size=0, max_size=110)


@given(NAMES, st.sampled_from(["shop", "hall"]))
def test_a_name_is_taken_by_the_pool_or_refused(name: str, owner: str) -> None:
    holder = Token(owner, b"", frozenset({"read"}))
    for each in (holder, ANYBODY):
        try:
            full = each.full_name(name)
        except StreamNameError:
            continue
        check_name(full)
        assert each.owns(full)
        assert each.own_name(full) == name


@given(NAMES, NAMES)
def test_no_token_can_name_a_stream_of_another(one: str, other: str) -> None:
    shop, hall = (Token(name, b"", frozenset({"read"})) for name in ("shop", "shop-2"))
    try:
        first, second = shop.full_name(one), hall.full_name(other)
    except StreamNameError:
        return
    assert first != second
    assert not hall.owns(first)
    assert not shop.owns(second)
