"""Small tensors only: a pool of threads costs more than it saves, above all on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.threads import one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _own_database(tmp_path, monkeypatch):
    """No test reads or writes the user's decisions, nor the site's, nor those that ship: a pack for
    the machine that tests run on would decide for the tests."""
    from autosel.packs import places

    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "autosel.db"))
    monkeypatch.setenv(places.SITE_ENVIRONMENT, str(tmp_path / "site" / "autosel.db"))
    monkeypatch.setattr(places, "built_in", lambda: ())
