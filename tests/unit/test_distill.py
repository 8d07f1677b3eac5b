"""`specserve distill`: text files, loss, resumption and determinism, on a two-layer target."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specserve.model.draft_package import EMBEDDING, VOCAB_FILE
from specserve.tools.distill import DistillConfig, add_arguments, distill
from specserve.tools.distill_evaluate import expected_round, walk_rounds
from specserve.tools.distill_loss import SparseTargets, distillation_loss
from specserve.tools.distill_recipe import TrainConfig, rate_at
from specserve.tools.distill_sample import SampleConfig, Template, sample_text
from specserve.tools.distill_student import hidden_states, init_student, pack_rows
from specserve.tools.distill_text import DistillText, Row, batches, load_text, save_text
from specserve.tools.distill_train import Trainer

VOCAB_SIZE = 64
TRAIN = TrainConfig(
    num_steps=9,
    batch_tokens=60,
    warmup_steps=2,
    overlap_ramp_steps=5,
    num_averaged=3,
    average_every=2,
    num_negative_ids=8,
    held_out_every=4,
    validate_every=4,
    checkpoint_every=3,
)


def quiet(_: str) -> None:
    """Take a progress line and drop it."""


def make_target() -> LlamaForCausalLM:
    """Build a random two-layer Llama of vocabulary 64."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def make_text(num_rows: int = 16) -> DistillText:
    """Draw rows whose target probabilities are random; prompts share their first three ids."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(6, 12))
        logprobs = np.log(rng.dirichlet(np.ones(6), length)[:, :4]).astype(np.float16)
        ids = np.stack([rng.permutation(VOCAB_SIZE)[:4] for _ in range(length)])
        user = rng.integers(20, VOCAB_SIZE, int(rng.integers(3, 6)))
        rows.append(
            Row(
                prompt=np.concatenate([[1, 7, 8], user, [9]]),
                answer=ids[:, 0],
                top_ids=ids,
                top_logprobs=logprobs.astype(np.float32),
            )
        )
    return DistillText(tuple(rows))


def make_trainer(checkpoint: Path, config: TrainConfig = TRAIN) -> Trainer:
    """Build a trainer of a one-layer student on a vocabulary cut to 24 ids."""
    text = make_text()
    vocab = text.frequent_token_ids(24, (0, 1, 2))
    return Trainer(init_student(make_target(), (1,)), text, vocab, config, checkpoint, quiet)


def weights_of(student: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Copy the weights."""
    return {name: value.clone() for name, value in student.state_dict().items()}


def test_text_survives_its_file(tmp_path: Path) -> None:
    """Rows come back from the `.npz` as they were written."""
    text = make_text()
    save_text(tmp_path / "text.npz", text)
    again = load_text(tmp_path / "text.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["text.npz"]
    assert len(again.rows) == len(text.rows)
    for one, other in zip(text.rows, again.rows, strict=True):
        np.testing.assert_array_equal(one.prompt, other.prompt)
        np.testing.assert_array_equal(one.answer, other.answer)
        np.testing.assert_array_equal(one.top_ids, other.top_ids)
        np.testing.assert_array_equal(one.top_logprobs, other.top_logprobs)


def test_text_views() -> None:
    """The shared prefix, the frequent ids and the held-out pairs are what the rows say."""
    text = make_text()
    assert text.common_prefix_length == 3
    vocab = text.frequent_token_ids(10, (0, 2))
    assert vocab == tuple(sorted(vocab))
    assert {0, 2} <= set(vocab)
    assert len(vocab) <= 12
    train, held = text.held_out(4)
    assert held == (0, 1, 8, 9)
    assert sorted(train + held) == list(range(16))


def test_batches_cover_every_row_once_and_repeat_by_seed() -> None:
    """An epoch holds each row once; the same seed and epoch give the same order."""
    text = make_text()
    rows = tuple(range(16))
    first = [[id(row) for row in group] for group in batches(text, rows, 60, 1, 0)]
    again = [[id(row) for row in group] for group in batches(text, rows, 60, 1, 0)]
    other = [[id(row) for row in group] for group in batches(text, rows, 60, 1, 1)]
    assert first == again
    assert first != other
    flat = [number for group in first for number in group]
    assert sorted(flat) == sorted(id(row) for row in text.rows)


def test_packed_rows_do_not_see_each_other() -> None:
    """Hidden states of packed rows equal those of each row run alone through transformers."""
    target = make_target()
    student = init_student(target, (0, 1))
    rows = [torch.tensor([3, 4, 5, 6, 7]), torch.tensor([9, 8]), torch.tensor([1, 2, 3, 4])]
    with torch.no_grad():
        packed = hidden_states(student, pack_rows(rows))
        alone = [target.model(input_ids=row[None]).last_hidden_state[0] for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_student_takes_the_named_layers() -> None:
    """The student is the target's named layers under its frozen embedding."""
    target = make_target()
    student = init_student(target, (1,))
    torch.testing.assert_close(
        student.model.layers[0].mlp.up_proj.weight, target.model.layers[1].mlp.up_proj.weight
    )
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert EMBEDDING not in trained
    assert "model.norm.weight" in trained


def test_loss_and_its_gradient_match_autograd() -> None:
    """The fused loss equals the written-out one, gradient included, over several chunks."""
    torch.manual_seed(0)
    positions, hidden_size, num_exact, width = 300, 16, 40, 5
    hidden = torch.randn(positions, hidden_size, requires_grad=True)
    head = torch.randn(50, hidden_size)
    probs = torch.rand(positions, width)
    targets = SparseTargets(
        columns=torch.stack([torch.randperm(num_exact)[:width] for _ in range(positions)]),
        probs=probs / probs.sum(-1, keepdim=True),
        overlap_probs=torch.rand(positions, width) * 0.4,
        weights=torch.rand(positions),
    )
    loss = distillation_loss(hidden, head, num_exact, 0.7, targets, 2.0)
    (grad,) = torch.autograd.grad(loss, hidden)
    logits = hidden @ head.T
    logits = torch.cat([logits[:, :num_exact], logits[:, num_exact:] + 0.7], 1)
    chosen = logits.log_softmax(-1).gather(1, targets.columns)
    overlap = torch.minimum(chosen.exp(), targets.overlap_probs).sum(-1)
    each = -(targets.probs * chosen).sum(-1) - 2.0 * overlap
    plain = (targets.weights * each).sum() / targets.weights.sum()
    (plain_grad,) = torch.autograd.grad(plain, hidden)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grad, plain_grad)


def test_rate_warms_up_and_falls() -> None:
    """The rate rises during warm-up, stays, and falls to 0 over the last share of steps."""
    config = TrainConfig(num_steps=100, learning_rate=1.0, warmup_steps=10, decay_share=0.2)
    assert rate_at(0, config) == pytest.approx(0.1)
    assert {rate_at(step, config) for step in (9, 50, 80)} == {1.0}
    assert rate_at(90, config) == pytest.approx(0.5)
    assert rate_at(100, config) == 0.0


def test_walked_rounds() -> None:
    """Rounds are counted as a server would run them: accepted tokens and one more."""
    match = np.array([True, True, False, False, True, True, True, True, True])
    # Accepted 2 + 1, then 0 + 1, then 4 + 1 with the row at its end.
    assert walk_rounds(match, 4) == (3, 9)
    assert expected_round(np.full(20, 0.5, np.float32), 4) == pytest.approx(1.9375)


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats_by_seed(tmp_path: Path) -> None:
    """Two runs of one seed end in the same weights, and the loss falls."""
    one, two = make_trainer(tmp_path / "a.pt"), make_trainer(tmp_path / "b.pt")
    start = weights_of(one.student)
    curve = one.train()
    two.train()
    assert curve[-1].train_loss < curve[0].train_loss
    norm = "model.norm.weight"
    assert not torch.equal(start[norm], one.student.state_dict()[norm])
    assert torch.equal(start[EMBEDDING], one.student.state_dict()[EMBEDDING])
    for name, value in one.student.state_dict().items():
        assert torch.equal(value, two.student.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 6])
def test_resumed_training_equals_an_uninterrupted_one(tmp_path: Path, stop_after: int) -> None:
    """A run stopped at any step and resumed by a new process ends in the same weights."""
    whole = make_trainer(tmp_path / "whole.pt")
    whole.train()
    make_trainer(tmp_path / "cut.pt").train(stop_after=stop_after)
    resumed = make_trainer(tmp_path / "cut.pt")
    assert resumed.resume()
    assert resumed.step == stop_after
    resumed.train()
    assert resumed.step == whole.step
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, resumed.student.state_dict()[name]), name
    assert [p.validation for p in resumed.curve] == [p.validation for p in whole.curve]


@pytest.mark.slow
def test_the_result_is_the_mean_of_the_last_points(tmp_path: Path) -> None:
    """The weights after the last step are the mean of the averaged points' weights."""
    points = []
    for stop in (5, 7):
        trainer = make_trainer(tmp_path / f"{stop}.pt")
        trainer.train(stop_after=stop)
        points.append(weights_of(trainer.student))
    alone = make_trainer(tmp_path / "alone.pt", replace(TRAIN, num_averaged=1))
    alone.train()
    points.append(weights_of(alone.student))
    whole = make_trainer(tmp_path / "whole.pt")
    whole.train()
    for name, value in whole.student.state_dict().items():
        torch.testing.assert_close(value, sum(point[name] for point in points) / 3)


def test_sampled_text_resumes_part_by_part(tmp_path: Path) -> None:
    """Sampling is the same by seed, keeps finished parts, and stores the target's own words."""
    target = make_target()
    template = Template([1, 7], [8, 9], frozenset({2}))
    config = SampleConfig(num_rows=6, rows_per_part=4, max_user_tokens=5, max_answer_tokens=7)
    one = sample_text(target, template, tmp_path / "one.npz", config, quiet)
    part = tmp_path / "one.npz.parts" / "seed0-row0000000-4.npz"
    finished = part.stat().st_mtime_ns
    again = sample_text(target, template, tmp_path / "one.npz", config, quiet)
    assert part.stat().st_mtime_ns == finished
    assert len(one.rows) == 6
    for first, second in zip(one.rows, again.rows, strict=True):
        np.testing.assert_array_equal(first.answer, second.answer)
    greedy = one.rows[0]
    np.testing.assert_array_equal(greedy.answer, greedy.top_ids[:, 0])
    ids = torch.tensor(np.concatenate([greedy.prompt, greedy.answer]))[None]
    with torch.no_grad():
        logprobs = target(input_ids=ids).logits[0].log_softmax(-1)
    wanted = logprobs[len(greedy.prompt) - 1 : -1].max(-1).values.numpy()
    np.testing.assert_allclose(greedy.top_logprobs[:, 0], wanted, atol=5e-3)


def test_flags_carry_the_recipe() -> None:
    """Every number of the recipe is a flag with the recipe's default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["target", "--output", "draft", "--num-steps", "3"])
    assert args.num_steps == 3
    assert args.learning_rate == TrainConfig().learning_rate


def write_target(folder: Path) -> None:
    """Write the tiny target with a tokenizer of 64 words."""
    make_target().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["w0", "w1", "w2"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.slow
def test_distill_writes_a_plain_directory(tmp_path: Path) -> None:
    """The output loads in transformers and names its vocabulary and recipe."""
    target = tmp_path / "target"
    write_target(target)
    save_text(tmp_path / "text.npz", make_text())
    config = DistillConfig(
        target=target,
        output=tmp_path / "draft",
        text=tmp_path / "text.npz",
        layers=(1,),
        draft_vocab_size=24,
        num_threads=torch.get_num_threads(),
        train=TRAIN,
    )
    report = distill(config, quiet)
    draft = AutoModelForCausalLM.from_pretrained(report.output)
    assert draft.config.num_hidden_layers == 1
    assert draft.config.tie_word_embeddings
    assert draft(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCAB_SIZE)
    vocab = json.loads((report.output / VOCAB_FILE).read_text())["token_ids"]
    assert {0, 1, 2} <= set(vocab)
    assert report.curve[-1].step == report.num_steps
