from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.primitives.http.addresses import HostRules, is_granted, is_listed, refusal, refusal_of_host

NOT_PUBLIC = (
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.1.2.3",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "4000::1",
    "8000::1",
)
PUBLIC = (
    "8.8.8.8",
    "1.1.1.1",
    "100.63.255.255",
    "100.128.0.1",
    "172.15.0.1",
    "172.32.0.1",
    "192.0.1.1",
    "198.17.0.1",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450:4001::200e",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
)


@pytest.mark.case("NET-12")
@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_a_private_address_is_refused(address: str) -> None:
    assert refusal(address, host="api.example.com", port=443, granted=()) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_not_refused(address: str) -> None:
    assert refusal(address, host="api.example.com", port=443, granted=()) is None


@pytest.mark.case("NET-07")
@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0x7f000001", "127.0.0.1.", "0", "1.2.3"]
)
def test_an_address_in_an_unusual_spelling_is_refused_unless_granted_in_that_spelling(host: str) -> None:
    assert refusal("127.0.0.1", host=host, port=80, granted=()) is not None
    assert refusal("8.8.8.8", host="134744072", port=80, granted=()) is not None
    assert refusal("127.0.0.1", host=host, port=80, granted=(host,)) is None


@pytest.mark.case("NET-07")
def test_a_mapped_address_is_not_covered_by_a_grant_of_the_plain_one() -> None:
    assert refusal("::ffff:127.0.0.1", host="[::ffff:127.0.0.1]", port=80, granted=("127.0.0.1",)) is not None
    assert refusal("::ffff:127.0.0.1", host="::ffff:127.0.0.1", port=80, granted=("[::ffff:7f00:1]:80",)) is None


@pytest.mark.parametrize("host", ["", ".", "a b", "a\0b", "allowed@evil", "a/b", "a\\b", "a#b", "a\r\nb"])
def test_an_invalid_host_name_is_refused_even_if_granted(host: str) -> None:
    assert refusal_of_host(host, port=80, granted=(host, "*")) is not None


@pytest.mark.parametrize(
    ("pattern", "host", "port", "expected"),
    [
        ("nas.home", "NAS.home.", 80, True),
        ("nas.home.", "nas.home", 80, True),
        ("nas.home:8080", "nas.home", 8080, True),
        ("nas.home:8080", "nas.home", 80, False),
        ("*.home", "nas.home", 80, True),
        ("*.home:80", "a.b.home", 80, True),
        ("*.home", "home", 80, False),
        ("*.home", "nashome", 80, False),
        ("*.home", ".home", 80, False),
        ("home", "nas.home", 80, False),
        ("home", "home.evil", 80, False),
        ("127.0.0.1", "127.0.0.1", 9, True),
        ("127.0.0.1:9", "127.0.0.1", 8, False),
        ("*.0.0.1", "127.0.0.1", 9, False),
        ("::1", "[::1]", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("[::1]:80", "0:0:0:0:0:0:0:1", 80, True),
        ("[::1]:80", "::1", 81, False),
        ("", "nas.home", 80, False),
    ],
)
def test_a_grant_covers_exactly_what_it_names(pattern: str, host: str, port: int, expected: bool) -> None:
    assert is_granted(host, port, (pattern,)) is expected


def test_a_name_that_resolves_to_a_granted_address_is_not_granted() -> None:
    assert refusal("127.0.0.1", host="rebind.example", port=80, granted=("127.0.0.1",)) is not None


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_checked_in_every_wrapping(inner: IPv4Address) -> None:
    plain = refusal(str(inner), host="x.example", port=80, granted=())
    for wrapped in (0xFFFF << 32 | int(inner), 0x64FF9B << 96 | int(inner), 0x2002 << 112 | int(inner) << 80):
        found = refusal(str(IPv6Address(wrapped)), host="x.example", port=80, granted=())
        assert (found is None) == (plain is None)


names = st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){1,3}", fullmatch=True)
ports = st.integers(1, 65_535)


@given(name=names, port=ports, first=st.sampled_from(["{name}", "{name}:{port}", "*", "*:{port}", "*.{rest}"]))
def test_a_denying_rule_wins_over_all_others(name: str, port: int, first: str) -> None:
    rest = name.partition(".")[2]
    denied, allowed = first.format(name=name, port=port, rest=rest), (f"{name}:{port}", f"*.{rest}:{port}", name)
    assert HostRules(allowed, (), allowed).refusal(name, port) is None
    assert HostRules(allowed, (denied,), allowed).refusal(name, port) == "the owner's policy denies it"


@given(name=names, other=names, port=ports)
def test_a_host_is_reached_only_by_a_rule_that_names_it(name: str, other: str, port: int) -> None:
    assert is_listed(name, port, (f"{name}:{port}",))
    assert is_listed(name, port, (name,)) is (port in {80, 443})
    assert is_listed(other, port, (f"{name}:{port}",)) is (other == name)
    assert not is_listed(f"{name}.{other}", port, (f"{name}:{port}",))
