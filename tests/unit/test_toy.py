"""The toy model: its law is enumerable, and it reads what the pool holds."""

import numpy as np
import pytest

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.model.runner import SequenceSlice
from specserve.model.toy import ToySpec, toy_logits
from specserve.model.toy_runner import ToyRunner
from specserve.model.toy_tokenizer import ToyTokenizer


def toy(model: str = "toy:vocab_size=8", **config: object) -> ToyRunner:
    return ToyRunner.from_spec(
        EngineConfig.model_validate({"model": model, "block_size": 4, **config})
    )


def test_a_spec_reads_its_keys_and_keeps_defaults():
    spec = ToySpec.parse("toy:vocab_size=5,order=3,noise=0.5")
    assert (spec.vocab_size, spec.order, spec.noise, spec.seed) == (5, 3, 0.5, 7)
    assert ToySpec.parse("toy:") == ToySpec()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("toy:vocabsize=3", "did you mean 'vocab_size'"),
        ("toy:stepms=3", "did you mean 'step_ms'"),
        ("toy:order=two", "order='two'"),
        ("toy:vocab_size=1", "vocab_size must be at least 2"),
    ],
)
def test_a_wrong_spec_names_the_right_key(model, message):
    with pytest.raises(ConfigurationError, match=message):
        ToySpec.parse(model)


def test_logits_depend_on_the_last_order_tokens_alone():
    spec = ToySpec(vocab_size=8, order=2)
    assert np.array_equal(toy_logits(spec, [1, 2, 3]), toy_logits(spec, [7, 2, 3]))
    assert not np.array_equal(toy_logits(spec, [1, 2, 3]), toy_logits(spec, [1, 3, 3]))
    assert not np.array_equal(toy_logits(spec, [3]), toy_logits(spec, [0, 3]))


def test_noise_changes_the_draft_a_little():
    target, draft = ToySpec(vocab_size=64), ToySpec(vocab_size=64, noise=0.1)
    difference = toy_logits(draft, [1, 2]) - toy_logits(target, [1, 2])
    assert 0 < np.abs(difference).max() < 0.5


def test_the_runner_answers_the_table_at_any_chunking_and_block_order():
    runner, tokens = toy(), [3, 1, 4, 1, 5, 2, 6]
    expected = [toy_logits(ToySpec(vocab_size=8), tokens[: i + 1]) for i in range(7)]
    whole = runner.forward([SequenceSlice(tokens, 0, [9, 2], 7)])
    assert np.array_equal(whole.numpy(), expected)
    assert runner.forward([SequenceSlice(tokens[:3], 0, [7], 0)]).shape == (0, 8)
    rest = runner.forward([SequenceSlice(tokens[3:], 3, [7, 0], 2)])
    assert np.array_equal(rest.numpy(), expected[5:])


def test_the_pool_is_what_counts():
    """A wrong block table gives wrong logits, and an unwritten slot is a fault."""
    runner = toy()
    runner.forward([SequenceSlice([1, 2, 3], 0, [0], 1), SequenceSlice([5, 5, 5], 0, [1], 1)])
    right = runner.forward([SequenceSlice([4], 3, [0], 1)]).numpy()
    wrong = runner.forward([SequenceSlice([4], 3, [1], 1)]).numpy()
    assert not np.array_equal(right, wrong)
    with pytest.raises(RuntimeError, match="never written"):
        runner.forward([SequenceSlice([4], 3, [2], 1)])
    runner.copy_block(0, 3)
    assert np.array_equal(runner.forward([SequenceSlice([4], 3, [3], 1)]).numpy(), right)


def test_injected_rows_and_a_cut_head():
    runner = toy("toy:vocab_size=8,nan_token=5,inf_token=6", draft_vocab_size=3)
    logits = runner.forward([SequenceSlice([5, 6, 1], 0, [0], 3)]).numpy()
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[2]).all()
    assert runner.logit_token_ids is not None
    assert runner.logit_token_ids.tolist() == [0, 1, 2]
    whole = toy("toy:vocab_size=8,inf_token=6").forward([SequenceSlice([6], 0, [0], 1)])
    assert np.isposinf(whole.numpy()).sum() == 1


def test_limits_follow_the_pool():
    assert toy(num_kv_blocks=3).info.max_model_len == 12
    assert toy(max_model_len=9).info.max_model_len == 9
    assert toy().info.weights_fingerprint != toy("toy:seed=8").info.weights_fingerprint


def test_a_second_id_can_end_a_text_too():
    """Both are special, and an id outside the vocabulary is refused."""
    tokenizer = ToyTokenizer(ToySpec.parse("toy:vocab_size=24,second_eos=23"))

    assert tokenizer.eos_token_ids == (0, 23)
    assert tokenizer.token_table().special_token_ids == {0, 23}
    with pytest.raises(ConfigurationError, match="second_eos must be below vocab_size"):
        ToySpec.parse("toy:vocab_size=24,second_eos=24")
