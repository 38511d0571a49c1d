"""Directive to manifest: its XML, its inputs, limits and hooks.

The XML is read with positions and without anything XML could reach out with: no DOCTYPE, no entities but the five, no
other files. `template`, `example` and `raw` are opaque: what stands in them is cut out before the parser looks and put
back afterwards, so they may hold anything, even another directive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from textwrap import dedent
from xml.parsers import expat

from msgspec import Struct, field

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CHECKPOINT_MODES
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.legacy import xml_of
from kiwi_mcp.manifest.names import use_one_of

MAX_CHARACTERS = 512_000
MAX_DEPTH = 64
MAX_ELEMENTS = 20_000

_OPAQUE = lazy_pattern(r"<!--|<!\[CDATA\[|<(template|example|raw)(?=[\s>/])[^<>]*>")
_CLOSERS = {"<!--": "-->", "<![CDATA[": "]]>"}
_PLACEHOLDERS = {"{CDATA_OPEN}": "<![CDATA[", "{CDATA_CLOSE}": "]]>"}
_BLANKED = lazy_pattern(r"[^\n]")

_REFERENCES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})
"""How an attribute is written; a parser turns line breaks and tabs in it into spaces."""


class Element(Struct):
    """A tag, its attributes, and what stands in it, in order."""

    tag: str
    attributes: Mapping[str, str]
    line: int
    content: list[str | Element] = field(default_factory=list)
    end: int = 0
    """The line of its closing tag."""

    @property
    def children(self) -> list[Element]:
        """The elements in it."""
        return [part for part in self.content if isinstance(part, Element)]

    @property
    def text(self) -> str:
        """Its text, with nested elements as they are written."""
        return _shown(_markup(self.content))

    @property
    def texts(self) -> dict[str, str]:
        """Its attributes, and the texts of the elements in it, by name."""
        return {**self.attributes, **{child.tag: child.text for child in self.children}}

    def named(self, *tags: str) -> Iterator[Element]:
        """Yield the elements in it that have one of these tags."""
        return (child for child in self.children if child.tag in tags)

    def first(self, *tags: str) -> Element | None:
        """Return the first element in it that has one of these tags."""
        return next(self.named(*tags), None)

    def at(self, *tags: str) -> Element:
        """Return the first element in it that has one of these tags, or an empty one."""
        return self.first(*tags) or Element(tags[0], {}, self.line)

    def to_json(self) -> Json:
        """Return the element as old directives were read: attributes in `_attrs`, text in `_text`, repeats as lists."""
        shown: dict[str, Json] = {"_attrs": dict(self.attributes)} if self.attributes else {}
        bare = _shown("".join(part for part in self.content if isinstance(part, str)))
        if not shown and not self.children:
            return bare
        for tag in dict.fromkeys(child.tag for child in self.children):
            found: list[Json] = [child.to_json() for child in self.named(tag)]
            shown[tag] = found if len(found) > 1 else found[0]
        return shown | {"_text": bare} if bare else shown


def read_xml(text: str, *, what: str) -> Element:
    """Return the directive element of a Markdown text; faults name their line and column in that text."""
    if len(text) > MAX_CHARACTERS:
        raise refuse(what, f"longer than {MAX_CHARACTERS:,} characters", "Move long texts into knowledge entries.")
    xml = xml_of(text)
    if xml is None:
        fix = 'Add <directive name="…" version="1.0.0">…</directive>.'
        raise refuse(what, "holds no <directive>…</directive>", fix)
    start = text.index(xml)
    before = text[:start]
    # In prose a DOCTYPE is only text; in the same fence as the directive it would belong to it.
    at = before.upper().find("<!DOCTYPE", max(before.rfind("```"), 0))
    if at >= 0:
        raise _no_doctype(what, before.count("\n", 0, at) + 1)
    # The space before keeps the parser's lines and columns those of the whole text.
    padding = "\n" * text.count("\n", 0, start) + " " * (start - text.rfind("\n", 0, start) - 1)
    blanked, cut = _cut_opaque(xml)
    reader = _Reader(what, cut)
    try:
        reader.parser.Parse((padding + blanked).encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as fault:
        # The last closing tag may stand in prose: what follows a complete directive is Markdown again.
        if not reader.is_complete:
            line, column = fault.lineno, fault.offset
            written = "".join(text.split("\n")[line - 1 : line])
            reason = f"not well-formed at line {line}, column {column + 1}: {expat.ErrorString(fault.code)}"
            hint = _hint(written, column, fault.code)
            raise refuse(what, f"{reason} in `{written.strip()[:80]}`", hint, line=line) from fault
    return reader.document.children[0]


class _Reader:
    """One pass of the parser, within limits."""

    def __init__(self, what: str, cut: list[str]) -> None:
        self._what = what
        self._cut = iter(cut)
        self._count = 0
        self.document = Element("", {}, 1)
        self._open = [self.document]
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = self._doctype

    @property
    def is_complete(self) -> bool:
        return bool(self.document.content) and len(self._open) == 1

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        line = self.parser.CurrentLineNumber
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) > MAX_DEPTH:
            limits = f"{MAX_ELEMENTS:,} elements, {MAX_DEPTH} deep"
            raise refuse(self._what, f"larger than {limits}", "Make it smaller.", line=line)
        element = Element(tag, attributes, line)
        self._open[-1].content.append(element)
        self._open.append(element)

    def _end(self, tag: str) -> None:
        element = self._open.pop()
        element.end = self.parser.CurrentLineNumber
        if tag in {"template", "example", "raw"}:
            element.content = [next(self._cut, "")]

    def _text(self, text: str) -> None:
        self._open[-1].content.append(text)

    def _doctype(self, *_: object) -> None:
        raise _no_doctype(self._what, self.parser.CurrentLineNumber)


def _cut_opaque(xml: str) -> tuple[str, list[str]]:
    """Return the XML with the opaque parts blanked, every line as long as before, and the text of those parts."""
    out: list[str] = []
    cut: list[str] = []
    position = 0
    missing: set[str] = set()
    while opening := _OPAQUE.search(xml, position):
        closer = _CLOSERS.get(opening[0]) or f"</{opening[1]}>"
        is_empty = opening[0].endswith("/>") or closer in missing
        end = opening.end() if is_empty else xml.find(closer, opening.end())
        if end < 0:
            # One search for each kind that is never closed, or many openings would cost the square of the text.
            missing.add(closer)
            end = opening.end()
        inner = xml[opening.end() : end]
        if opening[1]:
            cut.append(inner)
        out += (xml[position : opening.end()], _BLANKED.sub(" ", inner) if opening[1] else inner)
        position = end
    return "".join((*out, xml[position:])), cut


def _hint(line: str, column: int, code: int) -> str:
    if code == expat.errors.codes[expat.errors.XML_ERROR_TAG_MISMATCH]:
        return "Close each tag in the order it was opened; write `List<T>` and the like with `&lt;`."
    near = line[max(column - 2, 0) : column + 3]
    if "&&" in near:
        return "Write `&amp;&amp;` for `&&`, or put the text in <![CDATA[ … ]]>."
    if "&" in line[: column + 2]:
        return "Write `&amp;` for `&`, or put the text in <![CDATA[ … ]]>."
    if "->" in near or "<-" in near:
        return "Write an arrow as `-&gt;` or `&lt;-`, or put the text in <![CDATA[ … ]]>."
    if "<" in line[: column + 2]:
        return "Write `&lt;` for `<`, or put the text in <![CDATA[ … ]]>."
    return "Put text that is not XML in <![CDATA[ … ]]> or in a <template>."


def _no_doctype(what: str, line: int) -> InvalidManifest:
    fix = "Remove it, and write entities as the five of XML."
    return refuse(what, "holds a DOCTYPE, which is never read", fix, line=line)


def _quoted(value: str) -> str:
    text = value.translate(_REFERENCES)
    if '"' not in text:
        return f'"{text}"'
    return f"'{text}'" if "'" not in text else f'"{text.replace(chr(34), "&quot;")}"'


def _markup(content: list[str | Element]) -> str:
    written: list[str] = []
    for part in content:
        if isinstance(part, str):
            written.append(part)
            continue
        tag = part.tag + "".join(f" {name}={_quoted(value)}" for name, value in part.attributes.items())
        inner = _markup(part.content)
        written.append(f"<{tag}>{inner}</{part.tag}>" if inner else f"<{tag} />")
    return "".join(written)


def _shown(text: str) -> str:
    for placeholder, marker in _PLACEHOLDERS.items():
        text = text.replace(placeholder, marker)
    # Text may begin beside its tag, where its indentation says nothing.
    first, _, rest = text.partition("\n")
    return f"{first.strip()}\n{dedent(rest)}".strip()


_TYPES: Mapping[str, str] = {
    **{name: name for name in ("string", "number", "integer", "boolean", "array", "object")},
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_LIMITS: Mapping[str, str] = {
    **dict.fromkeys(("turns", "max_turns"), "turns"),
    **dict.fromkeys(("tokens", "max_tokens", "max_total_tokens", "context"), "tokens"),
    **dict.fromkeys(("spawns", "max_spawns", "spawn_threshold"), "spawns"),
    **dict.fromkeys(("depth", "max_depth"), "depth"),
    **dict.fromkeys(("duration", "duration_seconds"), "duration"),
    **dict.fromkeys(("spend", "max_spend", "max_cost_usd"), "spend"),
    **dict.fromkeys(("currency", "spend_currency"), "spend_currency"),
    **dict.fromkeys(("tool_calls", "max_tool_calls"), "tool_calls"),
    **dict.fromkeys(("children", "max_concurrent_children"), "children"),
    **dict.fromkeys(("threads", "max_threads"), "threads"),
    "answer_seconds": "answer_seconds",
    "on_exceeded": "on_exceeded",
}
_EXCEEDED = ("stop", "warn", "escalate")
_PROCESS = lazy_pattern(r"<process(?:\s[^<>]*)?>(.*)</process>", re.DOTALL)
_NUMBER = lazy_pattern(r"\$?\s*(\d{1,15}(?:\.\d{1,9})?)\s*(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}


def _input(element: Element, issues: list[Issue]) -> JsonObject:
    attributes = element.attributes
    name = attributes.get("name", "")
    if not name:
        issues.append(Issue("inputs", "<input> has no `name`", 'Write <input name="…" …>.', line=element.line))
    schema: Json = {}
    if written := attributes.get("schema") or element.at("schema").text:
        try:
            schema = json.loads(written)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, Mapping):
            place, fix = f"inputs.{name}.schema", 'Write a JSON Schema such as {"type": "array"}.'
            issues.append(Issue(place, "not a JSON object", fix, line=element.line))
    declared = _TYPES.get(attributes.get("type", "string").lower(), "string")
    read: dict[str, Json] = {"name": name, "type": declared, **as_object(schema)}
    read["required"] = attributes.get("required", "").lower() == "true"
    about = element.at("description").text or "".join(part for part in element.content if isinstance(part, str))
    if description := " ".join(about.split()):
        read["description"] = description
    if "default" in attributes:
        read["default"] = _typed(attributes["default"], declared)
    if choices := [word.strip() for word in re.split(r"[,|]", attributes.get("enum", "")) if word.strip()]:
        read["enum"] = [_typed(word, declared) for word in choices]
    return read


def _typed(text: str, declared: str) -> Json:
    """Return an attribute as the type its input declares; text that is no such value stays text, for the check."""
    if declared == "string":
        return text
    try:
        value: Json = json.loads(text.lower() if declared == "boolean" else text)
    except (ValueError, RecursionError):
        return text
    return value


def limits_of(metadata: Element, issues: list[Issue]) -> JsonObject:
    """Return the limits in the one spelling; those of the older `cost` count where `limits` says nothing."""
    read: dict[str, Json] = {}
    for element in (*metadata.named("cost"), *metadata.named("limits")):
        written = [(word, text, element.line) for word, text in element.attributes.items()]
        for child in element.children:
            texts = {**child.attributes, **({child.tag: child.text} if child.text else {})}
            written += [(word, text, child.line) for word, text in texts.items()]
        for word, text, line in ((_LIMITS[word], text, line) for word, text, line in written if word in _LIMITS):
            value = _limit(word, text)
            if value is not None:
                read[word] = value
            elif element.tag == "limits":
                issues.append(Issue(f"limits.{word}", f"{text!r} is not a limit", _limit_fix(word), line=line))
    if "spend" in read:
        read.setdefault("spend_currency", "USD")
    return read


def limit_faults(written: Json) -> Iterator[Issue]:
    """Yield the faults of limits that are written as a mapping."""
    if written is not None and not isinstance(written, Mapping):
        yield Issue("config.limits", "is not a mapping", "Write `turns: 10` and the like below it.")
    for word, value in as_object(written).items():
        place = f"config.limits.{word}"
        if word not in _LIMITS:
            yield Issue(place, "is not a limit", use_one_of(word, sorted(set(_LIMITS.values()))))
        elif isinstance(value, bool) or _limit(_LIMITS[word], text_of(value)) is None:
            yield Issue(place, f"{text_of(value)!r:.40} is not a limit", _limit_fix(_LIMITS[word]))


def limits_in(written: Json) -> JsonObject:
    """Return limits that are written as a mapping, in the one spelling."""
    read = {
        _LIMITS[word]: _limit(_LIMITS[word], text_of(value))
        for word, value in as_object(written).items()
        if word in _LIMITS and not isinstance(value, bool)
    }
    return {word: value for word, value in read.items() if value is not None}


def _limit_fix(word: str) -> str:
    return f"Write one of: {', '.join(_EXCEEDED)}." if word == "on_exceeded" else "Write a number."


def _limit(word: str, text: str) -> Json:
    if word == "spend_currency":
        return text.strip().upper()
    if word == "on_exceeded":
        return text.strip().lower() if text.strip().lower() in _EXCEEDED else None
    found = _NUMBER.fullmatch(text.strip())
    if found is None or (found[2] and word != "duration"):
        return None
    number = float(found[1]) * _SECONDS[found[2]]
    if word == "spend":
        return number
    return int(number) if number.is_integer() else None


def _hook(hook: Element, issues: list[Issue]) -> JsonObject:
    when, event = (hook.attributes.get(word) or hook.at(word).text for word in ("when", "event"))
    execute = hook.at("execute")
    named = execute.attributes.get("item_id") or execute.text
    directive = hook.attributes.get("directive") or hook.at("directive").text or named
    action: Json = hook.attributes.get("action", "")
    if element := hook.first("action"):  # an action by name, or the item that the hook runs
        words = {word: text for word, text in element.texts.items() if word != "params"}
        is_name = not element.attributes and not element.children
        action = element.text if is_name else {**words, "params": _named_texts(element.at("params"))}
    if not ((when or event) and (directive or action)):
        fix = 'Write <hook when="…" directive="…" />.'
        issues.append(Issue("hooks", "a hook needs `when` and `directive`", fix, line=hook.line))
    read: dict[str, Json] = {"when": when, "directive": directive, "inputs": _named_texts(hook.at("inputs"))}
    condition = hook.first("condition")
    others = {"event": event, "condition": _condition(condition) if condition else None, "action": action}
    read |= {word: value for word, value in others.items() if value}
    return read if when else {word: value for word, value in read.items() if value}


def _named_texts(element: Element) -> JsonObject:
    return {each.attributes.get("name", each.tag): each.text for each in element.children}


def _condition(element: Element) -> Json:
    """Return a condition: `path`, `op` and `value` as attributes or elements, or `any`, `all` or `not` of such."""
    for tag in ("any", "all"):
        if inner := element.first(tag):
            return {tag: [_condition(child) for child in inner.children]}
    if inner := element.first("not"):
        return {"not": _condition(inner.children[0] if inner.children else inner)}
    return {word: _typed(text, "json") if word == "value" else text for word, text in element.texts.items()}


_METADATA = {
    "description", "category", "author", "tags", "model", "model_class", "permissions", "limits", "cost", "hooks",
    "git_checkpoint", "relationships", "mcps", "skills", "context", "on_exceeded",
}  # fmt: skip
_PARTS = {"metadata", "inputs", "process", "outputs", "success_criteria", "context", "hooks", "permissions"}


def read_directive(text: str, *, what: str) -> JsonObject:
    """Return the manifest of a directive; raise `InvalidManifest` with every fault in it."""
    root = read_xml(text, what=what)
    metadata = root.at("metadata")
    issues = [
        Issue(word, f"<directive> has no `{word}`", f'Write <directive {word}="{example}" …>.', line=root.line)
        for word, example in (("name", "my_directive"), ("version", "1.0.0"))
        if not root.attributes.get(word, "").strip()
    ]
    parameters = [_input(each, issues) for each in root.at("inputs").named("input")]
    config = _config(root, metadata, issues)
    # The program may also follow the XML: in `<process>`, or all of it.
    rest = "\n".join(text.split("\n")[root.end :]).strip().removeprefix("```").strip()
    found = _PROCESS.search(rest)
    if not config["process"] and (after := dedent(found[1]).strip() if found else rest):
        config = {**config, "text": after}
    if issues:
        raise InvalidManifest(what, issues)
    tags = metadata.at("tags")
    manifest: dict[str, Json] = {
        "category": metadata.at("category").text,
        "author": metadata.at("author").text,
        "tags": [tag for tag in _texts(tags) or tags.text.replace(",", " ").split() if tag],
    }
    return {
        "tool_id": root.attributes["name"],
        "version": root.attributes["version"],
        "description": " ".join(metadata.at("description").text.split()),
        "parameters": parameters,
        "config": config,
        **{word: value for word, value in manifest.items() if value},
    }


def _config(root: Element, metadata: Element, issues: list[Issue]) -> JsonObject:
    def either(tag: str) -> Element:
        return metadata.first(tag) or root.at(tag)

    model = metadata.at("model", "model_class")
    permissions = either("permissions")
    criteria = root.at("success_criteria")
    spelled = {"model_id": "id", "fallback_id": "fallback"}
    asked = {**{spelled.get(name, name): value for name, value in model.attributes.items()}, "why": model.text}
    granted = [_permission(each) for each in permissions.children]
    if not granted and permissions.text:
        granted = [{"tag": "all", "attrs": {}, "content": permissions.text}]
    config: dict[str, Json] = {
        "model_tier": model.attributes.get("tier", "") or model.text,
        "model": {name: value for name, value in asked.items() if value},
        "permissions": granted,
        "limits": limits_of(metadata, issues),
        "hooks": [_hook(each, issues) for each in either("hooks").children],
        "git_checkpoint": _checkpoint(metadata.first("git_checkpoint"), issues),
        "process": [_step(step) for process in root.named("process") for step in process.named("step")],
        "outputs": _outputs(root.first("outputs")),
        "success_criteria": _texts(criteria) or [line for line in criteria.text.splitlines() if line.strip()],
        "extra": _extra(root, metadata),
    }
    for word in ("context", "relationships"):
        if found := metadata.first(word) or root.first(word):
            value = found.to_json()
            config[word] = {"_text": value} if isinstance(value, str) else as_object(value)
    config["mcps"] = [_server(each) for each in either("mcps").named("mcp")]
    config["skills"] = [each.text or each.attributes.get("name", "") for each in metadata.at("skills").named("skill")]
    config["extends"] = root.attributes.get("extends", "").strip()
    return {word: value for word, value in config.items() if value or word in {"permissions", "process"}}


def _texts(element: Element) -> list[str]:
    return [child.text for child in element.children]


def _server(element: Element) -> JsonObject:
    """Return an MCP server that a directive uses."""
    words: dict[str, Json] = dict(element.texts)
    words.setdefault("name", element.text)
    words["required"] = as_text(words.get("required")).lower() == "true"
    if "tools" in words:
        words["tools"] = [name for name in re.split(r"[,\s]+", as_text(words["tools"])) if name]
    return words


def _permission(element: Element) -> JsonObject:
    read: dict[str, Json] = {"tag": element.tag, "attrs": dict(element.attributes), "content": element.text}
    return {**read, "children": [_permission(each) for each in element.children]} if element.children else read


def _checkpoint(checkpoint: Element | None, issues: list[Issue]) -> str:
    if checkpoint is None:
        return ""
    mode = (checkpoint.attributes.get("mode") or checkpoint.text or "explicit").lower()
    if mode not in CHECKPOINT_MODES:
        fix = f"Use one of {', '.join(sorted(CHECKPOINT_MODES))}."
        issues.append(Issue("git_checkpoint", f"{mode!r} is not a mode of checkpoints", fix, line=checkpoint.line))
    return mode


def _step(step: Element) -> JsonObject:
    read: dict[str, Json] = {
        "name": step.attributes.get("name", ""),
        "description": " ".join(step.at("description").text.split()),
        "action": step.at("action").text,
    }
    if not read["action"]:  # the step itself says what to do, in words or in elements
        inner = [part for part in step.content if isinstance(part, str) or part.tag != "description"]
        return read | {"action": Element("action", {}, step.line, inner).text}
    for child in step.children:
        if child.tag not in {"description", "action"}:
            read.setdefault(child.tag, child.to_json())
    return read


def _outputs(outputs: Element | None) -> JsonObject:
    if outputs is None:
        return {}
    if not outputs.children:
        return {"text": outputs.text}
    fields: list[Json] = [{**each.attributes, "description": each.text} for each in outputs.named("output")]
    others = [child for child in outputs.children if child.tag != "output"]
    read = {child.tag: child.text if not child.attributes else child.to_json() for child in others}
    return read | ({"fields": fields} if fields else {})


def _extra(root: Element, metadata: Element) -> JsonObject:
    known = {"name", "version", "extends"}
    read: dict[str, Json] = {name: value for name, value in root.attributes.items() if name not in known}
    unknown = [child for child in metadata.children if child.tag not in _METADATA]
    for child in (*unknown, *(child for child in root.children if child.tag not in _PARTS)):
        value, seen = child.to_json(), read.get(child.tag)
        read[child.tag] = value if seen is None else [*(seen if isinstance(seen, list) else [seen]), value]
    return read
