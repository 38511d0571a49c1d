"""What a connection to a server is shared by: whatever says who may use it, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.primitives.secrets import Bound, Found, Revealed, Secret

HERE = Space(Path("/project"), Path("/user"), Path("/cache"))
SERVER = Server(
    "user/local/mail@1.0.0", "0" * 64, "http", HttpSpec("POST", "http://127.0.0.1:9/mcp", {"X-Key": "${KEY}"}), HERE
)


def secrets(value: str, bound: Bound | None) -> Revealed:
    return Revealed({"KEY": Found("the store", Secret(value))}, {"KEY": bound} if bound else {})


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize(
    "narrowed", [Bound(("127.0.0.1:9",), "header"), Bound(("*",), "env"), Bound((), "header"), None], ids=repr
)
def test_a_connection_does_not_outlive_the_bounds_of_its_secrets(narrowed: Bound | None) -> None:
    wide = secrets("s3cret-value", Bound(("*",), "header"))
    assert SERVER.key(wide) == SERVER.key(secrets("s3cret-value", Bound(("*",), "header")))
    assert SERVER.key(wide) != SERVER.key(secrets("s3cret-value", narrowed))


def test_another_value_is_another_connection() -> None:
    bound = Bound(("*",), "header")
    assert SERVER.key(secrets("one-value", bound)) != SERVER.key(secrets("two-value", bound))
    assert SERVER.key({}) != SERVER.key(secrets("one-value", bound))
