"""Migration of old folders: planned first, then copied unchanged or rewritten on request."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.verbs import migrate
from kiwi_mcp.kernel.verbs.migrate import FolderMigration, MigrationStep
from kiwi_mcp.manifest.formats import is_variable
from kiwi_mcp.manifest.python_source import read_script_facts

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]
Migrate = Callable[..., JsonObject]
OLD = Path(__file__).parents[1] / "data" / "legacy" / "project.yaml"
RUNS: list[tuple[str, JsonObject, object]] = [
    ("greet", {"name": "Ada", "times": 2}, {"said": "Hello, Ada! Hello, Ada!"}),
    ("enrich", {"names": ["ada"], "domain": "kiwi.example"}, {"addresses": ["ada@kiwi.example"]}),
    ("report", {"count": 2}, "row 0\nrow 1"),
    ("count", {"text": "one two three"}, 3),
    ("aloud", {"word": "kiwi"}, "kiwi!"),
]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A project as old releases left it."""
    folder = tmp_path / "old"
    for path, text in yaml.safe_load(OLD.read_text(encoding="utf-8")).items():
        put(folder / path, text)
    return folder


@pytest.fixture
def move(project: Path, home: Path) -> Migrate:
    """Migrate to a new project, or within the one that is named."""

    def call(to: Path = project, **words: Json) -> JsonObject:
        async def work() -> JsonObject:
            kernel = Kernel(to)
            try:
                return (await kernel.call("migrate", words)).content
            finally:
                await kernel.aclose()

        return asyncio.run(work())

    return call


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def items(answer: JsonObject) -> dict[str, JsonObject]:
    """The items of an answer, by the name of the file each comes from."""
    listed = [as_object(item) for item in as_list(answer["items"])]
    return {Path(as_text(item["from"])).name: item for item in listed}


def what(answer: JsonObject) -> dict[str, object]:
    return {name: item["what"] for name, item in items(answer).items()}


def reasons(item: JsonObject) -> str:
    return "\n".join(as_text(as_object(issue)["reason"]) for issue in as_list(item.get("issues", [])))


def runs(ask: Ask, project: Path) -> list[tuple[str, object]]:
    return [
        (name, ask("execute", item_id=name, parameters=words, project_path=str(project)).content.get("result"))
        for name, words, _ in RUNS
    ]


FRAGMENTS = [
    "import os\n", "from . import a\n", "from .b import c\n", "import a.b.c as d\n", "os.environ['A_B']\n",
    "os.getenv('X', 'y')\n", "environ.get('PATH')\n", "os.environ.get('', f())\n", "def main(a, *, b=[{}]): ...\n",
    "x = 1\n", "print(x)\n", "\0", "(" * 300, "\ud800", "async def run(): pass\n", "os.environ['LD_PRELOAD']\n",
]  # fmt: skip
EXPECTED = [(name, result) for name, _, result in RUNS]


@pytest.mark.req("K-TY-07")
def test_a_plan_changes_nothing_and_describes_the_result_for_each_file(
    old: Path, project: Path, move: Migrate, tree: Tree
) -> None:
    before = tree(old), tree(project)
    answer = move(path=str(old))
    assert (tree(old), tree(project)) == before
    assert (answer["action"], answer["status"]) == ("migrate", "planned")
    assert answer["counts"] == {"copy": 9, "skip": 6}
    assert what(answer) == {
        "greet.py": "copy", "enrich.py": "copy", "letter.py": "copy", "report.py": "copy", "count.py": "copy",
        "aloud.sh": "copy", "plain_runtime.yaml": "copy", "welcome.md": "copy", "tides.md": "copy",
        "changed.py": "skip", "broken.py": "skip", "My Tool.py": "skip", "page.py": "skip", "settings.json": "skip",
        "python_runtime.py": "skip",
    }  # fmt: skip
    assert "apply" in as_text(answer["next"])


def test_a_plan_reports_integrity_entrypoint_and_assumptions_of_the_code(old: Path, move: Migrate) -> None:
    found = items(move(path=str(old)))
    verdicts = {name: item.get("integrity") for name, item in found.items()}
    assert verdicts["enrich.py"] == verdicts["count.py"] == "valid:B2"
    assert verdicts["report.py"] == verdicts["tides.md"] == "valid:A"
    assert verdicts["welcome.md"] == "valid:B1"
    assert (verdicts["changed.py"], verdicts["greet.py"]) == ("modified", "unsigned")
    assert found["enrich.py"]["entry"] == "execute(params, project_path=None)"
    assert found["report.py"]["entry"] == "script"
    assert "`page` from beside it" in reasons(found["letter.py"])
    assert "`LETTER_FROM`" in reasons(found["letter.py"])
    assert found["python_runtime.py"]["reason"] == "a built-in has this name, and is used in its place"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-07")
def test_a_copied_item_runs_and_its_old_hashes_are_valid(
    old: Path, project: Path, move: Migrate, tree: Tree, ask: Ask
) -> None:
    before = tree(old)
    assert move(path=str(old), apply=True)["status"] == "migrated"
    assert tree(old) == before
    assert runs(ask, project) == EXPECTED
    assert {ask("load", item_id=name).content["integrity"] for name in ("enrich", "count")} == {"valid:B2"}
    assert ask("load", item_id="report").content["integrity"] == "valid:A"
    assert ask("load", item_id="welcome", item_type="directive").content["integrity"] == "valid:B1"
    copied = project / ".ai" / "tools" / "mail" / "enrich.py"
    assert copied.read_bytes() == (old / ".ai" / "scripts" / "mail" / "enrich.py").read_bytes()


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_second_migration_does_nothing(rewrite: bool, old: Path, project: Path, move: Migrate, tree: Tree) -> None:
    first = move(path=str(old), apply=True, rewrite=rewrite)
    before = tree(project)
    again = move(path=str(old), apply=True, rewrite=rewrite)
    assert tree(project) == before
    done = sum(1 for item in items(first).values() if item["what"] in {"copy", "convert"})
    assert as_object(again["counts"]) == {"skip": 6, "present": done}
    assert again["next"] == "Nothing to do."


@pytest.mark.usefixtures("sandbox")
def test_a_folder_in_use_is_not_changed(old: Path, move: Migrate, tree: Tree, ask: Ask) -> None:
    before = tree(old)
    answer = move(to=old, apply=True)
    assert tree(old) == before
    assert answer["counts"] == {"skip": 5, "keep": 10}
    assert "changed after it was signed" in reasons(items(answer)["changed.py"])
    assert runs(ask, old) == EXPECTED


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-07")
def test_rewriting_in_place_creates_manifests_keeps_the_code_and_trashes_old_files(
    old: Path, move: Migrate, ask: Ask
) -> None:
    code = (old / ".ai/tools/text/count.py").read_text()
    planned = items(move(to=old, rewrite=True))["letter.py"]
    assert yaml.safe_load(as_text(planned["manifest"])) == {
        "tool_id": "letter",
        "tool_type": "script",
        "version": "1.0.0",
        "executor": "python_runtime",
        "description": "Write a letter.",
        "category": "mail",
        "config": {
            "entrypoint": "letter.py",
            "variables": ["LETTER_FROM"],
            "env": {"LETTER_SIGN": "${LETTER_SIGN:-Kiwi}"},
        },
    }
    answer = move(to=old, rewrite=True, apply=True)
    assert answer["counts"] == {"convert": 5, "skip": 6, "keep": 4}
    assert (old / ".ai/tools/text/count/count.py").read_text() == code.partition("\n")[2]
    assert not (old / ".ai/tools/text/count.py").exists()
    assert [path.read_text() for path in (old / ".ai/.trash").rglob("count.py")] == [code]
    assert runs(ask, old) == EXPECTED
    assert move(to=old, rewrite=True)["next"] == "Nothing to do."


@pytest.mark.usefixtures("sandbox")
def test_a_rewritten_script_includes_its_modules_and_variables(
    old: Path, project: Path, move: Migrate, ask: Ask
) -> None:
    put(project / ".env", "LETTER_FROM=the sea\n")
    move(path=str(old), apply=True)
    assert ask("execute", item_id="letter", parameters={"to": "Ada"}).content["code"] == "execution_failed"
    (project / ".ai/scripts/mail/letter.py").unlink()
    answer = move(path=str(old / ".ai" / "scripts"), apply=True, rewrite=True)
    assert items(answer)["letter.py"]["what"] == "convert"
    ask("execute", action="sign", item_id="letter")
    letter = ask("execute", item_id="letter", parameters={"to": "Ada"}).content
    assert letter["result"] == f"{'-' * 20}\nTo Ada, from [redacted:LETTER_FROM], Kiwi"
    folder = project / ".ai/tools/mail/letter"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"tool.yaml", "letter.py", "page.py", "lib/marks.py"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("stage", ["written", "half"])
def test_an_interrupted_rewrite_is_finished_by_the_next_one(
    stage: str, old: Path, move: Migrate, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    class Killed(BaseException):
        pass

    calls = iter(range(100))

    def cut(*_: object) -> Path:
        raise Killed

    def cut_later(migration: FolderMigration, step: MigrationStep) -> MigrationStep:
        if next(calls) == 3:
            raise Killed
        return write(migration, step)

    write = FolderMigration.write
    with monkeypatch.context() as patch:
        if stage == "written":
            patch.setattr(migrate, "discard", cut)
        else:
            patch.setattr(FolderMigration, "write", cut_later)
        with pytest.raises(Killed):
            move(to=old, rewrite=True, apply=True)
    assert runs(ask, old) == EXPECTED
    move(to=old, rewrite=True, apply=True)
    assert not (old / ".ai/scripts/greet.py").exists()
    assert runs(ask, old) == EXPECTED
    assert move(to=old, rewrite=True)["next"] == "Nothing to do."


@pytest.mark.usefixtures("processes")
def test_a_killed_process_leaves_whole_items_and_the_next_one_finishes(
    tmp_path: Path, project: Path, home: Path, move: Migrate
) -> None:
    scripts = project / ".ai" / "scripts"
    for number in range(150):
        put(scripts / f"tool{number}.py", f"def main() -> int:\n    return {number}\n")
    command = [sys.executable, "-c", "from kiwi_mcp.surfaces.start import main; main()"]
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    for wanted in (1, 40, 110):
        words = ["migrate", "--rewrite", "--apply", "--project", str(project)]
        with subprocess.Popen([*command, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
            end = time.monotonic() + 120
            while one.poll() is None and time.monotonic() < end and len([*project.glob(".ai/tools/*")]) < wanted:
                time.sleep(0.001)
            one.kill()
        for folder in project.glob(".ai/tools/*"):
            assert {path.name for path in folder.iterdir()} == {"tool.yaml", f"{folder.name}.py"}
    move(rewrite=True, apply=True)
    assert len([*project.glob(".ai/tools/tool*/tool.yaml")]) == 150
    assert not [*scripts.glob("*.py")]
    assert len([*project.glob(".ai/.trash/*/*.py")]) == 150


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join) | st.text(max_size=60))
def test_any_text_is_analysed_without_an_error(text: str) -> None:
    habits = read_script_facts(text)
    assert habits is None or all(is_variable(name) for name in habits.variables)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("rewrite", [False, True])
def test_a_file_that_changed_after_signing_is_neither_copied_nor_converted(
    rewrite: bool, old: Path, project: Path, move: Migrate
) -> None:
    answer = items(move(path=str(old), apply=True, rewrite=rewrite, sign=True))["changed.py"]
    assert (answer["what"], answer["integrity"]) == ("skip", "modified")
    assert not [*(project / ".ai").rglob("changed*")]


def test_an_item_of_the_same_name_with_other_content_is_never_overwritten(
    old: Path, project: Path, move: Migrate
) -> None:
    mine = put(project / ".ai/tools/greet.py", '"""\ntool_type: script\nversion: 2.0.0\n"""\n\n\ndef main(): ...\n')
    taken = put(project / ".ai/tools/mail/enrich.py", "# another tool\n")
    before = mine.read_text(), taken.read_text()
    found = items(move(path=str(old), apply=True))
    assert found["greet.py"]["what"] == found["enrich.py"]["what"] == "skip"
    assert "another item has this name" in as_text(found["greet.py"]["reason"])
    assert "there already" in as_text(found["enrich.py"]["reason"])
    assert (mine.read_text(), taken.read_text()) == before


def test_the_second_of_two_old_files_with_one_name_is_reported_and_skipped(tmp_path: Path, move: Migrate) -> None:
    put(tmp_path / "old/.ai/scripts/a/same.py", "def main(): return 1\n")
    put(tmp_path / "old/.ai/scripts/b/same.py", "def main(): return 2\n")
    answer = move(path=str(tmp_path / "old"))
    assert answer["counts"] == {"copy": 1, "skip": 1}


@pytest.mark.usefixtures("sandbox")
def test_signing_is_done_on_request(old: Path, move: Migrate, ask: Ask) -> None:
    answer = items(move(to=old, rewrite=True, sign=True, apply=True))
    assert all(item.get("signed") for item in answer.values() if item["what"] in {"convert", "sign"})
    for name in ("greet", "count", "aloud", "letter"):
        assert ask("load", item_id=name, project_path=str(old)).content["integrity"] == "hashed"
    assert ask("load", item_id="changed", project_path=str(old)).content["integrity"] == "modified"


@pytest.mark.usefixtures("sandbox")
def test_signing_without_rewriting_signs_old_files_where_they_are(old: Path, move: Migrate) -> None:
    answer = items(move(to=old, sign=True, apply=True))
    assert answer["greet.py"]["signed"] is True
    assert (answer["enrich.py"]["what"], answer["changed.py"]["what"]) == ("keep", "keep")
    assert "kiwi-mcp:validated" in (old / ".ai/scripts/greet.py").read_text().partition("\n")[0]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-07")
def test_a_folder_of_dunder_tools_is_migrated_by_category(
    tmp_path: Path, project: Path, move: Migrate, ask: Ask
) -> None:
    head = '__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n'
    put(tmp_path / "stuff/add.py", f'{head}__category__ = "sums"\n\n\ndef main(a: int, b: int):\n    return a + b\n')
    put(tmp_path / "stuff/text/up.py", f"{head}\n\ndef main(text: str):\n    return text.upper()\n")
    put(tmp_path / "stuff/setup.py", '__version__ = "1.0.0"\nprint("set up")\n')
    put(tmp_path / "stuff/plain.py", "print(1)\n")
    put(tmp_path / "stuff/venv/lib/tool.py", head)
    answer = move(path=str(tmp_path / "stuff"), apply=True)
    assert what(answer) == {"add.py": "copy", "up.py": "copy", "setup.py": "skip", "plain.py": "skip"}
    assert {path.relative_to(project / ".ai").as_posix() for path in (project / ".ai/tools").rglob("*.py")} == {
        "tools/sums/add.py",
        "tools/text/up.py",
    }
    assert ask("execute", item_id="add", parameters={"a": 1, "b": 2}).content["result"] == 3


@pytest.mark.usefixtures("sandbox")
def test_items_can_be_migrated_to_the_user_with_their_shared_code(
    tmp_path: Path, home: Path, project: Path, move: Migrate, ask: Ask
) -> None:
    tool = '"""Say a word."""\nfrom lib.words import WORD\n\n__version__ = "1.0.0"\n__tool_type__ = "script"\n'
    tool += (
        '__executor_id__ = "python_runtime"\nCONFIG = {"lib_imports": ["words"]}\n\n\ndef main():\n    return WORD\n'
    )
    put(tmp_path / "old/.ai/tools/say.py", tool)
    put(tmp_path / "old/.ai/tools/lib/words.py", 'WORD = "kiwi"\n')
    answer = move(path=str(tmp_path / "old"), apply=True, location="user")
    assert answer["counts"] == {"copy": 1}
    assert not items(answer)["say.py"].get("issues")
    assert (home / ".ai/tools/lib/words.py").exists()
    assert ask("execute", item_id="say").content["result"] == "kiwi"
    put(home / ".ai/tools/lib/words.py", 'WORD = "other"\n')
    (home / ".ai/tools/say.py").unlink()
    assert items(move(path=str(tmp_path / "old"), apply=True, location="user"))["say.py"]["what"] == "skip"
    assert move(path=str(home / ".ai"))["target"] == str(home / ".ai")


def test_reading_runs_no_code_and_follows_no_links(tmp_path: Path, project: Path, move: Migrate) -> None:
    marker = tmp_path / "ran"
    put(tmp_path / "old/.ai/scripts/act.py", f"open({str(marker)!r}, 'w').close()\nif True:\n    import aside\n")
    secret = put(tmp_path / "secret.py", "KEY = 1\n")
    scripts = tmp_path / "old/.ai/scripts"
    (scripts / "linked.py").symlink_to(secret)
    (scripts / "aside.py").symlink_to(secret)
    (scripts / "away").symlink_to(tmp_path)
    os.mkfifo(scripts / "pipe.py")
    answer = move(path=str(tmp_path / "old"), apply=True, rewrite=True)
    assert not marker.exists()
    assert what(answer) == {"act.py": "convert", "linked.py": "skip", "aside.py": "skip", "away": "skip"}
    assert not [path for path in (project / ".ai").rglob("*.py") if "KEY" in path.read_text()]


def test_a_large_folder_is_scanned_up_to_a_limit(
    tmp_path: Path, move: Migrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        put(tmp_path / f"old/.ai/scripts/part{number % 4}/tool{number}.py", "def main(): return 1\n")
    monkeypatch.setattr(migrate, "MAX_LOOKED_AT", 30)
    answer = move(path=str(tmp_path / "old"))
    assert answer["counts"] == {"copy": 23, "skip": 1}
    assert "not looked at" in str(answer["items"])


def test_unreadable_files_do_not_stop_the_others(tmp_path: Path, move: Migrate) -> None:
    scripts = tmp_path / "old/.ai/scripts"
    put(scripts / "fine.py", "def main(): return 1\n")
    put(scripts / "latin.py", "").write_bytes(b"# \xe9\ndef main(): return 1\n")
    put(scripts / "deep.py", f"X = {'(' * 5000}1{')' * 5000}\n")
    put(scripts / "large.py", "#" * 1_100_000)
    put(scripts / "Folder/inner.py", "def main(): return 1\n")
    answer = move(path=str(tmp_path / "old"), apply=True)
    assert answer["counts"] == {"copy": 1, "skip": 4}
    assert all(item.get("reason") for item in items(answer).values() if item["what"] == "skip")


def test_a_target_that_cannot_be_written_is_reported_for_each_item(old: Path, project: Path, move: Migrate) -> None:
    put(project / ".ai/scripts", "a file where a folder should be")
    put(project / ".ai/tools", "a file where a folder should be")
    answer = move(path=str(old), apply=True)
    assert items(answer)["greet.py"]["what"] == "skip"
    assert items(answer)["welcome.md"]["what"] == "copy"


@pytest.mark.parametrize("path", ["missing", "a\0b", "/"])
def test_a_path_that_is_not_a_folder_is_refused_with_a_suggestion(path: str, move: Migrate) -> None:
    refused = move(path=path)
    assert "`path` cannot be used" in str(refused["message"])
    assert refused["suggestion"]


def test_a_project_without_old_items_needs_no_migration(move: Migrate) -> None:
    answer = move()
    assert (answer["counts"], answer["next"]) == ({}, "Nothing to do.")


LETTER = '"""Write a letter."""\nfrom page import page\n\n\ndef run(to: str) -> str:\n    return page(to)\n'
PAGE = "def page(text):\n    return f'--- {text} ---'\n"


@pytest.mark.usefixtures("sandbox")
def test_a_tool_that_lacks_a_module_is_neither_signed_nor_converted(
    tmp_path: Path, project: Path, move: Migrate
) -> None:
    put(tmp_path / "old/.ai/scripts/mail/letter.py", LETTER)
    put(tmp_path / "old/.ai/scripts/mail/page.py", PAGE)

    copied = items(move(path=str(tmp_path / "old"), apply=True, sign=True))["letter.py"]
    assert (copied["what"], "signed" in copied) == ("copy", False)
    (beside,) = (as_object(issue) for issue in as_list(copied["issues"]))
    assert "imports `page` from beside it" in as_text(beside["reason"])
    assert "requires" not in as_text(beside["fix"])

    left = items(move(apply=True, rewrite=True, sign=True))["letter.py"]
    assert left["what"] == "skip"
    assert "neither a file of it nor a package" in str(left["issues"])
    assert (project / ".ai/scripts/mail/letter.py").read_text() == LETTER

    whole = items(move(path=str(tmp_path / "old"), apply=True, rewrite=True, sign=True, location="user"))["letter.py"]
    assert (whole["what"], whole["signed"]) == ("convert", True)


@pytest.mark.usefixtures("sandbox")
def test_a_possibly_missing_package_is_a_warning(tmp_path: Path, move: Migrate) -> None:
    text = "try:\n    import rich\nexcept ImportError:\n    rich = None\n\n\ndef run() -> str:\n    return 'ok'\n"
    put(tmp_path / "old/.ai/scripts/plain.py", text)
    plain = items(move(path=str(tmp_path / "old"), apply=True, rewrite=True, sign=True))["plain.py"]
    assert (plain["what"], plain["signed"]) == ("convert", True)
    assert [as_object(issue)["severity"] for issue in as_list(plain["issues"])] == ["warning", "warning"]


def test_a_folder_without_any_item_is_reported_in_one_sentence(tmp_path: Path, move: Migrate) -> None:
    for number in range(50):
        put(tmp_path / "etc" / f"{number}.json", "{}")
    answer = move(path=str(tmp_path / "etc"))
    assert (answer["items"], answer["message"]) == ([], f"There is no item in {tmp_path / 'etc'}.")
