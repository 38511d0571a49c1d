"""One class name exists once in the project: one term, one concept."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path


def test_every_public_class_name_is_defined_once(root: Path) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    source = root / "src" / "kiwi_mcp"
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(source)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_types_are_structs_and_not_dataclasses(root: Path) -> None:
    decorated = [
        f"{path.name}: {node.name}"
        for path in (root / "src" / "kiwi_mcp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    ]
    assert decorated == []
