"""The question as text that nothing in it can forge; code of a first run; masking."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from unicodedata import category

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Question
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.domain.items import Chain, Tool, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.domain.records import Approval
from kiwi_mcp.policy.isolation import known_as
from kiwi_mcp.primitives.secrets.redaction import redact
from kiwi_mcp.store.approvals import INPUT_MARK

_MOST_LETTERS = 6_000
"""How much of all files together is shown."""
_MOST_FILES = 20
_LONGEST_PATH = 200
_INDENT = "  | "
"""The prefix of each line of code, so that no code can be mistaken for a line of the question."""


def code_of(chain: Chain, first_runs: Collection[str], secrets: Mapping[str, str]) -> list[Json]:
    """Return the files of what never ran, each with its size and as much of its text as there is room for."""
    links = [link for link in chain.links if known_as(link, chain) in first_runs]
    files = [(link, file) for link in links for file in sorted(link.files, key=partial(_rank, link))]
    response: list[Json] = []
    room = _MOST_LETTERS
    for link, file in files[:_MOST_FILES]:
        text = redact(load_bytes(link, file).decode(errors="replace"), secrets) if room else ""
        is_whole = len(text) <= room and room > 0
        response.append(
            {"item": link.id, "path": file.path, "bytes": file.size, "text": text[:room], "whole": is_whole}
        )
        room -= min(len(text), room)
    if rest := [file for _, file in files[_MOST_FILES:]]:
        size = sum(file.size for file in rest)
        response.append({"item": chain.tool.id, "path": f"{len(rest)} more", "bytes": size, "text": "", "whole": False})
    return response


def _rank(link: Tool, file: ToolFile) -> tuple[bool, int, str]:
    """Return where a file stands: what is run first, and nothing large in the way of what is small."""
    return file.path != link.entrypoint, file.size, file.path


def code_in_words(files: Json) -> Iterator[str]:
    """Yield the lines that show some files; nothing in a file can begin a line, or act on a screen."""
    for file in map(as_object, as_list(files)):
        yield f"code: {visible(as_text(file.get('path'))[:_LONGEST_PATH])} ({text_of(file.get('bytes'))} bytes)"
        text = as_text(file.get("text"))
        yield from (f"{_INDENT}{visible(line)}" for line in text.removesuffix("\n").split("\n") if text)
        if not file.get("whole"):
            yield f"  (not all of it: `kiwi load {visible(as_text(file.get('item')))}` shows the rest)"


_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_SPACES = " \u3000"
_MOST_MARKS = 4
"""How many marks one letter may have: more are drawn over the lines around it."""


def visible(text: str) -> str:
    """Return one line of text in its own script, with all escaped that does not look like what it is.

    That is what controls a screen, changes the direction of writing, is invisible, or looks like a space.
    """
    shown: list[str] = []
    marks = 0
    for letter in text:
        kind = category(letter)
        marks = marks + 1 if kind in {"Mn", "Me"} else 0
        is_space = kind[0] == "Z" and letter not in _SPACES
        is_unseen = kind[0] == "C" or is_space or letter in _BLANK or marks > _MOST_MARKS
        shown.append(json.dumps(letter)[1:-1] if is_unseen else letter)
    return "".join(shown)


def _parameter_lines(inputs: JsonObject) -> Iterator[str]:
    """Yield the lines that show parameters, each marked; further lines of one value are indented."""
    room = _LONGEST_PARAMETERS
    for name, value in inputs.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
        first, *more = _HASH.sub(")", text).split("\n")
        for line in (f"{visible(name)}: {visible(first)}", *(f"  {visible(line)}" for line in more)):
            if (room := room - len(line)) < 0:
                yield f"{INPUT_MARK}… (`--json` shows the rest)"
                return
            yield f"{INPUT_MARK}{line}"


ALWAYS = ("none", "this tool", "this server", "this thread", "this directive")
"""What a yes may be from now on: for the tool as it is, where it is, as long as it touches no more than now; or so for
every tool of its MCP server; or for the tool in calls of this thread, or of threads of this directive as it is."""
_HASH = lazy_pattern(r", sha256 [0-9a-f]{64}\)")
"""What a cut value ends with; a person has no use for it."""
_MIXED = lazy_pattern(r"[A-Za-z][\u0370-\u052f]|[\u0370-\u052f][A-Za-z]")
"""A Greek or Cyrillic letter beside a Latin one, which often looks the same."""
_MASK = "[hidden: it looks like a secret]"
_SECRET_NAME = lazy_pattern(
    r"(?i)passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie"
)
_SECRET_WORDS = frozenset({"pwd", "pass", "auth", "bearer", "pin", "otp", "key", "keys"})
"""Names of a secret, if they are a complete word: `pin` is one, `pinned` is not."""
_WORDS = lazy_pattern(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SHORTEST_SECRET = 6
"""A shorter value is hidden only in its own place, and not searched for elsewhere: it would be found everywhere."""
_LONGEST_TEXT = 1_000
_MOST_PARTS = 200
_LONGEST_PLAN = 60_000
_LONGEST_PARAMETERS = 4_000
_LONGEST_WORD = 400
_AUTHORS: Mapping[Provenance, str] = {
    "owner_written": "you wrote or signed it",
    "owner_pinned": "you pinned it",
    "owner_relaxed": "you relaxed it",
    "model_written": "a model wrote it",
    "known_publisher": "a publisher that you trust wrote it",
    "mcp_server": "an MCP server that you accepted",
    "unknown": "its author is unknown",
}


def escaped(value: Json) -> str:
    """Return a value as canonical JSON in ASCII: nothing in it acts on a screen, or looks like another letter."""
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(", ", ": "))


def cut(text: str, limit: int) -> str:
    """Return the beginning of a text that is too long, with its length and the hash of all of it."""
    if len(text) <= limit:
        return text
    return (
        f"{text[:limit]}… ({len(text):,} characters in all, sha256 {sha256(text.encode(errors='replace')).hexdigest()})"
    )


def is_keepable(parameters: JsonObject, secrets: Mapping[str, str]) -> bool:
    """Whether parameters may be kept for another call: none of them looks like a secret, and they are not long."""
    text = escaped(parameters)
    return len(text) <= _LONGEST_PLAN and not _secret_values(parameters, shortest=1) and redact(text, secrets) == text


def shown_plan(plan: Plan, secrets: Mapping[str, str]) -> JsonObject:
    """Return a plan as it is kept and shown: bounded, and without what looks secret."""
    hidden = {**secrets, **{f"parameter-{place}": one for place, one in enumerate(_secret_values(plan.inputs))}}
    shown = as_object(_masked(plan.to_json(), hidden))
    if len(text := escaped(shown)) <= _LONGEST_PLAN:
        return shown
    kept = {word: shown[word] for word in ("identity", "digest", "driver", "jail", "effect") if word in shown}
    return {**kept, "left_out": cut(text, 0)}


def in_words(plan: Plan, chain: Chain, asked: Approval, doubt: str = "", way: str = "") -> str:
    """Return the question: what would run, from where, what it touches, its parameters, and the way it was asked."""
    tool = chain.tool
    vouched = ", ".join(dict.fromkeys(filter(None, (tool.integrity, tool.trust))))
    profile, inputs = plan.profile, as_object(asked.plan.get("inputs"))
    thread = as_object(asked.plan.get("thread"))
    lines = [
        f"{_word(tool.id)} needs your approval. It:",
        *(f"  - {_word(reason)}" for reason in asked.reasons),
        f"item: {_word(tool.identity)} ({_word(vouched)})",
        *([f"isolation: {profile.level}; {_AUTHORS.get(profile.provenance, 'built in')}"] if profile else []),
        *(f"changes files in: {_word(path)}" for path in asked.touched.writes),
        *(f"sends data to: {_word(host)}" for host in asked.touched.sends),
        *([f"request: {plan.spec.method} {_word(plan.spec.url)}"] if isinstance(plan.spec, HttpSpec) else []),
        *([f"uses the secrets: {', '.join(map(_word, plan.variables))}"] if plan.variables else []),
        "parameters:" if inputs else "parameters: none",
        *_parameter_lines(inputs),
        f"project: {_word(asked.project)}",
        f"asked by: {_word(asked.actor)}{f' ({_word(way)})' if way else ''}",
        *([f"thread: {_word(as_text(thread['path']))} ({thread['thread_id']})"] if thread else []),
        *([f"careful: {doubt}"] if doubt else []),
        *code_in_words(asked.plan.get("code")),
        *(_difference(plan.change.diff) if plan.change else ()),
    ]
    return "\n".join(lines)


def _difference(diff: str) -> Iterator[str]:
    """Yield the lines of a change; nothing in them can begin a line of the question."""
    if not diff:
        yield "difference: none"
        return
    yield "difference:"
    yield from (f"{_INDENT}{visible(line)}" for line in diff[:_MOST_LETTERS].split("\n"))
    if len(diff) > _MOST_LETTERS:
        yield f"  (not all of it: {len(diff):,} characters)"


def answers_of(asked: Approval) -> tuple[str, ...]:
    """Return what a yes to a question may be from now on: only what fits its call."""
    server = ALWAYS[2:3] if "server" in asked.plan else ()
    return (*ALWAYS[:2], *server, *(ALWAYS[3:] if "thread" in asked.plan else ()))


def question_of(asked: Approval) -> Question:
    """Return the question in the form that MCP uses; it cannot have been answered before it was asked."""
    return Question(
        "elicitation/create",
        {
            "message": asked.preview,
            "requestedSchema": {
                "type": "object",
                "properties": {
                    "approve": {"type": "boolean", "title": "Run exactly this, once", "default": False},
                    "always": {
                        "type": "string",
                        "title": "From now on without asking",
                        "enum": list(answers_of(asked)),
                        "default": ALWAYS[0],
                    },
                },
                "required": ["approve"],
            },
        },
        is_own=True,
    )


def _word(text: str) -> str:
    """Return a name or a path on one line; one that mixes scripts is escaped, since it may look like another."""
    shown = escaped(text)[1:-1] if _MIXED.search(text) else visible(text)
    return shown if len(shown) <= _LONGEST_WORD else f"{shown[:_LONGEST_WORD]}… ({len(shown):,} characters in all)"


def _is_secret_name(name: str) -> bool:
    words = {word.lower() for word in _WORDS.findall(name)}
    return bool(_SECRET_NAME.search(name)) or not words.isdisjoint(_SECRET_WORDS)


def _secret_values(value: Json, *, is_named: bool = False, shortest: int = _SHORTEST_SECRET) -> Sequence[str]:
    """Return the texts and numbers under names of secrets, from some length on."""
    match value:
        case bool() | None:
            return []
        case str() | int() | float():
            return [str(value)] if is_named and len(str(value)) >= shortest else []
        case Mapping():
            return [
                text
                for name, inner in value.items()
                for text in _secret_values(inner, is_named=is_named or _is_secret_name(name), shortest=shortest)
            ]
        case list() | tuple():
            return [text for inner in value for text in _secret_values(inner, is_named=is_named, shortest=shortest)]
        case _:
            return []


def _masked(value: Json, hidden: Mapping[str, str], *, is_named: bool = False) -> Json:
    match value:
        case str():
            # A template names the secret, and does not hold it.
            is_masked = is_named and value != "" and not value.startswith("${")
            return _MASK if is_masked else cut(redact(value, hidden), _LONGEST_TEXT)
        case Mapping():
            parts = list(value.items())[:_MOST_PARTS]
            response = {
                as_text(_masked(word, hidden)): _masked(inner, hidden, is_named=is_named or _is_secret_name(word))
                for word, inner in parts
            }
            return response if len(value) <= _MOST_PARTS else {**response, "…": f"{len(value):,} in all"}
        case list() | tuple():
            more = [] if len(value) <= _MOST_PARTS else [f"… ({len(value):,} in all)"]
            return [*(_masked(inner, hidden, is_named=is_named) for inner in value[:_MOST_PARTS]), *more]
        case bool() | None:
            return value
        case _:
            return _MASK if is_named else value
