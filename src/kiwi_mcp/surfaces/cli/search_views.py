"""How what was found looks to a person: each item with its score, and below it the reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, first_sentence, show_warnings, talk

_WORD_OF_REQUEST = re.compile(r"`(source|server|tag|category): (\w+)`")


def _search(content: JsonObject, screen: Screen) -> None:
    results = [as_object(one) for one in as_list(content.get("results"))]
    parts = [text_of(part) for part in as_list(content.get("parts"))]
    width = max((len(_name(one)) for one in results), default=0)
    for one in results:
        marks = [text_of(word) for word in as_list(one.get("why"))]
        kind = f"{as_text(one.get('source'))}/{as_text(one.get('tool_type'))}"
        said = first_sentence(as_text(one.get("description")))
        screen.line(f"{_name(one).ljust(width)}  {kind:<18} {text_of(one.get('score')):<6}  {said}", marks)
        if reasons := "; ".join(_reasons(one, parts)):
            screen.line(f"    {reasons}")
    show_warnings(content)
    for broken in map(as_object, as_list(content.get("broken"))):
        talk(f"warning: {as_text(broken.get('message'))}")
    found = f"{len(results)} of {content.get('total')} found"
    talk(found if results else f"Nothing found. {_typed(as_text(content.get('suggestion')))}")
    _close(content, screen)


def _typed(hint: str) -> str:
    """Return a hint with the words of a request as they are typed: `source: all` is `--source all`."""
    return _WORD_OF_REQUEST.sub(r"`--\1 \2`", hint)


def _close(content: JsonObject, screen: Screen) -> None:
    """Say what else there is to know: what is close, that nothing fits well, and that more may come."""
    for one in map(as_object, as_list(content.get("close"))):
        name, said = as_text(one.get("identity")).partition("@")[0], first_sentence(as_text(one.get("description")))
        screen.line(f"close: {name}  {said}")
    if note := as_text(content.get("note")):
        talk(f"note: {_typed(note)}")
    if indexing := as_object(content.get("indexing")):
        known, words, meaning = (text_of(indexing.get(word, 0)) for word in ("cards", "words", "meaning"))
        talk(f"note: still indexing: of {known} items {words} are found by words, {meaning} by meaning so far.")


def _reasons(found: JsonObject, parts: list[str]) -> Iterator[str]:
    """Give why something was found, and why it may not be run."""
    if words := ", ".join(map(text_of, as_list(found.get("why")))):
        yield f"by {words}"
    if "meaning" in found:
        yield f"near in meaning ({text_of(found['meaning'])})"
    if found.get("remembered"):
        yield "used before for a need like this"
    number = found.get("part")
    if isinstance(number, int) and 0 < number <= len(parts):
        yield f"for “{parts[number - 1]}”"
    if found.get("permitted") is False:
        yield f"✗ not permitted: {as_text(found.get('not_permitted'))}"


def _name(found: JsonObject) -> str:
    """Return the name by which a result is asked for: what is published is told with its namespace."""
    full = as_text(found.get("identity")).partition("@")[0]
    if found.get("source") == "mcp":
        return full + (f" ({as_text(found['state'])})" if "state" in found else "")
    if found.get("source") == "registry":
        return full.removeprefix("registry/")
    return as_text(found.get("full_name")) or as_text(found.get("name"))


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType({"search": _search})
