"""`make validate K8S=DIR`: all checks on folders of manifests; exit code 1 with complaints."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support.manifests.documents import BuildFailure, Manifests, read, text_of
from support.manifests.end_rules import END_RULES
from support.manifests.network import NETWORK_RULES
from support.manifests.operator_rules import OPERATOR_RULES, Rule, problems_by_rule
from support.manifests.placement_rules import PLACEMENT_RULES
from support.manifests.pod_rules import POD_RULES
from support.manifests.schemas import kubernetes_problems, ray_service_problems
from support.manifests.secret_rules import SECRET_RULES
from support.manifests.serve_rules import SERVE_RULES

RULES: tuple[Rule, ...] = (
    *OPERATOR_RULES,
    *POD_RULES,
    *END_RULES,
    *SERVE_RULES,
    *PLACEMENT_RULES,
    *NETWORK_RULES,
    *SECRET_RULES,
)


def problems(manifests: Manifests, crds: Path | None) -> Iterator[str]:
    """Apply every check; KubeRay's schema where its folder is given."""
    yield from kubernetes_problems(manifests.documents)
    if crds is not None:
        yield from ray_service_problems(manifests.documents, crds)
    yield from problems_by_rule(manifests, RULES)


def main(arguments: list[str]) -> int:
    """Check the folders that are named."""
    folders = [Path(argument) for argument in arguments]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing or not folders:
        print(f"found {missing or 'nothing'}, wanted folders of manifests", file=sys.stderr)
        return 2
    crds = Path(os.environ["KUBERAY_CRDS"]) if os.environ.get("KUBERAY_CRDS") else None
    if crds is None:
        print("KUBERAY_CRDS is not set, so KubeRay's own schema is left out")
    return max(_check(folder, crds) for folder in folders)


def _check(folder: Path, crds: Path | None) -> int:
    digest = "nothing"
    try:
        text = text_of(folder)
        digest = hashlib.sha256(text).hexdigest()
        found = list(problems(Manifests(read(text.decode())), crds))
    except BuildFailure as error:
        found = [f"kustomize: {error}"]
    for problem in found:
        print(f"{folder}: {problem}")
    # What `kubectl kustomize FOLDER | sha256sum` must say where it is applied.
    print(f"{folder}: {len(found)} problems in sha256:{digest}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
