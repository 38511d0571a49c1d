"""Drivers: a plan in, an outcome out. They are loaded by the name that a type spec gives them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol, TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import DriverMissing, LoginRequired, NotCallable, Unavailable
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
        return None

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Say exactly what will happen. Starts no process, opens no connection, writes nothing."""

    async def aclose(self) -> None:
        """Release what the driver keeps open between calls: nothing, for most."""
        return None  # noqa: RET501 - a body makes it a default

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


class Drivers:
    """The drivers of one kernel, each loaded when it is first used."""

    def __init__(self) -> None:
        self._loaded: dict[str, Driver | None] = {}

    def named(self, name: str) -> Driver | None:
        """Return the driver of that name, or None where this version has none."""
        if name not in self._loaded:
            self._loaded[name] = _create(name)
        return self._loaded[name]

    def of(self, chain: Chain, instead: Callable[[], Sequence[str]]) -> Driver:
        """Return the driver that the type of the chain's tool names; where it names none, `instead` has some."""
        tool = chain.tool
        if not chain.driver:
            raise NotCallable(tool.id, tool.manifest.tool_type, "other items run on it", instead=instead())
        driver = self.named(chain.driver)
        if driver is None:
            raise DriverMissing(tool.id, chain.driver)
        return driver

    async def aclose(self) -> None:
        """Close what every driver that was used keeps open."""
        for driver in filter(None, self._loaded.values()):
            await driver.aclose()


def _create(name: str) -> Driver | None:
    # A name in data is a file name in code: `driver: process` is the package drivers/process.
    module_name = f"kiwi_mcp.drivers.{name}"
    if not name.isidentifier():
        return None
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        return None
    # Not every module of the package is a driver.
    create: Callable[[], Driver] | None = getattr(module, "create_driver", None)
    return create() if create else None
