"""OAuth logins: the owner logs in once, tokens are stored encrypted, renewed, and sent nowhere else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import httpx2
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from mcp.server.mcpserver import MCPServer
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kiwi_mcp.domain.calls import NO_CALLER, Answers, Caller, Question, Questions
from kiwi_mcp.domain.errors import Untrusted
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers.mcp.oauth.authorization import AuthorizationServer, owners_client
from kiwi_mcp.drivers.mcp.server import OAuthConfig
from kiwi_mcp.kernel import Answer, Kernel

pytestmark = pytest.mark.usefixtures("loopback")

Ask = Callable[[Questions], Awaitable[Answers]]
PRM = "/.well-known/oauth-protected-resource"


@dataclass
class House:
    """An authorization server and the MCP server that trusts it, as a test wants them, and what they saw."""

    url: str = ""
    issuer: str = ""
    pkce: Json = field(default_factory=lambda: ["S256"])
    methods: Json = field(default_factory=lambda: ["none"])
    scopes: Json = None
    more: dict[str, Json] = field(default_factory=dict)
    """Further words of the authorization server's document."""
    iss: str | None = None
    """What the authorization server calls itself in its answers; its true name otherwise."""
    resource: str = ""
    """What the MCP server calls itself; its true address otherwise."""
    needed: str = "read"
    """What a token must allow."""
    lasts: int = 3600
    rotates: bool = True
    has_document: bool = True
    transport: str = "http"
    gate: asyncio.Event | None = None
    """What the token endpoint waits for before it answers."""
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether a login waits there."""
    is_deaf: bool = False
    """Whether the MCP server refuses every token."""
    clients: dict[str, JsonObject] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    refreshers: dict[str, str] = field(default_factory=dict)
    visits: list[str] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    """What the token endpoint was asked."""
    carried: list[str] = field(default_factory=list)
    """What requests to the MCP server carried."""

    def count(self, path: str) -> int:
        return self.visits.count(path)

    def revoke(self) -> None:
        self.tokens.clear()
        self.refreshers.clear()

    def give(self, scope: str) -> JSONResponse:
        number = len(self.asked)
        access, refresh = f"access-token-{number:04}", f"refresh-token-{number:04}"
        self.tokens[access] = self.refreshers[refresh] = scope
        return JSONResponse(
            {
                "access_token": access,
                "token_type": "Bearer",
                "expires_in": self.lasts,
                "scope": scope,
                **({"refresh_token": refresh} if self.rotates else {}),
            }
        )


def authority(house: House) -> Starlette:
    async def described(_: Request) -> Response:
        about = {
            "issuer": house.issuer,
            "authorization_endpoint": f"{house.issuer}/authorize?keep=1",
            "token_endpoint": f"{house.issuer}/token",
            "registration_endpoint": f"{house.issuer}/register",
            "code_challenge_methods_supported": house.pkce,
            "token_endpoint_auth_methods_supported": house.methods,
            "authorization_response_iss_parameter_supported": True,
            "scopes_supported": house.scopes,
            **house.more,
        }
        return JSONResponse({word: value for word, value in about.items() if value is not None})

    async def register(request: Request) -> Response:
        wanted = json.loads(await request.body())
        client_id = f"client-{len(house.clients)}"
        house.clients[client_id] = wanted
        return JSONResponse({"client_id": client_id, **wanted}, status_code=201)

    async def authorize(request: Request) -> Response:
        words = dict(request.query_params)
        assert words["keep"] == "1"
        code = f"code-{len(house.codes)}"
        house.codes[code] = words
        answer = {"code": code, "state": words["state"], "iss": house.issuer if house.iss is None else house.iss}
        return RedirectResponse(f"{words['redirect_uri']}?{urlencode({k: v for k, v in answer.items() if v})}")

    async def token(request: Request) -> Response:
        form = {word: values[0] for word, values in parse_qs((await request.body()).decode()).items()}
        form["authorization"] = request.headers.get("authorization", "")
        house.asked.append(form)
        if house.gate is not None:
            house.came.set()
            await house.gate.wait()
        match form["grant_type"]:
            case "authorization_code":
                words = house.codes.pop(form["code"])
                hashed = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).decode()
                assert hashed.rstrip("=") == words["code_challenge"]
                assert form["redirect_uri"] == words["redirect_uri"]
                return house.give(words.get("scope", ""))
            case "refresh_token" if form["refresh_token"] in house.refreshers:
                scope = house.refreshers[form["refresh_token"]]
                if house.rotates:
                    del house.refreshers[form["refresh_token"]]
                return house.give(scope)
            case "client_credentials":
                return house.give(form.get("scope", ""))
            case _:
                refused = {"error": "invalid_grant", "error_description": f"unknown {form.get('refresh_token')}"}
                return JSONResponse(refused, status_code=400)

    routes = [
        Route("/.well-known/oauth-authorization-server", described),
        Route("/register", register, methods=["POST"]),
        Route("/authorize", authorize),
        Route("/token", token, methods=["POST"]),
    ]
    return noting(Starlette(routes=routes), house)


def noting(app: Starlette, house: House) -> Starlette:
    async def note(request: Request, proceed: RequestResponseEndpoint) -> Response:
        house.visits.append(request.url.path)
        return await proceed(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=note)
    return app


def protected(house: House) -> ASGIApp:
    """An MCP server of the official SDK behind tokens."""
    server = MCPServer("diary")

    @server.tool()
    def read() -> str:
        """Reads."""
        return "Dear diary"

    @server.tool()
    def leak() -> str:
        """Tells what it was asked with."""
        return f"you sent {house.carried[-1]}"

    app = server.sse_app() if house.transport == "sse" else server.streamable_http_app()

    async def described(_: Request) -> Response:
        if not house.has_document:
            return JSONResponse({}, status_code=404)
        about = {"resource": house.resource or house.url, "authorization_servers": [house.issuer]}
        return JSONResponse(about)

    app.router.routes.insert(0, Route(PRM, described))

    async def guard(request: Request, proceed: RequestResponseEndpoint) -> Response:
        if request.url.path == PRM:
            return await proceed(request)
        carried = request.headers.get("authorization", "")
        house.carried.append(carried)
        scope = house.tokens.get(carried.removeprefix("Bearer "))
        metadata = f'resource_metadata="{house.url.rpartition("/")[0]}{PRM}"'
        if scope is None or house.is_deaf:
            challenge = f'Bearer error="invalid_token", scope="{house.needed}", {metadata}'
            return JSONResponse({"error": "x"}, status_code=401, headers={"WWW-Authenticate": challenge})
        if not set(house.needed.split()) <= set(scope.split()):
            challenge = f'Bearer error="insufficient_scope", scope="{house.needed}", {metadata}'
            return JSONResponse({"error": "x"}, status_code=403, headers={"WWW-Authenticate": challenge})
        return await proceed(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    return noting(app, house)


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none"))
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


async def browse(questions: Questions) -> Answers:
    """A person who opens every address that they are shown, and allows everything."""
    async with httpx2.AsyncClient(follow_redirects=True, trust_env=False, verify=False) as client:
        for question in questions.values():
            page = await client.get(as_text(question.params["url"]))
            assert "You can close this window" in page.text
    return {key: {"action": "accept"} for key in questions}


async def agree(questions: Questions) -> Answers:
    """An owner who says yes to what is sent to their server."""
    return {key: {"action": "accept", "content": {"approve": True}} for key in questions}


@dataclass
class Owner:
    """The owner at work, with a kernel that may be started anew."""

    project: Path
    house: House
    kernel: Kernel

    async def mcp(self, action: str, ask: Ask | None = None, **words: Json) -> Answer:
        caller = Caller(ask=ask) if ask else NO_CALLER
        return await self.kernel.call("mcp", {"action": action, "server": "diary", **words}, caller)

    async def add(self, **auth: Json) -> Answer:
        if not auth:
            return await self.mcp("add", url=self.house.url, transport=self.house.transport)
        config: JsonObject = {"transport": "http", "url": self.house.url, "auth": {"type": "oauth", **auth}}
        manifest: JsonObject = {
            "tool_id": "diary", "tool_type": "mcp_server", "version": "1.0.0", "executor": "http_client",
            "description": "A diary", "config": config,
        }  # fmt: skip
        return await self.mcp("add", manifest=manifest)

    async def login(self, ask: Ask = browse, **words: Json) -> Answer:
        return await self.mcp("login", ask, **words)

    async def run(self, tool: str = "read") -> Answer:
        return await self.kernel.call("execute", {"item_id": f"mcp/diary/{tool}"}, Caller(ask=agree, is_owner=True))

    async def restart(self) -> None:
        await self.kernel.aclose()
        self.kernel = Kernel(self.project)


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def story(project: Path, home: Path, house: House) -> Callable[[Callable[[Owner], Awaitable[None]]], None]:
    """Runs a story in which both servers listen, and the owner has granted where."""

    async def main(work: Callable[[Owner], Awaitable[None]]) -> None:
        async with listening(authority(house)) as house.issuer, listening(protected(house)) as address:
            house.url = f"{address}/{'sse' if house.transport == 'sse' else 'mcp'}"
            (home / ".ai").mkdir(exist_ok=True)
            (home / ".ai" / "policy.yaml").write_text("hosts:\n  allow: [127.0.0.1]\n")
            owner = Owner(project, house, Kernel(project))
            try:
                async with asyncio.timeout(120):
                    await work(owner)
            finally:
                await owner.kernel.aclose()

    return lambda work: asyncio.run(main(work))


Story = Callable[[Callable[[Owner], Awaitable[None]]], None]


def age(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the clock that decides on the age of tokens."""
    for module in ("authorization", "account"):
        monkeypatch.setattr(f"kiwi_mcp.drivers.mcp.oauth.{module}.time", lambda: time.time() + seconds)


def records(home: Path) -> list[Path]:
    return list(home.rglob("*.sealed"))


def is_logged_in(answer: Answer) -> bool:
    assert not answer.is_error, answer.content
    return answer.content["status"] == "logged in"


@pytest.mark.smoke
def test_a_server_that_needs_a_login_reports_it_and_works_after_the_login(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        added = await owner.add()
        assert "kiwi mcp login diary" in json.dumps(added.content["warnings"])
        assert is_logged_in(await owner.login())
        assert (await owner.run()).content["result"] == {"result": "Dear diary"}
        await owner.restart()
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert house.count("/authorize") == 1
    [client] = house.clients.values()
    assert client["application_type"] == "native"
    [exchange] = house.asked
    assert exchange["resource"] == house.url


def test_an_sse_server_may_need_a_login_too(story: Story, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        assert (await owner.mcp("refresh")).content["code"] == "login_required"
        assert is_logged_in(await owner.login())
        assert (await owner.run()).content["status"] == "success"
        house.tokens.clear()
        age(60, monkeypatch)
        assert (await owner.run()).content["status"] == "success"

    house.transport = "sse"
    story(work)
    assert [form["grant_type"] for form in house.asked] == ["authorization_code", "refresh_token"]


def test_a_call_without_a_login_is_unavailable_and_names_the_command_for_the_owner(story: Story) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        await owner.mcp("logout")
        answer = await owner.run()
        assert (answer.content["status"], answer.content["code"]) == ("unavailable", "login_required")
        assert "kiwi mcp login diary" in as_text(answer.content["suggestion"])
        for _ in range(6):  # however often it is tried, it stays that and not a server that is left alone
            assert (await owner.run()).content["code"] == "login_required"
        assert is_logged_in(await owner.login())
        assert (await owner.run()).content["status"] == "success"

    story(work)


@pytest.mark.usefixtures("processes")
def test_the_command_shows_the_address_and_waits_for_the_browser(story: Story, project: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kiwi_mcp", "mcp", "login", "diary", "--json", "--project", str(project)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        while not (line := (await process.stderr.readline()).decode().strip()).startswith("http"):
            assert line or not process.stderr.at_eof()
        await browse({"login": Question("elicitation/create", {"url": line})})
        out, rest = await process.communicate()
        assert json.loads(out)["status"] == "logged in", rest
        assert b"access-token" not in out + rest
        assert (await owner.run()).content["status"] == "success"

    story(work)


def test_no_model_starts_a_login_or_ends_one(story: Story, project: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        model = Kernel(project, is_owner=False)
        for action in ("login", "logout"):
            answer = await model.call("mcp", {"action": action, "server": "diary"}, Caller(ask=browse))
            assert answer.content["code"] == "not_permitted"
        await model.aclose()

    story(work)


def test_an_expiring_token_is_renewed_once_for_all_waiting_calls(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        age(3590, monkeypatch)
        others = [Owner(owner.project, house, Kernel(owner.project)) for _ in range(2)]  # as in processes of their own
        answers = await asyncio.gather(*(one.run() for one in (owner, *others) for _ in range(4)))
        assert {answer.content["status"] for answer in answers} == {"success"}
        for one in others:
            await one.kernel.aclose()

    story(work)
    assert [form["grant_type"] for form in house.asked] == ["authorization_code", "refresh_token"]


def test_a_refused_token_is_renewed_even_after_a_restart(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        house.tokens.clear()
        age(60, monkeypatch)
        await owner.restart()
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert house.asked[-1]["grant_type"] == "refresh_token"


def test_a_cancelled_call_does_not_lose_its_renewed_token(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        house.tokens.clear()
        age(60, monkeypatch)
        house.gate = asyncio.Event()
        call = asyncio.create_task(owner.run())
        await house.came.wait()
        call.cancel()
        await asyncio.wait({call})
        house.gate.set()
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert [form["grant_type"] for form in house.asked] == ["authorization_code", "refresh_token"]


def test_a_refresh_token_that_is_not_replaced_is_used_again(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        house.rotates = False
        for passed in (60, 120):
            house.tokens.clear()
            age(passed, monkeypatch)
            assert (await owner.run()).content["status"] == "success"

    story(work)
    assert house.asked[1]["refresh_token"] == house.asked[2]["refresh_token"] == "refresh-token-0001"


def test_a_revoked_login_must_be_repeated(story: Story, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        house.revoke()
        age(60, monkeypatch)
        answer = await owner.run()
        assert answer.content["code"] == "login_required"
        assert "refresh-token" not in json.dumps(answer.content)
        await owner.run()

    story(work)
    assert [form["grant_type"] for form in house.asked] == ["authorization_code", "refresh_token"]


@pytest.mark.case("MCP-13")
def test_a_server_that_refuses_every_token_gets_few_tokens(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        house.is_deaf = True
        answer = await owner.login()
        assert answer.content["code"] == "login_required"
        age(60, monkeypatch)
        await owner.run()
        await owner.run()

    story(work)
    assert house.count("/authorize") == 3
    assert house.count("/token") <= 5


def test_a_missing_scope_is_requested_together_with_the_granted_ones(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        house.needed = "write"
        assert (await owner.run()).content["code"] == "login_required"
        assert is_logged_in(await owner.login())
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert house.tokens["access-token-0002"] == "read write"


def test_the_token_is_removed_from_server_answers(story: Story, house: House, home: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        answer = await owner.run("leak")
        assert answer.content["result"] == {"result": "you sent Bearer [redacted:ACCESS_TOKEN]"}

    story(work)
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".sealed" for path in kept)
    for path in kept:
        assert not re.search(rb"(access|refresh)-token-\d|client-0", path.read_bytes()), path
        if "logins" in path.parts or path.suffix == ".key":
            assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("iss", ["https://evil.example", "", "slash"])
def test_a_code_from_another_issuer_is_refused(story: Story, house: House, iss: str) -> None:
    async def work(owner: Owner) -> None:
        house.iss = f"{house.issuer}/" if iss == "slash" else iss
        await owner.add()
        assert (await owner.login()).content["code"] == "untrusted"

    story(work)
    assert not house.asked


def test_a_server_with_a_different_resource_name_is_refused(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        house.resource = "https://other.example/mcp"
        await owner.add()
        assert (await owner.login()).content["code"] == "untrusted"

    story(work)
    assert house.count("/authorize") == 0


@pytest.mark.parametrize("pkce", [None, ["plain"]])
def test_an_authorization_server_without_pkce_is_refused(story: Story, house: House, pkce: Json) -> None:
    async def work(owner: Owner) -> None:
        house.pkce = pkce
        await owner.add()
        answer = await owner.login()
        assert answer.is_error
        assert "PKCE" in as_text(answer.content["message"])

    story(work)
    assert house.count("/register") == house.count("/authorize") == 0


def test_authorization_server_metadata_of_another_issuer_is_refused(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        house.more = {"issuer": "https://evil.example"}
        await owner.add()
        assert (await owner.login()).content["code"] == "untrusted"

    story(work)
    assert house.count("/register") == 0


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({"authorization_endpoint": "javascript:alert(1)"}, "address_denied"),
        ({"authorization_endpoint": "http://login.example/authorize"}, "address_denied"),
        ({"token_endpoint": "http://169.254.169.254/token"}, "address_denied"),
        ({"registration_endpoint": "https://10.0.0.1/register"}, "address_denied"),
        ({"registration_endpoint": "http://127.0.0.2:9/register"}, "address_denied"),
        ({"authorization_endpoint": "https://192.168.0.1/authorize"}, "address_denied"),
    ],
)
def test_metadata_cannot_send_kiwi_or_the_browser_to_an_ungranted_address(
    story: Story, house: House, document: dict[str, Json], code: str
) -> None:
    async def work(owner: Owner) -> None:
        house.more = document
        await owner.add()
        assert (await owner.login()).content["code"] == code

    story(work)
    assert not house.tokens


def test_a_redirect_of_the_authorization_server_is_refused(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        house.more = {"token_endpoint": f"{house.issuer}/authorize?keep=1&state=x&redirect_uri=http://127.0.0.1:9"}
        await owner.add()
        assert (await owner.login()).content["code"] == "request_failed"

    story(work)


def test_credentials_of_one_authorization_server_are_not_sent_to_another(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        other = House(url=house.url)
        async with listening(authority(other)) as other.issuer:
            first, house.issuer = house.issuer, other.issuer
            house.revoke()
            house.tokens = other.tokens
            assert is_logged_in(await owner.login())
            assert (await owner.run()).content["status"] == "success"
            house.issuer = first
        assert list(other.clients) == ["client-0"]
        assert [form["grant_type"] for form in other.asked] == ["authorization_code"]

    story(work)
    assert [form["grant_type"] for form in house.asked] == ["authorization_code"]


def test_tokens_are_sent_only_to_the_url_they_are_for(story: Story, house: House, project: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        other = House(issuer=house.issuer)
        async with listening(protected(other)) as address:
            other.url = f"{address}/mcp"
            [manifest] = (project / ".ai").rglob("diary.yaml")
            manifest.write_text(manifest.read_text().replace(house.url, other.url))
            assert (await owner.mcp("refresh")).content["code"] == "login_required"
            await owner.kernel.aclose()
        assert set(other.carried) == {""}

    story(work)


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
def test_a_registered_client_authenticates_as_the_server_requires(
    story: Story, house: House, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIARY_SECRET", "s3cret/with=signs")

    async def work(owner: Owner) -> None:
        house.methods = [method]
        await owner.add(client_id="kiwi at home", client_secret="${DIARY_SECRET}", issuer=house.issuer, scopes=["read"])
        assert is_logged_in(await owner.login())

    story(work)
    assert not house.clients
    [form] = house.asked
    if method == "client_secret_post":
        assert (form["client_id"], form["client_secret"]) == ("kiwi at home", "s3cret/with=signs")
    else:
        pair = base64.b64decode(form["authorization"].removeprefix("Basic ")).decode()
        assert pair == "kiwi%20at%20home:s3cret%2Fwith%3Dsigns"
        assert "client_secret" not in form


def test_a_client_metadata_document_identifies_kiwi_if_the_server_supports_it(
    story: Story, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://kiwi.example/client.json"

    async def work(owner: Owner) -> None:
        house.more = {"client_id_metadata_document_supported": True}
        await owner.add(client_metadata_url=url)
        assert is_logged_in(await owner.login())
        house.tokens.clear()
        age(60, monkeypatch)
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert not house.clients
    assert [form["client_id"] for form in house.asked] == [url, url]


def test_a_login_returns_to_the_configured_address_or_fails(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            await owner.add(client_id="kiwi", redirect_port=port)
            refused = await owner.login()
            assert f"Port {port}" in as_text(refused.content["message"])
        assert is_logged_in(await owner.login())
        assert house.asked[0]["redirect_uri"] == f"http://127.0.0.1:{port}/callback"

    story(work)


def test_a_client_is_registered_once_for_all_logins(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        assert is_logged_in(await owner.login())
        assert is_logged_in(await owner.login())

    story(work)
    assert len(house.clients) == 1
    assert house.count("/authorize") == 2


OWN: JsonObject = {"grant": "client_credentials", "client_id": "kiwi", "client_secret": "${DIARY_SECRET}"}


@pytest.mark.parametrize("grant", ["client_credentials", "authorization_code"])
def test_a_client_secret_is_sent_only_to_the_named_authorization_server(
    story: Story, house: House, grant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIARY_SECRET", "s3cret-value")
    other = House()

    async def work(owner: Owner) -> None:
        async with listening(authority(other)) as other.issuer:
            first, house.issuer = house.issuer, other.issuer  # the server names another one than its owner does
            await owner.add(**{**OWN, "grant": grant}, issuer=first)
            if grant == "authorization_code":
                assert (await owner.login()).content["code"] == "untrusted"
            else:
                refused = (await owner.mcp("refresh")).content
                assert f"not from {first}" in as_text(refused["message"])

    story(work)
    assert (other.asked, other.codes) == ([], {})


def test_a_client_secret_without_an_authorization_server_is_not_sent(
    story: Story, house: House, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIARY_SECRET", "s3cret-value")

    async def work(owner: Owner) -> None:
        await owner.add(client_id="kiwi", client_secret="${DIARY_SECRET}", issuer=house.issuer)
        [manifest] = (project / ".ai").rglob("diary.yaml")
        manifest.write_text(manifest.read_text().replace(f"issuer: {house.issuer}", "scopes: [read]"))
        assert (await owner.login()).content["code"] == "invalid_manifest"

    story(work)
    assert not house.asked
    oauth = OAuthConfig("diary", project, client_id="kiwi", client_secret="${DIARY_SECRET}")
    with pytest.raises(Untrusted, match="does not say for which"):
        owners_client(oauth, AuthorizationServer("https://evil.example", "https://evil.example/token"))
    with pytest.raises(Untrusted, match="not for https://evil"):
        owners_client(
            replace(oauth, issuer="https://login.example"),
            AuthorizationServer("https://evil.example", "https://evil.example/t"),
        )


def test_client_credentials_need_no_person(story: Story, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIARY_SECRET", "s3cret-value")

    async def work(owner: Owner) -> None:
        house.methods = ["client_secret_basic"]
        await owner.add(**OWN, issuer=house.issuer)
        assert (await owner.run()).content["status"] == "success"
        assert (await owner.login()).content["code"] == "invalid_request"
        house.revoke()
        age(60, monkeypatch)
        assert (await owner.run()).content["status"] == "success"

    story(work)
    assert house.count("/authorize") == 0
    assert {form["grant_type"] for form in house.asked} == {"client_credentials", "refresh_token"}


def test_a_key_can_replace_a_client_secret(story: Story, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    written = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    monkeypatch.setenv("DIARY_KEY", written)

    async def work(owner: Owner) -> None:
        await owner.add(grant="client_credentials", client_id="kiwi", private_key="${DIARY_KEY}", issuer=house.issuer)
        assert (await owner.run()).content["status"] == "success"

    story(work)
    _, claims, _ = house.asked[0]["client_assertion"].split(".")
    said = json.loads(base64.urlsafe_b64decode(claims + "=="))
    assert (said["iss"], said["sub"], said["aud"]) == ("kiwi", "kiwi", house.issuer)


def test_an_unreadable_login_record_is_reported_and_replaced_by_a_login(story: Story, home: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        [record] = records(home)
        record.write_bytes(record.read_bytes()[:-1] + b"x")
        await owner.restart()
        answer = await owner.run()
        assert answer.content["status"] == "unavailable"
        assert "kiwi mcp login" in as_text(answer.content["suggestion"])
        assert is_logged_in(await owner.login())
        assert (await owner.run()).content["status"] == "success"

    story(work)


def test_a_login_without_a_person_does_not_start(story: Story, house: House) -> None:
    async def declined(questions: Questions) -> Answers:
        return {key: {"action": "decline"} for key in questions}

    async def work(owner: Owner) -> None:
        await owner.add()
        assert (await owner.mcp("login")).content["code"] == "unanswered"
        assert (await owner.login(declined)).content["code"] == "unavailable"

    story(work)
    assert not house.asked


def test_removing_a_server_removes_its_login(story: Story, home: Path) -> None:
    async def work(owner: Owner) -> None:
        await owner.add()
        await owner.login()
        assert records(home)
        assert (await owner.mcp("remove")).content["status"] == "removed"

    story(work)
    assert not records(home)


def test_a_server_without_metadata_issues_its_own_tokens_or_offers_no_login(story: Story, house: House) -> None:
    async def work(owner: Owner) -> None:
        house.has_document = False
        await owner.add()
        # It says nothing of itself, and is no authorization server either: there is nowhere to register.
        answer = await owner.login()
        assert answer.content["code"] == "unavailable"
        assert "offers no OAuth" in as_text(answer.content["message"])
        assert "--header Authorization=" in as_text(answer.content["suggestion"])

    story(work)


@pytest.mark.parametrize("challenge", ["", 'Basic realm="x"', "Bearer"])
def test_a_server_that_needs_a_token_without_a_login_reports_it(challenge: str, project: Path, kernel: Kernel) -> None:
    async def refuse(_: Request) -> Response:
        headers = {"WWW-Authenticate": challenge} if challenge else {}
        return JSONResponse({"error": "x"}, status_code=401, headers=headers)

    anywhere = Route("/{path:path}", refuse, methods=["GET", "POST", "DELETE"])

    async def work() -> None:
        async with asyncio.timeout(120), listening(Starlette(routes=[anywhere])) as address:
            added = await kernel.call("mcp", {"action": "add", "server": "diary", "url": f"{address}/mcp"})
            login = await kernel.call("mcp", {"action": "login", "server": "diary"}, Caller(ask=browse))
            await kernel.aclose()
        for response in (json.dumps(added.content["warnings"]), json.dumps(login.content)):
            assert "offers no OAuth" in response
            assert "kiwi mcp login" not in response
            assert "--header Authorization=" in response

    asyncio.run(work())


def auth_faults(ask: Callable[..., Answer], auth: Mapping[str, Json], transport: str = "http") -> bool:
    config: JsonObject = {"transport": transport, "url": "https://diary.example/mcp", "auth": auth}
    manifest: JsonObject = {
        "tool_id": "diary", "tool_type": "mcp_server", "version": "1.0.0", "executor": "http_client",
        "description": "A diary", "config": config,
    }  # fmt: skip
    answer = ask("mcp", action="add", server="diary", manifest=manifest, dry_run=True)
    return bool(answer.is_error and as_object(answer.content).get("issues"))


@pytest.mark.parametrize(
    "auth",
    [
        {"type": "oauth", "client_secret": "in clear"},
        {"type": "oauth", "grant": "client_credentials"},
        {"type": "oauth", "grant": "client_credentials", "client_id": "x"},
        {"type": "oauth", "client_id": "x", "client_secret": "${X}"},
        {"type": "oauth", "client_id": "x", "private_key": "${X}"},
        {"type": "oauth", "grant": "client_credentials", "client_id": "x", "private_key": "${X}"},
        {"type": "oauth", "client_metadata_url": "http://plain.example/x"},
        {"type": "oauth", "scopes": ["two words"]},
        {"type": "bearer", "token": "${TOKEN}", "client_id": "x"},
    ],
)
def test_invalid_oauth_settings_are_refused(ask: Callable[..., Answer], auth: Mapping[str, Json]) -> None:
    assert auth_faults(ask, auth)


def test_oauth_is_refused_for_servers_without_http(ask: Callable[..., Answer]) -> None:
    assert not auth_faults(ask, {"type": "oauth"})
    assert not auth_faults(ask, {"type": "oauth", "scopes": ["read"], "issuer": "https://login.example"})
    assert auth_faults(ask, {"type": "oauth"}, "websocket")
