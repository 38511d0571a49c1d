"""Item names, safe paths, versions and version ranges."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, total_ordering
from unicodedata import normalize

from msgspec import Struct

from kiwi_mcp.domain.patterns import lazy_pattern

MAX_PATH = 255
MAX_PATH_DEPTH = 16

_TOOL_ID = lazy_pattern(r"[a-z0-9][a-z0-9_-]{0,127}", re.ASCII)
_NAMESPACE = lazy_pattern(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_DEVICE = lazy_pattern(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.[^/]*)?", re.ASCII | re.IGNORECASE)
# Control characters, lone surrogates, direction marks, and characters that some systems forbid.
_UNSAFE = lazy_pattern(r'[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\:*?"<>|]')
_PRE = r"(?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = lazy_pattern(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    rf"(?:-({_PRE}(?:\.{_PRE})*))?(?:\+([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?",
    re.ASCII,
)
_MAX_LENGTH = 256
_CLAUSE = lazy_pattern(r"(\^|~|>=|<=|>|<|=|)\s*v?(\d+|[xX*])(?:\.(\d+|[xX*]))?(?:\.(\d+|[xX*]))?(-[0-9A-Za-z.-]+)?")


def unused_name(name: str, taken: Collection[str]) -> str:
    """Return a name, with the first number added to it that makes it a new one if it is taken."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def is_tool_id(text: str) -> bool:
    """Whether the text may name an item: ASCII, lower case, and no device of any system."""
    return _TOOL_ID.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def is_namespace(text: str) -> bool:
    """Whether the text may name a namespace: ASCII, lower case, and no device of any system."""
    return _NAMESPACE.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def is_safe_path(path: str) -> bool:
    """Whether the text is a relative POSIX path that stays below its folder on every system."""
    return 0 < len(path) <= MAX_PATH and _is_safe(path)


@lru_cache(maxsize=4_096)
def _is_safe(path: str) -> bool:
    # Cached, because thousands of versions have the same few names.
    parts = path.split("/")
    if len(parts) > MAX_PATH_DEPTH or path.startswith("~") or _UNSAFE.search(path):
        return False
    # An empty part is a leading, trailing or doubled slash; a trailing dot covers `.` and `..`.
    return all(
        part
        and not part.endswith((".", " "))
        and not part.startswith(" ")
        and len(part.encode()) <= MAX_PATH
        and _DEVICE.fullmatch(part) is None
        for part in parts
    )


def clashes(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each path that cannot stand beside another of them on every system, and that other one.

    Two paths clash if they are one and the same, differ only in case or in how letters are composed, or if one is a
    folder on the way to the other.
    """
    taken: dict[str, str] = {}
    for path in paths:
        if (folded := _folded(path)) in taken:
            yield path, taken[folded]
        else:
            taken[folded] = path
    for path in paths:
        folder = _folded(path)
        while folder := folder.rpartition("/")[0]:
            if folder in taken:
                yield path, taken[folder]


def _folded(path: str) -> str:
    # Folding case may decompose a letter, so it is composed again.
    return normalize("NFC", normalize("NFC", path).casefold())


@total_ordering
class Version(Struct, frozen=True):
    """A semantic version; build metadata does not count."""

    major: int
    minor: int
    patch: int
    pre: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """Return the version, or None where the text is not one."""
        return _parse(text) if len(text) <= _MAX_LENGTH else None

    def __lt__(self, other: Version) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, int, int, bool, tuple[tuple[bool, int, str], ...]]:
        # A pre-release comes before its release; numbers come before words and compare as numbers.
        parts = tuple((False, int(p), "") if p.isdigit() else (True, 0, p) for p in self.pre)
        return (self.major, self.minor, self.patch, not self.pre, parts)

    @property
    def key(self) -> str:
        """The version as ASCII text that sorts in version order."""
        core = _sortable(self.major) + _sortable(self.minor) + _sortable(self.patch)
        if not self.pre:
            return f"{core}~"
        # A word ends in a mark below every letter, so that a shorter one comes first.
        return f"{core}-{''.join(f'0{_sortable(int(p))}' if p.isdigit() else f'1{p}!' for p in self.pre)}"

    def __str__(self) -> str:
        core = f"{self.major}.{self.minor}.{self.patch}"
        return f"{core}-{'.'.join(self.pre)}" if self.pre else core


@lru_cache(maxsize=4_096)
def _parse(text: str) -> Version | None:
    found = _SEMVER.fullmatch(text)
    if found is None:
        return None
    major, minor, patch, pre, _build = found.groups()
    return Version(int(major), int(minor), int(patch), tuple(pre.split(".")) if pre else ())


def _sortable(number: int) -> str:
    # How many digits there are comes first, as a letter; 25 and more of them take several letters.
    digits = str(number)
    long, short = divmod(len(digits), 25)
    return f"{'z' * long}{chr(97 + short)}{digits}"


class Range(Struct, frozen=True):
    """A range of versions: `^1.2`, `~1.2.3`, `>=1,<2`, `1.x`, `1.2.3`, `*`; several clauses all hold."""

    text: str
    clauses: tuple[tuple[Version, Version | None, bool, bool], ...]
    """Lower bound, upper bound (None is open), whether each end is included."""

    @classmethod
    def parse(cls, text: str) -> Range | None:
        """Return the range, or None where the text is not one."""
        clauses = []
        for part in filter(None, re.split(r"[,\s]+", re.sub(r"([\^~<>=])\s+", r"\1", text.strip()))):
            found = _CLAUSE.fullmatch(part)
            if found is None:
                return None
            clauses.append(_clause(found))
        return cls(text, tuple(clauses)) if clauses else None

    def covers(self, version: Version) -> bool:
        """Whether the version is in the range; a pre-release only if a clause names its release."""
        if version.pre and not any(
            low.pre and (low.major, low.minor, low.patch) == (version.major, version.minor, version.patch)
            for low, *_ in self.clauses
        ):
            return False
        return all(
            (version > low or (with_low and version == low))
            and (high is None or version < high or (with_high and version == high))
            for low, high, with_low, with_high in self.clauses
        )


def _clause(found: re.Match[str]) -> tuple[Version, Version | None, bool, bool]:
    operator, *numbers, pre = found.groups()
    given = [int(n) for n in numbers if n is not None and n.isdigit()]
    major, minor, patch = (*given, 0, 0, 0)[:3]
    low = Version(major, minor, patch, tuple(pre[1:].split(".")) if pre else ())
    match operator:
        case "^":  # up to the next change of the leftmost number that is not zero
            if low.major or len(given) == 1:
                return low, Version(low.major + 1, 0, 0), True, False
            if low.minor or len(given) == 2:  # noqa: PLR2004 - major and minor
                return low, Version(0, low.minor + 1, 0), True, False
            return low, Version(0, 0, low.patch + 1), True, False
        case "~":
            return low, _next(low, given[:2]), True, False
        case ">=":
            return low, None, True, True
        case ">":
            return low, None, False, True
        case "<":
            return Version(0, 0, 0), low, True, False
        case "<=":
            return Version(0, 0, 0), low, True, True
        case _:
            if len(given) == 3:  # noqa: PLR2004 - major, minor and patch
                return low, low, True, True
            return low, _next(low, given), True, False


def _next(low: Version, given: list[int]) -> Version | None:
    if not given:
        return None
    return Version(low.major + 1, 0, 0) if len(given) == 1 else Version(low.major, low.minor + 1, 0)
