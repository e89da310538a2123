"""Certificates in the database: read back as they were, the newest of each candidate."""

from dataclasses import replace

import pytest

from autosel.core import Activation, Candidate
from autosel.store import Store, StoreWarning
from tests.verify.test_certificate_type import GOOD


def test_they_come_back_as_they_were(tmp_path):
    whole = replace(GOOD.problem, activation=Activation("silu", limit=7))
    other = replace(GOOD, candidate=Candidate.of("cpu_native", {"dot": "bf16"}, "panel16"))
    with Store.open(tmp_path / "a.db") as store:
        for certificate in (GOOD, other, replace(GOOD, problem=whole)):
            store.add_certificate(certificate)
    with Store.open(tmp_path / "a.db") as store:
        assert store.certificates(GOOD.problem, GOOD.device) == [GOOD, other]
        assert store.certificates(candidate=other.candidate) == [other]
        assert store.certificates(whole)[0].problem == whole
        newer = replace(GOOD.device, driver="2")
        assert store.certificates(GOOD.problem, newer) == []


def test_the_newest_holds_and_none_is_lost():
    refused = replace(GOOD, status="wrong", reason="off by one")
    with Store.open(":memory:") as store:
        store.add_certificate(GOOD)
        store.add_certificate(refused)
        assert store.certificates() == [refused]
        assert store.certificates(history=True) == [GOOD, refused]


def test_a_spoiled_row_is_left_out_and_named(tmp_path):
    with Store.open(tmp_path / "a.db") as store:
        store.add_certificate(GOOD)
        connection = store.tables.connection
        connection.execute("DROP TRIGGER certificates_are_append_only")
        connection.execute("""UPDATE certificates SET spec = '{"version": 1}'""")
        connection.commit()
        with pytest.warns(StoreWarning, match="certificates 1 ignored"):
            assert store.certificates() == []
