"""`specserve verify` on a toy pair that runs, and the record that it keeps."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.pair import is_ready, make_request, running_pair
from integration.test_sampling_options import served
from specserve.errors import ConfigurationError
from specserve.model.environment import code_versions
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.orchestrator import verified_gate
from specserve.rpc.v1.generation_pb2 import GetPairRequest
from specserve.rpc.verified_records import read_all
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.flags import Parser
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.terminal import Progress
from specserve.tools.verify import command, prefixes
from specserve.tools.verify.distribution import DistributionReport
from specserve.tools.verify.gateway_client import GatewayClient
from specserve.tools.verify.parity import MODES, TIE_MARGIN, ParityReport, compare_modes
from specserve.tools.verify.prefixes import PrefixOptions, run_prefix_suite

WIDE_TARGET = "toy:vocab_size=256,seed=7,eos_bias=-1000"


def flags(*words: str) -> argparse.Namespace:
    parser = Parser("specserve verify", "")
    command.add_arguments(parser)
    return parser.parse(words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--bias", "0"), "--bias"),
        (("--num-sequences", "5"), "--num-sequences"),
        (("--max-tokens", "1"), "--max-tokens"),
        (("--orchestrator-address", "127.0.0.1:1", "--draft", "x"), "--draft"),
        (("--orchestrator-address", "127.0.0.1:1", "--method", "suffix"), "--method"),
        (("--tls-dir", "x"), "--tls-dir"),
        (("--url", "http://x", "--draft", "x"), "--draft"),
        (("--url", "http://x", "--orchestrator-address", "127.0.0.1:1"), "--url"),
    ],
)
def test_flags_that_contradict_one_another_are_refused(
    words: tuple[str, ...], complaint: str
) -> None:
    """Before anything is started; the flag is named."""
    with pytest.raises(ConfigurationError, match=complaint):
        command.run(flags(*words))


@pytest.mark.slow
async def test_a_running_pair_earns_its_record_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Target-only before, speculating after, without a restart; the report holds all parts.

    The enumerable pair, which has tests of its own and starts processes, is taken as read.
    """
    monkeypatch.setattr(verified_gate, "RECHECK_S", 0.0)

    async def held(*_: object) -> DistributionReport:
        return DistributionReport("", 0.005, (), code_versions())

    monkeypatch.setattr(command, "_distribution", held)
    monkeypatch.setattr(prefixes, "NUM_WARM_UP", 8)
    report = tmp_path / "report.json"
    folder = tmp_path / "verified"
    folder.mkdir()
    async with running_pair(
        "toy:vocab_size=256,seed=7",
        "toy:vocab_size=256,seed=7,noise=0.7",
        require_verified=True,
        verified_dir=str(folder),
    ) as pair:
        assert is_ready(pair.orchestrator)
        request = make_request(max_tokens=24)
        before = await pair.generate(request)
        words = ("--orchestrator-address", pair.orchestrator.address, "--verified-dir", str(folder))
        args = flags(*words, "--json", str(report), "--seconds", "0.1")

        assert await asyncio.to_thread(command.run, args) == 0

        for _ in range(50):
            after = await pair.generate(make_request(max_tokens=24))
            if after.record is not None and after.record.num_draft_tokens:
                break
        served = await pair.stub.GetPair(GetPairRequest())
    assert before.record is not None
    assert before.record.num_draft_tokens == 0
    assert after.record is not None
    assert after.record.num_draft_tokens > 0
    assert after.token_ids == before.token_ids
    assert served.speculation_enabled
    assert served.reason == ""
    records = read_all(folder)
    assert {record.key.rule for record in records} == set(AcceptanceRule)
    assert all(record.passed for record in records)
    assert all(set(r.parts) == {"parity", "prefixes", "distribution"} for r in records)
    told = json.loads(report.read_text())
    assert told["passed"] is True
    assert told["rules"] == {rule.value: True for rule in AcceptanceRule}
    out = capsys.readouterr().out
    assert "declared before the run" in out
    assert out.rstrip().endswith("PASSED")


@pytest.mark.slow
async def test_a_gateway_is_asked_what_its_orchestrator_would_be() -> None:
    """The same texts and the same candidates; parity and prefixes hold over HTTP too."""
    async with (
        running_pair(WIDE_TARGET, f"{WIDE_TARGET},noise=0.7", k=3) as pair,
        served(pair, ToyTokenizer(ToySpec.parse(WIDE_TARGET))) as http,
        GenerationClient(pair.orchestrator.address) as direct,
    ):
        gateway = GatewayClient(http)
        assert (await gateway.ready())["num_speculative_tokens"] == 3
        prompt = await gateway.token_ids("hello")
        for rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED):
            sampling = SamplingParams(
                rule, 7, 0, temperature=float(rule is AcceptanceRule.COUPLED), top_k=5
            )
            job = Job(f"both-{rule}", prompt, sampling, 16, ignore_eos=True)
            ours, theirs = await gateway.generate(job), await direct.generate(job)
            assert ours.token_ids == theirs.token_ids
        told = await gateway.candidates(prompt, "told")
        for token_id, logprob in (await direct.candidates(prompt, "direct")).items():
            assert told[token_id] == pytest.approx(logprob, abs=1e-5)

        progress = Progress()
        modes = await compare_modes(
            gateway, [("hello", prompt)], max_tokens=24, concurrency=4, progress=progress
        )
        law = await run_prefix_suite(
            gateway, [("hello", prompt)], PrefixOptions(1.0, 16, 3, 1e-4, num_draws=100), progress
        )
    assert not any(mode.divergences for mode in modes)
    assert law.passed, law.table()
    assert all(report.num_draft_tokens > 0 for report in law.reports)
    assert {mode.longest_block for mode in modes} == {3}
    assert {report.longest_block for report in law.reports} == {3}


@pytest.mark.slow
async def test_a_difference_over_http_is_accounted_for_by_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway whose texts part when speculation is on: each difference carries its margin."""
    async with (
        running_pair(WIDE_TARGET, draft=None, speculative={"method": "ngram"}) as pair,
        served(pair, ToyTokenizer(ToySpec.parse(WIDE_TARGET))) as http,
    ):
        gateway = GatewayClient(http)
        prompt = await gateway.token_ids("hello")
        plain = gateway.generate

        async def other_third_token(job: Job) -> Generated:
            done = await plain(job)
            if job.num_speculative_tokens == 0:
                return done
            first, second, third, *rest = done.token_ids
            return replace(done, token_ids=(first, second, (third + 1) % 256, *rest))

        monkeypatch.setattr(gateway, "generate", other_third_token)
        (report,) = await compare_modes(
            gateway,
            [("hello", prompt)],
            max_tokens=8,
            concurrency=1,
            progress=Progress(),
            modes=MODES[:1],
        )
    (difference,) = report.divergences
    assert difference.position == 2
    assert report.num_tokens == 3, "what lies behind a difference is not compared"
    assert difference.margin > TIE_MARGIN["float32"]
    assert not ParityReport("float32", "ngram", (report,)).passed


@pytest.mark.slow
def test_a_pair_that_is_started_for_it_drafts_whatever_its_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Set not to draft among many, it is still tried as configured: else nothing is verified."""
    report = tmp_path / "report.json"
    config = {
        "model": f"{WIDE_TARGET},noise=0.7",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1000, 0]],
    }

    code = command.run(
        flags(
            *("--suite", "parity", "--target", WIDE_TARGET, "--num-prompts", "1"),
            *("--max-tokens", "16", "--json", str(report)),
            *("--speculative-config", json.dumps(config)),
        )
    )

    assert code == 0, capsys.readouterr().out
    modes = json.loads(report.read_text())["modes"]
    assert all(mode["num_drafted_on"] > 0 for mode in modes)
    assert {mode["longest_block"] for mode in modes} == {3}
