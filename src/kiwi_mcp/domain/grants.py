"""Grants and rights: what somebody may use, by rules that can only be added to, and the verdict on one use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from kiwi_mcp.domain.globs import fits_host, fits_item, fits_name, fits_path, fits_verb
from kiwi_mcp.domain.json import JsonObject

Kind = Literal["verb", "item", "read", "write", "host", "command", "variable", "spawn"]
"""What rules are about: verbs, items that are run, files, hosts, programs, variables, and threads that are started."""
KINDS: tuple[Kind, ...] = get_args(Kind)

_FITS: Mapping[Kind, Callable[[str, str], bool]] = {
    **dict.fromkeys(KINDS, fits_name),
    "verb": fits_verb,
    "item": fits_item,
    "read": fits_path,
    "write": fits_path,
    "host": fits_host,
}
_FIELDS: Mapping[Kind, str] = {
    "verb": "verbs",
    "item": "items",
    "read": "read",
    "write": "write",
    "host": "hosts",
    "command": "commands",
    "variable": "variables",
    "spawn": "spawn",
}
OWNER_POLICY = "policy.yaml"
_BUILT_IN = "builtin/"


@dataclass(frozen=True, slots=True)
class Rules:
    """Globs that allow and globs that deny. Deny wins, and the order never matters."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def match(self, name: str, kind: Kind = "item") -> str | None:
        """Return the rule that refuses `name`, empty if no rule allows it, or None where it is allowed."""
        is_allowed, rule = ruling(self, kind, name)
        return None if is_allowed else rule

    def to_json(self) -> JsonObject:
        """Return the rules as they are written."""
        return {word: list(rules) for word, rules in (("allow", self.allow), ("deny", self.deny)) if rules}


@lru_cache(maxsize=4_096)
def ruling(rules: Rules, kind: Kind, name: str) -> tuple[bool, str]:
    """Return whether rules allow something, and the one that decides; empty where none speaks of it."""
    fits = _FITS[kind]
    for pattern in rules.deny:
        if fits(pattern, name):
            return False, pattern
    found = next((pattern for pattern in rules.allow if fits(pattern, name)), None)
    return found is not None, found or ""


ALL = Rules(allow=("*",))
EVERYWHERE = Rules(allow=("**",))
"""All below the project, which is where relative paths begin."""
NONE = Rules()


@dataclass(frozen=True, slots=True)
class Condition:
    """What the calls of some items must meet besides: their parameters, the hours, and the days."""

    items: str
    parameters: JsonObject
    """For each parameter that is bounded, a JSON Schema or `{path: glob}`."""
    hours: tuple[int, int] | None = None
    """From which minute of the day to which; where the end comes first, over midnight."""
    days: tuple[int, ...] = ()
    """Of the week, Monday first; empty where every day will do."""
    text: str = ""
    """As it was written."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What somebody may use: rules for each kind of thing. As it stands here it is the owner's where they say nothing.

    The hosts that rules allow are those beyond the public network, as long as the grant `is_public`; where it is not,
    they are all that is reached.
    """

    items: Rules = ALL
    hosts: Rules = NONE
    verbs: Rules = ALL
    read: Rules = EVERYWHERE
    write: Rules = EVERYWHERE
    commands: Rules = ALL
    variables: Rules = ALL
    spawn: Rules = ALL
    is_public: bool = True
    conditions: tuple[Condition, ...] = ()
    name: str = OWNER_POLICY
    """Whose it is, for whoever is refused by it."""
    is_secretive: bool = False
    """Whether items that it does not name are not even told of."""
    is_whole: bool = False
    """Whether what an item stands on must be allowed as well, but for what ships with Kiwi."""

    def rules(self, kind: Kind) -> Rules:
        """Return the rules for one kind."""
        found: Rules = getattr(self, _FIELDS[kind])
        return found

    def verdict(self, kind: Kind, resource: str) -> Verdict:
        """Return whether something may be used, and by which rule."""
        is_allowed, rule = ruling(self.rules(kind), kind, resource)
        if is_allowed or (kind == "host" and self.is_public and not rule):
            return Allow(self.name, rule)
        return Deny(_why(kind, resource, rule, self.name), rule, self.name)

    def to_json(self) -> JsonObject:
        """Return the rules as they are shown, without what allows nothing."""
        shown = {_FIELDS[kind]: self.rules(kind).to_json() for kind in KINDS}
        return {word: rules for word, rules in shown.items() if rules}


def nothing(name: str) -> Grant:
    """Return a grant of nothing, which rules may then be added to."""
    return Grant(NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, is_public=False, name=name)


@dataclass(frozen=True, slots=True)
class Rights:
    """What may be used where several have a say: what every one of the grants allows. The first is the owner's."""

    grants: tuple[Grant, ...] = (Grant(),)

    def __post_init__(self) -> None:
        """Refuse rights without a grant, which would be rights to everything."""
        if not self.grants:
            raise ValueError("rights need a grant")

    def verdict(self, kind: Kind, resource: str) -> Verdict:
        """Return the refusal of the first grant that refuses, else what the last one allowed it by."""
        verdict: Verdict = Allow()
        for grant in self.grants:
            verdict = grant.verdict(kind, resource)
            if isinstance(verdict, Deny):
                return verdict
        return verdict

    def verdicts(self, kind: Kind, resource: str) -> tuple[Verdict, ...]:
        """Return what each grant says."""
        return tuple(grant.verdict(kind, resource) for grant in self.grants)

    @property
    def hosts(self) -> Rules:
        """The hosts beyond the public network that the owner names and no grant denies, and those that one does."""
        named = self.grants[0].hosts.allow
        denied = dict.fromkeys(host for grant in self.grants for host in grant.hosts.deny)
        return Rules(tuple(host for host in named if isinstance(self.verdict("host", host), Allow)), tuple(denied))

    def item_verdict(self, identities: Sequence[str]) -> Verdict:
        """Return whether an item may be run, given what it stands on, itself first.

        A rule that denies an item denies all that stands on it; what was asked for is all that needs to be allowed.
        """
        for grant in self.grants:
            for place, identity in enumerate(identities):
                verdict = grant.verdict("item", identity)
                is_named = place == 0 or (grant.is_whole and not identity.startswith(_BUILT_IN))
                if isinstance(verdict, Deny) and (verdict.rule or is_named):
                    return verdict
        return Allow()

    @property
    def conditions(self) -> tuple[tuple[str, Condition], ...]:
        """The conditions of all grants, each with whose it is."""
        return tuple((grant.name, one) for grant in self.grants for one in grant.conditions)


def narrow(rights: Rights, grant: Grant) -> Rights:
    """Return the rights with one grant more that has a say, so that they can only shrink."""
    return Rights((*rights.grants, grant))


@dataclass(frozen=True, slots=True)
class Allow:
    """It may go ahead, by which grant and rule where that is known."""

    grant: str = ""
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Deny:
    """It may not go ahead, and why."""

    reason: str
    rule: str
    grant: str = ""


Verdict = Allow | Deny
"""May this go ahead."""

_SAID: Mapping[Kind, str] = {**{kind: kind for kind in KINDS}, "read": "reading of", "write": "writing of"}


def _why(kind: Kind, name: str, rule: str, grant: str) -> str:
    what = f"the {_SAID[kind]} {name!r}"
    return f"{what} is denied by the rule {rule!r} of {grant}" if rule else f"no rule of {grant} allows {what}"
