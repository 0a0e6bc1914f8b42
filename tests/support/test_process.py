"""The memory at hand is the least of what the machine and each control group leave."""

from __future__ import annotations

from pathlib import Path

from ttapca.support.process import available_memory

MACHINE = 8 * 2**30


def proc(folder: Path, groups: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {MACHINE // 1024} kB\n")
    (folder / "self" / "cgroup").write_text(groups)
    return folder


def group(folder: Path, limit: str, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", proc(tmp_path / "proc", "0::/\n")) == MACHINE


def test_the_narrowest_group_counts(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "job", "1000", 300, "anon 5\ninactive_file 100\n")
    group(groups / "job" / "one", "max", 300)
    found = available_memory(groups, proc(tmp_path / "proc", "0::/job/one\n"))
    assert found == 1000 - 300 + 100  # what only caches files can be had
    group(groups / "job" / "one", "50", 300)
    assert available_memory(groups, tmp_path / "proc") == 0


def test_a_container_that_does_not_see_its_own_group(tmp_path: Path) -> None:
    group(tmp_path / "groups", "4096", 96)
    where = proc(tmp_path / "proc", "0::/../outside\n")
    assert available_memory(tmp_path / "groups", where) == 4000
