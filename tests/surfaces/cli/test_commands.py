"""Every command in this process: its request, its output and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.surfaces.cli.conftest import Kiwi

from kiwi_mcp import __version__

SOURCE = '"""Say a word"""\n__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n\n\n'
CODE = """def main(word: str, count: int = 1, loud: bool = False):
    print('noise')
    return (word.upper() if loud else word) * count
"""


@pytest.fixture
def say(project: Path) -> Path:
    path = project / ".ai" / "tools" / "say.py"
    path.parent.mkdir()
    path.write_text(SOURCE + CODE)
    return path


@pytest.mark.usefixtures("sandbox")
def test_run_prints_the_result_on_stdout_and_the_rest_on_stderr(kiwi: Kiwi, say: Path) -> None:
    ended = kiwi("run", "say", "word=kiwi", "--count", "2", "loud=yes")

    assert (ended.code, ended.out) == (0, "KIWIKIWI\n")
    assert "noise" in ended.err
    assert "say: success in" in ended.err


@pytest.mark.usefixtures("sandbox")
def test_run_with_json_prints_the_whole_answer_and_nothing_else(kiwi: Kiwi, say: Path) -> None:
    ended = kiwi("run", "say", "--json", "--params", '{"word": "a", "count": 3}')

    assert json.loads(ended.out)["result"] == "aaa"
    assert ended.err == ""


def test_a_refusal_is_a_sentence_a_hint_and_an_exit_code(kiwi: Kiwi, say: Path) -> None:
    lost = kiwi("run", "sya")
    wrong = kiwi("run", "say", "count=many", "word=a")

    assert (lost.code, lost.out) == (3, "")
    assert "error: No tool named 'sya'" in lost.err
    assert "hint: Did you mean `say`?" in lost.err
    assert wrong.code == 4
    assert "✗ count:" in wrong.err
    assert json.loads(kiwi("run", "sya", "--json").out)["code"] == "tool_not_found"


@pytest.mark.usefixtures("sandbox")
def test_a_failing_tool_exits_with_one_and_shows_its_output(kiwi: Kiwi, say: Path) -> None:
    say.write_text(SOURCE + "def main():\n    raise ValueError('no')\n")

    ended = kiwi("run", "say")

    assert (ended.code, ended.out) == (1, "")
    assert "ValueError: no" in ended.err


def test_a_dry_run_prints_the_plan(kiwi: Kiwi, say: Path, project: Path) -> None:
    ended = kiwi("run", "say", "word=a", "--dry-run")

    assert json.loads(ended.out)["inputs"] == {"word": "a", "count": 1, "loud": False}
    assert not (project / ".ai" / "outputs").exists()


def test_search_and_load_print_readable_text(kiwi: Kiwi, say: Path) -> None:
    found = kiwi("search", "say", "a", "word")
    loaded = kiwi("load", "say")
    nothing = kiwi("search", "zzzz")

    assert found.out.startswith("say  project/script")
    assert "1 of 1 found" in found.err
    assert loaded.out == SOURCE + CODE + "\n"
    assert "chain: say → python_runtime → subprocess" in loaded.err
    assert "word: string, required" in loaded.err
    assert "Nothing found." in nothing.err


@pytest.mark.usefixtures("sandbox")
def test_an_item_is_created_validated_signed_explained_copied_changed_and_deleted(
    kiwi: Kiwi, project: Path, tmp_path: Path
) -> None:
    code = tmp_path / "main.sh"
    code.write_text("echo hello\n")
    words = ("--type", "script", "--executor", "bash_runtime", "--description", "Greet", "--file", str(code))

    planned = kiwi("create", "greet", *words, "--dry-run")
    created = kiwi("create", "greet", *words)
    again = kiwi("create", "greet", *words)

    assert "would be created" in planned.out
    assert created.code == 0
    assert again.code == 8
    assert kiwi("validate", "greet").code == 0
    assert kiwi("validate", str(project / ".ai" / "tools" / "greet")).code == 0
    assert "signature" in kiwi("sign", "greet").out + kiwi("sign", "greet").err
    assert "would run: yes" in kiwi("why", "greet").out
    assert kiwi("run", "greet").out == "hello\n"
    assert kiwi("load", "greet", "--to", "user").code == 0
    code.write_text("echo changed\n")
    assert kiwi("update", "greet", "--file", str(code), "--location", "project").code == 0
    assert kiwi("run", "greet").out == "changed\n"
    assert kiwi("delete", "greet", "--location", "project").code == 0
    assert kiwi("run", "greet").out == "hello\n"
    assert kiwi("delete", "greet").code == 4
    assert kiwi("delete", "greet", "--location", "user").code == 0
    assert kiwi("run", "greet").code == 3


@pytest.mark.usefixtures("sandbox")
def test_a_whole_file_is_created_from_its_text(kiwi: Kiwi, tmp_path: Path, project: Path) -> None:
    (tmp_path / "say.py").write_text(SOURCE + CODE)
    (tmp_path / "look.yaml").write_text(
        "tool_id: look\ntool_type: api\nversion: 1.0.0\nexecutor: http_client\nconfig: {method: GET, url: 'https://a.test/'}\n"
    )

    assert kiwi("create", "say", "--content", str(tmp_path / "say.py")).code == 0
    assert kiwi("create", "--manifest", str(tmp_path / "look.yaml")).code == 0
    (tmp_path / "own.py").write_text((tmp_path / "say.py").read_text())
    assert kiwi("create", "--content", str(tmp_path / "own.py")).code == 0
    assert "--content FILE" in kiwi("create", "bare").err

    assert (project / ".ai" / "tools" / "say.py").read_text() == SOURCE + CODE
    assert kiwi("create", "x", "--content", str(tmp_path / "lost.py")).code == 4


def test_validate_lists_every_issue_on_stdout(kiwi: Kiwi, project: Path) -> None:
    path = project / ".ai" / "tools" / "bad.yaml"
    path.parent.mkdir()
    path.write_text("tool_id: bad\ntool_type: api\nversion: one\nexecutor: subprocess\nconfig: {method: FETCH}\n")

    ended = kiwi("validate", str(path))

    assert ended.code == 4
    assert "✗ version:" in ended.out
    assert "fix:" in ended.out
    assert "bad: " in ended.err
    assert kiwi("validate", "lost.yaml").code == 3

    nothing = kiwi("validate")
    assert nothing.code == 2
    assert "required: FILE|ITEM" in nothing.err


def test_an_openapi_document_becomes_tools(kiwi: Kiwi) -> None:
    document = Path(__file__).parents[2] / "data" / "openapi" / "board.json"

    ended = kiwi("create", "--from-openapi", str(document), "--base-url", "https://board.example.com", "--json")

    assert json.loads(ended.out)["created"]


@pytest.mark.usefixtures("sandbox")
def test_a_request_is_sent_like_an_mcp_client_does(kiwi: Kiwi, say: Path, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"item_id": "say", "parameters": {"word": "x"}}')

    assert json.loads(kiwi("call", "execute", f"@{tmp_path}/request.json").out)["result"] == "x"
    assert json.loads(kiwi("call", "help").out)["topic"] == "overview"
    bad = kiwi("call", "execute", "{")
    assert bad.code == 4
    assert kiwi("call", "lost", "{}").code == 3


@pytest.mark.usefixtures("sandbox")
def test_doctor_help_init_and_version_work(kiwi: Kiwi, tmp_path: Path) -> None:
    assert "python_runtime" in kiwi("doctor").out
    assert kiwi("help", "create").out.startswith("# Create items")
    assert kiwi("help", "lost").code == 3
    assert kiwi("version").out == f"{__version__}\n"
    assert json.loads(kiwi("version", "--json").out) == {"version": __version__}
    (tmp_path / "fresh").mkdir()
    assert kiwi("init", str(tmp_path / "fresh")).code == 0
    assert (tmp_path / "fresh" / ".ai" / "tools").is_dir()


def test_a_folder_that_is_not_a_project_is_refused(kiwi: Kiwi, tmp_path: Path) -> None:
    ended = kiwi("search", "x", "--project", str(tmp_path / "lost"))

    assert ended.code == 4
    assert "hint:" in ended.err


@pytest.mark.usefixtures("sandbox")
def test_a_large_result_names_the_command_to_read_on(kiwi: Kiwi, say: Path) -> None:
    ended = kiwi("run", "say", "word=x", "count=100000")

    hint = next(line for line in ended.err.splitlines() if line.startswith("hint: kiwi load"))
    page = kiwi(*hint.removeprefix("hint: kiwi ").split())
    assert page.code == 0
    assert set(page.out.strip()) == {"x"}
    assert "go on with --offset" in page.err


@pytest.mark.usefixtures("processes")
@pytest.mark.usefixtures("sandbox")
def test_one_of_several_items_of_a_name_is_chosen_by_its_type(kiwi: Kiwi, project: Path) -> None:
    files = {
        "tools/send.sh": "# tool_id: send\n# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n"
        "# description: Send\necho sent\n",
        "knowledge/send.md": "---\nid: send\ntitle: Sending\nversion: 2.0.0\nentry_type: reference\n---\n\nHow.\n",
    }
    for name, text in files.items():
        path = project / ".ai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    loaded = kiwi("load", "send")
    assert "send.md" in loaded.err
    assert "`item_type: tool` asks for that one" in loaded.err
    assert "send.sh" in kiwi("load", "send", "--type", "tool").err
    for verb in ("sign", "validate", "publish"):
        assert kiwi(verb, "send", "--type", "tool").code == 0
    assert (project / ".ai" / "knowledge" / "send.md").read_text() == files["knowledge/send.md"]
    assert kiwi("run", "send", "--item-type", "tool").out == "sent\n"
    assert "bash_runtime" in kiwi("why", "send", "--item-type", "tool").out
    assert kiwi("delete", "send", "--type", "tool").code == 0
    assert not (project / ".ai" / "tools" / "send.sh").exists()
