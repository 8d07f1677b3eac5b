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

from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model.draft_package import EMBEDDING, VOCAB_FILE, package_files
from specserve.tools.distill.batch import TargetSettings, column_of, make_batch
from specserve.tools.distill.command import DistillConfig, distill, layers_of
from specserve.tools.distill.evaluate import (
    coupled_match,
    expected_round,
    validate_folder,
    walk_rounds,
)
from specserve.tools.distill.flags import add_arguments, parse_layers, parse_scratch, run
from specserve.tools.distill.gather import TextConfig
from specserve.tools.distill.loss import SparseTargets, distillation_loss
from specserve.tools.distill.recipe import TrainConfig, rate_at
from specserve.tools.distill.student import (
    ScratchShape,
    hidden_states,
    init_student,
    load_student,
    pack_rows,
    scratch_student,
)
from specserve.tools.distill.text import DistillText, Row, batches, load_text, save_text
from specserve.tools.distill.train import Trainer

VOCAB_SIZE = 64
TRAIN = TrainConfig(
    num_steps=9,
    batch_tokens=60,
    learning_rate=2e-2,
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


def make_target(vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """Build a random two-layer Llama."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size,
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
    for number in range(num_rows):
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
                is_greedy=number % 2 == 0,
                is_prompt_sampled=number % 3 != 0,
                kind="odd" if number % 2 else "even",
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
        assert (one.is_greedy, one.kind) == (other.is_greedy, other.kind)
        assert one.is_prompt_sampled == other.is_prompt_sampled


def test_a_text_of_the_first_version_loads(tmp_path: Path) -> None:
    """Without the newer arrays even rows were greedy, and the target wrote all prompts."""
    save_text(tmp_path / "text.npz", make_text(6))
    with np.load(tmp_path / "text.npz") as arrays:
        newer = ("is_greedy", "is_prompt_sampled", "kind")
        kept = {name: arrays[name] for name in arrays.files if name not in newer}
    np.savez_compressed(tmp_path / "old.npz", **kept)
    rows = load_text(tmp_path / "old.npz").rows
    assert [row.is_greedy for row in rows] == [True, False] * 3
    assert all(row.is_prompt_sampled and row.kind == "" for row in rows)


def test_rows_on_a_held_out_passage_are_not_trained_on() -> None:
    """A row that begins like a held-out one is in neither part."""
    passage = np.arange(3, 3 + 80) % VOCAB_SIZE
    rows = list(make_text(12).rows)
    for number in (0, 5):
        prompt = np.concatenate([[1, 7, 8], passage, [number + 10]])
        rows[number] = replace(rows[number], prompt=prompt)
    train, held = DistillText(tuple(rows)).held_out(4)
    assert held == (0, 1, 8, 9)
    assert train == (2, 3, 4, 6, 7, 10, 11)


def test_what_many_rows_begin_with_is_no_passage() -> None:
    """An instruction that stands before most prompts leaves them to be trained on."""
    preamble = np.arange(3, 3 + 80) % VOCAB_SIZE
    rows = [
        replace(row, prompt=np.concatenate([[1, 7, 8], preamble, [number % 7, number // 7]]))
        if number > 1
        else row
        for number, row in enumerate(make_text(40).rows)
    ]
    train, held = DistillText(tuple(rows)).held_out(4)
    assert len(train) + len(held) == 40


def test_a_corpus_beside_the_targets_own_text_hides_no_template() -> None:
    """The part that prompts share is theirs alone; the first token of a row has no target."""
    corpus = replace(make_text(1).rows[0], prompt=np.array([5]), is_prompt_sampled=False)
    own = [row for row in make_text().rows if row.is_prompt_sampled]
    text = DistillText((*own, corpus))
    assert text.common_prefix_length == 3
    assert DistillText((corpus,)).common_prefix_length == 0
    columns = column_of(tuple(range(VOCAB_SIZE)), VOCAB_SIZE)
    batch = make_batch([own[0], own[1]], columns, TargetSettings(0.1, 0.3, 0.3, 0))
    whole = len(own[0].prompt) + len(own[0].answer)
    assert batch.selected.tolist()[:whole] == list(range(whole - 1)) + [whole - 1]


def test_given_prompts_are_read_not_learned() -> None:
    """Only answers, and user turns the target wrote itself, have targets."""
    text = make_text()
    columns = column_of(tuple(range(VOCAB_SIZE)), VOCAB_SIZE)
    settings = TargetSettings(0.1, 0.3, 0.3, text.common_prefix_length)
    given, invented = text.rows[0], text.rows[1]
    assert not given.is_prompt_sampled
    assert len(make_batch([given], columns, settings).selected) == len(given.answer)
    learned = len(invented.prompt) - 3 + len(invented.answer)
    assert len(make_batch([invented], columns, settings).selected) == learned


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


def test_a_trained_head_gets_its_gradient() -> None:
    """Where the head is trained, its gradient equals autograd's."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 8)
    head = torch.randn(20, 8, requires_grad=True)
    probs = torch.rand(300, 3)
    targets = SparseTargets(
        columns=torch.stack([torch.randperm(20)[:3] for _ in range(300)]),
        probs=probs / probs.sum(-1, keepdim=True),
        overlap_probs=torch.zeros(300, 3),
        weights=torch.rand(300),
    )
    (grad,) = torch.autograd.grad(distillation_loss(hidden, head, 20, 0.0, targets, 0.0), head)
    chosen = (hidden @ head.T).log_softmax(-1).gather(1, targets.columns)
    each = -(targets.probs * chosen).sum(-1)
    plain = (targets.weights * each).sum() / targets.weights.sum()
    torch.testing.assert_close(grad, torch.autograd.grad(plain, head)[0])


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


def test_coupled_match_is_what_common_noise_gives() -> None:
    """The closed form equals the share of draws in which both take the same token.

    200,000 draws: five standard errors are 0.0056, a false alarm in 10 million runs.
    """
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(5), 4), rng.dirichlet(np.ones(5), 4)
    found = coupled_match(p.astype(np.float32), q.astype(np.float32))
    noise = rng.standard_exponential((200_000, 1, 5))
    same = ((noise / p).argmin(-1) == (noise / q).argmin(-1)).mean(0)
    np.testing.assert_allclose(found, same, atol=0.0056)
    whole = np.ones((1, 1), np.float32)
    assert coupled_match(whole, whole) == pytest.approx(1.0)
    assert coupled_match(p[:1].astype(np.float32), np.zeros((1, 5), np.float32)) == 0


@pytest.mark.slow
def test_a_scratch_student_trains_its_own_embedding(tmp_path: Path) -> None:
    """A small student with random weights learns, embedding included, and repeats by seed."""
    text = make_text()
    vocab = text.frequent_token_ids(24, (0, 1, 2))
    student = scratch_student(make_target(), ScratchShape(1, 16), seed=1)
    again = scratch_student(make_target(), ScratchShape(1, 16), seed=1)
    start = weights_of(student)
    assert torch.equal(start[EMBEDDING], again.state_dict()[EMBEDDING])
    assert student.config.num_attention_heads == 2
    config = replace(TRAIN, num_steps=20, overlap_weight=0.0, num_averaged=1)
    curve = Trainer(student, text, vocab, config, tmp_path / "scratch.pt", quiet).train()
    assert not torch.equal(start[EMBEDDING], student.state_dict()[EMBEDDING])
    losses = [point.train_loss for point in curve if point.train_loss is not None]
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigurationError, match="multiple of 16"):
        scratch_student(make_target(), ScratchShape(1, 24), seed=1)


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats_by_seed(tmp_path: Path) -> None:
    """Two runs of one seed end in the same weights, and the loss falls."""
    one, two = make_trainer(tmp_path / "a.pt"), make_trainer(tmp_path / "b.pt")
    start = weights_of(one.student)
    curve = one.train()
    two.train()
    losses = [point.train_loss for point in curve if point.train_loss is not None]
    assert losses[-1] < losses[0]
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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1e-3}, "--learning-rate"),
        ({"seed": 3}, "--seed"),
        ({"optimiser": "adamw"}, "--optimiser"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    """What was trained otherwise is neither gone on with nor passed off as this run's."""
    make_trainer(tmp_path / "kept.pt").train(stop_after=1)
    with pytest.raises(ConfigurationError, match=f"of another run: {named} differ"):
        make_trainer(tmp_path / "kept.pt", replace(TRAIN, **changes)).resume()
    assert make_trainer(tmp_path / "kept.pt", replace(TRAIN, num_steps=20)).resume()


def test_a_checkpoint_of_another_start_or_text_is_refused(tmp_path: Path) -> None:
    """So is one of other layers, of other rows, and one that cannot be read."""
    path = tmp_path / "kept.pt"
    trainer = make_trainer(path)
    trainer.train(stop_after=1)
    text, vocab = trainer.text, trainer.vocab
    other_start = Trainer(init_student(make_target(), (0,)), text, vocab, TRAIN, path, quiet)
    with pytest.raises(ConfigurationError, match="the target, --layers or --scratch differ"):
        other_start.resume()
    other_text = DistillText(text.rows[:-1])
    student = init_student(make_target(), (1,))
    with pytest.raises(ConfigurationError, match="of another run: the text differ"):
        Trainer(student, other_text, vocab, TRAIN, path, quiet).resume()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make_trainer(path).resume()


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    """Where all rows are held out, training would wait for one for ever."""
    with pytest.raises(ConfigurationError, match="--held-out-every 1: of 16 rows 16"):
        make_trainer(tmp_path / "none.pt", replace(TRAIN, held_out_every=1))


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


def test_flags_carry_the_recipe() -> None:
    """Every number of the recipe is a flag with the recipe's default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["target", "--output", "draft", "--num-steps", "3"])
    assert args.num_steps == 3
    assert args.learning_rate == TrainConfig().learning_rate
    assert args.optimiser == TrainConfig().optimiser


def test_wrong_flags_are_named() -> None:
    """A flag that cannot be read is answered with what was wanted."""
    assert parse_layers("0,1,29") == (0, 1, 29)
    assert parse_layers(None) is None
    assert parse_scratch("2x384") == ScratchShape(2, 384)
    with pytest.raises(ConfigurationError, match="0,1,29"):
        parse_layers("first")
    with pytest.raises(ConfigurationError, match="LAYERSxHIDDEN"):
        parse_scratch("2")


def test_layers_fit_the_target() -> None:
    """Unless they are named, the first two and the last; what it lacks is said."""
    target = make_target()
    config = DistillConfig(target=Path("t"), output=Path("d"))
    assert layers_of(config, target) == (0, 1)
    with pytest.raises(ConfigurationError, match="--layers 0,2: t has 0 to 1"):
        layers_of(replace(config, layers=(0, 2)), target)


def test_a_folder_without_a_cut_head_is_no_draft_to_validate(tmp_path: Path) -> None:
    """It is named, with the file that it lacks."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match=r"draft_vocab\.json is missing"):
        validate_folder(tmp_path, make_text(), 4)


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
        text=TextConfig(files=(tmp_path / "text.npz",)),
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


def test_a_dot_in_a_packages_name_is_part_of_it(tmp_path):
    """Two drafts packed as `mine.v1` and `mine.v2` do not overwrite one another."""
    names = {
        file.name for stem in ("mine.v1", "mine.v2") for file in package_files(tmp_path / stem)
    }

    assert names == {
        f"mine.{version}.{ending}" for version in ("v1", "v2") for ending in ("json", "safetensors")
    }


def test_training_goes_on_from_a_draft(tmp_path: Path) -> None:
    """A draft that was distilled before is the student's start, its embedding frozen as before."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_target(target)
    save_text(tmp_path / "text.npz", make_text())
    text = TextConfig(files=(tmp_path / "text.npz",))
    config = DistillConfig(target, draft, text, draft_vocab_size=24, num_threads=1, train=TRAIN)
    distill(config, quiet)
    again = replace(config, output=tmp_path / "again", start_from=draft)
    distill(again, quiet)
    before = LlamaForCausalLM.from_pretrained(draft).state_dict()
    start = load_student(draft, make_target())
    assert not start.model.embed_tokens.weight.requires_grad
    for name, weight in start.state_dict().items():
        torch.testing.assert_close(weight, before[name].float(), rtol=0, atol=0)
    after = LlamaForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    torch.testing.assert_close(after[EMBEDDING], before[EMBEDDING], rtol=0, atol=0)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    recipe = json.loads((tmp_path / "again" / "distill.json").read_text())
    assert recipe["layers"] is None
    assert recipe["start_weights_sha256"]


def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Another vocabulary, no draft at all, or two starts at once."""
    with pytest.raises(ModelUnavailable, match=r"config.json is missing"):
        load_student(tmp_path / "nothing", make_target())
    make_target(32).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigurationError, match="has 32 token ids, its target 64"):
        load_student(tmp_path / "small", make_target())
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["t", "--output", "o", "--layers", "0", "--start-from", "d"]
    with pytest.raises(ConfigurationError, match="--layers and --start-from"):
        run(parser.parse_args(words))


def test_a_drafts_ids_are_listed_the_most_frequent_first() -> None:
    """Whoever cuts the list takes its head: special ids, then what comes most often."""
    text = make_text()
    used = np.concatenate([r.answer for r in text.rows] + [r.top_ids[:, 0] for r in text.rows])
    counts = np.bincount(used, minlength=VOCAB_SIZE)
    ranked = text.ranked(text.frequent_token_ids(24, (2, 0)), (2, 0))
    assert ranked[:2] == [2, 0]
    assert len(set(ranked)) == len(ranked) >= 24
    often = [int(counts[token_id]) for token_id in ranked[2:]]
    assert often == sorted(often, reverse=True)
    assert ranked != sorted(ranked)
