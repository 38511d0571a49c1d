"""Both stores rank the registry alike: SQLite from arrays, PostgreSQL from candidates of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from math import inf
from random import Random
from typing import cast

import numpy as np
import pytest

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import Actor, ReleaseFile, VersionInfo, VersionName
from kiwi_mcp.search.index import SIZE, CardIndex, CardPool
from kiwi_mcp.search.indexes import fill, find_candidates, model_of
from kiwi_mcp.search.port import FeatureStorage, Floats
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.tokens import words
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.search_index.feature_cache import FeatureCache
from kiwi_mcp.store.search_index.postgres_search import Embeddings, PostgresSearch, TermCounts

ACTOR = Actor("ann", ("team", "public"))
YAML = b"tool_id: x\nversion: 1.0.0\n"
MATCHES = 200
"""So few matches are scored on the server here, where there are few items: as a share of all, fewer than it scores."""
ALIKE = (
    ("send", "deliver", "post"), ("mail", "letter", "email"), ("find", "look", "search"), ("remove", "delete", "erase"),
    ("picture", "image", "photo"), ("money", "payment", "invoice"), ("buy", "order", "purchase"), ("road", "route"),
    ("weather", "forecast"), ("people", "contacts"), ("meeting", "appointment"), ("translate", "interpret"),
)  # fmt: skip
"""Words that mean the same."""
OTHERS = [f"{a}{b}{c}" for a in ("ka", "lo", "mi", "ter") for b in "bdgknrs" for c in ("ato", "el", "ir", "um", "ona")]


class Meanings:
    """An encoder for tests: words that mean the same point the same way, all others elsewhere."""

    name, dimension = "meanings", 384

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, texts: Sequence[str]) -> Floats:
        self.encoded += len(texts)
        rows = np.array([sum((_meaning(word) for word in words(text)), np.full(384, 1e-3)) for text in texts])
        return cast("Floats", (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))


@cache
def _meaning(word: str) -> Floats:
    concept = next((alike[0] for alike in ALIKE if word in alike), word)
    # The first coordinates say most, as those of an encoder do.
    return cast("Floats", np.random.default_rng([*concept.encode()]).normal(size=384) * ([1.0] * 128 + [0.1] * 256))


def release(tool_id: str, description: str, version: str = "1.0.0") -> CheckedRelease:
    statement: JsonObject = {
        "kind": "kiwi.item/1",
        "tool_id": tool_id,
        "version": version,
        "executor": None,
        "manifest": sha256(YAML).hexdigest(),
        "files": [],
    }
    parameters: JsonObject = {"properties": {f"{description.rsplit(maxsplit=1)[-1]}_id": {"description": "which one"}}}
    manifest: JsonObject = {"tool_id": tool_id, "tool_type": "primitive", "version": version}
    return CheckedRelease(
        name=VersionName("team", tool_id, version),
        place=f"tools/{tool_id}/tool.yaml",
        statement=json.dumps(statement, sort_keys=True, separators=(",", ":")).encode(),
        manifest={**manifest, "description": description, "parameters": parameters},
        files=(ReleaseFile("tool.yaml", YAML),),
    )


def card_of(listed: VersionInfo) -> Card:
    """The card of a version; candidates come without a manifest, and need none."""
    parameters = cast("dict[str, dict[str, dict[str, str]]]", listed.manifest.get("parameters") or {})
    named = tuple((name, one["description"]) for name, one in parameters.get("properties", {}).items())
    name = listed.name
    return Card(
        "registry",
        name.namespace,
        name.tool_id,
        name.version,
        description=listed.description,
        parameters=named,
    )


def described(chance: Random) -> str:
    """A description: some words that occur everywhere, and a few that are rare."""
    usual = [chance.choice(chance.choice(ALIKE)) for _ in range(chance.randrange(2, 5))]
    return " ".join([*usual, *chance.sample(OTHERS, chance.randrange(2, 6))])


def requested(chance: Random, descriptions: Sequence[str]) -> str:
    """A request for one or two things, in other words than those of the items, sometimes misspelt."""
    parts = []
    for _ in range(chance.choice((1, 1, 2))):
        said = chance.choice(descriptions).split()
        response = [_other(word, chance) for word in chance.sample(said, min(len(said), chance.randrange(2, 5)))]
        parts.append(f"please {' '.join(response)} for me")
    return ", and then ".join(parts)


def _other(word: str, chance: Random) -> str:
    alike = next((alike for alike in ALIKE if word in alike), None)
    if alike:
        return chance.choice(alike)
    return f"{word[:2]}{word[3]}{word[2]}{word[4:]}" if chance.random() < 0.05 and len(word) > 5 else word


def pool_on(database: Database, registry: Registry, encoder: Meanings) -> Callable[[str], CardPool]:
    """Index all that is published, and return what gives the pool for a request, as kernels do it on this store."""
    if database.dialect == "postgres":
        model = model_of(encoder.name)
        assert not fill(Embeddings(database, model), encoder, card_of, seconds=inf)
        candidates = PostgresSearch(database, ACTOR, model, max_matches=MATCHES)
        return lambda text: find_candidates(parse_query(text, encoder), candidates, card_of)
    index = arrays(registry, encoder, FeatureCache(database))
    return lambda _: index


def arrays(registry: Registry, encoder: Meanings, keep: FeatureStorage | None = None) -> CardIndex:
    index = CardIndex(encoder.name)
    index.follow([card_of(one) for one in registry.find() if one.yanked is None])
    assert not index.catch_up(keep, encoder, seconds=inf)
    return index


def best(text: str, pool: CardPool, limit: int = 5) -> list[str]:
    return [hit.card.tool_id for hit in rank(parse_query(text, Meanings()), [pool], limit=limit).hits]


@pytest.mark.req("K-SE-01")
@pytest.mark.parametrize(
    ("count", "share"),
    [
        # The server scores every match.
        (MATCHES, 1.0),
        # It leaves out most, and rarely one that belongs to the first five.
        pytest.param(1_500, 0.95, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_both_stores_rank_like_an_in_memory_index(database: Database, count: int, share: float) -> None:
    chance, registry = Random(7), Registry(database, ACTOR)
    descriptions = [described(chance) for _ in range(count)]
    registry.publish([release(f"t{number}", text) for number, text in enumerate(descriptions)])
    pool_for, exact = pool_on(database, registry, Meanings()), arrays(registry, Meanings())
    requests = [requested(chance, descriptions) for _ in range(100)]
    same = [best(text, pool_for(text)) == best(text, exact) for text in requests]
    assert sum(same) >= share * len(requests)


@pytest.mark.req("K-SE-01")
def test_both_stores_find_words_meanings_names_and_typos(database: Database) -> None:
    registry = Registry(database, ACTOR)
    response = {"mailer": "send letter", "painter": "draw picture", "terbato": "nothing that was asked for"}
    registry.publish([release(tool_id, text) for tool_id, text in response.items()])
    pool_for = pool_on(database, registry, Meanings())
    asked = {"send": "mailer", "email": "mailer", "pictrue": "painter", "pict": "painter", "image": "painter"}
    assert {text: best(text, pool_for(text), 1) for text in asked} == {text: [name] for text, name in asked.items()}
    for name in ("terbato", "registry/team/terbato@1.0.0"):
        (hit,) = rank(parse_query(name, Meanings()), [pool_for(name)], limit=1).hits
        assert (hit.card.tool_id, hit.score, hit.why.is_exact) == ("terbato", 1.0, True)


def test_an_empty_registry_and_one_without_words_give_no_hits(database: Database) -> None:
    registry = Registry(database, ACTOR)
    assert best("send", pool_on(database, registry, Meanings())("send")) == []
    registry.publish([release("the", "the")])
    assert best("send", pool_on(database, registry, Meanings())("send")) == []
    assert best("the", pool_on(database, registry, Meanings())("the")) == ["the"]


def test_both_stores_follow_publishes_and_yanks(database: Database) -> None:
    registry = Registry(database, ACTOR)
    published = registry.publish([release("mailer", "send letter"), release("poster", "send parcels")])
    assert {*best("send", pool_on(database, registry, Meanings())("send"))} == {"mailer", "poster"}
    registry.publish([release("mailer", "burn papers", "1.1.0"), release("carrier", "send pigeons")])
    registry.set_status([published[1].name], "yank")
    pool_for = pool_on(database, registry, Meanings())
    assert best("send", pool_for("send")) == ["carrier"]
    assert best("burn", pool_for("burn")) == ["mailer"]


def test_another_process_encodes_nothing_again(database: Database) -> None:
    registry = Registry(database, ACTOR)
    registry.publish([release(f"t{number}", described(Random(number))) for number in range(100)])
    first, second = Meanings(), Meanings()
    pool_on(database, registry, first)
    pool_on(database, registry, second)
    assert (first.encoded, second.encoded) == (100, 0)


DAMAGES = [
    (b"\xff\x00abc", b""),
    (b"one two\0" + bytes(5), b""),
    (b"mail\0" + bytes(5), bytes(SIZE - 4) + b"\xff" * 4),
    (b"", b"short"),
]


@pytest.mark.parametrize(("said", "vector"), DAMAGES)
def test_one_damaged_row_of_a_server_loses_no_item(postgres_url: str, said: bytes, vector: bytes) -> None:
    database = open_database(postgres_url)
    registry = Registry(database, ACTOR)
    registry.publish([release(f"mailer{number}", "send letter") for number in range(5)])
    pool_for = pool_on(database, registry, Meanings())
    with database.transaction() as transaction:
        first = "(select id from tools order by id limit 1)"
        transaction.write(f"update tool_embeddings set words = ?, vector = ? where tool_id = {first}", (said, vector))
    assert {*best("send", pool_for("send"))} == {f"mailer{number}" for number in range(5)}
    database.close()


def test_a_just_published_item_is_found_by_words_before_it_is_indexed(postgres_url: str) -> None:
    database = open_database(postgres_url)
    registry = Registry(database, ACTOR)
    registry.publish([release("mailer", "send letter"), release("painter", "draw picture")])
    pool_on(database, registry, Meanings())
    registry.publish([release("singer", "sing song"), release("painter", "carve stone", "2.0.0")])
    candidates = PostgresSearch(database, ACTOR, model_of(Meanings.name))
    fresh = candidates.fresh(64)
    assert {one.name.tool_id for one in fresh} == {"singer", "painter"}

    def found(text: str, fresh: Sequence[VersionInfo] = ()) -> Sequence[str]:
        return best(text, find_candidates(parse_query(text, None), candidates, card_of, fresh=fresh))

    assert not {*found("sing")} & {"singer"}
    assert found("sing", fresh)[:1] == ["singer"]
    assert found("carve", fresh)[:1] == ["painter"]
    assert [*found("letter", fresh)].count("mailer") == 1
    assert [*found("painter", fresh)].count("painter") == 1
    pool_on(database, registry, Meanings())
    assert candidates.fresh(64) == []
    database.close()


def test_the_server_is_asked_once_for_all_typo_candidates(postgres_url: str) -> None:
    database = open_database(postgres_url)
    registry = Registry(database, ACTOR)
    registry.publish([release("mailer", "send letter"), release("painter", "draw picture")])
    pool_on(database, registry, Meanings())
    asked: list[int] = []

    class Noting(PostgresSearch):
        """Candidates that note how often they are asked for stems."""

        def counts(self, stems: Sequence[str] = ()) -> TermCounts:
            asked.append(len(stems))
            return super().counts(stems)

    text = " ".join(["lettre", "pictrue", *(f"{number}wrong" for number in range(20))])
    pool = find_candidates(parse_query(text, None), Noting(database, ACTOR, model_of(Meanings.name)), card_of)
    assert {*best(text, pool)} >= {"mailer", "painter"}
    assert len(asked) == 2
    database.close()
