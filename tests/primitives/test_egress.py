"""The proxy without a sandbox: requests over loopback, and what reaches the servers behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TypeVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import AddressDenied, KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.egress_proxy import Proxy, ProxyLimits
from kiwi_mcp.primitives.http.addresses import HostRules, Lookup
from kiwi_mcp.primitives.http.request import prepare, refuse_denied
from kiwi_mcp.primitives.http.traffic_log import LISTED, TrafficLog

pytestmark = pytest.mark.usefixtures("loopback")

T = TypeVar("T")
PUBLIC = "93.184.216.34"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass
class Server:
    """A server on loopback that keeps what it is sent."""

    port: int = 0
    accepts: int = 0
    received: bytearray = field(default_factory=bytearray)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepts += 1
        while data := await reader.read(65_536):
            self.received += data
            self.came.set()
            if b"\r\n\r\n" in self.received:
                writer.write(ANSWER)
                break
        with suppress(OSError):
            await writer.drain()
            writer.close()


class World(Lookup):
    """Names of tests, which all lead to this machine; ports of the web lead to the server that stands for them."""

    def __init__(self, server: Server, names: dict[str, Sequence[str]] | None = None) -> None:
        super().__init__(self._named)
        self.asked: list[str] = []
        self._server = server
        self._names = names or {}

    async def _named(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._names.get(host, [PUBLIC])

    async def connect_to(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Go to the server, whatever public address a name has."""
        assert addresses == [PUBLIC] or port == self._server.port
        return await super().connect_to(["127.0.0.1"], self._server.port)


@dataclass
class Stage:
    """A proxy, the server behind it, and what it has written down."""

    server: Server
    world: World
    ledger: TrafficLog
    proxy: Proxy
    port: int
    task: asyncio.Task[None]

    async def say(self, *words: bytes) -> bytes:
        """Send each of the words once the last was answered, and return what comes back until the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        heard = b""
        try:
            async with asyncio.timeout(120):
                for place, word in enumerate(words):
                    writer.write(word)
                    if place < len(words) - 1:
                        heard += await reader.read(65_536)
                writer.write_eof()
                with suppress(ConnectionResetError):
                    while data := await reader.read(65_536):
                        heard += data
        finally:
            writer.close()
        return heard

    async def get(self, url: str, *headers: str) -> tuple[int, JsonObject | str]:
        """Ask for an address, and return the status and what was said."""
        head = "\r\n".join([f"GET {url} HTTP/1.1", *headers, "", ""])
        return _parsed(await self.say(head.encode("latin-1")))

    async def connect(self, target: str, *words: bytes) -> tuple[int, JsonObject | str]:
        """Ask for a tunnel, and say something through it."""
        return _parsed(await self.say(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode("latin-1"), *words))

    async def socks(self, host: bytes, port: int, *words: bytes) -> bytes:
        """Ask for a connection by SOCKS, and return what comes after the greeting."""
        wanted = b"\x05\x01\x00\x03" + bytes([len(host)]) + host + port.to_bytes(2, "big")
        return (await self.say(b"\x05\x01\x00", wanted, *words))[2:]

    def rows(self) -> list[tuple[object, ...]]:
        """Return host, port, verdict and count of every row."""
        rows = [as_object(row) for row in as_list(self.ledger.to_json()["hosts"])]
        return [(row["host"], row["port"], row["verdict"], row["count"]) for row in rows]


def _parsed(heard: bytes) -> tuple[int, JsonObject | str]:
    head, _, body = heard.partition(b"\r\n\r\n")
    words = head.split(b" ")
    text = body.decode("latin-1")
    return int(words[1]) if len(words) > 1 else 0, json.loads(text) if b"application/json" in head else text


@asynccontextmanager
async def staged(rules: HostRules, caps: ProxyLimits, names: dict[str, Sequence[str]]) -> AsyncIterator[Stage]:
    server = Server()
    served = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.port = served.sockets[0].getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    world, ledger, port = World(server, names), TrafficLog(), listener.getsockname()[1]
    proxy = Proxy(rules, ledger, world, caps)
    task = asyncio.create_task(proxy.serve(listener))
    try:
        yield Stage(server, world, ledger, proxy, port, task)
    finally:
        ledger.is_closed = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        served.close()


def run(
    work: Callable[[Stage], Awaitable[T]],
    rules: HostRules,
    caps: ProxyLimits = ProxyLimits(),  # noqa: B008 - it is frozen
    names: dict[str, Sequence[str]] | None = None,
) -> T:
    async def whole() -> T:
        async with staged(rules, caps, names or {}) as stage:
            return await work(stage)

    return asyncio.run(whole())


def hello(name: str | None, *, alpn: Sequence[str] = ()) -> bytes:
    """Return what a TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols(alpn)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


WEB = HostRules(("allowed.test", "*.wild.test"))


@pytest.mark.case("NET-05")
def test_a_granted_host_is_reached_only_on_its_port() -> None:
    async def work(stage: Stage) -> None:
        assert await stage.get("http://allowed.test/path?q=1") == (200, "hi")
        status, response = await stage.get("http://allowed.test:8080/")
        assert status == 403
        response = as_object(response)
        assert (response["host"], response["port"]) == ("allowed.test", 8080)
        assert response["reason"] == "it may be reached, but not at port 8080"
        assert "needs.hosts" in str(response["suggestion"])
        assert stage.server.accepts == 1
        assert stage.rows() == [("allowed.test", 80, "allowed", 1), ("allowed.test", 8080, "denied", 1)]

    run(work, WEB)


@pytest.mark.case("NET-05")
def test_a_rule_with_a_port_covers_only_that_port() -> None:
    async def work(stage: Stage) -> list[int]:
        return [(await stage.get(f"http://allowed.test:{port}/"))[0] for port in (80, 443, 8080)]

    assert run(work, HostRules(("allowed.test:8080",))) == [403, 403, 200]


NAMES = {
    "allowed.test": True,
    "ALLOWED.TEST": True,
    "allowed.test.": True,
    "a.wild.test": True,
    "a.b.wild.test": True,
    "wild.test": False,
    "notwild.test": False,
    "allowed.test.evil.test": False,
    "notallowed.test": False,
    "allowed.test\0.evil.test": False,
    "evil.test\0allowed.test": False,
    "allowed.test..": False,
    "xn--allowed-.test": False,
    "\xe4llowed.test": False,
    "allowed.test%00": False,
    "allowed.test\\.evil.test": False,
    "": False,
}


@pytest.mark.case("NET-06")
@pytest.mark.parametrize(("name", "is_reached"), NAMES.items(), ids=map(ascii, NAMES))
def test_only_the_intended_names_match(name: str, is_reached: bool) -> None:
    async def work(stage: Stage) -> None:
        status, _ = await stage.connect(f"{name}:80", b"GET / HTTP/1.1\r\n\r\n")
        assert (status == 200) is is_reached
        answered = await stage.socks(name.encode("latin-1"), 80, b"GET / HTTP/1.1\r\n\r\n")
        assert answered[:2] == (b"\x05\x00" if is_reached else b"\x05\x02")
        assert stage.server.accepts == (2 if is_reached else 0)
        assert all(row[2] == ("allowed" if is_reached else "denied") for row in stage.rows())
        assert stage.rows()

    run(work, WEB)


ALIASES = ("127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0x7f000001", "[::ffff:127.0.0.1]", "127.0.0.1")


@pytest.mark.case("NET-07")
@pytest.mark.parametrize("alias", ALIASES)
def test_other_spellings_of_an_address_are_refused_unless_granted_exactly(alias: str) -> None:
    async def work(stage: Stage) -> None:
        port = stage.server.port
        assert (await stage.get(f"http://{alias}:{port}/"))[0] == 403
        assert (await stage.connect(f"{alias}:{port}"))[0] == 403
        assert stage.server.accepts == 0

    run(work, HostRules(("localhost", "*.test", "93.184.216.34")))


@pytest.mark.case("NET-07")
def test_a_granted_address_is_reached() -> None:
    async def work(stage: Stage) -> list[int]:
        port = stage.server.port
        rules = HostRules((f"127.0.0.1:{port}",), (), (f"127.0.0.1:{port}",))
        stage.proxy._rules = rules  # the port is known only now
        return [(await stage.get(f"http://{host}:{port}/"))[0] for host in ("127.0.0.1", "127.1", "[::ffff:127.0.0.1]")]

    assert run(work, HostRules(())) == [200, 403, 403]


@pytest.mark.case("NET-07")
def test_a_public_name_with_a_private_address_is_refused() -> None:
    async def work(stage: Stage) -> None:
        status, response = await stage.get("http://allowed.test/")
        assert status == 403
        assert "not a public address" in str(response)
        assert stage.server.accepts == 0

    run(work, WEB, names={"allowed.test": ["127.0.0.1"]})
    run(work, WEB, names={"allowed.test": [PUBLIC, "10.0.0.1"]})


@pytest.mark.case("NET-09")
@pytest.mark.parametrize("port", [22, 25, 6379])
def test_a_tunnel_to_a_port_that_was_not_granted_is_refused(port: int) -> None:
    async def work(stage: Stage) -> None:
        assert (await stage.connect(f"allowed.test:{port}"))[0] == 403
        assert (await stage.socks(b"allowed.test", port))[:2] == b"\x05\x02"
        assert stage.server.accepts == 0
        assert stage.rows() == [("allowed.test", port, "denied", 2)]

    run(work, WEB)


@pytest.mark.case("NET-10")
def test_the_target_is_that_of_the_request_line() -> None:
    async def work(stage: Stage) -> None:
        for url in (
            "http://allowed.test@evil.test/",
            "http://allowed.test:80@evil.test/",
            "http://evil.test@allowed.test/",
            "http://evil.test\\@allowed.test/",
            "http://evil.test/allowed.test",
        ):
            assert (await stage.get(url, "Host: allowed.test"))[0] == 403, url
        assert stage.server.accepts == 0
        assert (await stage.get("http://allowed.test/", "Host: evil.test", "hOsT: other.test"))[0] == 200
        assert b"Host: allowed.test\r\n" in stage.server.received
        assert b"evil.test" not in stage.server.received
        assert sum(int(str(row[3])) for row in stage.rows() if row[0] == "evil.test") == 3

    run(work, WEB)


@pytest.mark.case("NET-10")
@pytest.mark.parametrize("way", ["connect", "socks"])
def test_a_tunnel_to_the_http_port_reaches_only_its_own_host(way: str) -> None:
    async def say(stage: Stage, *lines: str) -> None:
        words = "\r\n".join([*lines, "", ""]).encode()
        if way == "connect":
            await stage.connect("allowed.test:80", words)
        else:
            await stage.socks(b"allowed.test", 80, words)

    async def work(stage: Stage) -> None:
        second = "GET /second HTTP/1.1\r\nHost: evil.test"
        await say(stage, "POST /a HTTP/1.1", "Host: evil.test", "Content-Length: 2", "", f"hi{second}")
        assert stage.server.received.startswith(b"POST /a HTTP/1.1\r\nHost: allowed.test\r\n")
        assert stage.server.received.endswith(b"\r\n\r\nhi")
        assert b"evil.test" not in stage.server.received
        stage.server.received.clear()
        for line in ("GET http://evil.test/ HTTP/1.1", "CONNECT evil.test:80 HTTP/1.1", "PRI * HTTP/2.0", "EHLO evil"):
            await say(stage, line, "Host: evil.test")
        assert not stage.server.received
        assert stage.rows()[1:] == [("allowed.test", 80, "denied", 2)] * 2

    run(work, WEB)


@pytest.mark.case("NET-10")
def test_only_absolute_urls_with_http_are_accepted() -> None:
    async def work(stage: Stage) -> list[int]:
        return [
            (await stage.get(url, "Host: allowed.test"))[0]
            for url in (
                "/path",
                "https://allowed.test/",
                "file:///etc/passwd",
                "ftp://allowed.test/",
                "*",
                "http:/allowed.test",
            )
        ]

    assert run(work, WEB) == [400] * 6


SMUGGLED = b"GET http://allowed.test/second HTTP/1.1\r\nHost: inner.test\r\n\r\n"
POST = b"POST http://allowed.test/ HTTP/1.1\r\n"
BODIES = {
    "none": b"GET http://allowed.test/ HTTP/1.1\r\n\r\n",
    "counted": POST + b"Content-Length: 3\r\n\r\nabc",
    "chunked": POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\n",
}


@pytest.mark.case("NET-10")
@pytest.mark.parametrize("kind", BODIES)
def test_a_connection_carries_one_request_and_nothing_after_it(kind: str) -> None:
    async def work(stage: Stage) -> None:
        assert (await stage.say(BODIES[kind] + SMUGGLED)).endswith(b"hi")
        assert b"second" not in stage.server.received
        assert (b"abc" in stage.server.received) is (kind != "none")
        assert b"x=y" not in stage.server.received

    run(work, WEB)


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Content-Length: 3\r\nContent-Length: 4",
        "Content-Length: +3",
        "Transfer-Encoding: gzip, chunked",
        "Host : evil.test",
        "X: a\r\n folded",
        "X: a\nHost: evil.test",
        "X: \0",
    ],
)
def test_an_ambiguous_request_head_is_refused(head: str) -> None:
    async def work(stage: Stage) -> None:
        heard = await stage.say(f"POST http://allowed.test/ HTTP/1.1\r\n{head}\r\n\r\nabc".encode())
        assert b" 400 " in heard.partition(b"\r\n")[0]
        assert stage.server.accepts == 0

    run(work, WEB)


def test_hop_by_hop_headers_are_not_forwarded() -> None:
    async def work(stage: Stage) -> None:
        await stage.get(
            "http://allowed.test/",
            *(
                "Proxy-Authorization: Basic eDp5",
                "Connection: keep-alive, X-Secret",
                "X-Secret: 1",
                "Upgrade: websocket",
            ),
            "X-Kept: 1",
        )
        head = stage.server.received.decode()
        assert head == "GET / HTTP/1.1\r\nHost: allowed.test\r\nX-Kept: 1\r\nConnection: close\r\n\r\n"

    run(work, WEB)


TLS = {
    "allowed.test": True,
    "ALLOWED.test": True,
    "evil.test": False,
    "allowed.test.evil.test": False,
    None: False,
}


@pytest.mark.case("NET-06")
@pytest.mark.parametrize(("name", "is_passed"), TLS.items(), ids=map(str, TLS))
def test_the_tls_server_name_must_be_the_requested_name(name: str | None, is_passed: bool) -> None:
    async def work(stage: Stage) -> None:
        said = hello(name)
        await stage.connect("allowed.test:443", said)
        await stage.socks(b"allowed.test", 443, said)
        assert bytes(stage.server.received) == (2 * said if is_passed else b"")
        assert [row[2] for row in stage.rows()] == (["allowed"] if is_passed else ["allowed", "denied"])

    run(work, WEB)


def test_a_client_hello_in_several_pieces_and_records_is_read_in_full() -> None:
    whole = hello("allowed.test", alpn=["h2", "http/1.1"])
    body = whole[5:]
    split = b"".join(whole[:3] + len(part).to_bytes(2, "big") + part for part in (body[:1], body[1:60], body[60:]))

    async def work(stage: Stage) -> None:
        await stage.connect("allowed.test:443", split)
        assert bytes(stage.server.received) == split

    run(work, WEB)


def test_traffic_that_is_not_tls_is_not_sent_to_the_tls_port() -> None:
    async def work(stage: Stage) -> None:
        for said in (
            b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",
            b"\x16\x02",
        ):
            await stage.connect("allowed.test:443", said)
        assert stage.server.received == b""
        assert stage.server.accepts == 3

    run(work, WEB)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 400))
def test_no_invalid_client_hello_is_forwarded_or_breaks_the_proxy(noise: bytes, at: int) -> None:
    sound = hello("allowed.test")
    broken = sound[:at] + noise + sound[at + len(noise) + 1 :]
    if broken == sound or b"allowed.test" in broken:
        return

    async def work(stage: Stage) -> None:
        await stage.connect("allowed.test:443", broken)
        assert stage.server.received == b""
        assert not stage.task.done()

    run(work, WEB)


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_no_input_breaks_the_proxy(noise: bytes) -> None:
    async def work(stage: Stage) -> None:
        await stage.say(noise)
        assert not stage.task.done()
        assert (await stage.get("http://allowed.test/"))[0] == 200

    run(work, WEB)


@pytest.mark.case("NET-11")
def test_idle_and_slow_clients_are_closed_without_affecting_another_sandbox() -> None:
    caps = ProxyLimits(at_once=8, head_seconds=0.4)

    async def slow(port: int) -> None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for byte in b"GET http://allowed.test/":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    with suppress(TimeoutError):
                        if not await asyncio.wait_for(reader.read(1), 0.1):
                            return
            finally:
                writer.close()

    async def work(stage: Stage) -> None:
        async with staged(WEB, ProxyLimits(), {}) as other:
            starving = [asyncio.create_task(slow(stage.port)) for _ in range(500)]
            await asyncio.sleep(0)
            began = monotonic()
            assert (await other.get("http://allowed.test/"))[0] == 200
            assert monotonic() - began < 20
            assert len(stage.proxy._serving) <= 8
            for task in starving:
                task.cancel()
            await asyncio.gather(*starving, return_exceptions=True)
        assert stage.server.accepts == 0

    run(work, WEB, caps)


@pytest.mark.case("NET-11")
def test_a_slow_head_times_out_and_a_large_one_is_refused() -> None:
    async def work(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"GET http://")
        async with asyncio.timeout(120):
            assert (await reader.read(100)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert (await stage.get("http://allowed.test/", f"X: {'x' * 9_000}"))[0] == 431

    run(work, WEB, ProxyLimits(head_seconds=0.1, head_bytes=4_096))


def test_an_idle_connection_is_closed() -> None:
    async def work(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"CONNECT allowed.test:7000 HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(120):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"half of a request")
            assert await reader.read(1) == b""
        writer.close()

    run(work, HostRules(("allowed.test:7000",)), ProxyLimits(idle_seconds=0.2))


def test_transfers_stop_at_the_byte_limit() -> None:
    async def work(stage: Stage) -> None:
        await stage.connect("allowed.test:7000", b"x" * 900_000)
        assert len(stage.server.received) < 200_000
        status, response = await stage.get("http://allowed.test:7000/")
        assert status == 403
        assert "limit" in str(response)

    run(work, HostRules(("allowed.test:7000",)), ProxyLimits(total_bytes=100_000))


def test_new_traffic_rows_are_reported_once() -> None:
    ledger = TrafficLog()
    assert ledger.news() == {}
    row = ledger.note("allowed.test", 443, "allowed")
    row.bytes_out += 5
    assert (ledger.news()["bytes_out"], ledger.news()) == (5, {})
    row.bytes_out += 7
    ledger.note("evil.test", 443, "denied", "it is not granted")
    response = ledger.news()
    hosts = [(one["host"], one["count"], one["bytes_out"]) for one in map(as_object, as_list(response["hosts"]))]
    assert (response["connections"], hosts) == (1, [("allowed.test", 0, 7), ("evil.test", 1, 0)])
    assert ledger.to_json()["bytes_out"] == 12


@pytest.mark.case("DEG-06")
def test_a_proxy_that_dies_leaves_nothing_open_and_reports_it() -> None:
    async def work(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"CONNECT allowed.test:80 HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        stage.task.cancel()
        async with asyncio.timeout(120):
            assert await reader.read(1) == b""
        writer.close()
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.1", stage.port)
        assert "before the process did" in str(stage.ledger.to_json()["fault"])

    run(work, WEB)


def test_a_proxy_at_its_connection_limit_ends_and_reports_it() -> None:
    async def work(stage: Stage) -> None:
        for _ in range(3):
            await stage.get("http://allowed.test/")
        await asyncio.wait_for(stage.task, 120)
        assert "3 connections" in str(stage.ledger.to_json()["fault"])

    run(work, WEB, ProxyLimits(connections=3))


def test_the_traffic_log_contains_hosts_and_sums_without_paths_and_has_a_row_limit() -> None:
    async def work(stage: Stage) -> None:
        await stage.get("http://allowed.test/secret-path?token=abc")
        response = stage.ledger.to_json()
        assert "secret" not in json.dumps(response)
        assert response["hosts"] == [
            {
                "host": "allowed.test",
                "port": 80,
                "verdict": "allowed",
                "count": 1,
                "bytes_out": len(stage.server.received),
                "bytes_in": len(ANSWER),
            }
        ]
        for number in range(LISTED + 20):
            stage.ledger.note(f"n{number}.test", 80, "denied", "x")
        response = stage.ledger.to_json()
        assert len(as_list(response["hosts"])) == LISTED
        assert response["unlisted"] == 21
        assert response["connections"] == LISTED + 21

    run(work, WEB)


def test_an_unreachable_server_is_distinguished_from_a_denied_one() -> None:
    class Down(World):
        async def connect_to(self, addresses: Sequence[str], port: int) -> socket.socket:
            raise ConnectionRefusedError(111, f"Connection refused by {addresses} at {port}")

    async def work(stage: Stage) -> None:
        stage.proxy._through = Down(stage.server)
        assert (await stage.get("http://allowed.test/"))[0] == 503
        assert (await stage.socks(b"allowed.test", 80))[:2] == b"\x05\x04"
        assert stage.rows() == [("allowed.test", 80, "failed", 2)]

    run(work, WEB)


def test_a_tls_handshake_passes_and_one_for_another_name_is_reported(
    certified: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    theirs, ours = certified

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        await writer.drain()
        writer.close()

    async def visited(stage: Stage, name: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        try:
            writer.write(b"CONNECT allowed.test:443 HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await writer.start_tls(ours, server_hostname=name)
            return await reader.read()
        finally:
            writer.close()

    async def work(stage: Stage) -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=theirs)
        stage.server.port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(120):
            assert await visited(stage, "allowed.test") == b"welcome"
            with pytest.raises(ssl.SSLError, match="unrecognized name"):
                await visited(stage, "other.test")
        server.close()

    run(work, WEB)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server with a certificate for both names, and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")]), datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("allowed.test"), x509.DNSName("other.test")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    written = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(written + private)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=written.decode())


CASES: dict[str, tuple[str, int, HostRules, str, bool]] = {
    "a public name": ("a.test", 80, HostRules(), PUBLIC, True),
    "a denied name": ("a.test", 80, HostRules(denied=("a.test",)), PUBLIC, False),
    "denied in upper case": ("A.test", 80, HostRules(denied=("a.TEST",)), PUBLIC, False),
    "denied with a dot": ("a.test.", 80, HostRules(denied=("a.test",)), PUBLIC, False),
    "denied by a pattern": ("b.a.test", 80, HostRules(denied=("*.a.test",)), PUBLIC, False),
    "a pattern is not about the apex": ("a.test", 80, HostRules(denied=("*.a.test",)), PUBLIC, True),
    "denied by a glob": ("ab.test", 80, HostRules(denied=("a*.test",)), PUBLIC, False),
    "denied at a port": ("a.test", 8080, HostRules(denied=("a.test:8080",)), PUBLIC, False),
    "denied at another port": ("a.test", 8080, HostRules(denied=("a.test:80",)), PUBLIC, True),
    "every host denied at a port": ("a.test", 22, HostRules(denied=("*:22",)), PUBLIC, False),
    "denied and granted": ("a.test", 80, HostRules(denied=("a.test",), granted=("a.test",)), "127.0.0.1", False),
    "private": ("a.test", 80, HostRules(), "10.0.0.1", False),
    "private and granted": ("a.test", 80, HostRules(granted=("a.test",)), "10.0.0.1", True),
    "granted at another port": ("a.test", 80, HostRules(granted=("a.test:81",)), "10.0.0.1", False),
    "granted at this port": ("a.test", 81, HostRules(granted=("a.test:81",)), "10.0.0.1", True),
    "another spelling": ("127.1", 80, HostRules(granted=("127.0.0.1",)), "127.0.0.1", False),
    "that very spelling": ("127.0.0.1", 80, HostRules(granted=("127.0.0.1",)), "127.0.0.1", True),
    "mapped": ("[::ffff:127.0.0.1]", 80, HostRules(granted=("127.0.0.1",)), "127.0.0.1", False),
    "metadata": ("169.254.169.254", 80, HostRules(), "169.254.169.254", False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_http_client_and_the_proxy_give_the_same_verdict(case: str) -> None:
    host, port, rules, address, is_allowed = CASES[case]

    async def resolve(_: str, __: int) -> Sequence[str]:
        return [address]

    async def requested() -> None:
        request = prepare(HttpSpec("GET", f"http://{host}:{port}/"), {})
        refuse_denied(request, rules.denied)
        await Lookup(resolve).addresses(request.host, request.port, rules.granted)

    async def proxied() -> None:
        plain = host.strip("[]").lower().removesuffix(".")
        listed = HostRules((f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}",), rules.denied, rules.granted)
        if (reason := listed.refusal(plain, port)) is not None:
            raise AddressDenied(reason, suggestion="-")
        await Lookup(resolve).addresses(plain, port, rules.granted)

    assert (_verdict(requested()), _verdict(proxied())) == (is_allowed, is_allowed)


def _verdict(work: Coroutine[object, object, None]) -> bool:
    try:
        asyncio.run(work)
    except KiwiError:
        return False
    return True
