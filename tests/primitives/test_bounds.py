"""The bounds of a stored secret: items, hosts and form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import SecretNotGranted
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.http.request import prepare
from kiwi_mcp.primitives.secrets.grants import SecretGrant, SecretRecipient, StoredSecret, refuse_holder, refuse_target
from kiwi_mcp.primitives.secrets.reveal import FoundVariable, Revealed, SecretForm, SecretScope

VALUE = "s3cret-value"
HERE = "/home/ada/shop"


def revealed(*hosts: str, form: SecretForm = "any") -> Revealed:
    return Revealed({"KEY": FoundVariable("store", Secret(VALUE))}, {"KEY": SecretScope(hosts, form)})


def spec(url: str = "https://api.example.com/", **words: JsonObject) -> HttpSpec:
    headers = {"X-Key": "${KEY}"} if not words else {}
    return HttpSpec("POST", url, headers, words.get("body"), has_body="body" in words)


@pytest.mark.case("SEC-09")
@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/",
        "https://api.example.com.evil.example/",
        "https://evilapi.example.com/",
        "https://api.example.com:8443/",
        "http://api.example.com/",
        "https://evil.example/?x=https://api.example.com/",
        "https://evil.example/#@api.example.com",
        "https://\u0430pi.example.com/",
    ],
)
def test_a_request_to_another_host_is_refused_before_it_is_sent(url: str) -> None:
    with pytest.raises(SecretNotGranted) as caught:
        prepare(spec(url), revealed("api.example.com:443"))
    assert caught.value.code == "secret_not_granted"
    assert VALUE not in str(caught.value.to_response())


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        (["api.example.com"], "https://API.example.com./v1"),
        (["*.example.com"], "https://api.example.com/"),
        (["*"], "https://anywhere.example/"),
        (["[::1]:80"], "http://[::1]/"),
        (["127.0.0.1:8080"], "http://127.0.0.1:8080/"),
    ],
)
def test_a_request_to_a_host_of_the_secret_carries_it(hosts: list[str], url: str) -> None:
    assert ("X-Key", VALUE) in prepare(spec(url), revealed(*hosts)).headers


def test_a_host_from_a_variable_is_checked_after_substitution() -> None:
    found = {
        "KEY": FoundVariable("store", Secret(VALUE)),
        "BASE": FoundVariable("process", Secret("https://evil.example")),
    }
    secrets = Revealed(found, {"KEY": SecretScope(("api.example.com",), "any")})
    with pytest.raises(SecretNotGranted):
        prepare(spec("${BASE}/api.example.com"), secrets)


@pytest.mark.parametrize(
    ("url", "is_refused"),
    [
        ("https://evil.example/", True),
        ("https://api.example.com/", False),
        ("${BASE}/v1", False),
        ("https://${HOST}:${PORT}/v1", False),
        ("http://[::1/", False),
        ("http://a:b/", False),
    ],
)
def test_a_plan_with_a_known_host_is_refused_before_it_is_driven(url: str, is_refused: bool) -> None:
    try:
        refuse_target(spec(url), {"KEY": SecretScope(("api.example.com",), "header")})
    except SecretNotGranted:
        assert is_refused
    else:
        assert not is_refused


@pytest.mark.parametrize(
    ("form", "request_"),
    [
        ("header", spec("https://api.example.com/?key=${KEY}", body={})),
        ("header", spec(body={"deep": {"list": ["a ${KEY}"]}})),
        ("header", spec(body={"${KEY}": 1})),
        ("header", spec(body={"with default": "${KEY:-none}"})),
        ("env", spec()),
    ],
)
def test_a_secret_is_sent_only_in_its_form(form: SecretForm, request_: HttpSpec) -> None:
    with pytest.raises(SecretNotGranted, match="KEY"):
        prepare(request_, revealed("api.example.com", form=form))
    prepare(request_, revealed("api.example.com", form="any"))


def test_a_request_without_the_secret_may_go_anywhere() -> None:
    plain = HttpSpec("GET", "https://evil.example/", {"X-Text": "$${KEY}"})
    assert prepare(plain, revealed("api.example.com")).host == "evil.example"


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize(
    ("grant", "holder", "is_given"),
    [
        (SecretGrant("user/local/crm", ""), SecretRecipient("user/local/crm", HERE), True),
        (SecretGrant("user/local/crm", ""), SecretRecipient("user/local/crm2", HERE), False),
        (SecretGrant("user/local/crm", ""), SecretRecipient("project/local/crm", HERE), False),
        (SecretGrant("project/local/crm", HERE), SecretRecipient("project/local/crm", HERE), True),
        (SecretGrant("project/local/crm", HERE), SecretRecipient("project/local/crm", "/tmp/from-the-net"), False),
        (SecretGrant("registry/acme/*", ""), SecretRecipient("registry/acme/crm", HERE), True),
        (SecretGrant("registry/acme/*", ""), SecretRecipient("registry/acme2/crm", HERE), False),
        (SecretGrant("*", HERE), SecretRecipient("project/local/crm", HERE), True),
        (SecretGrant("*", HERE), SecretRecipient("project/local/crm", "/tmp/from-the-net"), False),
    ],
)
def test_a_grant_covers_the_items_it_names_in_one_project(
    grant: SecretGrant, holder: SecretRecipient, is_given: bool
) -> None:
    stored = StoredSecret("KEY", 1, SecretScope(), (grant,))
    if is_given:
        return refuse_holder(stored, holder)
    with pytest.raises(SecretNotGranted) as caught:
        refuse_holder(stored, holder)
    assert f"kiwi secrets grant KEY {holder.item}" in caught.value.suggestion
    return None


def test_a_header_secret_is_not_passed_to_a_process() -> None:
    stored = StoredSecret("KEY", 1, SecretScope(("a.example",), "header"), (SecretGrant("*", HERE),))
    with pytest.raises(SecretNotGranted, match="headers"):
        refuse_holder(stored, SecretRecipient("user/local/crm", HERE, is_process=True))


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.sampled_from(["user/local/a", "user/local/b", "registry/x/a", "user/*"]), max_size=3))
def test_a_secret_without_a_grant_is_never_passed(names: list[str]) -> None:
    stored = StoredSecret("KEY", 1, SecretScope(), tuple(SecretGrant(name, "") for name in names))
    assert not stored.is_granted(SecretRecipient("mcp/server/a", HERE))
    assert stored.is_granted(SecretRecipient("user/local/b", HERE)) == bool({"user/local/b", "user/*"} & {*names})
