"""Requests with secrets in their responses, and client assertions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from contextlib import aclosing
from time import time
from types import MappingProxyType
from urllib.parse import quote
from uuid import uuid4

import jwt
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.http.client import network, open_answer
from kiwi_mcp.primitives.http.pool import Network
from kiwi_mcp.primitives.http.request import limited, prepare, refuse_unbound
from kiwi_mcp.primitives.http.traffic_log import TrafficLog
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.primitives.secrets.reveal import reveal

_NOTHING: Mapping[str, Secret] = MappingProxyType({})


class TokenReply(Struct, frozen=True):
    """An answer: its status, the object in its body without secrets, and the secrets that were in it."""

    status: int
    content: JsonObject
    secrets: Mapping[str, Secret]

    @property
    def is_ok(self) -> bool:
        """Whether the server did what it was asked."""
        return 200 <= self.status < 300  # noqa: PLR2004 - the statuses of success

    @property
    def reason(self) -> str:
        """Why it did not, in the server's own words as far as they can be shown."""
        words = [as_text(self.content.get(word)) for word in ("error", "error_description")]
        said = strip_controls(": ".join(filter(None, words))).replace("\n", " ")[:300]
        return f"{said} ({self.status})" if said else f"it answered {self.status}"


async def take(
    spec: HttpSpec,
    *,
    words: Collection[str] = (),
    secrets: Mapping[str, str],
    own: Mapping[str, Secret] = _NOTHING,
    through: Network = network,
) -> TokenReply:
    """Send a request and return its response; `words` are the keys of the response object that hold secrets.

    `own` are further secrets of the request, besides those of the caller. Unlike in other requests, a user name and a
    password are quoted before they are joined, as OAuth requires (RFC 6749).
    """
    values = {**secrets, **{name: secret.reveal() for name, secret in own.items()}}
    redactor = Redactor(values)
    quoted = spec
    if spec.basic is not None:
        name, password = (quote(reveal(text, values), safe="") for text in spec.basic)
        quoted = replace(spec, basic=(name, password))
    request = prepare(quoted, values)
    refuse_unbound(spec, request, secrets)  # as it was written, with the names of the caller's secrets still in it
    with limited(spec, request, redactor):
        async with asyncio.timeout(spec.timeout):
            begun = await open_answer(spec, request, through, silent, TrafficLog())
            async with aclosing(begun) as answer:
                body, _ = await answer.whole(spec.max_bytes)
    found = _object(body)
    taken = {word: Secret(value) for word in words if isinstance(value := found.get(word), str) and value}
    rest = {word: value for word, value in found.items() if word not in words}
    return TokenReply(answer.status, as_object(_object(redactor.clean(json.dumps(rest).encode()))), taken)


def client_assertion(client_id: str, audience: str, key: str, algorithm: str, secrets: Mapping[str, str]) -> Secret:
    """Return a short-lived signature by the secret `key` that authenticates a client to one server (RFC 7523)."""
    now = int(time())
    times = {"iat": now, "exp": now + 120}
    claims = {"iss": client_id, "sub": client_id, "aud": audience, "jti": uuid4().hex, **times}
    try:
        return Secret(jwt.encode(claims, reveal(key, secrets), algorithm))
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError):
        raise InvalidRequest(
            f"`config.auth.private_key` is no key for {algorithm}.",
            suggestion="Give a private key in PEM, and its `signing_algorithm`.",
        ) from None


def _object(body: bytes) -> JsonObject:
    try:
        found: Json = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return as_object(found)
