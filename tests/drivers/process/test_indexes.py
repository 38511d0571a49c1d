"""Package indexes: the hosts that installers reach, from their own settings."""

from __future__ import annotations

from pathlib import Path

from kiwi_mcp.drivers.environments.packages import ANY, npm_indexes, uv_indexes


def test_without_settings_any_host_may_be_the_index(home: Path) -> None:
    for found in (uv_indexes({}, home), npm_indexes({}, home)):
        assert found.hosts == ANY
        assert not found.is_named


def test_the_index_of_a_variable_is_reached_at_its_port(home: Path, tmp_path: Path) -> None:
    environ = {
        "UV_DEFAULT_INDEX": "https://user:word@index.test/simple",
        "UV_INDEX": "named=http://other.test:8080/simple https://[::1]/x",
        "UV_FIND_LINKS": str(tmp_path),
    }
    found = uv_indexes(environ, home)
    assert found.hosts == ("index.test:443", "other.test:8080", "[::1]:443")
    assert found.paths == (str(tmp_path),)
    assert npm_indexes({"NPM_CONFIG_REGISTRY": "https://npm.test"}, home).hosts == ("npm.test:443",)


def test_user_settings_are_read_without_credentials(home: Path) -> None:
    (home / ".npmrc").write_text(
        "registry=https://npm.test/\n@mine:registry = https://mine.test/\n//npm.test/:_authToken=secret\nfund=false\n"
    )
    found = npm_indexes({}, home)
    assert found.hosts == ("npm.test:443", "mine.test:443")
    assert found.lines == ("registry=https://npm.test/", "@mine:registry=https://mine.test/")
    settings = home / ".config" / "uv" / "uv.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('index-url = "https://a.test/simple"\n[[index]]\nurl = "https://b.test/simple"\n')
    uv = uv_indexes({}, home)
    assert uv.hosts == ("a.test:443", "b.test:443")
    assert (uv.paths, uv.variables) == ((str(settings),), (("UV_CONFIG_FILE", str(settings)),))


def test_unreadable_settings_name_no_index(home: Path) -> None:
    settings = home / ".config" / "uv" / "uv.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("index-url = [")
    (home / ".npmrc").mkdir()
    assert uv_indexes({"UV_DEFAULT_INDEX": "https://[broken"}, home).hosts == ANY
    assert npm_indexes({}, home).hosts == ANY
