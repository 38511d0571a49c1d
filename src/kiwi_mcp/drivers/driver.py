"""The `Driver` protocol, `Dispatch`, and the outcome "unavailable"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.outcome import Logs, Outcome
from kiwi_mcp.domain.plan import Plan

Dispatch: TypeAlias = Callable[[str, JsonObject], Awaitable[Json]]
"""Calls a verb as the caller of the item that is driven, through every gate, and returns its response.

It raises the error of a call that is refused."""


class SyntaxCheck(Struct, frozen=True):
    """A program that checks the syntax of an item: its plan, and how to run it."""

    plan: Plan
    run: Callable[[], Awaitable[tuple[Issue, ...]]]


class Driver(Protocol):
    """Judges an item, turns a chain and a caller's inputs into a plan, and a plan into an outcome.

    A driver is a module of this package with a function or class `create_driver`. Each kernel has its own.
    """

    def check(self, chain: Chain, space: Space) -> SyntaxCheck | None:
        """Refuse an item that its own mechanism finds invalid; return the program that says more, if there is one.

        Starts nothing: the kernel judges the plan of the program first.
        """

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Say exactly what will happen. Starts no process, opens no connection, writes nothing."""

    async def aclose(self) -> None:
        """Release what the driver keeps open between calls."""

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Refuse a plan that this machine cannot isolate as it says. Nothing of the item is started."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Do what the plan says. What keeps it from starting is raised; whatever ran is an outcome."""


def unavailable(fault: Unavailable) -> Outcome:
    """Return the outcome of a call to an unavailable service, with the last output of that service."""
    details = {name: value for name, value in fault.details.items() if name != "stderr"}
    if isinstance(fault, LoginRequired):
        details["code"] = fault.code
    return Outcome(
        "unavailable",
        message=fault.message,
        suggestion=fault.suggestion,
        logs=Logs(stderr=as_text(fault.details.get("stderr"))),
        details=details,
    )
