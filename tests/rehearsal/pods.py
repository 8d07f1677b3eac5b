"""Pods by hand: what a container is to a Ray node, made of Linux namespaces on this machine.

Each has an address of its own, sees only its own processes, has a root that it cannot write, a /tmp
and a /dev/shm of its own, and runs as a user without capabilities: as the manifests ask of the
cluster. Needs root, `ip`, `unshare`, `setpriv` and `nsenter`. Knows Ray's command line and the
variables that KubeRay's operator sets; knows nothing of Serve.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
BRIDGE = "specserve0"
NETWORK = "10.77.0"
USER = 10001
TOKEN = "a-token-of-sixteen-or-more-characters"
PROGRAMS = ("ip", "unshare", "setpriv", "nsenter")

_DROP = (
    f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs "
    "--bounding-set=-all --inh-caps=-all --"
)


def missing() -> str:
    """Say what this machine lacks; empty when it has all."""
    if os.geteuid() != 0:
        return "namespaces need root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(lacking)}" if lacking else ""


class Network:
    """A bridge that pods are plugged into."""

    def __enter__(self) -> Self:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        return self

    def __exit__(self, *exc_info: object) -> None:
        _run("ip", "link", "del", BRIDGE)


class Pod:
    """One Ray node. `group` is the worker group's name, or `head`."""

    def __init__(
        self,
        name: str,
        group: str,
        number: int,
        log: Path,
        num_cpus: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.address = f"{NETWORK}.{number}"
        self.log = log
        self._extra_env = dict(env or {})
        self._namespace = f"specserve-{name}"
        self._link = f"specs{number}"
        self._plug()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._namespace),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-euc", f"{_mounts()}\nexec {_DROP} {self._start(num_cpus)}"),
                ],
                env=self._env(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _plug(self) -> None:
        _run("ip", "netns", "add", self._namespace)
        peer = f"{self._link}p"
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", peer)
        _run("ip", "link", "set", self._link, "master", BRIDGE, "up")
        _run("ip", "link", "set", peer, "netns", self._namespace)
        inside = ("ip", "-n", self._namespace)
        _run(*inside, "addr", "add", f"{self.address}/24", "dev", peer)
        _run(*inside, "link", "set", peer, "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "route", "add", "default", "via", f"{NETWORK}.254")

    def _env(self) -> dict[str, str]:
        head = f"{NETWORK}.1:6379"
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT / "services"),
            "NUMBA_CACHE_DIR": "/tmp/numba",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
            "HF_HUB_OFFLINE": "1",
            # As KubeRay's operator does.
            "RAY_NODE_TYPE_NAME": "headgroup" if self.group == "head" else self.group,
            "RAY_CLOUD_INSTANCE_ID": self.name,
            "RAY_ADDRESS": "127.0.0.1:6379" if self.group == "head" else head,
            # With fault tolerance of the head's state.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            **self._extra_env,
        }

    def _start(self, num_cpus: int) -> str:
        words = ["ray", "start", "--block", f"--node-ip-address={self.address}"]
        words += ["--object-store-memory=100000000", "--num-gpus=0"]
        if self.group == "head":
            words += ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--num-cpus=0"]
            if password := self._extra_env.get("REDIS_PASSWORD"):
                words.append(f"--redis-password={password}")
        else:
            words += [f"--address={NETWORK}.1:6379", f"--num-cpus={num_cpus}"]
        return shlex.join(words)

    def run(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod, as `kubectl exec` and preStop hooks do."""
        inside = [f"--target={self._first().pid}", "--mount", "--pid", "--net"]
        return subprocess.run(
            ["nsenter", *inside, *_DROP.split(), *words],
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def has_ended(self, within_s: float) -> bool:
        """Tell whether the pod's process 1 ends in time."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _first(self) -> psutil.Process:
        """Return process 1 of the pod: the child of `unshare`."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for process in psutil.Process(self._process.pid).children():
                return process
            time.sleep(0.05)
        raise AssertionError(f"{self.name} has no process: {self.log.read_text()}")

    def remove(self) -> None:
        """End every process of the pod at once, and unplug it. Idempotent."""
        if self._process.poll() is None:
            # With process 1 of a namespace the kernel ends all the others.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)


def _mounts() -> str:
    """Return the shell lines that make the pod's file system."""
    lines = ["mount --make-rprivate /"]
    base = Path(sys.base_prefix)
    if base.is_relative_to("/root"):
        # The interpreter lies in a home that nobody else may enter: show it, and nothing beside.
        lines += [
            "mkdir -p /run/python",
            f"mount --bind {base} /run/python",
            "mount -t tmpfs -o mode=755,size=1m tmpfs /root",
            f"mkdir -p {base}",
            f"mount --move /run/python {base}",
            "mount -o remount,ro /root",
        ]
    # /tmp is the pod's own: of a checkout that lies there the pod sees it, and nothing beside.
    below_tmp = ROOT.is_relative_to("/tmp")
    if below_tmp:
        lines += ["mkdir -p /run/checkout", f"mount --bind {ROOT} /run/checkout"]
    lines.append("mount -t tmpfs -o mode=1777,size=2g,nosuid,nodev,noexec tmpfs /tmp")
    if below_tmp:
        lines += [f"mkdir -p {ROOT}", f"mount --move /run/checkout {ROOT}"]
    lines += [
        f"install -d -o {USER} -g {USER} /tmp/home",
        "mount -t tmpfs -o mode=1777,size=512m,nosuid,nodev,noexec tmpfs /dev/shm",
        "mount -o remount,ro,bind /",
    ]
    return "\n".join(lines)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{shlex.join(words)}: {done.stderr.strip()}")
