"""The report: what it says, that nothing in it can run or load, and that a browser shows it."""

import base64
import hashlib
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autosel.cli.commands.explain import margin_text
from autosel.core import Candidate, Device, Rejected
from autosel.decide_words import UNSETTLED
from autosel.errors import AutoselError
from autosel.plots.speedup import speedup_data
from autosel.report_data import report_data
from autosel.report_page import inline_svg, page, write_report
from autosel.report_verdict import verdict
from autosel.store import Sweep
from autosel.sweep_words import sweep_commands
from tests.made_evidence import GPU, PROBLEM, decided, evidence, row

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'&{{7*7}}</style>"


def measured(label="qwen3-30b-a3b", device=GPU, evil=""):
    rows, decisions = [], []
    for count, low, high in ((1, 1, 4), (16, 5, 32), (64, 33, None)):
        fast = row("wna16_tiled", count, 50.0 + count, device=device, weight_bytes=1000)
        slow = row("humming", count, 80.0 + count, device=device, weight_bytes=1000)
        gone = row("triton", count, 0, status="crashed", reason=evil or "signal 11", device=device)
        rejected = (
            Rejected(slow.candidate, "ok", "slower by 45 %", "exact", 80.0 + count),
            Rejected(gone.candidate, "crashed", f"took its process down: {gone.reason}"),
        )
        rows += [fast, slow, gone]
        decisions.append(
            decided(fast, low, high, runner_up=slow.candidate, rejected=rejected, tie=count == 1)
        )
    return evidence(rows, decisions, label=label, device=device, target="qwen3-30b-a3b")


def test_commands_name_the_way_of_timing_and_only_a_database_as_one():
    hot = replace(measured(), timing=(("cache", "hot"),))
    assert verdict(hot, 16, "results.db").check == (
        "autosel explain qwen3-30b-a3b --tokens 16 --cache hot --db results.db",
        "autosel sweep qwen3-30b-a3b --tokens 16 --cache hot --db fresh.db",
    )
    pack = replace(measured(), from_database=False)
    assert verdict(pack, 16, "pack.json").check[0] == "autosel explain qwen3-30b-a3b --tokens 16"
    both = [hot, replace(hot, target="", label="mine")]
    told = report_data(both, title="t", made="m", place="r.db")
    assert told.commands == (
        "autosel sweep qwen3-30b-a3b --tokens 1,16,64 --cache hot --db fresh.db",
        "autosel sweep CHECKPOINT --tokens 1,16,64 --cache hot --db fresh.db  # mine",
        "autosel diff r.db fresh.db",
    )


def test_every_sweep_that_left_something_has_its_command():
    """The newest alone would make a part of what the report shows."""
    settings = (
        {"token_counts": [1, 4], "backends": [], "trials": 32},
        {"token_counts": [2], "backends": ["emulation"], "trials": 1},
        {"token_counts": [1, 4], "backends": [], "trials": 32},
    )
    sweeps = tuple(Sweep(n, GPU, "", s, None, "", None) for n, s in enumerate(settings))
    assert sweep_commands(replace(measured(), sweeps=sweeps)) == [
        "autosel sweep qwen3-30b-a3b --tokens 2 --backends emulation --trials 1",
        "autosel sweep qwen3-30b-a3b --tokens 1,4",
    ]


def test_the_summary_says_what_to_use_why_and_how_to_check_it():
    told = verdict(measured(), 16, "results.db")
    assert told.use == "Use wna16_tiled at 16 tokens: 66.0 us a call."
    assert told.why[0] == (
        "The next best, humming, takes 25.0 % longer (95 % interval 20.0 to 30.0 %)."
    )
    assert told.why[1].startswith(
        "vLLM's fixed order of backends takes humming, which takes 45.5 %"
    )
    assert told.check == (
        "autosel explain qwen3-30b-a3b --tokens 16 --db results.db",
        "autosel sweep qwen3-30b-a3b --tokens 16 --db fresh.db",
    )
    assert any("autosel's own kernel" in words for words in told.why)
    assert told.settled
    assert "Test GPU" in told.device
    assert told.device.startswith("int4 group 128 symmetric, bfloat16 activations; measured on ")


def test_one_rival_is_told_once():
    """Where the next best is what vLLM takes, one number says both."""
    one = measured()
    found = speedup_data([one]).set_index("num_tokens").loc[16, "speedup"] - 1
    decisions = tuple(
        replace(d, margin=found, margin_interval=(found - 0.01, found + 0.01))
        for d in one.decisions
    )
    told = verdict(replace(one, decisions=decisions), 16)
    assert told.why[0].startswith("The next best, humming, takes 45.5 % longer")
    assert told.why[1] == "humming is also what vLLM's fixed order of backends takes."


def test_an_engines_backend_is_nobodys_own():
    rows = [row("humming", 16, 10.0), row("emulation", 16, 20.0)]
    told = verdict(evidence(rows, [decided(rows[0], 16, 16, runner_up=rows[1].candidate)]), 16)
    assert not any("own kernel" in words for words in told.why)


def test_the_command_that_measured_is_told_with_its_options():
    swept = "autosel sweep qwen3-30b-a3b --trials 4 --backends humming,marlin"
    data = report_data([replace(measured(), swept=swept)], title="t", made="m")
    assert data.commands[0] == f"{swept} --db fresh.db"


def test_other_token_counts_are_told_by_runs_and_large_margins_as_times():
    buckets = [(1, 1), (2, 5), (6, 11), (12, 22), (23, None)]
    winners = ("humming", "humming", "marlin", "wna16_tiled", "humming")
    rows, decisions = [], []
    for (low, high), name in zip(buckets, winners, strict=True):
        rows.append(row(name, low, 10.0))
        rival = Candidate("emulation")
        made = decided(rows[-1], low, high, runner_up=rival)
        decisions.append(replace(made, margin=1.52, margin_interval=(1.417, 1.621)))
    told = verdict(evidence(rows, decisions), 12)
    assert told.why[0] == (
        "The next best, emulation, takes 2.52 times as long (95 % interval 2.42 to 2.62)."
    )
    assert told.why[-1] == "At other token counts: humming at 1-5, 23+; marlin at 6-11 tokens."


def test_many_layers_have_a_list_of_links():
    many = [measured(f"layer {n}") for n in range(6)]
    seen = Loads()
    seen.feed(page(many, title="t"))
    assert {f"#layer-{n}" for n in range(1, 7)} <= set(seen.addresses)
    assert {f"layer-{n}" for n in range(1, 7)} <= set(seen.ids)


def test_a_tie_and_a_missing_answer_are_said():
    told = verdict(measured(), 1)
    assert not told.settled
    assert "Not settled" in told.why[0]
    assert verdict(evidence([]), 16).use == "Nothing was measured that answers for 16 tokens."
    bad = evidence([row("a", 16, 0, status="wrong")])
    assert verdict(bad, 16).use == "Nothing may be used at 16 tokens."


def test_a_noisy_slow_rival_is_named_beside_the_next_best():
    fast, slow, noisy = row("a", 16, 50.0), row("b", 16, 60.0), row("torch_int4", 16, 5000.0)
    rejected = (
        Rejected(slow.candidate, "ok", "slower by 20 %", "exact", 60.0),
        Rejected(noisy.candidate, "ok", f"{UNSETTLED} 10500 %", "exact", 5000.0),
    )
    made = decided(fast, 1, None, tie=True, runner_up=slow.candidate, rejected=rejected)
    told = verdict(evidence([fast, slow, noisy], [made]), 16)
    assert told.why[0] == (
        "The next best, b, takes 25.0 % longer (95 % interval 20.0 to 30.0 %). "
        "Not settled (1 too noisy): torch_int4; more samples may tell."
    )
    assert margin_text(made) == "25.0 % (95 % interval 20.0 to 30.0 %); 1 too noisy"


def test_the_tables_have_every_row():
    data = report_data([measured()], title="t", made="m")
    tables = {table.id: table for table in data.tables}
    assert set(tables) == {"decisions", "candidates", "rejected"}
    assert len(tables["decisions"].rows) == 3
    assert len(tables["candidates"].rows) == 6
    (crash,) = tables["rejected"].rows  # three token counts with one reason
    assert [cell.text for cell in crash][1:4] == ["triton", "crashed", "all"]
    assert any(cell.text == "Test GPU" for r in data.environment[0].rows for cell in r)
    assert data.commands == ("autosel sweep qwen3-30b-a3b --tokens 1,16,64 --db fresh.db",)


def test_certificates_are_shown_where_they_are_kept():
    from autosel.core.certificate import PROPERTIES, Certificate, CertifiedCase, Limits

    item = Certificate(
        PROBLEM, Candidate("wna16_tiled"), GPU, "ok", "full", Limits(1, 2, 3, 4),
        "2026-01-31T12:00:00Z", "0.1.0", "0" * 20,
        cases=(CertifiedCase("one hot", 16, "one_hot", 0.5, True),), score=0.5,
        properties=tuple((name, name == "deterministic") for name in PROPERTIES),
    )  # fmt: skip
    found = replace(measured(), certificates=(item,))
    (table,) = [t for t in report_data([found], title="", made="").tables
                if t.id == "certificates"]  # fmt: skip
    assert [cell.text for cell in table.rows[0]][1:6] == ["wna16_tiled", "ok", "full", "1", "0.50"]
    assert table.rows[0][6].text == "deterministic"


class Loads(HTMLParser):
    """Collects what could run or load: scripts, handlers, addresses."""

    def __init__(self):
        super().__init__()
        self.scripts, self.handlers, self.addresses, self.tags = 0, [], [], set()
        self.ids = []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.scripts += tag == "script"
        for name, value in attributes:
            if name.startswith("on"):
                self.handlers.append((tag, name))
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)


def test_everything_from_outside_stays_text():
    device = Device("cuda", EVIL, capability=(9, 0), versions=(("torch", EVIL),))
    text = page([measured(EVIL, device, EVIL)], title=EVIL, place=EVIL)
    loads = Loads()
    loads.feed(text)
    assert loads.scripts == 1
    assert loads.handlers == []
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & loads.tags
    assert all(address.startswith("#") for address in loads.addresses), loads.addresses
    assert len(set(loads.ids)) == len(loads.ids)
    assert "window.hacked=1</script>" not in text.replace("&lt;", "<x")
    assert "{{7*7}}" in text  # data is no template
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    # Planted: the same text outside the escaping would be seen.
    loads = Loads()
    loads.feed(text.replace("<main", EVIL + "<main"))
    assert (loads.scripts, len(loads.handlers)) == (2, 1)


def test_the_policy_allows_the_one_script_and_nothing_else():
    text = page([measured()], title="t", figures=False)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    policy = policy.replace("&#39;", "'")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert re.search(r"script-src [^;]*unsafe", policy) is None


def test_figures_that_could_load_or_run_are_refused():
    shell = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">%s</svg>'
    for inside in ("<script>1</script>", "<image/>", "<foreignObject/>",
                   '<use xlink:href="http://x/y"/>'):  # fmt: skip
        with pytest.raises(AutoselError):
            inline_svg(shell % inside, "f", "words")
    kept = inline_svg(shell % '<g id="a"/><use xlink:href="#a"/>', "f7", "<&>")
    assert 'id="f7-a"' in kept
    assert '"#f7-a"' in kept
    assert "&lt;&amp;&gt;" in kept


def test_nothing_to_report_and_bad_places_are_one_line(tmp_path):
    with pytest.raises(AutoselError, match="layers measured: found none"):
        write_report([evidence([])], tmp_path / "a.html")
    with pytest.raises(AutoselError, match=r"suffix: found '\.pdf'"):
        write_report([measured()], tmp_path / "a.pdf")
    with pytest.raises(AutoselError, match="folder"):
        write_report([measured()], tmp_path / "no" / "a.html")
    assert list(tmp_path.iterdir()) == []


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    """Contrast ratio of the Web Content Accessibility Guidelines 2.2."""
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_dark_and_print():
    from autosel import report_page

    css = Path(report_page.__file__).parent.joinpath("templates", "report.css").read_text()
    themes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(themes) == 3
    for theme in themes:
        colour = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        for text in ("text", "soft", "link", "good", "open"):
            for ground in ("page", "band"):
                assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    assert contrast("#777777", "#888888") < 4.5


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium", reason="selenium is not installed")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium and its driver are not installed (Debian: chromium, chromium-driver)")
    assert selenium
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--window-size=1200,900",
                 f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


@pytest.mark.integration
def test_a_browser_reads_sorts_and_filters_the_table(browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    device = Device("cuda", EVIL, capability=(9, 0))
    path = write_report([measured(), measured(EVIL, device, EVIL)], tmp_path / "r.html", title=EVIL)
    browser.get(path.as_uri())
    assert browser.execute_script("return window.hacked === undefined")
    table = browser.find_element(By.ID, "decisions")

    def column(number):
        cells = table.find_elements(By.CSS_SELECTOR, f"tbody tr td:nth-child({number})")
        return [cell.text for cell in cells if cell.is_displayed()]

    assert column(2) == ["1-4", "5-32", "33+"] * 2
    assert set(column(3)) == {"wna16_tiled"}
    head = table.find_element(By.CSS_SELECTOR, "thead th:nth-child(4)")
    button = head.find_element(By.TAG_NAME, "button")
    assert head.get_attribute("aria-sort") == "none"
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    times = [float(text.removesuffix(" us")) for text in column(4)]
    assert times == sorted(times)
    button.send_keys(Keys.ENTER)  # the keyboard alone
    assert head.get_attribute("aria-sort") == "descending"
    assert [float(text.removesuffix(" us")) for text in column(4)] == sorted(times, reverse=True)
    box = browser.find_element(By.ID, "decisions-filter")
    box.send_keys("33+ qwen3")
    assert column(2) == ["33+"]
    assert browser.find_element(By.ID, "decisions-count").text == "1 of 6 rows"
    for figure in browser.find_elements(By.CSS_SELECTOR, "figure svg"):
        words = browser.find_element(By.ID, figure.get_attribute("aria-labelledby"))
        assert figure.get_attribute("role") == "img"
        assert len(words.get_attribute("textContent")) > 20
    assert browser.execute_script("return document.documentElement.lang") == "en"
    assert len(browser.find_elements(By.CSS_SELECTOR, "main, nav, header, footer")) == 4
    requests = browser.execute_script("return performance.getEntriesByType('resource').length")
    assert requests == 0
    # The policy stops what the page does not bring, and the browser says so.
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 3';"
        "document.body.append(s)"
    )
    assert browser.execute_script("return window.hacked === undefined")
    assert any(
        "Content Security Policy" in entry["message"] for entry in browser.get_log("browser")
    )


@pytest.mark.integration
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(browser, tmp_path, width):
    path = write_report([measured("m" * 300)], tmp_path / "r.html")
    browser.set_window_size(width, 900)
    browser.get(path.as_uri())
    wide, window = browser.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert wide <= window
