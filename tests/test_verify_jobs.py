"""The benchmark's workers: a step that kills its process or hangs costs only its own row."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench import verify_jobs

STEPS = ("good", "dies", "late", "hangs", "last")


def work(task: str, steps: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    if task == "unreadable":
        os._exit(7)
    for step in list(steps):
        yield step, None
        if step == "dies" and task == "faulty":
            os._exit(3)
        if step == "hangs" and task == "faulty":
            time.sleep(600)
        yield step, {"status": "ok"}
        if step == "late" and task == "faulty":  # the device is lost after the row was given
            os._exit(4)


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, str, str]]:
    tasks = ["fine", "faulty", "unreadable"]
    found = verify_jobs.run(work, tasks, STEPS, jobs=2, limit_s=2)
    return [(task, step, row["status"], row.get("reason", "")) for task, step, row in found]


def test_every_step_of_every_task_has_one_row(rows: list[tuple[str, str, str, str]]) -> None:
    found = sorted((task, step) for task, step, _, _ in rows)
    assert found == sorted((t, s) for t in ("fine", "faulty", "unreadable") for s in STEPS)


def test_only_the_faulty_steps_are_blamed(rows: list[tuple[str, str, str, str]]) -> None:
    status = {(task, step): status for task, step, status, _ in rows}
    assert {status["fine", step] for step in STEPS} == {"ok"}
    assert [status["faulty", step] for step in STEPS] == ["ok", "crashed", "ok", "timeout", "ok"]
    reasons = {(task, step): reason for task, step, _, reason in rows}
    assert reasons["faulty", "dies"] == "process ended, exit status 3"


def test_a_task_that_never_begins_is_not_tried_for_ever(
    rows: list[tuple[str, str, str, str]],
) -> None:
    found = {(status, reason) for task, _, status, reason in rows if task == "unreadable"}
    assert found == {("crashed", "before it began: process ended, exit status 7")}
