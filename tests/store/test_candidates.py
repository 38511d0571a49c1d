"""Search candidates on PostgreSQL: the server finds the items that may match, among the visible ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from random import Random

import pytest
from msgspec.structs import replace
from tests.plugins.registries import set_visibility

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import Actor, ReleaseFile, VersionInfo, VersionName, Visibility
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import connect_to, open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.registry.rows import FIRST_ID
from kiwi_mcp.store.search_index.postgres_search import (
    CandidateFilter,
    Embeddings,
    IndexedVersion,
    PostgresSearch,
    choose_lexemes,
    lexemes_of,
    strong,
)

ANN = Actor("ann", ("team", "public"))
BOB = Actor("bob", ("other", "public"))
MODEL = "model:1"
YAML = b"tool_id: x\nversion: 1.0.0\n"


def release(
    tool_id: str,
    version: str = "1.0.0",
    *,
    words: str = "",
    namespace: str = "team",
    visibility: Visibility = "public",
    tool_type: str = "primitive",
    category: str = "",
    tags: Sequence[str] = (),
) -> CheckedRelease:
    """A release with words for its description."""
    statement: JsonObject = {
        "kind": "kiwi.item/1",
        "tool_id": tool_id,
        "version": version,
        "executor": None,
        "manifest": sha256(YAML).hexdigest(),
        "files": [],
    }
    return CheckedRelease(
        name=VersionName(namespace, tool_id, version),
        place=f"tools/{tool_id}/tool.yaml",
        statement=json.dumps(statement, sort_keys=True, separators=(",", ":")).encode(),
        manifest={
            "tool_id": tool_id,
            "tool_type": tool_type,
            "version": version,
            "description": words,
            "category": category,
            "tags": list(tags),
        },
        files=(ReleaseFile("tool.yaml", YAML),),
        visibility=visibility,
    )


def impacts(words: str) -> Mapping[str, float]:
    """Impacts as a test writes them: `mail` says a little, `mail!` much."""
    return {word.rstrip("!"): 0.7 if word.endswith("!") else 0.3 for word in words.split()}


def vector(*numbers: int) -> bytes:
    """A packed vector that begins with these numbers."""
    return bytes(number % 256 for number in (*numbers, *[0] * (384 - len(numbers)))) + b"\0\0\0\x3c"


def every(embeddings: Embeddings) -> Sequence[VersionInfo]:
    """All that cannot be found by its words yet; a walk begins anywhere, so that the last may come before the first."""
    return [one for some in iter(lambda: embeddings.without_words(9), ()) for one in some]


def fill(embeddings: Embeddings, vectors: Mapping[str, bytes] | None = None, *, size: int = 2) -> int:
    """Index whatever is missing, and return how many items that was."""
    count = 0
    while found := embeddings.without_words(size):
        embeddings.index([_leaf(one.id, one.description) for one in found])
        count += len(found)
    while vectors is not None and (found := embeddings.without_vectors(size)):
        embeddings.index([_leaf(one.id, one.description, vectors[one.name.tool_id]) for one in found])
    return count


def _leaf(version_id: str, words: str, packed: bytes = b"") -> IndexedVersion:
    return IndexedVersion(version_id, b"d" * 16, impacts(words), [len(words.split()), 1], words.encode(), packed)


def names(
    candidates: PostgresSearch, stems: str = "", *vectors: bytes, wanted: CandidateFilter | None = None
) -> set[str]:
    found = candidates.find(dict.fromkeys(stems.split(), 1.0), vectors, wanted=wanted or CandidateFilter())
    return {one.listed.name.tool_id for one in found}


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    opened = open_database(postgres_url)
    yield opened
    opened.close()


@pytest.fixture
def registry(database: Database) -> Registry:
    return Registry(database, ANN)


@pytest.fixture
def embeddings(database: Database) -> Embeddings:
    return Embeddings(database, MODEL)


@pytest.fixture
def candidates(database: Database) -> PostgresSearch:
    return PostgresSearch(database, ANN, MODEL)


def test_an_item_is_found_by_its_words_with_all_card_fields(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    registry.publish(
        [release("mailer", words="send mail!", tags=["a"], category="x/y"), release("other", words="read")]
    )
    assert names(candidates, "mail") == set()
    assert fill(embeddings) == 2
    (found,) = candidates.find({"mail": 2.0, "unheard": 1.0}, [])
    assert found.listed == replace(registry.named("mailer")[0], manifest_text="{}")
    assert (found.digest, found.words, found.vector) == (b"d" * 16, b"send mail!", b"")
    assert names(candidates, "unheard") == names(candidates) == set()


def test_the_nearest_vectors_are_found_regardless_of_words(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    registry.publish([release("east"), release("north"), release("nowhere")])
    vectors = {"east": vector(100, 3), "north": vector(0, 100), "nowhere": b""}
    fill(embeddings, vectors)
    found = candidates.find({}, [vector(90)], limit=2)
    assert {one.listed.name.tool_id: one.vector for one in found} == {name: vectors[name] for name in ("east", "north")}
    assert names(candidates, "", b"of another length") == set()


def test_an_item_is_found_by_its_name(registry: Registry, embeddings: Embeddings, candidates: PostgresSearch) -> None:
    registry.publish([release("mailer", words="x"), release("other", words="x")])
    fill(embeddings)
    assert [one.listed.name.tool_id for one in candidates.find({}, [], names=["mailer", "x"])] == ["mailer"]
    assert not candidates.find({}, [], names=["'; \0"])


def test_hidden_items_are_not_found(registry: Registry, embeddings: Embeddings, database: Database) -> None:
    seen: dict[str, Visibility] = {"all": "public", "known": "unlisted", "own": "private"}
    registry.publish([release(name, words="mail", visibility=one) for name, one in seen.items()])
    fill(embeddings, dict.fromkeys(seen, vector(1)))
    ann, bob = (PostgresSearch(database, actor, MODEL) for actor in (ANN, BOB))
    for asked in (("mail",), ("", vector(1))):
        assert names(ann, *asked) == {*seen}
        assert names(bob, *asked) == {"all"}
    assert bob.find({}, [], names=["own"]) == []
    set_visibility(registry, "team", "all", "private")
    set_visibility(registry, "team", "own", "public")
    for asked in (("mail",), ("", vector(1))):
        assert names(bob, *asked) == {"own"}


def test_yanked_items_are_not_found_and_deprecated_ones_are(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    first = registry.publish([release("mailer", words="mail old")])[0]
    fill(embeddings)
    registry.set_status([first.name], "deprecate")
    assert names(candidates, "mail") == {"mailer"}
    registry.set_status([first.name], "yank")
    assert names(candidates, "mail") == set()
    registry.set_status([first.name], "unyank")
    assert names(candidates, "mail") == {"mailer"}


def test_a_new_version_replaces_the_previous_one(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    registry.publish([release("mailer", words="mail old")])
    fill(embeddings, {"mailer": vector(1)})
    registry.publish([release("mailer", "1.1.0", words="mail new")])
    # Until it is indexed it is found as it was, and given as it is.
    (found,) = candidates.find({"old": 1.0}, [])
    assert found.listed.name.version == "1.1.0"
    assert fill(embeddings) == 1
    assert names(candidates, "old") == set()
    assert names(candidates, "new") == {"mailer"}
    assert names(candidates, "", vector(1)) == set()
    assert candidates.counts(["mail", "old", "new"]) == (1, {"mail": 1, "new": 1}, (2.0, 1.0))


def test_filters_apply_to_words_and_vectors(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    registry.publish(
        [
            release("one", words="mail", category="crm/mail", tags=["fast", "o'clock"]),
            release("two", words="mail", category="crm", tool_type="knowledge"),
            release("three", words="mail", namespace="public", category="crmx"),
        ]
    )
    fill(embeddings, dict.fromkeys(("one", "two", "three"), vector(1)))
    expected = {
        CandidateFilter(namespaces=("team",)): {"one", "two"},
        CandidateFilter(tool_types=("knowledge", "api")): {"two"},
        CandidateFilter(tags=("o'clock",)): {"one"},
        CandidateFilter(categories=("crm",)): {"one", "two"},
        CandidateFilter(categories=("crm/mail", "none"), namespaces=("team",)): {"one"},
        CandidateFilter(namespaces=("nobody",)): set(),
    }
    for wanted, found in expected.items():
        assert names(candidates, "mail", wanted=wanted) == found
        assert names(candidates, "", vector(1), wanted=wanted) == found


def test_the_nearest_vectors_are_found_behind_hundreds_of_filtered_ones(
    registry: Registry, embeddings: Embeddings, database: Database, postgres_url: str
) -> None:
    # An approximate index can lose one of them, and does not lose all.
    far = {f"far{number}" for number in range(20)}
    registry.publish([*map(release, far), *(release(f"t{number}", namespace="public") for number in range(400))])
    chance = Random(1)
    near = {f"t{number}": vector(40, *(chance.randrange(-9, 9) for _ in range(383))) for number in range(400)}
    wanted = {name: vector(-40, *(chance.randrange(-9, 9) for _ in range(383))) for name in far}
    fill(embeddings, {**near, **wanted}, size=500)
    with database.transaction() as transaction:
        # So few rows would be read one after the other.
        name = postgres_url.rpartition("/")[2]
        transaction.run_script(
            f"alter database {name} set enable_seqscan = off; alter database {name} set enable_sort = off"
        )
    beside = connect_to(postgres_url)
    found = names(PostgresSearch(beside, ANN, MODEL), "", vector(100), wanted=CandidateFilter(namespaces=("team",)))
    beside.read("select pg_stat_force_next_flush()")
    scans = beside.read("select idx_scan > 0 from pg_stat_user_indexes where indexrelname = 'idx_tool_hnsw'")
    assert (bool(found), found <= far, scans) == (True, True, [(True,)])
    beside.close()


def test_term_counts_match_the_current_items(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    assert candidates.counts(["mail"]) == (0, {}, ())
    registry.publish(
        [release("one", words="mail! send"), release("two", words="mail"), release("three", words="读 it's")]
    )
    fill(embeddings)
    assert candidates.counts(["mail", "send", "读", "it's", "unheard"]) == (
        3,
        {"mail": 2, "send": 1, "读": 1, "it's": 1},
        (5 / 3, 1.0),
    )
    assert names(candidates, "读") == names(candidates, "it's") == {"three"}
    assert candidates.beginning_with("ma", 5) == {"mail": 2}
    assert candidates.beginning_with("x", 5) == {}
    assert embeddings.progress() == (3, 0)


def test_an_indexed_item_is_not_assigned_again(registry: Registry, embeddings: Embeddings, database: Database) -> None:
    registry.publish([release(f"t{number}", words="mail") for number in range(5)])
    vectors = {f"t{number}": vector(number + 1) for number in range(5)}
    assert fill(embeddings, vectors) == 5
    assert embeddings.progress() == (5, 5)
    assert fill(embeddings) == fill(Embeddings(database, MODEL)) == 0
    assert not embeddings.without_vectors(9)
    registry.publish([release("t1", "2.0.0", words="mail"), release("new", words="mail")])
    assert {str(one.name) for one in every(embeddings)} == {"team/t1@2.0.0", "team/new@1.0.0"}


def test_an_item_that_is_never_indexed_is_not_assigned_forever(registry: Registry, embeddings: Embeddings) -> None:
    registry.publish([release(f"t{number}") for number in range(3)])
    given = [one.name.tool_id for _ in range(9) for one in embeddings.without_words(2)]
    assert sorted(given) == ["t0", "t1", "t2"]


def test_an_item_that_could_not_be_written_is_assigned_again(
    registry: Registry, embeddings: Embeddings, database: Database
) -> None:
    registry.publish([release("one"), release("two")])
    leaves = [_leaf(one.id, "mail") for one in every(embeddings)]
    with database.transaction() as transaction:
        transaction.write("alter table embedding_lexemes rename to elsewhere")
    with pytest.raises(KiwiError):
        embeddings.index(leaves)
    with database.transaction() as transaction:
        transaction.write("alter table elsewhere rename to embedding_lexemes")
    assert embeddings.progress() == (0, 0)
    assert fill(embeddings) == 2


def test_a_damaged_row_is_replaced_and_counted_once(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch
) -> None:
    registry.publish([release("one", words="mail send"), release("two", words="mail")])
    vectors = {"one": vector(1), "two": vector(2)}
    fill(embeddings, vectors)
    before = candidates.counts(["mail", "send"])
    (one,) = (found.listed.id for found in candidates.find({"send": 1.0}, ()))

    embeddings.remove([one, FIRST_ID])

    assert embeddings.progress() == (1, 1)
    assert candidates.counts(["mail", "send"])[:2] == (1, {"mail": 1})
    assert fill(embeddings, vectors) == 1
    assert (candidates.counts(["mail", "send"]), embeddings.progress()) == (before, (2, 2))
    assert names(candidates, "send") == {"one"}


def test_two_concurrent_kernels_count_nothing_twice(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch, postgres_url: str
) -> None:
    registry.publish([release(f"t{number}", words="mail send") for number in range(6)])
    beside = connect_to(postgres_url)
    other = Embeddings(beside, MODEL)
    mine, theirs = every(embeddings), every(other)
    assert len(theirs) == 6
    for one, two in zip(mine, theirs, strict=True):
        embeddings.index([_leaf(one.id, "mail send", vector(1))])
        other.index([_leaf(two.id, "mail send")])
    assert candidates.counts(["mail", "send"]) == (6, {"mail": 6, "send": 6}, (2.0, 1.0))
    assert embeddings.progress() == (6, 6)
    beside.close()


def test_several_models_coexist_and_an_unused_one_is_removed(
    registry: Registry, embeddings: Embeddings, candidates: PostgresSearch, database: Database
) -> None:
    registry.publish([release("one", words="mail")])
    older = Embeddings(database, "older")
    assert fill(older) == fill(embeddings) == 1
    with database.transaction() as transaction:
        transaction.write("update embedding_models set used_on = 1 where model = 'older'")
    embeddings.maintain()
    embeddings.maintain()
    assert database.read("select distinct model from tool_embeddings") == [(MODEL,)]
    assert database.read("select distinct model from embedding_lexemes") == [(MODEL,)]
    assert names(candidates, "mail") == {"one"}


def test_a_server_without_pgvector_finds_by_words(postgres_url: str) -> None:
    database = open_database(postgres_url)
    with database.transaction() as transaction:
        transaction.run_script("drop extension vector cascade; alter table tool_embeddings add column embedding bytea;")
    Registry(database, ANN).publish([release("one", words="mail"), release("two", words="read")])
    fill(Embeddings(database, MODEL), dict.fromkeys(("one", "two"), vector(1)))
    candidates = PostgresSearch(database, ANN, MODEL)
    (found,) = candidates.find({"mail": 1.0}, [vector(1)])
    assert (found.listed.name.tool_id, found.vector) == ("one", vector(1))
    database.close()


def test_rare_words_are_matched_in_full_and_common_ones_selectively() -> None:
    held = {"rare": 10, strong("rare"): 2, "common": 900, strong("common"): 80, "everywhere": 5_000}
    weights = {"rare": 5.0, "common": 2.0, "everywhere": 0.1, "unheard": 9.0}
    assert {*choose_lexemes(weights, held, 100)} == {"rare", strong("rare"), strong("common")}
    assert {*choose_lexemes(weights, held, 1_000)} == {"rare", strong("rare"), "common", strong("common")}
    assert choose_lexemes({"everywhere": 1.0}, held, 100) == ["everywhere"]
    assert choose_lexemes({}, held, 100) == []


def test_a_significant_stem_is_two_lexemes() -> None:
    assert lexemes_of({"little": 0.1, "much": 0.7}) == {"little": "D", "much": "A", strong("much"): "A"}
