"""Look-alikes: names that a reader takes for another's, and names that they do not."""

from __future__ import annotations

import pytest

from kiwi_mcp.kernel.keys.lookalikes import alike, looks_like
from kiwi_mcp.manifest.trust import Key, Trusted


@pytest.mark.case("UNI-04")
@pytest.mark.parametrize(
    ("one", "other"),
    [("acrne", "acme"), ("acme-", "acme"), ("ac_me", "acme"), ("g00gle", "google"), ("paypa1", "paypal"),
     ("vvidget", "widget"), ("gihtub", "github"), ("githubb", "github"), ("githu", "github"), ("kiwl", "kiwi")],
)  # fmt: skip
def test_names_that_look_alike_are_told(one: str, other: str) -> None:
    assert looks_like(one, other)
    assert looks_like(other, one)


@pytest.mark.parametrize(("one", "other"), [("acme", "globex"), ("abc", "abd"), ("team-a", "team-red"), ("ann", "bob")])
def test_names_that_differ_are_not(one: str, other: str) -> None:
    assert not looks_like(one, other)


def test_a_publisher_is_held_against_those_that_are_known_and_the_owners_own() -> None:
    trusted = Trusted(publishers={"acme": {"k": Key("k")}, "public/greet": {"k": Key("k")}})

    assert alike("acrne", trusted) == ("acme",)
    assert alike("acme", trusted) == ()
    assert alike("rnine", trusted, ["mine"]) == ("mine",)
    assert alike("public/other", trusted) == ()
    assert alike("kiwl", trusted) == ("kiwi",)
