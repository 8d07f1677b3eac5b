"""Another engine beside ours: transformers, plain and assisted, on tiny models of real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve import cli
from specserve.errors import PeerUnavailable
from specserve.tools.bench.agreement import read_record
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.peer_spec import peer_specs
from specserve.tools.bench.peers import running_peer
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import prompt
from support.tiny_models import byte_tokenizer, save_tiny

pytestmark = pytest.mark.slow

NUM_PROMPTS = 2
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a tiny target and a tiny draft of the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    target = save_tiny(folder / "target", "llama", vocab_size=size)
    draft = save_tiny(folder / "draft", "llama", vocab_size=size, num_hidden_layers=1)
    for each in (target, draft):
        tokenizer.save_pretrained(each)
    return target, draft


def test_peers_decode_the_same_prompts_in_the_same_run(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    """Every side takes its turn in every pair and brings as many tokens as ours."""
    target, draft = models
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Why?", "How so?")))
    path = tmp_path / "bench.json"

    code = cli.main(
        ["bench", "--suite=serving", "--target", str(target), "--dtype=float32", "--no-padding",
         "--speculative-config", json.dumps({"model": str(draft), "num_speculative_tokens": 2}),
         "--prompts", str(prompts), f"--max-tokens={MAX_TOKENS}", "--concurrency", "1", "2",
         "--pairs=2", "--peer=transformers", "--num-threads=1", f"--json={path}",
         "--threshold=max_others_cpu_share=none"]
    )  # fmt: skip

    (section,) = read_record(path)["sections"]
    alone, together = section["levels"]
    assert code in (0, 3)
    assert [arm["name"] for arm in alone["arms"]] == [
        "speculative",
        "target-only",
        "transformers",
        "transformers-speculative",
    ]
    for arm in alone["arms"]:
        assert arm["summary"]["num_failed"] == 0
        assert arm["summary"]["num_output_tokens"] == NUM_PROMPTS * MAX_TOKENS
        assert arm["summary"]["ttft_s"]["count"] == NUM_PROMPTS
    assert len(alone["comparisons"]) == 6
    assert all(each["ratio"]["count"] == 2 for each in alone["comparisons"])
    assert [arm["name"] for arm in together["arms"]] == ["speculative", "target-only"]
    assert "decodes one prompt at a time" in section["notes"][0]
    peers = {each["name"]: each for each in section["conditions"]["deployments"]}
    assert "transformers" in peers["transformers"]["versions"]
    assert peers["transformers"]["speculative_config"] == ""


async def test_a_peer_that_cannot_load_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Not a hang and not an empty report: the last lines of what it wrote."""
    (spec,) = peer_specs(
        ["transformers"],
        str(tmp_path / "nothing"),
        None,
        vllm_python=None,
        dtype="float32",
        device="cpu",
        num_threads=1,
        num_speculative_tokens=4,
        vllm_arguments={},
    )

    with pytest.raises(PeerUnavailable, match="nothing"):
        async with running_peer(spec, RequestSettings(4, 0.0, True, 0)) as arm:
            await arm.run([prompt(0)], Pacing(concurrency=1), "never")
