"""The conditions of a run as tables of text: what was served, and everything that was fixed.

Pure: values in, text cells out.
"""

from __future__ import annotations

from specserve.tools.bench.conditions import Conditions
from specserve.tools.bench.rows import Table, named
from specserve.tools.terminal import human_bytes


def models(conditions: Conditions) -> Table:
    """What was served: one row a model, with its memory by weights and KV."""
    rows = [
        (
            deployment.name,
            model.role,
            model.model_id,
            model.dtype,
            model.device,
            human_bytes(model.weights_bytes),
            f"{human_bytes(model.kv_cache_bytes)} ({model.num_kv_blocks} x {model.block_size})",
            model.weights_fingerprint[:16],
        )
        for deployment in conditions.deployments
        for model in deployment.models
    ]
    header = ("system", "role", "model", "dtype", "device", "weights", "KV cache", "fingerprint")
    return Table("Models", header, tuple(rows))


def conditions_table(conditions: Conditions) -> Table:
    """Everything else that was fixed."""
    hardware, sampling, prompts = conditions.hardware, conditions.sampling, conditions.prompts
    rows = [
        ("processor", f"{hardware.cpu}, {hardware.num_usable_cpus} of {hardware.num_cpus} usable"),
        ("memory", human_bytes(hardware.memory_bytes)),
        ("accelerators", "; ".join(hardware.gpus) or "none"),
        ("system", hardware.system),
        ("versions", named(conditions.versions)),
        (
            "prompts",
            (
                f"{prompts.source}, {prompts.count} ({named(prompts.categories)}), "
                f"{prompts.num_tokens} tokens, sha256 {prompts.sha256[:16]}"
            ),
        ),
        (
            "sampling",
            (
                f"temperature {sampling.temperature:g}, seed {sampling.seed}, "
                f"{sampling.max_tokens} tokens, end of text "
                f"{'ignored' if sampling.ignore_eos else 'honoured'}"
            ),
        ),
        ("warm-up", conditions.warm_up),
        ("synchronisation", conditions.synchronisation),
    ]
    for each in conditions.deployments:
        told = [
            each.address,
            each.speculative_config,
            " ".join(each.engine_flags),
            named(each.versions),
            "" if each.resident_bytes is None else f"{human_bytes(each.resident_bytes)} resident",
        ]
        rows.append((each.name, "; ".join(text for text in told if text)))
    rows.append(("fingerprint", conditions.fingerprint))
    return Table("Conditions", ("what", "fixed to"), tuple(rows))
