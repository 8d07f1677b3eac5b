"""The field's symptoms of a wrong pair, tried on one that runs, with a few short requests.

Each text is decoded with speculation and without, or twice, and compared token for token. What a
few requests cannot show, the law, is named with the command that does. Knows requests and texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.doctor.status import Check, Status
from specserve.tools.generation_client import Generated, Job, TextClient
from specserve.tools.verify.divergence import told_divergences
from specserve.tools.verify.parity import SEED, TIE_MARGIN

MAX_TOKENS = 48
"""Of an answer: more than a target decodes ahead in one call."""

TOP_P = 0.9
FIRST_STOP = 6
"""A text is stopped at a token that first comes here or later, in the midst of its blocks."""


@dataclass(frozen=True, slots=True)
class Probes:
    """What the probes found."""

    checks: list[Check]
    ids: tuple[str, ...]
    """Requests that ran alone, with and without speculation by turns: their rounds tell the speed
    of both under the same load."""


class Symptoms:
    """Runs the checks; what one has decoded, the next ones compare with."""

    def __init__(self, client: TextClient, prompts: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Prepare.

        Args:
            prompts: (name, token ids).
        """
        self._client = client
        self._names = [name for name, _ in prompts]
        self._run = f"doctor-{secrets.token_hex(4)}"
        self._greedy = [self._job("greedy", i, ids, 0.0) for i, (_, ids) in enumerate(prompts)]
        self._seeded = [self._job("seeded", i, ids, 0.8) for i, (_, ids) in enumerate(prompts)]

    def _job(self, kind: str, index: int, ids: tuple[int, ...], temperature: float) -> Job:
        rule = AcceptanceRule.COUPLED if temperature else AcceptanceRule.GREEDY
        sampling = SamplingParams(rule, SEED + index, 0, temperature=temperature)
        name = f"{self._run}-{kind}-{index}"
        # What comes behind a model's own end is guessed worse than any text that people ask for.
        return Job(name, ids, sampling, MAX_TOKENS)

    async def run(self) -> Probes:
        """Run all of them, one after the other."""
        greedy, greedy_off = await self._on_and_off(self._greedy)
        seeded, seeded_off = await self._on_and_off(self._seeded)
        checks = [
            await self._same("greedy, on and off", self._greedy, greedy, greedy_off),
            await self._same("seeded, on and off", self._seeded, seeded, seeded_off),
            await self._ends(greedy),
            await self._together([*greedy, *seeded]),
            await self._repeated(),
        ]
        solo = (*self._greedy, *self._seeded)
        return Probes(checks, tuple(name for job in solo for name in (job.request_id, _off(job))))

    async def _on_and_off(self, jobs: Sequence[Job]) -> tuple[list[Generated], list[Generated]]:
        """Decode by turns, so that both meet the same load."""
        on, off = [], []
        for job in jobs:
            without = replace(job, request_id=_off(job), num_speculative_tokens=0)
            off.append(await self._client.generate(without))
            on.append(await self._client.generate(job))
        return on, off

    async def _same(
        self,
        name: str,
        jobs: Sequence[Job],
        ours: Sequence[Generated],
        theirs: Sequence[Generated],
    ) -> Check:
        """Compare texts that must be equal but for near-ties."""
        names = self._names * (len(jobs) // len(self._names))
        differences = await told_divergences(self._client, names, jobs, ours, theirs)
        count = sum(len(one.token_ids) for one in theirs)
        drafted = sum(one.record.num_draft_tokens for one in ours)
        if not differences:
            found = f"equal: {count} tokens of {len(jobs)} texts, {drafted} drafted"
            return Check(name, Status.OK if drafted else Status.NOTE, found)
        worst = max(differences, key=lambda one: one.margin)
        found = f"{len(differences)} of {len(jobs)} texts differ: {worst}"
        if worst.margin <= TIE_MARGIN["float32"]:
            return Check(name, Status.OK, f"near-ties: {found}")
        if worst.margin <= TIE_MARGIN["bfloat16"]:
            return Check(name, Status.NOTE, f"{found}; a near-tie in bfloat16, wrong in float32")
        return Check(name, Status.PROBLEM, found)

    async def _ends(self, texts: Sequence[Generated]) -> Check:
        """Stop each text at a token in the midst of it: nothing may come after."""
        name, wrong, tried = "nothing after the end", [], 0
        for job, text in zip(self._greedy, texts, strict=True):
            at = _first_late(text.token_ids)
            if at is None:
                continue
            tried += 1
            stop = replace(job.sampling, stop_token_ids=(text.token_ids[at],))
            cut = replace(job, request_id=f"{job.request_id}-stop", sampling=stop)
            got = (await self._client.generate(cut)).token_ids
            if _overruns(got, text.token_ids, at):
                wrong.append(f"stopped at token {at}, {len(got)} came")
        if wrong:
            return Check(name, Status.PROBLEM, f"{len(wrong)} of {tried} texts: {wrong[0]}")
        status = Status.OK if tried else Status.NOTE
        return Check(name, status, f"{tried} texts end where a stop token came, inside a block")

    async def _together(self, alone: Sequence[Generated]) -> Check:
        """Decode all texts at once: each must be what it was alone."""
        jobs = [
            replace(job, request_id=f"{job.request_id}-together")
            for job in (*self._greedy, *self._seeded)
        ]
        together = await self._client.generate_all(jobs, len(jobs))
        return await self._same("streams together and alone", jobs, together, alone)

    async def _repeated(self) -> Check:
        """Decode with top-p and a seed twice."""
        first, second = [
            [
                replace(
                    job,
                    request_id=f"{job.request_id}-top-p-{number}",
                    sampling=replace(job.sampling, top_p=TOP_P),
                )
                for job in self._seeded
            ]
            for number in range(2)
        ]
        ours = [await self._client.generate(job) for job in first]
        again = [await self._client.generate(job) for job in second]
        return await self._same("top-p with a seed, twice", first, again, ours)


def law_check(url: str) -> Check:
    """Name what checks the law."""
    command = f"specserve verify --url {url} --suite prefixes"
    return Check("law", Status.NOTE, f"a few texts show no law: `{command}` draws thousands")


def _off(job: Job) -> str:
    return f"{job.request_id}-off"


def _first_late(token_ids: Sequence[int]) -> int | None:
    """Return a place from FIRST_STOP on whose token did not come before; None without one."""
    late = range(FIRST_STOP, len(token_ids))
    return next((at for at in late if token_ids[at] not in token_ids[:at]), None)


def _overruns(got: Sequence[int], text: Sequence[int], at: int) -> bool:
    """Say whether tokens came after the stop token text[at], which may be shown or not.

    A pair that is wrong otherwise gives another text, and has to stop only where the token comes.
    """
    is_same = tuple(got[:at]) == tuple(text[:at])
    return text[at] in got[:-1] or (is_same and len(got) > at + 1)
