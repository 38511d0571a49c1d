"""The formats of type specs."""

from __future__ import annotations

import pytest

from kiwi_mcp.manifest.formats import is_url, is_variable


@pytest.mark.req("K-VA-04")
@pytest.mark.parametrize(
    "url",
    ["https://a.example/x?lat={lat}&lon={lon}#{f}", "${URL}", "${BASE}/v1/{id}", "http://127.0.0.1:8080/", "wss://a.example",
     "https://${SHOP}.example.com/{x}", "http://[::1]:80/", "https://u:${PASSWORD}@a.example/"],
)  # fmt: skip
def test_urls_with_a_fixed_host_are_accepted(url: str) -> None:
    assert is_url(url)


@pytest.mark.req("K-VA-04")
@pytest.mark.parametrize(
    "url",
    ["", "a.example/x", "//a.example", "ftp://a.example", "file:///etc/passwd", "https://", "https:///x", "{url}",
     "{s}://a/",
     "https://{host}/", "https://a{x}.example/", "https://a:{port}/", "https://{user}@a/", "https://a:99999/",
     "https://a/\r\nX: y",
     "https://a b/", "${BASE}evil.test/", "javascript:alert(1)"],
)  # fmt: skip
def test_urls_with_a_host_from_the_caller_are_refused(url: str) -> None:
    assert not is_url(url)


@pytest.mark.case("INJ-11")
@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME",
     "NODE_OPTIONS",
     "BASH_ENV", "ENV", "PATH", "path", "IFS", "GIT_SSH_COMMAND", "PERL5OPT", "RUBYOPT", "1A", "A-B", "A=B", "",
     "A\n", "Ä"],
)  # fmt: skip
def test_loader_variables_may_not_be_set(name: str) -> None:
    assert not is_variable(name)


@pytest.mark.parametrize("name", ["GITHUB_TOKEN", "API_KEY", "_x", "PYTHONUNBUFFERED", "GIT_AUTHOR_NAME", "LDAP_URL"])
def test_other_variables_may_be_set(name: str) -> None:
    assert is_variable(name)
