"""A chain runs at the strictest isolation level of its links, or it does not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Chain, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, as_list, as_object
from kiwi_mcp.drivers import sandboxed as profile
from kiwi_mcp.drivers.process import create_driver
from kiwi_mcp.drivers.sandboxed import check_level, known_backend_reports
from kiwi_mcp.kernel.prepared import plan_digest
from kiwi_mcp.kernel.verbs.doctor import tell_isolation
from kiwi_mcp.sandbox.backend import Backend
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap, backends

SAYS_WHERE = "import os\ndef main():\n    return [os.environ['HOME'], os.getcwd(), os.getpid() < 100]\n"


def asking(link: Tool, level: Json) -> Tool:
    return link if level is None else replace(link, manifest=replace(link.manifest, extra={"isolation": level}))


def python(bench: Bench, level: Json, *, runtime: Json = None, code: str = SAYS_WHERE) -> Chain:
    tool, below, bottom = bench.chain({"main.py": code}, "python_runtime").links
    return Chain(
        (asking(tool, level), asking(below, runtime), bottom),
        (TypeTraits("process", "call"), TypeTraits(), TypeTraits()),
    )


def offer(monkeypatch: pytest.MonkeyPatch, change: Callable[[Bubblewrap], Backend]) -> None:
    def found(owner_map: int | None = None) -> tuple[Backend, ...]:
        return tuple(change(one) if isinstance(one, Bubblewrap) else one for one in backends(owner_map=owner_map))

    monkeypatch.setattr(profile, "backends", found)


@pytest.mark.parametrize(
    ("tool", "runtime", "level"),
    [
        (None, None, "trusted"),
        ("sandboxed", None, "sandboxed"),
        ("trusted", "sandboxed", "sandboxed"),
        ("sandboxed", "standard", "sandboxed"),
        ("standard", "restricted", "restricted"),
        ("sandbxed", None, "restricted"),
        (["trusted"], None, "restricted"),
    ],
)
def test_a_chain_has_the_strictest_level_of_its_links(bench: Bench, tool: Json, runtime: Json, level: str) -> None:
    assert python(bench, tool, runtime=runtime).isolation == level


def test_plans_of_different_levels_have_different_digests(bench: Bench) -> None:
    plans = [bench.bind(python(bench, level)) for level in ("trusted", "standard", "sandboxed", "restricted")]
    assert len({plan_digest(plan) for plan in plans}) == len(plans)


@pytest.mark.usefixtures("processes")
@pytest.mark.case("DEG-07")
def test_a_trusted_process_runs_directly_and_its_result_reports_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(profile, "backends")
    outcome = bench.run(python(bench, None))
    assert outcome.is_success
    response = as_object(outcome.details["isolation"])
    assert (response["asked"], response["used"], response["backend"]) == ("trusted", "trusted", "none")
    assert {"env_clean", "kill_group", "timeout"} <= {*map(str, as_list(response["properties"]))}
    assert (response["provenance"], len(str(response["policy"]))) == ("owner_pinned", 64)


@pytest.mark.usefixtures("sandbox")
async def test_a_plan_without_a_level_runs_in_the_strictest_sandbox(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, lambda one: replace(one, bwrap=None))
    chain = python(bench, None)
    plan = replace(bench.bind(chain), profile=None)
    with pytest.raises(IsolationUnavailable, match="'restricted'"):
        await create_driver().prepare(plan, chain, bench.space)
    with pytest.raises(IsolationUnavailable, match="'restricted'"):
        await create_driver().drive(plan, chain, bench.space, secrets={}, caller=NO_CALLER, dispatch=AsyncMock())


@pytest.mark.usefixtures("processes")
@pytest.mark.case("DEG-01")
@pytest.mark.parametrize("level", ["sandboxed", "restricted"])
def test_without_a_sandbox_nothing_is_prepared_and_nothing_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, level: str, tmp_path: Path
) -> None:
    offer(monkeypatch, lambda one: replace(one, bwrap=None))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef main(): pass\n"
    with pytest.raises(IsolationUnavailable, match="fs_private") as refused:
        bench.run(python(bench, level, code=code))
    assert "install bubblewrap" in refused.value.suggestion
    assert not (tmp_path / "ran").exists()
    assert not (bench.space.cache / "tools").exists()


@pytest.mark.usefixtures("sandbox")
async def test_a_refusal_explains_how_to_run_files_of_unknown_origin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, lambda one: replace(one, bwrap=None))
    chain = python(bench, None)
    plan = replace(bench.bind(chain), profile=SandboxProfile("restricted"))
    with pytest.raises(IsolationUnavailable) as refused:
        await create_driver().drive(plan, chain, bench.space, secrets={}, caller=NO_CALLER, dispatch=AsyncMock())
    assert refused.value.suggestion.startswith("The author of probe is unknown. If it is yours, `kiwi sign probe`.")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    "code",
    [
        "def main(): open('/nowhere/data.csv')\n",
        "import socket\ndef main(): socket.create_connection(('127.0.0.1', 9))\n",
    ],
)
def test_a_failure_that_the_sandbox_may_have_caused_mentions_needs(bench: Bench, code: str) -> None:
    response = bench.run(python(bench, "sandboxed", code=code))
    assert (response.status, "`needs`" in response.suggestion) == ("error", True)
    assert "`needs`" not in bench.run(python(bench, None, code=code)).suggestion


@pytest.mark.usefixtures("sandbox")
def test_a_sandbox_that_is_installed_later_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        offer(before, lambda one: replace(one, bwrap=None))
        with pytest.raises(IsolationUnavailable):
            bench.run(python(bench, "sandboxed"))
    assert bench.run(python(bench, "sandboxed")).is_success


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DEG-04")
def test_without_cgroups_restricted_runs_under_a_watchdog(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, lambda one: replace(one, groups=None))
    outcome = bench.run(python(bench, "restricted"))
    assert outcome.is_success
    assert as_object(outcome.details["isolation"])["limited_by"] == "watchdog"
    assert check_level("restricted", bench.space) == "watchdog"
    assert "restricted by bubblewrap with limits by watchdog" in tell_isolation(bench.space)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DEG-07")
def test_the_result_reports_its_isolation(bench: Bench) -> None:
    outcome = bench.run(python(bench, "sandboxed"))
    assert outcome.result == ["/tmp/home", "/tmp/home", True]
    response = as_object(outcome.details["isolation"])
    assert (response["asked"], response["used"], response["backend"]) == ("sandboxed", "sandboxed", "bubblewrap")
    assert {"fs_private", "net_none_or_proxy", "syscall_filter"} <= {*json.loads(json.dumps(response["properties"]))}
    assert len(str(response["policy"])) == 64


@pytest.mark.usefixtures("sandbox")
def test_standard_sets_limits_and_leaves_files_visible(bench: Bench) -> None:
    code = "import os, resource\ndef main():\n    return [os.getcwd(), resource.getrlimit(resource.RLIMIT_CORE)[0]]\n"
    outcome = bench.run(python(bench, "standard", code=code))
    assert outcome.result == [str(bench.space.project), 0]
    assert as_object(outcome.details["isolation"])["backend"] == "rlimits"


@pytest.mark.usefixtures("sandbox")
def test_the_self_test_of_this_machine_runs_once_and_is_cached(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_backend_reports(bench.space) is None
    assert "not tested yet" in tell_isolation(bench.space)
    check_level("restricted", bench.space)
    assert bench.run(python(bench, "sandboxed")).is_success
    monkeypatch.delattr(profile, "examine")
    assert bench.run(python(bench, "sandboxed")).is_success
    assert [one.backend.name for one in known_backend_reports(bench.space) or ()] == [
        "none",
        "rlimits",
        "bubblewrap",
    ]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DEG-05")
def test_a_failing_launcher_is_not_reported_as_the_tool_and_is_tested_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = python(bench, "sandboxed")
    assert bench.run(chain).is_success
    state = bench.space.cache
    found = profile._found[state]
    broken = [
        replace(one, backend=replace(one.backend, bwrap="/bin/false")) if isinstance(one.backend, Bubblewrap) else one
        for one in found
    ]
    monkeypatch.setitem(profile._found, state, tuple(broken))
    with pytest.raises(IsolationUnavailable, match="failed, not the tool"):
        bench.run(chain)
    assert known_backend_reports(bench.space) is None
    assert bench.run(chain).is_success
