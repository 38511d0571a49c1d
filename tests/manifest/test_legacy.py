from __future__ import annotations

import json
from hashlib import sha256

import pytest

from kiwi_mcp.manifest.legacy import Extractor, read_extractor, verdict

pytestmark = pytest.mark.req("K-SI-03")

TIME = "2026-01-25T08:00:00Z"

XML = """<directive name="greet" version="1.2.0">
  <metadata><description>Says hello — warmly</description></metadata>
</directive>"""
DIRECTIVE = f"# Greet\n\n```xml\n{XML}\n```\n"
TOOL = '''"""Counts the words.

More about it.
"""
__version__ = "0.3.0"
__tool_type__ = "python"
__executor_id__ = "python_runtime"
__category__ = "text"
CONFIG = {"limit": 5, "words": ["é", None]}
COMPUTED = len("x")


def main(**kwargs):
    return {}
'''
BODY = "# Tides\n\nTwice a day."
ENTRY = f"""---
id: tides
title: Tides
version: '1.0.0'
category: sea
entry_type: pattern
tags: [a, b]
---

{BODY}
"""


def sha(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def statement(**words: object) -> str:
    return sha(json.dumps(words, sort_keys=True, separators=(",", ":")))


def md(text: str, digest: str) -> str:
    return f"<!-- kiwi-mcp:validated:{TIME}:{digest} -->\n{text}"


def py(text: str, digest: str, time: str = TIME) -> str:
    return f"# kiwi-mcp:validated:{time}:{digest}\n{text}"


def tool_manifest(changes: dict[str, object]) -> dict[str, object]:
    names = ["config_schema", "mutates_state", "validation", "extensions", "extraction_rules"]
    return {
        "name": "count", "version": "0.3.0", "tool_type": "python", "executor_id": "python_runtime", "category": "text",
        "description": "Counts the words.", "config": {"limit": 5, "words": ["é", None]},
        **dict.fromkeys(names), **changes,
    }  # fmt: skip


def tool_hash(
    source: str = TOOL, changes: dict[str, object] | None = None, *, name: str = "count", executable: bool = False
) -> str:
    file = {"path": "count.py", "sha256": sha(source)} | ({"is_executable": False} if executable else {})
    return statement(tool_id=name, version="0.3.0", manifest=tool_manifest(changes or {}), files=[file])


def directive_verdict(text: str, item_id: str = "greet") -> str:
    return verdict(text, suffix=".md", item_id=item_id, kind="directive", category="core")


def tool_verdict(text: str, item_id: str = "count") -> str:
    return verdict(text, suffix=".py", item_id=item_id, kind="tool", category="text")


def knowledge_verdict(text: str, category: str = "sea") -> str:
    return verdict(text, suffix=".md", item_id="tides", kind="knowledge", category=category)


def test_generation_a_is_twelve_digits_of_the_content() -> None:
    assert directive_verdict(md(DIRECTIVE, sha(XML)[:12])) == "valid:A"
    assert tool_verdict(py(TOOL, sha(TOOL)[:12])) == "valid:A"
    assert tool_verdict(f"#!/usr/bin/env python3\n{py(TOOL, sha(TOOL)[:12])}") == "valid:A"
    front = f"---\ntitle: Tides\nvalidated_at: {TIME}\ncontent_hash: {sha(BODY)[:12]}\n---\n\n{BODY}\n"
    assert knowledge_verdict(front) == "valid:A"
    assert knowledge_verdict(front.replace("Twice", "Once")) == "modified"


@pytest.mark.parametrize("name", ["greet", "core/greet"])
def test_generation_b_of_directives_is_a_statement_over_the_xml(name: str) -> None:
    digest = statement(directive_name=name, metadata={}, version="1.2.0", xml_hash=sha(XML))
    assert directive_verdict(md(DIRECTIVE, digest)) == "valid:B1"
    assert directive_verdict(md(f"Prose around it does not count.\n{DIRECTIVE}", digest)) == "valid:B1"
    assert directive_verdict(md(DIRECTIVE.replace("warmly", "coldly"), digest)) == "modified"


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (TOOL, {}),
        (TOOL + "ENV_CONFIG = {'env': {}}\n", {"env_config": {"env": {}}}),
        (TOOL + "REQUIRES = ['fs.read']\n", {"requires": ["fs.read"]}),
        (TOOL, {"env_config": None, "requires": None}),
        (TOOL + "MUTATES_STATE = True\n", {"mutates_state": True}),
        (TOOL + "CONFIG = 'a second value does not count'\n", {}),
        (TOOL + "VALIDATION = len('computed')\n", {"validation": None}),
        (f"import os\n{TOOL}", {"description": None}),
    ],
)
def test_generation_b2_of_tools_is_a_statement_over_literals_and_the_file(
    source: str, changes: dict[str, object]
) -> None:
    digest = tool_hash(source, changes)
    assert tool_verdict(py(source, digest)) == "valid:B2"
    assert tool_verdict(py(source + "# more\n", digest)) == "modified"


def test_generation_b1_of_tools_includes_the_executable_bit_and_accepts_slash_names() -> None:
    assert tool_verdict(py(TOOL, tool_hash(executable=True))) == "valid:B1"
    assert tool_verdict(py(TOOL, tool_hash(name="text/count"))) == "valid:B2"


def test_a_shebang_is_part_of_the_signed_content() -> None:
    source = f"#!/usr/bin/env python3\n{TOOL}"
    head, _, rest = source.partition("\n")
    assert tool_verdict(f"{head}\n{py(rest, tool_hash(source))}") == "valid:B2"


def test_line_ends_are_normalised_as_in_text_mode() -> None:
    assert tool_verdict(py(TOOL, tool_hash()).replace("\n", "\r\n")) == "valid:B2"


@pytest.mark.parametrize(("key", "generation"), [("zettel_id", "B3"), ("id", "B4")])
def test_later_knowledge_is_a_statement_with_three_facts(key: str, generation: str) -> None:
    metadata = {"category": "sea", "entry_type": "pattern", "tags": ["a", "b"]}
    digest = statement(**{key: "tides"}, version="1.0.0", content_hash=sha(BODY), metadata=metadata)
    assert knowledge_verdict(md(ENTRY, digest)) == f"valid:{generation}"
    assert knowledge_verdict(md(ENTRY.replace("[a, b]", "[a]"), digest)) == "modified"


@pytest.mark.parametrize(("category", "entry_type"), [(None, None), ("sea", "learning")])
def test_missing_fields_of_knowledge_are_null_or_old_defaults(category: str | None, entry_type: str | None) -> None:
    text = "---\nversion: 1.0.0\n---\nx"
    metadata: dict[str, object] = {"category": category, "entry_type": entry_type, "tags": []}
    assert (
        knowledge_verdict(md(text, statement(id="tides", version="1.0.0", content_hash=sha("x"), metadata=metadata)))
        == "valid:B4"
    )


def test_early_knowledge_is_a_statement_with_the_frontmatter() -> None:
    front = {"zettel_id": "tides", "title": "Tides", "version": "1.0.0", "draft": True}
    text = "---\nzettel_id: tides\ntitle: Tides\nversion: 1.0.0\ndraft: yes\nintegrity: x\n---\nx"
    for frontmatter in (front, {}):
        digest = statement(zettel_id="tides", version="1.0.0", content_hash=sha("x"), frontmatter=frontmatter)
        assert knowledge_verdict(md(text, digest)) == "valid:B1"


def test_signature_lines_of_the_successor_cover_the_bare_content() -> None:
    def rye(digest: str) -> str:
        return f"rye:signed:2026-02-10T00:00:00Z:{digest}:c2ln:{'0f' * 8}"

    assert directive_verdict(f"<!-- {rye(sha(XML))} -->\n{DIRECTIVE}") == "valid:R"
    assert tool_verdict(f"#!/bin/x\n# {rye(sha(TOOL))}\n{TOOL}") == "valid:R"
    assert knowledge_verdict(f"<!-- {rye(sha(BODY))} -->\n{ENTRY}") == "valid:R"
    assert tool_verdict(f"# {rye(sha(TOOL))}\n{TOOL} ") == "modified"


def test_a_file_without_a_signature_is_unsigned() -> None:
    assert tool_verdict(TOOL) == "unsigned"
    assert tool_verdict(py(TOOL, "0" * 64)) == "unsigned"
    assert directive_verdict(md("no directive here", sha("x"))) == "modified"


def test_an_unreproducible_hash_is_unverifiable_only_if_signed_at_that_time() -> None:
    dated = "---\nversion: 1.0.0\ncategory: 2026-01-25\n---\nx"
    assert knowledge_verdict(md(dated, sha("?"))) == "legacy-unverifiable"
    shell = "# kiwi-mcp:validated:{}:" + sha("?") + "\necho\n"
    assert verdict(shell.format(TIME), suffix=".sh", item_id="x", kind="tool") == "legacy-unverifiable"
    assert verdict(shell.format("2026-11-16T00:00:00Z"), suffix=".sh", item_id="x", kind="tool") == "modified"
    assert tool_verdict(py("def broken(:\n", sha("?"))) == "legacy-unverifiable"


EXTRACTOR = """
EXTENSIONS = [".yaml"]
PARSER = "yaml"
EXTRACTION_RULES = {
    "name": {"type": "path", "key": "tool_id", "fallback": "name"},
    "stem": {"type": "filename"},
    "version": {"type": "path", "key": "version"},
    "limit": {"type": "path", "key": "config.limit"},
}
"""


def test_an_extractor_of_a_project_selects_the_manifest_of_other_languages() -> None:
    extractor = read_extractor(EXTRACTOR)
    assert extractor is not None
    source = "name: lamp\nversion: '1.0.0'\nconfig:\n  limit: 0o7\n  lit: yes\n"
    manifest = {"name": "lamp", "stem": "lamp", "version": "1.0.0", "limit": "0o7"}
    file = {"path": "lamp.yaml", "sha256": sha(source)}
    digest = statement(tool_id="lamp", version="1.0.0", manifest=manifest, files=[file])
    text = py(source, digest)
    assert verdict(text, suffix=".yaml", item_id="lamp", kind="tool", extractors=[extractor]) == "valid:B2"
    assert verdict(text + " ", suffix=".yaml", item_id="lamp", kind="tool", extractors=[extractor]) == "modified"
    assert verdict(text, suffix=".yaml", item_id="lamp", kind="tool") == "legacy-unverifiable"


def test_an_extractor_is_read_and_never_run() -> None:
    assert (
        read_extractor("raise SystemExit\nEXTENSIONS = ['.x']\nEXTRACTION_RULES = {'n': {'type': 'filename'}}")
        is not None
    )
    assert read_extractor("EXTENSIONS = list('x')\nEXTRACTION_RULES = {}") is None
    assert read_extractor("(" * 5000) is None


def test_a_regular_expression_of_a_project_is_not_executed() -> None:
    stalls = Extractor((".sh",), "text", {"name": {"type": "regex", "pattern": "(a+)+$"}})
    text = py("a" * 5000 + "!\n", sha("?"))
    assert verdict(text, suffix=".sh", item_id="x", kind="tool", extractors=[stalls]) == "legacy-unverifiable"
