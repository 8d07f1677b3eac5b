"""Records, their pages, and whether two runs agree."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from specserve.errors import ConfigurationError
from specserve.tools.bench.agreement import compare_records, read_record
from specserve.tools.bench.axis import Axis
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.conditions import Conditions, DeploymentFacts, ModelFacts, prompt_facts
from specserve.tools.bench.decision import SPECULATIVE, TARGET_ONLY, decide
from specserve.tools.bench.host import ProcessorMeter, describe_hardware, describe_versions
from specserve.tools.bench.level import LevelPlan, run_level
from specserve.tools.bench.plots import WIDTH, Bar, Range, Whisker, bars, ranges, whiskers
from specserve.tools.bench.record import (
    AutoResult,
    MethodResult,
    Record,
    Setting,
    SweepStep,
    require_writable,
)
from specserve.tools.bench.report import text_of, write_html
from specserve.tools.bench.report_plots import level_plots
from specserve.tools.bench.sample import Wave
from specserve.tools.bench.statistics import Interval
from specserve.tools.bench.summary import summarise
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import ScriptedArm, prompt, sample, wave

VOID = {"meta", "line", "rect", "circle"}


class Checker(HTMLParser):
    """Notes what a page refers to and whether its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open = []
        self.references = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(page):
    """Check a page's tags; return what it refers to."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker.references


def conditions(**changes):
    model = ModelFacts("target", "m", "", "abc", 96, "float32", "cpu", 4096, 100, 200, 10, 16)
    facts = DeploymentFacts("specserve", "", '{"num_speculative_tokens": 4}', (), (model,), {})
    made = Conditions(
        hardware=describe_hardware(),
        versions=describe_versions(),
        deployments=(facts,),
        prompts=prompt_facts("shipped", [prompt(0)]),
        sampling=RequestSettings(8, 0.0, True, 0),
        warm_up="once",
    )
    return dataclasses.replace(made, **changes)


async def full_record(on_s=1.0, **changes):
    """Make a record with every kind of section."""
    record = Record("specserve bench <&>")
    section = record.section("serving")
    section.conditions = conditions(**changes)
    section.thresholds = Thresholds(max_others_cpu_share=None)
    on = Wave((sample(0), sample(1, category="code & more")), on_s)
    arms = [ScriptedArm(SPECULATIVE, [on]), ScriptedArm(TARGET_ONLY, [wave(12, 2.0)])]
    plan = LevelPlan(Pacing(concurrency=1), 4, 1, 1.1)
    await run_level(arms, [prompt(0)], plan, section.levels.append, lambda *_: None)
    section.decision = decide(section.levels, section.thresholds, None)
    section.notes.append("a note")
    section.complete = True
    section = record.section("acceptance")
    section.methods = [MethodResult("ngram", "{}", summarise([on]))]
    section = record.section("auto")
    section.auto = [AutoResult("concurrency 1", "always-on", Interval(0.99, 0.97, 1.01, 9))]
    section = record.section("sweep")
    one = Setting(1, 4)
    section.steps = [SweepStep("fixed K", one, 9.5, Interval(1.2, 1.1, 1.3, 4), True, "", one)]
    section.chosen = one
    return record


async def test_a_page_needs_nothing_else_and_is_well_formed(tmp_path):
    """No script, no reference to anywhere, every text escaped, light and dark."""
    record = await full_record()
    write_html(record, tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()

    assert checked(page) == []
    assert "<script" not in page
    assert not re.search(r"url\(|@import|https?://", page)
    assert "specserve bench &lt;&amp;&gt;" in page
    assert "code &amp; more" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "keep target-only" in page or "enable" in page
    assert page.count("<svg") >= 10


async def test_the_terminal_says_what_the_page_says():
    record = await full_record()

    text = text_of(record)

    assert "decision: enable" in text
    assert "speculative / target-only  2.000" in text
    assert "mean acceptance length" in text.lower()
    assert "acceptance: cut short" in text, "a section that was not completed says so"
    assert "note: a note" in text


async def test_the_json_has_a_schema_and_adds_up(tmp_path):
    record = await full_record()
    record.path = tmp_path / "bench.json"
    record.save()

    values = json.loads(record.path.read_text())

    assert (values["schema"], values["schema_version"]) == ("specserve-bench", 1)
    assert values["complete"] is False
    (level,) = values["sections"][0]["levels"]
    for arm in level["arms"]:
        summary = arm["summary"]
        assert sum(summary["tokens_by_origin"].values()) == summary["num_output_tokens"]
    assert values["sections"][0]["decision"]["verdict"] == "enable"
    assert values["sections"][0]["fingerprint"] == record.sections[0].conditions.fingerprint


def test_conditions_that_differ_have_another_fingerprint():
    """Memory in use and addresses are no conditions; all else is."""
    base = conditions()
    same = dataclasses.replace(base.deployments[0], resident_bytes=7, address="1.2.3.4:5")

    assert base.fingerprint == conditions().fingerprint
    assert base.with_deployments([same]).fingerprint == base.fingerprint
    for other in (
        conditions(warm_up="never"),
        conditions(prompts=prompt_facts("shipped", [prompt(1), prompt(0)])),
        conditions(sampling=RequestSettings(9, 0.0, True, 0)),
        base.with_deployments([dataclasses.replace(same, engine_flags=("--dtype=float32",))]),
    ):
        assert other.fingerprint != base.fingerprint


async def test_a_repeat_agrees_or_says_where_it_does_not():
    before = json.loads(json.dumps((await full_record()).values()))

    same = compare_records(before, await full_record(on_s=1.05), 0.1)
    other = compare_records(before, await full_record(on_s=1.5), 0.1)
    elsewhere = compare_records(before, await full_record(warm_up="never"), 0.1)

    assert same.agrees
    assert {each.figure for each in same.agreements} == {
        "serving at 1: speculative / target-only",
        "acceptance: ngram",
    }
    assert not other.agrees
    assert [each.agrees for each in other.agreements] == [False, True]
    assert elsewhere.differing_conditions == ("serving: warm_up",)
    assert not elsewhere.agrees


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a record of `specserve bench` was wanted"),
        ('{"schema": "specserve-bench", "schema_version": 0}', "schema version 0, 1 was wanted"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, text, message):
    path = tmp_path / "old.json"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=message):
        read_record(path)
    with pytest.raises(ConfigurationError, match="--compare: .*none.json"):
        read_record(tmp_path / "none.json")


def test_a_report_that_cannot_be_written_is_told_at_once(tmp_path):
    require_writable(tmp_path / "report.html", "--report")
    require_writable(None, "--report")
    for path in (tmp_path, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(ConfigurationError, match="--report: cannot write"):
            require_writable(path, "--report")


def numbers(svg, attribute):
    return [float(value) for value in re.findall(rf'\b{attribute}="([\d.]+)"', svg)]


def test_bars_are_as_long_as_their_values():
    svg = bars("Tokens/s", [Bar("a", 10, "10"), Bar("b", 5, "5", 1), Bar("none", 0, "0", 2)])

    first, second, third = (width for width in numbers(svg, "width"))
    assert first == pytest.approx(2 * second)
    assert third == 1.0
    assert checked(f"<div>{svg}</div>") == []


def test_whiskers_keep_the_order_of_their_values():
    svg = whiskers(
        "Ratio", [Whisker("a", 1.2, 1.1, 1.3), Whisker("b", 0.9, None, None)], [(1, "x")]
    )

    line, *ends = re.findall(r'class="s0" x1="([\d.]+)" x2="([\d.]+)"', svg)
    low, high = map(float, line)
    assert ends == [(line[0], line[0]), (line[1], line[1])], "a cross line at either end"
    centres = numbers(svg, "cx")
    reference = float(re.findall(r'class="x" x1="([\d.]+)"', svg)[0])
    assert centres[1] < reference < low < centres[0] < high


def test_ranges_mark_every_value():
    svg = ranges("TTFT", [Range("a", (1.0, 2.0, 4.0), "1 / 4")])

    first, second, third = numbers(svg, "cx")
    assert third - second == pytest.approx(2 * (second - first), abs=0.2)


def test_equal_values_are_drawn_too():
    """One value, or none above 0, must not divide by nothing."""
    assert "<svg" in whiskers("Ratio", [Whisker("a", 1.0, None, None)], [])
    assert "<svg" in bars("Tokens/s", [Bar("a", 0.0, "0")])
    assert "<svg" in ranges("TTFT", [Range("a", (0.0, 0.0, 0.0), "0")])


def test_a_process_that_computes_is_seen():
    """Own time counts as own: a busy loop of this process is no other program's."""
    meter = ProcessorMeter()
    total = sum(index * index for index in range(400_000))

    assert total > 0
    assert meter.own_processors() > 0.1
    assert 0.0 <= meter.others_share() <= 1.0


def test_an_interval_past_the_edge_does_not_press_the_others_together():
    """Two pairs give intervals of [0.1, 78]: estimates still lie apart, and the ends are told."""
    svg = whiskers(
        "Ratio", [Whisker("a", 0.9, 0.1, 78.0), Whisker("b", 4.0, 3.0, 5.0)], [(1, "one")]
    )

    wide, narrow = numbers(svg, "cx")
    assert narrow - wide > 80
    assert "0.900 [0.100, 78]" in svg
    assert all(0 <= x <= WIDTH for name in ("x", "x1", "x2") for x in numbers(svg, name))


def test_a_latency_is_drawn_in_the_unit_of_its_title():
    """Ticks count milliseconds, as the numbers beside the marks do."""
    svg = ranges("TTFT, ms", [Range("a", (20.0, 40.0), "20 / 40")])

    ticks = [float(text) for text in re.findall(r'class="tick"[^>]*>([^<]+)<', svg)]
    assert ticks == [0, 10, 20, 30, 40]


async def test_every_plot_of_a_level_shows_milliseconds_as_milliseconds():
    level = (await full_record()).sections[0].levels[0]

    (ttft, _), *_ = level_plots(level)

    found = level.arms[0].summary.ttft_s
    assert f": {1e3 * found.p99:.4g}</title>" in ttft


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 195, [0, 50, 100, 150]),
        (0.444, 1.575, [0.5, 1.0, 1.5]),
        (0.96, 0.99, None),
        (3, 3, None),
    ],
)
def test_ticks_are_round_and_few(low, high, ticks):
    axis = Axis(low, high, 0, 100)

    found = axis.ticks()

    assert 1 <= len(found) <= 5
    assert ticks is None or found == pytest.approx(ticks)
    assert all(0 <= axis(tick) <= 100 for tick in found)
    assert axis(low - 1) == 0
    assert axis(axis.high + 1) == 100
