"""Memory: items used after a request are found by similar ones; no item is lowered and no exact match is outranked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.index import CardIndex, pack_vectors
from kiwi_mcp.search.port import Floats, Hit
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.recall import RecallIndex, RecallMatch, RecallMatches, is_same
from kiwi_mcp.store.search_index.recall import RecallEntry

DESCRIPTIONS = {
    "umbrella": "Tell whether it will rain",
    "ledger": "Add up what was spent",
    "parcel": "Follow a parcel on its way",
    "deploy": "Put a build on the servers",
    "translate": "Say a text in another language",
}
WORDS = [*dict.fromkeys(" ".join([*DESCRIPTIONS, *DESCRIPTIONS.values(), "coat walk money where post"]).split())]
requests = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
uses = st.lists(st.tuples(st.sampled_from([*DESCRIPTIONS]), requests, st.booleans()), min_size=1, max_size=30)


class Letters:
    """An encoder to which texts mean the same that have the same letters."""

    name, dimension = "letters", 384

    def encode(self, texts: Sequence[str]) -> Floats:
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for letter in text.lower():
                row[ord(letter) % 64] += 1
        return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6), np.float32)


LETTERS = Letters()


@pytest.fixture(scope="module", params=[None, LETTERS], ids=["words", "meaning"])
def encoder(request: pytest.FixtureRequest) -> Letters | None:
    found: Letters | None = request.param
    return found


def index(encoder: Letters | None) -> CardIndex:
    made = CardIndex(encoder.name if encoder else "")
    cards = [Card("user", "local", name, "1.0.0", name, description=text) for name, text in DESCRIPTIONS.items()]
    made.follow(tuple(cards))
    while made.catch_up(None, encoder, seconds=10):
        pass
    return made


INDICES = {None: index(None), LETTERS: index(LETTERS)}


def trace(name: str, request: str, encoder: Letters | None = None, *, is_run: bool = True) -> RecallEntry:
    vector = pack_vectors(encoder.encode([request]))[0] if encoder else b""
    return RecallEntry(f"user/local/{name}", request, is_run, 0, "", encoder.name if encoder else "", vector)


def found(request: str, encoder: Letters | None, traces: Sequence[RecallEntry] = ()) -> Sequence[Hit]:
    need = parse_query(request, encoder)
    recall = RecallIndex(traces, encoder.name if encoder else "").recall(need) if traces else None
    return rank(need, [INDICES[encoder]], limit=10, recall=recall).hits


def test_an_item_is_found_by_a_request_that_shares_no_word_with_its_card(encoder: Letters | None) -> None:
    need = "do I take a coat along"
    hits = found(need, encoder, [trace("umbrella", "take a coat or not", encoder)])
    assert (hits[0].card.tool_id, hits[0].why.is_recalled) == ("umbrella", True)
    assert all(hit.card.tool_id != "umbrella" or not hit.why.is_recalled for hit in found(need, encoder))


def test_a_run_counts_more_than_a_load(encoder: Letters | None) -> None:
    looked = found("take a coat", encoder, [trace("umbrella", "take a coat", encoder, is_run=False)])
    ran = found("take a coat", encoder, [trace("umbrella", "take a coat", encoder)])
    assert ran[0].score > looked[0].score > 0


def test_an_unencoded_request_counts_by_its_words() -> None:
    hits = found("take a coat", LETTERS, [trace("umbrella", "take a coat")])
    assert hits[0].card.tool_id == "umbrella"


def test_an_unrelated_request_is_answered_as_before() -> None:
    remembered = [trace("ledger", "money of the month"), trace("deploy", "ship it")]
    assert found("will it rain", None, remembered) == found("will it rain", None)


def test_an_unused_item_stays_first_unless_the_request_is_nearly_a_remembered_one() -> None:
    known = RecallMatch(alike=0.9, pull=0.9, lift=0.5, is_sure=False)
    recall = RecallMatches({"user/local/ledger": known}, {"user/local/ledger"})
    first = recall.to_pass("user/local/umbrella", 0.5)
    assert 0.4 < known.lifted(0.4, first) < first == 0.5
    assert known._replace(is_sure=True).lifted(0.4, first) > first
    assert known.lifted(0.4, recall.to_pass("user/local/ledger", 0.5)) > 0.5  # both were used
    assert known.lifted(0.1, recall.to_pass("user/local/umbrella", 0.2)) > 0.2  # which was no answer


def test_a_repeated_request_finds_the_used_item_first(encoder: Letters | None) -> None:
    before = found("will it rain", encoder)
    assert before[0].card.tool_id != "ledger"
    assert found("will it rain", encoder, [trace("ledger", "will it rain", encoder)])[0].card.tool_id == "ledger"


def test_the_used_item_with_the_more_similar_request_is_ranked_higher() -> None:
    near, far = trace("ledger", "coat for a walk"), trace("parcel", "coat and money and post")
    scores = {hit.card.tool_id: hit.score for hit in found("coat for a walk", None, [near, far])}
    alone = {hit.card.tool_id: hit.score for hit in found("coat for a walk", None, [far])}
    assert scores["ledger"] > scores["parcel"]
    assert scores["parcel"] < alone["parcel"]


def test_several_similar_requests_count_more_than_one() -> None:
    one = [trace("ledger", "coat for a walk")]
    several = [*one, trace("ledger", "walk in a coat"), trace("ledger", "a walk with my coat on")]
    need = "coat on a long walk home"
    assert found(need, None, several)[0].score > found(need, None, one)[0].score


def test_a_similar_request_is_found_among_very_many(encoder: Letters | None) -> None:
    many = [trace("ledger", f"{word} {other}", encoder) for word in WORDS for other in WORDS]
    hits = found("quick brown fox", encoder, [*many, trace("parcel", "quick brown fox", encoder)])
    assert len(many) > 600
    assert hits[0].card.tool_id == "parcel"


@settings(max_examples=30, deadline=None)
@given(uses=uses, name=st.sampled_from([*DESCRIPTIONS]), is_meant=st.booleans(), is_full=st.booleans())
def test_no_remembered_use_outranks_an_exact_match(
    uses: list[tuple[str, str, bool]], name: str, is_meant: bool, is_full: bool
) -> None:
    encoder = LETTERS if is_meant else None
    asked = f"user/local/{name}" if is_full else name
    remembered = [trace(item, request, encoder, is_run=is_run) for item, request, is_run in uses]
    remembered += [trace(item, asked, encoder) for item, _, _ in uses]
    first, *others = found(asked, encoder, remembered)
    assert (first.card.tool_id, first.score, first.why.is_exact) == (name, 1.0, True)
    assert all(hit.score < 1 for hit in others)


@settings(max_examples=30, deadline=None)
@given(uses=uses, request=requests, is_meant=st.booleans())
def test_no_item_is_lowered_and_an_unused_one_keeps_its_score(
    uses: list[tuple[str, str, bool]], request: str, is_meant: bool
) -> None:
    encoder = LETTERS if is_meant else None
    before = {hit.card.tool_id: hit.score for hit in found(request, encoder)}
    remembered = [trace(item, text, encoder, is_run=is_run) for item, text, is_run in uses]
    after = {hit.card.tool_id: hit.score for hit in found(request, encoder, remembered)}
    used = {item for item, _, _ in uses}
    assert all(after[name] >= score for name, score in before.items())
    assert all(after[name] == before[name] for name in after if name not in used)
    assert all(0 < score <= 1 for score in after.values())


def test_equal_requests_are_one() -> None:
    assert is_same("follow my parcel", "Follow the parcels, please")
    assert not is_same("follow my parcel", "follow my money")
