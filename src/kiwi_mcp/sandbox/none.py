"""The backend `none`: a process as it is. The primitive that starts it sees to its variables, its time and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.port import Confined, SelfTest


class Unconfined:
    """Gives a process as it came."""

    name = "none"

    def obstacles(self) -> tuple[str, ...]:
        """Return nothing: it works everywhere."""
        return ()

    def fingerprint(self) -> str:
        """Return nothing: there is nothing to show."""
        return ""

    def self_test(self, secret: str) -> SelfTest | None:  # noqa: ARG002 - the port gives every backend the same arguments
        """Return None: what it provides, the primitive does, wherever it runs."""
        return None

    @contextmanager
    def wrap(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:  # noqa: ARG002 - as above
        """Give the process as it came."""
        yield Confined(spec)
