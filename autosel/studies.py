"""Searches as Optuna studies in the database, for optuna-dashboard.

    optuna-dashboard sqlite:///PATH/autosel.db

A search itself samples in memory, so that it neither waits for a disk nor depends on what Optuna
stored; when it has ended its trials are written to Optuna's own tables in the same SQLite file.
Those tables' names (``studies``, ``trials``, ...) are not ours, nothing of ours refers to them, and
they may be deleted. A database in memory, or the segments that stand for one on a shared file
system, gets none. What cannot be written costs one warning: the measurements are stored anyway.
"""

from __future__ import annotations

import random
import sqlite3
import time
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from autosel.core import Scalar
from autosel.interfaces import Space
from autosel.rows import StoreWarning
from autosel.search import Found, quiet
from autosel.sqlite_file import BUSY_S
from autosel.store import Store

#: Illegal points that a study shows, at most; a large space has thousands.
ILLEGAL = 50
#: Optuna makes its tables without a lock, so of several processes that find none all but one fail.
RACED = ("already exists", "UNIQUE constraint failed: alembic_version", "database is locked")
ATTEMPTS = 10


def record(
    store: Store, title: str, space: Space, found: Found, facts: Mapping[str, Scalar] | None = None
) -> str | None:
    """Write an ended search as a study called ``title`` and a few digits; its name, or None.

    Values are microseconds a call. A point that failed is a failed trial, an illegal one a pruned
    trial with its reason. ``facts`` become the study's user attributes.
    """
    if store.path is None or store.segments or not space.choices or not found.tried:
        return None
    name = f"{title} {uuid.uuid4().hex[:6]}"
    why = ""
    for _ in range(ATTEMPTS):
        try:
            _write(str(store.path), name, space, found, dict(facts or {}))
        except Exception as error:  # SQLAlchemy's, Optuna's and sqlite3's have no common base
            why = " ".join(str(error).split())[:200]
            if not any(words in why for words in RACED):
                break
            time.sleep(random.uniform(0.05, 0.3))
        else:
            return name
    warnings.warn(f"the search is not kept as a study: {why}", StoreWarning, stacklevel=2)
    return None


def _write(path: str, name: str, space: Space, found: Found, facts: Mapping[str, Scalar]) -> None:
    import optuna
    from sqlalchemy.pool import NullPool

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)

    engine: dict[str, Any] = {"creator": connect, "poolclass": NullPool}
    with quiet(optuna):
        storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=engine)
        try:
            study = optuna.create_study(storage=storage, study_name=name, direction="minimize")
            for key, value in facts.items():
                study.set_user_attr(key, value)
            study.add_trials(_trials(optuna, space, found))
        finally:
            storage.engine.dispose()


def _trials(optuna: Any, space: Space, found: Found) -> list[Any]:
    state = optuna.trial.TrialState
    kinds = {
        name: optuna.distributions.CategoricalDistribution(_values(space, found, name))
        for name in _names(space)
    }

    def of(params: Mapping[str, Scalar]) -> dict[str, Any]:
        """What a trial has of the parameters; another design's are not in it."""
        has = [name for name in kinds if name in params]
        return {
            "params": {name: params[name] for name in has},
            "distributions": {name: kinds[name] for name in has},
        }

    trials = [
        optuna.trial.create_trial(
            state=state.COMPLETE if tried.value is not None else state.FAIL,
            value=tried.value,
            **of(tried.params),
        )
        for tried in found.tried
    ]
    on_grid = [s for s in found.skipped if any(_is_of(s.params, d) for d in space.designs)]
    trials += [
        optuna.trial.create_trial(
            state=state.PRUNED,
            **of(skipped.params),
            user_attrs={"illegal": str(skipped.reason)},
        )
        for skipped in on_grid[:ILLEGAL]
    ]
    return trials


def _names(space: Space) -> list[str]:
    """What is varied, and what several designs are told apart by."""
    designs = space.designs
    defaults = {name for design in designs for name in design.default}
    apart = [n for n in sorted(defaults) if len({repr(d.default.get(n)) for d in designs}) > 1]
    varied = [name for design in designs for name in design.choices]
    return list(dict.fromkeys([*varied, *apart]))


def _is_of(params: Mapping[str, Scalar], design: Space) -> bool:
    return all(params.get(name) in values for name, values in design.choices.items())


def _values(space: Space, found: Found, name: str) -> list[Scalar]:
    """The values of a parameter, those of points off the grid (the default's) included."""
    values = [value for design in space.designs for value in design.choices.get(name, ())]
    values += [design.default[name] for design in space.designs if name in design.default]
    values += [tried.params[name] for tried in found.tried if name in tried.params]
    # 1 and True are equal and are not the same choice.
    return list({(type(value), value): value for value in values}.values())
