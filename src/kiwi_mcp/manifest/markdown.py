"""Markdown with YAML front matter that describes it: knowledge, and skills in the format of agentskills.io.

The mapping has `tool_id`, `version`, `description`, `category`, `tags`, `author`, `created_at` and `config`. The type
spec says which keys of the front matter belong to `config`. Where its `config` allows them, `title` is the title or the
first heading, `links` are the `[[targets]]` in the text, in order, and `extra` has all other keys of the front matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.names import Version, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_yaml, refuse
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.permissions import grant_of
from kiwi_mcp.manifest.signatures import split
from kiwi_mcp.manifest.type_specs import FileFormat, TypeSpec

MAX_CHARACTERS = 4_000_000
"""The longest entry that is read; one longer than a book is a data file."""

_MANIFEST = ("version", "category", "tags", "author", "created_at")
_NOT_CONTENT = {"id", "zettel_id", "description", "validated_at", "content_hash", "integrity", "embedding"}
_END = lazy_pattern(r"^---[ \t]*\r?$", re.MULTILINE)
SECTION_LENGTH = 1_800
"""The longest part of a text that is found and loaded by itself, in characters."""
_SECTION = lazy_pattern(r"^##[ \t]+(\S[^\n]*)$", re.MULTILINE)
_HEADING = lazy_pattern(r"^#[ \t]+(\S[^\n]*)$", re.MULTILINE)
_LINK = lazy_pattern(r"\[\[([^\[\]|\n]{1,200})(?:\|[^\[\]\n]{0,200})?\]\]")


def read_front_matter(text: str, spec: TypeSpec, format_: FileFormat, *, what: str, stem: str = "") -> JsonObject:
    """Return the manifest of a text of some type; `stem` names it where its front matter does not."""
    front, content = front_matter(text, what)
    title = as_text(front.get("title")) or _heading(content) or stem
    config: dict[str, Json] = {word: front[word] for word in format_.config if word in front}
    config |= {word: front.get(word) or value for word, value in format_.defaults.items()}
    derived: dict[str, Json] = {"title": title, "links": list(links(content))}
    config |= {word: value for word, value in derived.items() if value and word in spec.words}
    known = {*format_.config, *_MANIFEST, *_NOT_CONTENT, *derived}
    extra = {word: value for word, value in front.items() if word not in known}
    # A type without `extra` allows no other keys, so that they are reported.
    config |= ({"extra": extra} if "extra" in spec.words else extra) if extra else {}
    return {
        "tool_id": front.get("id") or front.get("zettel_id") or stem,
        "description": as_text(front.get("description")) or title,
        **{word: front[word] for word in _MANIFEST if word in front},
        "config": config,
    }


def text_faults(text: str, config: JsonObject, *, what: str) -> Iterator[Issue]:
    """Yield what is wrong with a text that is to be read: no title, no text, or keys that its own schema refuses."""
    front, content = front_matter(text, what)
    # An entry without a title is shown by its name, which says too little to sign it.
    if not (front.get("title") or as_text(config.get("title")) not in {"", what} or _heading(content)):
        yield Issue("title", "is missing", "Write `title:` in the front matter, or a heading `# …`.")
    if not content.strip():
        yield Issue("body", "is empty: there is nothing to read", "Write the text below the front matter.")
    if schema := as_object(config.get("schema")):
        found = schema_faults(schema, "schema")
        yield from found or faults(schema, {**as_object(config.get("extra")), **front}, place="")


def sections(content: str) -> tuple[tuple[str, str], ...]:
    """Return the parts of a text: the heading and the text of each, cut at `##` and where a part is too long."""
    found: list[tuple[str, str]] = []
    starts = [0, *(one.start() for one in _SECTION.finditer(content)), len(content)]
    for start, end in pairwise(dict.fromkeys(starts)):
        part = content[start:end].strip()
        heading = _SECTION.match(part)
        name = heading[1].strip() if heading else ""
        found += [(name, part[at : at + SECTION_LENGTH]) for at in range(0, len(part), SECTION_LENGTH)]
    return tuple(found)


def body(text: str) -> str:
    """Return the text of an entry, without its signature and front matter."""
    return _cut(split(text, ".md")[1])[1].strip()


def links(content: str) -> tuple[str, ...]:
    """Return the targets of `[[target]]` and `[[target|label]]` links in a text, in order, each once."""
    return tuple(dict.fromkeys(found[1].strip() for found in _LINK.finditer(content)))


def front_matter(text: str, what: str) -> tuple[JsonObject, str]:
    """Return the front matter of a text, and what follows it."""
    if len(text) > MAX_CHARACTERS:
        fix = "Split it, and link the parts as [[name]]."
        raise refuse(what, f"longer than {MAX_CHARACTERS:,} characters", fix)
    unsigned = split(text, ".md")[1]
    front, content = _cut(unsigned)
    # Blank lines stand for the signature, so that faults name the line of the file.
    above = text.count("\n") - unsigned.count("\n")
    value = read_yaml("\n" * above + front, what=what).value if front.strip() else {}
    if not isinstance(value, Mapping):
        raise refuse(what, "the front matter is not a mapping", "Write `key: value` lines.", line=1)
    return value, content.strip()


def _cut(text: str) -> tuple[str, str]:
    """Return the front matter, its opening line blank, and what follows; no front matter where it is never closed."""
    opening = _END.match(text)
    closing = _END.search(text, opening.end() + 1) if opening else None
    if opening is None or closing is None:
        return "", text
    return text[opening.end() : closing.start()], text[closing.end() :]


def _heading(content: str) -> str:
    found = _HEADING.search(content)
    return found[1].strip() if found else ""


_ALLOWED = "allowed-tools"
_WORDS = ("license", "compatibility", "metadata")
_KNOWN = frozenset({*_WORDS, _ALLOWED, "name", "description", "version", "category", "tags", "author"})
_NO_VERSION = "0.1.0"
_NAME_LENGTH, _DESCRIPTION_LENGTH, _COMPATIBILITY_LENGTH = 64, 1_024, 500
_TOOL = lazy_pattern(r"[^\s,()]+(?:\([^()]*\))?")
_NUMBERS = lazy_pattern(r"[0-9]+(?:\.[0-9]+)?")
_FILE: JsonObject = {
    "type": "object",
    "properties": {"file": {"type": "string", "description": "One of its files, such as references/forms.md"}},
    "additionalProperties": False,
}


def read_skill(text: str, *, what: str, stem: str) -> tuple[JsonObject, tuple[Issue, ...]]:
    """Return the manifest of a skill, which has the name of its folder or file, and its issues."""
    front, content = front_matter(text, what)
    first = next((line.strip("# \t") for line in content.splitlines() if line.strip("# \t")), "")
    config: dict[str, Json] = {word: front[word] for word in _WORDS if word in front}
    if _ALLOWED in front:
        allowed = front[_ALLOWED]
        texts = map(as_text, allowed) if isinstance(allowed, list) else (text_of(allowed),)
        config["allowed_tools"] = [found for text in texts for found in _TOOL.findall(text)]
    if extra := {word: value for word, value in front.items() if word not in _KNOWN}:
        config["extra"] = extra
    value: JsonObject = {
        "tool_id": stem,
        "version": _version(front),
        "description": as_text(front.get("description")).strip() or first[:_DESCRIPTION_LENGTH],
        **{word: front[word] for word in ("category", "tags", "author") if word in front},
        "config": config,
        "parameters": _FILE,
    }
    return value, tuple(_issues(front, stem))


def skill_grant(skill_id: str, allowed: Sequence[str]) -> Grant:
    """Return what may be used while a skill applies, as a grant that narrows others and gives nothing by itself."""
    tools = [name for name in allowed if is_known_form(name)]
    return grant_of({"tools": tools, "skills": ["*"]}, f"the skill {skill_id}")


def is_known_form(name: str) -> bool:
    """Whether a word of `allowed-tools` can name items here; `Bash(git:*)` is a restriction of another program."""
    return all(is_tool_id(part.replace("*", "x")) for part in name.split("/"))


def _version(front: JsonObject) -> str:
    """Return the version: that of the front matter or of its metadata, where `1.0` means `1.0.0`."""
    written = front.get("version") or as_object(front.get("metadata")).get("version") or _NO_VERSION
    text = text_of(written)
    if _NUMBERS.fullmatch(text):
        text += ".0" * (2 - text.count("."))
    return text if Version.parse(text) not in {None, Version(0, 0, 0)} else _NO_VERSION


def _issues(front: JsonObject, stem: str) -> Iterator[Issue]:
    name, compatibility = as_text(front.get("name")), as_text(front.get("compatibility"))
    if name and name != stem:
        reason = f"{name!r:.80} is not the name of its folder, {stem!r}, by which it is found"
        fix = f"Write `name: {stem}`, or rename the folder to {name[:_NAME_LENGTH]!r}."
        yield Issue("name", reason, fix, "warning")
    if len(name) > _NAME_LENGTH:
        yield Issue("name", f"is longer than {_NAME_LENGTH} characters", "Choose a shorter one.", "warning")
    if not as_text(front.get("description")).strip():
        fix = "Say in the front matter what it does and when to use it: models choose by that."
        yield Issue("description", "is missing", fix, "warning")
    if len(as_text(front.get("description"))) > _DESCRIPTION_LENGTH:
        yield Issue("description", f"is longer than {_DESCRIPTION_LENGTH:,} characters", "Shorten it.", "warning")
    if len(compatibility) > _COMPATIBILITY_LENGTH:
        yield Issue("compatibility", f"is longer than {_COMPATIBILITY_LENGTH} characters", "Shorten it.", "warning")
