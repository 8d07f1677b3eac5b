"""Constraints over real forwards, float32 and compiled bfloat16: blocks say what steps say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from specserve.config import EngineConfig
from specserve.model.compiled.decoder import CompiledDecoder
from specserve.model.compiled.kernels import processor_has_kernels
from specserve.model.engine import Engine
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.messages import ProposeReply, Role, VerifyReply
from specserve.model.runner import SequenceSlice
from specserve.speculation.randomness import exponential_noise
from specserve.speculation.types import AcceptanceRule, SamplingParams
from support.constrained import Wanted, slow_row
from support.engines import Caller, run
from support.tiny_models import save_tiny

CPU = torch.device("cpu")
PROMPT = [5, 9, 9, 14, 23, 5]
NUM_TOKENS = 28
WANTED = (
    Wanted(repetition_penalty=1.3, frequency_penalty=0.4, eos_token_ids=[1]),
    Wanted(
        presence_penalty=1.2,
        min_tokens=20,
        stop_token_ids=[7],
        logit_bias={1: 4.0, 7: 4.0, 30: 1.5},
        bad_words=[(30, 30), (12,)],
        eos_token_ids=[1],
    ),
    Wanted(allowed_token_ids=range(3, 60, 4), frequency_penalty=0.7, eos_token_ids=[1]),
)


@pytest.fixture(scope="module", params=[64, 600])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose rows are matrices of numpy, and one whose rows are tensors."""
    made = tmp_path_factory.mktemp("model")
    return save_tiny(made, "llama", hidden_size=128, vocab_size=request.param)


def load(folder: Path, dtype: torch.dtype) -> HuggingFaceRunner:
    """Load the model."""
    settings = EngineConfig(model=str(folder), block_size=4, num_kv_blocks=128, num_threads=1)
    vocab_size: int = AutoConfig.from_pretrained(folder).vocab_size
    runner = HuggingFaceRunner.load(settings, folder, vocab_size, dtype, CPU)
    assert isinstance(runner._forward, CompiledDecoder) == (dtype == torch.bfloat16)
    return runner


def engine_of(folder: Path, dtype: torch.dtype, role: Role) -> Engine:
    """Put an engine over the model."""
    settings = EngineConfig(model=str(folder), block_size=4, num_kv_blocks=128, num_threads=1)
    # A draft that samples from its whole row, like the target, misses nothing of it.
    return Engine(load(folder, dtype), settings, role=role, draft_sample_top_k=1024)


def slowly(runner: HuggingFaceRunner, wanted: Wanted, seed: int | None) -> list[int]:
    """Decode token by token, each time from the whole text and with a recount of it."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        text = [*PROMPT, *output]
        logits = runner.forward([SequenceSlice(text, 0, list(range(20)), 1)])[0]
        row = np.array(slow_row(logits.tolist(), PROMPT, output, wanted))
        if seed is not None:
            noise = exponential_noise(seed, 0, len(text), np.arange(len(row)))
            row = row - np.log(noise)
        output.append(int(row.argmax()))
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        (torch.float32, AcceptanceRule.COUPLED),
        (torch.bfloat16, AcceptanceRule.GREEDY),
        (torch.bfloat16, AcceptanceRule.COUPLED),
    ],
)
def test_blocks_steps_and_a_slow_recount_say_the_same(
    folder: Path, dtype: torch.dtype, rule: AcceptanceRule
) -> None:
    """B022: drafted blocks, decode-ahead and the brute force over whole forwards: equal tokens."""
    if dtype == torch.bfloat16 and not processor_has_kernels():
        pytest.skip("needs AVX512-BF16")
    seed = 3 if rule is AcceptanceRule.COUPLED else None
    target, draft = engine_of(folder, dtype, "target"), engine_of(folder, dtype, "draft")
    runner = load(folder, dtype)
    params = SamplingParams(rule, 3, 0, temperature=0.0 if seed is None else 1.0)
    num_rounds = num_drafted = num_accepted = 0
    for number, wanted in enumerate(WANTED):
        truth = slowly(runner, wanted, seed)
        sampling = replace(params, constraints=wanted.constraints(len(PROMPT)))
        ahead = run(
            target, Caller(f"ahead {number}", PROMPT, sampling).verify(num_decode_steps=NUM_TOKENS)
        )
        stepped = [r.replacement_token_ids[0] for r in ahead if isinstance(r, VerifyReply)]
        ends = {*wanted.stop_token_ids, *wanted.eos_token_ids}
        assert stepped == truth[: len(stepped)]
        assert len(stepped) == NUM_TOKENS or stepped[-1] in ends
        on_draft, on_target = (Caller(f"block {number}", PROMPT, sampling) for _ in range(2))
        while len(on_target.committed) < len(PROMPT) + NUM_TOKENS:
            (proposed,) = run(draft, on_draft.propose(4))
            assert isinstance(proposed, ProposeReply)
            drafted = list(proposed.draft_token_ids)
            num_rounds += 1
            if num_rounds % 3 == 0:
                drafted[2] = (drafted[2] + 1) % 60  # what follows it stands on a wrong token
            (reply,) = run(target, on_target.verify(drafted))
            assert isinstance(reply, VerifyReply)
            accepted = next((i for i, p in enumerate(reply.target_probs) if p < 1), len(drafted))
            on_target.heard(reply, accepted)
            on_draft.heard(proposed, min(accepted, 2))
            for caller in (on_draft, on_target):
                caller.committed.append(
                    [*drafted[:accepted], reply.replacement_token_ids[accepted]]
                )
            num_drafted, num_accepted = num_drafted + len(drafted), num_accepted + accepted
        emitted = on_target.committed.slice(len(PROMPT), len(PROMPT) + NUM_TOKENS)
        assert emitted == truth, wanted
    assert num_accepted > num_drafted // 2
