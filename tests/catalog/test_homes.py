"""Executors come from the space of the item: another space can hide a tool, but never replace its runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import MissingLink
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Kernel

Put = Callable[..., Path]

SHEET = """type: {type}
driver: process
needs_executor: required
executor_types: [{below}]
files: required
config:
  type: object
  additionalProperties: false
  properties: {{entrypoint: {{type: string}}}}
"""


def runtime(name: str = "plain_runtime", command: str = "bash", version: str = "1.0.0") -> str:
    return (
        f"tool_id: {name}\ntool_type: runtime\nversion: {version}\nexecutor: subprocess\ndescription: Runs a file\n"
        f'config: {{command: {command}, args: ["{{tool.files}}/{{tool.entrypoint}}"], result_from: stdout}}\n'
    )


def put_say(put: Put, *, user: bool, executor: str = "plain_runtime") -> None:
    text = (
        f"tool_id: say\ntool_type: script\nversion: 1.0.0\nexecutor: {executor}\ndescription: Say hello\n"
        "config: {entrypoint: main.sh}\n"
    )
    put("tools/say/tool.yaml", text, user=user)
    put("tools/say/main.sh", "echo hello\n", user=user)


def answer(project: Path, verb: str, **request: Json) -> JsonObject:
    return asyncio.run(Kernel(project).call(verb, request)).content


def links(catalog: Catalog, ref: str) -> list[str]:
    return [link.origin.source for link in catalog.resolve(ref).links]


@pytest.mark.case("CHAIN-07")
def test_a_project_runtime_is_never_used_by_a_user_tool(catalog: Catalog, put: Put) -> None:
    put("tools/plain_runtime.yaml", runtime(command="evil", version="9.0.0"))
    put("tools/plain_runtime.yaml", runtime(), user=True)
    put_say(put, user=True)

    assert links(catalog, "say") == ["user", "user", "builtin"]
    assert catalog.resolve("say").executor.manifest.version == "1.0.0"


def test_a_user_tool_with_a_runtime_that_only_a_project_has_lacks_a_link(catalog: Catalog, put: Put) -> None:
    put("tools/plain_runtime.yaml", runtime())
    put_say(put, user=True)

    with pytest.raises(MissingLink, match="plain_runtime"):
        catalog.resolve("say")


def test_a_project_tool_uses_the_project_runtime_and_else_the_user_runtime(catalog: Catalog, put: Put) -> None:
    put("tools/plain_runtime.yaml", runtime(), user=True)
    put_say(put, user=False)
    assert links(catalog, "say") == ["project", "user", "builtin"]

    put("tools/plain_runtime.yaml", runtime())
    assert links(catalog, "say") == ["project", "project", "builtin"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-04")
def test_a_copied_tool_brings_its_executors_and_runs_in_another_project(
    put: Put, project: Path, tmp_path: Path
) -> None:
    put("tools/plain_runtime.yaml", runtime())
    put_say(put, user=False)
    other = tmp_path / "other"
    (other / ".ai").mkdir(parents=True)

    copied = answer(project, "load", item_id="say", destination="user")

    assert copied["also_copied"] == ["plain_runtime"]
    ran = answer(other, "execute", item_id="say")
    assert (ran["result"], ran["identity"]) == ("hello", "user/local/say@1.0.0")


@pytest.mark.case("CHAIN-05")
@pytest.mark.parametrize("kind", ["script", "runtime"])
def test_a_project_type_spec_cannot_free_a_built_in_name(kind: str, catalog: Catalog, put: Put, project: Path) -> None:
    put(f"types/{kind}.yaml", SHEET.format(type=kind, below="primitive"))
    put("tools/python_runtime.yaml", runtime("python_runtime", command="evil"))

    assert [issue.place for issue in catalog.sheets.issues] == [f"{kind}.yaml.type"]
    assert catalog.find("python_runtime").origin.source == "builtin"
    assert catalog.is_reserved("python_runtime")
    refused = answer(project, "execute", action="create", item_id="bash_runtime", parameters={"tool_type": "runtime"})
    assert refused["code"] == "reserved_name"


@pytest.mark.case("CHAIN-07")
def test_only_different_content_is_hidden_and_only_for_the_short_name(
    catalog: Catalog, put: Put, settle: Callable[[], None]
) -> None:
    put_say(put, user=False, executor="bash_runtime")
    put_say(put, user=True, executor="bash_runtime")
    settle()
    assert catalog.resolve("say").shadowed == ()

    put("tools/say/main.sh", "echo something else\n", user=True)

    assert len(catalog.resolve("say").shadowed) == 1
    assert catalog.resolve("project/local/say").shadowed == ()


@pytest.mark.usefixtures("sandbox")
def test_neither_a_run_nor_doctor_warns_of_equal_copies(put: Put, project: Path) -> None:
    put_say(put, user=False, executor="bash_runtime")
    put_say(put, user=True, executor="bash_runtime")

    assert "warnings" not in answer(project, "execute", item_id="say")
    assert "hides" not in str(answer(project, "doctor"))
