"""A query, parsed: its clauses, words, and vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

import numpy as np
from msgspec import Struct

from kiwi_mcp.search.index import CardPool
from kiwi_mcp.search.port import Encoder, Floats
from kiwi_mcp.search.tokens import COMMON, expand_terms, idf, stem, word_weight, words

MAX_CLAUSES = 12
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
# An `and` before another task begins a new clause; one between two things, or two verbs for one thing, does not.
_DOING = re.compile(
    rf"""\s+and\s+(?!(?:white|forth|cons|conditions)\b)  # fixed phrases
    (?={_TASK}|[a-z]+\s+(?:{_OBJECTS}|if|whether|what|how|which|who)\b
       |(?:I|(?-i:[a-z])[a-z]*)\s+(?:[a-z]+\s+)?(?:{_PLACES})\b)  # names begin with a capital letter""",
    re.IGNORECASE | re.VERBOSE,
)
_VERB, _TO_DO = re.compile(_VERBS, re.IGNORECASE), re.compile(_TASK, re.IGNORECASE)
# A comma begins a new clause in a list of tasks that ends with an `and`.
_NEXT = re.compile(rf",\s+(?={_TASK})", re.IGNORECASE)
_LAST = re.compile(rf",?\s+and\s+(?:{_TASK}|[a-z]+\s+(?:{_OBJECTS})\b)", re.IGNORECASE)
_LISTED = re.compile(r"[;\n]+")
_NUMBER = re.compile(r"(?<!\S)\(?(\d{1,2})[.)]\s+")
_WORD = re.compile(r"\w+")
_EDGES = " ,.;:!?\"'"


def split_clauses(query: str) -> Sequence[str]:
    """Return the clauses of a query; none if it has only one."""
    places: list[tuple[int, int]] = []  # those of the numbers of a list that is numbered from 1
    for found in _NUMBER.finditer(query):
        if int(found[1]) == len(places) + 1:
            places.append(found.span())
    pieces = [query]
    if len(places) >= _FEWEST_NUMBERS:  # the text before the list, and its entries
        begins, ends = [0, *(end for _, end in places)], [*(start for start, _ in places), len(query)]
        pieces = [query[start:end] for start, end in zip(begins, ends, strict=True)]
    # Runs of spaces would make the expressions slow.
    listed = [" ".join(line.split()) for piece in pieces for line in _LISTED.split(piece)]
    named = [line for line in listed if _WORD.search(line)]
    parts = dict.fromkeys(part for line in named for part in _clauses(line, is_listed=len(named) > 1))
    return [*parts][:MAX_CLAUSES] if len(parts) > 1 else ()


def _clauses(line: str, *, is_listed: bool) -> Sequence[str]:
    """Return the clauses of a line; one of several lines is a clause even if it is short, unless it ends with `:`."""
    pieces: list[str] = []
    for sentence in _SENTENCE.split(line):
        # The tasks that it lists before its last `and`, and the rest.
        last = max((found.start() for found in _LAST.finditer(sentence)), default=0)
        *tasks, before = _NEXT.split(sentence[:last])
        pieces += (piece for task in (*tasks, before + sentence[last:]) for piece in _ENDS.split(task))
    parts: list[str] = []
    for piece in pieces:
        begin = 0
        for found in _DOING.finditer(piece):  # an `and` that begins another task
            if not _VERB.fullmatch(piece[begin : found.start()].rpartition(" ")[2]):
                parts.append(piece[begin : found.start()])
                begin = found.end()
        parts.append(piece[begin:])
    stripped = [part.strip(_EDGES) for part in parts]
    clauses = [part for part in stripped if len(_WORD.findall(part)) >= _FEWEST_WORDS or _TO_DO.match(part)]
    return clauses or ([line.strip(_EDGES)] if is_listed and not line.endswith(":") else [])


MAX_QUERY = 4_000
MAX_WORDS = 64


class ParsedQuery(Struct, frozen=True):
    """A query: first the whole, then its clauses, if there are several."""

    text: str
    texts: tuple[str, ...]
    counted: tuple[Mapping[str, int], ...]  # the words of each, without stop words, with their counts
    vectors: Floats | None  # the vector of each; None without an encoder

    @property
    def stems(self) -> AbstractSet[str]:
        """The stems of the whole query."""
        return {stem(word) for word in self.counted[0]}


class Term(Struct, frozen=True):
    """One word of a query: the stems it matches here, and its weight."""

    word: str
    stems: Mapping[str, float]
    rarity: float
    count: int  # how many cards hold it


def parse_query(text: str, encoder: Encoder | None) -> ParsedQuery:
    """Return a query, parsed; a very long one is cut."""
    text = text[:MAX_QUERY]
    texts = (text, *split_clauses(text))
    vectors = encoder.encode(texts) if encoder and text.strip() else None
    if vectors is not None and not np.isfinite(vectors).all():
        raise ValueError("the encoder returned no vectors")
    whole, *parts = map(_counted, texts)
    # A clause of a long query may hold words that are not searched.
    known = [{word: count for word, count in part.items() if word in whole} for part in parts]
    return ParsedQuery(text, texts, (whole, *known), vectors)


def terms_of(query: ParsedQuery, pools: Sequence[CardPool]) -> Mapping[str, Term]:
    """Return each word of a query with the stems it matches in some cards, the rarest first."""

    def known_stems(stems: AbstractSet[str]) -> AbstractSet[str]:
        return {found for pool in pools for found in pool.known_stems(stems)}

    def beginning_with(word: str, most: int) -> AbstractSet[str]:
        segments = (segment for pool in pools for segment in pool.segments)
        return {found for segment in segments for found in segment.beginning_with(word, most)}

    total = sum(pool.count for pool in pools)
    terms = []
    for word, stems in expand_terms(query.counted[0], known_stems, beginning_with).items():
        held = sum(pool.document_frequency(found) for pool in pools for found in stems)
        terms.append(Term(word, stems, idf(held, total) * word_weight(word), held))
    return {term.word: term for term in sorted(terms, key=lambda term: (term.count, term.word))}


def _counted(text: str) -> Mapping[str, int]:
    written = words(text)
    counts = Counter([word for word in written if word not in COMMON] or written)
    return dict(islice(counts.items(), MAX_WORDS))
