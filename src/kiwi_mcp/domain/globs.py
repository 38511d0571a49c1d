"""Globs in rules: patterns of names, verbs, paths and hosts."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from kiwi_mcp.domain.patterns import lazy_pattern

_SPECIAL = lazy_pattern(r"[*?[]")
_BRACKETS = lazy_pattern(r"\[.*")
_ANY = "**"


def is_plain(pattern: str) -> bool:
    """Whether a pattern matches only one name."""
    return _SPECIAL.search(pattern) is None


def fits_name(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in which `*` stands for any characters."""
    part, expression = _expression(pattern)
    return part in name and expression.match(name) is not None


def fits_item(pattern: str, identity: str) -> bool:
    """Whether an item, `SOURCE/NAMESPACE/NAME@VERSION`, fits a pattern; one without `@` is about every version."""
    return fits_name(pattern, identity if "@" in pattern else identity.partition("@")[0])


def fits_verb(pattern: str, verb: str) -> bool:
    """Whether a verb matches a pattern: `execute` covers all its actions, `execute.create` one of them."""
    return fits_name(pattern, verb) or fits_name(pattern, verb.partition(".")[0])


def fits_path(pattern: str, path: str) -> bool:
    """Whether a path, or a folder it is in, matches; `*` is any part of one name, `**` any number of names."""
    if path.startswith("/") != pattern.startswith("/"):
        return False
    met = begun(pattern)
    for name in path.split("/"):
        if is_met(pattern, met):
            return True
        met = onward(pattern, met, name) if name else met
    return is_met(pattern, met)


def begun(pattern: str) -> frozenset[int]:
    """Return the initial match state of a path pattern, before the first name of a path."""
    return _passing(_segments(pattern), frozenset({0}))


def onward(pattern: str, met: frozenset[int], name: str) -> frozenset[int]:
    """Return the match state after one more name; empty if nothing below can match."""
    wanted = _segments(pattern)
    kept = {place for place in met if place < len(wanted) and wanted[place] is None}
    kept |= {place + 1 for place in met if place < len(wanted) and (one := wanted[place]) and one.match(name)}
    return _passing(wanted, frozenset(kept))


def is_met(pattern: str, met: frozenset[int]) -> bool:
    """Whether all of a pattern is matched, so that everything below matches as well."""
    return len(_segments(pattern)) in met


def fits_host(pattern: str, host: str) -> bool:
    """Whether a host, or all that a pattern of hosts stands for, fits a pattern; `[v6]:port` and `*.host` are ones."""
    (wanted, wanted_port), (name, port) = _split(pattern), _split(host)
    if wanted_port is not None and wanted_port != port:
        return False
    if wanted in {"*", name}:
        return True
    if wanted.startswith("*."):
        return name.endswith(wanted[1:]) and len(name) > len(wanted) - 1 and address_of(name) is None
    address = address_of(wanted)
    if address is not None:
        return address == address_of(name)
    return "*" not in name and fits_name(wanted, name)


def fits_request(pattern: str, request: str) -> bool:
    """Whether a request, `METHOD HOST:PORT/PATH`, fits a pattern of that form; `*` stands for any method or host."""
    method, _, target = pattern.partition(" ")
    used, _, place = request.partition(" ")
    (host, _, path), (name, _, rest) = target.partition("/"), place.partition("/")
    return method in {"*", used} and fits_host(host, name) and fits_name(path, rest)


def address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address of a host, or None if it is a name."""
    try:
        return ip_address(text)
    except ValueError:
        return None


@lru_cache(maxsize=4_096)
def _expression(pattern: str) -> tuple[str, re.Pattern[str]]:
    """Return a pattern as a regular expression, and its longest literal part, which rejects most names."""
    plain = _BRACKETS.sub("*", pattern).replace("?", "*").split("*")
    return max(plain, key=len), re.compile(translate(pattern))


@lru_cache(maxsize=1_024)
def _segments(pattern: str) -> tuple[re.Pattern[str] | None, ...]:
    names = [name for name in pattern.split("/") if name]
    return tuple(None if name == _ANY else re.compile(translate(name)) for name in names)


def _passing(wanted: tuple[re.Pattern[str] | None, ...], places: frozenset[int]) -> frozenset[int]:
    """Return the positions, and those after each `**`, which may match nothing."""
    reached = set(places)
    for place in places:
        following = place
        while following < len(wanted) and wanted[following] is None:
            following += 1
            reached.add(following)
    return frozenset(reached)


@lru_cache(maxsize=1_024)
def _split(pattern: str) -> tuple[str, str | None]:
    text = pattern.lower()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host.removesuffix("."), port
    return text.removesuffix("."), None
