"""The access checks of the gateway: host names, origins, tokens and limits."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import pytest

from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError, NotFound, Unavailable
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.remote.http import BLOBS, INDEX
from kiwi_mcp.surfaces.gateway import registry as registry_routes
from kiwi_mcp.surfaces.gateway import server as serve
from kiwi_mcp.surfaces.gateway.auth import Authenticator
from kiwi_mcp.surfaces.gateway.server import HEALTH

BLOB = f"{BLOBS}/{'a' * 64}"
ROUTES = [("GET", INDEX), ("GET", BLOB), ("PUT", BLOB), ("PUT", INDEX), ("GET", "/nothing"), ("OPTIONS", INDEX)]


class Reply(Protocol):
    status: int
    headers: Mapping[str, str]
    body: JsonObject


class Served(Protocol):
    port: int
    tokens: TokenStore

    def token(self, name: str, *namespaces: str, can_write: bool = True) -> str: ...
    def ask(
        self, method: str, path: str, body: Json = None, *, token: str = "", headers: Mapping[str, str] | None = None
    ) -> Reply: ...


@pytest.mark.smoke
@pytest.mark.case("GW-01", "GW-02")
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_valid_token_nothing_is_served(served_once: Served, method: str, path: str) -> None:
    token = served_once.token("eve", "acme")
    hashed = sha256(token.encode()).hexdigest()
    for given in ("", "Bearer", "Bearer ", f"Basic {token}", token, f"Bearer {token[:-1]}", f"Bearer {hashed}"):
        headers = {"Authorization": given} if given else {}
        answer = served_once.ask(method, path, "{}" if method == "POST" else None, headers=headers)
        assert (answer.status, answer.body["code"]) == (401, "token_refused"), given
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "eve" not in str(answer.body)


def test_a_removed_token_is_refused_at_once(served_once: Served) -> None:
    token = served_once.token("eve", "acme")
    assert served_once.ask("GET", INDEX, token=token).status == 200
    served_once.tokens.remove("eve")
    assert served_once.ask("GET", INDEX, token=token).status == 401


@pytest.mark.case("GW-04")
@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "http://127.0.0.1:1", "https://kiwi.test.evil.test", ""]
)
def test_a_page_of_another_origin_is_refused_before_its_token_is_checked(served_once: Served, origin: str) -> None:
    token = served_once.token("eve", "acme")
    answer = served_once.ask("GET", INDEX, token=token, headers={"Origin": origin})
    assert (answer.status, answer.body["code"]) == (403, "not_permitted")
    same = served_once.ask("GET", INDEX, token=token, headers={"Origin": f"http://127.0.0.1:{served_once.port}"})
    assert same.status == 200


@pytest.mark.case("GW-05")
def test_a_rebound_host_name_is_refused(served_once: Served) -> None:
    token = served_once.token("eve", "acme")
    for host in ("evil.test", "127.0.0.1.evil.test", "evil.test:80", "10.0.0.1", "[", "", "localhost@evil.test"):
        for path in (INDEX, HEALTH):
            answer = served_once.ask("GET", path, token=token, headers={"Host": host})
            assert (answer.status, answer.body["code"]) == (403, "not_permitted"), host
    for host in ("localhost", f"LocalHost:{served_once.port}", "[::1]:80", "kiwi.test"):
        assert served_once.ask("GET", INDEX, token=token, headers={"Host": host}).status == 200, host


@pytest.mark.case("GW-06")
def test_no_other_origin_is_ever_allowed(served_once: Served) -> None:
    token = served_once.token("eve", "acme")
    wish = {"Origin": "http://evil.test", "Access-Control-Request-Method": "PUT"}
    for headers in (wish, {**wish, "Authorization": f"Bearer {token}"}):
        answer = served_once.ask("OPTIONS", INDEX, headers=headers)
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.case("GW-07")
def test_a_token_in_the_url_is_refused_and_not_logged(
    served_once: Served, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    token = served_once.token("eve", "acme")
    assert served_once.ask("GET", f"{INDEX}?token={token}").status == 401
    answer = served_once.ask("GET", f"{INDEX}?access_token={token}", token=token)
    assert answer.status == 400
    printed = capfd.readouterr()
    assert token not in str(answer.body) + printed.out + printed.err + caplog.text


@pytest.mark.case("GW-09")
def test_a_body_over_the_limit_is_refused_in_any_encoding(served_once: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_routes, "_MAX_BLOB", 10_000)
    token = served_once.token("eve", "acme")
    answer = served_once.ask("PUT", BLOB, "x" * 20_000, token=token)
    assert (answer.status, answer.body["code"]) == (413, "too_large")
    head = f"PUT {BLOB} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    with talking(served_once, head + "Transfer-Encoding: chunked\r\n\r\n") as connection:
        connection.sendall(chunk * 2)
        assert b" 413 " in connection.recv(1_000)


@pytest.mark.case("GW-09")
def test_slow_and_silent_clients_are_closed_while_others_are_served(
    served_once: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(registry_routes, "_BODY_SECONDS", 0.3)
    token = served_once.token("eve", "acme")
    silent = [talking(served_once, "GET ") for _ in range(50)]
    head = f"PUT {BLOB} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
    slow = [talking(served_once, head) for _ in range(8)]
    started = time.monotonic()
    assert served_once.ask("GET", INDEX, token=token).status == 200
    assert time.monotonic() - started < 20
    assert all(b" 408 " in connection.recv(1_000) for connection in slow)
    for connection in silent:
        assert ended(connection)
    for connection in (*silent, *slow):
        connection.close()


@pytest.mark.case("GW-09")
def test_a_head_over_the_limit_is_refused(served_once: Served) -> None:
    many = "".join(f"X-{number}: {'x' * 100}\r\n" for number in range(2_000))
    with talking(served_once, f"GET {HEALTH} HTTP/1.1\r\nHost: localhost\r\n{many}\r\n") as connection:
        assert b" 400 " in connection.recv(1_000)
    assert served_once.ask("GET", HEALTH).body == {"status": "ok"}


def test_a_request_that_takes_too_long_is_stopped(serving: Callable[..., Served], sqlite_url: str) -> None:
    server = serving(sqlite_url, seconds=0.2)
    token = server.token("eve", "acme")
    head = f"PUT {BLOB} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
    with talking(server, head) as connection:
        assert b" 503 " in connection.recv(1_000)


def talking(server: Served, said: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(said.encode())
    return connection


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1_000) == b""
    except ConnectionError:
        return True


@pytest.mark.case("GW-10")
def test_wrong_tokens_are_throttled_and_valid_ones_still_served(served_once: Served) -> None:
    token = served_once.token("eve", "acme")
    statuses = [served_once.ask("GET", INDEX, token=f"kiwi_{number}").status for number in range(200)]
    assert set(statuses[:30]) == {401}
    assert set(statuses[30:]) == {429}
    assert served_once.ask("GET", INDEX, token=token).status == 200


def test_an_internal_error_is_an_incident_without_a_traceback(
    served_once: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served_once.token("eve", "acme")
    monkeypatch.setattr(registry_routes, "digest_of", None)
    answer = served_once.ask("GET", INDEX, token=token)
    assert (answer.status, answer.body["code"]) == (500, "internal")
    assert "Traceback" not in str(answer.body)


def test_an_unknown_path_has_the_same_error_shape(served_once: Served) -> None:
    token = served_once.token("eve", "acme")
    assert served_once.ask("GET", "/nothing", token=token).body["code"] == "not_found"
    assert served_once.ask("POST", INDEX, token=token).status == 405
    for path in ("x", "A" * 64, "..%2fpasswd", "a" * 65):
        assert served_once.ask("GET", f"{BLOBS}/{path}", token=token).status == 404, path
    assert served_once.ask("GET", f"{INDEX}?after=1", token=token).status == 400


def test_a_server_on_all_addresses_accepts_any_address_and_no_unknown_name(home: Path) -> None:
    door = Authenticator(TokenStore(home), host="0.0.0.0", names=["kiwi.test"], is_read_only=False, is_open=False)
    for host in ("192.0.2.7:8765", "[2001:db8::1]", "kiwi.test"):
        door.check_origin({"host": host})
    for host in ("evil.test", "localhost", ""):
        with pytest.raises(KiwiError):
            door.check_origin({"host": host})


def test_a_token_is_stored_as_a_hash_in_a_private_file(home: Path) -> None:
    tokens = TokenStore(home / ".ai")
    secret = tokens.add("eve", ["acme", "public", "acme"], can_write=True)
    file = home / ".ai" / "state" / "tokens.json"

    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    found = TokenStore(home / ".ai").find(secret)
    assert found is not None
    assert (found.name, found.namespaces, found.can_write) == ("eve", ("acme", "public"), True)
    assert "sha256" not in found.to_json()
    assert tokens.find("") is tokens.find("kiwi_x") is tokens.find("\udcff") is None


def test_tokens_have_unique_names_and_only_valid_namespaces(home: Path) -> None:
    tokens = TokenStore(home / ".ai")
    tokens.add("eve", ["acme"], can_write=True)
    with pytest.raises(Conflict):
        tokens.add("eve", ["acme"], can_write=False)
    for name, namespaces in (("a b", ["acme"]), ("", ["acme"]), ("x", ["kiwi"]), ("x", ["../x"]), ("x", [])):
        with pytest.raises(InvalidRequest):
            tokens.add(name, namespaces, can_write=True)
    with pytest.raises(NotFound):
        tokens.remove("bob")
    assert [token.name for token in tokens.all()] == ["eve"]


def test_a_token_file_that_is_writable_by_others_or_unreadable_admits_no_token(home: Path) -> None:
    tokens = TokenStore(home / ".ai")
    secret = tokens.add("eve", ["acme"], can_write=True)
    file = home / ".ai" / "state" / "tokens.json"
    whole = file.read_text()
    for text in ("{", whole.replace('"eve"', '""'), whole.replace("acme", "kiwi"), json.dumps({"tokens": [{}]})):
        file.write_text(text)
        with pytest.raises(Unavailable):
            tokens.find(secret)
    file.write_text(whole)
    assert tokens.find(secret)
    file.chmod(0o666)
    with pytest.raises(Unavailable):
        tokens.find(secret)


@pytest.mark.usefixtures("processes")
def test_tokens_added_by_concurrent_processes_are_all_stored(home: Path) -> None:
    program = """
import sys, pathlib
from kiwi_mcp.policy.tokens import TokenStore
for count in range(5):
    TokenStore(pathlib.Path(sys.argv[1])).add(f"worker-{sys.argv[2]}-{count}", ["acme"], can_write=False)
"""
    words = [sys.executable, "-c", program, str(home / ".ai")]
    workers = [subprocess.Popen([*words, str(number)]) for number in range(3)]
    assert [worker.wait(50) for worker in workers] == [0, 0, 0]
    assert len(TokenStore(home / ".ai").all()) == 15
