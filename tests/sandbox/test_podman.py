"""Containers: what podman is asked for is read back before anything runs, and nothing of a container is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pytest
from tests.sandbox.conftest import EMPTY, ORDINARY, Cell, Warden, processes_with, run_confined

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Jail, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives import peer
from kiwi_mcp.primitives.subprocess import ProcessResult
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.levels import demands, offers
from kiwi_mcp.sandbox.podman import Podman
from kiwi_mcp.sandbox.port import Backend
from kiwi_mcp.sandbox.proxied import refuse_without_gate
from kiwi_mcp.sandbox.standing import Standing, choose

ENV = {"PATH": "/usr/bin:/bin"}


def engine() -> Backend:
    return next(one for one in backends() if one.name == "podman")


def run(argv: tuple[str, ...], jail: Jail) -> ProcessResult:
    """Run a command in a container, and raise where it never began."""
    with engine().wrap(ProcessSpec(argv, cwd="/", env=ENV, timeout=30.0), jail) as confined:
        ended = asyncio.run(run_confined(confined))
        confined.check(ended)
        return ended


def left_behind() -> list[str]:
    """Return what is there of containers of this process: groups and mounts, which would keep their folders."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/kiwi-{os.getpid()}-*/*/")]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/kiwi-run-" in line]
    return [*groups, *mounts]


def test_a_container_is_the_last_resort() -> None:
    every = demands("restricted").requires | {"mem_limit", "cpu_limit"}
    found = backends()
    able = [Standing(one, every if one.name in {"bubblewrap", "podman"} else frozenset()) for one in found]
    weaker = [
        replace(one, properties=demands("sandboxed").requires) if one.backend.name == "bubblewrap" else one
        for one in able
    ]
    assert choose("restricted", able).backend.name == "bubblewrap"
    assert choose("sandboxed", weaker).backend.name == "bubblewrap"
    assert choose("restricted", weaker).backend.name == "podman"


def test_podman_is_not_used_where_kiwi_is_not_root() -> None:
    (told,) = Podman("/usr/bin/podman", None, is_root=False).obstacles()
    assert "as root" in told
    (told,) = Podman(None, None, is_root=True).obstacles()
    assert "podman is missing" in told


def test_a_container_shows_every_property_of_the_strictest_level(contained: Warden) -> None:
    assert contained.run("/bin/true").exit_code == 0
    assert demands("restricted").requires <= offers()["podman"].whole


def test_a_process_has_its_input_its_result_and_its_exit_code(contained: Warden) -> None:
    code = 'cat; echo 5 >"$KIWI_RESULT"; echo said >&2; exit 7'
    spec = ProcessSpec(("/bin/sh", "-c", code), cwd="/", env=ENV, stdin=b"given", timeout=30.0)
    with engine().wrap(spec, Jail(contained.level)) as confined:
        ended = asyncio.run(run_confined(confined))
        confined.check(ended)
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.result) == (7, b"given", b"said\n", b"5\n")
    assert left_behind() == []


def test_a_process_in_a_container_can_be_talked_to(contained: Warden) -> None:
    spec = ProcessSpec(("/bin/sh", "-c", 'while read -r line; do echo "heard $line"; done'), cwd="/", env=ENV)

    async def talk() -> list[bytes | None]:
        with engine().wrap(spec, Jail(contained.level)) as confined:
            async with peer.talking(confined.spec, secrets={}, handover=confined.handover) as process:
                heard = []
                for word in (b"one", b"two"):
                    process.send(word + b"\n")
                    heard.append(await asyncio.wait_for(process.line(), 20))
            confined.check(process.ended())
            return heard

    assert asyncio.run(talk()) == [b"heard one", b"heard two"]
    assert left_behind() == []


def test_what_is_written_belongs_to_the_owner_of_the_folder(contained: Warden) -> None:
    folder = contained.folder('out, with a comma and a "')
    ended = contained.run("/bin/sh", "-c", 'echo made >"$1/new"', "sh", str(folder), cell=Cell(writable=(folder,)))
    assert ended.exit_code == 0, ended.stderr
    assert (folder / "new").read_text() == "made\n"
    assert (folder / "new").stat().st_uid == ORDINARY


def test_what_is_given_below_the_temporary_folder_lies_in_the_containers_own(contained: Warden, tmp_path: Path) -> None:
    given, hidden = tmp_path / "given", tmp_path / "given" / "hidden"
    hidden.mkdir(parents=True)
    (given / "note").write_text("tea")
    (hidden / "note").write_text("secret")
    os.chown(given, ORDINARY, ORDINARY)
    jail = Jail(contained.level, writable=(str(given),), hidden=(str(hidden),))
    ended = run(
        ("/bin/sh", "-c", 'cat "$1/note"; ls "$1/hidden"; ls "$2"; : >"$1/new"', "sh", str(given), str(tmp_path)), jail
    )
    assert (ended.stdout, ended.exit_code) == (b"teagiven\n", 0), ended.stderr
    assert (given / "new").stat().st_uid == ORDINARY


def test_a_folder_of_roots_is_not_given_to_a_container(contained: Warden, tmp_path: Path) -> None:
    assert contained.backend == "podman"
    with pytest.raises(IsolationUnavailable, match="belongs to root"):
        run(("/bin/true",), Jail("sandboxed", writable=(str(tmp_path),)))


def test_a_secret_is_not_given_to_an_engine_that_writes_it_down(contained: Warden) -> None:
    with pytest.raises(IsolationUnavailable, match="to the disk, and TOKEN"):
        contained.run("/bin/true", cell=replace(EMPTY, env={"TOKEN": "${TOKEN}"}))


def test_hosts_are_refused_before_anything_runs(contained: Warden) -> None:
    jail = Jail("sandboxed", hosts=("example.com",))
    spec = ProcessSpec(("/bin/true",), cwd="/", env=ENV)
    assert contained.backend == "podman"
    with engine().wrap(spec, jail) as confined, pytest.raises(IsolationUnavailable, match="no way to single hosts"):
        refuse_without_gate(jail, confined.handover, "podman")


@pytest.mark.parametrize(
    ("dropped", "told"),
    [
        ("--memory=", "its memory is not bounded"),
        ("--pids-limit=", "its processes are not counted"),
        ("--cpus=", "its share of the processors is not bounded"),
        ("--cap-drop=", "it has rights of the administrator's"),
        ("--security-opt=no-new", "it could gain rights"),
        ("--user=", "it is the user"),
        ("--read-only", "/ can be written to"),
    ],
)
def test_what_an_engine_leaves_out_keeps_the_process_from_beginning(contained: Warden, dropped: str, told: str) -> None:
    folder = contained.folder("marker")
    spec = ProcessSpec(("/bin/sh", "-c", f": >{folder}/ran"), cwd="/", env=ENV, timeout=30.0)
    with engine().wrap(spec, Jail("restricted", writable=(str(folder),))) as confined:
        words = tuple(word for word in confined.spec.argv if not word.startswith(dropped))
        if dropped == "--memory=":
            words = tuple(word for word in words if not word.startswith("--memory-swap="))
        if dropped == "--pids-limit=":
            words = (*words[: words.index("run") + 1], "--pids-limit=-1", *words[words.index("run") + 1 :])
        ended = asyncio.run(run_confined(replace(confined, spec=replace(confined.spec, argv=words))))
        with pytest.raises(IsolationUnavailable, match=told):
            confined.check(ended)
    assert [*folder.iterdir()] == []
    assert left_behind() == []


def test_a_path_that_was_exchanged_keeps_the_process_from_beginning(contained: Warden) -> None:
    folder, other, out = (contained.folder(name) for name in ("granted", "other", "out"))
    spec = ProcessSpec(("/bin/sh", "-c", f": >{out}/ran"), cwd="/", env=ENV, timeout=30.0)
    with engine().wrap(spec, Jail("restricted", readable=(str(folder),), writable=(str(out),))) as confined:
        folder.rename(folder.with_name("moved"))
        other.rename(folder)
        ended = asyncio.run(run_confined(confined))
        with pytest.raises(IsolationUnavailable, match="was exchanged"):
            confined.check(ended)
    assert [*out.iterdir()] == []


@pytest.mark.case("RES-10")
def test_a_container_ends_with_the_time_of_its_process(contained: Warden) -> None:
    word, folder = token_hex(8), contained.folder("marker")
    code = f"trap '' TERM; (setsid sleep 60 {word} &); : >{folder}/begun; while :; do sleep 1; done"
    ended = contained.run("/bin/sh", "-c", code, word, cell=Cell(writable=(folder,), timeout=4.0))
    assert (folder / "begun").exists()
    assert ended.timed_out
    assert processes_with(word) == []
    assert left_behind() == []


def test_a_container_ends_with_kiwi(contained: Warden) -> None:
    word, folder = token_hex(8), contained.folder("marker")
    child = os.fork()
    if child == 0:
        try:
            contained.run("/bin/sh", "-c", f": >{folder}/begun; sleep 60", word, cell=Cell(writable=(folder,)))
        finally:
            os._exit(0)
    end = time.monotonic() + 30
    while not (folder / "begun").exists() and time.monotonic() < end:
        time.sleep(0.01)
    living = processes_with(word)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while processes_with(word) and time.monotonic() < end:
        time.sleep(0.01)
    assert living
    assert processes_with(word) == []


def test_memory_is_bounded_for_all_processes_together(contained: Warden) -> None:
    code = "x = bytearray(200_000_000); print(len(x))"
    limits = Limits(memory_bytes=67_108_864)
    ended = contained.run(contained.python, "-I", "-S", "-c", code, cell=Cell(limits=limits))
    assert ended.stdout == b""
    assert ended.exit_code != 0
