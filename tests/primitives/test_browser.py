"""The login callback: the browser returns to this machine with the expected parameters, in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.primitives import browser
from kiwi_mcp.primitives.browser import LoginCallback, Words


def is_ours(words: Words) -> bool:
    return words.get("state") == "s"


async def sent(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def get(port: int, target: str, host: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host or f'127.0.0.1:{port}'}\r\n\r\n".encode()


def visited(visits: Callable[[LoginCallback, int], Awaitable[None]]) -> Words:
    async def scenario() -> Words:
        async with browser.login_callback(is_ours) as back:
            port = urlsplit(back.address).port
            assert port
            await visits(back, port)
            return await back.words(5)

    return asyncio.run(scenario())


@pytest.mark.usefixtures("loopback")
def test_the_expected_callback_is_read_and_the_browser_gets_a_page() -> None:
    async def visits(back: LoginCallback, port: int) -> None:
        page = await sent(port, get(port, "/callback?state=s&code=a%20b"))
        assert page.startswith(b"HTTP/1.1 200")
        assert b"You can close this window" in page

    assert visited(visits) == {"state": "s", "code": "a b"}


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize(
    ("target", "host", "method"),
    [
        ("/callback?state=other&code=evil", "", "GET"),
        ("/callback?code=evil", "", "GET"),
        ("/callback?state=s&state=s&code=evil", "", "GET"),
        ("/callback?state=s&code=evil", "rebound.example", "GET"),
        ("/callback?state=s&code=evil", "", "POST"),
        ("/other?state=s&code=evil", "", "GET"),
        ("/callback?state=s&code=evil" + "&x=1" * 60, "", "GET"),
        ("http://[/callback?state=s&code=evil", "", "GET"),
    ],
)
def test_unexpected_callbacks_are_refused_and_the_right_one_still_arrives(target: str, host: str, method: str) -> None:
    async def visits(back: LoginCallback, port: int) -> None:
        assert (await sent(port, get(port, target, host, method))).startswith(b"HTTP/1.1 400")
        await sent(port, get(port, "/callback?state=s&code=good"))

    assert visited(visits)["code"] == "good"


@pytest.mark.usefixtures("loopback")
def test_noise_on_the_callback_port_is_ignored() -> None:
    async def visits(back: LoginCallback, port: int) -> None:
        await sent(port, b"\xff\x00\r\n\r\n")
        await sent(port, b"GET /" + b"x" * 100_000)
        await sent(port, get(port, "/callback?state=s&code=good"))
        await sent(port, get(port, "/callback?state=s&code=second"))

    assert visited(visits)["code"] == "good"


@pytest.mark.usefixtures("loopback")
async def test_waiting_for_the_callback_is_limited() -> None:
    async def scenario() -> None:
        async with browser.login_callback(is_ours) as back:
            await back.words(0.05)

    with pytest.raises(Unavailable, match=r"0\.05 seconds"):
        await scenario()


@pytest.mark.usefixtures("loopback")
async def test_the_callback_server_listens_on_loopback_and_prefers_the_wanted_port() -> None:
    async def address(port: int) -> str:
        async with browser.login_callback(is_ours, port=port) as back:
            return back.address

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert urlsplit(await address(port)).port not in {port, None}
    assert await address(port) == f"http://127.0.0.1:{port}/callback"


def test_without_a_display_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opening(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", opening)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")

    assert not browser.open_address("https://login.example")
    monkeypatch.setenv("DISPLAY", ":0")
    assert browser.open_address("https://login.example")
    assert opened == ["https://login.example"]
