"""The owner's preferences: what a client sees without searching. One readable file overrides the product's defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from msgspec import Struct
from msgspec.structs import replace

import kiwi_mcp.data
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.files import OwnerStamp, owner_stamp
from kiwi_mcp.manifest.home_config import usable_config
from kiwi_mcp.manifest.names import did_you_mean

FILE_NAME = "preferences.yaml"
"""The file in the memory, which nothing but the owner's own commands write."""

Section: TypeAlias = Literal["always_send", "prompts", "resources"]
SECTIONS: tuple[Section, ...] = get_args(Section)
CALLABLE = lazy_pattern(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
"""A name that every client can call something by."""


_WORDS = (*SECTIONS, "task_after")
_NAMED: tuple[Section, ...] = ("always_send", "prompts")
"""What may be given another name; a resource is known by its address."""
_PATTERN = lazy_pattern(r"[*?\[]")
_MOST_ENTRIES = 1_000
_LONGEST = 400
_LONGEST_WAIT = 86_400
_FIX = "Write `true`, `false`, or `{as: another_name}`."

_read: dict[str, tuple[OwnerStamp, Preferences]] = {}


class Preference(Struct, frozen=True):
    """The preference for the items that a word names: whether they are sent, and under which name."""

    word: str
    """A short name, `namespace/name`, a full name, or a pattern of these."""
    is_sent: bool
    name: str = ""

    @property
    def is_pattern(self) -> bool:
        """Whether the word may stand for several items."""
        return is_pattern(self.word)


class PreferenceLayer(Struct, frozen=True):
    """The preferences from one source: those for single items by name, and those for all items that match a pattern."""

    names: Mapping[str, Preference]
    """By the name without a version."""
    patterns: Sequence[Preference]
    """The longest first."""

    @classmethod
    def of(cls, wishes: Iterable[Preference]) -> PreferenceLayer:
        """Return the layer of some preferences."""
        known = sorted(wishes, key=lambda wish: (-len(wish.word), wish.word))
        names = {wish.word.partition("@")[0]: wish for wish in known if not wish.is_pattern}
        return cls(names, tuple(wish for wish in known if wish.is_pattern))

    def about(self, names: Sequence[str]) -> Preference | None:
        """Return the wish that decides on an item: by name before by pattern, by a fuller one before a shorter."""
        by_name = (self.names[name] for name in names if name in self.names)
        by_pattern = (wish for wish in self.patterns if any(fnmatchcase(name, wish.word) for name in names))
        return next(by_name, None) or next(by_pattern, None)


class PreferenceSection(Struct, frozen=True):
    """All that is wished of one kind of thing: what the owner wrote, and what holds where they wrote nothing."""

    owner: PreferenceLayer
    product: PreferenceLayer

    def about(self, names: Sequence[str]) -> Preference | None:
        """Return the wish that decides on an item, given its names from the fullest to the shortest."""
        return self.owner.about(names) or self.product.about(names)

    @property
    def named(self) -> Sequence[Preference]:
        """The preferences that send single items, in the order of their words."""
        names = {**self.product.names, **self.owner.names}
        return [wish for name, wish in sorted(names.items()) if wish.is_sent and self.about([name]) == wish]

    @property
    def patterns(self) -> Sequence[Preference]:
        """The preferences that send all items that match a pattern, the owner's first."""
        return [wish for wish in (*self.owner.patterns, *self.product.patterns) if wish.is_sent]


class Preferences(Struct, frozen=True):
    """What the owner prefers, over what ships with Kiwi."""

    sections: Mapping[Section, PreferenceSection]
    task_after: float
    """For how many seconds a client that could take a task waits for a call instead."""
    fault: InvalidManifest | None = None
    """Why the owner's file counts as if it were not there, if so."""


def preferences_file(user: Path) -> Path:
    """Return the owner's file: that of the memory, or the one that an older Kiwi left in the user's own folder."""
    memory = usable_config(user).memory_root or f"{user}/memory"
    place, old = Path(memory, FILE_NAME), user / FILE_NAME
    return old if not place.exists() and old.exists() else place


def owner_preferences(user: Path) -> Preferences:
    """Return the preferences of a user space. With a fault in the file the defaults apply, and it is reported."""
    path = str(preferences_file(user))
    stat = owner_stamp(path)
    known = _read.get(path)
    if known is None or known[0] != stat:
        try:
            found = _merged(_parse(Path(path)) if stat else {})
        except InvalidManifest as fault:
            found = replace(_merged({}), fault=fault)
        known = _read[path] = (stat, found)
    return known[1]


def check_preferences(user: Path) -> None:
    """Refuse a file that is not understood, with every fault in it."""
    if fault := owner_preferences(user).fault:
        raise fault.with_traceback(None)


def is_pattern(word: str) -> bool:
    """Whether a word may stand for several items."""
    return _PATTERN.search(word) is not None


def wish_issues(section: Section, word: str, value: Json) -> Iterator[Issue]:
    """Yield the faults of one entry of a section."""
    place, name = f"{section}.{word[:_LONGEST]}", as_object(value).get("as")
    if not word.strip() or len(word) > _LONGEST:
        yield Issue(section, "has an entry that can name nothing", "Write a name, or a pattern such as `github/*`.")
    if isinstance(value, Mapping) and section not in _NAMED:
        yield Issue(place, "is not true or false", "A resource keeps its own address: write `true` or `false`.")
    elif isinstance(value, Mapping):
        yield from (Issue(f"{place}.{other}", "is not a known key", _FIX) for other in value if other != "as")
        if not CALLABLE.fullmatch(as_text(name)):
            fix = "Use 1 to 64 letters, digits, `_`, `-` and `.`."
            yield Issue(f"{place}.as", "is not a name that clients can call", fix)
        elif is_pattern(word):
            yield Issue(f"{place}.as", "gives one name to several items", "Name one item, or leave `as` out.")
    elif not isinstance(value, bool):
        yield Issue(place, "says neither yes nor no", _FIX)


def _merged(written: JsonObject) -> Preferences:
    shipped = _product()
    sections = {
        section: PreferenceSection(_layer(written.get(section)), _layer(shipped.get(section))) for section in SECTIONS
    }
    seconds = written.get("task_after", shipped["task_after"])
    return Preferences(sections, float(seconds) if isinstance(seconds, int | float) else 0.0)


@cache
def _product() -> JsonObject:
    return _parse(Path(kiwi_mcp.data.__file__).parent / FILE_NAME)


def _layer(written: Json) -> PreferenceLayer:
    return PreferenceLayer.of(
        Preference(word, is_sent=value is not False, name=as_text(as_object(value).get("as")))
        for word, value in as_entries(written).items()
    )


def as_entries(written: Json) -> JsonObject:
    """Return a section as entries, also where it was written as a list of names."""
    listed = {as_text(word): True for word in as_list(written)}
    return listed or as_object(written)


def _parse(path: Path) -> JsonObject:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        issue = Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")
        raise InvalidManifest(f"The owner's {FILE_NAME}", [issue]) from error
    if issues := [*_issues(value)]:
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues)
    return as_object(value)


def _issues(value: Json) -> Iterator[Issue]:
    if value is not None and not isinstance(value, Mapping):
        yield Issue("", "is not a mapping", f"Write words at its top: {', '.join(_WORDS)}.")
    written = as_object(value)
    for word in written:
        if word not in _WORDS:
            fix = f"{did_you_mean(word, _WORDS)}Use one of: {', '.join(_WORDS)}."
            yield Issue(word, "is not a known key", fix)
    for section in SECTIONS:
        listed, entries = as_list(written.get(section)), as_entries(written.get(section))
        if written.get(section) is not None and not listed and not isinstance(written[section], Mapping | list):
            yield Issue(section, "is neither a mapping nor a list", "Write a name and `true` on each line below it.")
        if not all(isinstance(word, str) for word in listed):
            yield Issue(section, "is not a list of names", "Write names, or a mapping of names to `true` and `false`.")
        if len(entries) > _MOST_ENTRIES:
            yield Issue(section, f"has more than {_MOST_ENTRIES:,} entries", "Use patterns, or send less.")
            continue
        for word, wish in entries.items():
            yield from wish_issues(section, word, wish)
    seconds = written.get("task_after", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_WAIT:
        yield Issue("task_after", "is not a number of seconds from 0 to 86,400", "Write `task_after: 5`.")
