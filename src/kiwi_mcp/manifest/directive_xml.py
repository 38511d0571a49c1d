"""The XML of a directive, read with positions and without anything XML could reach out with.

No DOCTYPE, no entities but the five, no other files. `template`, `example` and `raw` are opaque: what stands in them
is cut out before the parser looks and put back afterwards, so they may hold anything, even another directive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import dedent
from xml.parsers import expat

from msgspec import Struct, field

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.legacy.manifests import xml_of

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

    def named(self, *tags: str) -> Iterator[Element]:
        """Yield the elements in it that have one of these tags."""
        return (child for child in self.children if child.tag in tags)

    def first(self, *tags: str) -> Element | None:
        """Return the first element in it that has one of these tags."""
        return next(self.named(*tags), None)

    @property
    def text(self) -> str:
        """Its text, with nested elements as they are written."""
        return _shown(_markup(self.content))

    def text_at(self, *tags: str) -> str:
        """Return the text of the first element with one of these tags."""
        child = self.first(*tags)
        return child.text if child else ""

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
    fence = max(before.rfind("```"), 0)
    at = before.upper().find("<!DOCTYPE", fence)
    if at >= 0:
        raise _no_doctype(what, before.count("\n", 0, at) + 1)
    # The space before keeps the parser's lines and columns those of the whole text.
    padding = "\n" * text.count("\n", 0, start) + " " * (start - text.rfind("\n", 0, start) - 1)
    blanked, cut = _cut_opaque(xml)
    return _Reader(what, text, cut).read(padding + blanked)


class _Reader:
    """One pass of the parser, within limits."""

    def __init__(self, what: str, text: str, cut: list[str]) -> None:
        self._what = what
        self._lines = text.split("\n")
        self._cut = iter(cut)
        self._open: list[Element] = []
        self._count = 0
        self._parser = expat.ParserCreate("utf-8")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.StartDoctypeDeclHandler = self._doctype
        self._root: Element | None = None

    def read(self, xml: str) -> Element:
        try:
            self._parser.Parse(xml.encode("utf-8", "surrogatepass"), True)
        except expat.ExpatError as fault:
            # The last closing tag may stand in prose: what follows a complete directive is Markdown again.
            if self._root is None or self._open:
                raise self._refusal(fault) from fault
        if self._root is None:
            raise refuse(self._what, "holds no <directive>", "Add one.")
        return self._root

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH:
            limits = f"{MAX_ELEMENTS:,} elements, {MAX_DEPTH} deep"
            raise refuse(self._what, f"larger than {limits}", "Make it smaller.", line=self._parser.CurrentLineNumber)
        element = Element(tag, attributes, self._parser.CurrentLineNumber)
        if self._open:
            self._open[-1].content.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, tag: str) -> None:
        element = self._open.pop()
        element.end = self._parser.CurrentLineNumber
        if tag in {"template", "example", "raw"}:
            element.content = [next(self._cut, "")]

    def _text(self, text: str) -> None:
        self._open[-1].content.append(text)

    def _doctype(self, *_: object) -> None:
        raise _no_doctype(self._what, self._parser.CurrentLineNumber)

    def _refusal(self, fault: expat.ExpatError) -> InvalidManifest:
        line, column = fault.lineno, fault.offset
        written = self._lines[line - 1] if line <= len(self._lines) else ""
        reason = f"not well-formed at line {line}, column {column + 1}: {expat.ErrorString(fault.code)}"
        hint = _hint(written, column, fault.code)
        return refuse(self._what, f"{reason} in `{written.strip()[:80]}`", hint, line=line)


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


def _markup(content: list[str | Element]) -> str:
    return "".join(part if isinstance(part, str) else _tag(part) for part in content)


def _quoted(value: str) -> str:
    text = value.translate(_REFERENCES)
    if '"' not in text:
        return f'"{text}"'
    return f"'{text}'" if "'" not in text else f'"{text.replace(chr(34), "&quot;")}"'


def _tag(element: Element) -> str:
    attributes = "".join(f" {name}={_quoted(value)}" for name, value in element.attributes.items())
    inner = _markup(element.content)
    return f"<{element.tag}{attributes}>{inner}</{element.tag}>" if inner else f"<{element.tag}{attributes} />"


def _shown(text: str) -> str:
    for placeholder, marker in _PLACEHOLDERS.items():
        text = text.replace(placeholder, marker)
    # Text may begin beside its tag, where its indentation says nothing.
    first, _, rest = text.partition("\n")
    return f"{first.strip()}\n{dedent(rest)}".strip()
