"""A chain that asks for it is held as strictly as its strictest link says, or it is not run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import NOBODY
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, as_list, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers import held as jail
from kiwi_mcp.drivers.held import check_level, known_standings
from kiwi_mcp.drivers.process import driver
from kiwi_mcp.drivers.process.jail import hold
from kiwi_mcp.kernel.isolation import tell_isolation
from kiwi_mcp.kernel.plan_digest import plan_digest
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.port import Backend
from kiwi_mcp.sandbox.programs import find_launcher

SAYS_WHERE = "import os\ndef main():\n    return [os.environ['HOME'], os.getcwd(), os.getpid() < 100]\n"


class Bench(Protocol):
    space: Space

    def chain(self, files: dict[str, str], runtime: str | Tool) -> Chain: ...
    def bind(self, chain: Chain) -> Plan: ...
    async def drive(self, chain: Chain) -> Outcome: ...
    def run(self, chain: Chain) -> Outcome: ...


def asking(link: Tool, level: Json) -> Tool:
    return link if level is None else replace(link, manifest=replace(link.manifest, extra={"isolation": level}))


def python(bench: Bench, level: Json, *, runtime: Json = None, code: str = SAYS_WHERE) -> Chain:
    tool, below, bottom = bench.chain({"main.py": code}, "python_runtime").links
    return Chain((asking(tool, level), asking(below, runtime), bottom), "process")


def offer(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Bubblewrap], Backend], *, last_resort: bool = False
) -> None:
    def found(owner_map: int | None = None) -> tuple[Backend, ...]:
        there = [one for one in backends(owner_map=owner_map) if last_resort or one.name != "podman"]
        return tuple(change(one) if isinstance(one, Bubblewrap) else one for one in there)

    monkeypatch.setattr(jail, "backends", found)


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
def test_a_chain_asks_for_the_strictest_level_of_its_links(bench: Bench, tool: Json, runtime: Json, level: str) -> None:
    assert python(bench, tool, runtime=runtime).isolation == level


def test_plans_of_different_levels_have_different_digests(bench: Bench) -> None:
    plans = [bench.bind(python(bench, level)) for level in ("trusted", "standard", "sandboxed", "restricted")]
    assert len({plan_digest(plan) for plan in plans}) == len(plans)


@pytest.mark.case("DEG-07")
def test_a_trusted_process_is_run_as_it_is_and_its_result_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(jail, "backends")
    outcome = bench.run(python(bench, None))
    assert outcome.is_success
    told = as_object(outcome.details["isolation"])
    assert (told["asked"], told["used"], told["backend"]) == ("trusted", "trusted", "none")
    assert {"env_clean", "kill_group", "timeout"} <= {*map(str, as_list(told["properties"]))}
    assert (told["provenance"], len(str(told["policy"]))) == ("owner_pinned", 64)


def test_a_plan_that_does_not_say_its_level_is_held_as_strictly_as_can_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, lambda one: replace(one, bwrap=None))
    plan = replace(bench.bind(python(bench, None)), jail=None)
    with pytest.raises(IsolationUnavailable, match="'restricted'"):
        asyncio.run(hold(plan, (), bench.space))


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


def test_a_refusal_says_what_to_do_about_files_that_nobody_is_known_to_have_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, lambda one: replace(one, groups=None))
    chain = python(bench, None)
    plan = replace(bench.bind(chain), jail=Jail("restricted"))
    with pytest.raises(IsolationUnavailable) as refused:
        asyncio.run(driver.drive(plan, chain, bench.space, secrets={}, caller=NOBODY))
    assert refused.value.suggestion.startswith(
        "Nobody is known to have written probe: if it is yours, `kiwi sign probe`."
    )


@pytest.mark.parametrize(
    "code",
    [
        "def main(): open('/nowhere/data.csv')\n",
        "import socket\ndef main(): socket.create_connection(('127.0.0.1', 9))\n",
    ],
)
def test_a_tool_that_may_have_failed_for_its_sandbox_is_told_of_needs(bench: Bench, code: str) -> None:
    told = bench.run(python(bench, "sandboxed", code=code))
    assert (told.status, "`needs`" in told.suggestion) == ("error", True)
    assert "`needs`" not in bench.run(python(bench, None, code=code)).suggestion


def test_a_sandbox_that_is_installed_later_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        offer(before, lambda one: replace(one, bwrap=None))
        with pytest.raises(IsolationUnavailable):
            bench.run(python(bench, "sandboxed"))
    assert bench.run(python(bench, "sandboxed")).is_success


@pytest.mark.case("DEG-04")
def test_restricted_is_refused_with_the_reason_where_control_groups_cannot_be_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, lambda one: replace(one, groups=None))
    with pytest.raises(IsolationUnavailable, match="cpu_limit, mem_limit") as refused:
        bench.run(python(bench, "restricted"))
    assert "control groups" in refused.value.suggestion
    assert bench.run(python(bench, "sandboxed")).is_success
    with pytest.raises(IsolationUnavailable):
        check_level("restricted", bench.space)
    told = tell_isolation(bench.space)
    assert "sandboxed by bubblewrap" in told
    assert "restricted is refused (Kiwi can make no control groups" in told


@pytest.mark.case("DEG-07")
def test_the_result_says_how_its_process_was_held(bench: Bench) -> None:
    outcome = bench.run(python(bench, "sandboxed"))
    assert outcome.result == ["/tmp/home", "/tmp/home", True]
    told = as_object(outcome.details["isolation"])
    assert (told["asked"], told["used"], told["backend"]) == ("sandboxed", "sandboxed", "bubblewrap")
    assert {"fs_private", "net_none_or_proxy", "syscall_filter"} <= {*json.loads(json.dumps(told["properties"]))}
    assert len(str(told["policy"])) == 64


@pytest.mark.skipif(find_launcher("podman") is None or os.geteuid() != 0, reason="there is no podman for root here")
@pytest.mark.parametrize("level", ["sandboxed", "restricted"])
def test_without_bubblewrap_a_container_holds_the_tool(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    offer(monkeypatch, lambda one: replace(one, bwrap=None), last_resort=True)
    outcome = bench.run(python(bench, level))
    assert outcome.result == ["/tmp/home", "/tmp/home", True], outcome.message
    told = as_object(outcome.details["isolation"])
    assert (told["asked"], told["used"], told["backend"]) == (level, level, "podman")


def test_standard_gives_limits_and_leaves_the_files_to_be_seen(bench: Bench) -> None:
    code = "import os, resource\ndef main():\n    return [os.getcwd(), resource.getrlimit(resource.RLIMIT_CORE)[0]]\n"
    outcome = bench.run(python(bench, "standard", code=code))
    assert outcome.result == [str(bench.space.project), 0]
    assert as_object(outcome.details["isolation"])["backend"] == "rlimits"


def test_what_this_machine_can_do_is_tested_once_and_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_standings(bench.space) is None
    assert "not tested yet" in tell_isolation(bench.space)
    check_level("restricted", bench.space)
    assert bench.run(python(bench, "sandboxed")).is_success
    monkeypatch.delattr(jail, "examine")
    assert bench.run(python(bench, "sandboxed")).is_success
    assert [one.backend.name for one in known_standings(bench.space) or ()] == [
        "none",
        "rlimits",
        "bubblewrap",
        "podman",
    ]


@pytest.mark.case("DEG-05")
def test_a_launcher_that_fails_is_not_taken_for_the_tool_and_is_tested_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = python(bench, "sandboxed")
    assert bench.run(chain).is_success
    state = bench.space.cache
    found = jail._found[state]
    broken = [
        replace(one, backend=replace(one.backend, bwrap="/bin/false")) if isinstance(one.backend, Bubblewrap) else one
        for one in found
    ]
    monkeypatch.setitem(jail._found, state, tuple(broken))
    with pytest.raises(IsolationUnavailable, match="failed, not the tool"):
        bench.run(chain)
    assert known_standings(bench.space) is None
    assert bench.run(chain).is_success
