"""A Python file: its metadata and parameters, and what an old script finds around it. It is read, never run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import MAX_DEPTH, MAX_NODES, DocumentLimits, read_toml, read_yaml, refuse, settle
from kiwi_mcp.manifest.formats import is_variable, package_name

ENTRY_FUNCTIONS = ("main", "run", "execute")
"""The functions a Python tool may be called by, the first one present."""

_TYPES: Mapping[str, str] = {
    "str": "string", "Path": "string", "int": "integer", "float": "number", "bool": "boolean",
    "list": "array", "List": "array", "Sequence": "array", "Iterable": "array", "tuple": "array", "Tuple": "array",
    "set": "array", "dict": "object", "Dict": "object", "Mapping": "object", "None": "null",
}  # fmt: skip
_WHOLE_CALL = {"params", "parameters", "arguments", "inputs", "kwargs"}
_OPEN: JsonObject = {"type": "object", "properties": {}, "additionalProperties": True}


def parameters_of(tree: ast.Module, text: str) -> JsonObject:
    """Return the schema of the entry function's parameters; it is open for a plain script or one whole value."""
    entry = _entry(tree)
    if entry is None:
        return _OPEN
    arguments = entry.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [argument.arg for argument in named]
    if (entry.name == "execute" and names[:1] == ["params"]) or (len(names) == 1 and names[0] in _WHOLE_CALL):
        return _OPEN
    if not named and arguments.kwarg is None and "argv" not in text and "argparse" not in text:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*padding, *arguments.defaults, *arguments.kw_defaults]
    properties: dict[str, Json] = {}
    required: list[Json] = []
    for argument, default in zip(named, defaults, strict=True):
        properties[argument.arg] = _property(argument.annotation, default)
        if default is None:
            required.append(argument.arg)
    is_open = arguments.kwarg is not None or not named
    schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": is_open}
    return {**schema, "required": required} if required else schema


def _entry(tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return next((functions[name] for name in ENTRY_FUNCTIONS if name in functions), None)


def _property(annotation: ast.expr | None, default: ast.expr | None) -> JsonObject:
    schema = dict(_type(annotation, 0))
    match default:
        case ast.Constant(value=None):
            return {**_nullable(schema), "default": None}
        case ast.Constant(value=str() | bool() | int() | float() as value):
            return {**schema, "default": value}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return {**schema, "default": -number}
        case ast.List(elts=[]):
            return {**schema, "default": []}
        case ast.Dict(keys=[]):
            return {**schema, "default": {}}
        case _:
            # Any other default is the function's own; the parameter is optional and Kiwi sends nothing for it.
            return schema


def _type(annotation: ast.expr | None, depth: int) -> JsonObject:
    if depth > 8:  # noqa: PLR2004 - deeper annotations are ignored
        return {}
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {"type": _TYPES[name]} if name in _TYPES else {}
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.Constant(value=str() as text):
            try:
                return _type(ast.parse(text[:200], mode="eval").body, depth + 1)
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                return {}
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either([_type(left, depth + 1), _type(right, depth + 1)])
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _generic(name, list(inner.elts) if isinstance(inner, ast.Tuple) else [inner], depth)
        case _:
            return {}


def _generic(name: str, inner: list[ast.expr], depth: int) -> JsonObject:
    match name:
        case "Optional":
            return _nullable(_type(inner[0], depth + 1))
        case "Union":
            return _either([_type(part, depth + 1) for part in inner])
        case "Literal":
            constants = (part.value for part in inner if isinstance(part, ast.Constant))
            return {"enum": [value for value in constants if isinstance(value, str | int | float | None)]}
        case "Annotated":
            texts = [part.value for part in inner[1:] if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            schema = _type(inner[0], depth + 1)
            return {**schema, "description": texts[0]} if texts else schema
        case _ if _TYPES.get(name) == "array" and len(inner) == 1 and (item := _type(inner[0], depth + 1)):
            return {"type": "array", "items": item}
        case _:
            return {"type": _TYPES[name]} if name in _TYPES else {}


def _either(schemas: list[JsonObject]) -> JsonObject:
    if any(not schema for schema in schemas):
        return {}
    if len(schemas) == 2 and {"type": "null"} in schemas:  # noqa: PLR2004 - one type or null
        return _nullable(next((schema for schema in schemas if schema != {"type": "null"}), {"type": "null"}))
    return {"anyOf": list(schemas)}


def _nullable(schema: JsonObject) -> JsonObject:
    match schema.get("type"):
        case "null" | [*_, "null"]:
            return schema
        case str() as kind:
            return {**schema, "type": [kind, "null"]}
        case None if "enum" in schema:
            options = schema["enum"]
            return {**schema, "enum": [*(options if isinstance(options, list) else []), None]}
        case _:
            return schema if not schema else {"anyOf": [schema, {"type": "null"}]}


MAX_SOURCE = 2_000_000

DUNDERS: Mapping[str, str] = {
    "__tool_id__": "tool_id",
    "__version__": "version",
    "__tool_type__": "tool_type",
    "__executor_id__": "executor",
    "__executor__": "executor",
    "__category__": "category",
    "__description__": "description",
    "__tool_description__": "description",
    "__tags__": "tags",
    "__author__": "author",
    "__parameters__": "parameters",
    "__config__": "config",
    "__mutates_state__": "mutates_state",
    "__effect__": "effect",
    "__task__": "task",
    "__isolation__": "isolation",
    "__checkpoint__": "checkpoint",
    "__needs__": "needs",
}
"""Names that hold metadata and nothing else; any one of them makes a file an item."""
CONSTANTS: Mapping[str, str] = {
    "CONFIG": "config",
    "CONFIG_SCHEMA": "config_schema",
    "ENV_CONFIG": "env_config",
    "INPUT_SCHEMA": "input_schema",
    "PARAMETERS": "parameters",
    "OUTPUTS": "outputs",
    "VALIDATION": "validation",
    "DEPENDENCIES": "dependencies",
    "REQUIRES": "requires",
    "MUTATES_STATE": "mutates_state",
    "CAPABILITIES": "capabilities",
    "SYSTEM_ONLY": "system_only",
    "SCOPE_REQUIRED": "scope_required",
}
"""Names that hold metadata in an item, and may be anything in another file."""

_YAML_KEY = lazy_pattern(r"^\s*(?:tool_id|tool_type)\s*:", re.MULTILINE)
_SCRIPT_BLOCK = lazy_pattern(r"^# /// script\s*$\n(?P<content>(?:^#(?: .*)?$\n)*?)^# ///\s*$", re.MULTILINE)


DECLARED_IN = {"parameters", "inputs", "input_schema", "config_schema"}
"""The words in which an author may declare parameters; without any of them the entry function's own are taken."""


class PythonSource(Struct):
    """The manifest data of a Python file: its keys, their lines, its faults, and whether it is an item."""

    value: dict[str, Json] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    is_item: bool = False


def may_be_item(text: str) -> bool:
    """Whether a Python file mentions any word of metadata, so that it is worth reading."""
    return any(name in text for name in DUNDERS) or _YAML_KEY.search(text) is not None


def read_python(text: str, *, what: str) -> PythonSource:
    """Return the metadata of a Python file; one that does not parse is refused, with the line of its fault."""
    source = PythonSource(is_item=may_be_item(text))
    tree = _tree(text, what)
    _read_docstring(tree, source, what)
    source.is_item = "tool_id" in source.value or "tool_type" in source.value
    seen: set[str] = set()
    for name, word, value, line in _assignments(tree):
        source.is_item = source.is_item or name in DUNDERS
        if name in seen:
            reason = f"`{name}` is assigned twice; the last one counts"
            source.issues.append(Issue(word, reason, "Keep one of them.", "warning", line))
        seen.add(name)
        try:
            source.value[word] = settle(_as_json(ast.literal_eval(value)), DocumentLimits(name, MAX_NODES, MAX_DEPTH))
            source.lines[word] = line
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, InvalidManifest):
            reason = f"`{name}` is not a plain literal, and metadata is read without running the file"
            fix = "Write a literal: text, a number, true or false, a list or a dict of these."
            source.issues.append(Issue(word, reason, fix, "error" if name in DUNDERS else "warning", line))
    _read_script_block(text, source, what)
    if not DECLARED_IN & source.value.keys():
        source.value["parameters"] = parameters_of(tree, text)
    return source


def inferred_parameters(text: str, *, what: str) -> JsonObject:
    """Return the parameters of the function that a Python file is called by."""
    return parameters_of(_tree(text, what), text)


def _tree(text: str, what: str) -> ast.Module:
    if len(text) > MAX_SOURCE:
        raise _beyond_reading(what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the author's source is warned about is not this reader's to print
            return ast.parse(text)
    except SyntaxError as error:
        reason, fix = f"Python cannot read it: {error.msg}", "Fix the syntax (Python 3)."
        raise refuse(what, reason, fix, place=what, line=error.lineno) from None
    except (ValueError, MemoryError, RecursionError):
        raise _beyond_reading(what) from None


def _beyond_reading(what: str) -> InvalidManifest:
    fix = "Make the file simpler, or put its metadata into a tool.yaml."
    return refuse(what, "too large or too deeply nested to be read", fix, place=what)


def _read_docstring(tree: ast.Module, source: PythonSource, what: str) -> None:
    match tree.body[:1]:
        case [ast.Expr(value=ast.Constant(value=str() as raw, lineno=line))]:
            text = inspect.cleandoc(raw)
        case _:
            return
    if _YAML_KEY.search(text) is None:
        if paragraph := " ".join(part.strip() for part in text.partition("\n\n")[0].splitlines()):
            source.value["description"] = paragraph
        return
    offset = line - 1 + len(raw) - len(raw.lstrip("\n")) if raw.startswith("\n") else line - 1
    try:
        document = read_yaml(text, what=what)
    except InvalidManifest as error:
        raise InvalidManifest(what, [shifted(issue, offset) for issue in error.issues]) from None
    if isinstance(document.value, Mapping):
        source.value.update(document.value)
        source.lines.update({place: number + offset for place, number in document.lines.items()})


def shifted(issue: Issue, offset: int) -> Issue:
    """Return an issue of an embedded text with the line it has in the whole file."""
    return issue if issue.line is None else replace(issue, line=issue.line + offset)


def _assignments(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr, int]]:
    """Yield each name that holds metadata: the name, the key it stands for, its value and its line."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names = [name]
            case _:
                continue
        for name in names:
            if word := DUNDERS.get(name) or CONSTANTS.get(name):
                yield name, word, value, statement.lineno


def _as_json(value: object) -> Json:
    match value:
        case None | bool() | str() | int() | float():
            return value
        case list() | tuple():
            return [_as_json(inner) for inner in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _as_json(inner) for key, inner in value.items()}
        case _:
            raise TypeError


def _read_script_block(text: str, source: PythonSource, what: str) -> None:
    """Add the dependencies that an inline script block declares (PEP 723)."""
    found = _SCRIPT_BLOCK.search(text)
    if found is None:
        return
    block = "".join(
        line[2:] if line.startswith("# ") else line[1:] for line in found["content"].splitlines(keepends=True)
    )
    try:
        table = read_toml(block, what=what).value
    except InvalidManifest as error:
        offset = text.count("\n", 0, found.start("content"))
        source.issues += [shifted(issue, offset) for issue in error.issues]
        return
    declared = table.get("dependencies") if isinstance(table, Mapping) else None
    if isinstance(declared, list):
        present = source.value.get("dependencies")
        source.value["dependencies"] = [*(present if isinstance(present, list) else []), *declared]


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
    nodes, entry = list(ast.walk(tree)), _entry(tree)
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
        is_module=entry is None
        and all(
            isinstance(node, _INERT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in tree.body
        ),
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
            case ast.Call(
                func=ast.Attribute(attr="getenv")
                | ast.Name(id="getenv")
                | ast.Attribute(value=ast.Attribute(attr="environ") | ast.Name(id="environ"), attr="get"),
                args=[ast.Constant(value=str(name)), *rest],
            ):
                found.setdefault(name, _default(rest))
    return {name: spare for name, spare in found.items() if name not in _GIVEN and is_variable(name)}


def _default(arguments: Sequence[ast.expr]) -> str | None:
    """Return the default of a variable, or None if it must be set, also for a text that a manifest cannot hold."""
    match arguments:
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
        yield Issue("", "imports from its own package, which a file that is run does not have", fix, "warning")
    asked = {package_name(text_of(one)) for one in as_list(manifest.config.get("requires"))}
    known = {*sys.stdlib_module_names, *beside, *(SHARED_CODE for _ in as_list(manifest.config.get("lib_imports")))}
    foreign = {name: _PACKAGES.get(name, name) for name in facts.packages if name not in known}
    for module, package in foreign.items():
        if package_name(package) in asked:
            continue
        fix = (
            f"If `{module}` was a file beside it, migrate the folder that has it with `rewrite` (`--rewrite`); if it "
            f"is a package you know, add `{package}` to `config.requires` (in Python: `DEPENDENCIES`)."
        )
        reason = f"imports `{module}`, which is neither a file of it nor a package that it asks for"
        yield Issue("config.requires", reason, fix, "error" if module in facts.needed else "warning")
    for name in undeclared_variables(facts, manifest):
        fix = f"Add `{name}` to `config.variables`, or migrate with `rewrite` (`--rewrite`), which does."
        yield Issue("config.variables", f"reads the variable `{name}`, which it does not declare", fix, "warning")


def undeclared_variables(facts: ScriptFacts, manifest: Manifest) -> Mapping[str, str | None]:
    """Return the variables that a file reads and its manifest does not declare."""
    declared = {*map(text_of, as_list(manifest.config.get("variables"))), *as_object(manifest.config.get("env"))}
    return {name: spare for name, spare in facts.variables.items() if name not in declared}
