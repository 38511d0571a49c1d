"""Lookalike names of publishers."""

from __future__ import annotations

import pytest

from kiwi_mcp.manifest.trust import Trusted, TrustedKey
from kiwi_mcp.policy.admission import lookalikes, looks_like


@pytest.mark.case("UNI-04")
@pytest.mark.parametrize(
    ("one", "other"),
    [("acrne", "acme"), ("acme-", "acme"), ("ac_me", "acme"), ("g00gle", "google"), ("paypa1", "paypal"),
     ("vvidget", "widget"), ("gihtub", "github"), ("githubb", "github"), ("githu", "github"), ("kiwl", "kiwi")],
)  # fmt: skip
def test_similar_names_are_reported(one: str, other: str) -> None:
    assert looks_like(one, other)
    assert looks_like(other, one)


@pytest.mark.parametrize(("one", "other"), [("acme", "globex"), ("abc", "abd"), ("team-a", "team-red"), ("ann", "bob")])
def test_different_names_are_not_reported(one: str, other: str) -> None:
    assert not looks_like(one, other)


def test_a_publisher_is_compared_with_known_publishers_and_the_owner() -> None:
    trusted = Trusted(publishers={"acme": {"k": TrustedKey("k")}, "public/greet": {"k": TrustedKey("k")}})

    assert lookalikes("acrne", trusted) == ("acme",)
    assert lookalikes("acme", trusted) == ()
    assert lookalikes("rnine", trusted, ["mine"]) == ("mine",)
    assert lookalikes("public/other", trusted) == ()
    assert lookalikes("kiwl", trusted) == ("kiwi",)
    assert lookalikes("globex", trusted, published=["g1obex", "other"]) == ("g1obex",)
    assert lookalikes("acme", trusted, published=["acrne"]) == ()
