"""`make test-tunix`: which Tunix is tested with, and what is refused."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests import with_tunix

PROJECT = '[project]\nname = "{}"\nversion = "9.9"\ndependencies = {}\n'


@pytest.fixture
def make_checkout(tmp_path):
    """Makes a folder that looks like a checkout."""

    def make(name="google-tunix", dependencies=()):
        (tmp_path / "tunix").mkdir()
        (tmp_path / "tunix" / "__init__.py").touch()
        text = PROJECT.format(name, list(dependencies))
        (tmp_path / "pyproject.toml").write_text(text)
        return tmp_path

    return make


def test_the_checkout_is_what_is_imported(make_checkout, monkeypatch):
    """Before the installed wheel, and before what PYTHONPATH held."""
    folder = make_checkout(dependencies=["jax>=0.7", "no-such-package-at-all", "flax"])
    installed = with_tunix.imported_from(dict(with_tunix.os.environ))
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    checkout = with_tunix.read_checkout(str(folder))
    assert (checkout.version, checkout.missing) == ("9.9", ("no-such-package-at-all",))
    env = with_tunix.environment(checkout)
    assert with_tunix.imported_from(env) == folder / "tunix" != installed
    assert env["PYTHONPATH"].endswith(str(installed.parent))


@pytest.mark.parametrize("arguments", [[], [""], ["", "-q"]])
def test_no_checkout_is_given(capsys, arguments):
    assert with_tunix.main(arguments) == 2
    assert "TUNIX is not given: make test-tunix TUNIX=" in capsys.readouterr().err


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    for folder, why in ((tmp_path, "no tunix/__init__.py"), (tmp_path / "none", "is no folder")):
        assert with_tunix.main([str(folder)]) == 2
        assert why in capsys.readouterr().err


def test_another_project_is_refused(make_checkout, capsys):
    assert with_tunix.main([str(make_checkout(name="other"))]) == 2
    assert "its project is 'other'" in capsys.readouterr().err


def test_versions_that_the_checkout_cannot_use_are_named(make_checkout, capsys):
    folder = make_checkout(dependencies=["numpy>=99", "jax<0.1,>=0.0.1", "flax"])
    assert with_tunix.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"numpy>=99 (installed: {metadata.version('numpy')})" in error
    assert "jax<0.1,>=0.0.1" in error
    assert "flax" not in error
