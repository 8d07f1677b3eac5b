"""The command line without any service: help, flags, refusals and exit codes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve import cli
from specserve.config import EngineConfig, ServerConfig
from specserve.errors import ConfigurationError
from specserve.one_machine import place_on_gpus
from specserve.serve_args import ServeArgs, draft_engine
from specserve.tools.flags import (
    Parser,
    add_model_flags,
    config_from_flags,
    flags_given,
)

SOURCES = str(Path(cli.__file__).parents[1])


def run(capsys, *words):
    """Run the command line; return exit code, stdout and stderr."""
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")

    assert code == 0
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_no_command_shows_help_and_fails(capsys):
    code, out, _ = run(capsys)

    assert code == 2
    assert "usage: specserve" in out


@pytest.mark.slow
def test_help_is_quick_and_loads_nothing_heavy():
    """Help imports neither torch nor Ray nor transformers, and takes well under a second."""
    script = (
        "import sys, time\nfrom specserve import cli\n"
        "for command in ('target', 'orchestrator', 'serve', 'gateway', 'doctor', 'chat', 'demo',\n"
        "                'bench', 'load', 'verify'):\n"
        "    try:\n        cli.main([command, '--help'])\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or (time.process_time() > 2.0 and 'slow') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown command 'serv'; did you mean 'serve'?"),
        (["--verbos"], "unknown flag '--verbos'"),
        (["target", "toy:", "--block-siz", "8"], "'--block-siz'; did you mean '--block-size'?"),
        (["target", "toy:", "--block-siz=8"], "'--block-siz'; did you mean '--block-size'?"),
        (["target", "toy:", "--block-size", "many"], "--block-size: found 'many', wanted"),
        (["target", "toy:", "--dtype", "float16"], "--dtype: found 'float16', wanted 'auto'"),
        (["target", "toy:", "more"], "unexpected argument 'more'"),
        (["target"], "required: model"),
        (["orchestrator"], "--target-address: missing"),
        (["gateway", "--tokenizer", "toy:"], "--orchestrator-address: missing"),
        (["serve", "toy:", "--port", "70000"], "--port: found '70000', wanted"),
        (["serve", "toy:", "--gpu-memory-utilisation", "1"], "'--gpu-memory-utilization'?"),
        (["serve", "toy:", "--speculative-config", '{"method": "eagle3"}'], "'eagle3' is not"),
        (["serve", "toy:", "--speculative-config", "{}"], "needs the key 'model'"),
        (["demo", "--max-tokens", "none"], "--max-tokens: found 'none'"),
        (["chat", "toy:", "--url", "http://127.0.0.1:1"], "leave the target out"),
    ],
)
def test_a_wrong_word_is_told_on_stderr_and_exits_2(capsys, words, message):
    """Nothing is started for a command line that cannot be meant."""
    code, out, err = run(capsys, *words)

    assert code == 2
    assert message in err
    assert out == ""


def test_flags_are_the_models_fields():
    """Each field is one flag, and what is not given keeps the model's default."""
    parser = Parser("x", "")
    add_model_flags(parser, EngineConfig, "engine", leave_out=("model",))

    arguments = parser.parse(["--num-kv-blocks", "8", "--no-pack-weights", "--dtype=float32"])
    config = config_from_flags(arguments, EngineConfig, model="toy:")

    assert config == EngineConfig(
        model="toy:", num_kv_blocks=8, pack_weights=False, dtype="float32"
    )
    assert flags_given(arguments, EngineConfig) == (
        "--dtype=float32",
        "--num-kv-blocks=8",
        "--no-pack-weights",
    )


def test_a_percent_sign_in_help_is_harmless():
    """Help texts are not format strings."""
    parser = Parser("x", "")
    add_model_flags(parser, ServerConfig, "server")

    assert "--drain-deadline-s" in parser.format_help()


def test_the_draft_engine_is_the_targets_with_another_model():
    """Draft and target hold the same sessions: equal block counts, own model and context."""
    args = ServeArgs.model_validate(
        {
            "target": {"model": "big", "revision": "r1", "num_kv_blocks": 7, "max_model_len": 64},
            "speculative": {"model": "small", "draft_vocab_size": 9},
        }
    )

    draft = args.draft_config()

    assert draft is not None
    assert draft.engine == EngineConfig(
        model="small", num_kv_blocks=7, draft_vocab_size=9, quantization="int8"
    )
    assert args.orchestrator_config().speculative == args.speculative


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_without_a_model_have_no_draft_service(method):
    """The application binds none, and `specserve draft` says where the method runs."""
    args = ServeArgs.model_validate(
        {"target": {"model": "big"}, "speculative": {"method": method, "model": "ignored"}}
    )

    assert args.draft_config() is None
    assert place_on_gpus(args, 1).target_pool.num_gpus == 1
    with pytest.raises(ConfigurationError, match=f"{method} runs in the orchestrator"):
        draft_engine(args.target, args.speculative)


@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_methods_with_a_draft_model_need_one(method):
    args = ServeArgs.model_validate({"target": {"model": "big"}, "speculative": {"method": method}})

    with pytest.raises(ConfigurationError, match=f"{method} needs the key 'model'"):
        args.draft_config()


def test_a_draft_address_that_nobody_would_ask_is_refused(capsys):
    """`specserve orchestrator` with a method of its own needs no draft, and says so."""
    code = cli.main(
        [
            "orchestrator",
            "--target-address=127.0.0.1:1",
            "--draft-address=127.0.0.1:2",
            '--speculative-config={"method": "suffix"}',
        ]
    )

    assert code != 0
    assert "--draft-address: suffix asks no draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_gpus", "share", "target_memory", "draft_memory"),
    [(0, 0, 0.9, 0.9), (1, 0.5, 0.675, 0.225), (2, 1, 0.9, 0.9), (8, 1, 0.9, 0.9)],
)
def test_gpus_are_shared_out(num_gpus, share, target_memory, draft_memory):
    """A GPU each while they last; one GPU is divided, its memory mostly to the target."""
    args = ServeArgs.model_validate({"target": {"model": "big"}, "speculative": {"model": "small"}})

    placed = place_on_gpus(args, num_gpus)
    draft = placed.draft_config()

    assert placed.target_pool.num_gpus == placed.draft_pool.num_gpus == share
    assert placed.target.gpu_memory_utilization == pytest.approx(target_memory)
    assert draft is not None
    assert draft.engine.gpu_memory_utilization == pytest.approx(draft_memory)


def test_a_named_gpu_count_is_left_alone():
    args = ServeArgs.model_validate({"target": {"model": "big"}, "target_pool": {"num_gpus": 4}})

    assert place_on_gpus(args, 8) is args


def test_an_unwritten_flag_is_no_value():
    """A namespace without the flag gives the default, not None."""
    assert config_from_flags(argparse.Namespace(), ServerConfig) == ServerConfig()
