"""The outcome cache: drafting for the next round while the target verifies this one.

Between a session's calls it drafts, on blocks of their own, for the likeliest outcomes of the
running verify call; `take` answers the next call from the branch that came true. A hit says what a
miss would have computed, only sooner. Knows rounds, branches and blocks; knows no logits, and no
time (`outcome_plan.py` does).
"""

from __future__ import annotations

from specserve.model.draft_calls import ProposeState
from specserve.model.kv_cache import BlockPool, CopyBlock
from specserve.model.kv_tail import BlockTail, LentBlocks
from specserve.model.messages import OutcomeCounts, ProposeCall
from specserve.model.outcome_branch import Branch
from specserve.model.outcome_odds import Outcome, OutcomeOdds
from specserve.model.outcome_round import RoundAhead
from specserve.model.session import KvSession

_KV_SHARE = 8
"""At most 1/8 of the pool's blocks are lent to branches."""


class OutcomeCache:
    """Every session's round that is looked ahead of, and the blocks lent to its branches."""

    def __init__(
        self,
        pool: BlockPool,
        copy_block: CopyBlock,
        *,
        num_outcomes: int,
        max_length: int,
        confidence_threshold: float = 0.0,
    ) -> None:
        """Build an empty cache.

        Args:
            num_outcomes: most branches of a session.
            max_length: most tokens a session may hold.
            confidence_threshold: where a guess ends; see draft_confidence.py.
        """
        self.odds = OutcomeOdds()
        self._lent = LentBlocks(pool, max(1, pool.num_blocks // _KV_SHARE))
        self._copy_block = copy_block
        self._num_outcomes = num_outcomes
        self._max_length = max_length
        self._confidence_threshold = confidence_threshold
        self._rounds: list[RoundAhead] = []
        self._num_hits = 0
        self._num_misses = 0
        self._num_hidden_tokens = 0
        self._num_branch_tokens = 0
        self._hidden_s = 0.0
        self._asked_s = 0.0

    @property
    def rounds(self) -> list[RoundAhead]:
        """Rounds whose verify call may still be running."""
        self._rounds = [ahead for ahead in self._rounds if not ahead.is_over]
        return self._rounds

    @property
    def num_blocks(self) -> int:
        """Blocks lent to branches; asked work gets them back when it needs them."""
        return self._lent.count

    @property
    def counts(self) -> OutcomeCounts:
        """What came of it since the start."""
        return OutcomeCounts(
            self._num_hits,
            self._num_misses,
            self._num_hidden_tokens,
            self._num_branch_tokens,
            self._hidden_s,
            self._asked_s,
        )

    def look_ahead(self, state: ProposeState) -> bool:
        """Take up the round of a call that is being answered; False where there is none."""
        session, call = state.session, state.call
        asked = call.num_speculative_tokens if isinstance(call, ProposeCall) else 0
        wanted = min(asked, self._max_length - state.committed_length - 1)
        if not state.drafted or state.is_cancelled or session.blocks is None or wanted <= 0:
            return False  # a call that was given up has no verify call behind it
        session.ahead = RoundAhead(
            session, state.committed_length, state.drafted, wanted, self._num_outcomes
        )
        self._rounds.append(session.ahead)
        return True

    def take(self, session: KvSession, call: ProposeCall) -> Branch | None:
        """End a session's round with its next call, just let in; give what was drafted for it.

        The session then holds the branch's tokens as if the call had computed them.

        Returns:
            A branch with at least one drafted token; None for a miss, or without a round.
        """
        ahead = session.ahead
        if ahead is None:
            return None
        outcome = ahead.outcome_of(call)
        found = None
        if outcome is not None:
            found = ahead.find(*outcome)
            ahead.learn(*outcome, self.odds)
        if found is not None:
            ahead.branches.remove(found)
        ahead.end()
        num_wanted = call.num_speculative_tokens
        num_tokens = 0 if found is None else min(len(found.drafted), num_wanted)
        if num_wanted > 0:
            self._num_hits += found is not None
            self._num_misses += found is None
        if found is not None:
            self._num_hidden_tokens += num_tokens
            self._hidden_s += sum(found.forward_s[:num_tokens])
            found.tail.hand_over()
            session.chain.append(found.held_token_ids(num_tokens))
            session.truncate(session.cached_length)  # blocks of tokens that are not wanted
        return found

    def new_branch(self, ahead: RoundAhead, outcome: Outcome) -> Branch | None:
        """Start a branch; None where its blocks would be too many."""
        session = ahead.session
        if session.blocks is None:
            return None
        base_length = ahead.committed_length + outcome.row
        branch = Branch(
            session.session_id,
            outcome,
            base_length,
            min(ahead.num_speculative_tokens, self._max_length - base_length - 1),
            BlockTail(self._lent, session.blocks, base_length),
            session.opening.sampling,
            session.row_edits,
            self._confidence_threshold,
            session.more_ids,
        )
        if not branch.is_open or not self.extend(branch):
            return None
        ahead.begin(branch)
        return branch

    def extend(self, branch: Branch) -> bool:
        """Make room for a branch's next token; False where there is none to lend."""
        missing = branch.tail.num_missing(branch.next_length)
        if missing and not self._lent.can_lend(missing):
            return False
        branch.tail.extend(branch.next_length, self._copy_block)
        return True

    def extend_session(self, ahead: RoundAhead) -> bool:
        """Make room in the session itself for its last draft token, whose row is the bonus row."""
        start, blocks = ahead.last_position, ahead.session.blocks
        if blocks is None or start >= self._max_length:
            return False
        if blocks.num_missing(start, start + 1) > self._lent.pool.num_free:
            return False
        blocks.prepare_write(start, start + 1, self._copy_block)
        return True

    def reclaim(self) -> bool:
        """Free the least likely branch for asked work; False when there is none."""
        if self._lent.count == 0:
            return False
        pairs = [(ahead, branch) for ahead in self.rounds for branch in ahead.branches]
        ahead, branch = min(
            (pair for pair in pairs if pair[1].tail.num_blocks),
            key=lambda pair: pair[1].outcome.probability,
        )
        ahead.give_up()
        ahead.drop(branch)
        return True

    def note_asked(self, forward_s: float) -> None:
        """Count the forwards that a call waited for although its round was looked ahead of."""
        self._asked_s += forward_s

    def note_drafted(self, num_tokens: int) -> None:
        """Count tokens drafted ahead."""
        self._num_branch_tokens += num_tokens
