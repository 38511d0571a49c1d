"""Dependencies are names and versions, and nothing else."""

from __future__ import annotations

import pytest

from kiwi_mcp.manifest.formats import is_node_requirement, is_python_requirement, package_name


@pytest.mark.parametrize(
    "text",
    ["httpx", "httpx>=0.24.0", "pydantic >= 2.0, <3", "a[b,c]==1.0", "ruamel.yaml", "x (>=1.0)", "x==1.*",
     "x===1.0+local",
     "x; python_version < '3.12'", "x>=1; (os_name == 'nt' or sys_platform == \"linux\") and extra == 'a'"],
)  # fmt: skip
def test_packages_of_an_index_are_accepted(text: str) -> None:
    assert is_python_requirement(text)


@pytest.mark.case("INJ-12")
@pytest.mark.parametrize(
    "text",
    ["--index-url http://evil", "-r other.txt", "-e .", "x @ file:///etc", "x@https://evil/x.whl", "git+ssh://evil/x",
     "./x", "../x", "/abs", "https://evil/x.whl", "x y", "x>=1 --hash=sha256:0", "x\n--index-url evil",
     "x; import os", "",
     "x;",
     "x[", "x==", "x ; python_version < 3", "a" * 400, "x>=$(id)", "x>=`id`", "\u0445"],
)  # fmt: skip
def test_options_addresses_and_paths_are_refused(text: str) -> None:
    assert not is_python_requirement(text)


@pytest.mark.parametrize(
    "text", ["left-pad", "@scope/name", "lodash@^4.17.0", "a@1.x || >=2.0.0 <3", "a@1.0.0 - 2.0.0", "a@*"]
)
def test_packages_of_npm_are_accepted(text: str) -> None:
    assert is_node_requirement(text)


@pytest.mark.case("INJ-12")
@pytest.mark.parametrize(
    "text",
    ["--registry=x", "a@git+ssh://x", "a@file:../x", "a@latest", "a@npm:b@1", "http://x", "user/repo", "../a", "Upper",
     "a@", "a@1;id", "a b"],
)  # fmt: skip
def test_npm_specs_from_other_sources_are_refused(text: str) -> None:
    assert not is_node_requirement(text)


def test_package_names_are_compared_in_normalised_form() -> None:
    assert package_name("Ruamel_Yaml[x]>=1") == "ruamel-yaml"
