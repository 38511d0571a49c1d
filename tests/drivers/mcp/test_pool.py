"""Connections that are kept: shared, reaped, started again with patience, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from tests.drivers.mcp.conftest import HOSTILE, Bench

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.mcp.circuit import OPENS_AFTER, Circuit
from kiwi_mcp.drivers.mcp.eras import Era, Eras
from kiwi_mcp.drivers.mcp.pool import Pool
from kiwi_mcp.drivers.mcp.server import Server, server_of


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def starts(bench: Bench) -> list[int]:
    return [int(note.split()[1]) for note in bench.notes if note.startswith("start")]


def reached(bench: Bench, tool: Tool) -> Server:
    return replace(server_of(tool, bench.space), jail=bench.jail)


@pytest.mark.req("K-MC-02")
def test_calls_at_the_same_time_start_a_server_once_and_are_answered_at_the_same_time(bench: Bench) -> None:
    async def scenario() -> float:
        chain = bench.chain(bench.server(), "slow")
        await bench.call(bench.chain(bench.server(), "echo"))
        started = monotonic()
        outcomes = await asyncio.gather(*(bench.call(chain, {"seconds": 0.3}) for _ in range(50)))
        assert {outcome.result for outcome in outcomes} == {"slow"}
        return monotonic() - started

    assert bench.run(scenario()) < 3
    assert len(starts(bench)) == 1


def test_the_first_callers_start_a_server_once_together(bench: Bench) -> None:
    async def scenario() -> set[object]:
        chain = bench.chain(bench.server(), "pid")
        return {outcome.result for outcome in await asyncio.gather(*(bench.call(chain) for _ in range(20)))}

    assert len(bench.run(scenario())) == 1
    assert len(starts(bench)) == 1


@pytest.mark.req("K-MC-02")
def test_each_set_of_credentials_has_a_connection_of_its_own(bench: Bench) -> None:
    async def scenario() -> list[object]:
        chain = bench.chain(bench.server(env={"KEY": "${KEY}"}), "pid")
        return [(await bench.call(chain, secrets={"KEY": key})).result for key in ("mine", "yours", "mine")]

    first, second, third = bench.run(scenario())
    assert first == third != second


@pytest.mark.req("K-MC-02")
def test_closing_ends_every_process_and_all_that_they_started(bench: Bench) -> None:
    async def scenario() -> list[int]:
        found = []
        for number in range(3):
            server = bench.server(server_id=f"server{number}")
            found.append(int(str((await bench.call(bench.chain(server, "pid"))).result)))
            found.append(int(str((await bench.call(bench.chain(server, "fork"))).result)))
        assert all(map(is_alive, found))
        return found

    assert not any(map(is_alive, bench.run(scenario())))


@pytest.mark.case("MCP-10")
def test_a_server_that_ignores_its_end_is_ended_all_the_same(bench: Bench) -> None:
    started = monotonic()
    pid = int(str(bench.ask(bench.server("ignores_end"), "pid").result))

    assert not is_alive(pid)
    assert monotonic() - started < 6


def test_a_loop_that_is_left_without_closing_leaves_no_process(bench: Bench) -> None:
    pid = int(str(asyncio.run(bench.call(bench.chain(bench.server(), "pid"))).result))

    assert not is_alive(pid)


@pytest.mark.req("K-MC-02")
def test_a_connection_that_nobody_uses_is_reaped_and_comes_back(bench: Bench) -> None:
    server = reached(bench, bench.server())

    async def scenario() -> None:
        pool = Pool(Eras(), idle=0.05)
        async with pool.using(server, {}) as lease:
            await lease.connection.ask("tools/list", {})
        assert pool.open_count == 1
        for _ in range(250):
            if not pool.open_count and not any(map(is_alive, starts(bench))):
                break
            await asyncio.sleep(0.02)
        assert not any(map(is_alive, starts(bench)))
        async with pool.using(server, {}) as lease:
            await lease.connection.ask("tools/list", {})
        await pool.aclose()

    asyncio.run(scenario())
    assert len(starts(bench)) == 2


def test_of_too_many_connections_the_one_unused_for_longest_goes(bench: Bench) -> None:
    async def scenario() -> list[int]:
        pool = Pool(Eras(), most=2)
        for name in ("a", "b", "a", "c"):
            async with pool.using(reached(bench, bench.server(server_id=name)), {}) as lease:
                await lease.connection.ask("tools/list", {})
        assert pool.open_count == 2
        async with (
            pool.using(reached(bench, bench.server(server_id="a")), {}),
            pool.using(reached(bench, bench.server(server_id="c")), {}),
        ):
            with pytest.raises(Unavailable, match="none of them is idle"):
                async with pool.using(reached(bench, bench.server(server_id="d")), {}):
                    pass
        await pool.aclose()
        return starts(bench)

    assert len(asyncio.run(scenario())) == 3


@pytest.mark.req("K-MC-02")
def test_a_server_that_keeps_failing_is_left_alone_and_tried_again_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.drivers.mcp.circuit.REST", 0.3)
    server = bench.server("dies_at_start", reconnect_delay=0.01)

    async def scenario() -> list[Outcome]:
        chain = bench.chain(server, "echo")
        failed = [await bench.call(chain) for _ in range(OPENS_AFTER + 2)]
        await asyncio.sleep(0.35)
        return [*failed, await bench.call(chain)]

    outcomes = bench.run(scenario())
    assert {outcome.status for outcome in outcomes} == {"unavailable"}
    assert "failed 5 times in a row and is not tried again before" in outcomes[OPENS_AFTER].message
    assert "no licence found" in outcomes[OPENS_AFTER].message
    assert "did not start" in outcomes[-1].message
    assert len(starts(bench)) == OPENS_AFTER + 1


def test_waits_between_starts_grow_and_the_first_one_is_none(bench: Bench) -> None:
    server, circuit = reached(bench, bench.server()), Circuit()
    waits = []
    for _ in range(OPENS_AFTER - 1):
        circuit.failed(server, Unavailable("no", suggestion=""))
        waits.append(round(circuit.wait(server), 1))

    assert waits == [0.0, 0.5, 1.5, 3.5]
    circuit.worked()
    circuit.failed(server, Unavailable("no", suggestion=""))
    assert circuit.wait(server) == 0


def test_a_server_that_shall_not_reconnect_keeps_nobody_waiting(bench: Bench) -> None:
    server, circuit = reached(bench, bench.server(reconnect=False)), Circuit()
    circuit.failed(server, Unavailable("no", suggestion=""))
    circuit.failed(server, Unavailable("no", suggestion=""))

    with pytest.raises(Unavailable, match="failed 2 times"):
        circuit.wait(server)


@pytest.mark.req("K-MC-02")
def test_fifty_connections_made_used_and_killed_leave_nothing(bench: Bench) -> None:
    async def scenario() -> tuple[int, int]:
        chain, kill = bench.chain(bench.server(), "echo"), bench.chain(bench.server(), "kill")
        before = 0
        for number in range(50):
            assert (await bench.call(chain, {"text": "x"})).result == "x"
            assert (await bench.call(kill)).status == "unavailable"
            if number == 5:
                before = open_files()
        await asyncio.sleep(0.05)
        return before, open_files()

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    others = {*children.read_text().split()}  # a database may be running for other tests
    before, after = bench.run(scenario())
    assert after <= before + 2
    assert len(starts(bench)) == 50
    assert not any(map(is_alive, starts(bench)))
    assert not {*children.read_text().split()} - others


@pytest.mark.parametrize(
    ("habits", "era", "version"),
    [
        ((), "legacy", "2025-11-25"),
        (("first_revision",), "legacy", "2024-11-05"),
        (("ignores_probe",), "legacy", "2025-11-25"),
        (("modern",), "modern", "2026-07-28"),
    ],
)
@pytest.mark.req("K-MC-01")
def test_the_era_of_a_server_is_found_and_remembered(
    bench: Bench, habits: tuple[str, ...], era: Era, version: str
) -> None:
    async def scenario() -> tuple[str, str]:
        listing = await bench.list_items(bench.server(*habits, startup_timeout=2))
        return listing.era, listing.protocol_version

    assert bench.run(scenario()) == (era, version)
    assert bench.driver.eras.of("project/local/hostile@1.0.0") == era


@pytest.mark.parametrize(("known", "habits", "found"), [("modern", (), "legacy"), ("legacy", ("modern",), "modern")])
def test_an_era_that_changed_is_healed_on_the_same_connection(
    bench: Bench, known: Era, habits: tuple[str, ...], found: Era
) -> None:
    async def scenario() -> str:
        server = bench.server(*habits)
        bench.driver.eras.remember(server.identity, known)
        return (await bench.list_items(server)).era

    assert bench.run(scenario()) == found
    assert len(starts(bench)) == 1


def test_a_change_of_the_list_is_told(bench: Bench) -> None:
    changed: list[str] = []
    bench.driver.on_change = changed.append
    bench.ask(bench.server(), "changed")

    assert changed == ["project/local/hostile@1.0.0"]


@pytest.mark.req("K-MC-02")
def test_a_kernel_that_is_killed_takes_well_behaved_servers_with_it(bench: Bench) -> None:
    program = (
        "import asyncio, sys\n"
        "from kiwi_mcp.domain.plan import ProcessSpec\n"
        "from kiwi_mcp.primitives.peer import talking\n"
        "async def main():\n"
        "    async with talking(ProcessSpec(tuple(sys.argv[2:]), sys.argv[1]), secrets={}) as peer:\n"
        "        print(peer.pid, flush=True)\n"
        "        await peer.line()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(bench.space.project), sys.executable, str(HOSTILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        pid = int(kernel.stdout.readline())
        watched = os.pidfd_open(pid)
        kernel.kill()
    try:
        assert select.select([watched], [], [], 10)[0], "the server is still there"
    finally:
        os.close(watched)
