"""Tools are not a component: every concern has one owner, and no package is called tools."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

CONCERNS = {
    *("definition", "code", "instructions", "preferences", "plumbing"),
    *("discovery", "execution", "results", "permission", "installation"),
}


@pytest.fixture(scope="module")
def owners(root: Path) -> list[tuple[str, str]]:
    page = (root / "docs" / "ownership.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (\w+) \| `(\w+)` \|", page, re.MULTILINE)


@pytest.mark.req("A2")
def test_each_concern_has_one_owner_that_exists(owners: list[tuple[str, str]], root: Path) -> None:
    assert sorted(concern for concern, _ in owners) == sorted(CONCERNS)
    for _, owner in owners:
        assert (root / "src" / "kiwi_mcp" / owner / "__init__.py").exists(), owner


@pytest.mark.req("A2")
def test_no_package_collects_the_concerns_or_is_called_tools(owners: list[tuple[str, str]], root: Path) -> None:
    # The owner's file holds both what they prefer and what they permit; beyond that pair nothing is shared.
    shared = [owner for owner, count in Counter(owner for _, owner in owners).items() if count > 1]
    assert shared == ["policy"]
    assert {concern for concern, owner in owners if owner == "policy"} == {"preferences", "permission"}
    package = root / "src" / "kiwi_mcp"
    packages = [path.relative_to(package) for path in package.rglob("tools") if path.is_dir()]
    assert [str(path) for path in packages if path.parts[0] != "data"] == []


@pytest.mark.req("A2")
def test_only_what_executes_wires_or_translates_uses_many_owners(
    owners: list[tuple[str, str]], modules: Mapping[str, ast.Module]
) -> None:
    """A package that collected concerns would import their owners."""
    packages, used = {owner for _, owner in owners}, defaultdict[str, set[str]](set)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kiwi_mcp."):
                used[Path(path).parts[0]].add((node.module or "").split(".")[1])
    many = {package for package, some in used.items() if len(packages & some - {package}) > 3}
    assert many == {"drivers", "kernel", "surfaces"}
    # Nothing below them knows who executes or installs.
    assert {package for package, some in used.items() if "drivers" in some} == {"drivers", "kernel"}
    assert {package for package, some in used.items() if "kernel" in some} == {"__init__.py", "kernel", "surfaces"}
