"""What scripts, benchmarks and docs name exists: they are not run by the tests, and code moves."""

from __future__ import annotations

import ast
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import ttapca
from ttapca.cli.app import app

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")])
# The changelog also names what there was before.
PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "benchmarks" / "README.md",
]
PACKAGE = Path(ttapca.__file__).parent
# Folders of ours; docs/methods-evidence.md also names files of other repositories.
OURS = (
    *("src/ttapca/", "docs/", "scripts/", "benchmarks/", "tests/"),
    *(f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir()),
)


def exists(dotted: str) -> bool:
    try:
        pkgutil.resolve_name(dotted)
    except AttributeError:
        return False
    return True


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name of the library that a program imports, and what it takes from whole modules."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ttapca":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import) and any(each.name == "ttapca" for each in node.names):
            known["ttapca"] = "ttapca"
    yield from known.values()
    nodes = list(ast.walk(tree))
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = known.get(node.value.id)
            if home in sys.modules and node.value.id not in local:
                yield f"{home}.{node.attr}"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_programs_name_what_exists(program: Path) -> None:
    tree = ast.parse(program.read_text(encoding="utf-8"))
    assert [name for name in names_in(tree) if not exists(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"(?<![\w/.-])ttapca(?:\.[A-Za-z_]\w*)+(?![\w/-])", text)
    assert [name for name in names if not exists(name)] == []
    files = re.findall(r"(?<![\w./-])((?:[\w-]+/)+[\w-]+\.(?:py|sh|md|toml|svg|csv))\b", text)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    wanted = [file for file in files if file.startswith(OURS) and file not in links]
    homes = (ROOT, PACKAGE, page.parent)
    wanted = [file for file in wanted if "NAME" not in file]  # which stands for any name
    assert [f for f in wanted if not any((home / f).exists() for home in homes)] == []
    assert [link for link in links if not (page.parent / link).exists()] == []


def commands_in(text: str) -> Iterator[list[str]]:
    """Every call of `ttapca` in the code blocks of a page, as words."""
    for block in re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\.venv/bin/)?ttapca ", line):
                yield shlex.split(line, comments=True)[1:]


def unknown_options(words: list[str]) -> list[str]:
    """Return the words of a call that the command line does not know."""
    command = typer.main.get_command(app)
    while words and isinstance(command, TyperGroup) and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[:1]
        command, words = command.commands[words[0]], words[1:]
    known = {"--help", "--install-completion", "--show-completion"}
    for parameter in command.params:
        known.update(parameter.opts, parameter.secondary_opts)
    return [word for word in words if word.startswith("--") and word.split("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_on_pages_have_such_options(page: Path) -> None:
    calls = commands_in(page.read_text(encoding="utf-8"))
    assert [found for found in map(unknown_options, calls) if found] == []


def test_an_option_that_does_not_exist_is_found() -> None:
    page = (
        "```sh\nttapca fit x --data y \\\n    --too a  # b\nttapca fitt\nttapca data get z\n```\n"
    )
    assert [unknown_options(words) for words in commands_in(page)] == [["--too"], ["fitt"], []]


def test_a_name_that_does_not_exist_is_found() -> None:
    program = "def f():\n    from ttapca.support import memory as m\nimport ttapca\nttapca.fitt()"
    found = list(names_in(ast.parse(program)))
    assert set(found) == {"ttapca.support.memory", "ttapca", "ttapca.fitt"}
    assert [name for name in found if exists(name)] == ["ttapca"]
    assert exists("ttapca.spectral.pca.Moments")
