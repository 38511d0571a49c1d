from __future__ import annotations

import asyncio
import gzip
import ssl
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kiwi_mcp.domain.errors import AddressDenied, InvalidRequest, KiwiError, RequestFailed, TooLarge, VariableMissing
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.plan import HttpSpec, Retry
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.client import HttpReply
from kiwi_mcp.primitives.http.pool import Network, tls_context
from kiwi_mcp.primitives.http.sse import ServerEvent

T = TypeVar("T")
LOCAL = ("*.test", "127.0.0.1")
ONCE = Retry()


@dataclass(frozen=True)
class Seen:
    """A request as a server saw it."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split()[1]


@dataclass
class Server:
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0


Answer = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes = b"ok", status: str = "200 OK", **headers: str) -> Answer:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines])
        writer.write(head.encode() + b"\r\n\r\n" + body)

    return answer


def one_after_the_other(*answers: Answer) -> Answer:
    left = list(answers)

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(seen, writer)

    return answer


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                server.seen.append(Seen(head[0], headers, body))
                await answer(server.seen[-1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


async def here(host: str, port: int) -> Sequence[str]:
    answers = {"mixed.example": ["93.184.216.34", "10.0.0.7"], "none.test": []}
    if host == "broken.test":
        raise OSError("no such name")
    return answers.get(host, ["127.0.0.1"])


def run(story: Callable[[Network], Coroutine[object, object, T]], network: Network | None = None) -> T:
    async def main() -> T:
        through = network or Network(here)
        try:
            return await story(through)
        finally:
            await through.aclose()

    return asyncio.run(main())


def a_spec(
    url: str,
    method: str = "GET",
    *,
    headers: dict[str, str] | None = None,
    body: Json = None,
    has_body: bool = False,
    timeout: float = 10.0,
    max_bytes: int = 1_000_000,
    max_redirects: int = 5,
    retry: Retry = ONCE,
    max_events: int = 1000,
    granted: tuple[str, ...] = LOCAL,
) -> HttpSpec:
    return HttpSpec(
        method=method,
        url=url,
        headers=headers or {},
        body=body,
        has_body=has_body or body is not None,
        timeout=timeout,
        max_bytes=max_bytes,
        max_redirects=max_redirects,
        retry=retry,
        max_events=max_events,
        granted=granted,
    )


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
def test_a_request_is_sent_and_its_response_returned() -> None:
    async def story(network: Network) -> tuple[HttpReply, Server]:
        async with serving(reply(b'{"a": 1}', Content_Type="application/json", X_Two="1")) as server:
            spec = a_spec(
                f"http://api.test:{server.port}/v1/x?q=1#part",
                "post",
                headers={"X-Key": "${KEY}"},
                body={"t": 'say "${KEY}"'},
            )
            return await client.send(spec, secrets={"KEY": 'a"b,c-1'}, through=network), server

    answer, server = run(story)
    assert (answer.status, answer.body, answer.attempts, answer.is_truncated) == (200, b'{"a": 1}', 1, False)
    assert answer.headers["content-type"] == "application/json"
    assert answer.url == f"http://api.test:{server.port}/v1/x"
    (seen,) = server.seen
    assert seen.line == "POST /v1/x?q=1 HTTP/1.1"
    assert seen.headers["host"] == f"api.test:{server.port}"
    assert seen.headers["x-key"] == 'a"b,c-1'
    assert seen.headers["content-type"] == "application/json"
    assert seen.body == b'{"t":"say \\"a\\"b,c-1\\""}'


@pytest.mark.usefixtures("loopback")
def test_a_string_is_sent_as_text_and_a_content_type_can_be_set() -> None:
    async def story(network: Network) -> list[Seen]:
        async with serving(reply()) as server:
            url = f"http://127.0.0.1:{server.port}/"
            await client.send(a_spec(url, "PUT", body="a ${K} $${K}"), secrets={"K": "välue"}, through=network)
            await client.send(a_spec(url, "PUT", body="<a/>", headers={"content-type": "text/xml"}), through=network)
            await client.send(a_spec(url, "POST", has_body=True), through=network)
            await client.send(a_spec(url, "POST"), through=network)
            return server.seen

    text, xml, null, none = run(story)
    assert (text.body.decode(), text.headers["content-type"]) == ("a välue ${K}", "text/plain; charset=utf-8")
    assert (xml.body, xml.headers["content-type"]) == (b"<a/>", "text/xml")
    assert (null.body, none.body, none.headers["content-length"]) == (b"null", b"", "0")


@pytest.mark.usefixtures("loopback")
def test_connections_are_reused() -> None:
    async def story(network: Network) -> int:
        async with serving(reply()) as server:
            for _ in range(5):
                await client.send(a_spec(f"http://api.test:{server.port}/"), through=network)
            return server.connections

    assert run(story) == 1


def test_there_is_one_tls_context() -> None:
    assert tls_context() is tls_context()
    assert client.network.tls() is tls_context()
    assert tls_context().verify_mode == ssl.CERT_REQUIRED
    assert tls_context().check_hostname


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-12")
def test_a_request_to_a_private_host_is_refused_before_any_packet() -> None:
    async def story(network: Network) -> Server:
        async with serving(reply()) as server:
            for host in ("127.0.0.1", "api.test", "localhost", "127.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]"):
                with pytest.raises(AddressDenied):
                    await client.send(a_spec(f"http://{host}:{server.port}/", granted=()), through=network)
            return server

    server = run(story)
    assert server.connections == 0


@pytest.mark.usefixtures("loopback")
def test_a_connection_made_under_a_grant_is_not_used_without_it() -> None:
    async def story(network: Network) -> Server:
        async with serving(reply()) as server:
            url = f"http://api.test:{server.port}/"
            await client.send(a_spec(url), through=network)
            with pytest.raises(AddressDenied):
                await client.send(a_spec(url, granted=(f"api.test:{server.port + 1}",)), through=network)
            return server

    assert len(run(story).seen) == 1


@pytest.mark.case("NET-14")
def test_one_private_address_refuses_the_whole_name() -> None:
    async def story(network: Network) -> None:
        with pytest.raises(AddressDenied) as caught:
            await client.send(a_spec("http://mixed.example/", granted=()), through=network)
        assert "10.0.0.7" in caught.value.message

    run(story)


@pytest.mark.usefixtures("loopback")
def test_a_name_is_looked_up_once_per_connection() -> None:
    asked: list[str] = []

    async def rebinding(host: str, _: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    async def story(network: Network) -> Server:
        async with serving(reply()) as server:
            await client.send(a_spec(f"http://api.test:{server.port}/"), through=network)
            return server

    assert len(run(story, Network(rebinding)).seen) == 1
    assert asked == ["api.test"]


@pytest.mark.case("NET-10")
@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://allowed.test@evil.test/", {}),
        ("http://user:pass@api.test/", {}),
        ("http://api.test/", {"Host": "allowed.test"}),
        ("http://api.test/", {"Content-Length": "3"}),
        ("http://api.test/", {"transfer-encoding": "chunked"}),
        ("file:///etc/passwd", {}),
        ("gopher://api.test/", {}),
        ("//api.test/", {}),
        ("http:///x", {}),
        ("http://api.test:99999/", {}),
        ("nonsense", {}),
    ],
)
def test_a_url_that_hides_its_target_is_refused(url: str, headers: dict[str, str]) -> None:
    async def story(network: Network) -> None:
        with pytest.raises((InvalidRequest, AddressDenied)):
            await client.send(a_spec(url, headers=headers), through=network)

    run(story)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("INJ-05")
@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\rb", "a\0b"])
def test_a_line_break_in_a_header_or_url_is_refused(value: str) -> None:
    async def story(network: Network) -> Server:
        async with serving(reply()) as server:
            url = f"http://api.test:{server.port}/"
            for spec in (a_spec(url, headers={"X": value}), a_spec(url, headers={"X": "${V}"}), a_spec(url + value)):
                with pytest.raises(InvalidRequest) as caught:
                    await client.send(spec, secrets={"V": value}, through=network)
                assert "X-Evil" not in caught.value.message.replace(repr(url + value), "")
            with pytest.raises(InvalidRequest):
                await client.send(a_spec(url, headers={value: "x"}), through=network)
            with pytest.raises(InvalidRequest):
                await client.send(a_spec(url, "GET / HTTP/1.1\r\nX:"), through=network)
            await client.send(a_spec(url + "${V}?q=${V}"), secrets={"V": value}, through=network)
            return server

    (seen,) = run(story).seen
    assert "x-evil" not in seen.headers
    assert "%0" in seen.path


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-AP-02")
def test_a_missing_variable_is_an_error_before_any_packet_leaves() -> None:
    async def story(network: Network) -> Server:
        async with serving(reply()) as server:
            url = f"http://api.test:{server.port}/"
            for spec in (
                a_spec(url + "${NONE}"),
                a_spec(url, headers={"A": "${NONE}"}),
                a_spec(url, "POST", body={"a": ["${NONE}"]}),
            ):
                with pytest.raises(VariableMissing):
                    await client.send(spec, through=network)
            return server

    assert run(story).connections == 0


@pytest.mark.case("BOMB-09")
@pytest.mark.parametrize(
    "body",
    [float("nan"), float("inf"), "\ud800", ["\ud800"], [10**5000]],
    ids=["nan", "inf", "surrogate", "in a list", "digits"],
)
def test_a_body_that_json_cannot_express_is_refused(body: Json) -> None:
    async def story(network: Network) -> None:
        with pytest.raises(InvalidRequest):
            await client.send(a_spec("http://api.test/", "POST", body=body), through=network)

    run(story)


def moved(location: str, status: int = 302) -> Answer:
    return reply(b"", f"{status} Moved", Location=location)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-13")
@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/latest/", "http://10.0.0.1/", "file:///etc/passwd", "gopher://api.test/", "http://[::1]/"],
)
def test_a_redirect_to_a_denied_host_is_refused(location: str) -> None:
    async def story(network: Network) -> None:
        async with serving(moved(location)) as server:
            with pytest.raises(AddressDenied):
                await client.send(a_spec(f"http://api.test:{server.port}/"), through=network)

    run(story)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-13")
def test_redirects_stop_at_the_limit_or_are_not_followed() -> None:
    async def story(network: Network) -> tuple[int, int]:
        async with serving(moved("/again")) as server:
            url = f"http://api.test:{server.port}/"
            with pytest.raises(RequestFailed):
                await client.send(a_spec(url, max_redirects=3), through=network)
            hops = len(server.seen)
            return hops, (await client.send(a_spec(url, max_redirects=0), through=network)).status

    assert run(story) == (4, 302)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("SEC-10")
def test_credentials_and_secrets_do_not_go_to_another_origin() -> None:
    async def story(network: Network) -> tuple[Seen, Seen]:
        async with serving(reply()) as b, serving(moved(f"http://b.test:{b.port}/landing")) as a:
            headers = {"Authorization": "Basic eA==", "cookie": "c=1", "X-Api": "k ${KEY}", "X-Plain": "stays"}
            await client.send(
                a_spec(f"http://a.test:{a.port}/", headers=headers), secrets={"KEY": "v1v1"}, through=network
            )
            return a.seen[0], b.seen[0]

    first, second = run(story)
    assert {"authorization", "cookie", "x-api", "x-plain"} <= set(first.headers)
    assert {"authorization", "cookie", "x-api"} & set(second.headers) == set()
    assert second.headers["x-plain"] == "stays"


@pytest.mark.usefixtures("loopback")
def test_credentials_stay_within_the_origin() -> None:
    async def story(network: Network) -> list[Seen]:
        async with serving(one_after_the_other(moved("/two"), reply())) as server:
            await client.send(a_spec(f"http://a.test:{server.port}/", headers={"Authorization": "x"}), through=network)
            return server.seen

    assert [seen.headers["authorization"] for seen in run(story)] == ["x", "x"]


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize(
    ("status", "method", "expected", "body"),
    [
        (301, "POST", "GET", b""),
        (302, "POST", "GET", b""),
        (303, "PUT", "GET", b""),
        (307, "POST", "POST", b'"x"'),
        (308, "PUT", "PUT", b'"x"'),
    ],
)
def test_a_redirect_changes_the_method_by_its_status(status: int, method: str, expected: str, body: bytes) -> None:
    async def story(network: Network) -> list[Seen]:
        async with serving(one_after_the_other(moved("/two", status), reply())) as server:
            await client.send(a_spec(f"http://a.test:{server.port}/", method, body=["x"]), through=network)
            return server.seen

    seen = run(story)[1]
    assert seen.line.startswith(f"{expected} /two ")
    assert (seen.body == b'["x"]') == bool(body)


@pytest.mark.usefixtures("loopback")
def test_a_body_is_not_sent_again_to_another_origin() -> None:
    async def story(network: Network) -> Server:
        async with serving(reply()) as b, serving(moved(f"http://b.test:{b.port}/", 307)) as a:
            with pytest.raises(RequestFailed):
                await client.send(a_spec(f"http://a.test:{a.port}/", "POST", body={"private": 1}), through=network)
            return b

    assert run(story).connections == 0


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
def test_a_declared_status_is_retried_after_the_requested_delay() -> None:
    response: list[Progress] = []

    async def story(network: Network) -> HttpReply:
        later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
        answers = (
            reply(b"", "429 Slow", Retry_After="0"),
            reply(b"", "503 Busy", Retry_After=later),
            reply(b"", "502 Bad"),
            reply(),
        )
        async with serving(one_after_the_other(*answers)) as server:
            retry = Retry(attempts=5, delay=0.01, max_delay=0.05)
            spec = a_spec(f"http://a.test:{server.port}/", "POST", body=1, retry=retry)
            return await client.send(spec, report=response.append, through=network)

    answer = run(story)
    assert (answer.status, answer.attempts) == (200, 4)
    assert ["429" in response[0].message, "503" in response[1].message, len(response)] == [True, True, 3]


@pytest.mark.usefixtures("loopback")
def test_other_statuses_are_returned_at_once() -> None:
    async def story(network: Network) -> list[tuple[int, int]]:
        async with serving(reply(b"", "500 Oops")) as server:
            url = f"http://a.test:{server.port}/"
            first = await client.send(a_spec(url, retry=Retry(attempts=3)), through=network)
            second = await client.send(a_spec(url, retry=Retry(attempts=1, statuses=(500,))), through=network)
            late = Retry(attempts=3, statuses=(500,), delay=60, max_delay=60)
            third = await client.send(a_spec(url, retry=late, timeout=5), through=network)
            return [(one.status, one.attempts) for one in (first, second, third)]

    assert run(story) == [(500, 1), (500, 1), (500, 1)]


@pytest.mark.usefixtures("loopback")
def test_a_lost_connection_is_retried_only_if_safe() -> None:
    async def hang_up(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.close()
        raise ConnectionError

    async def story(network: Network) -> tuple[int, int]:
        retry = Retry(attempts=3, delay=0.01)
        async with serving(one_after_the_other(hang_up, reply())) as server:
            got = await client.send(a_spec(f"http://a.test:{server.port}/", retry=retry), through=network)
        async with serving(one_after_the_other(hang_up, reply())) as server:
            with pytest.raises(RequestFailed) as caught:
                await client.send(a_spec(f"http://a.test:{server.port}/", "POST", retry=retry), through=network)
            assert caught.value.details["cause"] == "protocol"
            return got.attempts, len(server.seen)

    assert run(story) == (2, 1)


@pytest.mark.usefixtures("loopback")
def test_each_failure_names_its_cause() -> None:
    async def silence(_: Seen, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def nonsense(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n\r\n")

    async def story(network: Network) -> list[Json]:
        causes: list[Json] = []
        async with serving(reply()) as closed:
            pass
        async with serving(silence) as silent, serving(nonsense) as smtp:
            for url in (
                "http://none.test/",
                "http://broken.test/",
                f"http://a.test:{closed.port}/",
                f"http://a.test:{silent.port}/",
                f"http://a.test:{smtp.port}/",
            ):
                with pytest.raises(RequestFailed) as caught:
                    await client.send(a_spec(url, timeout=0.3), through=network)
                causes.append(caught.value.details["cause"])
        return causes

    assert run(story) == ["dns", "dns", "connect", "timeout", "protocol"]


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
@pytest.mark.case("NET-15")
def test_a_body_over_the_limit_is_refused_in_any_encoding() -> None:
    async def endless(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(100_000):
            writer.write(b"10000\r\n" + bytes(65_536) + b"\r\n")
            await writer.drain()

    async def bomb(seen: Seen, writer: asyncio.StreamWriter) -> None:
        packer = zlib.compressobj(9, wbits=31)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n")
        for _ in range(300):  # 300 MB in 300 kB
            writer.write(packer.compress(bytes(1_000_000)))
            await writer.drain()
        writer.close()

    async def story(network: Network) -> None:
        for answer in (
            reply(bytes(2_000_000)),
            endless,
            bomb,
            reply(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip"),
        ):
            async with serving(answer) as server:
                with pytest.raises(TooLarge):
                    await client.send(a_spec(f"http://a.test:{server.port}/"), through=network)

    before = _resident()
    run(story)
    assert _resident() - before < 64_000_000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-15")
def test_a_header_over_the_limit_is_refused() -> None:
    async def story(network: Network) -> None:
        async with serving(reply(X_Long="x" * 1_000_000)) as server:
            with pytest.raises(TooLarge):
                await client.send(a_spec(f"http://a.test:{server.port}/"), through=network)

    run(story)


@pytest.mark.usefixtures("loopback")
def test_the_body_of_an_error_is_cut_and_the_status_preserved() -> None:
    async def story(network: Network) -> HttpReply:
        async with serving(reply(b"x" * 5000, "500 Oops")) as server:
            return await client.send(a_spec(f"http://a.test:{server.port}/", max_bytes=100), through=network)

    answer = run(story)
    assert (answer.status, answer.body, answer.is_truncated) == (500, b"x" * 100, True)


@pytest.mark.usefixtures("loopback")
def test_compressed_bodies_are_decoded_and_damaged_ones_refused() -> None:
    async def story(network: Network) -> list[bytes]:
        packed = gzip.compress(b"one") + gzip.compress(b"two")
        answers = (reply(packed, Content_Encoding="gzip"), reply(zlib.compress(b"three"), Content_Encoding="deflate"))
        async with serving(one_after_the_other(*answers, reply(packed[:-9], Content_Encoding="gzip"))) as server:
            spec = a_spec(f"http://a.test:{server.port}/")
            bodies = [(await client.send(spec, through=network)).body for _ in answers]
            with pytest.raises(RequestFailed):
                await client.send(spec, through=network)
            return bodies

    assert run(story) == [b"onetwo", b"three"]


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-16")
def test_proxies_and_certificates_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    (home / ".netrc").write_text("machine api.test login someone password hidden\n")

    async def story(network: Network) -> Seen:
        async with serving(reply()) as server:
            await client.send(a_spec(f"http://api.test:{server.port}/"), through=network)
            return server.seen[0]

    assert "authorization" not in run(story).headers


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("SEC-07", "SEC-05")
def test_a_secret_is_redacted_in_responses_and_errors() -> None:
    secret = "hunter22/value+1"

    async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await reply(f"{seen.path} {seen.headers['x-key']}".encode(), X_Echo=seen.headers["x-key"])(seen, writer)

    async def story(network: Network) -> None:
        async with serving(echo) as server:
            spec = a_spec(f"http://a.test:{server.port}/p/${{KEY}}?k=${{KEY}}", headers={"X-Key": "${KEY}"})
            answer = await client.send(spec, secrets={"KEY": secret}, through=network)
            assert "hunter" not in f"{answer}"
            assert answer.headers["x-echo"] == "[redacted:KEY]"
        async with serving(moved("/${KEY}")) as loop, serving(reply()) as closed:
            pass
        for target in (f"a.test:{closed.port}", f"a.test:{loop.port}", "none.test", "10.0.0.1", "api.test:0"):
            with pytest.raises(KiwiError) as caught:
                await client.send(
                    a_spec(f"http://{target}/${{KEY}}?k=${{KEY}}"), secrets={"KEY": secret}, through=network
                )
            assert "hunter" not in f"{caught.value.to_response()}"
            assert "hunter" not in "".join(traceback.format_exception(caught.value))

    run(story)


def a_certificate(
    folder: Path, *, name: str = "secure.test", days: int = 1, own: bool = False
) -> tuple[Path, ssl.SSLContext]:
    """A throw-away authority's certificate, and a server's context with one that it signed."""
    now = datetime.now(UTC)

    def issued(
        subject: str, key: ec.EllipticCurvePrivateKey, by: str, by_key: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]),
            subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(days=3),
            not_valid_after=now + timedelta(days=3 if ca else days),
        )
        names = [x509.DNSName(subject), x509.IPAddress(ip_address("127.0.0.9"))]
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(by_key, hashes.SHA256())

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = issued("authority", ca_key, "authority", ca_key, ca=True)
    leaf = issued(name, key, name, key, ca=False) if own else issued(name, key, "authority", ca_key, ca=False)
    (folder / "root.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "leaf.pem").write_bytes(
        leaf.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem")
    return folder / "root.pem", context


def trusting(root: Path) -> Network:
    context = ssl.create_default_context(cafile=str(root))
    return Network(here, lambda: context)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-17")
@pytest.mark.parametrize(
    ("name", "days", "own"),
    [("secure.test", 1, True), ("secure.test", -1, False), ("other.test", 1, False)],
    ids=["signed by itself", "expired", "for another host"],
)
def test_an_invalid_certificate_is_refused(tmp_path: Path, name: str, days: int, own: bool) -> None:
    root, context = a_certificate(tmp_path, name=name, days=days, own=own)

    async def story(network: Network) -> Server:
        async with serving(reply(), context) as server:
            with pytest.raises(RequestFailed) as caught:
                await client.send(a_spec(f"https://secure.test:{server.port}/"), through=network)
            assert caught.value.details["cause"] == "tls"
            return server

    assert run(story, trusting(root)).seen == []


@pytest.mark.usefixtures("loopback")
def test_a_valid_certificate_is_accepted_for_the_name_and_not_the_address(tmp_path: Path) -> None:
    root, context = a_certificate(tmp_path)

    async def story(network: Network) -> HttpReply:
        async with serving(reply(), context) as server:
            with pytest.raises(RequestFailed):
                await client.send(a_spec(f"https://127.0.0.1:{server.port}/"), through=network)
            return await client.send(a_spec(f"https://secure.test:{server.port}/"), through=network)

    assert run(story, trusting(root)).status == 200


def stream(*parts: bytes, kind: str = "text/event-stream", then: float = 0.0) -> Answer:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        await asyncio.sleep(then)
        writer.write(b"0\r\n\r\n")

    return answer


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
def test_server_sent_events_come_one_by_one() -> None:
    async def story(network: Network) -> tuple[list[ServerEvent], Seen]:
        async with serving(stream(b"event: a\ndata: o", b"ne hunter22\n\n", b"data: two\n\ndata: three\n\n")) as server:
            spec = a_spec(f"http://a.test:{server.port}/", headers={"K": "${K}"}, max_events=2)
            found = [event async for event in client.events(spec, secrets={"K": "hunter22"}, through=network)]
            return found, server.seen[0]

    found, seen = run(story)
    assert found == [ServerEvent("a", "one [redacted:K]"), ServerEvent("message", "two")]
    assert seen.headers["accept"] == "text/event-stream"


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
def test_lines_come_one_by_one() -> None:
    async def story(network: Network) -> list[str]:
        async with serving(stream(b'{"a": 1}\n\n{"b"', b": 2}\r\nlast", kind="application/x-ndjson")) as server:
            return [line async for line in client.lines(a_spec(f"http://a.test:{server.port}/"), through=network)]

    assert run(story) == ['{"a": 1}', '{"b": 2}', "last"]


@pytest.mark.usefixtures("loopback")
def test_an_event_arrives_before_the_stream_ends_and_silence_times_out() -> None:
    async def story(network: Network) -> list[ServerEvent]:
        found: list[ServerEvent] = []
        async with serving(stream(b"data: one\n\n", then=20)) as server:

            async def listen() -> None:
                async for event in client.events(a_spec(f"http://a.test:{server.port}/", timeout=0.4), through=network):
                    found.append(event)  # noqa: PERF401 - what came before the error counts

            with pytest.raises(RequestFailed) as caught:
                await listen()
            assert caught.value.details["cause"] == "timeout"
        return found

    assert run(story) == [ServerEvent("message", "one")]


@pytest.mark.usefixtures("loopback")
def test_an_invalid_or_oversized_stream_is_an_error() -> None:
    async def story(network: Network) -> None:
        answers = (
            reply(b"{}", Content_Type="application/json"),
            reply(b"why not", "403 No"),
            stream(b"data: x\n\n" * 50_000),
        )
        faults: list[KiwiError] = []
        for answer in answers:
            async with serving(answer) as server:
                spec = a_spec(f"http://a.test:{server.port}/", max_bytes=100_000, max_events=100_000)
                with pytest.raises(KiwiError) as caught:
                    _ = [event async for event in client.events(spec, through=network)]
                faults.append(caught.value)
        assert [type(fault) for fault in faults] == [RequestFailed, RequestFailed, TooLarge]
        assert (faults[1].details["status"], faults[1].details["body"]) == (403, "why not")

    run(story)


@pytest.mark.usefixtures("loopback")
def test_cancelling_a_request_closes_its_connection() -> None:
    async def story(network: Network) -> None:
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def waiting(_: Seen, writer: asyncio.StreamWriter) -> None:
            arrived.set()
            await writer.wait_closed()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            arrived.set()
            await reader.read()
            ended.set()
            writer.close()

        listening = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            task = asyncio.create_task(client.send(a_spec(f"http://a.test:{port}/"), through=network))
            await asyncio.wait_for(arrived.wait(), 120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(ended.wait(), 120)

    run(story)


@pytest.mark.usefixtures("loopback")
async def test_the_shared_network_can_be_closed_and_used_again() -> None:
    async def twice() -> int:
        async with serving(reply()) as server:
            for _ in range(2):
                await client.send(a_spec(f"http://127.0.0.1:{server.port}/"))
                await client.aclose()
            return server.connections

    assert await twice() == 2
