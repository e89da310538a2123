"""No test here reads or writes results of the user, the site or the project."""

from __future__ import annotations

import pytest

from autosel.packs import canary_results, places


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "user" / "autosel.db"))
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "site" / "autosel.db"))
    monkeypatch.delenv("AUTOSEL_PACK_KEY", raising=False)
    monkeypatch.setattr(places, "built_in", lambda: tuple(sorted((tmp_path / "builtin").glob("*"))))
    monkeypatch.setattr(canary_results, "_memory", {})
