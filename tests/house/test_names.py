"""One class name exists once in the project: one term, one concept."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping


def test_every_public_class_name_is_defined_once(modules: Mapping[str, ast.Module]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_types_are_structs_and_not_dataclasses(modules: Mapping[str, ast.Module]) -> None:
    decorated = [
        f"{path}: {node.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    ]
    assert decorated == []
