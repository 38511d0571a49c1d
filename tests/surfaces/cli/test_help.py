"""Help pages, old command names, completion, and the table they are generated from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.surfaces.cli.conftest import Kiwi

from kiwi_mcp.surfaces.cli.completion import candidates
from kiwi_mcp.surfaces.cli.help import UsageError, find, options_of, table
from kiwi_mcp.surfaces.cli.inputs import parse
from kiwi_mcp.surfaces.generate import command_table
from kiwi_mcp.surfaces.start import load

PATHS = [row["path"] for row in table()["commands"]]
ALIASES = [(alias, row["path"]) for row in table()["commands"] for alias in row["aliases"]]


def test_the_generated_table_matches_the_declarations() -> None:
    assert table() == command_table(), "run: python -m kiwi_mcp.surfaces.generate"


@pytest.mark.parametrize("row", table()["commands"], ids=PATHS)
def test_every_command_has_a_function_and_a_help_text_and_no_repeated_flag(row: dict[str, str]) -> None:
    found, _ = find(row["path"].split())
    module, name = found["run"].split(".")
    flags = [flag for option in options_of(found) for flag in option.get("flags", ())]

    assert callable(getattr(load(f"cli.{module}"), name))
    assert found["path"] == row["path"]
    assert found["help"].endswith(".")
    assert all(option["help"].rstrip("…").strip() for option in options_of(found))
    assert len(flags) == len({*flags})


@pytest.mark.parametrize("path", PATHS)
def test_every_command_has_a_page(path: str, command: Kiwi) -> None:
    ended = command(*path.split(), "--help")

    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: kiwi {path} ")


@pytest.mark.parametrize(("alias", "path"), ALIASES)
def test_an_old_name_still_finds_its_command(alias: str, path: str) -> None:
    row, rest = find(alias.split())

    assert row["path"] == path
    assert rest == [word for word in alias.split() if word.isupper()]


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("runs --tool x --limit 5", "runs list"),
        ("runs 01ABC --json", "runs show"),
        ("tasks abcd --cancel", "tasks cancel"),
        ("relax --undo say", "tool unrelax"),
        ("relax say --to trusted", "tool relax"),
        ("undo --limit 3", "runs undoable"),
        ("approvals rules --json", "approvals rules list"),
        ("registry add team https://a.example", "registry remote add"),
        ("audit --json", "audit list"),
    ],
)
def test_options_before_a_command_do_not_hide_it(words: str, path: str) -> None:
    assert find(words.split())[0]["path"] == path


@pytest.mark.parametrize("words", [["serch"], ["prefer", "nonsense"], ["mcp", "ad"], ["--nonsense"]])
def test_an_unknown_command_is_refused_with_the_page_that_lists_the_known_ones(words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        find(words)
    assert "--help" in refused.value.suggestion


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("sgin greet", "Did you mean `kiwi sign`?"),
        ("approve 3", "Did you mean `kiwi approvals approve`?"),
        ("mcp lst", "Did you mean `mcp list`?"),
        ("new hello --pyton", "Did you mean `--python`?"),
        ("mcp add time uvx mcp-server-time", "Put `--` before its command: `kiwi mcp add NAME -- uvx …`."),
        ("run greet", "`kiwi run greet name=… [greeting=…]`; `kiwi load greet` describes them."),
        ("run nosuch", "Search for it, or write one: `kiwi new nosuch --python`."),
        ("run broken", "/.ai/tools/broken.py is there, but declares no item, or cannot be read as code."),
        ("sign .ai/tools/greet.py", "Name the item, not its file: `greet`."),
        ("mcp add", "Name it: `kiwi mcp add NAME -- COMMAND`."),
    ],
)
def test_a_slip_on_the_command_line_is_answered_with_what_to_type(
    words: str, hint: str, command: Kiwi, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / ".ai" / "tools").mkdir(exist_ok=True)
    (project / ".ai" / "tools" / "greet.py").write_text(
        '"""Greet."""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n\n\n'
        'def main(name: str, greeting: str = "Hello") -> str:\n    return greeting + name\n'
    )
    (project / ".ai" / "tools" / "broken.py").write_text("def main(:\n")
    assert hint in command(*words.split()).err


def test_kiwi_alone_shows_how_to_start_and_groups_list_their_commands(command: Kiwi) -> None:
    assert "kiwi init" in command().out
    assert "Everyday commands:" in command("--help").out
    assert "remote push REMOTE" in command("registry").out
    assert json.loads(command("registry", "--json").out)["code"] == "invalid_request"


@pytest.mark.usefixtures("processes")
def test_help_loads_neither_a_parser_nor_the_kernel() -> None:
    program = (
        "import sys\nbefore = {*sys.modules}\nsys.argv = ['kiwi', 'run', '--help']\n"
        "from kiwi_mcp.surfaces import start\nstart.main()\n"
        "print(*[name for name in ('argparse', 'asyncio', 'msgspec', 'kiwi_mcp.kernel', 're', 'typing')"
        " if name in {*sys.modules} - before], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Usage: kiwi run ")
    assert not {*done.stderr.split()} & {"argparse", "asyncio", "msgspec", "kiwi_mcp.kernel"}


def given(words: str) -> dict[str, object]:
    row, rest = find(words.split())
    return {**parse(row, rest)}


def test_arguments_options_and_options_of_the_tool_may_be_mixed() -> None:
    assert given("run say --dry-run word=kiwi --count -5 --json loud=yes") == {
        "item_id": "say", "dry_run": True, "json": True, "parameters": ["word=kiwi", "--count", "-5", "loud=yes"],
    }  # fmt: skip
    assert given("search send --limit 3 a mail --tag x --tag y") == {
        "query": ["send", "a", "mail"], "limit": "3", "tag": ["x", "y"],
    }  # fmt: skip
    assert given("publish -mTEXT say") == {"changelog": "TEXT", "item_id": "say"}


def test_arguments_after_two_dashes_are_never_options() -> None:
    assert given("mcp add files --dry-run -- npx -y server --json") == {
        "server": "files", "dry_run": True, "command": ["npx", "-y", "server", "--json"],
    }  # fmt: skip
    assert given("search --json -- --limit")["query"] == ["--limit"]


@pytest.mark.parametrize("words", ["run", "load a b", "search --nonsense", "search --limit", "load x --sour y"])
def test_an_unknown_argument_is_refused_with_the_page_of_the_command(words: str) -> None:
    with pytest.raises(UsageError) as refused:
        given(words)
    assert "--help" in refused.value.suggestion


def completed(command: Kiwi, *words: str) -> Sequence[str]:
    return command("__complete", *words).out.split()


def test_commands_options_and_item_names_are_completed(
    command: Kiwi, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    for name in ("greet/tool.yaml", "greet/main.sh", "mail/send.py", "mail/.hidden.py"):
        path = project / ".ai" / "tools" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    assert completed(command, "ru") == ["run", "runs"]
    assert completed(command, "registry", "remote", "p") == ["pull", "push"]
    assert completed(command, "run", "") == ["greet", "send"]
    assert completed(command, "run", "gr") == ["greet"]
    assert completed(command, "run", "greet", "--dr") == ["--dry-run"]
    assert completed(command, "nonsense", "") == []
    assert "--help" in {*candidates(["search"])}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_kiwi(shell: str, command: Kiwi) -> None:
    assert "kiwi __complete" in command("completion", shell).out
    assert command("completion", "cmd").code == 2


@pytest.mark.usefixtures("processes")
def test_bash_completes_with_the_script() -> None:
    script = (
        'source <("$0" -m kiwi_mcp completion bash)\nkiwi() { "$PYTHON" -m kiwi_mcp "$@"; }\n'
        'COMP_WORDS=(kiwi registry ver) COMP_CWORD=2; _kiwi; echo "${COMPREPLY[*]}"'
    )
    program = f'PYTHON="$0"; {script}'
    done = subprocess.run(
        ["bash", "-c", program, sys.executable], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["verify", "versions"]
