from __future__ import annotations

from hashlib import sha256
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.signatures import canonical, digest_of, sha256_hex

MAIN = ToolFile("main.py", sha256_hex(b"one"), 3)
HELPER = ToolFile("lib/helper.py", sha256_hex(b"two"), 3)


def digest(
    *files: ToolFile, manifest: bytes = b"tool_id: a\n", version: str = "1.0.0", executor: str | None = "python_runtime"
) -> str:
    return digest_of(tool_id="a", version=version, executor=executor, manifest_body=manifest, files=files)


def test_a_digest_is_the_hash_of_a_reproducible_statement() -> None:
    def entry(file: ToolFile) -> str:
        return f'{{"executable":false,"path":"{file.path}","sha256":"{file.sha256}"}}'

    statement = (
        f'{{"executor":"python_runtime","files":[{entry(HELPER)},{entry(MAIN)}],"kind":"kiwi.item/1",'
        f'"manifest":"{sha256(b"tool_id: a" + bytes([10])).hexdigest()}","tool_id":"a","version":"1.0.0"}}'
    )
    assert digest(MAIN, HELPER) == digest(HELPER, MAIN) == sha256(statement.encode()).hexdigest()


@pytest.mark.case("SIG-06")
def test_swapped_added_and_newly_executable_files_change_the_digest() -> None:
    whole = digest(MAIN, HELPER)
    swapped = digest(ToolFile("main.py", HELPER.sha256, 3), ToolFile("lib/helper.py", MAIN.sha256, 3))
    added = digest(MAIN, HELPER, ToolFile("more.py", MAIN.sha256, 3))
    executable = digest(ToolFile("main.py", MAIN.sha256, 3, is_executable=True), HELPER)
    assert len({whole, swapped, added, executable, digest(MAIN)}) == 5


def test_the_manifest_the_version_and_the_executor_are_part_of_the_digest() -> None:
    variants = [digest(), digest(manifest=b"tool_id: b\n"), digest(version="1.0.1"), digest(executor=None)]
    assert len(set(variants)) == 4


def test_only_line_ends_of_the_manifest_are_normalised() -> None:
    assert digest(manifest=b"a: 1\r\nb: 2\r\n") == digest(manifest=b"a: 1\nb: 2\n")
    assert digest(manifest=b"a: 1\rb: 2\r") != digest(manifest=b"a: 1\nb: 2\n")
    assert digest(manifest=b"a: 1 \n") != digest(manifest=b"a: 1\n")


def test_canonical_json_sorts_keys_and_writes_numbers_in_one_form() -> None:
    assert canonical({"b": 1.0, "a": ["é", None, True]}) == '{"a":["é",null,true],"b":1}'.encode()
    assert canonical(MappingProxyType({"b": (1, 2)})) == b'{"b":[1,2]}'


@pytest.mark.parametrize("value", [2**60, float("nan"), float("inf"), "\ud800", {"\udc00": 1}])
def test_a_value_without_a_canonical_form_is_refused(value: Json) -> None:
    with pytest.raises(InvalidRequest):
        canonical({"value": value})


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(-1000, 1000)))
def test_the_order_of_keys_never_matters(value: dict[str, int]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))
