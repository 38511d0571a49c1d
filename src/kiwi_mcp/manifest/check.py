"""All issues of a manifest: those of every item, of its type, of its executor, and of its `needs`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import get_args

from msgspec import ValidationError
from msgspec.structs import replace

from kiwi_mcp.domain.grants import is_plain
from kiwi_mcp.domain.isolation import LEVELS
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CLIENT_REQUESTS, NO_SOURCE, SOURCE_TRAITS, SUBPROCESS, UNIX, WORDS, Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.mcp import TaskUse
from kiwi_mcp.domain.names import Range, Version, is_namespace, is_safe_path, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.composite import composite_faults
from kiwi_mcp.manifest.directive import limit_faults
from kiwi_mcp.manifest.document import line_of
from kiwi_mcp.manifest.formats import Requirement, formats_for
from kiwi_mcp.manifest.hooks import hook_faults
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.names import did_you_mean, use_one_of
from kiwi_mcp.manifest.permissions import permission_faults
from kiwi_mcp.manifest.runtime import packages_of, provider_issues
from kiwi_mcp.manifest.templates import placeholders
from kiwi_mcp.manifest.type_specs import TypeSpec, TypeSpecs

MAX_SCHEMAS = 100


def child_faults(parent: Manifest, child: Manifest) -> Iterator[Issue]:
    """Yield the values of an item that its executor's own rules refuse; an executor without rules accepts any."""
    yield from _schema_faults(parent, child)
    constraint = as_object(parent.validation.get("child_constraints")).get(child.tool_id)
    version = Version.parse(child.version)
    if constraint is None or version is None:
        return
    wanted = as_text(constraint)
    if isinstance(constraint, Mapping):
        low, high = as_text(constraint.get("min_version")), as_text(constraint.get("max_version"))
        clauses = [as_text(constraint.get("range")), f">={low}" if low else "", f"<={high}" if high else ""]
        wanted = ",".join(filter(None, clauses))
    if (covered := Range.parse(wanted)) is None:
        reason = f"{parent.tool_id!r} has a version rule that cannot be read: {wanted!r:.60}"
        yield Issue("executor", reason, f"Fix `validation.child_constraints` of {parent.tool_id!r}.")
    elif not covered.covers(version):
        reason = f"{parent.tool_id!r} accepts this item as {wanted}, and it is {child.version}"
        yield Issue("version", reason, "Use a version that the executor accepts.")


def _schema_faults(parent: Manifest, child: Manifest) -> Iterator[Issue]:
    rules = [as_object(rule) for rule in islice(as_list(parent.validation.get("child_schemas")), MAX_SCHEMAS)]
    if not rules:
        return
    # An item as old rules look at it: identity on top, and its words below `manifest`, config included.
    words = {**child.config, **child.written, "config": child.config, "parameters": child.parameters}
    subject = {
        "tool_id": child.tool_id,
        "tool_type": child.tool_type,
        "version": child.version,
        "executor": child.executor,
        "executor_id": child.executor_id,
        "config": child.config,
        "manifest": words,
    }
    fitting = (
        as_object(rule.get("schema"))
        for rule in rules
        if all(_at(subject, key) == wanted for key, wanted in as_object(rule.get("match")).items())
    )
    if (schema := next(fitting, None)) is None:
        reason = f"{parent.tool_id!r} accepts no {child.tool_type} like this"
        yield Issue("executor", reason, "Name another executor, or see its `validation.child_schemas`.")
    elif broken := schema_faults(schema, "child_schemas"):
        reason = f"{parent.tool_id!r} has a rule that cannot be used ({broken[0].reason})"
        yield Issue("executor", reason, f"Fix `validation.child_schemas` of {parent.tool_id!r}.")
    else:
        for issue in faults(schema, subject):
            reason = f"{parent.tool_id!r} requires of its children: {issue.place or 'the item'} {issue.reason}"
            yield Issue(issue.place.removeprefix("manifest."), reason, issue.fix)


def _at(subject: JsonObject, path: str) -> Json:
    here: Json = subject
    for step in path.split("."):
        here = as_object(here).get(step)
    return here


_MOST = 100
_SYSTEM = lazy_pattern(r"/(?:|bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)")
"""Folders at the root that all users share."""
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_PORT = r"(?::(?:[1-9]\d{0,4}))?"
_HOST = lazy_pattern(
    rf"(?:\*|(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?{_PORT}|\[[0-9A-Fa-f:.]+\]{_PORT}|[0-9A-Fa-f:]*::?[0-9A-Fa-f:.]+)"
)
_LONGEST_HOST = 253
_ITEM = lazy_pattern(r"[A-Za-z0-9_.@/-]{1,200}")
_COMMAND = lazy_pattern(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_FORMS = {
    "hosts": (_HOST, "a host", "Write `name`, `name:port`, `*.name`, an address, or `*`."),
    "commands": (_COMMAND, "the name of a program", "Write its name alone, such as `git`."),
    "items": (_ITEM, "the name of an item", "Write its name, such as `send_mail`."),
}


def needs_faults(written: Json, tool_type: str, sheets: TypeSpecs) -> Iterator[Issue]:
    """Yield everything that is wrong with what stands under `needs`."""
    sheet = sheets.get(tool_type)
    if sheet is not None and not sheets.runs_in_process(tool_type) and not sheet.traits.is_server:
        fix = "Remove it: only scripts, runtimes and MCP servers are processes that are given something."
        yield Issue("needs", f"nothing is given to items of the type {tool_type}", fix)
        return
    if not isinstance(written, Mapping):
        yield Issue("needs", "is not a mapping", f"Write lists below it: {', '.join(WORDS)}.")
        return
    for word, value in as_object(written).items():
        place, listed = f"needs.{word}", as_list(value)
        if word not in WORDS:
            yield Issue(place, "is nothing that an item can need", use_one_of(word, WORDS))
        elif not isinstance(value, list) or not all(isinstance(text, str) for text in listed):
            yield Issue(place, "is not a list of texts", f'Write `{word}: ["…"]`.')
        elif len(listed) > _MOST:
            yield Issue(place, f"asks for more than {_MOST} things", "Name the folder that they are in.")
        elif word in {"client", "sockets"} and sheet is not None and not sheet.traits.is_server:
            yield Issue(place, "is for MCP servers only", "Remove it: no other item is given this.")
        else:
            yield from (issue for text in listed for issue in _need_faults(word, str(text), place))


def _need_faults(word: str, text: str, place: str) -> Iterator[Issue]:
    plain = text.removesuffix("/**").rstrip("/") or text[:1]
    if word in {"read", "write"}:
        if not text or "\0" in text or ".." in text.split("/"):
            yield Issue(place, f"{text!r:.80} is not a path", "Write one below the project, without `..`.")
        elif plain in {"~", "$HOME"} or _SYSTEM.fullmatch(plain):
            yield Issue(place, f"{text!r:.80} is more than any item needs", "Name the folder in it that is meant.")
        elif re.match(r"~[^/]", plain):
            yield Issue(place, f"{text!r:.80} is in the home of a user", "Write `~/…` for the owner's own.")
        elif plain != "**" and not is_plain(plain):
            fix = "Name a folder, which is all that lies in it, or a file."
            yield Issue(place, f"{text!r:.80} is a pattern, and what it gives would change by itself", fix)
    elif word in _FORMS:
        form, what, fix = _FORMS[word]
        if not form.fullmatch(text) or len(text) > _LONGEST_HOST:
            yield Issue(place, f"{text!r:.80} is not {what}", fix)
    elif word == "client" and text not in CLIENT_REQUESTS:
        reason = f"{text!r:.80} is nothing that a client can be asked"
        yield Issue(place, reason, use_one_of(text, CLIENT_REQUESTS))
    elif word == "sockets" and text != UNIX:
        yield Issue(place, f"{text!r:.80} is no kind of socket that can be needed", f"Write `{UNIX}`.")


EFFECTS = ("pure", "idempotent", "at_most_once", "transactional")

_MANIFEST_FILES = {"tool.yaml", "tool.yml", "tool.json", "tool.toml"}
_DATA_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# Zero-width and joining marks, soft hyphens, direction overrides, and the invisible tag characters.
_INVISIBLE = lazy_pattern("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")


def check(
    manifest: Manifest,
    *,
    sheets: TypeSpecs,
    file_names: Collection[str] = (),
    is_folder: bool = False,
    executor: Manifest | None = None,
    executor_missing: bool = False,
    with_files: bool = True,
    lines: Mapping[str, int] | None = None,
) -> tuple[Issue, ...]:
    """Return all faults of an item, each with its place, its reason and a fix.

    `executor` is the manifest of the link below if it is known; `executor_missing` says that no item has that name.
    Without files (`with_files=False`), only the manifest is checked.
    """
    found = [*manifest.issues, *_universal(manifest, sheets)]
    if (sheet := sheets.get(manifest.tool_type)) is not None:
        found += _executor_faults(manifest, sheet, executor, is_missing=executor_missing)
        found += _config_faults(manifest, sheet, sheets, executor)
        found += _word_faults(manifest, sheet, sheets, executor)
        found += _template_faults(manifest, sheet)
        found += _file_faults(manifest, sheet, file_names, is_folder=is_folder) if with_files else ()
    shown: JsonObject = {
        "name": manifest.name,
        "description": manifest.description,
        "tags": list(manifest.tags),
        "parameters": manifest.parameters,
    }
    for place, text in _texts(shown, ""):
        if (hidden := _INVISIBLE.search(text)) is not None:
            reason = f"holds the invisible character U+{ord(hidden[0]):04X}"
            found.append(Issue(place, reason, "Remove it: a reader cannot see what a model reads.", "warning"))
    return tuple(
        issue if issue.line is not None else replace(issue, line=line_of(issue.place, lines or {}))
        for issue in dict.fromkeys(found)
    )


def _header_faults(manifest: Manifest) -> Iterator[Issue]:
    if not is_tool_id(manifest.tool_id):
        fix = "Use lower-case ASCII letters, digits, `_` and `-`, beginning with a letter or digit, at most 128."
        yield Issue("tool_id", f"{manifest.tool_id!r:.140} cannot name an item", fix)
    version, parsed = manifest.version, Version.parse(manifest.version)
    if not version:
        yield Issue("version", "is required", 'Add `version: "1.0.0"`.')
    elif parsed is None:
        yield Issue("version", f"{version!r:.60} is not a semantic version", 'Write three numbers, such as "1.2.0".')
    elif parsed == Version(0, 0, 0):
        yield Issue("version", "0.0.0 is no version", 'Begin with "0.1.0" or "1.0.0".')
    if not manifest.description:
        yield Issue("description", "is empty", "Say in one sentence what it does: search reads it.", "warning")
    if manifest.effect and manifest.effect not in EFFECTS:
        fix = f"{did_you_mean(manifest.effect, EFFECTS)}Choose one of {', '.join(EFFECTS)}."
        yield Issue("effect", f"{manifest.effect!r} is not an effect", fix)
    if "probe" in manifest.extra and not is_tool_id(text_of(manifest.extra["probe"])):
        yield Issue("probe", "names no item", "Name a pure tool that takes `key` and `arguments` and returns `done`.")
    if "task" in manifest.extra and manifest.extra["task"] not in get_args(TaskUse):
        fix = "Choose auto (once it takes long), always, required (refused to clients without tasks) or never."
        yield Issue("task", "does not say when a call becomes a task", fix)


def _universal(manifest: Manifest, sheets: TypeSpecs) -> Iterator[Issue]:
    yield from _header_faults(manifest)
    asked = manifest.isolation
    tool_type = manifest.tool_type
    types = sheets.types()
    sheet = sheets.get(tool_type)
    is_started = sheet is not None and sheet.traits.is_server and manifest.executor == SUBPROCESS
    if asked is not None and asked not in LEVELS:
        fix = f"{did_you_mean(asked, LEVELS)}Choose one of {', '.join(LEVELS)}."
        yield Issue("isolation", f"{asked!r:.80} is not a level of isolation", fix)
    elif asked not in {None, "trusted"} and sheet and not (is_started or sheets.runs_in_process(tool_type)):
        fix = "Remove it, or make the item a script: the processes of scripts run in a sandbox."
        yield Issue("isolation", f"items of the type {tool_type} have no process that could be isolated", fix)
    if "needs" in manifest.extra:
        yield from needs_faults(manifest.extra["needs"], tool_type, sheets)
    found = schema_faults(manifest.parameters, "parameters")
    yield from found
    for name, inner in as_object(manifest.parameters.get("properties")).items() if not found else ():
        declared = as_object(inner)
        if "default" in declared and "$ref" not in compact(declared):
            yield from faults(declared, declared["default"], place=f"parameters.{name}.default")
    if not tool_type:
        yield Issue("tool_type", "is required", f"Add `tool_type`, one of {', '.join(types)}.")
    elif "|" in tool_type and all(part.strip() in types for part in tool_type.split("|")):
        # A template of a manifest names the types it could have; it is fine as a template, and cannot be run.
        yield Issue("tool_type", "is a choice of types", "Choose one of them before the item is used.", "warning")
    elif sheet is None:
        fix = f"{did_you_mean(tool_type, types)}Choose one of {', '.join(types)}."
        yield Issue("tool_type", f"{tool_type!r:.80} is not a type", fix)


def _word_faults(manifest: Manifest, sheet: TypeSpec, sheets: TypeSpecs, executor: Manifest | None) -> Iterator[Issue]:
    """Yield the faults of the words under `config` that have rules of their own."""
    config, words = manifest.config, sheet.words
    if "permissions" in words:
        yield from permission_faults(config.get("permissions"), sheets)
    if "model_tier" in words and executor is not None:
        yield from _model_faults(manifest, executor)
    if "limits" in words:
        yield from limit_faults(config.get("limits"))
    if "hooks" in words:
        yield from hook_faults(config.get("hooks"))
    if "providers" in words:
        yield from provider_issues(config)
    if "steps" in words and not faults(sheet.config, config):
        yield from composite_faults(manifest)


def _model_faults(manifest: Manifest, executor: Manifest) -> Iterator[Issue]:
    """Yield what is wrong with the model that an item asks its executor for."""
    if not executor.config.keys() & {"providers", "dialect"}:
        fix = "Name a runtime with `providers` or a `dialect`, such as `llm_runtime`."
        yield Issue("executor", f"{executor.tool_id!r} speaks to no model", fix)
    tiers = {**as_object(executor.config.get("model_tiers")), **as_object(executor.config.get("tiers"))}
    tier = as_text(manifest.config.get("model_tier"))
    if tier and tiers and tier not in tiers:
        reason = f"{tier!r:.40} is no tier of {executor.tool_id!r}"
        yield Issue("config.model_tier", reason, use_one_of(tier, tiers), "warning")


def _a(word: str) -> str:
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"


def _executor_faults(
    manifest: Manifest, sheet: TypeSpec, below: Manifest | None, *, is_missing: bool
) -> Iterator[Issue]:
    if sheet.ids and manifest.tool_id not in sheet.ids:
        fix = f"Choose a type that runs on {' or '.join(f'`{name}`' for name in sheet.ids)}."
        yield Issue("tool_type", f"only {' and '.join(sheet.ids)} are of the type {sheet.type}, and they are code", fix)
    named = manifest.executor
    if named is None:
        if sheet.needs_executor == "required":
            example = sheet.default_executor or f"<name of a {' or '.join(sheet.executor_types)}>"
            yield Issue("executor", f"{_a(sheet.type)} needs an executor", f"Add `executor: {example}`.")
        return
    if sheet.needs_executor == "none":
        yield Issue("executor", f"{_a(sheet.type)} has no executor", "Remove `executor`, or write `executor: null`.")
        return
    place, at, wanted = named.partition("@")
    home, _, name = place.rpartition("/")
    # An executor is looked for nowhere in particular, or in one namespace of the registry.
    source, _, namespace = home.partition("/")
    is_home = not home or (SOURCE_TRAITS.get(source, NO_SOURCE).is_published and is_namespace(namespace))
    if not is_tool_id(name) or not is_home:
        fix = "Write the tool_id of the executor, or `registry/<namespace>/<tool_id>` for one that others published."
        yield Issue("executor", f"{place!r:.140} cannot name an item", fix)
    if at and Range.parse(wanted) is None:
        yield Issue("executor", f"{wanted!r:.60} is not a range of versions", f"Write a range, such as `{name}@^1.2`.")
    if is_missing:
        yield Issue("executor", f"{name!r:.140} is not in any catalog", f"Create `{name}`, or name one that exists.")
    if sheet.executor_ids and name not in sheet.executor_ids:
        listed = " or ".join(f"`{each}`" for each in sheet.executor_ids)
        yield Issue("executor", f"{_a(sheet.type)} depends on {listed}, not on {name!r:.140}", f"Write {listed}.")
    elif below is not None and sheet.executor_types and below.tool_type not in sheet.executor_types:
        wanted = " or ".join(sheet.executor_types)
        reason = f"{name!r} is {_a(below.tool_type)}, and {_a(sheet.type)} depends on {_a(wanted)}"
        yield Issue("executor", reason, f"Name an item of the type {wanted}.")
    elif below is not None:
        yield from child_faults(below, manifest)


def _config_faults(
    manifest: Manifest, sheet: TypeSpec, sheets: TypeSpecs, executor: Manifest | None
) -> Iterator[Issue]:
    below = {
        word: name
        for name in sheet.executor_types
        if (link := sheets.get(name)) is not None
        for word in link.words
        if word not in sheet.words
    }
    formats = formats_for(_requirement(manifest, executor))
    found = faults(sheet.config, manifest.config, place="config", formats=formats)
    rule = sheet.by_executor.get(manifest.executor_id or "")
    if rule is not None and not found:
        found = faults(rule, manifest.config, place="config")
    for issue in found:
        word = issue.place.removeprefix("config.")
        if word in below and word in manifest.config:
            reason = f"`{word}` is a word of the {below[word]} below; {_a(sheet.type)} cannot set it"
            yield replace(issue, reason=reason, fix=f"Remove it, or write a {below[word]} of your own with it.")
        else:
            yield issue


def _requirement(*links: Manifest | None) -> Requirement:
    """Return how an item writes packages: as its own runtime does, or as its executor does."""
    for manifest in links:
        with suppress(ValidationError):  # the schema of runtimes says what is wrong with it
            if manifest is not None and (found := packages_of(manifest.config)) is not None:
                return found.config.requirement
    return ""


def _template_faults(manifest: Manifest, sheet: TypeSpec) -> Iterator[Issue]:
    if not sheet.templates:
        return
    declared = as_object(manifest.parameters.get("properties"))
    used = [(word, name) for word in sheet.templates for name in placeholders(manifest.config.get(word))]
    for word, name in used:
        if name not in declared:
            fix = f"Declare a parameter `{name}`, or write `{{{{{name}}}}}` for the text."
            yield Issue(f"config.{word}", f"`{{{name}}}` is not a parameter", did_you_mean(name, declared) + fix)
    named = {name for _, name in used}
    for name in (name for name in declared if name not in named):
        fix = f"Write `{{{name}}}` where it belongs, or remove the parameter."
        yield Issue(f"parameters.{name}", "is declared and never used", fix, "warning")


def _file_faults(
    manifest: Manifest, sheet: TypeSpec, file_names: Collection[str], *, is_folder: bool
) -> Iterator[Issue]:
    files = [
        name for name in file_names if not (name in _MANIFEST_FILES if is_folder else name.endswith(_DATA_SUFFIXES))
    ]
    for name in files:
        if not is_safe_path(name):
            yield Issue(name, "is not a safe path", "Use relative paths, without `..`, backslashes or a drive.")
    entrypoint = manifest.config.get("entrypoint")
    if "entrypoint" in sheet.words:
        if isinstance(entrypoint, str) and is_safe_path(entrypoint) and entrypoint not in files:
            fix = f"{did_you_mean(entrypoint, files)}Add the file, or name one that is there."
            yield Issue("config.entrypoint", f"{entrypoint!r} is not among the item's files", fix)
    elif sheet.files == "required" and not files:
        yield Issue("", f"{_a(sheet.type)} needs a file with its text", "Put a Markdown file beside the manifest.")
    elif sheet.files == "none" and files and is_folder:
        listed = ", ".join(files[:5])
        yield Issue("", f"{_a(sheet.type)} has no files; {listed} will never be used", "Remove them.", "warning")


def _texts(value: Json, place: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield place, value
        case Mapping():
            for key, inner in value.items():
                here = f"{place}.{key}" if place else key
                yield here, key
                yield from _texts(inner, here)
        case _:
            for index, inner in enumerate(as_list(value)):
                yield from _texts(inner, f"{place}[{index}]")
