"""A check that memory or the machine spoilt is not held against the pack at the next start."""

import errno

import pytest

from autosel.packs import canary_results
from tests.packs.made import pack
from tests.packs.test_canary import HERE, check, fakes, made


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("no kernel image"), False),
    ],
    ids=repr,
)
def test_only_what_will_be_the_same_is_kept_in_a_file(tmp_path, error, passing):
    def before(params):
        raise error

    found = check(*fakes(before=before))
    assert not found.passed
    assert found.passing == passing
    database = tmp_path / "user" / "autosel.db"
    key = (database, pack().sha256, made().entries[0], HERE)
    canary_results.keep(*key, found)
    assert canary_results.find(*key) is not None, "once in this process is enough"
    canary_results._memory.clear()
    again = canary_results.find(*key)
    assert (again is None) == passing


def test_an_exit_is_the_programs():
    def before(params):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        check(*fakes(before=before))
