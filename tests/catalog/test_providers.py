"""Model providers as items: where their files are, and which one a name means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError, ToolNotFound
from kiwi_mcp.drivers.llm.provider import choose_model

Put = Callable[..., Path]
THREAD = (
    "tool_id: news\ntool_type: thread\nversion: 1.0.0\nexecutor: local_llm\ndescription: Reads the news\n"
    "config: {directive: read_news}\n"
)


def provider(host: str, tool_id: str = "local_llm") -> str:
    return (
        f'tool_id: {tool_id}\ntool_type: runtime\nversion: "1.0.0"\nexecutor: http_client\ndescription: A model\n'
        f"config: {{dialect: openai_chat, url: 'https://{host}/v1/chat/completions', tiers: {{fast: m}}}}\n"
    )


def host_of(catalog: Catalog, ref: str) -> str:
    return choose_model(catalog.resolve(ref), tier="fast").url.split("/")[2]


@pytest.mark.req("N7", "K-TH-01")
@pytest.mark.parametrize(
    ("path", "user"), [("providers/local.yaml", True), ("tools/local_llm.yaml", True), ("tools/local_llm.yaml", False)]
)
def test_a_thread_runs_on_the_provider_that_it_names(catalog: Catalog, put: Put, path: str, user: bool) -> None:
    put(path, provider("own.test"), user=user)
    put("tools/news.yaml", THREAD)

    assert host_of(catalog, "news") == "own.test"
    assert [link.id for link in catalog.resolve("news").links] == ["news", "local_llm", "http_client"]


def test_the_folder_of_providers_belongs_to_the_user(catalog: Catalog, put: Put) -> None:
    put("providers/local.yaml", provider("project.test"))

    with pytest.raises(ToolNotFound):
        catalog.resolve("local_llm")


@pytest.mark.parametrize("path", ["providers/local.yaml", "tools/local_llm.yaml"])
def test_a_project_never_replaces_a_provider_of_the_user(catalog: Catalog, put: Put, path: str) -> None:
    put("tools/local_llm.yaml", provider("project.test"))
    put("tools/news.yaml", THREAD)
    assert host_of(catalog, "news") == "project.test"

    put(path, provider("user.test"), user=True)

    assert host_of(catalog, "news") == "user.test"
    assert host_of(catalog, "local_llm") == "user.test"
    assert any("hides project/local/local_llm" in sentence for sentence in catalog.resolve("news").shadowed)


def test_a_project_does_not_replace_a_broken_provider_of_the_user(catalog: Catalog, put: Put) -> None:
    put("tools/local_llm.yaml", provider("project.test"))
    put("providers/local_llm.yaml", "tool_id: [", user=True)

    with pytest.raises(KiwiError):
        catalog.resolve("local_llm")


def test_a_provider_that_is_added_or_removed_is_noticed(catalog: Catalog, put: Put) -> None:
    path = put("providers/local.yaml", provider("user.test"), user=True)
    assert host_of(catalog, "local_llm") == "user.test"

    path.unlink()

    with pytest.raises(ToolNotFound):
        catalog.resolve("local_llm")


@pytest.mark.parametrize("name", ["anthropic_runtime", "openai_runtime", "ollama_runtime", "llm_runtime"])
def test_presets_are_built_in_and_reserved(catalog: Catalog, put: Put, name: str) -> None:
    put("tools/mine.yaml", provider("project.test", name))

    assert catalog.resolve(name).tool.origin.source == "builtin"
    assert catalog.resolve(name).faults == ()
