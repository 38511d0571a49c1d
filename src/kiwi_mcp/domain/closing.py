"""Objects that an `async with` block closes."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Block:
    """An object that an `async with` block closes at its end."""

    async def aclose(self) -> None:
        """Close the object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
