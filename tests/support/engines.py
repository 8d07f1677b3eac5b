"""Toy engines driven by hand, and a caller that keeps a session as an orchestrator would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specserve.config import EngineConfig
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.engine import Engine
from specserve.model.engine_base import EngineLike
from specserve.model.messages import (
    Message,
    ProposeCall,
    ProposeReply,
    Reply,
    Role,
    SessionOpening,
    VerifyCall,
    VerifyReply,
)
from specserve.model.toy import ToySpec, toy_logits
from specserve.model.toy_runner import ToyRunner
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs

CALL_IDS = itertools.count(1)
GREEDY = SamplingParams(AcceptanceRule.GREEDY, seed=1, choice=0, temperature=0.0)


class Clock:
    """A clock that tests turn by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def toy_engine(
    role: Role = "target",
    model: str = "toy:vocab_size=16,eos_bias=-1000",
    clock: Clock | None = None,
    num_cached_outcomes: int = 0,
    draft_confidence_threshold: float = 0.0,
    grammars: GrammarCompiler | None = None,
    **config: object,
) -> Engine:
    """Build an engine over a toy model; keyword arguments are EngineConfig fields."""
    settings = EngineConfig.model_validate({"model": model, "block_size": 4, **config})
    return Engine(
        ToyRunner.from_spec(settings),
        settings,
        role=role,
        num_cached_outcomes=num_cached_outcomes,
        draft_confidence_threshold=draft_confidence_threshold,
        grammars=grammars,
        clock=clock or Clock(),
    )


def run(engine: EngineLike, *messages: Message) -> list[Reply]:
    """Submit messages together and step until nothing is left to do."""
    for message in messages:
        engine.submit(message)
    replies: list[Reply] = []
    while engine.wait_s() == 0.0:
        output = engine.step()
        if output is not None:
            replies.extend(output.replies)
    return replies


def greedy_decode(spec: ToySpec, prompt: Sequence[int], count: int) -> list[int]:
    """Decode greedily from the toy's table alone: no engine, no cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(spec, tokens).argmax()))
    return tokens[len(prompt) :]


class Caller:
    """One session seen from outside: committed tokens, and what each reply said is cached."""

    def __init__(
        self,
        session_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        tenant_salt: bytes = b"",
        priority: int = 0,
    ) -> None:
        self.session_id = session_id
        self.committed = TokenChain(prompt)
        self.opening = SessionOpening(sampling, tenant_salt, priority)
        self.cached_length = 0
        """What the last reply proved, never more than the committed tokens."""
        self.epoch = 0
        self.step = 0
        self._is_open = False

    def reopen(self) -> None:
        """Forget what was cached: the next call opens the session in a new epoch."""
        self.epoch, self.step, self.cached_length, self._is_open = self.epoch + 1, 0, 0, False

    def verify(
        self,
        draft_token_ids: Sequence[int] = (),
        draft_probs: SparseProbs | None = None,
        num_decode_steps: int = 1,
        append_only: bool = False,
    ) -> VerifyCall:
        """Make the next Verify call."""
        return VerifyCall(
            *self._session_part(),
            tuple(draft_token_ids),
            draft_probs,
            num_decode_steps,
            append_only,
        )

    def propose(self, num_speculative_tokens: int) -> ProposeCall:
        """Make the next Propose call."""
        return ProposeCall(*self._session_part(), num_speculative_tokens)

    def heard(self, reply: VerifyReply | ProposeReply, num_drafted_valid: int = 0) -> None:
        """Believe a reply: committed tokens plus so many accepted draft tokens are cached."""
        self._is_open = True
        limit = len(self.committed) + num_drafted_valid
        self.cached_length = min(reply.cached_length, limit)

    def _session_part(
        self,
    ) -> tuple[int, str, int, int, int, int, tuple[int, ...], SessionOpening | None]:
        self.step += 1
        keep = min(self.cached_length, len(self.committed))
        return (
            next(CALL_IDS),
            self.session_id,
            self.epoch,
            self.step,
            keep,
            self.committed.digest(keep),
            tuple(self.committed.slice(keep, len(self.committed))),
            None if self._is_open else self.opening,
        )


def check_pool(engine: Engine) -> None:
    """Every block has exactly the references its tables hold, and every cached token its KV."""
    pool, runner = engine._pool, engine._runner
    assert isinstance(runner, ToyRunner)
    references = [0] * pool.num_blocks
    for session in engine._sessions:
        assert session.blocks is not None
        blocks, size = session.blocks.blocks, pool.block_size
        for block in blocks:
            references[block] += 1
        assert len(blocks) == -(-session.cached_length // size)
        for position, token in enumerate(session.chain.tokens):
            slot = blocks[position // size] * size + position % size
            assert runner._pool[slot] == token, (session.session_id, position)
        for branch in session.ahead.branches if session.ahead is not None else ():
            for block in branch.tail.blocks[branch.base_length // size :]:
                references[block] += 1
            held = branch.held_token_ids(len(branch.drafted)) if branch.drafted else ()
            tokens = [*session.chain.slice(0, branch.base_length), *held]
            for position, token in enumerate(tokens):
                slot = branch.tail.blocks[position // size] * size + position % size
                assert runner._pool[slot] == token, (session.session_id, branch.outcome, position)
    assert [pool.references(block) for block in range(pool.num_blocks)] == references
    assert pool.num_used == sum(count > 0 for count in references)
    assert pool.num_allocated - pool.num_freed == pool.num_used
