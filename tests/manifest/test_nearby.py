"""Local network hosts are recognised only if they are certain."""

from __future__ import annotations

import pytest

from kiwi_mcp.primitives.http.addresses import local_network_host


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:8000/mcp", "127.0.0.1:8000"),
        ("http://localhost/mcp", "localhost:80"),
        ("https://nas2/mcp", "nas2:443"),
        ("ws://10.1.2.3:99/", "10.1.2.3:99"),
        ("http://[::1]:7/mcp", "[::1]:7"),
        ("http://printer.local:8080/mcp", "printer.local:8080"),
    ],
)
def test_a_host_of_the_local_network_is_returned_with_its_port(url: str, host: str) -> None:
    assert local_network_host(url) == host


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/mcp",
        "http://127.0.0.1.example.com/",
        "http://169.254.169.254/latest",
        "http://[fe80::1]/",
        "http://0.0.0.0:80/",
        "http://0xa9fea9fe/",
        "http://2852039166/",
        "http://0251.0376.0251.0376/",
        "http://[::ffff:169.254.169.254]/",
        "http://${HOST}:80/",
        "http://127.0.0.1:${PORT}/",
        "http://127.0.0.1:99999/",
        "ftp://127.0.0.1/",
        "http://[::1/",
        "",
    ],
)
def test_a_host_that_is_public_or_undecidable_is_not_local(url: str) -> None:
    assert local_network_host(url) == ""
