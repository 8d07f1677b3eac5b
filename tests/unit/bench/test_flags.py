"""What `specserve bench` and `specserve load` refuse, and what their flags mean."""

import json

import pytest

from specserve import cli
from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.tools.bench import command as bench
from specserve.tools.bench.acceptance import read_method
from specserve.tools.bench.auto import dynamic
from specserve.tools.bench.conditions import ModelFacts
from specserve.tools.bench.deployment import Deployment
from specserve.tools.bench.flag_values import bench_options
from specserve.tools.bench.peer_spec import check_peer, peer_specs
from specserve.tools.bench.sweep import changed
from specserve.tools.bench.workload import check_fits, check_remembered, load_workload
from specserve.tools.flags import Parser
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import prompt


def parse(*words):
    parser = Parser("specserve bench", "")
    bench.add_arguments(parser)
    return parser.parse(words)


def run(capsys, *words):
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "servin"], "invalid choice: 'servin'"),
        (["--concurrency", "0"], "--concurrency: found 0, wanted 1 or more"),
        (["--concurrency", "many"], "--concurrency: invalid int value: 'many'"),
        (["--max-tokens", "0"], "--max-tokens: found 0, wanted 1 or more"),
        (["--arrival-rate", "-1"], "--arrival-rate: found"),
        (["--temperature", "3"], "--temperature: found 3, wanted 0 to 2"),
        (["--threshold", "min_speedd=1"], "unknown key 'min_speedd'; did you mean 'min_speedup'?"),
        (["--speculative-config", "{"], "--speculative-config: not JSON"),
        (["--num-speculative-tokens", "900"], "num_speculative_tokens: found 900, wanted"),
        (["--auto-config", "[]"], "--auto-config: found '[]', wanted a JSON object"),
        (["--vllm-arg", "enforce_eager=yes"], "--vllm-arg: found 'enforce_eager=yes'"),
        (["--url", "http://x", "--orchestrator-address", "x:1"], "--url: leave it out"),
        (["--report", "/nowhere/at/all.html"], "--report: cannot write /nowhere/at/all.html"),
        (["--compare", "/nowhere/at/all.json"], "--compare: /nowhere/at/all.json"),
        (["--report", "r.html", "--block-siz", "3"], "'--block-siz'; did you mean '--block-size'?"),
        (
            ["--suite", "acceptance", "--url", "http://x"],
            "--suite acceptance: it starts services of its own",
        ),
        (
            ["--suite", "auto", "--target", "toy:", "--auto-config"]
            + ['{"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}']
            + ["--speculative-config", '{"model": "toy:noise=1"}'],
            "--suite auto: num_speculative_tokens_per_batch_size says K",
        ),
    ],
)
def test_bench_refuses_before_anything_starts(capsys, monkeypatch, tmp_path, words, message):
    """Each wrong word is named on stderr, and the exit code is that of wrong usage."""
    monkeypatch.chdir(tmp_path)

    code, _, err = run(capsys, "bench", *words)

    assert code == 2, err
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--url or --orchestrator-address: one of the two was wanted"),
        (["--url", "http://x"], "--rate: missing"),
        (["--url", "http://x", "--rate", "0"], "--rate: found 0, wanted above 0"),
        (["--url", "http://x", "--rate", "1", "--slo", "ttft=1"], "did you mean 'ttft_ms'?"),
        (["--url", "http://x", "--rate", "1", "--attainment", "95"], "--attainment: found 95"),
        (["--orchestrator-address", "x:1", "--rate", "1"], "--target: missing"),
        (
            ["--orchestrator-address", "x:1", "--target", "toy:", "--unique", "--rate", "1"],
            "--unique: it changes texts",
        ),
        (["--url", "http://x", "--rate", "1", "--report", "/nowhere/r.html"], "--report: cannot"),
        (["--url", "http://x", "--rate", "1", "--prompts", "/nowhere"], "--prompts: /nowhere"),
    ],
)
def test_load_refuses_before_anything_is_sent(capsys, words, message):
    code, _, err = run(capsys, "load", *words)

    assert code == 2, err
    assert message in err


def test_a_server_that_is_not_there_is_a_problem_not_a_wrong_word(capsys):
    code, _, err = run(capsys, "load", "--url", "http://127.0.0.1:9", "--rate", "1")

    assert code == 1
    assert "http://127.0.0.1:9" in err


def test_flags_become_options():
    options = bench_options(
        parse(
            "--target",
            "toy:",
            "--speculative-config",
            '{"model": "toy:noise=1"}',
            "--num-speculative-tokens",
            "3",
            "--concurrency",
            "1",
            "8",
            "--arrival-rate",
            "2.5",
            "--num-threads",
            "1",
            "--vllm-arg",
            "max_model_len=2048",
            "--threshold",
            "min_speedup=none",
        ),
        "serving",
    )

    assert options.speculative == SpeculativeConfig(model="toy:noise=1", num_speculative_tokens=3)
    assert options.pacings == (
        Pacing(concurrency=1),
        Pacing(concurrency=8),
        Pacing(arrival_rate=2.5),
    )
    assert options.engine_flags == ("--dtype=bfloat16", "--num-threads=1")
    assert options.engine.num_threads == 1
    assert options.peers.vllm_arguments == {"max_model_len": 2048}
    assert options.thresholds.min_speedup is None
    assert options.starts_services


def test_each_suite_has_its_own_default_levels():
    arguments = parse()

    assert bench_options(arguments, "serving").pacings == (Pacing(concurrency=1),)
    assert [p.concurrency for p in bench_options(arguments, "auto").pacings] == [1, 4, 16, 32]
    assert bench_options(parse("--arrival-rate", "1"), "serving").pacings == (
        Pacing(arrival_rate=1.0),
    )


def test_methods_are_names_or_configurations():
    """A name takes K and the draft from the common configuration, where it has any use for them."""
    base = SpeculativeConfig(model="toy:noise=1", num_speculative_tokens=3)

    name, config = read_method("ngram", base)
    assert (name, config.method, config.model, config.num_speculative_tokens) == (
        "ngram",
        "ngram",
        None,
        3,
    )
    name, config = read_method("draft_model", base)
    assert (name, config.model) == ("draft_model", "toy:noise=1")
    name, config = read_method('{"method": "ngram", "prompt_lookup_max": 2}', base)
    assert name == 'ngram {"prompt_lookup_max": 2}'
    assert config.num_speculative_tokens == 4
    with pytest.raises(ConfigurationError, match="'eagle3' is not supported"):
        read_method("eagle3", base)


def test_keys_are_laid_over_a_configuration():
    base = SpeculativeConfig(model="toy:noise=1", num_speculative_tokens=3)

    assert changed(base, '{"num_speculative_tokens": 2}').num_speculative_tokens == 2
    assert changed(base, "{}") == base
    with pytest.raises(ConfigurationError, match="unknown key 'num_tokens'"):
        changed(base, '{"num_tokens": 2}')


def test_k_is_dynamic_without_being_told_how():
    """Whatever schedule was configured."""
    for schedule in ("auto", "constant"):
        config = {"model": "toy:noise=1", "num_speculative_tokens_schedule": schedule}
        options = bench_options(
            parse("--target", "toy:", "--speculative-config", json.dumps(config)), "auto"
        )

        assert dynamic(options).speculative.num_speculative_tokens_schedule == "auto"


@pytest.mark.parametrize("method", ["draft_model", "suffix", "cascade"])
def test_a_method_that_is_named_is_measured_though_it_is_the_default(method):
    """The embedded pair has a default of its own, which is for who names none."""
    for base in (None, SpeculativeConfig(num_speculative_tokens=4)):
        _, config = read_method(method, base)
        kept = changed(config, '{"num_speculative_tokens_schedule": "constant"}')
        assert kept.method == method
        assert "method" in kept.model_fields_set
    words = ("--speculative-config", json.dumps({"method": method}), "--num-speculative-tokens=3")
    options = bench_options(parse(*words), "serving")
    assert "method" in options.speculative.model_fields_set


def test_a_record_names_a_draft_and_not_where_it_lies(tmp_path):
    """Two machines with one draft in different folders are alike."""
    folder = tmp_path / "a-draft"
    folder.mkdir()

    records = [
        json.loads(Deployment("d", "toy:", SpeculativeConfig(model=model)).speculative_json)
        for model in (str(folder), "toy:noise=1", "org/a-draft")
    ]

    assert [each["model"] for each in records] == ["a-draft", "toy:noise=1", "org/a-draft"]


def specs(names, **changes):
    values = {
        "vllm_python": None,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 2,
        "num_speculative_tokens": 4,
        "vllm_arguments": {"enforce_eager": True},
    }
    return peer_specs(names, "/models/target", "/models/draft", **(values | changes))


def test_every_peer_runs_with_and_without_the_draft():
    found = specs(["transformers", "vllm"], vllm_python="/venv/bin/python")

    assert [spec.name for spec in found] == [
        "transformers",
        "transformers-speculative",
        "vllm",
        "vllm-speculative",
    ]
    assert json.loads(found[3].options())["arguments"] == {"enforce_eager": True}
    assert json.loads(found[1].options())["arguments"] == {}
    assert "/models" not in found[3].speculative_json(), "a record names models, not folders"


def test_vllm_is_held_to_as_many_threads_as_ours(tmp_path, monkeypatch):
    """On its own it would take all cores but one; what the user has set stands."""
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    python = str(tmp_path / "bin" / "python")

    ours, _, plain, _ = (
        spec.environment()
        for spec in specs(["transformers", "vllm"], vllm_python=python, num_threads=1)
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (told, *_) = (spec.environment() for spec in specs(["vllm"], vllm_python=python))

    assert ours == {}
    assert plain["OMP_NUM_THREADS"] == "1"
    assert plain["VLLM_CPU_OMP_THREADS_BIND"].isdecimal()
    assert plain["LD_PRELOAD"] == str(openmp)
    assert "OMP_NUM_THREADS" not in told


def test_a_peer_that_cannot_run_is_refused():
    with pytest.raises(ConfigurationError, match="--vllm-python: not given"):
        check_peer(specs(["vllm"])[0])
    toy = peer_specs(
        ["transformers"],
        "toy:",
        None,
        vllm_python=None,
        dtype="float32",
        device="cpu",
        num_threads=None,
        num_speculative_tokens=4,
        vllm_arguments={},
    )
    with pytest.raises(ConfigurationError, match="--peer: transformers cannot load toy:"):
        check_peer(toy[0])


@pytest.mark.slow
def test_prompts_take_turns_over_the_categories(tmp_path, monkeypatch):
    """Both halves of a run then have the same mix, whatever the order of the file."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "ab"[i // 3], "turns": [f"t{i}"]} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("SPECSERVE_BENCH_PROMPTS", str(path))

    whole = load_workload(None, None, EngineConfig(model="toy:vocab_size=96"))
    some = load_workload(str(path), 2, None)

    assert [p.category for p in whole.prompts] == ["a", "b"] * 3
    assert whole.facts.categories == {"a": 3, "b": 3}
    assert whole.facts.source == "prompts.jsonl"
    assert whole.facts.num_tokens == sum(len(p.token_ids) for p in whole.prompts) > 0
    assert [p.prompt_id for p in some.prompts] == ["0", "3"]
    assert some.facts.num_tokens == 0


def test_a_prompt_that_leaves_no_room_is_named():
    check_fits([prompt(1)], 97, 100)
    with pytest.raises(ConfigurationError, match="prompt p1 has 3 tokens"):
        check_fits([prompt(1)], 98, 100)


def test_prompts_that_warm_caches_cannot_hold_are_refused():
    """Else what was sent first is cold again when it is measured, on whichever side comes first."""
    model = ModelFacts("draft", "m", "", "abc", 96, "float32", "cpu", 4096, 100, 200, 12, 16)
    # 1 block each of prompt, 2 of every answer.
    check_remembered([prompt(n) for n in range(4)], 32, model, num_answers=1)
    with pytest.raises(ConfigurationError, match="--num-kv-blocks 15, or at most 4 prompts"):
        check_remembered([prompt(n) for n in range(5)], 32, model, num_answers=1)
    with pytest.raises(ConfigurationError, match="the draft has 12.* at most 2 prompts"):
        check_remembered([prompt(n) for n in range(4)], 32, model, num_answers=2)
