"""Regular expressions that are compiled at their first use: most commands need few of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, AnyStr, cast


class LazyPattern:
    """A pattern with the methods of `re.Pattern`."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, found)  # from now on it is found without this function
        return found


def lazy_pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a pattern for a module that many commands import and few use; compiling it takes a millisecond or so."""
    return cast("re.Pattern[AnyStr]", LazyPattern(text, flags))


@contextmanager
def compiled_later() -> Iterator[None]:
    """Import modules of others in this block, and compile the patterns that they define when they are first used."""
    compile_now = re.compile
    re.compile = lazy_pattern  # type: ignore[assignment]  # restored below; one thread imports at the start
    try:
        yield
    finally:
        re.compile = compile_now
