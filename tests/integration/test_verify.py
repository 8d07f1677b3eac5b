"""`specserve verify` on a toy pair that runs, and the record that it keeps."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from helpers.pair import is_ready, make_request, running_pair
from specserve.errors import ConfigurationError
from specserve.orchestrator import verified_gate
from specserve.rpc.v1.generation_pb2 import GetPairRequest
from specserve.rpc.verified_records import read_all
from specserve.speculation.types import AcceptanceRule
from specserve.tools.flags import Parser
from specserve.tools.verify import command, distribution
from specserve.tools.verify.distribution import DistributionOptions, DistributionReport
from specserve.tools.verify.toy_cases import CASES


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

    The enumerable pair is drawn from as little as one case a rule: it has tests of its own.
    """
    monkeypatch.setattr(verified_gate, "RECHECK_S", 0.0)
    few = tuple(case for case in CASES if case.name in ("standard K=3", "coupled K=3"))
    whole = distribution.run_distribution_suite

    async def small(_: DistributionOptions) -> DistributionReport:
        return await whole(DistributionOptions(num_sequences=100, share=0.003, cases=few))

    monkeypatch.setattr(distribution, "run_distribution_suite", small)
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
        args = flags(*words, "--json", str(report), "--seconds", "1", "--num-prompts", "1")

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
    assert out.count("declared before the run") == 2
    assert out.rstrip().endswith("PASSED")
