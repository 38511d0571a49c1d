"""What a link demands of what stands on it: `validation.child_schemas` and `validation.child_constraints`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.version import Range, Version
from kiwi_mcp.manifest.schema import faults, schema_faults

MAX_SCHEMAS = 100


def child_faults(parent: Manifest, child: Manifest) -> Iterator[Issue]:
    """Give what an executor's own rules refuse in an item that names it; an executor without rules takes any."""
    yield from _schema_faults(parent, child)
    yield from _version_faults(parent, child)


def _schema_faults(parent: Manifest, child: Manifest) -> Iterator[Issue]:
    rules = [as_object(rule) for rule in islice(as_list(parent.validation.get("child_schemas")), MAX_SCHEMAS)]
    if not rules:
        return
    subject = _as_child(child)
    schema = next(
        (as_object(rule.get("schema")) for rule in rules if _matches(subject, as_object(rule.get("match")))), None
    )
    if schema is None:
        reason = f"{parent.tool_id!r} accepts no {child.tool_type} like this"
        yield Issue("executor", reason, "Name another executor, or see its `validation.child_schemas`.")
    elif broken := schema_faults(schema, "child_schemas"):
        reason = f"{parent.tool_id!r} has a rule that cannot be used ({broken[0].reason})"
        yield Issue("executor", reason, f"Mend `validation.child_schemas` of {parent.tool_id!r}.")
    else:
        for issue in faults(schema, subject):
            reason = f"{parent.tool_id!r} demands of what stands on it: {issue.place or 'the item'} {issue.reason}"
            yield Issue(issue.place.removeprefix("manifest."), reason, issue.fix)


def _as_child(child: Manifest) -> JsonObject:
    """Return an item as old rules look at it: identity on top, and its words below `manifest`, config included."""
    words = {**child.config, **child.written, "config": child.config, "parameters": child.parameters}
    return {
        "tool_id": child.tool_id,
        "tool_type": child.tool_type,
        "version": child.version,
        "executor": child.executor,
        "executor_id": child.executor_id,
        "config": child.config,
        "manifest": words,
    }


def _matches(subject: JsonObject, criteria: JsonObject) -> bool:
    return all(_at(subject, key) == wanted for key, wanted in criteria.items())


def _at(subject: JsonObject, path: str) -> Json:
    here: Json = subject
    for step in path.split("."):
        here = as_object(here).get(step)
    return here


def _version_faults(parent: Manifest, child: Manifest) -> Iterator[Issue]:
    constraint = as_object(parent.validation.get("child_constraints")).get(child.tool_id)
    version = Version.parse(child.version)
    wanted = _range(constraint)
    if constraint is None or version is None:
        return
    if (covered := Range.parse(wanted)) is None:
        reason = f"{parent.tool_id!r} has a version rule that cannot be read: {wanted!r:.60}"
        yield Issue("executor", reason, f"Mend `validation.child_constraints` of {parent.tool_id!r}.")
    elif not covered.covers(version):
        reason = f"{parent.tool_id!r} accepts this item as {wanted}, and it is {child.version}"
        yield Issue("version", reason, "Use a version that the executor accepts.")


def _range(constraint: Json) -> str:
    match constraint:
        case str():
            return constraint
        case Mapping():
            low, high = as_text(constraint.get("min_version")), as_text(constraint.get("max_version"))
            clauses = [as_text(constraint.get("range")), f">={low}" if low else "", f"<={high}" if high else ""]
            return ",".join(filter(None, clauses))
        case _:
            return ""
