"""What `specserve distill` trains on: answers, scored corpora, prompts files, resumable parts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.tiny_models import byte_tokenizer, plain_logits, save_tiny

from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.tools.distill.command import DistillConfig, distill
from specserve.tools.distill.draws import draw, top_columns
from specserve.tools.distill.gather import TextConfig, gather_text
from specserve.tools.distill.generate import Generator, Question
from specserve.tools.distill.prompts import GivenText, cut_corpus, read_given
from specserve.tools.distill.recipe import TrainConfig
from specserve.tools.distill.sample import (
    Prompt,
    SampleConfig,
    Template,
    TextMaker,
    read_template,
)

VOCAB_SIZE = 512
SAMPLE = SampleConfig(num_rows=6, rows_per_part=4, max_user_tokens=5, max_answer_tokens=7)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a two-layer Llama with tied embeddings and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    byte_tokenizer().save_pretrained(folder)
    return folder


def quiet(_: str) -> None:
    """Take a progress line and drop it."""


def make_generator(
    target: Path, num_rows: int = 3, stop_ids: frozenset[int] = frozenset()
) -> Generator:
    """Load the target in float32, where greedy answers are exact."""
    return Generator(target, stop_ids, num_rows, longest=64, dtype="float32")


def prompts(count: int) -> list[tuple[int, ...]]:
    """Draw prompts of several lengths; every second one begins like the one before it."""
    rng = np.random.default_rng(1)
    made: list[tuple[int, ...]] = []
    for number in range(count):
        start = made[-1][:9] if number % 2 else ()
        made.append((*start, *rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 12))).tolist()))
    return made


def test_greedy_answers_are_the_targets_own(target: Path) -> None:
    """More prompts than rows, shared beginnings: each answer is what plain decoding says."""
    asked = prompts(8)
    answers = make_generator(target).run([Question(p, 6, is_greedy=True) for p in asked], seed=0)
    whole = [(*p, *a.token_ids.tolist()) for p, a in zip(asked, answers, strict=True)]
    for prompt, answer, logits in zip(asked, answers, plain_logits(target, whole), strict=True):
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        np.testing.assert_array_equal(answer.token_ids, logprobs.argmax(-1).numpy())
        top = logprobs.topk(16)
        np.testing.assert_array_equal(answer.top_ids, top.indices.numpy())
        np.testing.assert_allclose(answer.top_logprobs, top.values.numpy(), atol=1e-4)


def test_answers_end_at_a_stop_or_go_on(target: Path) -> None:
    """A stop id ends an answer and belongs to it; `ignore_stop` goes on behind it."""
    prompt = prompts(1)[0]
    first = make_generator(target).run([Question(prompt, 6, is_greedy=True)], seed=0)[0]
    stop = frozenset({int(first.token_ids[2])})
    where = first.token_ids.tolist().index(next(iter(stop)))
    ended, ignored = make_generator(target, stop_ids=stop).run(
        [
            Question(prompt, 6, is_greedy=True),
            Question(prompt, 6, is_greedy=True, ignore_stop=True),
        ],
        seed=0,
    )
    np.testing.assert_array_equal(ended.token_ids, first.token_ids[: where + 1])
    np.testing.assert_array_equal(ignored.token_ids, first.token_ids)


def test_drawn_answers_repeat_by_seed(target: Path) -> None:
    """The same seed draws the same answers, another one others."""
    questions = [Question(p, 12, is_greedy=False) for p in prompts(4)]
    generator = make_generator(target)
    one, again, other = (
        [answer.token_ids.tolist() for answer in generator.run(questions, seed)]
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_a_given_text_is_scored_as_the_target_would(target: Path) -> None:
    """Scores are the target's log-probabilities at every position of the given text."""
    prompt, given = prompts(2)
    answer = make_generator(target).score(prompt, given)
    logits = plain_logits(target, [(*prompt, *given)])[0][len(prompt) - 1 : -1]
    np.testing.assert_array_equal(answer.token_ids, given)
    wanted = logits.log_softmax(-1).topk(16).values.numpy()
    np.testing.assert_allclose(answer.top_logprobs, wanted, atol=1e-4)


def test_what_does_not_fit_is_named(target: Path) -> None:
    """A prompt that leaves no room for its answer is refused, with the numbers."""
    with pytest.raises(ConfigurationError, match="at most 64 together"):
        make_generator(target).run([Question((5,) * 60, 6, is_greedy=True)], seed=0)


def test_most_likely_columns_equal_topk() -> None:
    """Chunk by chunk gives what a full search gives."""
    torch.manual_seed(0)
    logits = torch.randn(5, 256 * 40)
    values, columns = top_columns(logits, 16)
    wanted = logits.topk(16)
    assert torch.equal(values, wanted.values)
    assert torch.equal(columns, wanted.indices)


def test_draws_follow_the_probabilities() -> None:
    """Evenly spread uniforms hit each column in its share; a nucleus drops the rest."""
    probs = torch.tensor([0.5, 0.1, 0.4]).expand(1000, 3)
    uniforms = (torch.arange(1000) + 0.5) / 1000
    whole = draw(probs, torch.ones(1000), uniforms).bincount(minlength=3)
    assert whole.tolist() == pytest.approx([500, 100, 400], abs=1)
    nucleus = draw(probs, torch.full((1000,), 0.85), uniforms).bincount(minlength=3)
    assert nucleus.tolist() == pytest.approx([556, 0, 444], abs=1)


def test_parts_are_used_again(target: Path, tmp_path: Path) -> None:
    """A second call makes nothing anew, gives the same rows, and takes no other text's parts."""
    template = Template([3, 7], [8, 9], frozenset({1}))
    path = tmp_path / "text.npz"

    def make(first_prompt: int) -> list[list[int]]:
        maker = TextMaker(make_generator(target, stop_ids=template.stop_ids), path, SAMPLE, quiet)
        maker.invent(template)
        maker.answer([Prompt((first_prompt, 5), is_sampled=False, kind="given")])
        maker.score([(4, 5, 6, 7)])
        text = maker.write()
        assert [row.kind for row in text.rows] == [""] * 6 + ["given", "corpus"]
        assert [row.is_prompt_sampled for row in text.rows] == [True] * 6 + [False, False]
        assert all(tuple(row.prompt[:2]) == (3, 7) for row in text.rows[:6])
        assert text.rows[-1].answer.tolist() == [5, 6, 7]
        return [row.answer.tolist() for row in text.rows]

    one = make(11)
    parts = {part: part.stat().st_mtime_ns for part in (tmp_path / "text.npz.parts").iterdir()}
    assert len(parts) == 4
    assert make(11) == one
    assert {part: part.stat().st_mtime_ns for part in parts} == parts
    make(12)
    assert len(list((tmp_path / "text.npz.parts").iterdir())) == 5


@pytest.mark.parametrize(
    "changes", [{"max_answer_tokens": 3}, {"greedy_share": 1.0}, {"ignore_stop_share": 1.0}]
)
def test_parts_made_otherwise_are_not_used_again(
    target: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Settings that change answers, other stop ids and another model make a text anew."""
    path, asked = tmp_path / "text.npz", [Prompt((11, 5), is_sampled=False)]

    def make(config: SampleConfig, stop_ids: frozenset[int]) -> int:
        maker = TextMaker(make_generator(target, stop_ids=stop_ids), path, config, quiet)
        maker.answer(asked)
        return len(list((tmp_path / "text.npz.parts").iterdir()))

    assert make(SAMPLE, frozenset({1})) == 1
    assert make(SAMPLE, frozenset({1})) == 1
    assert make(replace(SAMPLE, **changes), frozenset({1})) == 2
    assert make(SAMPLE, frozenset({2})) == 3


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    """JSON Lines by any of the known keys, plain files line by line."""
    lines = [
        {"prompt": "one", "kind": "a"},
        {"turns": ["two", "later"], "category": "b"},
        {"messages": [{"role": "user", "content": "three"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    keys = ("prompt", "turns", "messages")
    assert read_given(path, keys) == [
        GivenText("one", "a"),
        GivenText("two", "b"),
        GivenText("three", ""),
    ]
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert read_given(path, keys) == [GivenText("a\u2028b", "")]
    plain = tmp_path / "prompts.txt"
    plain.write_text("first\n\n second \n")
    assert read_given(plain, keys) == [GivenText("first", ""), GivenText("second", "")]


def test_a_chat_log_is_asked_what_its_user_asked(target: Path, tmp_path: Path) -> None:
    """What the system says stands before the user's first words, and is not taken for them."""
    log = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"messages": log}))
    assert read_given(path, ("messages",)) == [GivenText("one", "", "Be brief.")]
    text = gather_text(
        target, TextConfig(prompts=path, sample=SAMPLE), tmp_path / "t.npz", "cpu", quiet
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    wanted = byte_tokenizer().apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert text.rows[0].prompt.tolist() == wanted
    path.write_text(json.dumps({"messages": log[:1]}))
    with pytest.raises(ConfigurationError, match="none of the keys messages"):
        read_given(path, ("messages",))


def test_a_base_model_scores_a_corpus_and_answers_no_prompts(target: Path, tmp_path: Path) -> None:
    """Without a chat template a corpus is all there is; asking for more says so."""
    folder = tmp_path / "base"
    shutil.copytree(target, folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat")
    text = gather_text(folder, TextConfig(corpus=corpus), tmp_path / "t.npz", "cpu", quiet)
    assert [row.kind for row in text.rows] == ["corpus"]
    with pytest.raises(ConfigurationError, match="chat template"):
        gather_text(folder, TextConfig(prompts=corpus), tmp_path / "t.npz", "cpu", quiet)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{bad", "bad.jsonl:1 is not JSON"), ("{}", "none of the keys prompt"), ("", "no text")],
)
def test_bad_prompts_are_named(tmp_path: Path, content: str, said: str) -> None:
    """A line that cannot be read is named with its file."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        read_given(path, ("prompt",))
    with pytest.raises(ModelUnavailable, match=r"missing\.jsonl"):
        read_given(tmp_path / "missing.jsonl", ("prompt",))


def test_a_corpus_is_cut_into_stretches() -> None:
    """Stretches of the wanted length, their tokens the corpus's own; a short rest is dropped."""
    tokenizer = byte_tokenizer()
    pieces = [GivenText("a" * 25, ""), GivenText("b" * 10, "")]
    stretches = cut_corpus(tokenizer, pieces, 12)
    assert [len(ids) for ids in stretches] == [12, 12, 11]
    assert tokenizer.decode(list(stretches[2])) == "b" * 10 + "</s>"


def test_no_text_is_an_error(target: Path, tmp_path: Path) -> None:
    """Nothing named and no rows wanted: said at once."""
    with pytest.raises(ConfigurationError, match="no text"):
        gather_text(target, TextConfig(num_invented=0), tmp_path / "t.npz", "cpu", quiet)


@pytest.mark.slow
def test_distilling_raises_acceptance(target: Path, tmp_path: Path) -> None:
    """From prompts, a corpus and invented turns to a draft whose acceptance has grown.

    The random target is unsure (its 16 most likely tokens hold a fifth of the mass), so the
    figures at temperature 1 are small and grow in proportion.
    """
    (tmp_path / "prompts.txt").write_text("\n".join(f"say {n}" for n in range(40)))
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and so on " * 10)
    config = DistillConfig(
        target=target,
        output=tmp_path / "draft",
        text=TextConfig(
            prompts=tmp_path / "prompts.txt",
            corpus=tmp_path / "corpus.txt",
            num_invented=80,
            sample=SampleConfig(max_user_tokens=6, max_answer_tokens=24, corpus_tokens=32),
        ),
        layers=(1,),
        draft_vocab_size=256,
        num_threads=1,
        train=TrainConfig(
            num_steps=150,
            batch_tokens=600,
            learning_rate=2e-2,
            warmup_steps=10,
            overlap_ramp_steps=50,
            num_averaged=3,
            average_every=10,
            num_negative_ids=32,
            held_out_every=6,
            validate_every=150,
        ),
    )
    curve = distill(config, quiet).curve
    start, end = curve[0].validation, curve[-1].validation
    assert curve[0].step == 0
    assert end.greedy_match > start.greedy_match + 0.05
    assert end.overlap > 1.3 * start.overlap
    assert end.coupled_match > 1.3 * start.coupled_match
    assert start.greedy_tokens_per_round is not None
    assert end.greedy_tokens_per_round is not None
    assert end.greedy_tokens_per_round > start.greedy_tokens_per_round + 0.1


def test_the_template_is_cut_at_the_user_turn() -> None:
    """What stands before and after the user's words is the tokenizer's own template."""
    tokenizer = byte_tokenizer()
    template = read_template(tokenizer, frozenset({1}))
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    words = tokenizer.encode("hi", add_special_tokens=False)
    assert template.around(words) == tuple(whole)
