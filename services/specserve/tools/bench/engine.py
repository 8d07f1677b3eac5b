"""K = 0 through the whole system against the bare engine decoding the same batch in one process.

"Off" must be an honest baseline: a speculative system that is slow when switched off makes its own
speedup look good. Knows both paths; compares nothing across runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.model.device_loop import build_engine
from specserve.model.engine_base import EngineLike
from specserve.model.messages import Release, SessionOpening, VerifyCall, VerifyReply
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.models import resolve_pair
from specserve.tools.terminal import say

BATCHES = (1, 8, 32)
TOY = "toy:vocab_size=96,seed=7,step_ms=10,row_ms=0.05"
"""A modelled device: at step time 0 there would be nothing to keep busy."""

NUM_THREADS = 1
"""Of the engine, both ways: a core is left for the services, as a device of its own leaves it."""

NUM_PAIRS = 5
"""Of both ways in turns: what the machine does besides weighs on both."""

PROMPT = tuple(range(4, 20))
GREEDY = SamplingParams(AcceptanceRule.GREEDY, seed=0, choice=0, temperature=0.0)


async def run_engine_suite(cache_dir: str | None, *, toy_only: bool) -> dict[str, float]:
    """Measure the toy and the embedded target at each batch size, both ways in one run."""
    models = {"toy": (TOY, 128)}
    if not toy_only:
        pair = resolve_pair(None, SpeculativeConfig(method="ngram"), cache_dir)
        models["embedded"] = (pair.target, 64)
    figures: dict[str, float] = {}
    for name, (model, num_tokens) in models.items():
        engine = build_engine(EngineConfig(model=model, num_threads=NUM_THREADS), "target", None)
        flags = ("--num-threads", str(NUM_THREADS))
        spec = PairSpec(model, None, num_gateways=0, engine_flags=flags)
        async with (
            LocalPair(spec) as local,
            GenerationClient(local.orchestrators[0].address) as client,
        ):
            await client.wait_ready()
            for batch in BATCHES:
                pairs = []
                for number in range(NUM_PAIRS + 1):
                    bare = _bare(engine, batch, num_tokens)
                    pairs.append((bare, await _system(client, batch, num_tokens, number)))
                ratio, bare, system = _compare(pairs[1:])  # the first one warms up
                say(
                    f"{name}, {batch} sessions: bare engine {bare:.1f} tokens/s, "
                    f"system at K = 0 {system:.1f} tokens/s, ratio {ratio:.3f}"
                )
                figures[f"engine.{name}.{batch}.ratio"] = ratio
        del engine
    return figures


def _compare(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median ratio of (bare, system) rates taken in turns, and the median of each."""
    ratio = statistics.median(system / bare for bare, system in pairs)
    bares, systems = zip(*pairs, strict=True)
    return ratio, statistics.median(bares), statistics.median(systems)


def _bare(engine: EngineLike, batch: int, num_tokens: int) -> float:
    """Decode `batch` sessions in this process; tokens per second."""
    began = time.perf_counter()
    for index in range(batch):
        engine.submit(
            VerifyCall(
                call_id=index + 1,
                session_id=f"bare-{index}",
                epoch=1,
                step=1,
                keep_length=0,
                keep_digest=0,
                append_token_ids=(*PROMPT, index + 4),
                opening=SessionOpening(GREEDY),
                draft_token_ids=(),
                draft_probs=None,
                num_decode_steps=num_tokens,
            )
        )
    done = count = 0
    while done < batch:
        output = engine.step()
        for reply in output.replies if output is not None else ():
            if not isinstance(reply, VerifyReply):
                raise TypeError(f"the engine answered {reply}")
            count += 1
            done += not reply.more_follows
    wall = time.perf_counter() - began
    for index in range(batch):
        engine.submit(Release(f"bare-{index}"))
    return count / wall


async def _system(client: GenerationClient, batch: int, num_tokens: int, run: int) -> float:
    jobs = [
        Job(f"off-{batch}-{run}-{i}", (*PROMPT, i + 4), GREEDY, num_tokens, 0, ignore_eos=True)
        for i in range(batch)
    ]
    began = time.perf_counter()
    done = await client.generate_all(jobs, batch)
    return sum(len(g.token_ids) for g in done) / (time.perf_counter() - began)
