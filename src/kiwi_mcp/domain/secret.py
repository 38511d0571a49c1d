"""A secret value that does not print itself."""

from __future__ import annotations

from hmac import compare_digest
from typing import NoReturn


class Secret:
    """A value that is revealed only on request: not by printing, formatting, comparing or pickling."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """Return the value itself."""
        return self.__value

    def is_same(self, other: Secret) -> bool:
        """Whether two secrets have one value."""
        return compare_digest(self.__value.encode(errors="surrogatepass"), other.__value.encode(errors="surrogatepass"))

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret is not written anywhere.")
