"""`kiwi key`, and the question before an installation: as text, as JSON, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from tests.plugins.machines import Machine, MakeMachine
from tests.surfaces.cli.conftest import Ended, Kiwi

from kiwi_mcp.domain.json import as_object, as_text

FINGERPRINT = re.compile(r"\b(?:[0-9a-f]{4}-){7}[0-9a-f]{4}\b")


@pytest.fixture
def bob(a_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = a_machine("bob")
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(machine.project)
    return machine


@pytest.fixture
def kiwi(bob: Machine, command: Kiwi) -> Kiwi:
    """Run a command on a machine, with `F` for every fingerprint."""
    assert bob.project == Path.cwd()

    def run(*words: str) -> Ended:
        code, out, talk = command(*words)
        return Ended(code, out if "--json" in words else FINGERPRINT.sub("F", out), FINGERPRINT.sub("F", talk))

    return run


@pytest.fixture
def shelf(a_machine: MakeMachine, tmp_path: Path) -> str:
    """A folder with a tool signed by an unknown publisher."""
    ann = a_machine("ann", namespaces=["acme"])
    ann.ask("key", action="new")
    ann.publish("greet")
    ann.exchange("push", tmp_path / "shelf")
    return str(tmp_path / "shelf")


def test_a_key_is_created_shown_rotated_and_revoked(kiwi: Kiwi) -> None:
    assert kiwi("key", "list") == Ended(0, "", "You have no key.\nhint: kiwi key new\n")
    assert kiwi("key", "show").code == 3
    made = kiwi("key", "new", "--name", "laptop")
    assert (made.code, made.out) == (
        0,
        "F: This is your key; `kiwi sign` and `kiwi publish` use it from now on\n",
    )
    shown = json.loads(kiwi("key", "show", "--json").out)
    assert f"  key: {shown['key']['key']}\n" in made.err
    assert kiwi("key", "show").out == f"{shown['key']['key']}\n"
    assert kiwi("key", "new").code == 4
    rotated = kiwi("key", "rotate")
    assert "  rotation: kiwi-key:rotated:" in rotated.err
    assert kiwi("key", "revoke", shown["key"]["fingerprint"], "-m", "lost").code == 0
    first, second = kiwi("key", "list").out.splitlines()
    assert re.fullmatch(r"you +F  revoked  laptop, since [\d-]{10}, revoked [\d-]{10}", first)
    assert re.fullmatch(r"you +F  trusted  laptop, since [\d-]{10}", second)


def test_a_publisher_is_trusted_by_its_key(kiwi: Kiwi) -> None:
    assert kiwi("key", "trust", "acme").code == 4
    trusted = kiwi("key", "trust", "acme", "A" * 43, "--expires", "90d")
    assert trusted.out == "F: acme is trusted with this key\n"
    assert kiwi("key", "trust", "acrne", "A" * 43).err.startswith(
        "warning: acrne looks like acme, which is another publisher\n"
    )
    assert "looks like acrne" in kiwi("key", "list").out
    assert json.loads(kiwi("key", "show", "--publisher", "acme", "--json").out)["publishers"] == ["acme", "acrne"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("SR3")
def test_an_untrusted_item_ends_with_the_command_to_type(kiwi: Kiwi, shelf: str, bob: Machine) -> None:
    refused = kiwi("pull", "acme/greet", "--from", shelf)
    assert (refused.code, refused.out) == (6, "")
    assert refused.err.splitlines() == [
        "error: acme/greet@1.0.0 is signed with a key of acme that is not known here, F. Nothing was installed.",
        "hint: To accept it, the owner repeats the command with `--trust-key F`.",
    ]
    response = json.loads(kiwi("pull", "acme/greet", "--from", shelf, "--json").out)
    signer = as_text(as_object(response["items"][0])["signer"])
    assert kiwi("registry", "remote", "pull", shelf).code == 6
    pulled = kiwi("pull", "acme/greet", "--from", shelf, "--trust-key", signer)
    assert pulled.out == "acme/greet@1.0.0 is here, whole and verified\n"
    assert pulled.err.startswith("warning: acme is known by F from now on\n")
    assert "(verified, F)" in kiwi("registry", "list").out
    assert "verified, F" in kiwi("why", "acme/greet").out
    assert (bob.user / "trust.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-02")
@pytest.mark.parametrize(("typed", "code"), [("y", 0), ("n", 6), ("", 6)])
def test_the_owner_is_asked_on_a_terminal(bob: Machine, shelf: str, typed: str, code: int) -> None:
    program = "from kiwi_mcp.surfaces.start import main; main()"
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", program, "pull", "acme/greet", "--from", shelf]
    with Popen(words, cwd=bob.project, stdin=theirs, stdout=PIPE, stderr=theirs, start_new_session=True) as asking:
        os.close(theirs)
        asked = b""
        while b"[N]o: " not in asked:
            asked += os.read(ours, 4_096)
        os.write(ours, f"{typed}\n".encode())
        said, _ = asking.communicate(timeout=120)
    os.close(ours)

    question = FINGERPRINT.sub("F", asked.decode())
    assert (
        "acme/greet@1.0.0 is signed with a key of acme that is not known here, F. Install it all the same?" in question
    )
    assert "[y]es / [N]o: " in question
    assert asking.returncode == code
    assert said == (b"acme/greet@1.0.0 is here, whole and verified\n" if code == 0 else b"")
