"""Patterns of a config: the same answer as ``re.match``, in bounded time."""

from __future__ import annotations

import random
import re
import time

import pytest

from autosel.errors import ConfigError
from autosel.module_rules import _without_retries, compile_pattern

NAMES = [
    f"{prefix}layers.{layer}.mlp.experts.{expert}.{proj}"
    for prefix in ("model.", "model.language_model.", "")
    for layer in (0, 1, 10, 27)
    for expert in (0, 7, 119)
    for proj in ("gate_proj", "up_proj", "down_proj")
]

#: As in published checkpoints and recipes of GPTQModel and llm-compressor.
IN_USE = [
    r".*mlp\.gate$",
    r".*experts.*",
    r".*layers\.1\.mlp\.experts.*",
    r".*\.mlp\.experts\.\d+\.(gate|up)_proj$",
    r".*layers\.(0|1|2)\..*",
    r"model\.layers\.(?:[0-9]|1[0-9])\.mlp\.experts\.\d+\..*",
    r".*language_model.*layers.*mlp.*experts.*down_proj",
    r"^model\.layers\.\d+\.mlp\.experts\.[0-9]+\.up_proj$",
    r".*down_proj|.*up_proj",
    r"(?!.*layers\.1\.).*experts",
    r"(?:.*mlp.*down.*)",
    r".*\.[a-z]+_proj",
    r"model.layers.[02].*",
    r"(?i).*EXPERTS.*UP.*",
    r"layers.*",
]


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_answer_as_re_match(pattern: str) -> None:
    compiled = compile_pattern(pattern, "config.json")
    expected = [name for name in NAMES if re.match(pattern, name)]
    assert [name for name in NAMES if compiled.match(name)] == expected


def test_random_patterns_answer_as_re_match() -> None:
    rng = random.Random(5)
    pieces = ["a", "b", ".", r"\.", "[ab]", "[^a]", ".*", ".+", ".*?", "b*", "a+", "(a|b)", "(ab)"]
    pieces += ["$", r"\d", "^", "a{2}", "c?"]
    differing = matched = changed = 0
    for _ in range(4000):
        pattern = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
        try:
            plain = re.compile(pattern)
        except re.error:
            continue
        rewritten = _without_retries(pattern)
        changed += rewritten != pattern
        safer = re.compile(rewritten)
        for _ in range(12):
            text = "".join(rng.choices("aabbc.1", k=rng.randint(0, 9)))
            found = bool(plain.match(text))
            matched += found
            differing += found != bool(safer.match(text))
    assert differing == 0
    assert matched > 5000  # of about 48000
    assert changed > 1000


@pytest.mark.parametrize(
    "pattern",
    [
        ".*.*.*.*.*.*.*.*.*X",
        ".*o.*e.*.*.*.*.*.*.*X",
        ".*.+.*.+.*X",
        ".*[a-z.].*[a-z.].*[a-z.].*[a-z.].*[a-z.].*[a-z.].*X",
        "(.*)(.*)(.*)(.*)(.*)(.*)X",
        r"\w*.*[a-z]*.*\S*.*[^X]*X",
        "(a+)+x",
        "(.{1,30}){1,30}X",
        "(m|mo|o|d|[a-z.])*X",
        "(?:m|mo|o|d|[a-z._0-9]){60}X",
        "((m|o|mo|d|e|l)x?)*X",
        "[a-z.]?" * 40 + "X",
        "(.?)*X",
        r"(\w?){50}X",
    ],
)
def test_hostile_patterns_are_refused_or_quick(pattern: str) -> None:
    names = [*NAMES, "model.layers." + "ab.cd_" * 12 + "proj"]
    start = time.perf_counter()
    said = ""
    try:
        compiled = compile_pattern(pattern, "config.json: ignore")
    except ConfigError as exc:
        said = str(exc)
    if said:
        assert said.startswith("config.json: ignore: pattern")
        assert "\n" not in said
    else:
        assert not any(compiled.match(name) for name in names)
    assert time.perf_counter() - start < 3
