"""The minimum isolation level of code, from its origin, along a whole chain."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.isolation import LEVELS, Level, Provenance, strictest
from kiwi_mcp.domain.items import Chain, Location, Manifest, Source, Tool, TypeTraits
from kiwi_mcp.policy.isolation import change_of, decide_isolation, default_isolation, remedy
from kiwi_mcp.sandbox.levels import floor

PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)


def link(source: Source = "project", asked: str | None = None, name: str = "say") -> Tool:
    extra = {} if asked is None else {"isolation": asked}
    return Tool(
        Manifest(name, "script", "1.0.0", extra=extra), Location(source, Path("say.yaml"), Path()), digest="d" * 64
    )


def chain(*links: Tool) -> Chain:
    return Chain(
        (*links, link("builtin", name="subprocess")), (TypeTraits("process", "call"), *[TypeTraits()] * len(links))
    )


@pytest.mark.parametrize(
    ("provenance", "level"),
    [
        ("builtin", "trusted"),
        ("owner_pinned", "trusted"),
        ("owner_relaxed", "standard"),
        ("owner_written", "sandboxed"),
        ("model_written", "sandboxed"),
        ("known_publisher", "sandboxed"),
        ("mcp_server", "sandboxed"),
        ("unknown", "restricted"),
    ],
)
def test_each_origin_has_a_minimum_level(provenance: Provenance, level: Level) -> None:
    assert decide_isolation(chain(link()), [provenance, "builtin"]).level == level


@pytest.mark.req("K-IS-01")
def test_the_strictest_link_decides_in_any_position() -> None:
    links = chain(link(name="tool"), link(name="runtime"))
    for origins in (["owner_written", "unknown", "builtin"], ["unknown", "owner_written", "builtin"]):
        found = decide_isolation(links, origins)  # type: ignore[arg-type]  # words of the literal, in a list
        assert (found.level, found.provenance) == ("restricted", "unknown")
        assert found.decisive.provenance == "unknown"


levels = st.sampled_from(LEVELS)
words = st.one_of(st.none(), levels, st.just("anything"))


@given(asked=words, below=words, origin=st.sampled_from(PROVENANCES), relaxed=st.one_of(st.none(), levels))
def test_no_item_runs_below_its_manifest_level_or_minimum_level_without_a_relaxation(
    asked: str | None, below: str | None, origin: Provenance, relaxed: Level | None
) -> None:
    found = decide_isolation(
        chain(link(asked=asked), link(asked=below, name="runtime")), [origin, "builtin", "builtin"], relaxed
    )
    for word in filter(None, (asked, below)):
        assert strictest([found.level, word]) == found.level
    least = relaxed or floor(origin)
    assert strictest([found.level, least]) == found.level
    if asked is None and below is None:
        assert found.level == least


def test_an_item_without_a_known_author_has_unknown_origin() -> None:
    found = default_isolation(chain(link("user")))
    assert (found.level, found.provenance) == ("restricted", "unknown")
    assert default_isolation(chain(link("builtin"))).level == "trusted"


def test_the_deciding_link_is_reported() -> None:
    own = decide_isolation(chain(link()), ["owner_written", "builtin"])
    assert own.to_json()["decided_by"] == "project/local/say@1.0.0"
    asking = decide_isolation(chain(link(asked="restricted")), ["owner_written", "builtin"])
    assert (asking.to_json()["decided_by"], asking.asked) == ("manifest", "restricted")
    relaxed = decide_isolation(chain(link()), ["owner_written", "builtin"], "trusted")
    assert (relaxed.to_json()["decided_by"], relaxed.provenance) == ("owner", "owner_pinned")


def test_the_way_to_change_the_level_is_reported() -> None:
    tool = link()
    assert "kiwi sign say" in change_of(tool, decide_isolation(chain(tool), ["unknown", "builtin"]))
    assert "kiwi relax say" in change_of(tool, decide_isolation(chain(tool), ["owner_written", "builtin"]))
    assert "--undo" in change_of(tool, decide_isolation(chain(tool), ["owner_written", "builtin"], "standard"))
    asking = link(asked="restricted")
    assert "asks for restricted" in change_of(asking, decide_isolation(chain(asking), ["owner_written", "builtin"]))
    assert change_of(tool, decide_isolation(chain(link("builtin")), ["builtin", "builtin"])) == ""
    below = chain(tool, link(name="runtime"))
    assert "kiwi sign runtime" in change_of(tool, decide_isolation(below, ["owner_written", "unknown", "builtin"]))
    assert "key" in remedy("unknown", "registry/public/say@1.0.0")
