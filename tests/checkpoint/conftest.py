"""Small tensors only: a pool of threads costs more than it saves, above all on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.threads import one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
