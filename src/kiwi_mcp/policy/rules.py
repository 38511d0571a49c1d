"""Rules as owners write them: words of a file into a grant, and every word that is not understood a fault."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from kiwi_mcp.domain.grants import Grant, Rules
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.conditions import read_conditions
from kiwi_mcp.policy.paths import is_pattern, plain_path

NAMED = ("verbs", "items", "hosts", "commands", "variables", "spawn")
"""The words whose rules are about names."""
WORDS = (*NAMED, "files", "conditions")
_RULE_WORDS = ("allow", "deny")
_FILE_WORDS = ("read", "write")


def read_grant(written: JsonObject, name: str, place: str, issues: list[Issue], start: Grant) -> Grant:
    """Return a grant with the rules that are written, and those of `start` for all that they do not speak of."""
    verbs, items, hosts, commands, variables, spawn = (
        _rules(f"{place}{word}", written.get(word), issues, getattr(start, word)) for word in NAMED
    )
    files = written.get("files")
    issues += unknown_words(files, _FILE_WORDS, f"{place}files")
    by_file = as_object(files)
    read, write = (
        _paths(f"{place}files.{word}", by_file.get(word), issues, getattr(start, word)) for word in _FILE_WORDS
    )
    return replace(
        start,
        verbs=verbs,
        items=items,
        hosts=hosts,
        commands=commands,
        variables=variables,
        spawn=spawn,
        read=read,
        write=write,
        conditions=read_conditions(written.get("conditions"), f"{place}conditions", issues),
        name=name,
    )


def unknown_words(written: Json, words: Collection[str], place: str) -> Iterator[Issue]:
    """Give what is wrong with a mapping: that it is none, or words in it that mean nothing."""
    listed = ", ".join(words)
    if written is not None and not isinstance(written, Mapping):
        yield Issue(place, "is not a mapping", f"Write words below it: {listed}.")
    for word in as_object(written):
        if word not in words:
            fix = f"{did_you_mean(word, words)}Use one of: {listed}."
            yield Issue(f"{place}.{word}".strip("."), "is not a word of the policy", fix)


def texts(place: str, written: Json, issues: list[Issue]) -> tuple[str, ...]:
    """Return a list of texts; what is none is a fault."""
    values = as_list(written)
    if (written is not None and not isinstance(written, list)) or not all(isinstance(v, str) for v in values):
        issues.append(Issue(place, "is not a list of words", 'Write it as `["first", "second"]`.'))
    return tuple(value for value in values if isinstance(value, str))


def _rules(place: str, written: Json, issues: list[Issue], start: Rules) -> Rules:
    issues += unknown_words(written, _RULE_WORDS, place)
    rules = as_object(written)
    # Rules that only deny take something from what is allowed anyway.
    allow = texts(f"{place}.allow", rules["allow"], issues) if "allow" in rules else start.allow
    return Rules(allow, texts(f"{place}.deny", rules.get("deny"), issues))


def _paths(place: str, written: Json, issues: list[Issue], start: Rules) -> Rules:
    rules = _rules(place, written, issues, start)
    for pattern in (*rules.allow, *rules.deny):
        if not is_pattern(pattern):
            fix = "Write a path below the project, below `~/`, or an absolute one, without `..`."
            issues.append(Issue(place, f"{pattern!r:.80} names no files", fix))
    return Rules(tuple(map(plain_path, rules.allow)), tuple(map(plain_path, rules.deny)))
