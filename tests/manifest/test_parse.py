"""Every spelling that Kiwi ever had becomes one manifest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.type_specs import load_type_specs


def read(**words: Json) -> Manifest:
    return parse(words, stem="stem")


def test_an_item_is_named_by_its_name_key_or_its_file() -> None:
    assert read(tool_id="a", name="b").tool_id == "a"
    assert read(name="b").tool_id == "b"
    assert read().tool_id == "stem"


def test_executor_id_is_executor() -> None:
    assert read(tool_type="script", executor_id="python_runtime").executor == "python_runtime"
    assert read(tool_type="knowledge", executor=None).executor is None


@pytest.mark.req("K-TY-01")
def test_an_executor_with_nested_keys_is_read() -> None:
    bash = read(
        tool_type="bash",
        executor={
            "type": "bash",
            "entrypoint": "script.sh",
            "shell": "/bin/bash",
            "requires": {"commands": ["jq", "curl"], "environment": ["API_KEY"]},
        },
    )
    api = read(
        executor={
            "type": "api",
            "method": "POST",
            "endpoint": "https://api.example.com/process",
            "auth": {"type": "bearer", "env_var": "API_TOKEN"},
            "timeout": 30,
        }
    )
    assert (bash.tool_type, bash.executor) == ("script", "bash_runtime")
    assert bash.config == {
        "entrypoint": "script.sh",
        "shell": "/bin/bash",
        "commands": ["jq", "curl"],
        "variables": ["API_KEY"],
    }
    assert (api.tool_type, api.executor) == ("api", "http_client")
    assert api.config == {
        "method": "POST",
        "url": "https://api.example.com/process",
        "auth": {"token": "${API_TOKEN}", "type": "bearer"},
        "timeout": 30,
    }


def test_permissions_and_packages_are_distinguished() -> None:
    found = read(
        tool_type="script",
        requires=["fs.read", "httpx>=0.24"],
        dependencies=["rich", {"name": "numpy", "version": ">=1"}],
        config={"entrypoint": "a.py", "requires": ["rich"]},
    )
    assert found.requires == ("fs.read",)
    assert found.config["requires"] == ["rich", "httpx>=0.24", "numpy>=1"]


@pytest.mark.parametrize("word", ["parameters", "inputs", "input_schema", "config_schema"])
def test_parameters_may_be_declared_under_any_of_their_names(word: str) -> None:
    schema: JsonObject = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert parse({word: schema}, stem="x").parameters == {**schema, "additionalProperties": False}


def test_unknown_keys_are_kept_and_reported_with_the_nearest() -> None:
    found = parse({"descripton": "x", "author": "me"}, stem="x", lines={"descripton": 7})
    assert found.extra == {"descripton": "x", "author": "me"}
    (issue,) = found.issues
    assert (issue.place, issue.severity, issue.line) == ("descripton", "warning", 7)
    assert "`description`" in issue.fix


def test_a_config_key_at_the_top_level_is_an_error() -> None:
    (issue,) = read(tool_type="api", url="https://a.example").issues
    assert (issue.place, issue.is_error) == ("url", True)


def test_the_source_is_preserved() -> None:
    words: JsonObject = {"tool_type": "python", "version": "1.0.0"}
    found = parse(words, stem="x")
    assert found.written == words
    assert found.written_type == "python"
    assert found.tool_type == "script"


def test_a_category_that_differs_from_the_folder_is_reported() -> None:
    found = parse({"category": "a"}, stem="x", category="b")
    assert found.category == "b"
    assert found.issues[0].place == "category"


@pytest.mark.parametrize(
    ("word", "value"),
    [("tool_id", ["a"]), ("config", [1]), ("executor", 5), ("tags", 5), ("mutates_state", "yes"), ("parameters", "x"),
     ("outputs", 3), ("validation", "x"), ("env_config", []), ("description", {})],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_an_issue(word: str, value: Json) -> None:
    assert any(issue.place.startswith(word) for issue in parse({word: value}, stem="x").issues)


values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab{}$/:.@ -\n", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "type", "required", "url", "requires", "auth", "env", "$ref"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
words = st.sampled_from(
    [
        "tool_id",
        "tool_type",
        "version",
        "executor",
        "config",
        "parameters",
        "requires",
        "dependencies",
        "outputs",
        "tags",
    ]
)
types = st.sampled_from(["script", "api", "runtime", "mcp_server", "mcp_tool", "knowledge", "composite", "python"])


@pytest.mark.slow
@given(written=st.dictionaries(words, values, max_size=6), kind=types)
@settings(max_examples=60, deadline=None)
def test_any_mapping_becomes_a_manifest_and_a_list_of_issues(written: dict[str, Json], kind: str) -> None:
    manifest = parse({"tool_type": kind, **written}, stem="x")
    assert all(issue.fix for issue in check(manifest, sheets=load_type_specs()))
