"""`kiwi secrets`: values are read from standard input or typed without echo, and never shown."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from keyring import get_keyring, set_keyring
from keyring.backends import fail
from tests.surfaces.cli.conftest import Ended, Kiwi

VALUE = "s3cret-value-91c2"


@pytest.fixture
def kiwi(project: Path, kiwi: Kiwi) -> Kiwi:
    """Run a command in the project, with something on standard input."""
    folder = project / ".ai" / "tools"
    folder.mkdir()
    (folder / "crm.yaml").write_text(
        "tool_id: crm\ntool_type: api\nexecutor: http_client\nversion: 1.0.0\ndescription: Ask the service\n"
        'config: {method: GET, url: "http://127.0.0.1:9/", headers: {X-Key: "${CRM_KEY}"}}\nparameters: []\n'
    )

    def run(*words: str, given: str = "") -> Ended:
        ended = kiwi(*words, given=given)
        assert VALUE not in ended.out + ended.err
        return ended

    return run


@pytest.mark.slow
def test_a_secret_is_read_from_standard_input_and_listed_without_its_value(kiwi: Kiwi, project: Path) -> None:
    ended = kiwi("secrets", "set", "CRM_KEY", "--hosts", "127.0.0.1:9, api.example.com", given=f"{VALUE}\n")
    assert ended == Ended(
        0,
        "CRM_KEY is in the store, for headers of requests to 127.0.0.1:9, api.example.com\n",
        "hint: kiwi secrets grant CRM_KEY TOOL\n",
    )
    assert kiwi("run", "crm").code == 6
    assert kiwi("secrets", "grant", "CRM_KEY", "crm").code == 0
    ended = kiwi("secrets", "list")
    assert ended.out == (f"CRM_KEY  header  127.0.0.1:9,api.example.com  0 days\n  → project/local/crm in {project}\n")
    assert ended.err == "Sealed with a key file.\n"
    assert "${CRM_KEY}  the store of secrets, granted\n" in kiwi("why", "crm").out
    assert kiwi("secrets", "rotate", "CRM_KEY", given=f"{VALUE}-2").code == 0
    assert kiwi("secrets", "set", "CRM_KEY", "--keep", "--hosts", "*").out == (
        "CRM_KEY is for headers of requests to any host; its value stays\n"
    )
    assert kiwi("secrets", "revoke", "CRM_KEY", "crm").out == "CRM_KEY was taken back from project/local/crm\n"
    assert kiwi("secrets", "remove", "CRM_KEY").code == 0
    ended = kiwi("secrets", "list")
    assert (ended.out, ended.err.splitlines()[0]) == ("", "The store holds no secrets.")


def test_the_json_answer_has_no_value_either(kiwi: Kiwi) -> None:
    response = json.loads(kiwi("secrets", "set", "CRM_KEY", "--json", given=VALUE).out)
    assert response["secret"]["form"] == "env"
    assert json.loads(kiwi("secrets", "list", "--json").out)["secrets"][0]["name"] == "CRM_KEY"


@pytest.mark.usefixtures("processes")
def test_the_key_of_the_store_is_moved_by_a_command(kiwi: Kiwi) -> None:
    kiwi("secrets", "set", "CRM_KEY", given=VALUE)
    ended = kiwi("secrets", "seal", "passphrase")
    assert (ended.code, "Choose one of 'file', 'keyring'." in ended.err) == (4, True)
    assert json.loads(kiwi("secrets", "seal", "file", "--json").out)["sealed_by"] == "key file"
    assert kiwi("secrets", "seal", "drawer").code == 4
    before = get_keyring()
    # The machine that runs this may have a real one.
    set_keyring(fail.Keyring())  # type: ignore[no-untyped-call]  # the library has no types there
    ended = kiwi("secrets", "seal", "keyring")
    set_keyring(before)
    assert ended.code != 0
    assert "there is none" in ended.err
    assert kiwi("secrets", "list").err == "Sealed with a key file.\n"


@pytest.mark.parametrize(("given", "reason"), [("", "empty"), ("\n", "empty"), ("short", "fewer than 8")])
def test_an_invalid_secret_is_refused(given: str, reason: str, kiwi: Kiwi) -> None:
    ended = kiwi("secrets", "set", "CRM_KEY", given=given)
    assert (ended.code, ended.out) == (4, "")
    assert reason in ended.err


@pytest.mark.usefixtures("processes")
def test_a_typed_value_is_not_shown(project: Path) -> None:
    program = "from kiwi_mcp.surfaces.start import main; main()"
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", program, "secrets", "set", "CRM_KEY"]
    with Popen(words, cwd=project, stdin=theirs, stdout=PIPE, stderr=PIPE, start_new_session=True) as typing:
        assert typing.stdout
        assert typing.stderr
        asked = typing.stderr.read(len("Value of CRM_KEY: "))  # what is typed before the question is thrown away
        os.write(ours, f"{VALUE}\n".encode())
        said, talk = typing.communicate(timeout=120)
    os.write(theirs, b"the end")
    shown = os.read(ours, 1_000)  # what the terminal echoed, and the end
    os.close(theirs)
    os.close(ours)
    assert (typing.returncode, said) == (0, b"CRM_KEY is in the store, for processes\n")
    assert asked == b"Value of CRM_KEY: "
    assert shown.strip() == b"the end"
    assert VALUE.encode() not in talk
