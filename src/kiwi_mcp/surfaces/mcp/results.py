"""A kernel response as an MCP result: in words for the model, with content label and token cost."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import mcp_types as types
from mcp_types import SERVER_INFO_META_KEY, CallToolResult, TextContent
from pydantic import ValidationError

from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.mcp import Offer
from kiwi_mcp.domain.token_cost import TokenCost, cost_of
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.kernel import whole
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.store.outputs import INLINE_LIMIT
from kiwi_mcp.surfaces.mcp.protocol import ANY_STRUCTURE_SINCE, BLOCKS_SINCE, STRUCTURED_SINCE, KernelApi

_FACTS = ("path", "trash_path", "signature", "plan", "chain", "variables", "reasons", "created", "next")
"""The words of an action's answer that its reader acts on."""
CONTENT = "kiwi/content"
"""The key of the mark in the `_meta` of a result."""
COST = "kiwi/context"
"""The key beside it, of what the result costs: bytes, and about how many tokens."""
ResultT = TypeVar("ResultT", bound=types.Result)
_OURS = {"resultType", "cacheScope"}
"""What every server says for itself: who may share an answer of Kiwi's is not for the server behind it to say."""
_DEEPEST = 100
"""How deep an answer may be nested: parsers of other languages refuse more than a few hundred levels."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def summarize(content: JsonObject) -> str:
    """Return an answer in words: a result as it is, a list as lines, a refusal with what to do."""
    return "\n".join(filter(None, _lines(content))) or "(empty)"


def beside(content: JsonObject) -> Iterator[str]:
    """Yield notes that belong to a result: that it has more text, and its warnings."""
    if handle := as_text(content.get("result_handle")):
        size = content.get("result_characters")
        where = f"load item_type output, item_id {handle} to read on, with grep to search in it"
        yield f"(the beginning of {size} characters; {where})"
    yield from (f"warning: {text_of(warning)}" for warning in as_list(content.get("warnings")))


def _lines(content: JsonObject) -> Iterator[str]:
    match content:  # one key tells which kind of answer it is
        case {"error": _}:
            yield from _refusal(content)
        case {"result": result}:
            yield text_of(result)
            yield from beside(content)
            yield from _logs(content)
        case {"results": _}:
            yield from _found(content)
        case {"metadata": metadata}:
            yield f"{as_text(content.get('identity'))}: {as_text(as_object(metadata).get('description'))}"
            yield f"parameters: {compact(content.get('parameters'))}"
            yield as_text(content.get("problem")) or as_text(content.get("message"))
            yield from (f"warning: {text_of(warning)}" for warning in as_list(content.get("warnings")))
            yield as_text(content.get("content"))
        case {"total_characters": total}:
            yield as_text(content.get("content"))
            if "matches" in content:
                yield f"({content['matches']} lines match)"
            if (following := content.get("next_offset")) is not None:
                yield f"(of {total} characters; load with offset {following} to read on)"
        case {"valid": _}:
            yield f"{as_text(content.get('tool_id'))} is {as_text(content.get('status'))}"
            yield from map(_issue, (*as_list(content.get("issues")), *as_list(content.get("warnings"))))
        case {"help": page}:
            yield as_text(page)
            if "installation" in content:
                yield f"installed here: {compact(content['installation'])}"
            yield f"topics: {', '.join(map(text_of, as_list(content.get('topics'))))}"
        case {"action": _}:
            yield from _done(content)
        case _:
            yield compact(content)


def _refusal(content: JsonObject) -> Iterator[str]:
    yield f"{as_text(content.get('error'))}: {as_text(content.get('message'))}"
    yield from map(_issue, as_list(content.get("issues")))
    yield from _logs(content)
    if content.get("result") is not None:
        yield f"reply: {text_of(content['result'])}"
    yield f"What to do: {as_text(content.get('suggestion'))}"
    if schema := content.get("parameters_schema"):
        yield f"parameters_schema: {compact(schema)}"


def _found(content: JsonObject) -> Iterator[str]:
    yield from map(_card, map(as_object, as_list(content["results"])))
    yield "; ".join(f"part {number}: {text_of(said)}" for number, said in enumerate(as_list(content.get("parts")), 1))
    for one in map(as_object, as_list(content.get("close"))):
        yield f"close: {_full_name(one)}: {as_text(one.get('description'))}"
    said = (as_text(content.get(word)) for word in ("note", "suggestion"))
    yield " ".join(filter(None, (f"{content.get('total')} found.", *said)))
    if "indexing" in content:
        yield f"still indexing, so some may be missing: {compact(content['indexing'])}"
    yield from (f"warning: {text_of(warning)}" for warning in as_list(content.get("warnings")))


def _card(card: JsonObject) -> str:
    """Return one hit as a line: what it is asked for by, what it is, how well it fits and why, if it may be run."""
    words = " ".join(map(text_of, as_list(card.get("why"))))
    reasons = [f" by {words}" if words else "", f"; meaning {text_of(card['meaning'])}" if "meaning" in card else ""]
    is_offered = SOURCE_TRAITS.get(as_text(card.get("source")), NO_SOURCE).is_offered
    # That something is a tool of a server its name says already.
    facts = [as_text(card.get("tool_type"))] if not is_offered else []
    if "score" in card:
        facts.append("".join([text_of(card["score"]), *reasons]))
    if "part" in card:
        facts.append(f"part {text_of(card['part'])}")
    if state := as_text(card.get("state")):
        facts.append(f"{state}, not accepted")
    if refusal := as_text(card.get("not_permitted")):
        facts.append(f"not permitted: {refusal}")
    if also := ", ".join(map(text_of, as_list(card.get("also")))):
        facts.append(f"also {also}")
    schema = f"\n  parameters: {compact(card['parameters'])}" if "parameters" in card else ""
    return f"{_full_name(card)} ({', '.join(facts)}): {as_text(card.get('description'))}{schema}"


def _full_name(card: JsonObject) -> str:
    return as_text(card.get("identity")).partition("@")[0] or as_text(card.get("name"))


def _done(content: JsonObject) -> Iterator[str]:
    if "message" not in content and "tool_id" not in content:
        yield compact({word: value for word, value in content.items() if word != "action"})
        return
    yield as_text(content.get("message")) or f"{as_text(content.get('tool_id'))}: {text_of(content.get('status', ''))}"
    yield from (f"{word}: {text_of(content[word])}" for word in _FACTS if content.get(word))
    if "would_run" in content:
        yield f"would run: {text_of(content['would_run'])}"
    yield from map(_issue, as_list(content.get("warnings")))


def _logs(content: JsonObject) -> Iterator[str]:
    for name, text in as_object(content.get("logs")).items():
        if isinstance(text, str):
            yield f"{name}: {text.rstrip()}"


def _issue(issue: Json) -> str:
    if not isinstance(issue, Mapping):
        return f"- {text_of(issue)}"
    place = as_text(issue.get("place"))
    return f"- {place}{': ' if place else ''}{as_text(issue.get('reason'))}. {as_text(issue.get('fix'))}"


def cost_of_result(result: types.Result) -> TokenCost:
    """Return what the words of a result cost."""
    match result:
        case types.CallToolResult():
            text, structure = _text_of(result.content), ""
            if result.structured_content is not None:
                with suppress(ValueError, TypeError, RecursionError):  # invalid JSON of a server: its text is counted
                    structure = compact(result.structured_content)
            return cost_of(max(text, structure, key=len))
        case types.GetPromptResult():
            return cost_of(_text_of(message.content for message in result.messages))
        case types.ReadResourceResult():
            return cost_of(_text_of(result.contents))
        case _:
            return TokenCost()


def _text_of(parts: Iterable[object]) -> str:
    """Return the text in blocks of content, or in the contents of a resource."""
    texts = []
    for part in parts:
        held = part.resource if isinstance(part, types.EmbeddedResource) else part
        if isinstance(held, types.TextContent | types.TextResourceContents):
            texts.append(held.text)
    return "\n".join(texts)


def with_label(result: ResultT, answer: Answer) -> ResultT:
    """Return a result with its mark; a refusal is data."""
    content = answer.content
    source = as_text(content.get("identity")) or as_text(content.get("full_name")) or "kiwi"
    provenance = as_text(as_object(content.get("isolation")).get("provenance"))
    is_ours = source == "kiwi" or source.startswith("builtin/")
    mark: dict[str, Json] = {
        "kind": "instructions" if answer.is_instructions and not answer.is_error else "data",
        "source": source,
        # How far it is known where the source comes from.
        "trust": "kiwi" if is_ours else provenance or as_text(content.get("integrity")) or "unknown",
    }
    cost = dict(cost_of_result(result).to_json())
    return result.model_copy(update={"meta": {**(result.meta or {}), CONTENT: mark, COST: cost}})


def passed_call(passed: JsonObject, *, revision: str) -> types.CallToolResult | None:
    """Return the answer to a call; None where it is not one that a client of that revision could read."""
    blocks = [_block(one, revision) for one in as_list(passed.get("content"))]
    result = _read(types.CallToolResult, {**passed, "content": blocks})
    if result is None:
        return None
    is_object = isinstance(result.structured_content, Mapping)
    if revision >= (STRUCTURED_SINCE if is_object else ANY_STRUCTURE_SINCE):
        return result
    return result.model_copy(update={"structured_content": None})


def passed_prompt(passed: JsonObject, *, revision: str) -> types.GetPromptResult | None:
    """Return a prompt's messages; None where they are not such that a client of that revision could read."""
    messages = [
        {**message, "content": _block(message.get("content"), revision)}
        for message in map(as_object, as_list(passed.get("messages")))
    ]
    return _read(types.GetPromptResult, {**passed, "messages": messages})


def passed_resource(passed: JsonObject) -> types.ReadResourceResult | None:
    """Return what a resource holds; None where it is nothing that a client could read."""
    result = _read(types.ReadResourceResult, passed)
    return result if result is not None and result.contents else None


def _read(kind: type[ResultT], passed: JsonObject) -> ResultT | None:
    plain = {word: value for word, value in passed.items() if word not in _OURS}
    meta = {word: value for word, value in as_object(passed.get("_meta")).items() if word != SERVER_INFO_META_KEY}
    try:
        return kind.model_validate({**plain, "_meta": meta or None}, by_name=False)
    except ValidationError:
        return None


def _block(block: Json, revision: str) -> Json:
    """Return a block of content, as text if the client's revision has no such blocks."""
    kind = as_text(as_object(block).get("type"))
    if revision >= BLOCKS_SINCE.get(kind, ""):
        return block
    said = [as_text(as_object(block).get(word)) for word in ("name", "description", "mimeType", "uri")]
    return {"type": "text", "text": f"[{kind}: {' '.join(filter(None, said))}]"}


def _in_words(content: JsonObject) -> JsonObject:
    """Return an answer with the joined texts as its result, if the result is a list of blocks."""
    result = content.get("result")
    blocks = [as_object(block) for block in as_list(result)]
    if not blocks or not any(map(_is_text, blocks)) or not all(block.get("type") for block in blocks):
        return content
    return {**content, "result": "\n".join(as_text(block.get("text")) for block in blocks if _is_text(block))}


def _is_text(block: Json) -> bool:
    return as_object(block).get("type") == "text"


def _note(block: JsonObject) -> JsonObject:
    """Return what a block is, without what it holds."""
    held = {**block, **as_object(block.get("resource")), "type": block.get("type")}
    note = {key: held[key] for key in ("type", "name", "uri", "mimeType") if as_text(held.get(key))}
    if encoded := as_text(held.get("data")) or as_text(held.get("blob")):
        note["bytes"] = len(encoded.rstrip("=")) * 3 // 4  # of base64
    elif text := as_text(held.get("text")):
        note["bytes"] = len(text.encode(errors="replace"))
    return note


def as_result(answer: Answer, *, revision: str) -> CallToolResult:
    """Return an answer in the form that a client of that revision reads."""
    passed, content = answer.passed or {}, answer.content
    given = as_list(passed.get("content"))
    if "contents" in passed:  # those of a resource are embedded ones unless they are text
        given = [
            {"type": "resource", "resource": part} if "blob" in as_object(part) else {**as_object(part), "type": "text"}
            for part in as_list(passed["contents"])
        ]
    # The parts that are no text are passed on, as a client of that revision can read them.
    others = [block for block in given if not _is_text(block)]
    readable = passed_call({"content": others}, revision=revision) if others else None
    blocks = readable.content if readable else ()
    if blocks and "result" in content and "structuredContent" not in passed:
        noted: Json = [block if _is_text(block) else _note(as_object(block)) for block in given]
        if len(compact(noted)) <= INLINE_LIMIT:  # longer texts are read from the output, as ever
            of_preview = {"result_is_preview", "result_characters", "result_handle"}
            content = {**{key: value for key, value in content.items() if key not in of_preview}, "result": noted}
    text = safe_text(content)
    if revision < STRUCTURED_SINCE:
        return CallToolResult(content=[TextContent(text=text), *blocks], is_error=answer.is_error)
    whole_content: JsonObject = json.loads(text)
    summary = TextContent(text=summarize(_in_words(whole_content) if blocks else whole_content))
    return CallToolResult(content=[summary, *blocks], structured_content=dict(whole_content), is_error=answer.is_error)


def safe_text(content: JsonObject) -> str:
    """Return an answer as JSON that every parser takes, whatever a tool has put into it."""
    try:
        text = compact(content)
        is_deep = text.count("{") + text.count("[") > _DEEPEST and _depth(content) > _DEEPEST
    except (ValueError, TypeError, RecursionError):
        text, is_deep = "", True
    if is_deep:
        text = compact(_plain(content, _DEEPEST))
    return _LONE_SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)


def _depth(value: Json) -> int:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return 0
    parts = value.values() if isinstance(value, Mapping) else value
    return 1 + max(map(_depth, parts), default=0)


def _plain(value: object, levels: int) -> Json:
    """Return a value as JSON: what JSON cannot represent becomes text, and what is nested too deeply is left out."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, Mapping | Sequence):
        return str(value)
    if levels == 0:
        return "…"
    if isinstance(value, Mapping):
        return {str(name): _plain(part, levels - 1) for name, part in value.items()}
    return [_plain(part, levels - 1) for part in value]


def declares_result(offer: Offer, revision: str) -> bool:
    """Whether a client of a revision gets the result schema of a tool."""
    since = STRUCTURED_SINCE if offer.outputs.get("type") == "object" else ANY_STRUCTURE_SINCE
    return bool(offer.outputs) and revision >= since


async def tool_result(kernel: KernelApi, answer: Answer, offer: Offer, *, revision: str) -> CallToolResult:
    """Return the result of a tool: a server's answer unchanged, else the result, else why there is none."""
    is_declared = declares_result(offer, revision)
    # Where Kiwi and the server disagree on whether it went well, Kiwi says why.
    if answer.passed is not None and (answer.passed.get("isError") is True) is answer.is_error:
        passed = passed_call(answer.passed, revision=revision)
        if passed and (passed.is_error or passed.structured_content is not None or not is_declared):
            return passed
    if answer.is_error:
        return as_result(answer, revision=revision)
    content: JsonObject = json.loads(safe_text(await whole(kernel, answer) if is_declared else answer.content))
    result = content.get("result")
    if is_declared and (found := faults(offer.outputs, result, place="result")):
        failure: dict[str, Json] = {
            "error": "Execution failed",
            "code": "execution_failed",
            "item_type": "tool",
            "message": f"The result is not what `outputs` declares: {found[0].place} {found[0].reason}.",
            "suggestion": "Fix the tool, or the schema in its manifest.",
            "issues": [issue.to_json() for issue in found],
        }
        return as_result(Answer({**failure, **content}, is_error=True), revision=revision)
    notes = "\n".join(beside(content))
    blocks = [TextContent(text=text) for text in (text_of(result), *([notes] if notes else []))]
    return CallToolResult(content=[*blocks], structured_content=result if is_declared else None)
