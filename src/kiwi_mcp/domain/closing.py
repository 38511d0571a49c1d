"""Closing: things that are let go of at the end of an `async with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Block:
    """An `async with` block that closes what it opened."""

    async def aclose(self) -> None:
        """Let go."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
