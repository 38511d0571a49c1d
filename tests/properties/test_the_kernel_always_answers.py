"""Property: any request gets a result or a refusal of one shape, and never an internal error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.verbs import VERBS

TOOL = "tool_id: say\ntool_type: knowledge\nversion: 1.0.0\ndescription: Say\n"
FAMILY = {"error", "code", "item_type", "message", "suggestion"}
ACTIONS = ["run", "sign", "create", "update", "delete", "validate", "why", "publish", ""]
WORDS = [
    "item_type", "query", "source", "limit", "sort_by", "project_path", "item_id", "destination", "file",
    "offset", "length", "action", "parameters", "dry_run", "frozen", "topic", "tool_type", "category", "tag",
    "lost",
]  # fmt: skip
AUTHORING = [
    "tool_id", "name", "tool_type", "version", "executor", "description", "config", "parameters", "manifest",
    "files", "content", "filename", "location", "category", "path", "openapi", "prefix", "base_url", "only",
    "auth", "tags", "requires", "validation", "env_config", "outputs", "mutates_state", "effect", "x" * 300,
]  # fmt: skip
TELLING = [
    "say", "tool", "project", "user", "api", "script", "runtime", "knowledge", "directive", "output", "1.0.0", "GET",
    "http_client", "python_runtime", "subprocess", "../x", "/", "~", "\0", "\ud800", "${HOME}", "{word}", "a: [",
    "---\n", "tool.yaml", "a.md", "main.py", "<directive>", "openapi: 3.1.0", "say/output_20260101_000000", "0",
    "1e999", '{"openapi": "3.0.0", "paths": {"/": {"get": {}}}}', "https://a.test/{word}", "x" * 5_000,
]  # fmt: skip

texts = st.sampled_from(TELLING) | st.text(max_size=20)
scalars: st.SearchStrategy[Json] = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30) | st.floats() | texts
)
values: st.SearchStrategy[Json] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.sampled_from(AUTHORING), inner, max_size=6),
    max_leaves=12,
)
authored: st.SearchStrategy[JsonObject] = st.dictionaries(st.sampled_from(AUTHORING), values, max_size=8)
payloads: st.SearchStrategy[JsonObject] = st.dictionaries(st.sampled_from(WORDS), values, max_size=8)

ANSWERING = [verb.name for verb in VERBS if verb.name != "worker"]
"""All but the worker, which runs until it is stopped."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("always")
    project = folder / "project"
    for name, text in {"tools/say/tool.yaml": TOOL, "tools/say/README.md": "Hi.", "tools/bad.yaml": "a: ["}.items():
        path = project / ".ai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Kernel(project, user=folder / "user", cache=folder / "cache")


def check(answer: Answer) -> None:
    assert answer.content.get("code") != "internal", answer.content
    if answer.is_error:
        assert answer.content.keys() >= FAMILY
        assert answer.content["suggestion"]
        assert answer.exit_code
    json.dumps(answer.content, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-03", "F7")
@pytest.mark.parametrize("verb", ANSWERING)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(payload=payloads)
def test_any_json_for_any_verb_is_answered(verb: str, payload: JsonObject, kernel: Kernel) -> None:
    check(asyncio.run(kernel.call(verb, payload)))


@pytest.mark.req("K-ME-03")
@pytest.mark.parametrize("action", ACTIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=authored, item_id=st.none() | texts, item_type=st.sampled_from(["tool", "directive", "knowledge", "", "x"])
)
async def test_any_arguments_for_any_action_are_answered(
    action: str, words: Mapping[str, Json], item_id: str | None, item_type: str, kernel: Kernel
) -> None:
    request: JsonObject = {
        "action": action, "parameters": words, "item_id": item_id, "item_type": item_type, "dry_run": True,
    }  # fmt: skip
    check(await kernel.call("execute", request))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(verb=st.text(max_size=20), payload=payloads)
async def test_an_unknown_verb_is_not_found(verb: str, payload: JsonObject, kernel: Kernel) -> None:
    answer = await kernel.call(f"{verb}?", payload)

    assert answer.content["code"] == "verb_not_found"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.text(max_size=400) | st.sampled_from(TELLING),
    name=st.sampled_from(["a.yaml", "a.py", "a.md", "a.json", "a.sh", "a"]),
)
async def test_any_text_in_a_project_is_an_item_or_an_issue_or_ignored(text: str, name: str, kernel: Kernel) -> None:
    project: Path | None = kernel._services.catalogs.project
    assert project is not None
    path = project / ".ai" / "tools" / name
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        for verb, request in (
            ("search", {"query": "a"}),
            ("load", {"item_id": "a"}),
            ("execute", {"action": "why", "item_id": "a"}),
        ):
            check(await kernel.call(verb, request))
    finally:
        path.unlink()


@pytest.mark.parametrize("word", ["item_type", "action"])
@pytest.mark.parametrize("value", ["\ud800", {"\ud800": None}, float("nan"), ["x"], "x" * 10_000])
async def test_any_answer_can_be_written_by_every_surface(word: str, value: Json, kernel: Kernel) -> None:
    check(await kernel.call("execute", {word: value, "item_id": "lost"}))
