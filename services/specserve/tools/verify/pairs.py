"""The pair that is verified: one that runs already, or one that is started here for it.

Gives both alike: a client, what the orchestrator says of its pair, and prompts as token ids. Knows
processes and addresses; knows no suite.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.model.token_table import TokenTable
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1.generation_pb2 import GetPairResponse
from specserve.tools.bench.http import http_client
from specserve.tools.generation_client import GenerationClient, TextClient
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.models import resolve_pair
from specserve.tools.prompts import Prompt, read_prompts, to_token_ids
from specserve.tools.verify.gateway_client import GatewayClient

BLOCK_SIZE = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which pair, and what it is asked."""

    url: str | None
    """Of a gateway that runs."""
    address: str | None
    """host:port of an orchestrator that runs. Without one, and without a URL, a pair of the models
    below is started."""
    target: str | None
    speculative: SpeculativeConfig | None
    """None with a target of None: what `specserve serve` serves without flags."""
    dtype: str
    prompts: Path | None
    num_prompts: int | None
    max_tokens: int
    cache_dir: str | None
    tls: MutualTls | None = None
    """How the orchestrator is dialled; None speaks clear text."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What requests to the gateway carry: its key."""


@dataclass(frozen=True, slots=True)
class VerifiedPair:
    """A pair that answers."""

    client: TextClient
    pair: GetPairResponse
    """Empty but for K, names and the number type where only a gateway was asked."""
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, token ids)."""


@asynccontextmanager
async def reached(options: PairOptions) -> AsyncIterator[VerifiedPair]:
    """Reach the pair; one that was started here ends with the block."""
    prompts = read_prompts(options.prompts, options.num_prompts)
    if options.url is not None:
        async with http_client(options.url, options.headers) as http:
            gateway = GatewayClient(http)
            told = _told_by(await gateway.ready(), options)
            ids = [await gateway.token_ids(prompt.text) for prompt in prompts]
            yield VerifiedPair(gateway, told, _named(prompts, ids))
        return
    if options.address is not None:
        async with GenerationClient(
            options.address, for_verification=True, tls=options.tls
        ) as client:
            pair = await client.wait_ready(include_token_table=True)
            table = TokenTable.from_bytes(pair.target.token_table)
            ids = [greedy_token_ids(table, prompt.text) for prompt in prompts]
            yield VerifiedPair(client, pair, _named(prompts, ids))
        return
    spec, ids = _spec(options, prompts)
    async with (
        LocalPair(spec) as local,
        # A pair may be set not to draft among many: that is when nothing would be verified.
        GenerationClient(local.orchestrators[0].address, for_verification=True) as client,
    ):
        pair = await client.wait_ready()
        yield VerifiedPair(client, pair, _named(prompts, ids))


def _told_by(state: dict[str, Any], options: PairOptions) -> GetPairResponse:
    """Read what a gateway says of its pair; it tells neither weights nor versions."""
    pair = GetPairResponse(num_speculative_tokens=int(state.get("num_speculative_tokens") or 0))
    pair.target.model_id = str(state.get("target"))
    # Near-ties are judged by the number type, which only whoever deployed the target knows.
    pair.target.dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    if state.get("draft"):
        pair.draft.model_id = str(state["draft"])
    return pair


def greedy_token_ids(table: TokenTable, text: str) -> tuple[int, ...]:
    """Cut a text into the longest tokens that fit, from the left: a prompt like any other.

    A running pair tells its tokens but not its rules of cutting; what is verified holds for any
    prompt.

    Raises:
        ConfigurationError: no token begins with some byte of the text.
    """
    by_bytes = {
        token: token_id
        for token_id, token in enumerate(table.token_bytes)
        if token and token_id not in table.special_token_ids
    }
    longest = max(map(len, by_bytes), default=0)
    data, ids, start = text.encode(), [], 0
    while start < len(data):
        for length in range(min(longest, len(data) - start), 0, -1):
            token_id = by_bytes.get(data[start : start + length])
            if token_id is not None:
                ids.append(token_id)
                start += length
                break
        else:
            start += 1  # a byte that the vocabulary lacks: the prompt goes on without it
    if not ids:
        raise ConfigurationError("--prompts: the pair's vocabulary has no token of this text")
    return tuple(ids)


def _named(
    prompts: Sequence[Prompt], ids: Sequence[tuple[int, ...]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((prompt.prompt_id, tokens) for prompt, tokens in zip(prompts, ids, strict=True))


def _spec(
    options: PairOptions, prompts: Sequence[Prompt]
) -> tuple[PairSpec, list[tuple[int, ...]]]:
    # Heavy (transformers), and only needed here.
    from specserve.model.tokenizer import load_tokenizer

    models = resolve_pair(options.target, options.speculative, options.cache_dir)
    if models.speculative is None:
        raise ConfigurationError(
            "--speculative-config: a target that is served alone has nothing to verify; name a "
            "draft or a method"
        )
    tokenizer = load_tokenizer(EngineConfig(model=models.target))
    ids = [to_token_ids(tokenizer, prompt) for prompt in prompts]
    speculative = models.speculative
    answer = options.max_tokens + speculative.num_speculative_tokens + 1
    num_blocks = sum(1 + (len(tokens) + answer) // BLOCK_SIZE for tokens in ids)
    spec = PairSpec(
        target=models.target,
        draft=speculative.model,
        speculative_config=speculative.model_dump_json(exclude_none=True),
        num_gateways=0,
        # Short texts end before a draft has read the prompt, and prove nothing then.
        orchestrator_flags=("--draft-timeout-s=5", "--draft-catch-up-timeout-s=5"),
        engine_flags=(
            "--dtype",
            options.dtype,
            # One thread, as bit-equality is claimed for.
            "--num-threads=1",
            f"--block-size={BLOCK_SIZE}",
            # Every prompt stays between runs, with the answers of the run before and of this one.
            f"--num-kv-blocks={max(1024, 2 * num_blocks)}",
        ),
    )
    return spec, ids
