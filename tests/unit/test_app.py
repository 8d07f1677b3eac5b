"""The Serve application, built and not run: no Ray cluster is needed for that."""

import inspect

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import (
    _apply_app_level_autoscaling_config,
    _apply_autoscaling_config,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from specserve import app
from specserve.serve_args import ServeArgs
from specserve.serve_config import serve_config

pytestmark = pytest.mark.slow  # Ray is imported

ARGS = {
    "target": {"model": "toy:vocab_size=96,seed=7"},
    "speculative": {"model": "toy:vocab_size=96,seed=7,noise=0.7", "num_speculative_tokens": 3},
    "target_pool": {"num_replicas": 2, "num_gpus": 1},
}


def deployments_of(application):
    """Return {name: (options, bound arguments)} of everything bound into an application."""
    found = {}
    waiting = [application]
    while waiting:
        bound = waiting.pop()._bound_deployment
        found[bound.name] = (bound._deployment_config, bound.init_args)
        waiting += [value for value in bound.init_args if isinstance(value, type(application))]
    return found


def test_a_serve_config_names_the_builder_and_its_args():
    """Serve validates `args` only when the annotation is the model itself, not a string."""
    (parameter,) = inspect.signature(app.build_app).parameters.values()

    assert parameter.annotation is ServeArgs


def test_four_deployments_are_bound_together():
    """The gateway asks the orchestrator, which finds target and draft; each has its own options."""
    bound = deployments_of(app.build_app(ServeArgs.model_validate(ARGS)))

    assert set(bound) == {"gateway", "orchestrator", "draft", "target"}
    assert bound["target"][0].num_replicas == 2
    assert bound["draft"][1][0].speculative.num_speculative_tokens == 3
    assert bound["orchestrator"][1][0].speculative.num_speculative_tokens == 3
    for config, _ in bound.values():
        # Serve must not end a replica that is still draining.
        assert config.graceful_shutdown_timeout_s > 30


def test_serve_waits_for_a_gateways_live_requests_as_long_as_they_may_take():
    """A gateway replica that is scaled down keeps its streams for the grace that was configured."""
    args = ServeArgs.model_validate({**ARGS, "gateway": {"shutdown_grace_s": 120}})
    bound = deployments_of(app.build_app(args))

    assert bound["gateway"][0].graceful_shutdown_timeout_s > 120
    assert bound["target"][0].graceful_shutdown_timeout_s < 120


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_method_without_a_model_has_no_draft_deployment(method):
    """The orchestrator proposes by itself, and is told how."""
    args = ServeArgs.model_validate({"target": ARGS["target"], "speculative": {"method": method}})
    bound = deployments_of(app.build_app(args))

    assert set(bound) == {"gateway", "orchestrator", "target"}
    assert bound["orchestrator"][1][0].speculative.method == method
    assert bound["orchestrator"][1][2] is None


def test_a_target_alone_has_no_draft():
    bound = deployments_of(app.build_app(ServeArgs.model_validate({"target": ARGS["target"]})))

    assert set(bound) == {"gateway", "orchestrator", "target"}
    assert bound["orchestrator"][1][2] is None


def test_one_event_loop_per_replica_is_asked_for_where_it_is_not_set_B182(monkeypatch):
    """User code shares Serve's loop: grpc.aio in two loops of one process makes trouble."""
    args = ServeArgs.model_validate(ARGS)
    name = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"

    monkeypatch.delenv(name, raising=False)
    options = app._options(args, "draft")
    assert options["ray_actor_options"]["runtime_env"]["env_vars"][name] == "0"

    for key, value in app.REPLICA_ENV.items():
        monkeypatch.setenv(key, value)
    assert "runtime_env" not in app._options(args, "draft")["ray_actor_options"]


def test_builder_and_rendered_file_say_the_same(monkeypatch):
    """What `build_app` binds is what the file says, option by option."""
    for name in app.REPLICA_ENV:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "somewhere:exporter")
    pool = {"num_gpus": 0.5, "node_group": "draft", "max_replicas_per_node": 1}
    scaled = {"num_replicas": 2, "autoscaling": {"max_replicas": 4, "target_load": 16}}
    args = ServeArgs.model_validate({**ARGS, "draft_pool": pool, "target_pool": scaled})
    (application,) = serve_config(args)["applications"]
    rendered = {deployment.pop("name"): deployment for deployment in application["deployments"]}

    for role in args.roles:
        built = app._options(args, role)
        assert built.pop("max_constructor_retry_count") == args.max_start_attempts
        # How a file's pools are scaled is the application's policy, which only files can have.
        scaling, in_file = built.pop("autoscaling_config", {}), rendered[role]
        assert scaling.get("max_replicas") == in_file.pop("autoscaling_config", {}).get(
            "max_replicas"
        )
        assert built == in_file
    bound = deployments_of(app.build_app(args))
    assert bound["target"][0].autoscaling_config.max_replicas == 4
    assert bound["draft"][0].num_replicas == 1


def test_serve_applies_its_delays_and_bounds_to_the_policy() -> None:
    """Serve's own wrapper and context take the policy: more is asked at once, less after a time."""
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=8,
        target_ongoing_requests=16,
        upscale_delay_s=0,
        downscale_delay_s=300,
        policy={"policy_function": "specserve.autoscaling.serve_policy:load_policy"},
    )
    policy = _apply_autoscaling_config(config.policy.get_policy())

    def decide(sessions: float) -> int:
        context = AutoscalingContext(
            deployment_id=None,
            deployment_name="target",
            app_name="specserve",
            current_num_replicas=2,
            target_num_replicas=2,
            running_replicas=[],
            total_num_requests=0,
            total_queued_requests=0,
            aggregated_metrics=lambda: {"num_sessions": {"a": sessions, "b": 0.0}},
            raw_metrics={},
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=8,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=config,
        )
        return policy(context)[0]

    assert decide(70) == 5
    assert decide(32) == 2
    assert decide(0) == 2  # not before downscale_delay_s


def test_serve_takes_the_applications_policy_and_gives_it_what_replicas_report() -> None:
    """Serve's own wrapper: made once with the rendered numbers; drafts come from none by demand."""
    scaled = {"num_replicas": 1, "autoscaling": {"max_replicas": 8, "target_load": 16}}
    drafts = {
        "num_replicas": 0,
        "autoscaling": {"min_replicas": 0, "max_replicas": 4, "target_load": 32},
    }
    args = ServeArgs.model_validate({**ARGS, "draft_pool": drafts, "target_pool": scaled})
    config = ServeDeploySchema.model_validate(serve_config(args))
    (application,) = config.applications
    assert application.autoscaling_policy is not None
    policy = _apply_app_level_autoscaling_config(
        _resolve_policy_callable(AutoscalingPolicy(**application.autoscaling_policy))
    )
    reports: dict[str, dict[str, dict[str, float]]] = {
        "target": {"num_sessions": {"t": 16.0}, "queue_s": {"t": 0.1}},
        "orchestrator": {"num_waiting": {"o": 24.0}, "draft_demand": {"o": 40.0}},
        "draft": {},
    }
    scalings = {d.name: d.autoscaling_config for d in application.deployments if d.name in reports}
    wanted = {"target": 1, "orchestrator": 1, "draft": 0}
    for now in (0.0, 9.0, 10.0):
        contexts = {
            name: AutoscalingContext(
                deployment_id=None,
                deployment_name=name,
                app_name="specserve",
                current_num_replicas=wanted[name],
                target_num_replicas=wanted[name],
                running_replicas=[],
                total_num_requests=0,
                total_queued_requests=0,
                aggregated_metrics=lambda name=name: reports[name],
                raw_metrics={},
                capacity_adjusted_min_replicas=0,
                capacity_adjusted_max_replicas=8,
                policy_state={},
                last_scale_up_time=None,
                last_scale_down_time=None,
                current_time=now,
                config=AutoscalingConfig(**scalings[name]),
            )
            for name in reports
        }
        wanted, _ = policy(contexts)
        expected = {"target": 1, "draft": 0} if now < 10 else {"target": 2, "draft": 1}
        assert wanted == {"orchestrator": 1, **expected}
