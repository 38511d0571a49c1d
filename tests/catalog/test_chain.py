"""Executor chains, and the errors of chains that do not resolve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import ChainCycle, ChainMistyped, ChainTooDeep, KiwiError, MissingLink

Put = Callable[..., Path]


def item(name: str, kind: str, executor: str | None, *, version: str = "1.0.0", config: str = "{}") -> str:
    below = f"executor: {executor!r}\n" if executor else ""
    return f"tool_id: {name}\ntool_type: {kind}\nversion: {version}\n{below}description: x\nconfig: {config}\n"


@pytest.mark.req("K-CH-01")
def test_a_chain_runs_from_the_tool_to_a_built_in_primitive(catalog: Catalog, put: Put) -> None:
    put("tools/x/tool.yaml", item("x", "script", "python_runtime", config="{entrypoint: main.py}"))

    chain = catalog.resolve("x")

    assert chain.names == ("x", "python_runtime", "subprocess")
    assert chain.driver == "process"
    assert [link["tool_type"] for link in chain.to_json()] == ["script", "runtime", "primitive"]
    assert chain.primitive.identity.startswith("builtin/kiwi/subprocess@")


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-03")
def test_a_missing_link_is_named(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", item("x", "script", "my_runtime"))
    put("tools/my_runtime.yaml", item("my_runtime", "runtime", "nowhere"))

    with pytest.raises(MissingLink, match="x → my_runtime → nowhere") as refused:
        catalog.resolve("x")
    assert refused.value.details["chain"] == ["x", "my_runtime", "nowhere"]


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-01")
def test_a_cycle_is_named(catalog: Catalog, put: Put) -> None:
    put("tools/a.yaml", item("a", "script", "b"))
    put("tools/b.yaml", item("b", "script", "a"))
    put("tools/me.yaml", item("me", "runtime", "me"))

    with pytest.raises(ChainCycle, match="a → b → a"):
        catalog.resolve("a")
    with pytest.raises(ChainCycle, match="me → me"):
        catalog.resolve("me")


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-02")
def test_a_chain_of_twenty_links_is_too_deep(catalog: Catalog, put: Put) -> None:
    for number in range(20):
        put(f"tools/r{number}.yaml", item(f"r{number}", "runtime", f"r{number + 1}" if number < 19 else "subprocess"))

    with pytest.raises(ChainTooDeep, match="r0 → r1") as refused:
        catalog.resolve("r0")
    assert refused.value.details["limit"] == 16


@pytest.mark.req("K-CH-02")
@pytest.mark.parametrize(
    ("kind", "executor"),
    [
        ("script", "subprocess"),
        ("script", "server"),
        ("api", "subprocess"),
        ("api", "python_runtime"),
        ("mcp_tool", "python_runtime"),
        ("knowledge", "python_runtime"),
        ("runtime", "python_runtime"),
        ("no_such_type", "subprocess"),
    ],
)
def test_a_link_of_the_wrong_type_is_refused_with_the_chain(
    catalog: Catalog, put: Put, kind: str, executor: str
) -> None:
    put("tools/server.yaml", item("server", "mcp_server", "subprocess", config="{transport: stdio, command: x}"))
    put("tools/x.yaml", item("x", kind, executor))

    with pytest.raises(ChainMistyped, match="x") as refused:
        catalog.resolve("x")
    assert refused.value.suggestion


@pytest.mark.req("K-CH-03")
def test_an_executor_is_judged_by_its_type_and_not_by_its_name(catalog: Catalog, put: Put) -> None:
    put("tools/my_python.yaml", item("my_python", "runtime", "subprocess", config="{command: python3}"))
    put("tools/fake_runtime.yaml", item("fake_runtime", "mcp_server", "subprocess"))
    put("tools/x.yaml", item("x", "script", "my_python"))
    put("tools/y.yaml", item("y", "script", "fake_runtime"))

    assert catalog.resolve("x").names == ("x", "my_python", "subprocess")
    with pytest.raises(ChainMistyped):
        catalog.resolve("y")


@pytest.mark.req("K-CH-01")
@pytest.mark.case("CHAIN-08")
def test_a_file_cannot_declare_a_primitive(catalog: Catalog, put: Put) -> None:
    put("tools/gpu.yaml", item("gpu", "primitive", None))
    put("tools/my_runtime.yaml", item("my_runtime", "runtime", "gpu", config="{command: x}"))
    put("tools/x.yaml", item("x", "script", "my_runtime"))

    for name in ("gpu", "my_runtime", "x"):
        with pytest.raises(ChainMistyped, match="built in: subprocess, http_client"):
            catalog.resolve(name)


@pytest.mark.req("K-CH-04")
def test_an_executor_can_be_pinned_to_a_range_of_versions(catalog: Catalog, put: Put) -> None:
    put("tools/r1.yaml", item("my_runtime", "runtime", "subprocess", version="1.4.0", config="{command: a}"))
    put("tools/r2.yaml", item("my_runtime", "runtime", "subprocess", version="2.0.0", config="{command: b}"))
    for name, wanted in {"old": "@^1.2", "new": "@>=2", "any": "", "none": "@^3"}.items():
        put(f"tools/{name}.yaml", item(name, "script", f"my_runtime{wanted}"))

    assert catalog.resolve("old").executor.manifest.version == "1.4.0"
    assert catalog.resolve("new").executor.manifest.version == "2.0.0"
    assert catalog.resolve("any").executor.manifest.version == "2.0.0"
    with pytest.raises(MissingLink, match=r"2\.0\.0, 1\.4\.0"):
        catalog.resolve("none")


@pytest.mark.parametrize("executor", ["../x", "a/b", "X", "python_runtime@@", "x" * 500])
def test_an_executor_with_an_invalid_name_is_a_missing_link(catalog: Catalog, put: Put, executor: str) -> None:
    put("tools/x.yaml", item("x", "script", executor))

    with pytest.raises(KiwiError) as refused:
        catalog.resolve("x")
    assert refused.value.code in {"executor_not_found", "invalid_manifest"}


def test_a_type_that_a_project_defines_works_in_chains_at_once(catalog: Catalog, put: Put) -> None:
    put("tools/x.yaml", item("x", "notebook", "python_runtime"))
    with pytest.raises(ChainMistyped, match="no sheet describes"):
        catalog.resolve("x")

    put(
        "types/notebook.yaml",
        "type: notebook\ndescription: A notebook\ndriver: process\nneeds_executor: required\n"
        "executor_types: [runtime]\nfiles: optional\nconfig: {type: object, additionalProperties: false}\n",
    )

    assert catalog.resolve("x").driver == "process"
