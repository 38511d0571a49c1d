"""Secrets in answers of authorization servers are removed before anything else reads the answer."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from msgspec import field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.drivers.mcp.conftest import listening

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.drivers.mcp.oauth.authorization import (
    AuthorizationServer,
    OAuthClient,
    OAuthHttp,
    TokenEndpoint,
    TokenForm,
    registered,
)
from kiwi_mcp.drivers.mcp.server import OAuthConfig
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.token_request import TokenReply

REGISTRATION: JsonObject = {"client_secret": "s-secret", "registration_access_token": "r-secret"}
TOKENS: JsonObject = {"access_token": "a-secret", "refresh_token": "f-secret", "id_token": "i-secret"}


class RecordingWeb(OAuthHttp, frozen=True):
    """The real way to authorization servers, which keeps the answers to look at them."""

    replies: list[TokenReply] = field(default_factory=list)

    async def post_json(self, url: str, body: JsonObject, words: Collection[str]) -> TokenReply:
        self.replies.append(await OAuthHttp.post_json(self, url, body, words))
        return self.replies[-1]

    async def post_form(self, url: str, form: TokenForm, words: Collection[str]) -> TokenReply:
        self.replies.append(await OAuthHttp.post_form(self, url, form, words))
        return self.replies[-1]


def authorization_server() -> Starlette:
    async def register(_: Request) -> Response:
        return JSONResponse({"client_id": "c", "token_endpoint_auth_method": "client_secret_post", **REGISTRATION})

    async def token(_: Request) -> Response:
        return JSONResponse({"token_type": "Bearer", **TOKENS})

    return Starlette(routes=[Route("/register", register, methods=["POST"]), Route("/token", token, methods=["POST"])])


@pytest.mark.usefixtures("loopback")
async def test_secrets_of_registrations_and_tokens_are_removed_from_answers(space: Space) -> None:
    async def scenario() -> list[TokenReply]:
        async with listening(authorization_server()) as address:
            web = RecordingWeb(("127.0.0.1",), (), {})
            authority = AuthorizationServer(address, f"{address}/token", registration_endpoint=f"{address}/register")
            await registered(authority, "http://127.0.0.1/back", "", None, web)
            oauth = OAuthConfig("notes", space.user / "state")
            await TokenEndpoint(authority, OAuthClient("c"), "http://127.0.0.1/mcp", oauth, web).granted("")
            await client.aclose()
            return web.replies

    registration, tokens = await scenario()
    assert registration.secrets.keys() == REGISTRATION.keys()
    assert tokens.secrets.keys() == TOKENS.keys()
    assert not (registration.content.keys() & REGISTRATION.keys())
    assert not (tokens.content.keys() & TOKENS.keys())
    assert "-secret" not in repr((registration, tokens))


def test_the_values_of_a_servers_variables_are_not_shown() -> None:
    assert "v-secret" not in repr(OAuthHttp(("example.com",), (), {"TOKEN": "v-secret"}))
