"""The walk of the orchestrator and both reference sides of a row."""

import itertools

import numpy as np
import pytest

from specserve.errors import InvalidProposal
from specserve.speculation.acceptance import accept, draft_token_probs
from specserve.speculation.draws import inverse_cdf, residual
from specserve.speculation.randomness import Purpose, RoundUniforms, uniform, uniforms
from specserve.speculation.scoring import (
    DraftRow,
    TargetRow,
    propose_row,
    score_distribution,
    score_row,
)
from specserve.speculation.transforms import Distribution, UnusableLogits, transform
from specserve.speculation.types import (
    AcceptanceRule,
    Proposal,
    SamplingParams,
    SparseProbs,
    TargetScores,
    Verification,
)

A, B, C = 0, 1, 2
STANDARD, GREEDY, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.GREEDY, AcceptanceRule.COUPLED


def params(rule=STANDARD, seed=5, **changes):
    return SamplingParams(rule, seed, 0, **changes)


def logits_of(*probs):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs)).astype(np.float32)


def distribution_of(*probs):
    ids = np.flatnonzero(probs)
    p = np.array(probs, np.float64)[ids]
    return Distribution(ids, np.log(p / p.max()), p)


def proposal_of(draft_token_ids, *q_rows):
    if not q_rows:
        return Proposal(tuple(draft_token_ids), None)
    weights = np.array(q_rows, np.float32)
    ids = np.broadcast_to(np.arange(weights.shape[1], dtype=np.int32), weights.shape)
    return Proposal(tuple(draft_token_ids), SparseProbs(ids, weights))


def target_row(draft_token_id, q, row=0, seed=5):
    weights = np.array(q, np.float32)
    ids = np.arange(len(q), dtype=np.int32)
    return TargetRow(params(seed=seed), 10 + row, 10, row, draft_token_id, ids, weights)


def decide(p, q, drafted, u, seed=5):
    """One whole round with K = 1 over enumerable distributions; returns the committed tokens."""
    score = score_distribution(distribution_of(*p), target_row(drafted, q, seed=seed))
    scores = TargetScores((score.target_prob,), (score.replacement_token_id, 99))
    verdict = accept(proposal_of([drafted], q), scores, [u], STANDARD)
    return [drafted][: verdict.num_accepted] + [verdict.next_token_id]


class TestHandWorked:
    def test_two_tokens_rejected_commits_a(self):
        """q = (.2, .8), p = (.6, .4), draft B, u = .7: .7 * .8 > .4 rejects; only A is left."""
        assert decide((0.6, 0.4), (0.2, 0.8), B, 0.7) == [A]

    def test_two_tokens_accepted(self):
        """The same with u = .49: .49 * .8 < .4 accepts B."""
        assert decide((0.6, 0.4), (0.2, 0.8), B, 0.49) == [B, 99]

    def test_three_tokens_accept_with_two_fifths(self):
        """q = (.5, .3, .2), p = (.2, .5, .3), draft A: accepted below u = .4, not above."""
        assert decide((0.2, 0.5, 0.3), (0.5, 0.3, 0.2), A, 0.3999) == [A, 99]
        assert decide((0.2, 0.5, 0.3), (0.5, 0.3, 0.2), A, 0.4001)[0] in {B, C}

    def test_three_tokens_residual(self):
        """The residual of the same is (0, 2/3, 1/3): 0.2 and 0.1 before normalisation."""
        p = distribution_of(0.2, 0.5, 0.3)
        left = residual(p, np.array([A, B, C], np.int32), np.array([0.5, 0.3, 0.2]))
        assert left / left.sum() == pytest.approx([0, 2 / 3, 1 / 3])
        assert inverse_cdf(left, 0.66) == B
        assert inverse_cdf(left, 0.67) == C

    def test_four_drafted_third_rejected_commits_three(self):
        """K = 4, the third candidate is rejected: two draft tokens and the recovered one."""
        q = [(0.5, 0.5)] * 4
        scores = TargetScores((0.5, 0.5, 0.1, 0.5), (10, 11, 12, 13, 14))
        verdict = accept(proposal_of([A, B, A, B], *q), scores, [0.9, 0.9, 0.9, 0.0], STANDARD)
        assert verdict == Verification(num_accepted=2, next_token_id=12)
        assert verdict.num_accepted + 1 == 3

    def test_all_accepted_commits_the_bonus(self):
        """K = 4 all accepted: five tokens, the last is the bonus."""
        scores = TargetScores((0.6,) * 4, (10, 11, 12, 13, 14))
        verdict = accept(proposal_of([A] * 4, *[(0.5, 0.5)] * 4), scores, [0.99] * 4, STANDARD)
        assert verdict == Verification(4, 14)

    def test_B119_no_draft_is_a_plain_decode_step(self):
        """K = 0 commits the one replacement, with no q and no uniforms."""
        scores = TargetScores((), (7,))
        for rule in AcceptanceRule:
            assert accept(Proposal((), None), scores, [], rule) == Verification(0, 7)


class TestStandard:
    def test_the_test_is_strict_at_u_zero_and_p_zero(self):
        """p = 0 is rejected even for u = 0, where `<=` would accept; tiny p is accepted."""
        q = [(0.5, 0.5)]
        rejected = accept(proposal_of([A], *q), TargetScores((0.0,), (1, 2)), [0.0], STANDARD)
        assert rejected == Verification(0, 1)
        scores = TargetScores((5e-324,), (1, 2))
        assert accept(proposal_of([A], *q), scores, [0.0], STANDARD) == Verification(1, 2)

    def test_equality_rejects(self):
        """u * q = p exactly is a rejection: acceptance has probability min(1, p / q), not more."""
        scores = TargetScores((0.25,), (1, 2))
        assert accept(proposal_of([A], (0.5, 0.5)), scores, [0.5], STANDARD).num_accepted == 0

    def test_q_is_the_weight_over_the_float64_sum_of_its_row(self):
        """Weights need not be normalised; padding of weight 0 counts for nothing."""
        ids = np.array([[4, 9, 0, 0], [7, 4, 2, 9]], np.int32)
        weights = np.array([[3, 1, 0, 0], [1, 1, 1, 5]], np.float32)
        proposal = Proposal((9, 9), SparseProbs(ids, weights))
        assert draft_token_probs(proposal) == [0.25, 0.625]

    def test_B028_missing_q_is_an_error(self):
        """Never "q = 1"."""
        with pytest.raises(InvalidProposal, match="draft_probs"):
            accept(proposal_of([A]), TargetScores((1.0,), (1, 2)), [0.5], STANDARD)
        row = TargetRow(params(), 1, 1, 0, A)
        with pytest.raises(InvalidProposal, match="draft_probs"):
            score_row(np.zeros(3, np.float32), row)

    def test_a_token_without_weight_in_its_own_q_is_an_error(self):
        """Accepting it would have no exact test; u * 0 < p would always pass."""
        with pytest.raises(InvalidProposal, match="no weight"):
            accept(proposal_of([A], (0, 1)), TargetScores((1.0,), (1, 2)), [0.5], STANDARD)
        with pytest.raises(InvalidProposal, match="token 1 has no weight"):
            draft_token_probs(proposal_of([A, B], (1, 0), (1, 0)))

    def test_B035_a_token_with_neither_p_nor_q_is_a_rejection(self):
        """Padding such as -1 that nobody drew: rejected at its row, what came before stands."""
        scores = TargetScores((0.5, 0.0), (1, 0, 2))
        verdict = accept(proposal_of([A, -1], (1, 1), (1, 1)), scores, [0.5, 0.0], STANDARD)
        assert verdict == Verification(1, 0)

    @pytest.mark.parametrize("weights", [(0, 0), (1, -1), (np.nan, 1), (np.inf, 1), (2, -1)])
    def test_weights_that_are_no_distribution_are_an_error(self, weights):
        """Negative, NaN, infinite or all zero, on both sides."""
        scores = TargetScores((1.0,), (1, 2))
        with pytest.raises(InvalidProposal, match="weights"):
            accept(proposal_of([A], weights), scores, [0.5], STANDARD)
        with pytest.raises(InvalidProposal, match="weights"):
            score_row(np.zeros(2, np.float32), target_row(A, weights))

    @pytest.mark.parametrize(
        ("num_probs", "num_replacements", "num_uniforms"), [(1, 3, 2), (2, 2, 2), (2, 3, 1)]
    )
    def test_shapes_that_disagree_are_an_error(self, num_probs, num_replacements, num_uniforms):
        """K drafts want K probabilities, K + 1 replacements, K uniforms."""
        scores = TargetScores((1.0,) * num_probs, tuple(range(num_replacements)))
        proposal = proposal_of([A, B], (0.5, 0.5), (0.5, 0.5))
        with pytest.raises(InvalidProposal, match="wanted|need"):
            accept(proposal, scores, [0.5] * num_uniforms, STANDARD)
        with pytest.raises(InvalidProposal, match="rows of q"):
            draft_token_probs(Proposal((A,), proposal.draft_probs))

    @pytest.mark.parametrize("drafted", [-1, 3, 2**31 - 1])
    def test_B035_an_invalid_id_is_a_rejection_with_the_residual_from_q(self, drafted):
        """q with mass on an id outside the vocabulary: rejected, and a valid id replaces it."""
        ids = np.array([drafted, A], np.int32)
        weights = np.array([0.7, 0.3], np.float32)
        seen = set()
        for seed in range(200):
            row = TargetRow(params(seed=seed), 10, 10, 0, drafted, ids, weights)
            score = score_distribution(distribution_of(0.3, 0.2, 0.5), row)
            assert score.target_prob == 0.0
            seen.add(score.replacement_token_id)
            proposal = Proposal((drafted,), SparseProbs(ids[None], weights[None]))
            scores = TargetScores((0.0,), (score.replacement_token_id, 0))
            assert accept(proposal, scores, [0.0], STANDARD).num_accepted == 0
        assert seen == {B, C}  # p - q leaves nothing of A

    def test_padding_may_name_any_id(self):
        """Padding entries of weight 0 change neither the score nor the draw, even for real ids."""
        logits = logits_of(0.5, 0.3, 0.2)
        plain = TargetRow(
            params(), 9, 9, 0, B, np.array([1, 2], np.int32), np.array([3, 1], np.float32)
        )
        padded = TargetRow(
            params(),
            9,
            9,
            0,
            B,
            np.array([1, 2, 1, 0, -1], np.int32),
            np.array([3, 1, 0, 0, 0], np.float32),
        )
        assert score_row(logits, plain) == score_row(logits, padded)

    def test_q_equal_to_p_leaves_no_residual_and_falls_back_to_p(self):
        """p = q: never rejected for real, and the (unreachable) replacement is still valid."""
        p = distribution_of(0.5, 0.25, 0.0, 0.25)
        left = residual(p, np.arange(4, dtype=np.int32), np.array([0.5, 0.25, 0.0, 0.25]))
        assert left.tolist() == p.probs.tolist()
        score = score_distribution(p, target_row(A, (0.5, 0.25, 0, 0.25)))
        assert score.replacement_token_id in {0, 1, 3}

    def test_the_draw_comes_from_the_residual_under_the_replace_key(self):
        """The replacement is the inverse CDF of (p - q)+ at the REPLACE uniform of this row."""
        p, q = (0.1, 0.2, 0.3, 0.4), (0.4, 0.1, 0.3, 0.2)
        for row in range(30):
            u = uniform(5, 0, 10, row, Purpose.REPLACE)
            expected = B if u < 1 / 3 else 3
            score = score_distribution(distribution_of(*p), target_row(A, q, row=row))
            assert score.replacement_token_id == expected

    def test_B029_inputs_are_not_written(self):
        """Read-only p and q work, twice, with the same result."""
        ids, weights = np.array([[0, 1]], np.int32), np.array([[0.5, 0.5]], np.float32)
        logits = logits_of(0.7, 0.3)
        for array in (ids, weights, logits):
            array.setflags(write=False)
        row = TargetRow(params(), 3, 3, 0, A, ids[0], weights[0])
        assert score_row(logits, row) == score_row(logits, row)
        proposal = Proposal((A,), SparseProbs(ids, weights))
        scores = TargetScores((0.3,), (1, 2))
        verdicts = [accept(proposal, scores, np.array([0.5]), STANDARD) for _ in range(2)]
        assert verdicts[0] == verdicts[1]


class TestInverseCdf:
    def test_ends_of_the_cdf(self):
        """u = 0 and the largest u below 1 fall on ids with weight, whatever stands at the ends."""
        weights = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
        assert inverse_cdf(weights, 0.0) == 1
        assert inverse_cdf(weights, 1.0 - 2.0**-53) == 3

    def test_rounding_at_the_end_never_leaves_the_support(self):
        """For many lengths of rounding-prone weights and the largest u, the weight is > 0."""
        largest = 1.0 - 2.0**-53
        for n in range(1, 300):
            weights = np.concatenate([np.full(n, 0.1), np.zeros(3)])
            index = inverse_cdf(weights, largest)
            assert 0 <= index < n
            tiny = np.concatenate([weights, [5e-324]])
            assert tiny[inverse_cdf(tiny, largest)] > 0

    def test_each_id_owns_its_share(self):
        """The index changes exactly where the cumulative weight is reached."""
        weights = np.array([1, 2, 1], np.float32)
        draws = [inverse_cdf(weights, u) for u in (0, 0.2499, 0.25, 0.7499, 0.75, 0.9999)]
        assert draws == [0, 0, 1, 1, 2, 2]


class TestGreedyAndCoupled:
    def test_B004_greedy_emits_the_argmax_whatever_q_says(self):
        """Draft picks a (p = .3), the target's argmax is b (p = .5): b is committed."""
        logits = logits_of(0.3, 0.5, 0.2)
        for temperature in (0.0, 1e-6):
            row = TargetRow(params(GREEDY, temperature=temperature), 4, 4, 0, A)
            score = score_row(logits, row)
            assert score.replacement_token_id == B
            assert score.target_prob == 0.0
            scores = TargetScores((score.target_prob,), (score.replacement_token_id, C))
            assert accept(proposal_of([A]), scores, [], GREEDY) == Verification(0, B)

    def test_B005_greedy_output_does_not_depend_on_k_or_draft(self):
        """Random target and draft tables: every K commits the target's own argmax chain."""
        rng = np.random.default_rng(2)
        target = rng.normal(size=(6, 6)).astype(np.float32)
        drafts = [rng.normal(size=(6, 6)).astype(np.float32), target]
        chain = [0]
        for _ in range(12):
            chain.append(int(target[chain[-1]].argmax()))
        for draft, k in itertools.product(drafts, (0, 1, 2, 3, 5, 8)):
            assert speculate(params(GREEDY, temperature=0.0), target, draft, k, 12) == chain

    def test_coupled_same_seed_same_tokens_for_any_k_and_draft(self):
        """K = 0, 1, 4 and three drafts commit the same tokens, seed by seed; seeds differ."""
        rng = np.random.default_rng(3)
        target = rng.normal(size=(6, 6)).astype(np.float32)
        drafts = [target, rng.normal(size=(6, 6)).astype(np.float32), np.zeros((6, 6), np.float32)]
        texts = set()
        for seed in range(3):
            p = params(COUPLED, seed=seed, temperature=0.9, top_p=0.95)
            expected = speculate(p, target, drafts[0], 0, 10)
            for draft, k in itertools.product(drafts, (1, 4)):
                assert speculate(p, target, draft, k, 10) == expected
            texts.add(tuple(expected))
        assert len(texts) == 3

    def test_coupled_draft_equal_to_the_target_is_always_accepted(self):
        """The shared noise makes the draft's own draw the target's draw."""
        logits = np.random.default_rng(4).normal(size=40).astype(np.float32)
        for position in range(50):
            p = params(COUPLED)
            draw = propose_row(logits, DraftRow(p, position, 0, position))
            assert draw.support_token_ids is None
            row = TargetRow(p, position, 0, position, draw.token_id)
            assert score_row(logits, row).target_prob == 1.0

    def test_a_standard_rule_at_temperature_zero_is_greedy(self):
        """Temperature decides: no q is asked for or sent."""
        logits = logits_of(0.2, 0.8)
        assert propose_row(logits, DraftRow(params(temperature=0.0), 1, 1, 0)).token_id == B
        assert score_row(logits, TargetRow(params(temperature=0.0), 1, 1, 0, B)).target_prob == 1.0


def speculate(p, target, draft, k, num_tokens):
    """Whole rounds over Markov tables of logits, starting from token 0."""
    tokens = [0]
    while len(tokens) <= num_tokens:
        committed, drafted, draws = len(tokens), [], []
        for row in range(k):
            state = ([*tokens, *drafted])[-1]
            draws.append(propose_row(draft[state], DraftRow(p, committed + row, committed, row)))
            drafted.append(draws[-1].token_id)
        states = [tokens[-1], *drafted]
        scores = [
            score_row(
                target[states[row]],
                TargetRow(
                    p,
                    committed + row,
                    committed,
                    row,
                    drafted[row] if row < k else None,
                    draws[row].support_token_ids if row < k else None,
                    draws[row].support_weights if row < k else None,
                ),
            )
            for row in range(k + 1)
        ]
        verdict = accept(
            Proposal(tuple(drafted), None),
            TargetScores(
                tuple(score.target_prob for score in scores[:k]),
                tuple(score.replacement_token_id for score in scores),
            ),
            uniforms(p.seed, p.choice, committed, k, Purpose.ACCEPT),
            p.rule,
        )
        tokens += [*drafted[: verdict.num_accepted], verdict.next_token_id]
    return tokens[: num_tokens + 1]


class Untouchable:
    """Uniforms that must not be looked at."""

    def __len__(self):
        return 9

    def __getitem__(self, row):
        raise AssertionError(f"row {row} was drawn")


class TestUniformsAreDrawnOnlyWhereTheyDecide:
    def test_p_of_at_least_q_accepts_without_a_draw(self):
        """min(1, p / q) = 1 needs no u; the largest u there is would have accepted too."""
        rng = np.random.default_rng(3)
        largest = [1.0 - 2.0**-53] * 3
        for _ in range(300):
            q = rng.random((3, 4)).astype(np.float32) * np.float32(10.0 ** -rng.integers(0, 38))
            proposal = proposal_of([0, 1, 2], *q)
            own = draft_token_probs(proposal)
            for p in (own, [min(1.0, x * 1.5) for x in own]):
                scores = TargetScores(p, (7, 7, 7, 8))
                verdict = accept(proposal, scores, Untouchable(), STANDARD)
                assert verdict == Verification(3, 8)
                for x, y in zip(own, p, strict=True):
                    assert largest[0] * x < y

    def test_p_below_q_draws_the_rows_up_to_the_rejection(self):
        """The decision is the one made over all of the round's uniforms."""
        rng = np.random.default_rng(4)
        for committed in range(200):
            proposal = proposal_of([0, 1, 2], *rng.random((3, 4)))
            scores = TargetScores((rng.random(3) * 0.6).tolist(), (5, 6, 7, 8))
            key = (9, 1, committed, 3, Purpose.ACCEPT)
            u, q, p = uniforms(*key), draft_token_probs(proposal), scores.target_probs
            rejected = [i for i in range(3) if u[i] * q[i] >= p[i]]
            verdict = accept(proposal, scores, RoundUniforms(*key), STANDARD)
            assert verdict.num_accepted == (rejected[0] if rejected else 3)


class TestDraftSide:
    def test_q_is_the_drafts_own_top_k_most_likely_first(self):
        """The support is cut and ranked by (logit, id); weights are exp(l - max) in float32."""
        logits = np.array([1.0, 3.0, 1.0, 2.0, 1.0], np.float32)
        draw = propose_row(logits, DraftRow(params(), 3, 3, 0), draft_sample_top_k=3)
        assert draw.support_token_ids.tolist() == [1, 3, 0]
        assert (
            draw.support_weights.tolist() == np.exp(np.float64([0, -1, -2])).astype("f4").tolist()
        )
        assert draw.support_weights.dtype == np.float32

    def test_the_draft_token_is_drawn_from_those_very_weights(self):
        """The inverse CDF over the wire's weights, in wire order, at the DRAFT uniform."""
        logits = np.random.default_rng(5).normal(size=90).astype(np.float32)
        for row in range(30):
            draw = propose_row(logits, DraftRow(params(), 8 + row, 8, row))
            assert len(draw.support_token_ids) == 64
            u = uniform(5, 0, 8, row, Purpose.DRAFT)
            index = inverse_cdf(draw.support_weights, u)
            assert draw.token_id == draw.support_token_ids[index]

    def test_a_cut_head_names_real_ids(self):
        """Columns are translated, and coupled noise belongs to the id, not to the column."""
        ids = np.array([3, 50, 700, 40_000])
        logits = np.array([0.1, 0.4, 0.3, 0.2], np.float32)
        full = np.full(49_152, -np.inf, np.float32)
        full[ids] = logits
        for rule in (STANDARD, COUPLED, GREEDY):
            p = params(rule, temperature=0.0 if rule is GREEDY else 1.0)
            for position in range(5):
                row = DraftRow(p, position, 0, position)
                cut, whole = propose_row(logits, row, 64, ids), propose_row(full, row, 64)
                assert cut.token_id == whole.token_id
                if rule is STANDARD:
                    assert cut.support_token_ids.tolist() == whole.support_token_ids.tolist()

    def test_B031_the_request_transforms_come_before_the_drafts_top_k(self):
        """top_k 2 of the request leaves two tokens in q; the draft's own cut sees only these."""
        logits = np.arange(10, dtype=np.float32)
        draw = propose_row(logits, DraftRow(params(top_k=2), 1, 1, 0), draft_sample_top_k=5)
        assert draw.support_token_ids.tolist() == [9, 8]

    def test_weights_that_float32_flushes_are_not_in_q(self):
        """A token 200 nats down has weight 0 in float32: it can never be drawn, nor is it sent."""
        draw = propose_row(np.array([0, -200, -1], np.float32), DraftRow(params(), 1, 1, 0))
        assert draw.support_token_ids.tolist() == [0, 2]
        assert (draw.support_weights > 0).all()


def test_B037_rows_of_mixed_infinities_give_a_valid_id_or_raise():
    """Rows drawn from {finite, -inf, +inf, NaN}: a finite id comes back, or UnusableLogits."""
    rng = np.random.default_rng(6)
    outcomes = set()
    for trial in range(400):
        values = rng.choice([0.0, 1.0, -np.inf, np.inf, np.nan], 5, p=[0.3, 0.2, 0.4, 0.05, 0.05])
        logits = values.astype(np.float32)
        bad = np.isnan(logits).any() or np.isposinf(logits).any() or not np.isfinite(logits).any()
        for rule in AcceptanceRule:
            p = params(rule, seed=trial, temperature=0.0 if rule is GREEDY else 1.0)
            row = TargetRow(p, 1, 1, 0, None)
            if bad:
                with pytest.raises(UnusableLogits):
                    score_row(logits, row)
            else:
                assert np.isfinite(logits[score_row(logits, row).replacement_token_id])
            outcomes.add(bool(bad))
    assert outcomes == {True, False}


def test_the_target_never_emits_what_its_filters_removed():
    """B031: top_k, top_p on the target; a draft without filters; only kept ids are ever named."""
    logits = np.random.default_rng(7).normal(size=12).astype(np.float32)
    for seed in range(200):
        draft = propose_row(logits, DraftRow(params(seed=seed), 1, 1, 0))
        p = params(seed=seed, top_k=3, top_p=0.5, temperature=0.7)
        kept = transform(logits, p).token_ids
        row = TargetRow(p, 1, 1, 0, draft.token_id, draft.support_token_ids, draft.support_weights)
        score = score_row(logits, row)
        assert score.replacement_token_id in kept
        assert (score.target_prob > 0) == (draft.token_id in kept)
