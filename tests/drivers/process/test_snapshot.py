"""The verified files are the files that run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.errors import IntegrityMismatch, Unavailable
from kiwi_mcp.drivers.process import take_snapshot


@pytest.mark.case("CHAIN-06")
def test_a_file_changed_after_it_was_read_is_never_run(bench: Bench, project: Path) -> None:
    chain = bench.chain({"main.sh": "echo good"}, "bash_runtime")
    (chain.tool.origin.root / "main.sh").write_text(f"touch {project}/x")
    with pytest.raises(IntegrityMismatch):
        bench.run(chain)
    assert not (project / "x").exists()


@pytest.mark.usefixtures("processes")
def test_a_change_after_the_first_run_does_not_affect_a_chain_that_was_already_resolved(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "echo good"}, "bash_runtime")
    assert bench.run(chain).result == "good"
    (chain.tool.origin.root / "main.sh").write_text("echo bad")
    assert bench.run(chain).result == "good"


@pytest.mark.case("SIG-06")
def test_swapped_files_are_refused(bench: Bench) -> None:
    chain = bench.chain({"main.sh": ". ./a.sh", "a.sh": "echo a", "b.sh": "echo b"}, "bash_runtime")
    first, second = (chain.tool.origin.root / name for name in ("a.sh", "b.sh"))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(IntegrityMismatch):
        bench.run(chain)


@pytest.mark.usefixtures("processes")
def test_a_file_that_was_added_later_is_not_in_the_snapshot(bench: Bench) -> None:
    chain = bench.chain({"main.py": "def main():\n    import extra"}, "python_runtime")
    (chain.tool.origin.root / "extra.py").write_text("")
    assert "No module named 'extra'" in bench.run(chain).message


@pytest.mark.usefixtures("processes")
def test_a_tampered_snapshot_is_rebuilt(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "echo good"}, "bash_runtime")
    copy = take_snapshot(chain.tool, bench.space.cache) / "main.sh"
    copy.chmod(0o644)
    copy.write_text("echo bad")
    assert bench.run(chain).result == "good"


@pytest.mark.usefixtures("processes")
def test_a_copy_that_became_a_link_is_replaced(bench: Bench, project: Path) -> None:
    chain = bench.chain({"main.sh": "echo good"}, "bash_runtime")
    copy = take_snapshot(chain.tool, bench.space.cache) / "main.sh"
    copy.rename(project / "main.sh")
    copy.symlink_to(project / "main.sh")
    assert bench.run(chain).result == "good"
    assert not copy.is_symlink()


def test_a_cache_that_cannot_be_written_is_an_error(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "echo good"}, "bash_runtime")
    bench.space.cache.write_text("a file where a folder should be")
    with pytest.raises(Unavailable, match="cannot keep what the tool needs"):
        bench.run(chain)


def test_files_keep_their_bytes_and_executable_bit_and_lose_write_permission(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "exec ./data", "sub/data": b"\0\xff"}, "bash_runtime")
    files = tuple(replace(file, is_executable=file.path == "sub/data") for file in chain.tool.files)
    folder = take_snapshot(replace(chain.tool, files=files), bench.space.cache)
    assert (folder / "sub/data").read_bytes() == b"\0\xff"
    modes = [(folder / name).stat().st_mode & 0o777 for name in ("main.sh", "sub/data")]
    assert modes == [0o444, 0o555]


def test_a_failed_snapshot_leaves_no_partial_files(bench: Bench) -> None:
    chain = bench.chain({"main.sh": "echo good", "z.sh": ""}, "bash_runtime")
    (chain.tool.origin.root / "z.sh").unlink()
    with pytest.raises(IntegrityMismatch):
        take_snapshot(chain.tool, bench.space.cache)
    assert list((bench.space.cache / "tools").iterdir()) == []


async def test_concurrent_snapshots_of_one_tool_are_one(bench: Bench) -> None:
    chain = bench.chain({f"file{n}.sh": f"echo {n}" for n in range(50)}, "bash_runtime")

    taken = (asyncio.to_thread(take_snapshot, chain.tool, bench.space.cache) for _ in range(8))
    assert len(set(await asyncio.gather(*taken))) == 1
    assert len(list((bench.space.cache / "tools").iterdir())) == 1
