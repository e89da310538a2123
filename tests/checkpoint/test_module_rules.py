"""Patterns of a config: the same answer as ``re.match``, in bounded time."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from autosel import module_rules
from autosel.checkpoint import Checkpoint
from autosel.errors import ConfigError
from autosel.module_rules import NameList, Pattern
from tests.checkpoint_builder import Made

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
    r".*self_attn.*",
    r".*lm_head.*",
    r".*layers\.[0-9]+\.mlp\.experts\.[0-9]+\.(gate|gate_up|up|down)_proj",
    r".*layers\.[0-9]{1,2}\.mlp\.experts\.[0-9]{1,3}\.(?:gate|gate_up|up|down)_proj",
    r".*layers.\d+.mlp.experts.\d+.(gate|up|gate_up|down)_proj.*",
    r".*layers\.[0-9]+\.mlp\.experts\..*(w[1-3]|gate_proj|up_proj|down_proj)$",
    r".*layers\.(0|1|10|11)\.mlp\.experts\.[0-9]+\.(gate|gate_up|up|down)_proj$",
    r".*layers\.(?:[0-9]|[12][0-9])\.mlp\.experts\.(?:[0-9]|[1-9][0-9])\.(?:gate|gate_up|up)_proj",
    r".*\.(.*norm|.*gate|lm_head)$",
    r".*attn.*|.*gate.*|.*norm.*",
    r".*\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\.[a-z]+_proj",
    r".*experts\.[0-9]+\.(gate|up)_proj",
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.down_proj",
    r"^((?!mlp\.experts\.7).)*$",
    r".*(?<=experts\.)(?:0|7)\b.*(?#both)(?:down_){1}proj\Z",
    ".*(" + "|".join(rf"layers\.{layer}\." for layer in range(94)) + ").*down",
    "|".join(name.replace(".", r"\.") for name in NAMES[::2]),
]


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_answer_as_re_match(pattern: str) -> None:
    compiled = Pattern(pattern, "config.json")
    expected = [name for name in NAMES if re.match(pattern, name)]
    assert [name for name in NAMES if compiled.match(name)] == expected


def test_random_patterns_answer_as_re_match() -> None:
    rng = random.Random(5)
    pieces = ["a", "b", ".", r"\.", "[ab]", "[^a]", ".*", ".+", ".*?", "b*", "a+", "(a|b)", "(ab)"]
    pieces += [
        "$",
        r"\d",
        "^",
        "a{2}",
        "c?",
        "(",
        "(",
        ")",
        ")",
        "|",
        "*",
        "?",
        "{1,2}",
        "{,2}",
        "{",
    ]
    pieces += [r"\b", r"\B", "(?!", "(?=", "(?<=", "(?<!", "(?:", "(?i:", "(?P<n>", "]", "[]a]"]
    pieces += [r"[\]a-]", r"\x61", "(?#c)", "B", "{2,}"]
    matched = tried = 0
    differing = []
    for _ in range(20_000):
        pattern = "".join(rng.choices(pieces, k=rng.randint(1, 9)))
        try:
            plain = re.compile(pattern)
            compiled = Pattern(pattern, "config.json")
        except (re.error, ConfigError):
            continue
        tried += 1
        for _ in range(8):
            text = "".join(rng.choices("aabbBc.1", k=rng.randint(0, 9)))
            found = bool(plain.match(text))
            matched += found
            if found != bool(compiled.match(text)):
                differing.append((pattern, text))
    assert differing == []
    assert tried > 3000
    assert matched > 4000


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
        "a*" * 10 + "ZZ",
        "a?" * 10 + "a*a*a*a*ZZ",
        "(?i).*a.*a.*a.*ZZ",
        "(a|b)*a(a|b){60}X",
        "a*aa*aa*aa*aZ",
        "(a*)(a*)(a*)(a*)(a*)Z",
        "(?:(?:a*)(?:a*))(?:(?:a*)(?:a*))(?:(?:a*)(?:a*))Z",
        "(a*|b)(a*|b)(a*|b)(a*|b)(a*|b)Z",
        "(a*)?(a*)?(a*)?(a*)?(a*)?Z",
        "a{1,50}" * 5 + "Z",
        "(?=a*a*a*a*a*Z)a",
        "(aa|a)" * 40 + "Z",
        "(a|aa|aaa|aaaa|aaaaa)" * 12 + "Z",
        "((((a{27}){27}){27}){27}){27}X",
        "(((){1000}){1000}){1000}X",
        "((?=.*Z)|a)*Z",
        "(.|" + "(?=a)" * 300 + ")*Z",
        "x" * 30_000,
        ".*(" + "|".join(["a" * 40 + "Z"] * 400) + ")",
    ],
)
def test_hostile_patterns_are_refused_or_quick(pattern: str) -> None:
    names = [*NAMES, "model.layers." + "ab.cd_" * 12 + "proj", "a" * 60 + ".proj", "a" * 190]
    start = time.perf_counter()
    said = ""
    try:
        compiled = Pattern(pattern, "config.json: ignore")
        assert not any(compiled.match(name) for name in names)
    except ConfigError as exc:
        said = str(exc)
    if said:
        assert said.startswith("config.json: ignore: pattern")
        assert "\n" not in said
        assert len(said) < 500
    assert time.perf_counter() - start < 15  # one may use up the time a pattern has


def test_names_too_long_to_match_are_said() -> None:
    rules = NameList(["re:.*attn"], "config.json: ignore")
    assert rules.match("a" * 190 + ".attn") == "re:.*attn"
    with pytest.raises(ConfigError, match="found a module name of 25005 letters"):
        rules.match("a" * 25_000 + ".attn")
    assert rules.match("a" * 5000 + ".attn") == "re:.*attn"
    slow = Pattern("(?i).*a.*b.*c", "config.json: ignore")
    with pytest.raises(ConfigError, match=r"letters .* expected at most 200"):
        slow.match("a" * 205)


def test_the_time_is_that_of_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_rules, "MAX_SECONDS", 0.2)
    slow = Pattern("(?i).*a.*a.*aZ", "config.json: ignore")
    start = time.perf_counter()

    def match_all() -> None:
        for letters in range(10_000):
            slow.match("a" * (150 + letters % 50))

    with pytest.raises(ConfigError, match="takes too long on these names"):
        match_all()
    assert time.perf_counter() - start < 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fmt", ["gptq", "compressed-tensors"])
def test_a_hostile_config_is_read_at_once(tmp_path: Path, fmt: str) -> None:
    pattern = "a*" * 10 + "ZZ"
    quant = {"dynamic": {pattern: {"bits": 8}}} if fmt == "gptq" else {"ignore": [f"re:{pattern}"]}
    folder = Made(fmt=fmt, experts=2, prefix="a" * 60 + ".", quant=quant).write(tmp_path)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"config\.json:\d+: .*repeats and alternatives"):
        Checkpoint.open(folder)
    assert time.perf_counter() - start < 10
