"""Matrices here are tiny: a second thread only waits, for long on a busy machine."""

from collections.abc import Iterator

import pytest

from tests.threads import one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
