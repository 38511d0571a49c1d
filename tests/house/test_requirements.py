"""Requirements and tests refer to each other, in both directions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypedDict

import pytest
import yaml


class Entry(TypedDict, total=False):
    title: str
    built: bool
    staged: bool
    partly: str
    pending: str


Page = Mapping[str, Entry]


@pytest.fixture(scope="module")
def requirements(root: Path) -> Page:
    return read_page(root / "tests" / "requirements.yaml")


@pytest.fixture(scope="module")
def cases(root: Path) -> Page:
    return read_page(root / "tests" / "security_cases.yaml")


@pytest.fixture(scope="module")
def claims(root: Path) -> Mapping[str, frozenset[str]]:
    """The ids that tests claim, by mark."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("*.py")))
    found = [claim for text in texts if "mark.req" in text or "mark.case" in text for claim in claims_in(text)]
    return {mark: frozenset(claimed for name, claimed in found if name == mark) for mark in ("req", "case")}


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    ids = re.findall(r"^([A-Z][\w-]*):", text, re.MULTILINE)
    assert len(ids) == len(set(ids)), f"{path.name} lists an id twice"
    page: Page = yaml.safe_load(text)
    return page


def claims_in(source: str) -> Iterator[tuple[str, str]]:
    """Every id in a `pytest.mark.req(...)` or `pytest.mark.case(...)`, without importing the test."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="mark"), attr=("req" | "case") as mark), args=args
            ):
                for arg in args:
                    assert isinstance(arg, ast.Constant), (
                        f"line {arg.lineno}: an id is written out, so that it can be found"
                    )
                    yield mark, str(arg.value)


def marked(page: Page, word: str) -> set[str]:
    return {id_ for id_, entry in page.items() if entry.get(word)}


def listed(ids: AbstractSet[str]) -> str:
    return ", ".join(sorted(ids))


def test_every_entry_has_a_title_and_is_either_done_or_pending_with_a_reason(requirements: Page, cases: Page) -> None:
    for page, done in ((requirements, "built"), (cases, "staged")):
        for id_, entry in page.items():
            assert entry["title"].strip(), id_
            assert set(entry) in ({"title", done}, {"title", "partly"}, {"title", "pending"}), id_
            assert entry.get(done, True) is True, id_
            for word in ("partly", "pending"):
                assert str(entry.get(word, "why")).strip(), f"{id_} is `{word}` without a reason"


def test_every_built_requirement_is_claimed_by_a_test(requirements: Page, claims: Mapping[str, frozenset[str]]) -> None:
    unclaimed = (marked(requirements, "built") | marked(requirements, "partly")) - claims["req"]
    assert not unclaimed, f"built, and no test claims them: {listed(unclaimed)}"


def test_every_claimed_requirement_is_built_at_least_partly(
    requirements: Page, claims: Mapping[str, frozenset[str]]
) -> None:
    unbuilt = claims["req"] & marked(requirements, "pending")
    assert not unbuilt, f"claimed by a test, and neither `built: true` nor `partly: why`: {listed(unbuilt)}"


def test_every_claimed_requirement_exists(requirements: Page, claims: Mapping[str, frozenset[str]]) -> None:
    unknown = claims["req"] - set(requirements)
    assert not unknown, f"claimed, and not in tests/requirements.yaml: {listed(unknown)}"


def test_the_staged_cases_are_exactly_those_that_tests_claim(cases: Page, claims: Mapping[str, frozenset[str]]) -> None:
    staged = marked(cases, "staged")
    unclaimed, unmarked = staged - claims["case"], claims["case"] - staged
    assert not unclaimed, f"staged, and no test claims them: {listed(unclaimed)}"
    assert not unmarked, f"claimed by a test, and not `staged: true` in tests/security_cases.yaml: {listed(unmarked)}"


@pytest.mark.parametrize(
    ("page", "source", "pattern"),
    [
        ("requirements", "REQUIREMENTS.md", r"^\| (K-[A-Z]{2}-\d\d|[A-Z]\d+|SR\d)\b"),
        ("cases", "security-cases.md", r"^\| ([A-Z]+-\d\d) \|"),
    ],
)
def test_the_ids_match_the_specification_if_it_is_present(
    page: str, source: str, pattern: str, root: Path, request: pytest.FixtureRequest
) -> None:
    ids = set(request.getfixturevalue(page))
    specification = root.parent / "shared" / source
    text = specification.read_text(encoding="utf-8") if specification.exists() else ""
    wanted = set(re.findall(pattern, text, re.MULTILINE))
    found_in_trials = {one for one in ids if one.startswith("TR-")}
    assert ids - found_in_trials == (wanted or ids) - found_in_trials
