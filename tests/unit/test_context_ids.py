"""A cut head's rows have columns for the ids of their own session's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from specserve.config import EngineConfig
from specserve.model.context_ids import MAX_CONTEXT_IDS, ContextIds, HeadColumns
from specserve.model.engine import Engine
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.messages import ProposeReply
from specserve.model.runner import SequenceSlice
from specserve.model.toy_runner import ToyRunner
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs
from support.engines import Caller
from support.engines import run as run_engine
from support.tiny_models import VOCAB_SIZE, save_tiny


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int64)


def test_those_seen_last_are_kept_and_the_heads_own_are_not() -> None:
    is_in_head = np.zeros(4 * MAX_CONTEXT_IDS, np.bool_)
    is_in_head[:10] = True
    context = ContextIds(is_in_head)
    text = TokenChain()
    context.follow(text, 0, (3, 40, 30, 9, 40))
    assert context.ids.tolist() == [30, 40]
    before = context.ids
    text.append((3, 40, 30, 9, 40))
    context.follow(text, 5, (30, 2))
    assert context.ids is before
    text.append((30, 2))
    context.follow(text, 7, range(100, 100 + MAX_CONTEXT_IDS - 1))
    assert context.ids.tolist() == [30, *range(100, 100 + MAX_CONTEXT_IDS - 1)]


def test_texts_in_pieces_make_the_same_columns() -> None:
    """A session that is opened anew brings its whole text at once; before, some of it was drafted
    and is kept, and some came twice because a reply was late.
    """
    random = np.random.default_rng(3)
    is_in_head = random.random(5000) < 0.3
    text = random.integers(0, 5000, 6000).tolist()
    whole, pieces = ContextIds(is_in_head), ContextIds(is_in_head)
    whole.follow(TokenChain(), 0, text)
    end = 0
    while end < len(text):
        keep = max(0, end + int(random.integers(-20, 20)))
        end = min(len(text), max(end, keep) + int(random.integers(1, 100)))
        pieces.follow(TokenChain(text[:keep]), min(keep, end), text[min(keep, end) : end])
    assert np.array_equal(whole.ids, pieces.ids)
    assert len(whole.ids) == MAX_CONTEXT_IDS


def test_columns_ascend_and_a_row_has_none_of_another_sequence() -> None:
    columns = HeadColumns(torch.tensor([2, 5, 9]))
    batch = [
        SequenceSlice([1], 0, (0,), 2, ids(4, 11)),
        SequenceSlice([1], 0, (0,), 0, ids(7)),
        SequenceSlice([1], 0, (0,), 1, ids(0, 4)),
    ]
    both = columns.of(batch)
    assert both.token_ids.tolist() == [0, 2, 4, 5, 9, 11]
    joined = both.join(
        torch.tensor([[1.0, 2.0, 3.0]] * 3), torch.tensor([[10.0, 20.0, 30.0]] * 3), batch
    )
    inf = torch.inf
    assert joined.tolist() == [
        [-inf, 1, 20, 2, 3, 30],
        [-inf, 1, 20, 2, 3, 30],
        [10, 1, 20, 2, 3, -inf],
    ]
    assert columns.of(batch[1:2]).token_ids.tolist() == [2, 5, 9]


def load(folder: Path, dtype: str, pack_weights: bool) -> HuggingFaceRunner:
    config = EngineConfig(
        model=str(folder), block_size=4, num_kv_blocks=16, num_threads=1, pack_weights=pack_weights
    )
    return HuggingFaceRunner.load(
        config, folder, VOCAB_SIZE, getattr(torch, dtype), torch.device("cpu")
    )


@pytest.mark.slow
@pytest.mark.parametrize("pack_weights", [True, False], ids=["packed", "transformers' own"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_more_ids_of_a_cut_head_have_the_logits_of_the_whole_head(
    tmp_path: Path, dtype: str, pack_weights: bool, kind: str
) -> None:
    folder, cut_folder = tmp_path / "whole", tmp_path / "cut"
    save_tiny(folder, kind, **({"hidden_size": 128} if kind == "llama" else {}))
    shutil.copytree(folder, cut_folder)
    kept, more = [2, 5, 17, 40], ids(3, 39, 63)
    (cut_folder / "draft_vocab.json").write_text(json.dumps({"token_ids": kept}))
    cut, whole = (load(path, dtype, pack_weights) for path in (cut_folder, folder))
    assert cut.takes_context_ids
    text = list(range(1, 9))
    batch = [SequenceSlice(text, 0, (0, 1), 3, more), SequenceSlice(text, 0, (2, 3), 1)]
    logits, reference = cut.forward(batch), whole.forward(batch)
    token_ids = cut.columns(batch)
    assert token_ids.tolist() == [2, 3, 5, 17, 39, 40, 63]
    torch.testing.assert_close(logits[:3], reference[:3, token_ids], rtol=1e-2, atol=1e-2)
    banned = logits[3].isinf()
    assert token_ids[banned].tolist() == more.tolist()
    torch.testing.assert_close(
        logits[3, ~banned], reference[3, token_ids[~banned]], rtol=1e-2, atol=1e-2
    )
    assert not whole.takes_context_ids
    assert whole.columns(batch) is None


def test_a_draft_with_a_cut_head_proposes_what_stands_in_the_text() -> None:
    """Without it the toy's head of 3 ids could never say 7."""
    config = EngineConfig(model="toy:vocab_size=12,seed=4", draft_vocab_size=3, num_kv_blocks=64)
    said: set[int] = set()
    engine = Engine(ToyRunner.from_spec(config), config, role="draft")
    for seed in range(24):
        session = Caller(f"s{seed}", [7, 9, 11, seed % 12])
        (reply,) = run_engine(engine, session.propose(6))
        assert isinstance(reply, ProposeReply)
        assert set(reply.draft_token_ids) <= {0, 1, 2, 7, 9, 11, seed % 12}
        said.update(reply.draft_token_ids)
    assert said & {7, 9, 11}


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_what_was_drafted_ahead_has_the_columns_that_the_call_has(rule: AcceptanceRule) -> None:
    """Hit or miss, alone or beside another session's text, opened anew or not: one proposal."""
    greedy = rule is AcceptanceRule.GREEDY
    sampling = SamplingParams(rule, 5, 0, temperature=0.0 if greedy else 1.0)
    config = EngineConfig(
        model="toy:vocab_size=12,seed=4,sharpness=1.5", draft_vocab_size=4, num_kv_blocks=256
    )
    ahead, plain = (
        Engine(ToyRunner.from_spec(config), config, role="draft", num_cached_outcomes=count)
        for count in (8, 0)
    )
    random = np.random.default_rng(1)
    callers = [Caller("s", [1, 7, 2], sampling) for _ in (ahead, plain)]
    beside = Caller("beside", [5, 6, 8, 9], sampling)
    said: set[int] = set()
    for number in range(60):
        if number % 7 == 6:
            callers[1].reopen()
        ahead_call, plain_call = (caller.propose(3) for caller in callers)
        replies = []
        for engine, call in ((ahead, ahead_call), (plain, plain_call)):
            engine.submit(call)
            if engine is plain:
                engine.submit(beside.propose(3))
            replies.append(run_until(engine, call.call_id))
        first, second = replies
        assert first.draft_token_ids == second.draft_token_ids
        if rule is AcceptanceRule.STANDARD:
            assert first.draft_probs is not None
            assert second.draft_probs is not None
            for row in range(len(first.draft_token_ids)):
                assert support(first.draft_probs, row) == support(second.draft_probs, row)
        drafted = first.draft_token_ids
        said.update(drafted)
        num_accepted = int(random.integers(0, len(drafted) + 1))
        then = int(random.choice([0, 1, 2, 3, 7] if number % 3 else np.arange(12)))
        for caller, reply in zip(callers, replies, strict=True):
            caller.heard(reply, num_accepted)
            caller.committed.append([*drafted[:num_accepted], then])
    counts = ahead.load.outcomes
    assert counts is not None
    assert counts.num_hits > 10
    assert said - {0, 1, 2, 3}


def support(probs: SparseProbs, row: int) -> dict[int, float]:
    """Return one row's q, without padding."""
    pairs = zip(probs.token_ids[row].tolist(), probs.weights[row].tolist(), strict=True)
    return {token_id: weight for token_id, weight in pairs if weight > 0}


def run_until(engine: Engine, call_id: int) -> ProposeReply:
    """Run an engine until it has nothing to do; return one call's reply."""
    found: list[ProposeReply] = []
    while engine.wait_s() == 0.0:
        output = engine.step()
        for reply in output.replies if output else ():
            assert isinstance(reply, ProposeReply)
            if reply.call_id == call_id:
                found.append(reply)
    (reply,) = found
    return reply
