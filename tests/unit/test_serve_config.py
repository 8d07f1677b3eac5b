"""One file of settings; a machine, a cluster and the command line take the same from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve import cli
from specserve.errors import ConfigurationError
from specserve.one_machine import place_on_one_machine
from specserve.serve_args import ServeArgs, check_serve_args
from specserve.serve_config import REPLICA_ENV, deployment_options, serve_config
from specserve.tools.config import render
from specserve.tools.config_file import load_serve_args, parse_serve_args

SETTINGS = """
target: {model: "toy:vocab_size=96,seed=7"}
speculative: {model: "toy:vocab_size=96,seed=7,noise=0.7", num_speculative_tokens: 3}
server: {host: 0.0.0.0, drain_deadline_s: 40}
target_port: 21200
gateway: {port: 8000, shutdown_grace_s: 50}
target_pool:
  num_replicas: 2
  num_cpus: 4
  num_gpus: 1
  node_group: target
  autoscaling: {max_replicas: 4, target_load: 16}
draft_pool: {num_replicas: 3, num_gpus: 0.5, node_group: draft, max_replicas_per_node: 1}
"""


SCALING = "{max_replicas: 4, target_load: 1}"


def args_of(text: str = SETTINGS) -> ServeArgs:
    return parse_serve_args(text, "settings")


def deployments_of(config: dict[str, Any]) -> dict[str, Any]:
    (application,) = config["applications"]
    return {deployment["name"]: deployment for deployment in application["deployments"]}


def test_every_setting_of_a_pool_reaches_serve() -> None:
    """Replicas, processors, GPUs, node group and drain, each by Serve's own name for it."""
    found = deployments_of(serve_config(args_of()))

    assert set(found) == {"gateway", "orchestrator", "target", "draft"}
    draft = found["draft"]
    assert (draft["num_replicas"], draft["max_replicas_per_node"]) == (3, 1)
    actor = draft["ray_actor_options"]
    assert (actor["num_gpus"], actor["label_selector"]) == (0.5, {"ray.io/node-group": "draft"})
    assert actor["runtime_env"]["env_vars"] == {
        **REPLICA_ENV,
        "OTEL_SERVICE_NAME": "specserve-draft",
    }
    target = found["target"]
    assert "num_replicas" not in target
    scaling = target["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (
        1,
        2,
        4,
    )
    assert scaling["target_ongoing_requests"] == 16
    assert "policy" not in scaling
    assert target["graceful_shutdown_timeout_s"] > 40
    assert found["gateway"]["graceful_shutdown_timeout_s"] > 50
    assert "label_selector" not in found["gateway"]["ray_actor_options"]


def test_the_limit_of_requests_is_the_orchestrators_B167() -> None:
    """What the file says reaches it, and no queue of Serve's stands before it in any deployment."""
    settings = f"{SETTINGS}\norchestrator: {{max_num_requests: 3, max_num_waiting: 4}}\n"
    limits = args_of(settings).orchestrator_config()
    assert (limits.max_num_requests, limits.max_num_waiting) == (3, 4)
    for deployment in deployments_of(serve_config(args_of(settings))).values():
        assert deployment["max_ongoing_requests"] > 1000
        assert deployment.get("max_queued_requests", -1) == -1


def test_switching_scaling_on_replaces_replicas_that_report_no_load() -> None:
    """Serve asks a replica for its load only where it was scaled when it started."""
    assert deployment_options(args_of(), "target", {})["autoscaling_config"]["policy"] == {
        "policy_function": "specserve.autoscaling.serve_policy:load_policy"
    }
    scaled = deployment_options(args_of(), "target", {})
    unscaled = deployment_options(args_of(), "draft", {})

    assert scaled["ray_actor_options"]["runtime_env"]["env_vars"] == {"SPECSERVE_AUTOSCALED": "1"}
    assert "runtime_env" not in unscaled["ray_actor_options"]


def test_gateways_are_scaled_by_serves_own_count_of_requests() -> None:
    text = SETTINGS + "gateway_pool: {autoscaling: {max_replicas: 4, target_load: 100}}\n"

    scaling = deployment_options(args_of(text), "gateway", {})["autoscaling_config"]

    assert "policy" not in scaling


def test_one_policy_scales_all_pools_of_a_rendered_application() -> None:
    """Its delays are its own, so that Serve adds none; what is not scaled is not in it."""
    (application,) = serve_config(args_of())["applications"]

    policy = application["autoscaling_policy"]
    assert policy["policy_function"] == "specserve.autoscaling.serve_policy:PoolsPolicy"
    assert set(policy["policy_kwargs"]) == {"target"}
    assert policy["policy_kwargs"]["target"]["target_kv_usage"] == 0.7
    scaling = deployments_of(serve_config(args_of()))["target"]["autoscaling_config"]
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (0.0, 0.0)
    (unscaled,) = serve_config(args_of("target: {model: m}"))["applications"]
    assert "autoscaling_policy" not in unscaled


def test_drafts_may_be_none_and_orchestrators_say_what_they_are_wanted_for() -> None:
    """Orchestrators of a fixed number are scaled to it, for Serve asks no others; they are ready
    without a draft."""
    text = SETTINGS.replace(
        "draft_pool: {num_replicas: 3,",
        "draft_pool: {autoscaling: {min_replicas: 0, max_replicas: 4, target_load: 32}, "
        "num_replicas: 0,",
    )
    args = args_of(text)
    (application,) = serve_config(args)["applications"]

    scaling = deployments_of(serve_config(args))["draft"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"]) == (0, 0)
    fixed = deployments_of(serve_config(args))["orchestrator"]["autoscaling_config"]
    assert (fixed["min_replicas"], fixed["max_replicas"]) == (1, 1)
    assert set(application["autoscaling_policy"]["policy_kwargs"]) == {
        "orchestrator",
        "target",
        "draft",
    }
    assert application["args"]["orchestrator"] == {"drafts_optional": True}
    assert args.orchestrator_config().drafts_optional
    assert not args_of().orchestrator_config().drafts_optional


def test_each_number_stands_once_in_what_is_rendered() -> None:
    """Pools are Serve's deployments, and not arguments of the builder as well."""
    (application,) = serve_config(args_of())["applications"]

    assert application["import_path"] == "specserve.app:build_app"
    assert application["args"] == {
        "target": {"model": "toy:vocab_size=96,seed=7"},
        "speculative": {
            "model": "toy:vocab_size=96,seed=7,noise=0.7",
            "num_speculative_tokens": 3,
        },
        "server": {"host": "0.0.0.0", "drain_deadline_s": 40.0},
        "target_port": 21200,
        "gateway": {"port": 8000, "shutdown_grace_s": 50.0},
    }


def test_no_draft_where_none_is_asked() -> None:
    found = deployments_of(
        serve_config(args_of("target: {model: m}\nspeculative: {method: ngram}"))
    )

    assert set(found) == {"gateway", "orchestrator", "target"}


def test_what_is_rendered_can_be_read_again(tmp_path: Path) -> None:
    """The file is plain YAML without anchors, and names the file to edit."""
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS)

    text = render(str(path))

    assert text.startswith("# Rendered from settings.yaml by `specserve config render`.")
    assert yaml.safe_load(text) == serve_config(args_of())
    assert "&id" not in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("targets: {model: m}", "unknown key 'targets'; did you mean 'target'?"),
        (
            "target: {model: m}\ntarget_pool: {num_replica: 2}",
            "unknown key 'target_pool.num_replica'; did you mean 'num_replicas'?",
        ),
        (
            "target: {model: m}\ntarget_pool: {autoscaling: {max_replica: 2, target_load: 1}}",
            "'target_pool.autoscaling.max_replica'; did you mean 'max_replicas'?",
        ),
        ("target: {model: m}\ntarget: {model: n}", "key 'target' is given twice"),
        ("target: {model: m}\ntarget_port: '21200'", "target_port: found '21200'"),
        ("target: {model: m}\ntarget_pool: {num_replicas: 0}", "target_pool has 0 replicas; only"),
        (
            "target: {model: m}\norchestrator_pool: {autoscaling: "
            + SCALING.replace("{", "{min_replicas: 0, ")
            + "}",
            "orchestrator_pool has 0 replicas; only drafts",
        ),
        (
            "target: {model: m}\nspeculative: {model: d}\ndraft_pool: {num_replicas: 0}",
            "draft_pool.num_replicas is 0 without autoscaling",
        ),
        ("- target", "wanted a mapping"),
        ("target: [", "settings: "),
        ("", "wanted a mapping"),
        ("target: {model: m}\nserver: {port: 1}", "set draft_port, target_port"),
        ("target: {model: m}\norchestrator: {server: {host: x}}", "set that alone"),
        ("target: {model: m}\ndraft_pool: {num_replicas: 2}", "nothing asks a draft"),
        ("target: {model: m}\nspeculative: {method: draft_model}", "needs the key 'model'"),
        (
            "target: {model: m}\ntarget_pool: {num_replicas: 5, autoscaling: " + SCALING + "}",
            "target_pool.num_replicas 5 is outside autoscaling's 1 to 4",
        ),
        (
            "target: {model: m}\nspeculative: {method: ngram, prompt_lookup_min: 9}",
            "prompt_lookup_min 9 is above",
        ),
    ],
)
def test_wrong_file_is_refused_by_name(text: str, complaint: str) -> None:
    """Nothing in a file is ignored: what is not understood is named, with the nearest right key."""
    with pytest.raises(ConfigurationError) as raised:
        args_of(text)

    assert str(raised.value).startswith("settings: ")
    assert complaint in str(raised.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.yaml: cannot be read"):
        load_serve_args(str(tmp_path / "no.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="no UTF-8 text"):
        load_serve_args(str(tmp_path / "binary.yaml"))


def test_one_machine_has_no_groups_and_must_have_room() -> None:
    """The same file serves on one machine: its groups are left out, its reservations are not."""
    args = args_of()

    placed = place_on_one_machine(args, num_cpus=16, num_gpus=4)

    assert placed.target_pool.node_group is None
    assert placed.draft_pool.max_replicas_per_node is None
    assert placed.target_pool.num_gpus == 1
    options = deployment_options(placed, "draft", {})
    assert "label_selector" not in options["ray_actor_options"]
    with pytest.raises(ConfigurationError, match=r"reserve 3\.5 num_gpus and this machine has 1"):
        place_on_one_machine(args, num_cpus=16, num_gpus=1)
    with pytest.raises(ConfigurationError, match=r"reserve 8\.5 num_cpus and this machine has 8"):
        place_on_one_machine(args, num_cpus=8, num_gpus=4)


def test_pools_on_one_machine_have_ports_of_their_own() -> None:
    """Two targets take two ports; a draft that starts at the second is refused by name."""
    text = SETTINGS + "draft_port: "

    place_on_one_machine(args_of(text + "21202"), num_cpus=16, num_gpus=4)
    with pytest.raises(ConfigurationError, match="port 21201 is also taken by target_port"):
        place_on_one_machine(args_of(text + "21201"), num_cpus=16, num_gpus=4)
    with pytest.raises(ConfigurationError, match=r"also taken by gateway\.port"):
        place_on_one_machine(args_of(text + "7998"), num_cpus=16, num_gpus=4)


def test_defaults_contradict_nothing() -> None:
    check_serve_args(ServeArgs.model_validate({"target": {"model": "m"}}))


class TestCommand:
    """`specserve config`, as it is typed."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "specserve.yaml"
        path.write_text(SETTINGS)
        return path

    def test_render_writes_or_prints(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = path.with_name("serve.yaml")

        assert cli.main(["config", "render", "--config", str(path), "--output", str(output)]) == 0
        assert cli.main(["config", "render", "--config", str(path)]) == 0

        assert capsys.readouterr().out == output.read_text()

    def test_check_says_what_is_wrong(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config", "check", "--config", str(path)]) == 0
        path.write_text("target: {modell: m}")
        assert cli.main(["config", "check", "--config", str(path)]) == 2
        assert "'target.modell'; did you mean 'model'?" in capsys.readouterr().err

    def test_output_must_be_writable(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["config", "render", "--config", str(path), "--output", str(path.parent)]

        assert cli.main(words) == 2
        assert "--output: cannot write" in capsys.readouterr().err

    def test_serve_takes_the_file_alone(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A flag beside the file would be a second source: it is refused by name."""
        assert cli.main(["serve", "--config", str(path), "--port=9", "--max-model-len=64"]) == 2
        assert "leave out --max-model-len, --port" in capsys.readouterr().err


def test_one_setting_secures_every_link() -> None:
    """`server.tls_*` holds for the servers and for the gateway, which dials; nothing else does."""
    text = SETTINGS.replace("server: {", "server: {tls_dir: /etc/specserve/tls, ", 1)
    args = args_of(text)
    draft = args.draft_config()
    assert draft is not None

    configs = [
        args.gateway_config(),
        args.orchestrator_config().server,
        args.target_config().server,
        draft.server,
    ]
    assert {config.tls_dir for config in configs} == {"/etc/specserve/tls"}
    assert {config.tls_server_name for config in configs} == {"specserve.internal"}
    with pytest.raises(ConfigurationError, match=r"set server\.tls_dir alone"):
        args_of(SETTINGS.replace("gateway: {", "gateway: {tls_dir: /etc, ", 1))


def test_a_required_verification_reaches_the_orchestrator_from_a_file() -> None:
    """And so the builder's arguments in what Ray Serve is given."""
    setting = "orchestrator: {require_verified: true, verified_dir: /var/lib/verified}\n"
    args = args_of(SETTINGS + setting)

    config = args.orchestrator_config()
    assert (config.require_verified, config.verified_dir) == (True, "/var/lib/verified")
    (application,) = serve_config(args)["applications"]
    assert ServeArgs.model_validate(application["args"]).orchestrator_config() == config
    assert not args_of().orchestrator_config().require_verified


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key-file=none",), "--api-key-file: none: cannot be read"),
        (("--tls-dir=none",), "--tls-dir: none/ca.crt: No such file"),
        (("--config=settings.yaml",), "cannot be read"),
    ],
)
def test_serve_refuses_missing_secrets_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = SETTINGS.replace("gateway: {", "gateway: {api_key_file: keys, ", 1)
    (tmp_path / "settings.yaml").write_text(text)

    assert cli.main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err
