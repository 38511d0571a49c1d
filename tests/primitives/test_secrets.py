from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidRequest, TooLarge, VariableMissing
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.secrets.reveal import (
    ENV_FILE_LIMIT,
    Revealed,
    Variables,
    names_in,
    parse_env,
    read_env_file,
    reveal,
    reveal_json,
    reveal_url,
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    project, user = tmp_path / "project", tmp_path / "user"
    (project / ".ai").mkdir(parents=True)
    user.mkdir()
    return project, user


def test_the_nearest_source_wins(folders: tuple[Path, Path]) -> None:
    project, user = folders
    places = {"A": user / ".env", "B": project / ".ai" / ".env", "C": project / ".env", "D": project / ".env.local"}
    names = "ABCDE"
    for depth, (name, path) in enumerate(places.items()):
        path.write_text("".join(f"{later}={name}\n" for later in names[depth:]))
    found = Variables().resolve(names, project=project, user=user, environ={"E": "process", "OTHER": "x"})
    assert {name: one.value.reveal() for name, one in found.items()} == {**{n: n for n in "ABCD"}, "E": "process"}
    located = Variables().locate([*names, "NONE"], project=project, user=user, environ={"E": "process"})
    assert located == {**{name: str(path) for name, path in places.items()}, "E": "process", "NONE": None}


@pytest.mark.case("SEC-04")
def test_a_missing_or_empty_variable_is_an_error_that_names_it(folders: tuple[Path, Path]) -> None:
    project, user = folders
    (project / ".env").write_text("EMPTY=\nB='set'\n")
    with pytest.raises(VariableMissing) as caught:
        Variables().resolve(["MISSING", "EMPTY", "B"], project=project, user=user, environ={}, needed_by="crm")
    assert caught.value.details["variables"] == ["MISSING", "EMPTY"]
    assert "'crm'" in caught.value.message


def test_an_optional_variable_may_be_missing(folders: tuple[Path, Path]) -> None:
    project, user = folders
    assert Variables().resolve([], optional=["X"], project=project, user=user, environ={}) == {}


@pytest.mark.case("SEC-02")
def test_only_the_requested_names_are_found(folders: tuple[Path, Path]) -> None:
    project, user = folders
    (user / ".env").write_text("A=one\nB=two\n")
    assert set(Variables().resolve(["A"], project=project, user=user, environ={})) == {"A"}


def test_the_grammar_of_env_files() -> None:
    text = (
        '# a comment\n\nPLAIN=value\n SPACED = a b  \nQUOTED="a # b" rest\nSINGLE=\'x"y\' # c\nCOMMENT=value # note\n'
        "HASH=a#b\nEMPTY=\nONLY=#no\nexport SHELL=1\n9BAD=1\nBARE\n"
        'REF=${PLAIN}\nEQ=a=b\r\nTWICE=1\nTWICE=2\nOPEN="abc\n'
    )
    assert parse_env(text) == {
        "PLAIN": "value",
        "SPACED": "a b",
        "QUOTED": "a # b",
        "SINGLE": 'x"y',
        "COMMENT": "value",
        "HASH": "a#b",
        "EMPTY": "",
        "ONLY": "",
        "SHELL": "1",
        "REF": "${PLAIN}",
        "EQ": "a=b",
        "TWICE": "2",
        "OPEN": "abc",
    }


def test_an_unreadable_env_file_is_an_error(tmp_path: Path) -> None:
    large, binary, folder, fifo = (tmp_path / name for name in ("large", "binary", "folder", "fifo"))
    large.write_bytes(b"A" * (ENV_FILE_LIMIT + 1))
    binary.write_bytes(b"A=\xff\xfe")
    folder.mkdir()
    os.mkfifo(fifo)
    with pytest.raises(TooLarge):
        read_env_file(large)
    for path in (binary, folder, fifo):
        with pytest.raises(InvalidRequest):
            read_env_file(path)
    assert read_env_file(tmp_path / "none") == {}


def test_the_repr_of_a_secret_does_not_show_it() -> None:
    secret = Secret("s3cret-value")
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", "%s" % secret):  # noqa: UP031 - the old way too
        assert "s3cret" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")
    assert secret.reveal() == "s3cret-value"


def test_the_repr_of_revealed_values_shows_only_names(folders: tuple[Path, Path]) -> None:
    project, user = folders
    values = Revealed(Variables().resolve(["A"], project=project, user=user, environ={"A": "s3cret"}))
    assert dict(values) == {"A": "s3cret"}
    assert repr(values) == "Revealed(A)"
    with pytest.raises(TypeError):
        pickle.dumps(values)


@pytest.mark.req("K-RT-06")
def test_names_are_replaced_once_and_never_within_arguments() -> None:
    secrets = {"A": "${B}", "B": "b", "N": ""}
    assert reveal("x ${A} $${A} ${B}$ $B ${not a name}", secrets) == "x ${B} ${A} b$ $B ${not a name}"
    assert reveal("${C:-none} ${B:-none} ${N:-empty}", secrets) == "none b empty"
    assert reveal("$$${A}", secrets) == "$${A}"
    assert names_in("${A} $${B} ${C:-x} ${A}") == ("A", "C")
    with pytest.raises(VariableMissing):
        reveal("${UNKNOWN}", secrets)


@pytest.mark.req("K-RT-06")
@given(st.text())
def test_an_argument_is_passed_unchanged(text: str) -> None:
    assert reveal(text.replace("${", "$${"), {"HOME": "/secret"}) == text


def test_values_in_json_stay_within_their_strings() -> None:
    assert reveal_json({"${K}": ["${V}", 1, None, {"a": "x${V}"}]}, {"K": "k", "V": '","x":"'}) == {
        "k": ['","x":"', 1, None, {"a": 'x","x":"'}]
    }


def test_values_in_a_url_stay_within_their_part() -> None:
    secrets = {"BASE": "https://api.example/v1", "T": "a/b?c=d&e#f %"}
    assert reveal_url("${BASE}/x/${T}?k=${T}&l=$${T}", secrets) == (
        "https://api.example/v1/x/a/b%3Fc=d&e%23f%20%25?k=a%2Fb%3Fc%3Dd%26e%23f%20%25&l=${T}"
    )
