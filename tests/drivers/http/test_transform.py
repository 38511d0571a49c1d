"""Response transforms, at a cost that is known in advance."""

from __future__ import annotations

from time import process_time

import pytest

from kiwi_mcp.domain.errors import InvalidManifest, TooLarge
from kiwi_mcp.domain.json import Json
from kiwi_mcp.drivers.http import transform

BOOKS: Json = {"books": [{"name": "a", "price": 5}, {"name": "b", "price": 15}], "owner": {"name": "Ada"}, "none": None}


@pytest.mark.parametrize(
    ("path", "result"),
    [
        ("$", BOOKS),
        ("$.owner.name", "Ada"),
        ("$['owner']['name']", "Ada"),
        ("$.none", None),
        ("$.lost", None),
        ("$.lost[*]", []),
        ("$.books[0]", {"name": "a", "price": 5}),
        ("$.books[0:1]", [{"name": "a", "price": 5}]),
        ("$.books[*].name", ["a", "b"]),
        ("$..name", ["a", "b", "Ada"]),
        ("$.books[?@.price < 10].name", ["a"]),
        ("$.books[-1].price", 15),
    ],
)
def test_a_path_that_names_one_value_gives_it_and_any_other_a_list(path: str, result: Json) -> None:
    found = transform(path, BOOKS)

    assert sorted(map(str, found)) == sorted(map(str, result)) if isinstance(found, list) else found == result  # type: ignore[arg-type]  # a list is compared with a list


@pytest.mark.parametrize("path", ["books", "$.", "$[", "$.a[?match(@.b, 'x')]", "$..", "$ | $", "$" + "[?@" * 2_000])
def test_an_invalid_path_is_an_issue_of_the_manifest(path: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        transform(path, BOOKS)
    assert refused.value.issues[0].place == "config.response_transform"


@pytest.mark.case("BOMB-11")
@pytest.mark.parametrize("path", ["$..*..*", "$..*..*..*", "$[?count($..*) > 1]", "$[?count($[*]) > 1]", "$..[?@..a]"])
def test_a_path_of_exponential_cost_is_refused_at_once(path: str) -> None:
    started = process_time()

    with pytest.raises(TooLarge):
        transform(path, list(range(20_000)))

    assert process_time() - started < 3


def test_a_plain_path_works_on_a_long_reply() -> None:
    rows: Json = [{"n": number} for number in range(20_000)]

    assert transform("$[?@.n == 7].n", rows) == [7]
    assert transform("$..n", rows) == list(range(20_000))
