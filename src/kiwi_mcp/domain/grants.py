"""Grants and rights: what a principal may use, the verdict on one use, and the globs of rules. A rule only narrows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern

_SPECIAL = lazy_pattern(r"[*?[]")
_BRACKETS = lazy_pattern(r"\[.*")
_ANY = "**"
ResourceKind = Literal["verb", "item", "read", "write", "host", "command", "variable", "spawn", "trait", "endpoint"]
"""The kinds of resources in rules: verbs, items, files, hosts, programs, variables, threads, traits of items, requests.

A trait is `type/TYPE` or `runtime/NAME` of a link of an item's chain, or `item/ITEM_TYPE/NAME` with the category or
namespace before the name. A request is `METHOD HOST:PORT/PATH`. Rules about traits and requests add to those about
items and hosts.
"""
KINDS: tuple[ResourceKind, ...] = get_args(ResourceKind)
_FIELDS: Mapping[ResourceKind, str] = {
    kind: kind if kind in {"read", "write", "spawn"} else f"{kind}s" for kind in KINDS
}
OWNER_POLICY = "policy.yaml"
_USE: Mapping[ResourceKind, str] = {"read": "reading of", "write": "writing of", "endpoint": "request"}


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


_FITS: Mapping[ResourceKind, Callable[[str, str], bool]] = {
    **dict.fromkeys(KINDS, fits_name),
    "verb": fits_verb,
    "item": fits_item,
    "read": fits_path,
    "write": fits_path,
    "host": fits_host,
    "endpoint": fits_request,
}


class Rules(Struct, frozen=True):
    """Globs that allow and globs that deny. Deny wins, and the order never matters."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def match(self, name: str, kind: ResourceKind = "item") -> str | None:
        """Return the rule that refuses `name`, empty if no rule allows it, or None where it is allowed."""
        is_allowed, rule = match_rules(self, kind, name)
        return None if is_allowed else rule

    def to_json(self) -> JsonObject:
        """Return the rules as they are written."""
        return {word: list(rules) for word, rules in (("allow", self.allow), ("deny", self.deny)) if rules}


@lru_cache(maxsize=4_096)
def match_rules(rules: Rules, kind: ResourceKind, name: str) -> tuple[bool, str]:
    """Return whether rules allow a name, and the deciding rule; empty if none matches."""
    fits = _FITS[kind]
    for pattern in rules.deny:
        if fits(pattern, name):
            return False, pattern
    found = next((pattern for pattern in rules.allow if fits(pattern, name)), None)
    return found is not None, found or ""


ALL = Rules(allow=("*",))
EVERYWHERE = Rules(allow=("**",))
"""All paths below the project, because relative paths start there."""
NONE = Rules()


class Condition(Struct, frozen=True):
    """Additional conditions for calls of some items: parameters, hours, days and calls per minute."""

    items: str
    parameters: JsonObject
    """For each parameter that is bounded, a JSON Schema or `{path: glob}`."""
    hours: tuple[int, int] | None = None
    """First and last minute of the day; if the end comes first, over midnight."""
    days: tuple[int, ...] = ()
    """Days of the week, Monday first; empty for every day."""
    per_minute: int = 0
    """How many calls of these items a minute has, all together; 0 sets no limit."""
    text: str = ""
    """The condition as written."""


class Grant(Struct, frozen=True):
    """What a principal may use: rules for each kind of resource, by default those of an owner without a policy."""

    items: Rules = ALL
    hosts: Rules = NONE
    verbs: Rules = ALL
    read: Rules = EVERYWHERE
    write: Rules = EVERYWHERE
    commands: Rules = ALL
    variables: Rules = ALL
    spawn: Rules = ALL
    traits: Rules = NONE
    endpoints: Rules = NONE
    is_public: bool = True
    """Whether the public network is reachable besides the allowed hosts; if not, only the allowed hosts are."""
    conditions: tuple[Condition, ...] = ()
    name: str = OWNER_POLICY
    """The name of its source, which refusals show."""
    is_secretive: bool = False
    """Whether items that it does not name are hidden completely."""
    is_whole: bool = False
    """Whether the executors of an item must be allowed as well, except those that ship with Kiwi."""
    starts_items: bool = False
    """Whether an allowed item starts its own program, whatever the rules about commands say."""
    hidden: frozenset[str] = frozenset()
    """Items that do not exist for the principal, without their versions: `SOURCE/NAMESPACE/NAME`."""

    def rules(self, kind: ResourceKind) -> Rules:
        """Return the rules for one kind."""
        found: Rules = getattr(self, _FIELDS[kind])
        return found

    def verdict(self, kind: ResourceKind, resource: str) -> Verdict:
        """Return whether something may be used, and by which rule."""
        if kind == "item" and self.is_hidden(resource):
            return Deny(f"the item {resource!r} is not shown to this caller by {self.name}", "", self.name)
        rules: Rules = getattr(self, _FIELDS[kind])
        is_allowed, rule = match_rules(rules, kind, resource)
        if is_allowed or (kind == "host" and self.is_public and not rule):
            return Allow(self.name, rule)
        what = f"the {_USE.get(kind, kind)} {resource!r}"
        if rule:
            return Deny(f"{what} is denied by the rule {rule!r} of {self.name}", rule, self.name)
        return Deny(f"no rule of {self.name} allows {what}", rule, self.name)

    def item_verdict(self, identity: str, traits: Sequence[str]) -> Verdict:
        """Return whether an item may be used, by its identity or by one of its traits."""
        verdict = self.verdict("item", identity)
        if self.traits == NONE or self.is_hidden(identity) or (isinstance(verdict, Deny) and verdict.rule):
            return verdict
        found = [self.verdict("trait", trait) for trait in traits]
        denied = next((one for one in found if isinstance(one, Deny) and one.rule), None)
        allowed = next((one for one in found if isinstance(one, Allow)), None)
        return denied or allowed or verdict

    def request_verdict(self, host: str, request: str) -> Verdict:
        """Return whether a request to a host may be sent, by the host or by method and path."""
        verdict = self.verdict("host", host)
        if self.endpoints == NONE or (isinstance(verdict, Deny) and verdict.rule):
            return verdict
        found = self.verdict("endpoint", request)
        is_decided = isinstance(found, Allow) or bool(found.rule)
        return found if is_decided else verdict

    def is_hidden(self, identity: str) -> bool:
        """Whether an item does not exist for the principal."""
        return bool(self.hidden) and identity.partition("@")[0] in self.hidden

    def to_json(self) -> JsonObject:
        """Return the rules as they are shown, without what allows nothing."""
        shown = {_FIELDS[kind]: self.rules(kind).to_json() for kind in KINDS}
        return {word: rules for word, rules in shown.items() if rules}


def empty_grant(name: str) -> Grant:
    """Return a grant that allows nothing, to which rules can be added."""
    return Grant(NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, is_public=False, name=name)


class Rights(Struct, frozen=True):
    """Rights from several grants: a use needs all of them. The first grant is that of the owner."""

    grants: tuple[Grant, ...] = (Grant(),)

    def __post_init__(self) -> None:
        """Refuse rights without a grant, which would be rights to everything."""
        if not self.grants:
            raise ValueError("rights need a grant")

    def verdict(self, kind: ResourceKind, resource: str) -> Verdict:
        """Return the refusal of the first grant that refuses, else what the last one allowed it by."""
        verdict: Verdict = Allow()
        for grant in self.grants:
            verdict = grant.verdict(kind, resource)
            if isinstance(verdict, Deny):
                break
        return verdict

    def verdicts(self, kind: ResourceKind, resource: str) -> tuple[Verdict, ...]:
        """Return the verdict of each grant."""
        return tuple(grant.verdict(kind, resource) for grant in self.grants)

    @property
    def hosts(self) -> Rules:
        """The hosts beyond the public network that the owner names and no grant denies, and those that one does."""
        return self.hosts_for("")

    def hosts_for(self, request: str) -> Rules:
        """Return these hosts for one request, `METHOD HOST:PORT/PATH`, which grants may allow by method and path."""
        named = self.grants[0].hosts.allow
        allowed = tuple(host for host in named if isinstance(self.request_verdict(host, request), Allow))
        return Rules(allowed, tuple(dict.fromkeys(host for grant in self.grants for host in grant.hosts.deny)))

    def request_verdict(self, host: str, request: str) -> Verdict:
        """Return the refusal of the first grant that refuses a request, else what the last one allowed it by."""
        verdict: Verdict = Allow()
        for grant in self.grants:
            verdict = grant.request_verdict(host, request)
            if isinstance(verdict, Deny):
                break
        return verdict

    def item_verdict(self, identities: Sequence[str], traits: Sequence[str] = ()) -> Verdict:
        """Return whether an item may be run. `identities` are the item itself and then its executors.

        A rule that denies an executor denies every item that uses it. Only the item itself needs to be allowed.
        `traits` are those of the item.
        """
        for grant in self.grants:
            for place, identity in enumerate(identities):
                verdict = grant.item_verdict(identity, traits) if place == 0 else grant.verdict("item", identity)
                is_named = place == 0 or (grant.is_whole and not identity.startswith("builtin/"))
                if isinstance(verdict, Deny) and (verdict.rule or is_named):
                    return verdict
        return Allow()


LEFT_TO_OTHERS = Rules(allow=(*EVERYWHERE.allow, "/**"))
"""All paths, in a grant that leaves them to the other grants."""


def hiding(items: frozenset[str], name: str, rules: Rules = ALL) -> Grant:
    """Return a grant that hides some items, also as executors, and leaves all else to the other grants."""
    return Grant(
        rules, read=LEFT_TO_OTHERS, write=LEFT_TO_OTHERS, name=name, is_secretive=True, is_whole=True, hidden=items
    )


def narrow(rights: Rights, grant: Grant) -> Rights:
    """Return the rights with one more grant, so that they can only shrink."""
    return Rights((*rights.grants, grant))


def denials(grant: Grant) -> Grant:
    """Return a grant that refuses what a rule denies by name or hides, and leaves all else to the other grants."""
    rules = {field: Rules(("*", "**", "/**"), grant.rules(kind).deny) for kind, field in _FIELDS.items()}
    return replace(grant, **rules, is_public=True, is_secretive=False)


class Allow(Struct, frozen=True):
    """The use is allowed, with the grant and rule if known."""

    grant: str = ""
    rule: str = ""


class Deny(Struct, frozen=True):
    """The use is denied, with the reason."""

    reason: str
    rule: str
    grant: str = ""


Verdict = Allow | Deny
"""The verdict on one use."""
