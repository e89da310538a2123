"""Histograms of tokens a call: what Prometheus, CSV and JSON files say, and hostile ones."""

from __future__ import annotations

import json
import random

import pytest

from autosel.core import TokenBin, TokenBucket, Workload
from autosel.errors import AutoselError
from autosel.workload import DEFAULT, PRESETS, load, mean_tokens, shares

#: The edges that vLLM uses, and the form of its metrics page.
EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NAME = "vllm:iteration_tokens_total"


def page(steps: list[int], **labels: str) -> str:
    """The metrics page of a server that made these steps, as its client library counts them."""
    text = "".join(f',{name}="{value}"' for name, value in labels.items())
    lines = [
        f"# HELP {NAME} Histogram of number of tokens per engine_step.",
        f"# TYPE {NAME} histogram",
        f'{NAME}_sum{{model_name="m"{text}}} {float(sum(steps))}',
    ]
    for edge in EDGES:
        count = float(sum(step <= edge for step in steps))
        lines.append(f'{NAME}_bucket{{le="{float(edge)}",model_name="m"{text}}} {count}')
    lines.append(f'{NAME}_bucket{{le="+Inf",model_name="m"{text}}} {float(len(steps))}')
    lines.append(f'{NAME}_count{{model_name="m"{text}}} {float(len(steps))}')
    lines.append(f'{NAME}_created{{model_name="m"{text}}} 1.7e+09')
    lines.append('vllm:num_requests_running{model_name="m"} 3.0')
    return "\n".join(lines) + "\n"


def bins(workload: Workload) -> list[tuple[int, int | None, float]]:
    return [(item.low, item.high, item.calls) for item in workload.bins]


@pytest.fixture
def read(tmp_path):
    def reading(text: str | bytes, name: str = "calls.txt") -> Workload:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path)

    return reading


def test_cumulative_buckets_are_differenced(read) -> None:
    steps = [1, 1, 5, 8, 9, 300, 512, 20000]
    found = read(page(steps))
    assert bins(found) == [
        (1, 1, 2.0),
        (2, 8, 2.0),
        (9, 16, 1.0),
        (257, 512, 2.0),
        (16385, None, 1.0),
    ]
    assert found.weighted_by == "calls"


def test_random_steps_come_back_as_they_were_counted(read) -> None:
    rng = random.Random(1)
    for _ in range(50):
        steps = [int(10 ** rng.uniform(0, 4.5)) for _ in range(rng.randint(1, 200))]
        found = read(page(steps))
        for low, high, calls in bins(found):
            assert calls == sum(low <= s and (high is None or s <= high) for s in steps)
        assert sum(item.calls for item in found.bins) == len(steps)


def test_engines_are_added_up(read) -> None:
    one, two = [1, 4, 4], [4, 600]
    both = read(page(one, engine="0") + page(two, engine="1"))
    assert bins(both) == bins(read(page(one + two)))


def test_steps_without_tokens_are_no_calls(read) -> None:
    """An idle engine counts steps of 0 tokens in its lowest bucket; the sum gives them away."""
    found = read(page([0, 0, 0, 4, 4]))
    # The sum is 8, which three steps of 1 and two of 2 to 8 tokens can make as well.
    assert bins(found) == [(1, 1, 3.0), (2, 8, 2.0)]
    clear = read(page([0, 0, 0, 1, 9]))
    assert bins(clear) == [(1, 1, 1.0), (9, 16, 1.0)]


def test_only_idle_steps_are_no_traffic(read) -> None:
    with pytest.raises(AutoselError, match="calls in all"):
        read(page([0, 0, 0]))


def test_relabelled_names_timestamps_and_exemplars(read) -> None:
    text = page([3, 700]).replace("vllm:", "vllm_")
    lines = [line + " 1712345678000" if "_bucket" in line else line for line in text.splitlines()]
    lines = [f'{line} # {{trace_id="x"}} 3 1.0' if 'le="8.0"' in line else line for line in lines]
    assert bins(read("\n".join(lines))) == [(2, 8, 1.0), (513, 1024, 1.0)]


def test_answer_of_a_prometheus_query(read) -> None:
    result = [
        {"metric": {"__name__": f"{NAME}_bucket", "le": le, "engine": "0"}, "value": [0, count]}
        for le, count in (("1.0", "2"), ("8.0", "5"), ("+Inf", "6"))
    ]
    answer = {"status": "success", "data": {"resultType": "vector", "result": result}}
    assert bins(read(json.dumps(answer))) == [(1, 1, 2.0), (2, 8, 3.0), (9, None, 1.0)]
    ranged = [
        {"metric": {"le": le}, "values": [[0, "0"], [60, count]]}
        for le, count in (("8.0", "5"), ("+Inf", "6"))
    ]
    answer["data"] = {"resultType": "matrix", "result": ranged}
    assert bins(read(json.dumps(answer))) == [(1, 8, 5.0), (9, None, 1.0)]


def test_csv_of_calls_and_of_tokens(read) -> None:
    calls = read("tokens,calls\n1,90\n9-16,5\n1025+,5\n0,77\n")
    assert bins(calls) == [(1, 1, 90.0), (9, 16, 5.0), (1025, None, 5.0)]
    tokens = read("tokens, total_tokens\n1,90\n1024,10240\n")
    assert bins(tokens) == [(1, 1, 90.0), (1024, 1024, 10.0)]
    assert tokens.weighted_by == "tokens"
    # As a spreadsheet writes it, with a byte-order mark and another order of columns.
    assert bins(read("\ufeffcount,num_tokens\r\n2,16.0\r\n3,16\r\n")) == [(16, 16, 5.0)]


def test_calls_and_tokens_are_told_apart_by_the_mean(read) -> None:
    """As many tokens in calls of 1 as in calls of 1000: 1000 times as many calls."""
    found = read("tokens,total_tokens\n1,5000\n1000,5000\n")
    parts = shares(found, [TokenBucket(1, 31, 1), TokenBucket(32, None, 1000)])
    assert parts.calls == pytest.approx((1000 / 1001, 1 / 1001))
    assert parts.tokens == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    "data",
    [
        {"1": 3, "9-16": 2},
        {"histogram": {"1": 3, "9-16": 2}, "weighted_by": "calls"},
        [[1, 3], ["9-16", 2]],
        [{"tokens": 1, "calls": 3}, {"tokens": "9-16", "calls": 2}],
        Workload("own", (TokenBin(1, 1, 3.0), TokenBin(9, 16, 2.0))).to_dict(),
    ],
)
def test_json_forms(read, data) -> None:
    assert bins(read(json.dumps(data))) == [(1, 1, 3.0), (9, 16, 2.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "content: found nothing"),
        ("   \n", "content: found nothing"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        ("tokens,calls\n", "calls in all"),
        ("tokens,calls\n1,0\n", "calls in all"),
        ("1,2\n3,4\n", "names: found 1, 2"),
        ("tokens,latency\n1,2\n", "names: found tokens, latency"),
        ("tokens,calls,count\n1,2,3\n", "names"),
        ("tokens,calls\n1,-2\n", ":2: calls: found '-2'"),
        ("tokens,calls\n1,nan\n", ":2: calls: found 'nan'"),
        ("tokens,calls\n1,1e999\n", ":2: calls"),
        ("tokens,calls\n1.5,2\n", ":2: tokens: found '1.5'"),
        ("tokens,calls\n-1,2\n", ":2: tokens"),
        ("tokens,calls\n9-3,2\n", ":2: tokens"),
        ("tokens,calls\n99999999999,2\n", ":2: tokens"),
        ("tokens,calls\n١,2\n", ":2: tokens"),
        ("tokens,calls\n1,2,3\n", ":2: fields"),
        ("tokens,calls\n1\n", ":2: fields"),
        ("tokens,calls\n1-8,2\n5,1\n", "apart from 1-8"),
        ("tokens,calls\n8+,2\n50,1\n", "apart from 8+"),
        ('tokens,calls\n"1,2\n', "not valid CSV"),
        ("tokens,calls\n\x001,2\n", ":2: tokens"),
        ("tokens,calls\n1,1e308\n2,1e308\n", "calls in all"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"1": 2, "1": 3}', "'1' twice"),
        ('{"1": NaN}', "calls"),
        ('{"1": true}', "calls"),
        ('{"1": "3"}', "calls"),
        ('{"1": [3]}', "calls"),
        ("[1, 2]", "content"),
        ("[]", "calls in all"),
        ("{}", "calls in all"),
        ('{"histogram": {"1": 1}, "weighted_by": "luck"}', "weighted_by"),
        ('{"histogram": 7}', "content"),
        ('{"bins": 7}', "workload"),
        ('{"bins": [], "name": "x", "weighted_by": "calls"}', "calls in all"),
        ('{"status": "success", "data": {"result": [{"metric": {}}]}}', "query result"),
        ('{"status": "success", "data": {"result": []}}', "metrics: found none"),
        ('{"status": "success", "data": null}', "query result"),
        ("# TYPE x counter\nx_total 1\n", "metrics: found none"),
        (f'{NAME}_bucket{{le="1.0"}} 3\n', "buckets: found none with le=+Inf"),
        (f"# TYPE x histogram\n{NAME}_bucket 3\n", "label le"),
        (f'{NAME}_bucket{{le="8"}} 5\n{NAME}_bucket{{le="+Inf"}} 3\n', "at least 5"),
        (f'{NAME}_bucket{{le="8"}} x\n', f":1: {NAME}_bucket: found 'x'"),
        (f'{NAME}_bucket{{le="-8"}} 1\n{NAME}_bucket{{le="+Inf"}} 3\n', "le: found '-8'"),
        (f'{NAME}_bucket{{le="8"}} 1\n{NAME}_bucket{{le="8"}} 1\n', "a second one"),
        (f'{NAME}_bucket{{le="1"}} 1\n{NAME}_bucket{{le="1.5"}} 2\n{NAME}_bucket{{le="+Inf"}} 3\n',
         "an edge inside another"),
        (f'{NAME}_bucket{{le="8" 1\n# TYPE x histogram\n', ":1: line"),
    ],
)  # fmt: skip
def test_hostile_files_get_one_line(read, text, words) -> None:
    with pytest.raises(AutoselError) as caught:
        read(text)
    assert words in str(caught.value)
    assert "calls.txt" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_damaged_pages_never_end_in_a_traceback(read) -> None:
    """Bytes changed, cut and doubled at random: a workload or one line."""
    rng = random.Random(7)
    originals = [
        page([1, 5, 9, 300], engine="0").encode(),
        b"tokens,calls\n1,5\n9-16,3\n1025+,1\n",
        json.dumps({"histogram": {"1": 5, "9-16": 3}, "weighted_by": "tokens"}).encode(),
    ]
    refused = 0
    for _ in range(600):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 20)]
            else:
                data[at:at] = data[at : at + rng.randint(1, 20)]
        message = ""
        try:
            found = read(bytes(data))
        except AutoselError as error:
            refused += 1
            message = str(error)
        else:
            assert sum(item.calls for item in found.bins) > 0
        assert "\n" not in message
    assert refused > 100


def test_a_file_that_is_too_large_is_refused(read, monkeypatch) -> None:
    monkeypatch.setattr("autosel.workload_file.MAX_BYTES", 100)
    with pytest.raises(AutoselError, match="more than 100"):
        read("tokens,calls\n" + "1,1\n" * 100)


def test_presets_by_name_and_what_is_neither() -> None:
    assert load(DEFAULT) is PRESETS[DEFAULT]
    with pytest.raises(AutoselError, match="expected a file, or one of decode-heavy, mixed"):
        load("decode")
    with pytest.raises(AutoselError, match="expected a file"):
        load("/")


def test_presets_are_ordered_as_their_names_say() -> None:
    order = ["decode-only", "decode-heavy", "mixed", "prefill-heavy", "prefill-only"]
    means = [mean_tokens(PRESETS[name]) for name in order]
    assert means == sorted(means)
    for preset in PRESETS.values():
        assert sum(item.calls for item in preset.bins) == pytest.approx(1)


def test_calls_outside_every_bucket_are_told() -> None:
    workload = Workload("w", (TokenBin(1, 1, 3.0), TokenBin(100, None, 1.0)))
    parts = shares(workload, [TokenBucket(1, 16, 4)])
    assert parts.calls == (1.0,)
    assert parts.uncovered == 0.25
    with pytest.raises(AutoselError, match="token counts: found none, expected some in 17-32"):
        shares(Workload("w", (TokenBin(1, 1, 3.0),)), [TokenBucket(17, 32, 20)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenBin(0, 1, 1.0),
        lambda: TokenBin(2, 1, 1.0),
        lambda: TokenBin(1, True, 1.0),
        lambda: TokenBin(1, 1, -1.0),
        lambda: TokenBin(1, 1, float("inf")),
        lambda: Workload("w", ()),
        lambda: Workload("w", (TokenBin(5, 9, 1.0), TokenBin(9, 9, 1.0))),
        lambda: Workload("w", (TokenBin(5, None, 1.0), TokenBin(9, 9, 1.0))),
        lambda: Workload("w", (TokenBin(5, 9, 0.0),)),
        lambda: Workload("w", (TokenBin(5, 9, 1.0),), "luck"),
    ],
)
def test_the_types_check_themselves(make) -> None:
    with pytest.raises(AutoselError):
        make()
