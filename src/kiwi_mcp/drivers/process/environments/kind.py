"""What a kind of environment is: one language's way to have dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kiwi_mcp.domain.items import Tool
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.process.environments.install import Installer


class EnvironmentKind(Protocol):
    """One language's way to have dependencies."""

    def plan(self, tool: Tool, default_packages: Sequence[str], cache: Path) -> Environment:
        """Name the environment that a tool needs; nothing is installed."""

    def bare(self) -> Environment:
        """Name the environment without any package."""

    async def make(self, environment: Environment, tool: Tool, installer: Installer) -> None:
        """Install it by the lock of a tool, or else by what was found the first time, unless it is there."""
