"""A client assertion: a signature of the client in place of a client secret."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from uuid import uuid4

import jwt

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets.reveal import reveal

_SECONDS = 120


def signed(client_id: str, audience: str, key: str, algorithm: str, secrets: Mapping[str, str]) -> Secret:
    """Return a short-lived assertion that authenticates a client to one authorization server (RFC 7523).

    `key` names a secret.
    """
    now = int(time())
    claims = {
        "iss": client_id,
        "sub": client_id,
        "aud": audience,
        "jti": uuid4().hex,
        "iat": now,
        "exp": now + _SECONDS,
    }
    try:
        return Secret(jwt.encode(claims, reveal(key, secrets), algorithm))
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError):
        raise InvalidRequest(
            f"`config.auth.private_key` is no key for {algorithm}.",
            suggestion="Give a private key in PEM, and its `signing_algorithm`.",
        ) from None
