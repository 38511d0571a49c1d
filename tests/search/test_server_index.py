"""A registry on a server is searched there: it is never loaded, and its index is updated in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.catalog.registry_source import RegistrySource
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.open import open_database

pytestmark = pytest.mark.usefixtures("sandbox")

TOOL = """tool_id: {name}
tool_type: script
version: 1.0.0
executor: bash_runtime
description: {description}
config: {{entrypoint: main.sh}}
"""

ONE = "where tool_id in (select id from tools where tool_id = 'send_bill')"


@pytest.fixture
def publish(project: Path) -> Callable[..., JsonObject]:
    """Write a tool, and give the request that publishes it."""

    def write(name: str, description: str) -> JsonObject:
        folder = project / ".ai" / "tools" / name
        folder.mkdir(parents=True)
        (folder / "tool.yaml").write_text(TOOL.format(name=name, description=description))
        (folder / "main.sh").write_text("echo hi\n")
        return {"action": "publish", "item_id": name}

    return write


@pytest.mark.req("K-SE-01", "E2")
@pytest.mark.usefixtures("encoder")
async def test_published_items_on_a_server_are_found_by_words_and_by_meaning(
    project: Path, postgres_url: str, publish: Callable[..., JsonObject], owner: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_REGISTRY", postgres_url)
    monkeypatch.setattr(RegistrySource, "entries", lambda _: pytest.fail("the registry was loaded"))

    kernel = Kernel(project)

    async def found(query: str) -> list[object]:
        response: JsonObject = {}
        for _ in range(100):  # each waits for a moment
            response = (await kernel.call("search", {"query": query, "source": "registry"}, owner)).content
            if "indexing" not in response:
                break
        return [as_object(one).get("name") for one in as_list(response.get("results"))]

    try:
        assert await found("bill") == []
        answer = await kernel.call("execute", publish("send_bill", "Sends a bill"), owner)
        assert not answer.is_error, answer.content
        assert await found("bill") == ["send_bill"]
        assert await found("invoice") == ["send_bill"]
        assert not (await kernel.call("execute", publish("look_out", "Tells the weather"), owner)).is_error
        assert await found("forecast") == ["look_out"]
    finally:
        await kernel.aclose()


@pytest.mark.usefixtures("encoder_model")
async def test_published_items_on_a_server_are_found_by_words_if_the_encoder_fails(
    project: Path,
    postgres_url: str,
    publish: Callable[..., JsonObject],
    owner: Caller,
    encoder: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIWI_REGISTRY", postgres_url)

    def fail(_: object) -> None:
        raise RuntimeError("out of order")

    vars(encoder)["encode"] = fail

    kernel = Kernel(project)
    try:
        assert not (await kernel.call("execute", publish("send_bill", "Sends a bill"), owner)).is_error
        response: JsonObject = {}
        for _ in range(100):  # each waits for a moment
            response = (await kernel.call("search", {"query": "bill", "source": "all"}, owner)).content
            if any("also" in as_object(one) for one in as_list(response["results"])):
                break
        (found,) = (one for one in map(as_object, as_list(response["results"])) if one["name"] == "send_bill")
        assert (found["source"], found["also"]) == ("project", ["registry/public/send_bill"])
        assert any("out of order" in str(one) for one in as_list(response["warnings"]))
    finally:
        await kernel.aclose()


@pytest.mark.usefixtures("home")
async def test_a_remembered_item_of_a_server_is_found_without_a_matching_word(
    project: Path, postgres_url: str, publish: Callable[..., JsonObject], owner: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_REGISTRY", postgres_url)
    monkeypatch.setenv("KIWI_SEARCH", "words")

    async def calls(*requests: tuple[str, JsonObject]) -> list[JsonObject]:
        kernel = Kernel(project)
        try:
            return [(await kernel.call(verb, request, owner)).content for verb, request in requests]
        finally:
            await kernel.aclose()

    def search(query: str) -> tuple[str, JsonObject]:
        return "search", {"query": query, "source": "registry"}

    await calls(("execute", publish("send_bill", "Sends a bill")), search("bill"))
    first, read = await calls(
        search("a bill for the umbrella of my aunt"), ("load", {"item_id": "send_bill", "source": "registry"})
    )
    (card,) = map(as_object, as_list(first["results"]))
    assert "error" not in read, read
    again, other = await calls(search("for the umbrella of my aunt"), search("for the boat of my uncle"))
    (found,) = map(as_object, as_list(again["results"]))
    assert (found["identity"], found["remembered"]) == (card["identity"], True)
    assert other["results"] == []


@pytest.mark.usefixtures("home")
def test_a_damaged_row_of_a_server_is_found_and_repaired(
    project: Path, postgres_url: str, publish: Callable[..., JsonObject], owner: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_REGISTRY", postgres_url)
    monkeypatch.setenv("KIWI_SEARCH", "words")
    database = open_database(postgres_url)

    def kept() -> list[object]:
        return [words for (words,) in database.read(f"select words from tool_embeddings {ONE}")]

    async def story() -> None:
        kernel = Kernel(project)
        try:
            assert not (await kernel.call("execute", publish("send_bill", "Sends a bill"), owner)).is_error
            await settled(kernel)
            sound = kept()
            with database.transaction() as transaction:
                transaction.write(f"update tool_embeddings set words = ? {ONE}", (b"\xff\x00abc",))
            for _ in range(2):  # the first sees that it is damaged, the second has it made again
                assert await found(kernel) == ["send_bill"]
                await settled(kernel)
            assert kept() == sound != []
            assert await found(kernel) == ["send_bill"]
        finally:
            await kernel.aclose()

    async def found(kernel: Kernel) -> list[object]:
        response = (await kernel.call("search", {"query": "bill", "source": "registry"}, owner)).content
        return [as_object(one).get("name") for one in as_list(response.get("results"))]

    async def settled(kernel: Kernel) -> None:
        await found(kernel)
        await kernel.index(silent, seconds=20)

    try:
        asyncio.run(story())
    finally:
        database.close()
