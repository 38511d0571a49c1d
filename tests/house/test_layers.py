"""The layers: import rules, low-level modules, and branches on types."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

import kiwi_mcp
from kiwi_mcp.domain.items import Source

SRC = Path(kiwi_mcp.__file__).parent
METAL = {
    *("create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"),
    *("open_connection", "create_connection", "open_unix_connection", "open_process", "run_process", "connect_tcp"),
    *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"),
    *("execl", "execle", "execlp", "execv", "execve", "execvp", "execvpe", "spawnv", "spawnve"),
    *("reveal", "reveal_json"),
}
"""The functions that start a process, open an outbound connection, or give a secret's value."""

METAL_MODULES = {"asyncio.subprocess", "ftplib", "http.client", "imaplib", "pty", "smtplib", "urllib.request"}
"""Modules of the standard library that reach the world; the linter knows whole packages only and cannot name them."""

MAY_PASS_VARIABLES_ON = {"drivers/environments/packages.py"}
"""Installers are given the variables that say where packages are and how to reach them."""

KINDS = {"primitive", "runtime", "mcp_server", "mcp_tool", "script", "api", "directive", "knowledge", "composite"}
WORDS_FOR_THE_TYPE = {"tool_type", "written_type"}


def above_the_metal(modules: Mapping[str, ast.Module]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in modules.items():
        if not path.startswith("primitives/"):
            yield from ((path, node) for node in ast.walk(tree))


def imported_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)


def strings_in(node: ast.AST) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def speaks_of_the_type(node: ast.AST) -> bool:
    """Whether an expression is a tool's type: `x.tool_type`, `tool_type`, `x["tool_type"]`, `x.get("tool_type")`."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.Constant(value=str(word)) if (
                word in WORDS_FOR_THE_TYPE
            ):
                return True
    return False


def asks_for_the_type(node: ast.AST) -> bool:
    """Whether a node branches on what type a tool has; comparing with what a caller asked for is no branch."""
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            named = set[str]().union(*map(strings_in, sides))
            constants = any(isinstance(side, ast.Name | ast.Attribute) and _is_constant(side) for side in sides)
            typed = any(map(speaks_of_the_type, sides))
            return bool(named & KINDS) or (typed and (constants or bool(named - WORDS_FOR_THE_TYPE)))
        case ast.Match(subject=subject, cases=cases):
            return speaks_of_the_type(subject) or any(strings_in(case.pattern) & KINDS for case in cases)
        case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith")):
            return speaks_of_the_type(value)
        case ast.Subscript(value=ast.Dict(), slice=key):
            return speaks_of_the_type(key)
    return False


def _is_constant(node: ast.Name | ast.Attribute) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr
    return name.isupper()


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-PR-03")
def test_imports_run_one_way_and_only_primitives_import_low_level_modules(root: Path) -> None:
    lint = subprocess.run(
        [Path(sys.prefix, "bin", "lint-imports"), "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.req("K-PR-03")
def test_only_primitives_import_standard_library_modules_with_outside_effects(
    modules: Mapping[str, ast.Module],
) -> None:
    found = [
        f"{path} {name}"
        for path, node in above_the_metal(modules)
        for name in imported_by(node)
        if name in METAL_MODULES
    ]
    assert found == []


@pytest.mark.req("K-PR-03")
def test_only_primitives_start_processes_open_connections_or_reveal_secrets(
    modules: Mapping[str, ast.Module],
) -> None:
    found = [
        f"{path}:{node.lineno} {name}"
        for path, node in above_the_metal(modules)
        if isinstance(node, ast.Call)
        for name in [node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")]
        if name in METAL
    ]
    assert found == []


@pytest.mark.req("K-PR-03")
def test_only_named_environment_variables_are_read(modules: Mapping[str, ast.Module]) -> None:
    """A literal name is a setting of Kiwi's own; a computed name could be a variable of the user."""
    named = {
        id(node.value)
        for _, node in above_the_metal(modules)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    } | {
        id(node.func.value)
        for _, node in above_the_metal(modules)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    found = [
        f"{path}:{node.lineno}"
        for path, node in above_the_metal(modules)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb"} and id(node) not in named
        if path not in MAY_PASS_VARIABLES_ON
    ]
    assert found == []


@pytest.mark.req("A4")
def test_only_the_manifest_layer_branches_on_the_type_of_a_tool(modules: Mapping[str, ast.Module]) -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)} {ast.unparse(node).partition(chr(10))[0]}"
        for path, tree in modules.items()
        if not path.startswith("manifest/")
        for node in ast.walk(tree)
        if asks_for_the_type(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    "branch",
    [
        "tool.manifest.tool_type == 'api'",
        "row['tool_type'] in ('api', 'script')",
        "manifest.tool_type in RUNNABLE",
        "kind != 'mcp_tool'",
        "tool_type.endswith('_server')",
        "{'api': 1}[manifest.tool_type]",
        "match manifest.tool_type:\n  case _: pass",
    ],
)
def test_the_rule_on_types_sees_a_branch_in_each_of_its_forms(branch: str) -> None:
    assert any(map(asks_for_the_type, ast.walk(ast.parse(branch))))


@pytest.mark.parametrize("use", ["card.tool_type in wanted", "sheets[manifest.tool_type]", "status == 'error'"])
def test_the_rule_on_types_leaves_lookups_and_filters_alone(use: str) -> None:
    assert not any(map(asks_for_the_type, ast.walk(ast.parse(use))))


def test_every_module_docstring_is_one_sentence(modules: Mapping[str, ast.Module]) -> None:
    found = [
        path
        for path, tree in modules.items()
        if not (ast.get_docstring(tree) or "").partition("\n")[0].endswith((".", "…"))
    ]
    assert found == []


NAMES: Mapping[str, frozenset[str]] = {
    "driver": frozenset({"http", "llm", "mcp", "process", "read"}),
    "source": frozenset(get_args(Source)),
    "surface": frozenset({"cli", "mcp", "gateway", "console", "python"}),
}
"""The names that data uses for drivers, for sources of items, and for surfaces."""
MAY_ASK = {"source": ("catalog/",)}
"""The packages that own such names, and may ask for them."""


def asks_for_a_name(node: ast.AST) -> Iterator[str]:
    """Yield which kinds of names a node compares with: `x.driver == "mcp"`, `source in {"project", "user"}`."""
    match node:
        case ast.Compare(left=left, comparators=others):
            sides, named = [left, *others], strings_in(node)
        case ast.Match(subject=subject, cases=cases):
            sides, named = [subject], set[str]().union(*(strings_in(case.pattern) for case in cases))
        case _:
            return
    words = {getattr(side, "attr", getattr(side, "id", "")) for side in sides}
    yield from (word for word, names in NAMES.items() if word in words and named & names)


@pytest.mark.req("A4")
def test_no_code_asks_for_the_name_of_a_driver_a_source_or_a_surface(modules: Mapping[str, ast.Module]) -> None:
    """The traits of types and sources say what code has to know."""
    found = [
        f"{path}:{getattr(node, 'lineno', 0)} {ast.unparse(node).partition(chr(10))[0]}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        for word in asks_for_a_name(node)
        if not path.startswith(MAY_ASK.get(word, ()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ['chain.driver == "mcp"', 'tool.origin.source in {"project", "user"}', 'surface != "cli"', '"http" == plan.driver'],
)
def test_a_comparison_with_such_a_name_is_found(code: str) -> None:
    assert [*asks_for_a_name(ast.parse(code, mode="eval").body)]
