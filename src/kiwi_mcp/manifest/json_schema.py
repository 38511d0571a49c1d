"""JSON Schema: compilation, validation, and errors in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TypeAlias

from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.manifest.document import join, place_of
from kiwi_mcp.manifest.names import did_you_mean

MAX_FAULTS = 50
MAX_PROPERTIES = 1_000
MAX_PATTERN = 1_000
MAX_PATTERNS = 200
MAX_SCHEMA_DEPTH = 32

Kind = ValidationErrorKind
Formats: TypeAlias = tuple[tuple[str, Callable[[str], bool]], ...]

# The linear engine: a hostile pattern costs time in proportion to the text and nothing more.
_PATTERNS = RegexOptions(size_limit=1_000_000, dfa_size_limit=1_000_000)

_KINDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "additionalProperties", "unevaluatedProperties", "items", "unevaluatedItems", "contains", "propertyNames",
    "not", "if", "then", "else",
)  # fmt: skip


_texts: dict[int, tuple[JsonObject, str]] = {}
_TEXTS_KEPT = 512


def text_of_schema(schema: JsonObject) -> str:
    """Return a schema as text, written once as long as it is the same object: schemas are not changed."""
    known = _texts.get(id(schema))
    if known is None or known[0] is not schema:
        if len(_texts) >= _TEXTS_KEPT:
            _texts.clear()
        known = _texts[id(schema)] = (schema, compact(schema))
    return known[1]


@lru_cache(maxsize=512)
def _compiled(text: str, formats: Formats) -> Draft202012Validator:
    return Draft202012Validator(
        text, formats=dict(formats), validate_formats=bool(formats), pattern_options=_PATTERNS, offline=True
    )


def faults(schema: JsonObject, value: Json, *, place: str = "", formats: Formats = ()) -> list[Issue]:
    """Return everything in which a value differs from a schema, in plain words, up to a limit."""
    try:
        validator = _compiled(text_of_schema(schema), formats)
    except ValueError as error:
        return [Issue(place, f"the schema cannot be used: {_first_line(error)}", "Fix the schema.")]
    try:
        if validator.is_valid(value):
            return []
        return [
            issue
            for error in islice(validator.iter_errors(value), MAX_FAULTS)
            for issue in explain(error, schema, place)
        ]
    except (ValueError, RecursionError) as error:
        return [Issue(place, f"cannot be checked: {_first_line(error)}", "Send plain JSON values.")]


def schema_faults(schema: JsonObject, place: str) -> list[Issue]:
    """Return the faults of a schema itself: remote references, sizes, patterns, keywords."""
    issues: list[Issue] = []
    properties = patterns = 0
    for where, part, depth in _parts(schema, place, 0):
        if depth > MAX_SCHEMA_DEPTH:
            return [Issue(where, f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", "Flatten it.")]
        properties += len(as_object(part.get("properties")))
        patterns += ("pattern" in part) + len(as_object(part.get("patternProperties")))
        for word in ("$ref", "$dynamicRef"):
            if word in part and not as_text(target := part[word]).startswith("#"):
                reason = f"{target!r} is not a reference within the schema"
                issues.append(Issue(join(where, word), reason, "Refer to `#/$defs/…` only."))
        for text in map(as_text, (part.get("pattern"), *as_object(part.get("patternProperties")))):
            if len(text) > MAX_PATTERN:
                fix = f"Write a pattern of at most {MAX_PATTERN:,}."
                issues.append(Issue(where, f"a pattern of {len(text):,} characters", fix))
    if properties > MAX_PROPERTIES:
        issues.append(Issue(place, f"declares {properties:,} properties", f"Declare at most {MAX_PROPERTIES:,}."))
    if patterns > MAX_PATTERNS:
        issues.append(Issue(place, f"declares {patterns:,} patterns", f"Declare at most {MAX_PATTERNS:,}."))
    return issues or _compile_faults(schema, place)


def _compile_faults(schema: JsonObject, place: str) -> list[Issue]:
    try:
        _compiled(compact(schema), ())
    except ValidationError as error:
        where = place_of(error.instance_path, place)
        if error.instance_path and error.instance_path[-1] in {"pattern", "patternProperties"}:
            reason = f"the pattern {error.instance!r:.80} cannot be used"
            return [Issue(where, reason, "Write a plain regular expression, without look-around or back-references.")]
        return [Issue(where, f"is not JSON Schema: {_first_line(error)}", "Write it as JSON Schema 2020-12 says.")]
    except ValueError as error:
        return [Issue(place, f"is not JSON Schema: {_first_line(error)}", "Write it as JSON Schema 2020-12 says.")]
    return []


def _parts(schema: JsonObject, place: str, depth: int) -> Iterator[tuple[str, JsonObject, int]]:
    # Schemas stand only where the vocabulary puts them; a `default` or an `enum` may hold anything.
    yield place, schema, depth
    if depth > MAX_SCHEMA_DEPTH:
        return
    maps = [(word, as_object(schema.get(word)).items()) for word in _MAPS_OF_SCHEMAS]
    lists = [(word, enumerate(listed)) for word in _LISTS_OF_SCHEMAS if isinstance(listed := schema.get(word), list)]
    below: list[tuple[str, Json]] = [(join(join(place, word), key), one) for word, each in maps for key, one in each]
    below += [(join(join(place, word), index), one) for word, each in lists for index, one in each]
    below += [(join(place, word), schema.get(word)) for word in _SCHEMAS]
    for where, inner in below:
        if isinstance(inner, Mapping):
            yield from _parts(inner, where, depth + 1)


def explain(error: ValidationError, schema: JsonObject, place: str) -> list[Issue]:
    """Return one fault in plain words; words that do not belong there become one issue each."""
    where = place_of(error.instance_path, place)
    match error.kind:
        case Kind.AdditionalProperties(unexpected=names) | Kind.UnevaluatedProperties(unexpected=names):
            here: Json = schema
            for step in error.schema_path[:-1]:
                if isinstance(here, Mapping):
                    here = here.get(str(step))
                elif isinstance(here, list) and isinstance(step, int) and step < len(here):
                    here = here[step]
            known = sorted(as_object(as_object(here).get("properties")))
            listed = f"Known here: {', '.join(known[:20])}." if known else "Nothing is declared here."
            return [
                Issue(join(where, name), f"unknown key {name!r}", f"{did_you_mean(name, known)}{listed}")
                for name in names
            ]
        case Kind.Required(property=name):
            return [Issue(join(where, name), "is required", f"Add `{name}`.")]
        case Kind.PropertyNames(error=inner):
            reason, fix = _reason(inner)
            return [Issue(where, f"the name {_shown(inner.instance)} {reason}", fix)]
        case _:
            reason, fix = _reason(error)
            return [Issue(where, reason, fix)]


def _reason(error: ValidationError) -> tuple[str, str]:  # noqa: PLR0912 - one case for each word of the vocabulary
    value = _shown(error.instance)
    match error.kind:
        case Kind.Type(types=types):
            wanted = " or ".join(_KINDS.get(kind, kind) for kind in types)
            return f"{value} is not {wanted}", f"Write {wanted}."
        case Kind.Enum(options=options):
            listed = ", ".join(_shown(option) for option in options[:20])
            hint = did_you_mean(str(error.instance), [option for option in options if isinstance(option, str)])
            return f"{value} is not one of {listed}", f"{hint}Choose one of {listed}."
        case Kind.Constant(expected_value=wanted):
            return f"{value} is not {_shown(wanted)}", f"Write {_shown(wanted)}."
        case Kind.AnyOf(context=branches) | Kind.OneOfNotValid(context=branches):
            return _alternatives(value, branches)
        case Kind.Format(format=word):
            reason, fix = FORMAT_WORDS.get(word, (f"is not of the format {word!r}", f"Write it as {word!r} says."))
            return f"{value} {reason}", fix
        case Kind.Pattern(pattern=pattern):
            return f"{value} does not match {pattern!r}", "Write it as the pattern says."
        case Kind.Minimum(limit=limit):
            return f"{value} is less than {limit}", f"Write {limit} or more."
        case Kind.Maximum(limit=limit):
            return f"{value} is more than {limit}", f"Write {limit} or less."
        case Kind.ExclusiveMinimum(limit=limit):
            return f"{value} is not more than {limit}", f"Write more than {limit}."
        case Kind.ExclusiveMaximum(limit=limit):
            return f"{value} is not less than {limit}", f"Write less than {limit}."
        case Kind.MinLength(limit=size) | Kind.MinItems(limit=size) | Kind.MinProperties(limit=size):
            return f"{value} is too short", f"Write at least {size}."
        case Kind.MaxLength(limit=size) | Kind.MaxItems(limit=size) | Kind.MaxProperties(limit=size):
            return f"{value} is too long", f"Write at most {size}."
        case Kind.FalseSchema():
            return "does not belong here", "Remove it."
        case _:
            return _first_line(error), f"Write it as `{error.kind.name}` of the schema says."


def _alternatives(value: str, branches: Sequence[Sequence[ValidationError]]) -> tuple[str, str]:
    """Return the words for a value that fits no branch: which keys, or which kinds, would do."""
    first = [branch[0].kind for branch in branches if branch]
    needed = [str(kind.property) for kind in first if isinstance(kind, Kind.Required)]
    if needed and len(needed) == len(first):
        listed = ", ".join(f"`{name}`" for name in needed)
        return f"needs one of {listed}", f"Add one of {listed}."
    kinds = [_KINDS.get(name, name) for kind in first if isinstance(kind, Kind.Type) for name in kind.types]
    if kinds and len(kinds) >= len(first):
        return f"{value} is not {' or '.join(kinds)}", f"Write {' or '.join(kinds)}."
    reasons = [_reason(error) for branch in branches for error in branch if not isinstance(error.kind, Kind.Type)]
    if reasons:
        return reasons[0]
    return f"{value} fits none of the forms allowed here", "Write one of the forms the schema allows."


def _shown(value: object) -> str:
    """Return a value short enough for a sentence."""
    match value:
        case bool() | None:
            text = str(value).lower().replace("none", "null")
        case str():
            text = repr(value)
        case _:
            text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004 - a value is quoted, not printed


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


FORMAT_WORDS: Mapping[str, tuple[str, str]] = {
    "url": (
        "is not an address Kiwi can use",
        "Write http, https, ws or wss with a fixed host, or begin with one `${VARIABLE}`.",
    ),
    "requirement": (
        "is not a package name with versions",
        "Write `name>=1.0` (or `name@^1.0` for Node): no addresses, paths or options.",
    ),
    "variable": (
        "may not be set by an item",
        "Use letters, digits and `_`, and no variable that loaders or interpreters obey.",
    ),
    "path": ("is not a safe relative path", "Write a path below the item's folder, such as `main.py`."),
    "range": ("is not a range of versions", "Write a range such as `^1.2`."),
}
