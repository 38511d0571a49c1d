"""Conditions: what the calls of some items must meet besides; a call beside them that meets them goes ahead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from kiwi_mcp.domain.globs import fits_item, fits_path
from kiwi_mcp.domain.grants import Condition, Deny, Rights
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.schema import faults, schema_faults
from kiwi_mcp.policy.paths import anchored

_WORDS = ("items", "parameters", "hours", "days")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")
_PATH = "path"


def read_conditions(written: Json, place: str, issues: list[Issue]) -> tuple[Condition, ...]:
    """Return the conditions that are written; what is not understood is a fault."""
    if written is not None and not isinstance(written, list):
        issues.append(Issue(place, "is not a list", "Write each condition as one entry: `- items: ...`."))
    return tuple(_condition(one, f"{place}[{number}]", issues) for number, one in enumerate(as_list(written)))


def unmet(rights: Rights, identity: str, inputs: JsonObject | None, project: Path, now: datetime) -> Deny | None:
    """Return the first condition that a call does not meet, as its refusal; without inputs, only the moment counts."""
    for grant, condition in rights.conditions:
        if fits_item(condition.items, identity):
            for reason in _offences(condition, inputs, project, now):
                return Deny(f"{grant} says of {condition.items!r}: {reason}", condition.text, grant)
    return None


def _condition(written: Json, place: str, issues: list[Issue]) -> Condition:
    words = as_object(written)
    for word in words:
        if word not in _WORDS:
            fix = f"{did_you_mean(word, _WORDS)}Use one of: {', '.join(_WORDS)}."
            issues.append(Issue(f"{place}.{word}", "is not a word of a condition", fix))
    if not as_text(words.get("items")):
        issues.append(Issue(f"{place}.items", "is missing", 'Say which calls it is about: `items: "*/send@*"`.'))
    if not words.keys() & {"parameters", "hours", "days"}:
        issues.append(Issue(place, "demands nothing", "Add `parameters`, `hours` or `days`."))
    parameters = words.get("parameters")
    issues += _parameter_faults(parameters, f"{place}.parameters")
    return Condition(
        as_text(words.get("items")),
        as_object(parameters),
        _hours(words.get("hours"), f"{place}.hours", issues),
        _days(words.get("days"), f"{place}.days", issues),
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


def _hours(written: Json, place: str, issues: list[Issue]) -> tuple[int, int] | None:
    if written is None:
        return None
    found = _HOURS.fullmatch(as_text(written).replace(" ", ""))
    if found is None:
        issues.append(Issue(place, "are not hours of the day", 'Write them as "08:00-18:00".'))
        return 0, 0
    begin_hour, begin, end_hour, end = map(int, found.groups())
    return begin_hour * 60 + begin, end_hour * 60 + end


def _days(written: Json, place: str, issues: list[Issue]) -> tuple[int, ...]:
    named = [as_text(day).lower()[:3] for day in as_list(written)]
    if written is not None and (not named or any(day not in _DAYS for day in named)):
        issues.append(Issue(place, "are not days of the week", f"Write them as [{', '.join(_DAYS[:5])}]."))
        return ()
    return tuple(_DAYS.index(day) for day in named)


def _offences(condition: Condition, inputs: JsonObject | None, project: Path, now: datetime) -> Iterator[str]:
    if condition.days and now.weekday() not in condition.days:
        yield f"not on this day, but on {', '.join(_DAYS[day] for day in condition.days)}"
    if condition.hours is not None and not _is_within(condition.hours, now.hour * 60 + now.minute):
        begin, end = (f"{minute // 60:02}:{minute % 60:02}" for minute in condition.hours)
        yield f"not at this hour, but from {begin} to {end}"
    if inputs is None:
        return
    for name, bound in condition.parameters.items():
        rule = as_object(bound)
        if _PATH in rule:
            yield from _path_offence(name, as_text(rule[_PATH]), inputs.get(name), project)
        elif name not in inputs:
            yield f"the parameter `{name}` is bounded, and must be given"
        else:
            yield from (f"`{name}` {issue.reason}" for issue in faults(rule, inputs[name], place=name))


def _is_within(hours: tuple[int, int], minute: int) -> bool:
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _path_offence(name: str, pattern: str, value: Json, project: Path) -> Iterator[str]:
    """Give why a parameter names no file that it may: links are followed first, and `..` leads where it leads."""
    if not isinstance(value, str) or "\0" in value:
        yield f"the parameter `{name}` must be a path below {pattern!r}"
        return
    base = os.path.realpath(project)
    real = os.path.realpath(Path(base, value))
    if not any(fits_path(one, real) for one in anchored(pattern, base)):
        yield f"`{name}` is not a path below {pattern!r}"
