"""The network of a real sandbox: the hosts that a sandboxed process reaches, and those it does not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import pytest
from msgspec.structs import replace
from tests.sandbox.conftest import PLAIN_PATH, Warden, run_confined

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import SandboxProfile, StartGate
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.egress_proxy import TASK, serve_proxy
from kiwi_mcp.primitives.http.addresses import HostRules, Lookup
from kiwi_mcp.primitives.http.traffic_log import TrafficLog
from kiwi_mcp.primitives.process import namespaces
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.sandbox.backend import choose, examine
from kiwi_mcp.sandbox.bubblewrap import backends

PROBES = """
import errno, json, os, socket, subprocess, sys, urllib.error, urllib.request

port, udp, abstract = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def outcome(work):
    try:
        work()
    except OSError as fault:
        return errno.errorcode.get(fault.errno or 0, type(fault).__name__)
    return "worked"

def direct(host, number):
    return lambda: socket.create_connection((host, number), timeout=2).close()

def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"hello", ("192.0.2.1", udp))

def loopback_datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"hello", ("127.0.0.1", udp))

def fetched(url):
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as fault:
        return [fault.code, fault.read().decode()]

def curl(*words):
    done = subprocess.run(["curl", "-s", "-m", "60", "-o", "/dev/null", "-w", "%{http_code} %{http_connect}", *words],
                          capture_output=True, timeout=120)
    return [done.returncode, done.stdout.decode()]

status = {row.split(":")[0]: row.split(":", 1)[1].strip() for row in open("/proc/1/status").read().splitlines()}
socks = ("-x", "socks5h://127.0.0.1:3128")
print(json.dumps({
    "fetched": fetched(f"http://allowed.test:{port}/path"),
    "elsewhere": fetched(f"http://other.test:{port}/"),
    "tunnel": curl("-p", f"http://allowed.test:{port}/"),
    "socks": curl(*socks, f"http://allowed.test:{port}/"),
    "port": [curl(*way, "http://allowed.test:6379/") for way in (("-p",), socks)],
    "alias": [curl(*way, f"http://{host}:{port}/") for way in ((), ("-p",), socks)
              for host in ("127.0.0.1", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]")],
    "user": curl(f"http://allowed.test@other.test:{port}/"),
    "host_header": curl("-H", "Host: allowed.test", f"http://other.test:{port}/"),
    "without": curl("--noproxy", "*", f"http://127.0.0.1:{port}/"),
    "direct": [outcome(direct(host, port)) for host in ("127.0.0.1", "192.0.2.1", "allowed.test")],
    "datagram": outcome(datagram),
    "loopback_datagram": outcome(loopback_datagram),
    "families": {name: outcome(lambda: socket.socket(family, kind, protocol).close())
                 for name, family, kind, protocol in (("unix", 1, 1, 0), ("netlink", 16, 3, 0), ("packet", 17, 3, 0),
                                                      ("vsock", 40, 1, 0), ("raw", 2, 3, 1), ("raw6", 10, 3, 58))},
    "abstract": outcome(lambda: socket.socket(socket.AF_UNIX).connect(abstract)),
    "pids": len([one for one in os.listdir("/proc") if one.isdigit()]),
    "held": sorted(os.readlink(f"/proc/self/fd/{one}").split(":")[0] for one in os.listdir("/proc/self/fd")
                   if os.path.lexists(f"/proc/self/fd/{one}")),
    "filtered": status["Seccomp"],
    "interfaces": sorted(row.split(":")[0].strip() for row in open("/proc/net/dev").read().splitlines()[2:]),
    "env": {name: value for name, value in os.environ.items() if "proxy" in name.lower()},
}))
"""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


@dataclass
class Outside:
    """What listens on the machine outside, and who came."""

    port: int = 0
    accepts: int = 0
    heads: list[str] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepts += 1
        self.came.set()
        with suppress(asyncio.IncompleteReadError, OSError):
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(ANSWER)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    found = Outside()
    server = await asyncio.start_server(found.answer, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()


async def named(host: str, port: int) -> Sequence[str]:  # as resolvers are called, for every name and port
    assert host.endswith(".test"), (host, port)
    return ["127.0.0.1"]


def cell(keeper: Warden, port: int) -> SandboxProfile:
    hosts = (f"allowed.test:{port}",)
    return SandboxProfile(keeper.level, hosts=hosts, private_hosts=hosts)


async def held(
    keeper: Warden, profile: SandboxProfile, *argv: str, ledger: TrafficLog, seconds: float = 30.0
) -> ProcessResult:
    """Run a command confined and with its proxy; the user must be the right one already."""
    # The interpreter of the tests may lie where an ordinary user cannot reach it.
    sys.executable = keeper.python
    spec = ProcessSpec(argv, cwd="/", env={"PATH": PLAIN_PATH, "HTTP_PROXY": "http://elsewhere"}, timeout=seconds)
    backend_reports = await examine(backends(owner_map=keeper.owner_map), keeper.state, run_confined)
    rules = HostRules(profile.hosts, profile.denied_hosts, profile.private_hosts)
    with choose(profile.level, backend_reports).backend.wrap(spec, profile) as confined:
        assert confined.handover.gate is not None
        async with serve_proxy(rules, confined.handover.gate, ledger, through=Lookup(named)):
            ended = await run_confined(confined)
            confined.check(ended)
            return ended


@dataclass
class Report:
    """What a confined process found, what was written down of it, and who came to the servers outside."""

    found: JsonObject
    ledger: JsonObject
    accepts: int
    heads: list[str]
    datagrams: int
    port: int


@pytest.fixture(scope="module")
def report(keeper: Warden) -> Report:
    async def probed() -> Report:
        ledger = TrafficLog()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as abstract:
            udp.bind(("127.0.0.1", 0))
            udp.setblocking(False)
            abstract.bind(f"\0kiwi-egress-{id(udp)}")
            abstract.listen()
            async with outside() as server:
                words = (str(server.port), str(udp.getsockname()[1]), f"\0kiwi-egress-{id(udp)}".replace("\0", "@"))
                profile = cell(keeper, server.port)
                ended = await held(keeper, profile, keeper.python, "-I", "-c", PROBES, *words, ledger=ledger)
            datagrams = 0
            with suppress(BlockingIOError):
                udp.recv(10)
                datagrams += 1
        assert ended.exit_code == 0, ended.stderr.decode()
        found = as_object(json.loads(ended.stdout))
        return Report(found, ledger.to_json(), server.accepts, server.heads, datagrams, server.port)

    before = sys.executable
    try:
        return keeper.do(lambda: asyncio.run(probed()))
    finally:
        sys.executable = before


def rows(report: Report) -> dict[tuple[Json, Json, Json], JsonObject]:
    found = [as_object(row) for row in as_list(report.ledger["hosts"])]
    return {(row["host"], row["port"], row["verdict"]): row for row in found}


@pytest.mark.case("NET-05")
@pytest.mark.case("NET-09")
def test_a_granted_host_is_reached_by_every_client_and_another_port_by_none(report: Report) -> None:
    assert report.found["fetched"] == [200, "hi"]
    assert report.found["tunnel"] == [0, "200 200"]
    assert report.found["socks"] == [0, "200 000"]
    assert report.found["port"] == [[56, "000 403"], [97, "000 000"]]
    assert report.accepts == 3
    allowed = rows(report)["allowed.test", report.port, "allowed"]
    assert allowed["count"] == 3
    assert allowed["bytes_in"] == 3 * len(ANSWER)
    assert allowed["bytes_out"] == sum(map(len, report.heads))
    assert rows(report)["allowed.test", 6379, "denied"]["count"] == 2


@pytest.mark.case("NET-05")
@pytest.mark.case("NET-10")
def test_a_denial_names_host_port_and_reason(report: Report) -> None:
    status, text = as_list(report.found["elsewhere"])
    response = as_object(json.loads(str(text)))
    assert status == 403
    assert (response["host"], response["port"]) == ("other.test", report.port)
    assert response["reason"] == "it is not among the hosts to be reached"
    assert report.found["user"] == report.found["host_header"] == [0, "403 000"]
    assert all(f"Host: allowed.test:{report.port}" in head for head in report.heads)


@pytest.mark.case("NET-07")
def test_no_spelling_of_a_denied_address_is_reached(report: Report) -> None:
    answers = as_list(report.found["alias"])
    assert len(answers) == 15
    assert all("200" not in str(answer) for answer in answers)


@pytest.mark.case("NET-08")
def test_there_is_no_network_without_the_proxy(report: Report) -> None:
    assert as_list(report.found["without"])[0] == 7
    assert report.found["direct"] == ["ECONNREFUSED", "ENETUNREACH", "gaierror"]
    assert report.found["interfaces"] == ["lo"]


@pytest.mark.case("NET-02")
@pytest.mark.case("NET-03")
@pytest.mark.case("NET-04")
def test_other_socket_kinds_stay_closed_with_a_proxy(report: Report) -> None:
    assert report.found["families"] == {
        **dict.fromkeys(("unix", "netlink", "packet", "vsock"), "EAFNOSUPPORT"),
        **dict.fromkeys(("raw", "raw6"), "EPERM"),
    }
    assert report.found["abstract"] == "EAFNOSUPPORT"
    assert report.found["datagram"] == "ENETUNREACH"
    assert report.datagrams == 0


def test_no_part_of_the_proxy_is_inside_the_sandbox(report: Report) -> None:
    assert report.found["pids"] == 2
    assert report.found["filtered"] == "2"
    assert "socket" not in as_list(report.found["held"])
    way = "http://127.0.0.1:3128"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    response = {**dict.fromkeys(names, way), "NO_PROXY": "", "no_proxy": "", "NODE_USE_ENV_PROXY": "1"}
    assert report.found["env"] == response


WAITING = """
import socket, sys, urllib.request
kept = socket.create_connection(("127.0.0.1", 3128))
kept.sendall(f"CONNECT allowed.test:{sys.argv[1]} HTTP/1.1\\r\\n\\r\\n".encode())
assert b" 200 " in kept.recv(1000)
print("connected", flush=True)
assert kept.recv(1000) == b""
try:
    socket.create_connection(("127.0.0.1", 3128), timeout=120)
except ConnectionRefusedError:
    print("closed")
"""


@pytest.mark.case("DEG-06")
async def test_a_dead_proxy_leaves_no_network_and_flags_the_run(rooted: Warden) -> None:
    ledger = TrafficLog()

    async def work() -> ProcessResult:
        async with outside() as server:
            profile = cell(rooted, server.port)
            words = (rooted.python, "-I", "-c", WAITING, str(server.port))
            run = asyncio.create_task(held(rooted, profile, *words, ledger=ledger))
            await server.came.wait()
            (proxy,) = [task for task in asyncio.all_tasks() if task.get_name() == TASK]
            proxy.cancel()
            return await run

    ended = await asyncio.wait_for(work(), 120)
    assert ended.stdout.split() == [b"connected", b"closed"], ended.stderr.decode()
    assert "before the process did" in str(ledger.to_json()["fault"])


IDLE = """
import socket, sys
kept = []
for _ in range(500):
    one = socket.socket()
    one.settimeout(0.2)
    try:
        one.connect(("127.0.0.1", 3128))
        one.sendall(b"G")
    except OSError:
        break
    kept.append(one)
open(sys.argv[1], "w").write(str(len(kept)))
kept[0].settimeout(60)
kept[0].recv(1)
"""


def appears(path: Path) -> None:
    end = monotonic() + 120
    while not path.exists() and monotonic() < end:
        sleep(0.01)
    assert path.exists()


@pytest.mark.case("NET-11")
async def test_a_sandbox_that_overloads_its_proxy_does_not_affect_another(rooted: Warden) -> None:
    marker = rooted.folder("marker") / "starving"

    async def work() -> tuple[bytes, float]:
        async with outside() as server:
            profile = cell(rooted, server.port)
            starved = replace(profile, writable=(str(marker.parent),))
            words = (rooted.python, "-I", "-c", IDLE, str(marker))
            starving = asyncio.create_task(held(rooted, starved, *words, ledger=TrafficLog()))
            await asyncio.to_thread(appears, marker)
            fetch = f"TIMEFORMAT=%R; time curl -s -m 60 http://allowed.test:{server.port}/"
            ended = await held(rooted, profile, "/bin/bash", "-c", fetch, ledger=TrafficLog())
            assert not starving.done()
            starving.cancel()
            with suppress(asyncio.CancelledError):
                await starving
            return ended.stdout, float(ended.stderr)

    said, seconds = await asyncio.wait_for(work(), 120)
    assert said == b"hi"
    assert seconds < 20


async def test_restricted_refuses_hosts_before_anything_runs(strict: Warden) -> None:
    marker = strict.folder("marker")
    profile = SandboxProfile("restricted", writable=(str(marker),), hosts=("allowed.test",))
    with pytest.raises(IsolationUnavailable, match=r"has no network, and the tool needs allowed\.test"):
        await held(strict, profile, "/bin/sh", "-c", f": >{marker}/ran", ledger=TrafficLog())
    assert [*marker.iterdir()] == []


async def test_a_process_without_its_proxy_never_starts(rooted: Warden, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = rooted.folder("marker")
    monkeypatch.setattr("kiwi_mcp.primitives.process.namespaces.PROXY", ("256.0.0.1", 3128))
    profile = SandboxProfile("sandboxed", writable=(str(marker),), hosts=("allowed.test",))
    with pytest.raises(IsolationUnavailable, match="got no way to the network"):
        await held(rooted, profile, "/bin/sh", "-c", f": >{marker}/ran", ledger=TrafficLog())
    assert [*marker.iterdir()] == []


async def test_the_end_of_a_pipe_does_not_start_the_process(rooted: Warden) -> None:
    marker = rooted.folder("marker")
    profile = SandboxProfile("sandboxed", writable=(str(marker),), hosts=("allowed.test",))

    async def work() -> ProcessResult:
        spec = ProcessSpec(("/bin/sh", "-c", f": >{marker}/ran"), cwd="/", timeout=1.0)
        backend_reports = await examine(backends(owner_map=rooted.owner_map), rooted.state, run_confined)
        with choose("sandboxed", backend_reports).backend.wrap(spec, profile) as confined:
            gate: StartGate | None = confined.handover.gate
            assert gate is not None
            return await run_confined(confined)

    assert (await work()).timed_out
    assert not Path(marker, "ran").exists()


async def test_a_killed_helper_is_restarted(rooted: Warden) -> None:
    async def fetched() -> bytes:
        async with outside() as server:
            curl = ("curl", "-s", "-m", "60", f"http://allowed.test:{server.port}/")
            return (await held(rooted, cell(rooted, server.port), *curl, ledger=TrafficLog())).stdout

    async def work() -> list[bytes]:
        first = await fetched()
        process = namespaces._helpers[os.getpid()]._process
        process.kill()
        process.wait()
        return [first, await fetched()]

    assert await asyncio.wait_for(work(), 120) == [b"hi", b"hi"]


def test_several_sandboxes_start_their_proxies_concurrently(keeper: Warden) -> None:
    async def work() -> list[bytes]:
        async with outside() as server:
            curl = ("curl", "-s", "-m", "60", f"http://allowed.test:{server.port}/")
            runs = [held(keeper, cell(keeper, server.port), *curl, ledger=TrafficLog()) for _ in range(8)]
            return [ended.stdout for ended in await asyncio.gather(*runs)]

    before = sys.executable
    try:
        assert keeper.do(lambda: asyncio.run(asyncio.wait_for(work(), 120))) == [b"hi"] * 8
    finally:
        sys.executable = before
