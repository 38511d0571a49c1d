"""The question as text that nothing in it can forge; code of a first run; masking."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Question
from kiwi_mcp.domain.items import Chain, Tool, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.domain.records import Approval
from kiwi_mcp.policy.external_code import known_as
from kiwi_mcp.primitives.secrets.redaction import redact

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
        yield f"code: {_plain(as_text(file.get('path'))[:_LONGEST_PATH])} ({text_of(file.get('bytes'))} bytes)"
        text = as_text(file.get("text"))
        yield from (f"{_INDENT}{_plain(line)}" for line in text.removesuffix("\n").split("\n") if text)
        if not file.get("whole"):
            yield f"  (not all of it: `kiwi load {_plain(as_text(file.get('item')))}` shows the rest)"


def _plain(text: str) -> str:
    # A quotation mark needs no escape here, and code is full of them.
    return json.dumps(text, ensure_ascii=True)[1:-1].replace('\\"', '"')


ALWAYS = ("none", "this tool")
"""What a yes may be from now on: for the tool as it is, where it is, as long as it touches no more than now."""
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
    shown = as_object(_told(plan.to_json(), hidden))
    if len(text := escaped(shown)) <= _LONGEST_PLAN:
        return shown
    kept = {word: shown[word] for word in ("identity", "digest", "driver", "jail", "effect") if word in shown}
    return {**kept, "left_out": cut(text, 0)}


def in_words(plan: Plan, chain: Chain, asked: Approval, doubt: str = "", way: str = "") -> str:
    """Return the question: what would be run, from where, what it touches, and with which parameters.

    `way` is how it was asked: through what, and by which program.
    """
    tool = chain.tool
    vouchers = (tool.integrity, tool.trust, f"key {tool.signer}" if tool.signer else "")
    vouched = ", ".join(dict.fromkeys(filter(None, vouchers)))
    profile = plan.profile
    lines = [
        f"{_word(tool.id)} needs your approval. It:",
        *(f"  - {_word(reason)}" for reason in asked.reasons),
        f"item: {_word(tool.identity)} ({_word(vouched)})",
        f"content: {tool.digest}",
        *([f"isolation: {profile.level}, as {profile.provenance}"] if profile else []),
        *([f"changes: {escaped(list(asked.touched.writes))}"] if asked.touched.writes else []),
        *([f"sends to: {escaped(list(asked.touched.sends))}"] if asked.touched.sends else []),
        *([f"secrets: {', '.join(map(_word, plan.variables))}"] if plan.variables else []),
        f"parameters: {cut(escaped(asked.plan.get('inputs', {})), _LONGEST_PARAMETERS)}",
        f"project: {_word(asked.project)}",
        f"asked by: {_word(asked.actor)}{f' ({_word(way)})' if way else ''}",
        *([f"careful: {doubt}"] if doubt else []),
        *code_in_words(asked.plan.get("code")),
    ]
    return "\n".join(lines)


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
                        "enum": list(ALWAYS),
                        "default": ALWAYS[0],
                    },
                },
                "required": ["approve"],
            },
        },
        is_own=True,
    )


def _word(text: str) -> str:
    return cut(escaped(text)[1:-1], _LONGEST_WORD)


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


def _told(value: Json, hidden: Mapping[str, str], *, is_named: bool = False) -> Json:
    match value:
        case str():
            # A template names the secret, and does not hold it.
            is_masked = is_named and value != "" and not value.startswith("${")
            return _MASK if is_masked else cut(redact(value, hidden), _LONGEST_TEXT)
        case Mapping():
            parts = list(value.items())[:_MOST_PARTS]
            response = {
                as_text(_told(word, hidden)): _told(inner, hidden, is_named=is_named or _is_secret_name(word))
                for word, inner in parts
            }
            return response if len(value) <= _MOST_PARTS else {**response, "…": f"{len(value):,} in all"}
        case list() | tuple():
            more = [] if len(value) <= _MOST_PARTS else [f"… ({len(value):,} in all)"]
            return [*(_told(inner, hidden, is_named=is_named) for inner in value[:_MOST_PARTS]), *more]
        case bool() | None:
            return value
        case _:
            return _MASK if is_named else value
