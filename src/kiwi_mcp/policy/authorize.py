"""Verify a chain; rights, conditions and reserved paths against a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import (
    IntegrityMismatch,
    InvalidManifest,
    LockMismatch,
    PolicyDenied,
    ReservedPath,
    SignatureRefused,
)
from kiwi_mcp.domain.grants import Allow, Condition, Deny, ResourceKind, Rights, Verdict, fits_item, fits_path
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ChangeSpec, HttpSpec, Plan, ProcessSpec
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.memory import files as memory_files
from kiwi_mcp.policy.needs import anchored
from kiwi_mcp.primitives.http.addresses import PORTS, host_port
from kiwi_mcp.sandbox.levels import base_profile

_ORDINARY = frozenset({".dockerignore", ".editorconfig", ".gitignore"})
"""Names with a dot in front that a tool may change: they start no program."""
_WORDS = ("items", "parameters", "hours", "days", "per_minute")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = lazy_pattern(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")
_PATH = "path"
_MOST_PER_MINUTE = 100_000


def verify(
    chain: Chain, changes: Sequence[str], lost: Sequence[tuple[Tool, str]], *, is_frozen: bool
) -> tuple[str, ...]:
    """Refuse a chain with a link that was changed after signing, or is not sound; return what to tell the owner.

    `changes` are the differences from the lockfile: warnings by default, a refusal if the lockfile is frozen. The same
    applies to a chain that is not the one its tool was published with. `lost` are the links without the signature that
    the lockfile names.
    """
    for link in (*chain.links, *(one.tool for one in chain.references)):
        if link.integrity == "modified":
            expected = link.signature.hash if link.signature else ""
            raise IntegrityMismatch(link.id, expected=expected, actual=link.digest, where=str(link.origin.path))
        if link.trust == "tampered":
            raise SignatureRefused(
                f"The signature of {link.id!r} is not by the key that it names ({link.origin.path}).",
                suggestion="Take it from its publisher again; if it is yours, sign it again.",
                tool_id=link.id,
                signer=link.signer,
            )
    refuse_lost(lost)
    if chain.faults:
        raise InvalidManifest(chain.tool.id, chain.faults)
    if is_frozen and (changes or chain.drift):
        raise LockMismatch(chain.tool.id, [*changes, *chain.drift])
    revoked = (
        f"{link.identity} is signed with {link.signer}, a key that is revoked or has expired"
        for link in chain.links
        if link.trust == "revoked"
    )
    return (*revoked, *(f"lockfile: {change}" for change in changes), *chain.drift, *chain.notes, *chain.shadowed)


def refuse_lost(lost: Sequence[tuple[Tool, str]]) -> None:
    """Refuse links without the signature that the lockfile names: a plain hash in its place proves nothing."""
    for link, signer in lost:
        raise SignatureRefused(
            f"{link.id!r} was signed by {signer} when the lockfile recorded it, and that signature is gone: "
            f"it is not what was signed ({link.origin.path}).",
            suggestion=f"Take it from version control or from its publisher again. If the change is right, the owner "
            f"types `kiwi sign {link.id}`.",
            tool_id=link.id,
        )


def permit(plan: Plan, rights: Rights) -> Plan:
    """Return the plan with the hosts that the owner grants and denies written into it."""
    if isinstance(plan.spec, HttpSpec):
        spec = plan.spec
        hosts = rights.hosts_for(_request(spec))
        # With a list of hosts, follow no redirects: the target of a redirect is not known in advance.
        redirects = spec.max_redirects if all(grant.is_public for grant in rights.grants) else 0
        return replace(plan, spec=replace(spec, granted=hosts.allow, denied=hosts.deny, max_redirects=redirects))
    return plan


def with_file(plan: Plan, chain: Chain, space: Space) -> Plan:
    """Return the plan of a file tool with the one change that it makes, if any; other plans stay as they are."""
    tool = chain.tool
    # Only built-in code is known to make no other change than the one shown.
    if not tool.origin.is_built_in or not (action := as_text(tool.manifest.config.get("file"))):
        return plan
    path = as_text(plan.inputs.get("path"))
    is_change = action in {"write", "edit", "delete"}
    for part in memory_files.plain_parts(path):
        if (part.startswith(".") and part not in _ORDINARY) or (is_change and base_profile().is_protected(part)):
            raise ReservedPath(path)
    if not is_change or not isinstance(plan.spec, ProcessSpec):
        return plan
    root = Path(os.path.realpath(space.project))
    if plan.profile and any((root / path).is_relative_to(hidden) for hidden in plan.profile.hidden):
        raise PolicyDenied(f"A rule of the owner denies {path!r}.", suggestion="Choose another path.")
    change = memory_files.change_of(root, action, plan.inputs, tool.id)
    shown = ChangeSpec(str(root / path), memory_files.version_of(change.before), change.diff())
    # The process ends without a change if the file is no longer the version that was approved.
    given = {**plan.inputs, "expected_version": shown.version}
    spec = replace(plan.spec, stdin=compact(given).encode())
    facts = {**plan.facts, "change": {"path": shown.path, "version": shown.version, "diff": shown.diff}}
    return replace(plan, spec=spec, facts=facts, change=shown)


def authorize(plan: Plan, rights: Rights) -> Verdict:
    """Return whether the rights cover the plan, and by which rule not."""
    verdict = rights.item_verdict([plan.identity, *(link for link, _ in plan.chain)])
    if isinstance(verdict, Deny):
        return verdict
    found = (verdict for _, _, verdict in use_verdicts(plan, rights))
    return next((verdict for verdict in found if isinstance(verdict, Deny)), Allow())


def use_verdicts(plan: Plan, rights: Rights) -> Iterator[tuple[ResourceKind, str, Verdict]]:
    """Yield each grant's verdict on the host that a plan calls or the program it starts, and on its variables."""
    match plan.spec:
        case HttpSpec(url=url) as spec:
            host, request = _target(url), _request(spec)
            for grant in rights.grants:
                yield "host", host, grant.request_verdict(host, request)
        case ProcessSpec(argv=(program, *_)):
            name = program.rstrip("/").rpartition("/")[2]
            for grant in rights.grants:
                yield "command", name, Allow(grant.name) if grant.starts_items else grant.verdict("command", name)
    for name in plan.variables:
        for grant in rights.grants:
            yield "variable", name, grant.verdict("variable", name)


def _request(spec: HttpSpec) -> str:
    """Return a request as rules name it: method, host with port, and path without `..` and escapes."""
    path = normpath(unquote(urlsplit(spec.url).path) or "/").lstrip("/")
    return f"{spec.method} {_target(spec.url)}/{path}"


@lru_cache(maxsize=256)
def _target(url: str) -> str:
    target = urlsplit(url)
    host = target.hostname or ""
    try:
        port = target.port or PORTS.get(target.scheme, 0)
    except ValueError:  # no port is refused by the primitive, in its own words
        port = 0
    return host_port(host, port)


def read_conditions(written: Json, place: str, issues: list[Issue]) -> tuple[Condition, ...]:
    """Return the conditions in a file; report invalid ones as issues."""
    if written is not None and not isinstance(written, list):
        issues.append(Issue(place, "is not a list", "Write each condition as one entry: `- items: ...`."))
    return tuple(_condition(one, f"{place}[{number}]", issues) for number, one in enumerate(as_list(written)))


def failed_condition(rights: Rights, identity: str, inputs: JsonObject | None, project: Path) -> Deny | None:
    """Return the first condition that a call does not meet, as its refusal; without inputs, only the moment counts."""
    for grant in rights.grants:
        for condition in grant.conditions:
            if fits_item(condition.items, identity):
                for reason in _offences(condition, inputs, project, datetime.now().astimezone()):
                    return Deny(f"{grant.name} says of {condition.items!r}: {reason}", condition.text, grant.name)
    return None


def rates_of(rights: Rights, identity: str) -> Mapping[str, int]:
    """Return the calls per minute that rules allow of an item, by the sentence that names the rule."""
    return {
        f"{grant.name} allows {one.per_minute} calls of {one.items!r} in a minute": one.per_minute
        for grant in rights.grants
        for one in grant.conditions
        if one.per_minute and fits_item(one.items, identity)
    }


def _condition(written: Json, place: str, issues: list[Issue]) -> Condition:
    words = as_object(written)
    for word in words:
        if word not in _WORDS:
            fix = f"{did_you_mean(word, _WORDS)}Use one of: {', '.join(_WORDS)}."
            issues.append(Issue(f"{place}.{word}", "is not a known key", fix))
    if not as_text(words.get("items")):
        issues.append(Issue(f"{place}.items", "is missing", 'Say which calls it is about: `items: "*/send@*"`.'))
    if not words.keys() & set(_WORDS[1:]):
        issues.append(Issue(place, "demands nothing", "Add `parameters`, `hours`, `days` or `per_minute`."))
    parameters = words.get("parameters")
    issues += _parameter_faults(parameters, f"{place}.parameters")
    hours = _HOURS.fullmatch(as_text(words.get("hours")).replace(" ", ""))
    if hours is None and words.get("hours") is not None:
        issues.append(Issue(f"{place}.hours", "are not hours of the day", 'Write them as "08:00-18:00".'))
    days = [as_text(day).lower()[:3] for day in as_list(words.get("days"))]
    if words.get("days") is not None and (not days or any(day not in _DAYS for day in days)):
        fix = f"Write them as [{', '.join(_DAYS[:5])}]."
        issues.append(Issue(f"{place}.days", "are not days of the week", fix))
    rate = words.get("per_minute")
    per_minute = rate if isinstance(rate, int) and not isinstance(rate, bool) and 0 < rate <= _MOST_PER_MINUTE else 0
    if rate is not None and not per_minute:
        fix = f"Write a whole number from 1 to {_MOST_PER_MINUTE:,}; to forbid calls, use `items.deny`."
        issues.append(Issue(f"{place}.per_minute", "is not a number of calls", fix))
    return Condition(
        as_text(words.get("items")),
        as_object(parameters),
        (int(hours[1]) * 60 + int(hours[2]), int(hours[3]) * 60 + int(hours[4])) if hours else None,
        tuple(_DAYS.index(day) for day in days if day in _DAYS),
        per_minute,
        text=place,
    )


def _parameter_faults(written: Json, place: str) -> Iterator[Issue]:
    if written is not None and not isinstance(written, Mapping):
        yield Issue(place, "is not a mapping", "Write a JSON Schema, or `{path: GLOB}`, under each name.")
    for name, bound in as_object(written).items():
        if not isinstance(bound, Mapping) or not bound:
            yield Issue(f"{place}.{name}", "bounds nothing", "Write a JSON Schema such as `{maximum: 10}`.")
        elif _PATH in bound:
            if len(bound) > 1 or not as_text(bound[_PATH]):
                yield Issue(f"{place}.{name}", "is more than a path", "Write `{path: GLOB}` and nothing else.")
        else:
            yield from schema_faults(bound, f"{place}.{name}")


def _offences(condition: Condition, inputs: JsonObject | None, project: Path, now: datetime) -> Iterator[str]:
    if condition.days and now.weekday() not in condition.days:
        yield f"not on this day, but on {', '.join(_DAYS[day] for day in condition.days)}"
    if condition.hours is not None:
        (begin, end), minute = condition.hours, now.hour * 60 + now.minute
        if not (begin <= minute < end if begin < end else minute >= begin or minute < end):
            shown = (f"{one // 60:02}:{one % 60:02}" for one in condition.hours)
            yield f"not at this hour, but from {' to '.join(shown)}"
    if inputs is None:
        return
    for name, bound in condition.parameters.items():
        rule = as_object(bound)
        if _PATH in rule:
            pattern, value = as_text(rule[_PATH]), inputs.get(name)
            base = os.path.realpath(project)
            # Links and `..` are resolved first.
            real = os.path.realpath(Path(base, value)) if isinstance(value, str) and "\0" not in value else None
            if real is None:
                yield f"the parameter `{name}` must be a path below {pattern!r}"
            elif not any(fits_path(one, real) for one in anchored(pattern, base)):
                yield f"`{name}` is not a path below {pattern!r}"
        elif name not in inputs:
            yield f"the parameter `{name}` is bounded, and must be given"
        else:
            yield from (f"`{name}` {issue.reason}" for issue in faults(rule, inputs[name], place=name))
