"""Races run again on stored measurements: the same samples, the same eliminations."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

from autosel import samples, stats
from autosel.core import Candidate, Measurement
from autosel.racing import Eliminated, Race


def rerun(
    measurements: Sequence[Measurement],
    classes: Mapping[Candidate, Hashable],
    *,
    epsilon: float,
    confidence: float,
) -> dict[Candidate, Eliminated[Candidate]]:
    """Who was eliminated in the races that these measurements were taken in.

    Candidates of different races do not eliminate each other, and neither do those of different
    ``classes``; a measurement without a race is in none.
    """
    races: dict[str, dict[Candidate, Measurement]] = {}
    for m in measurements:
        race = samples.race_of(m)
        if race is not None:
            races.setdefault(race, {})[m.candidate] = m
    eliminated: dict[Candidate, Eliminated[Candidate]] = {}
    for members in races.values():
        eliminated |= _rerun(members, classes, epsilon, confidence)
    return eliminated


def _rerun(
    members: Mapping[Candidate, Measurement],
    classes: Mapping[Candidate, Hashable],
    epsilon: float,
    confidence: float,
) -> dict[Candidate, Eliminated[Candidate]]:
    kind = next(iter(members.values())).device.kind
    race: Race[Candidate] = Race(
        list(members),
        stats.ranking_quantile(kind),
        classes={candidate: classes[candidate] for candidate in members},
        epsilon=epsilon,
        confidence=confidence,
    )
    columns = (samples.rounds(m) for m in members.values())
    for blocks in itertools.zip_longest(*columns, fillvalue=()):
        race.add(dict(zip(members, blocks, strict=True)))
    return race.eliminated
