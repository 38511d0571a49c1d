"""How an old Python script is called, and what it finds around it; it is read, never run."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import as_list, as_object, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.formats import is_variable, package_name
from kiwi_mcp.manifest.python_source import ENTRY_FUNCTIONS

SHARED_CODE = "lib"
"""The folder below `tools`, and of old below `scripts`, with code that tools share."""
_GIVEN = {"PATH", "HOME", "LANG", "TMPDIR", "USER", "KIWI_PROJECT", "KIWI_TOOL_ID"}
"""The variables that every process gets."""
_PACKAGES: Mapping[str, str] = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "git": "gitpython", "jwt": "pyjwt", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
"""Packages that have modules of another name."""
_PLAIN = lazy_pattern(r"[\w ./:@,+-]{0,200}", re.ASCII)
_MAX_SIGNATURE = 200
_INERT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


class ScriptFacts(Struct, frozen=True):
    """What a Python file counts on."""

    entry: str
    """The function it is called by, as it is written; `script` where it runs from top to bottom."""
    modules: tuple[str, ...]
    """What it imports, dotted; names taken from a module too, since they may be modules themselves."""
    packages: tuple[str, ...]
    """The first parts of what it imports from outside itself."""
    needed: frozenset[str]
    """Those of them without which it does not even begin: imported at the top, with nothing tried in their place."""
    is_relative: bool
    """Whether it imports from its own package, which a file that is run does not have."""
    variables: Mapping[str, str | None]
    """The variables it reads: what it uses where one is not set, or None where it must be."""
    is_module: bool
    """Whether it only defines things for others to import."""


def read_script_facts(text: str) -> ScriptFacts | None:
    """Return the facts of a Python file, or None where it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the author's source is warned about is not this reader's to print
            return _facts(ast.parse(text))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _facts(tree: ast.Module) -> ScriptFacts:
    nodes = list(ast.walk(tree))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    entry = next((functions[name] for name in ENTRY_FUNCTIONS if name in functions), None)
    inward = [name for node in nodes if _is_relative(node) for name in _imported(node)]
    outward = [name for node in nodes if not _is_relative(node) for name in _imported(node)]
    return ScriptFacts(
        entry=f"{entry.name}({ast.unparse(entry.args)})"[:_MAX_SIGNATURE] if entry else "script",
        modules=tuple(dict.fromkeys((*outward, *inward))),
        packages=tuple(dict.fromkeys(name.partition(".")[0] for name in outward)),
        needed=frozenset(
            name.partition(".")[0] for node in tree.body if not _is_relative(node) for name in _imported(node)
        ),
        is_relative=bool(inward),
        variables=_variables(nodes),
        is_module=entry is None and all(_is_inert(node) for node in tree.body),
    )


def _imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=None, names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)


def _is_relative(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level > 0


def _is_inert(node: ast.stmt) -> bool:
    return isinstance(node, _INERT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _variables(nodes: Collection[ast.AST]) -> Mapping[str, str | None]:
    found: dict[str, str | None] = {}
    for node in nodes:
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="environ") | ast.Name(id="environ"),
                slice=ast.Constant(value=str(name)),
                ctx=ast.Load(),
            ):
                found[name] = None
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *spare]) if _reads_variable(called):
                found.setdefault(name, _spare(spare))
    return {name: spare for name, spare in found.items() if name not in _GIVEN and is_variable(name)}


def _reads_variable(called: ast.expr) -> bool:
    match called:
        case ast.Attribute(attr="getenv") | ast.Name(id="getenv"):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ") | ast.Name(id="environ"), attr="get"):
            return True
        case _:
            return False


def _spare(written: list[ast.expr]) -> str | None:
    """Return what is used in place of a variable; a text that a manifest cannot hold makes it one that must be set."""
    match written:
        case [] | [ast.Constant(value=None)]:
            return ""
        case [ast.Constant(value=str(text))] if _PLAIN.fullmatch(text):
            return text
        case _:
            return None


def script_faults(
    facts: ScriptFacts, manifest: Manifest, beside: Collection[str], *, is_folder: bool
) -> Iterator[Issue]:
    """Yield what the file expects and will not find; `beside` are the modules next to it."""
    if beside and not is_folder:
        listed = ", ".join(f"`{name}`" for name in sorted(beside))
        fix = "Migrate with `rewrite` (`--rewrite`): the tool becomes a folder that has them."
        yield Issue("", f"imports {listed} from beside it, and a tool of one file runs alone", fix)
    if facts.is_relative:
        fix = "Write `from name import …` in place of `from .name import …`."
        yield _warning("", "imports from its own package, which a file that is run does not have", fix)
    for module, package in undeclared_packages(facts, manifest, beside).items():
        fix = (
            f"If `{module}` was a file beside it, migrate the folder that has it with `rewrite` (`--rewrite`); if it "
            f"is a package you know, add `{package}` to `config.requires` (in Python: `DEPENDENCIES`)."
        )
        reason = f"imports `{module}`, which is neither a file of it nor a package that it asks for"
        yield Issue("config.requires", reason, fix, "error" if module in facts.needed else "warning")
    for name in undeclared_variables(facts, manifest):
        fix = f"Add `{name}` to `config.variables`, or migrate with `rewrite` (`--rewrite`), which does."
        yield _warning("config.variables", f"reads the variable `{name}`, which it does not declare", fix)


def undeclared_packages(facts: ScriptFacts, manifest: Manifest, beside: Collection[str]) -> Mapping[str, str]:
    """Return the modules that a file imports and will not find, each with the package that would bring it."""
    asked = {package_name(text_of(one)) for one in as_list(manifest.config.get("requires"))}
    known = {*sys.stdlib_module_names, *beside, *(SHARED_CODE for _ in as_list(manifest.config.get("lib_imports")))}
    foreign = {name: _PACKAGES.get(name, name) for name in facts.packages if name not in known}
    return {name: package for name, package in foreign.items() if package_name(package) not in asked}


def undeclared_variables(facts: ScriptFacts, manifest: Manifest) -> Mapping[str, str | None]:
    """Return the variables that a file reads and its manifest does not declare."""
    declared = {*map(text_of, as_list(manifest.config.get("variables"))), *as_object(manifest.config.get("env"))}
    return {name: spare for name, spare in facts.variables.items() if name not in declared}


def _warning(place: str, reason: str, fix: str) -> Issue:
    return Issue(place, reason, fix, "warning")
