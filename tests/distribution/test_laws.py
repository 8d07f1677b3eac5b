"""Speculative text follows the law of the target alone: whole sequences, exactly enumerated.

Each law test draws 100,000 sequences and compares them with the enumerated law of target-only
sampling by chi-square at nominal odds of 1e-7 (false alarm below 1e-6 a test; seeds are fixed, so a
pass stays a pass). Sequences of probability 0 must never appear. Each planted fault must push the
same statistic over the same bound.
"""

import dataclasses

import numpy as np
import pytest

from distribution.simulator import (
    Faults,
    Pair,
    exact_law,
    fit,
    fixed,
    simulate,
)
from specserve.speculation.acceptance import accept
from specserve.speculation.draws import coupled_choices
from specserve.speculation.philox import philox4x32_blocks
from specserve.speculation.randomness import Purpose, exponential_from_words, uniforms
from specserve.speculation.scoring import DraftRow, TargetRow, propose_row, score_row
from specserve.speculation.transforms import transform
from specserve.speculation.types import (
    AcceptanceRule,
    Proposal,
    SamplingParams,
    SparseProbs,
    TargetScores,
)

NUM_SEQUENCES = 100_000
STANDARD = SamplingParams(AcceptanceRule.STANDARD, 0, 0)
COUPLED = SamplingParams(AcceptanceRule.COUPLED, 0, 0)


def logits_of(rows):
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float64)).astype(np.float32)


def pair_of(p, q, **changes):
    """A Markov pair from rows of probabilities."""
    defaults = {"target_params": STANDARD, "draft_params": STANDARD}
    return Pair(logits_of(p), logits_of(q), **(defaults | changes))


TARGET = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]
DRAFT = [[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]]
PAIR = pair_of(TARGET, DRAFT)


def adaptive(view):
    """K from committed tokens and their number alone."""
    last = view.tokens[np.arange(len(view.committed_length)), view.committed_length - 1]
    return (last + view.committed_length + view.last_num_accepted) % 5


def lossy(view):
    """K = 3, and three proposals in ten are late or lost: a target-only round instead."""
    return np.where(view.clock < 0.3, 0, 3)


def from_discarded(view):
    """The fault: K looks at the second token of the last proposal, verified or not."""
    return np.where(view.last_drafted[:, min(1, view.last_drafted.shape[1] - 1)] == 0, 0, 3)


def assert_law(pair, policy, max_k, length=4):
    """The speculative law equals the enumerated one."""
    result = fit(simulate(pair, NUM_SEQUENCES, length, policy, max_k), exact_law(pair, length))
    assert result.holds, result


def assert_caught(pair, policy, max_k, faults, length=4):
    """The same statistic over the same bound: the fault shows, and without it nothing does."""
    law = exact_law(pair, length)
    result = fit(simulate(pair, NUM_SEQUENCES, length, policy, max_k, faults), law)
    assert not result.holds, result


def speculate_publicly(pair, seed, length, k_of_round):
    """Whole rounds of one sequence by the public functions alone."""
    target_params = dataclasses.replace(pair.target_params, seed=seed)
    draft_params = dataclasses.replace(pair.draft_params, seed=seed)
    tokens, num_accepted = [0], 0
    while len(tokens) < 1 + length:
        committed, states, draws = len(tokens), [tokens[-1]], []
        for row in range(k_of_round(tokens, num_accepted)):
            draft_row = DraftRow(draft_params, committed + row, committed, row)
            draws.append(
                propose_row(pair.draft_logits[states[-1]], draft_row, pair.draft_sample_top_k)
            )
            states.append(draws[-1].token_id)
        scores = [
            score_row(
                pair.target_logits[state],
                TargetRow(
                    target_params,
                    committed + row,
                    committed,
                    row,
                    draws[row].token_id if row < len(draws) else None,
                    draws[row].support_token_ids if row < len(draws) else None,
                    draws[row].support_weights if row < len(draws) else None,
                ),
            )
            for row, state in enumerate(states)
        ]
        verdict = accept(
            proposal_of(draws),
            TargetScores(
                tuple(score.target_prob for score in scores[:-1]),
                tuple(score.replacement_token_id for score in scores),
            ),
            uniforms(seed, 0, committed, len(draws), Purpose.ACCEPT),
            target_params.rule,
        )
        num_accepted = verdict.num_accepted
        tokens += [*states[1 : 1 + num_accepted], verdict.next_token_id]
    return tokens[1 : 1 + length]


def proposal_of(draws):
    """Draws as they travel: rows padded to one width with weight 0."""
    if not draws or draws[0].support_token_ids is None:
        return Proposal(tuple(draw.token_id for draw in draws), None)
    width = max(len(draw.support_token_ids) for draw in draws)
    ids, weights = np.zeros((len(draws), width), np.int32), np.zeros((len(draws), width), "f4")
    for i, draw in enumerate(draws):
        ids[i, : len(draw.support_token_ids)] = draw.support_token_ids
        weights[i, : len(draw.support_weights)] = draw.support_weights
    return Proposal(tuple(draw.token_id for draw in draws), SparseProbs(ids, weights))


@pytest.mark.parametrize("top_k", [2, 64])
def test_the_simulator_commits_what_the_public_functions_commit(top_k):
    """Token for token, for random pairs, filters, fixed and adaptive K."""
    rng = np.random.default_rng(11)
    for number in range(12):
        pair = Pair(
            (rng.normal(size=(5, 5)) * 2).astype(np.float32),
            (rng.normal(size=(5, 5)) * 2).astype(np.float32),
            dataclasses.replace(STANDARD, top_p=float(rng.choice([0.7, 1.0])), temperature=0.9),
            dataclasses.replace(STANDARD, top_k=int(rng.choice([0, 4]))),
            draft_sample_top_k=top_k,
        )
        k = int(rng.integers(0, 5))
        policy, k_of_round = fixed(k), lambda tokens, accepted, k=k: k
        if number % 3 == 0:
            policy, k_of_round = (
                adaptive,
                lambda tokens, accepted: (tokens[-1] + len(tokens) + accepted) % 5,
            )
        sequences = simulate(pair, 8, 7, policy, 4, first_seed=1000 * number)
        for i, sequence in enumerate(sequences.tolist()):
            assert speculate_publicly(pair, 1000 * number + i, 7, k_of_round) == sequence


@pytest.mark.slow
class TestStandardLaw:
    @pytest.mark.parametrize("k", [0, 1, 2, 4])
    def test_fixed_k(self, k):
        """Sequences of 5 tokens: rejections, and redraws in the next rounds, are inside."""
        assert_law(PAIR, fixed(k), k, length=5)

    def test_rejection_at_the_first_position(self):
        """Draft and target barely overlap: almost every round ends at row 0."""
        assert_law(
            pair_of([[0.9, 0.08, 0.02]] * 3, [[0.02, 0.08, 0.9]] * 3),
            fixed(3),
            3,
        )

    def test_rejection_in_mid_block(self):
        """The draft is perfect after token 0 and wrong after the others: rows 1 and 2 reject."""
        assert_law(pair_of(TARGET, [TARGET[0], *DRAFT[1:]]), fixed(4), 4)

    def test_full_acceptance(self):
        """q = p: everything is accepted, the bonus token and the next round stay exact."""
        assert_law(pair_of(TARGET, TARGET), fixed(2), 2, length=5)

    def test_eos_in_a_block(self):
        """What a round commits beyond EOS is cut, and EOS itself has its probability."""
        assert_law(
            dataclasses.replace(PAIR, eos_token_id=2),
            fixed(3),
            3,
            length=5,
        )

    def test_zero_probabilities_on_either_side(self):
        """Tokens the target never emits are proposed often; tokens the draft lacks are emitted."""
        assert_law(
            pair_of(
                [[0.5, 0.0, 0.2, 0.3], [0.0, 0.5, 0.5, 0.0], [0.4, 0.1, 0.0, 0.5], [1, 0, 0, 0]],
                [[0.0, 0.6, 0.4, 0.0], [0.5, 0.5, 0.0, 0.0], [0.3, 0.0, 0.7, 0.0], [0, 0, 0, 1]],
            ),
            fixed(3),
            3,
        )

    def test_B118_k_adapts_to_committed_tokens(self):
        """K from 0 to 4 chosen by what is committed and how much was accepted."""
        assert_law(PAIR, adaptive, 4, length=5)

    def test_lost_proposals(self):
        """Proposals lost by the clock, whole and unseen, become target-only rounds."""
        assert_law(PAIR, lossy, 3, length=5)

    def test_a_draft_that_stops_when_it_is_unsure(self):
        """The stop is decided by the rows of tokens that are kept: rounds of 1 to 4 tokens."""
        unsure = pair_of(TARGET, DRAFT, confidence_threshold=0.25)
        assert_law(unsure, fixed(4), 4, length=5)

    def test_a_draft_cut_to_its_own_top_k(self):
        """The draft samples from its 2 most likely tokens; the wire carries all of that q."""
        assert_law(dataclasses.replace(PAIR, draft_sample_top_k=2), fixed(3), 3)

    def test_B017_a_draft_that_takes_its_argmax_reports_a_one_hot_q(self):
        """A one-token support is an argmax proposal with its honest q."""
        assert_law(dataclasses.replace(PAIR, draft_sample_top_k=1), fixed(3), 3)

    def test_B019_little_overlap_six_tokens(self):
        """The case's p and q with K = 4: marginals and pairs follow the target."""
        pair = pair_of(
            [[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]] * 6, [[0.05, 0.05, 0.1, 0.1, 0.2, 0.5]] * 6
        )
        assert_law(pair, fixed(4), 4)

    def test_B031_filters_on_the_target_none_on_the_draft(self):
        """temperature .7, top_k 3, top_p .9 against a draft at 1 without filters."""
        rng = np.random.default_rng(12)
        pair = Pair(
            rng.normal(size=(5, 5)).astype(np.float32),
            rng.normal(size=(5, 5)).astype(np.float32),
            dataclasses.replace(STANDARD, temperature=0.7, top_k=3, top_p=0.9),
            STANDARD,
        )
        assert_law(pair, fixed(3), 3)

    def test_B035_ids_outside_the_vocabulary(self):
        """A third of q lies on an id the target lacks: rejected with the residual from that q."""
        assert_law(dataclasses.replace(PAIR, stray_weight=1.0), fixed(3), 3)


@pytest.mark.slow
class TestPlantedFaults:
    def test_keys_by_position_with_k_from_discarded_rows(self):
        """A redrafted position sees the draw that chose K: the reason for keying by round."""
        assert_caught(PAIR, from_discarded, 3, Faults(keys_by_position=True))

    def test_k_from_discarded_rows_is_harmless_with_round_keys(self):
        """The discarded rows' draws are never used again, so even this policy keeps the law."""
        assert_law(PAIR, from_discarded, 3)

    def test_B013_merged_purposes(self):
        """Draft, accept and replace draws of one stream are correlated."""
        assert_caught(PAIR, fixed(3), 3, Faults(merged_purposes=True))

    def test_truncating_a_low_q_token_after_drawing_it(self):
        """Stop before drawing a token, or keep it: cutting it afterwards biases the law."""
        assert_caught(PAIR, fixed(3), 3, Faults(truncate_below=0.25))

    def test_residual_taken_from_p(self):
        """Recovering from p favours what the draft proposes and the target rejects."""
        assert_caught(PAIR, fixed(3), 3, Faults(residual_from_p=True))

    def test_B028_another_rows_q(self):
        """q one row further along is not what the token was drawn from."""
        assert_caught(PAIR, fixed(3), 3, Faults(q_of_other_row=True))

    def test_B017_argmax_drafts_under_a_soft_q(self):
        """Proposing the argmax while reporting the whole softmax."""
        assert_caught(PAIR, fixed(3), 3, Faults(draft_takes_argmax=True))

    def test_accept_on_equality(self):
        """With u = 0 injected, `<=` emits tokens of probability 0, and `<` never does."""
        pair = pair_of([[0.5, 0.5, 0.0]] * 3, [[0.2, 0.2, 0.6]] * 3)
        law = exact_law(pair, 4)
        for planted in (True, False):
            faults = Faults(accept_u=0.0, accept_on_equality=planted)
            result = fit(simulate(pair, 1000, 4, fixed(2), 2, faults), law)
            assert (result.num_impossible > 0) == planted


@pytest.mark.slow
def test_coupled_law():
    """100,000 seeds of 5 tokens follow the target: the noise race is an exact draw.

    Coupled tokens depend on (seed, position) alone, whatever K and the draft are (next test), so
    the law of K = 0 is the law of all.
    """
    size, length = 3, 5
    seeds = np.arange(1, NUM_SEQUENCES + 1)
    log_p = [transform(row, COUPLED).log_weights for row in PAIR.target_logits]
    tokens = np.zeros((NUM_SEQUENCES, length + 1), np.int64)
    for position in range(1, length + 1):
        words = philox4x32_blocks(0, position, 0, int(Purpose.NOISE), seeds)[:size].T
        scores = np.array(log_p)[tokens[:, position - 1]]
        tokens[:, position] = (scores - np.log(exponential_from_words(words))).argmax(axis=1)
    for seed in range(1, 40):
        assert speculate_coupled(seed, TARGET, 0, length) == tokens[seed - 1, 1:].tolist()
    result = fit(tokens[:, 1:], exact_law(PAIR, length))
    assert result.holds, result


def speculate_coupled(seed, draft, k, length):
    """One coupled sequence over the usual target by the public functions."""
    pair = pair_of(TARGET, draft, target_params=COUPLED, draft_params=COUPLED)
    return speculate_publicly(pair, seed, length, lambda tokens, accepted: k)


@pytest.mark.slow
def test_coupled_same_seed_same_tokens_for_any_k_and_any_draft():
    """K = 0, 1, 2, 4, 8 with a good, a bad and a perfect draft: one text a seed."""
    for seed in range(15):
        expected = speculate_coupled(seed, DRAFT, 0, 10)
        for draft in (DRAFT, TARGET, [[1 / 3] * 3] * 3):
            for k in (1, 2, 4, 8):
                assert speculate_coupled(seed, draft, k, 10) == expected


def test_coupled_accepts_as_often_as_daliri_et_al_prove():
    """Draft and target agree with probability at least (1 - TV) / (1 + TV), here at 5 sigma.

    False alarm below 1e-6.
    """
    target, draft = (transform(logits_of(row), COUPLED) for row in (TARGET[0], DRAFT[0]))
    keys = [(seed, 0, 7) for seed in range(4000)]
    matches = np.mean(
        [
            a == b
            for a, b in zip(
                coupled_choices(keys, [target] * 4000),
                coupled_choices(keys, [draft] * 4000),
                strict=True,
            )
        ]
    )
    distance = 0.5 * np.abs(target.probs - draft.probs).sum()
    assert matches > (1 - distance) / (1 + distance) - 5 * 0.5 / np.sqrt(4000)
