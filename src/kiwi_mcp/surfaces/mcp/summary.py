"""The response in words, for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of

_FACTS = ("path", "trash_path", "signature", "plan", "chain", "variables", "reasons", "created", "next")
"""The words of an action's answer that its reader acts on."""


_EMPTY = "(empty)"


def summarize(content: JsonObject) -> str:
    """Return an answer in words: a result as it is, a list as lines, a refusal with what to do."""
    for mark, view in _VIEWS.items():
        if mark in content:
            return "\n".join(filter(None, view(content))) or _EMPTY
    return compact(content)


def beside(content: JsonObject) -> Iterator[str]:
    """Yield notes that belong to a result: that it has more text, and its warnings."""
    if handle := as_text(content.get("result_handle")):
        size = content.get("result_characters")
        where = f"load item_type output, item_id {handle} to read on, with grep to search in it"
        yield f"(the beginning of {size} characters; {where})"
    yield from (f"warning: {text_of(warning)}" for warning in as_list(content.get("warnings")))


def _refusal(content: JsonObject) -> Iterator[str]:
    yield f"{as_text(content.get('error'))}: {as_text(content.get('message'))}"
    yield from map(_issue, as_list(content.get("issues")))
    yield from _logs(content)
    if content.get("result") is not None:
        yield f"reply: {text_of(content['result'])}"
    yield f"What to do: {as_text(content.get('suggestion'))}"
    if schema := content.get("parameters_schema"):
        yield f"parameters_schema: {compact(schema)}"


def _ran(content: JsonObject) -> Iterator[str]:
    yield text_of(content["result"])
    yield from beside(content)
    yield from _logs(content)


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


def _defined(content: JsonObject) -> Iterator[str]:
    metadata = as_object(content["metadata"])
    yield f"{as_text(content.get('identity'))}: {as_text(metadata.get('description'))}"
    yield f"parameters: {compact(content.get('parameters'))}"
    yield as_text(content.get("problem")) or as_text(content.get("message"))
    yield from (f"warning: {text_of(warning)}" for warning in as_list(content.get("warnings")))
    yield as_text(content.get("content"))


def _page(content: JsonObject) -> Iterator[str]:
    yield as_text(content.get("content"))
    if "matches" in content:
        yield f"({content['matches']} lines match)"
    if (following := content.get("next_offset")) is not None:
        yield f"(of {content.get('total_characters')} characters; load with offset {following} to read on)"


def _judged(content: JsonObject) -> Iterator[str]:
    yield f"{as_text(content.get('tool_id'))} is {as_text(content.get('status'))}"
    yield from map(_issue, (*as_list(content.get("issues")), *as_list(content.get("warnings"))))


def _explained(content: JsonObject) -> Iterator[str]:
    yield as_text(content["help"])
    if "installation" in content:
        yield f"installed here: {compact(content['installation'])}"
    yield f"topics: {', '.join(map(text_of, as_list(content.get('topics'))))}"


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


_VIEWS: Mapping[str, Callable[[JsonObject], Iterator[str]]] = {
    "error": _refusal,
    "result": _ran,
    "results": _found,
    "metadata": _defined,
    "total_characters": _page,
    "valid": _judged,
    "help": _explained,
    "action": _done,
}
"""The view for each kind of answer, by the key that marks the kind."""
