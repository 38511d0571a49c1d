"""Parts of a request: one that asks for three things has three, each of which may need a tool of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MOST = 12
_FEWEST_WORDS, _FEWEST_NUMBERS = 3, 2

_SENTENCE = re.compile(r"""(?<=[.!?])["')\]]*\s+""")
_ENDS = re.compile(
    r""",?\s+\b(?:and\ then|then|also|finally|additionally|furthermore|moreover|lastly|next|as\ well\ as
                |after\ that|afterwards)\b,?\s*
    | ,\s+(?:and|but)\s+""",
    re.IGNORECASE | re.VERBOSE,
)
_VERBS = (
    "add|analy[sz]e|build|buy|calculate|cancel|check|compare|compress|compute|convert|copy|create|crop|decode|delete"
    "|deploy|describe|detect|download|draw|edit|encode|encrypt|execute|export|extract|fetch|find|generate|get|give|import"
    "|insert|install|invite|list|make|measure|merge|move|notify|open|organi[sz]e|pay|play|print|provide|publish|put|read"
    "|recommend|register|remind|remove|rename|replace|reply|resize|resolve|retrieve|rotate|save|schedule|search|send|set"
    "|share|show|shrink|sort|split|start|stop|suggest|summari[sz]e|take|tell|translate|turn|update|upload|validate|verify"
    "|write"
)
_OBJECTS = "me|us|it|them|him|her|the|an?|my|our|your|all|any|some|its|their|this|that|these|those"
_PLACES = "for|to|on|in|with|by|from|of"
_TASK = rf"(?:{_VERBS})\s+(?!(?:of|and|or)\b)\w"
# An `and` between two things, or two verbs for one thing, is left alone; one before something to do begins a new part.
_DOING = re.compile(
    rf"""\s+and\s+(?!(?:white|forth|cons|conditions)\b)  # are said with what stands before
    (?={_TASK}|[a-z]+\s+(?:{_OBJECTS}|if|whether|what|how|which|who)\b
       |(?:I|(?-i:[a-z])[a-z]*)\s+(?:[a-z]+\s+)?(?:{_PLACES})\b)  # names are written large""",
    re.IGNORECASE | re.VERBOSE,
)
_VERB, _TO_DO = re.compile(_VERBS, re.IGNORECASE), re.compile(_TASK, re.IGNORECASE)
# A comma does so where things to do are listed, the last of them after an `and`.
_NEXT = re.compile(rf",\s+(?={_TASK})", re.IGNORECASE)
_LAST = re.compile(rf",?\s+and\s+(?:{_TASK}|[a-z]+\s+(?:{_OBJECTS})\b)", re.IGNORECASE)
_LISTED = re.compile(r"[;\n]+")
_NUMBER = re.compile(r"(?<!\S)\(?(\d{1,2})[.)]\s+")
_WORD = re.compile(r"\w+")
_EDGES = " ,.;:!?\"'"


def parts_of(request: str) -> Sequence[str]:
    """Return the parts of a request that has several; of one that has none, nothing."""
    # Runs of spaces would be gone through again from each of them.
    listed = [" ".join(line.split()) for piece in _numbered(request) for line in _LISTED.split(piece)]
    named = [line for line in listed if _WORD.search(line)]
    parts = [*dict.fromkeys(part for line in named for part in _sentences(line, is_listed=len(named) > 1))][:MOST]
    return parts if len(parts) > 1 else ()


def _numbered(request: str) -> Sequence[str]:
    """Return what is said before, and at each number of, a list that is numbered from 1 on; else all of it."""
    places: list[tuple[int, int]] = []
    for found in _NUMBER.finditer(request):
        if int(found[1]) == len(places) + 1:
            places.append(found.span())
    if len(places) < _FEWEST_NUMBERS:
        return [request]
    begins, ends = [0, *(end for _, end in places)], [*(start for start, _ in places), len(request)]
    return [request[start:end] for start, end in zip(begins, ends, strict=True)]


def _sentences(line: str, *, is_listed: bool) -> Sequence[str]:
    """Return the parts of a line; one of several lines is a part however short it is, but for what leads to them."""
    pieces = [piece for sentence in _SENTENCE.split(line) for one in _tasks(sentence) for piece in _ENDS.split(one)]
    parts = [*filter(_is_part, (part.strip(_EDGES) for piece in pieces for part in _done(piece)))]
    return parts or ([line.strip(_EDGES)] if is_listed and not line.endswith(":") else [])


def _is_part(text: str) -> bool:
    return len(_WORD.findall(text)) >= _FEWEST_WORDS or _TO_DO.match(text) is not None


def _tasks(sentence: str) -> Sequence[str]:
    """Return what a sentence lists before the `and` that the last thing to do stands behind, and the rest."""
    last = max((found.start() for found in _LAST.finditer(sentence)), default=0)
    *most, before = _NEXT.split(sentence[:last])
    return [*most, before + sentence[last:]]


def _done(piece: str) -> Iterator[str]:
    """Give what is to be done, cut where an `and` begins something else."""
    begin = 0
    for found in _DOING.finditer(piece):
        if not _VERB.fullmatch(piece[begin : found.start()].rpartition(" ")[2]):
            yield piece[begin : found.start()]
            begin = found.end()
    yield piece[begin:]
