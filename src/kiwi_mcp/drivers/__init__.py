"""Drivers: a plan in, an outcome out. They are loaded by the name that a type spec gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from kiwi_mcp.domain.errors import DriverMissing, NotCallable
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.drivers.driver import Driver


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
