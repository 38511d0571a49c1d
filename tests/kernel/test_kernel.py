"""The entry of the kernel: strict requests, complete errors, and current projects and policies."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import ProjectPathInvalid, ProjectPathRequired
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import cache_folder, nearest_project, project_space, user_space
from kiwi_mcp.kernel.verb import DECLARED
from kiwi_mcp.kernel.verbs import VERBS, every_verb, load_verb, search

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]


def script(text: str = "echo hello\n", **words: Json) -> JsonObject:
    return {
        "tool_type": "script",
        "executor": "bash_runtime",
        "version": "1.0.0",
        "description": "Say hello to a person",
        "config": {"entrypoint": "main.sh"},
        "files": {"main.sh": text},
        **words,
    }


@pytest.mark.req("K-ME-03")
def test_all_issues_of_a_request_are_reported_at_once(ask: Ask) -> None:
    refused = ask("search", limit=0, sort_by="size", lost=1).content

    assert refused["code"] == "invalid_request"
    assert [as_object(issue)["place"] for issue in as_list(refused["issues"])] == ["query", "limit", "sort_by", "lost"]


def test_a_request_with_configuration_is_refused(ask: Ask) -> None:
    for word in ("tools", "provider", "model", "sources", "policy", "user"):
        assert ask("execute", item_id="bash_runtime", **{word: "y"}).content["code"] == "invalid_request"


def test_an_internal_error_is_an_incident_and_not_a_traceback(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> JsonObject:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(search, "find", broken)
    with caplog.at_level(logging.ERROR, logger="kiwi"):
        answer = ask("search", query="x")

    assert (answer.content["error"], answer.content["code"], answer.exit_code) == ("Internal error", "internal", 70)
    assert "secret detail" not in json.dumps(answer.content)
    assert str(answer.content["incident"]) in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("sandbox")
def test_a_cancelled_call_raises_its_cancellation(project: Path, ask: Ask) -> None:
    ask("execute", action="create", item_id="wait", parameters=script("touch started\nsleep 30\n"))
    ask("relax", action="apply", item_id="wait", to="trusted")

    async def cancelled() -> None:
        task = asyncio.create_task(Kernel(project).call("execute", {"item_id": "wait"}))
        async with asyncio.timeout(120):
            while not (project / "started").exists():  # noqa: ASYNC110 - another process makes the file
                await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


@pytest.mark.usefixtures("sandbox")
def test_a_denied_call_does_not_run_and_names_the_rule(ask: Ask, home: Path, project: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=script("touch started\n"))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text('items: {allow: ["*"], deny: ["project/*/say@*"]}\n')

    refused = ask("execute", item_id="say")
    planned = ask("execute", item_id="say", dry_run=True)
    explained = ask("execute", action="why", item_id="say").content

    for answer in (refused, planned):
        assert (answer.content["code"], answer.content["rule"]) == ("not_permitted", "project/*/say@*")
        assert answer.exit_code == 6
    assert not (project / "started").exists()
    assert [as_object(reason)["code"] for reason in as_list(explained["reasons"])] == ["not_permitted"]


@pytest.mark.usefixtures("sandbox")
def test_a_policy_that_cannot_be_read_permits_nothing(ask: Ask, home: Path, project: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=script("touch started\n"))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text("- deny everything\n")

    assert ask("execute", item_id="say").content["code"] == "invalid_manifest"
    assert not (project / "started").exists()
    worst = ask("doctor").content
    assert worst["status"] == "problem"


@pytest.mark.usefixtures("sandbox")
async def test_progress_is_reported_while_a_call_runs(project: Path) -> None:
    steps: list[str] = []
    request: JsonObject = {"action": "create", "item_id": "say", "parameters": script()}

    await Kernel(project).call("execute", request, Caller(lambda step: steps.append(step.message)))

    assert "checking say" in steps


@pytest.mark.usefixtures("sandbox")
def test_equal_calls_have_equal_plans(ask: Ask) -> None:
    parameters = [{"name": "word", "type": "string"}]
    ask("execute", action="create", item_id="say", parameters=script(parameters=parameters))

    def digest(word: str) -> Json:
        return ask("execute", item_id="say", parameters={"word": word}, dry_run=True).content["plan_digest"]

    assert digest("a") == digest("a")
    assert digest("a") != digest("b")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-05")
def test_a_run_record_contains_logs_and_exit_code(ask: Ask, project: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=script("echo out\necho err >&2\nexit 3\n"))

    answer = ask("execute", item_id="say")
    kept = json.loads((project / str(answer.content["output_path"])).read_text())

    assert (answer.exit_code, answer.content["exit_code"]) == (1, 3)
    assert answer.content["logs"] == {"stdout": "out\n", "stderr": "err\n"}
    assert kept["logs"] == {"stdout": "out\n", "stderr": "err\n"}
    assert kept["exit_code"] == 3
    assert kept["identity"] == "project/local/say@1.0.0"
    assert kept["execution_time_ms"] == answer.content["execution_time_ms"]


@pytest.mark.usefixtures("sandbox")
def test_outputs_of_concurrent_calls_are_all_stored(ask: Ask, project: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=script())
    kernel = Kernel(project)

    async def many() -> list[Answer]:
        return list(await asyncio.gather(*(kernel.call("execute", {"item_id": "say"}) for _ in range(10))))

    answers = asyncio.run(many())

    assert {answer.content["result"] for answer in answers} == {"hello"}
    assert len({str(answer.content["output_path"]) for answer in answers}) == 10
    assert all((project / str(answer.content["output_path"])).exists() for answer in answers)


def test_an_item_that_cannot_run_gives_a_reason(ask: Ask) -> None:
    words: JsonObject = {"tool_type": "runtime", "executor": "subprocess", "config": {"command": "sh"}}
    made = ask("execute", action="create", item_id="sh", parameters={"version": "1.0.0", "description": "x", **words})

    refused = ask("execute", item_id="sh").content

    assert made.content["status"] == "created"
    assert refused["code"] == "not_callable"
    assert refused["suggestion"]


@pytest.mark.usefixtures("sandbox")
def test_search_filters_and_suggests_a_next_step_without_hits(ask: Ask) -> None:
    ask("execute", action="create", item_id="say", parameters=script(tags=["greeting"], category="speech"))

    def total(**words: Json) -> Json:
        return ask("search", query="say hello", **words).content["total"]

    assert total() == 1
    assert (total(tag="greeting"), total(tag="other")) == (1, 0)
    assert (total(category="speech"), total(category="mail")) == (1, 0)
    assert (total(tool_type="script"), total(tool_type="api")) == (1, 0)
    assert (total(source="project"), total(source="user")) == (1, 0)
    assert (total(item_type="tool"), total(item_type="knowledge")) == (1, 0)
    assert "suggestion" in ask("search", query="zzzz qqqq").content
    assert ask("search", query="github", source="registry").content["total"] == 1
    names = [
        as_object(one)["name"] for one in as_list(ask("search", query="run python", source="all").content["results"])
    ]
    assert names[0] == "python_runtime"


async def test_init_creates_a_project_once_and_changes_no_existing_file(tmp_path: Path, tree: Tree) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    kernel = Kernel(fresh)

    first = (await kernel.call("init", {})).content
    (fresh / ".ai" / ".gitignore").write_text("mine\n")
    before = tree(fresh)
    second = (await kernel.call("init", {})).content

    assert (first["status"], second["status"]) == ("created", "present")
    assert (fresh / ".ai" / "tools").is_dir()
    assert tree(fresh) == before


@pytest.mark.usefixtures("sandbox")
def test_doctor_names_missing_programs_and_how_to_install_them(
    ask: Ask, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "bad.yaml").write_text("tool_id: [\n")
    monkeypatch.setenv("PATH", str(project))

    response = ask("doctor").content
    checks = {str(as_object(check)["check"]): as_object(check) for check in as_list(response["checks"])}

    assert response["status"] == "problem"
    assert checks["node_runtime"]["status"] == "warning"
    assert "nodejs.org" in str(checks["node_runtime"]["fix"])
    assert checks[str(project / ".ai" / "tools" / "bad.yaml")]["status"] == "problem"


@pytest.mark.req("K-RT-01")
@pytest.mark.parametrize(
    ("runtime", "file", "program"),
    [("node_runtime", "a.mjs", "node"), ("deno_runtime", "a.ts", "deno")],
)
def test_a_missing_interpreter_names_the_fix(
    runtime: str, file: str, program: str, project: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / ".ai" / "tools" / "say"
    folder.mkdir(parents=True)
    (folder / file).write_text("")
    (folder / "tool.yaml").write_text(
        f"tool_id: say\ntool_type: script\nversion: 1.0.0\nexecutor: {runtime}\nconfig: {{entrypoint: {file}}}\n"
    )
    monkeypatch.setenv("PATH", str(project))

    refused = ask("execute", item_id="say").content

    assert (refused["code"], refused["command"]) == ("command_not_found", program)
    assert "Install" in str(refused["suggestion"])


def test_the_nearest_folder_with_an_ai_folder_is_the_project(project: Path, home: Path) -> None:
    below = project / "src" / "deep"
    below.mkdir(parents=True)
    (home / ".ai").mkdir()
    (home / "work").mkdir()

    assert nearest_project(below) == project
    assert nearest_project(home / "work") == home / "work"  # the user's own space is no project


def test_the_spaces_follow_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_space() == home / ".ai"
    assert cache_folder() == home / ".cache" / "kiwi"
    monkeypatch.delenv("USER_SPACE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_space() == home / ".ai"
    assert cache_folder() == home / ".cache" / "kiwi"
    monkeypatch.setenv("USER_SPACE", "~/elsewhere")
    assert user_space() == home / "elsewhere"


def test_a_project_is_canonical_or_refused(project: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(project)

    space = project_space(str(tmp_path / "link"), None, user=home / ".ai", cache=home)

    assert space.project == project.resolve()
    with pytest.raises(ProjectPathRequired):
        project_space(None, None, user=home, cache=home)
    with pytest.raises(ProjectPathInvalid):
        project_space("project", project, user=home, cache=home)


@pytest.mark.usefixtures("sandbox")
def test_two_projects_in_one_kernel_do_not_see_each_other(project: Path, tmp_path: Path, ask: Ask) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ask("execute", action="create", item_id="say", parameters=script())

    assert ask("execute", item_id="say", project_path=str(other)).content["code"] == "tool_not_found"
    assert ask("execute", item_id="say", project_path=str(project)).content["result"] == "hello"


def test_the_verb_table_is_complete_and_describes_the_arguments() -> None:
    assert [verb.name for verb in VERBS if verb.is_meta_tool] == ["search", "load", "execute", "help"]
    for verb in VERBS:
        assert verb.description.endswith(".")


def test_the_index_of_verbs_names_every_declared_verb_and_its_module() -> None:
    for verb in every_verb():
        assert verb.help.endswith(".")
        assert verb.request.__struct_config__.forbid_unknown_fields
    for family in VERBS:
        for action in family.verbs:
            load_verb(family.name, action)
    indexed = {(family.name, *filter(None, [action])) for family in VERBS for action in family.verbs}
    assert {*DECLARED} == indexed
