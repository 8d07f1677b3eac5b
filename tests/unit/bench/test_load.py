"""Objectives of single requests, and the verdict over rates."""

import asyncio
import json

import pytest

from helpers.waiting import eventually
from specserve.errors import ConfigurationError
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.pacing import CUT_SHORT
from specserve.tools.bench.sample import Wave
from specserve.tools.bench.statistics import quantiles
from specserve.tools.bench.summary import summarise
from specserve.tools.load.report import LoadRecord
from specserve.tools.load.run import Generator, LoadPlan, LoadStep
from specserve.tools.load.slo import Objectives, attainment, read_objectives
from support.bench_samples import prompt, sample


def test_a_request_meets_all_objectives_or_it_does_not():
    """Blocks 100 ms apart: 1, 3, 2 tokens, so TTFT 100, TPOT 40, longest ITL 50, E2E 300 ms."""
    samples = [sample(), sample(gap_s=0.2), sample(error="Boom")]

    met = attainment(samples, Objectives(ttft_ms=150, tpot_ms=45, itl_ms=60, e2e_ms=301))

    assert (met.num_requests, met.num_met) == (3, 1)
    assert met.share == pytest.approx(1 / 3)
    assert met.missed == {"ttft_ms": 1, "tpot_ms": 1, "itl_ms": 1, "e2e_ms": 1, "failed": 1}


@pytest.mark.parametrize(
    ("objective", "met"),
    [("ttft_ms=99", 0), ("ttft_ms=101", 1), ("tpot_ms=39", 0), ("itl_ms=49", 0), ("itl_ms=51", 1)],
)
def test_each_objective_can_be_missed(objective, met):
    assert attainment([sample()], read_objectives([objective])).num_met == met


def test_without_objectives_a_request_that_ends_well_meets_them():
    met = attainment([sample(), sample(error="Boom")], Objectives())

    assert (met.num_met, met.share) == (1, 0.5)
    assert attainment([], Objectives()).share == 0.0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ttft=5", r"unknown key 'ttft'; did you mean 'ttft_ms'\?"),
        ("ttft_ms", "--slo: found 'ttft_ms', wanted NAME=MILLISECONDS"),
        ("ttft_ms=-1", "ttft_ms: found '-1', wanted greater than 0"),
    ],
)
def test_a_wrong_objective_is_named(word, message):
    with pytest.raises(ConfigurationError, match=message):
        read_objectives([word])


def step(rate, share, *, late_s=0.001, complete=True):
    """Make a step of 100 requests of which a share met the objectives."""
    good = round(100 * share)
    samples = (*[sample(gap_s=0.1)] * good, *[sample(gap_s=1.0)] * (100 - good))
    wave = Wave(samples, 50.0)
    met = attainment(samples, Objectives(ttft_ms=500))
    return LoadStep(
        rate, summarise([wave]), met, met.num_met / 50.0, 7, quantiles([late_s]), complete
    )


def record(*steps):
    made = LoadRecord("specserve load", Objectives(ttft_ms=500), 0.95)
    for each in steps:
        made.add(each)
    return made


def test_the_highest_rate_that_kept_the_objectives_is_named():
    made = record(step(1, 1.0), step(2, 0.96), step(4, 0.5))

    assert made.highest_rate == 2
    assert "2 requests/s" in made.text()
    assert made.steps[1].goodput == pytest.approx(96 / 50)


def test_a_client_that_was_late_judges_nothing():
    """Its own slowness is in every figure: no rate can be said to have been kept."""
    made = record(step(1, 1.0, late_s=0.5))

    assert not made.steps[0].client_kept_up
    assert made.highest_rate is None
    assert "the client itself" in made.text()


def test_the_record_is_written_whole(tmp_path):
    made = record(step(1, 1.0), step(2, 0.5, complete=False))
    made.path = tmp_path / "load.json"
    made.save()
    made.write_html(tmp_path / "load.html")

    values = json.loads(made.path.read_text())
    page = (tmp_path / "load.html").read_text()
    assert values["schema"] == "specserve-load"
    assert [each["kept"] for each in values["steps"]] == [True, False]
    assert values["steps"][0]["attainment"]["num_met"] == 100
    assert "cut short" in page
    assert page.count("<svg") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.html", "load.json"]


class Server:
    """A client whose server the test holds."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.texts = []
        self.ids = []

    async def decode(self, each, settings, request_id, k):
        self.texts.append(each.text)
        self.ids.append(request_id)
        if not self.answers:
            await asyncio.Event().wait()
        return sample()

    async def read(self):
        return None


def plan(**changes):
    values = {
        "duration_s": 0.05,
        "process": "constant",
        "burstiness": 1.0,
        "settings": RequestSettings(8, 0.0, True, 0),
        "num_speculative_tokens": None,
        "timeout_s": None,
        "max_in_flight": None,
        "unique": False,
    }
    return LoadPlan(**(values | changes))


async def stepped(server, load_plan, rate=100.0):
    steps = []
    generator = Generator(server, [prompt(0), prompt(1)], load_plan)
    await generator.step(rate, Objectives(), steps.append, lambda *_: None)
    return steps[0]


async def test_every_request_has_an_id_and_prompts_come_in_turn():
    server = Server(answers=True)

    made = await stepped(server, plan())

    assert made.summary.num_requests == 5
    assert server.texts == ["prompt 0", "prompt 1", "prompt 0", "prompt 1", "prompt 0"]
    assert len(set(server.ids)) == 5
    assert made.complete


async def test_unique_prompts_never_repeat():
    server = Server(answers=True)

    await stepped(server, plan(unique=True))

    assert server.texts[:3] == ["[0] prompt 0", "[1] prompt 1", "[2] prompt 0"]


async def test_requests_beyond_the_bound_fail_unsent_and_slow_ones_fail():
    """A server that hangs: two are sent and time out, the others are counted, not forgotten."""
    server = Server(answers=False)

    made = await stepped(server, plan(max_in_flight=2, timeout_s=0.2))

    assert len(server.ids) == 2
    assert made.summary.num_failed == 5
    assert made.max_in_flight == 2
    assert any("requests in flight: 3 wanted, 2 available" in e for e in made.summary.errors)
    assert any("did not finish within 0.2" in e for e in made.summary.errors)
    assert made.attainment.missed["failed"] == 5


async def test_a_step_that_is_cut_short_keeps_what_came():
    steps = []

    class Half(Server):
        async def decode(self, each, settings, request_id, k):
            self.answers = len(self.ids) < 3
            return await super().decode(each, settings, request_id, k)

    server = Half(answers=True)
    generator = Generator(server, [prompt(0)], plan())
    running = asyncio.create_task(
        generator.step(100.0, Objectives(), steps.append, lambda *_: None)
    )
    await eventually(lambda: len(server.ids) == 5)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    found = steps[0]
    assert (found.summary.num_requests, found.summary.num_failed, found.complete) == (5, 2, False)
    assert any(CUT_SHORT in error for error in found.summary.errors)
    assert found.client_late_s is not None


def test_a_rate_that_was_cut_short_was_not_kept():
    """What was not answered yet might have missed every objective."""
    made = record(step(2, 1.0), step(50, 1.0, complete=False))
    assert made.highest_rate == 2
    assert [each["kept"] for each in made.values()["steps"]] == [True, False]
