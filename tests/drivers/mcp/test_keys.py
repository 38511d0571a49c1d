"""Connection keys: everything that decides who may share a connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.drivers.mcp.server import ServerConfig
from kiwi_mcp.primitives.secrets.reveal import FoundVariable, Revealed, SecretScope

HERE = Space(Path("/project"), Path("/user"), Path("/cache"))
SERVER = ServerConfig(
    "user/local/mail@1.0.0", "0" * 64, "http", HttpSpec("POST", "http://127.0.0.1:9/mcp", {"X-Key": "${KEY}"}), HERE
)


def secrets(value: str, bound: SecretScope | None) -> Revealed:
    return Revealed({"KEY": FoundVariable("the store", Secret(value))}, {"KEY": bound} if bound else {})


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize(
    "narrowed",
    [SecretScope(("127.0.0.1:9",), "header"), SecretScope(("*",), "env"), SecretScope((), "header"), None],
    ids=repr,
)
def test_a_connection_ends_when_the_bounds_of_its_secrets_change(narrowed: SecretScope | None) -> None:
    wide = secrets("s3cret-value", SecretScope(("*",), "header"))
    assert SERVER.key(wide) == SERVER.key(secrets("s3cret-value", SecretScope(("*",), "header")))
    assert SERVER.key(wide) != SERVER.key(secrets("s3cret-value", narrowed))


def test_another_secret_value_is_another_connection() -> None:
    bound = SecretScope(("*",), "header")
    assert SERVER.key(secrets("one-value", bound)) != SERVER.key(secrets("two-value", bound))
    assert SERVER.key({}) != SERVER.key(secrets("one-value", bound))
