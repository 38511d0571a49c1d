"""The connection pool: sharing, idle timeouts, restarts with backoff, and clean shutdown."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from msgspec.structs import replace
from tests.drivers.mcp.conftest import HOSTILE, Bench

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.mcp import Era
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.mcp.pool import OPENS_AFTER, CircuitBreaker, ConnectionPool
from kiwi_mcp.drivers.mcp.server import ServerConfig, server_of


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


def reached(bench: Bench, tool: Tool) -> ServerConfig:
    return replace(server_of(tool, bench.space), profile=bench.profile)


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_concurrent_calls_start_a_server_once_and_run_in_parallel(bench: Bench) -> None:
    async def scenario() -> float:
        chain = bench.chain(bench.server(), "slow")
        await bench.call(bench.chain(bench.server(), "echo"))
        started = monotonic()
        outcomes = await asyncio.gather(*(bench.call(chain, {"seconds": 1}) for _ in range(50)))
        assert {outcome.result for outcome in outcomes} == {"slow"}
        return monotonic() - started

    assert bench.run(scenario()) < 40
    assert len(starts(bench)) == 1


@pytest.mark.usefixtures("processes")
def test_concurrent_first_callers_start_a_server_once(bench: Bench) -> None:
    async def scenario() -> set[object]:
        chain = bench.chain(bench.server(), "pid")
        return {outcome.result for outcome in await asyncio.gather(*(bench.call(chain) for _ in range(20)))}

    assert len(bench.run(scenario())) == 1
    assert len(starts(bench)) == 1


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_each_set_of_credentials_has_its_own_connection(bench: Bench) -> None:
    async def scenario() -> list[object]:
        chain = bench.chain(bench.server(env={"KEY": "${KEY}"}), "pid")
        return [(await bench.call(chain, secrets={"KEY": key})).result for key in ("mine", "yours", "mine")]

    first, second, third = bench.run(scenario())
    assert first == third != second


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_closing_ends_every_process_and_its_children(bench: Bench) -> None:
    async def scenario() -> list[int]:
        found = []
        for number in range(3):
            server = bench.server(server_id=f"server{number}")
            found.append(int(str((await bench.call(bench.chain(server, "pid"))).result)))
            found.append(int(str((await bench.call(bench.chain(server, "fork"))).result)))
        assert all(map(is_alive, found))
        return found

    assert not any(map(is_alive, bench.run(scenario())))


@pytest.mark.usefixtures("processes")
@pytest.mark.case("MCP-10")
def test_a_server_that_ignores_termination_is_killed(bench: Bench) -> None:
    started = monotonic()
    pid = int(str(bench.ask(bench.server("ignores_end"), "pid").result))

    assert not is_alive(pid)
    assert monotonic() - started < 60


@pytest.mark.usefixtures("processes")
def test_a_loop_that_ends_without_closing_leaves_no_process(bench: Bench) -> None:
    pid = int(str(asyncio.run(bench.call(bench.chain(bench.server(), "pid"))).result))

    assert not is_alive(pid)


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_an_idle_connection_is_closed_and_reopened_on_use(bench: Bench) -> None:
    server = reached(bench, bench.server())

    async def scenario() -> None:
        pool = ConnectionPool({}, idle=0.05)
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


@pytest.mark.usefixtures("processes")
def test_the_least_recently_used_connection_is_closed_first(bench: Bench) -> None:
    async def scenario() -> list[int]:
        pool = ConnectionPool({}, most=2)
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


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_a_failing_server_is_retried_after_a_delay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.drivers.mcp.pool.REST", 0.3)
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


def test_delays_between_starts_grow_from_zero(bench: Bench) -> None:
    server, circuit = reached(bench, bench.server()), CircuitBreaker()
    waits = []
    for _ in range(OPENS_AFTER - 1):
        circuit.failed(server, Unavailable("no", suggestion=""))
        waits.append(round(circuit.wait(server), 1))

    assert waits == [0.0, 0.5, 1.5, 3.5]
    circuit.worked()
    circuit.failed(server, Unavailable("no", suggestion=""))
    assert circuit.wait(server) == 0


def test_a_server_may_fail_for_days(bench: Bench) -> None:
    server, circuit = reached(bench, bench.server()), CircuitBreaker(failures=5_000)
    circuit.failed(server, Unavailable("no", suggestion=""))

    with pytest.raises(Unavailable, match=r"failed 5001 times .* \(in 300 s\)"):
        circuit.wait(server)


def test_a_server_without_reconnect_delays_no_caller(bench: Bench) -> None:
    server, circuit = reached(bench, bench.server(reconnect=False)), CircuitBreaker()
    circuit.failed(server, Unavailable("no", suggestion=""))
    circuit.failed(server, Unavailable("no", suggestion=""))

    with pytest.raises(Unavailable, match="failed 2 times"):
        circuit.wait(server)


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_fifty_killed_connections_leave_nothing(bench: Bench) -> None:
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


@pytest.mark.usefixtures("processes")
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
def test_the_era_of_a_server_is_detected_and_remembered(
    bench: Bench, habits: tuple[str, ...], era: Era, version: str
) -> None:
    async def scenario() -> tuple[str, str]:
        listing = await bench.list_items(bench.server(*habits, startup_timeout=2))
        return listing.era, listing.protocol_version

    assert bench.run(scenario()) == (era, version)
    assert bench.driver.eras.get("project/local/hostile@1.0.0") == era


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("known", "habits", "found"), [("modern", (), "legacy"), ("legacy", ("modern",), "modern")])
def test_a_changed_era_is_corrected_on_the_same_connection(
    bench: Bench, known: Era, habits: tuple[str, ...], found: Era
) -> None:
    async def scenario() -> str:
        server = bench.server(*habits)
        bench.driver.eras[server.identity] = known
        return (await bench.list_items(server)).era

    assert bench.run(scenario()) == found
    assert len(starts(bench)) == 1


@pytest.mark.usefixtures("processes")
def test_a_changed_list_is_announced(bench: Bench) -> None:
    changed: list[str] = []
    bench.driver.on_change = changed.append
    bench.ask(bench.server(), "changed")

    assert changed == ["project/local/hostile@1.0.0"]


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_a_killed_kernel_takes_well_behaved_servers_with_it(bench: Bench) -> None:
    program = (
        "import asyncio, sys\n"
        "from kiwi_mcp.domain.plan import ProcessSpec\n"
        "from kiwi_mcp.primitives.process.stdio_process import open_stdio\n"
        "async def main():\n"
        "    async with open_stdio(ProcessSpec(tuple(sys.argv[2:]), sys.argv[1]), secrets={}) as peer:\n"
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
