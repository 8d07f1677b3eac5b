"""Which other engines run beside ours, and with what. Values only; starts nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import ConfigurationError
from specserve.model.toy import PREFIX as TOY_PREFIX

PEERS = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer to start."""

    backend: str
    """transformers or vllm."""
    python: str
    """Interpreter of the peer's environment."""
    target: str
    """Model directory or hub id."""
    draft: str | None
    """Draft model; None decodes with the target alone."""
    dtype: str
    device: str
    num_threads: int | None
    num_speculative_tokens: int
    """K; vLLM is told it, transformers chooses by itself."""
    arguments: dict[str, object]
    """Handed on to vLLM's `LLM` or to transformers' `generate`."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.backend if self.draft is None else f"{self.backend}-speculative"

    def speculative_json(self) -> str:
        """Return how it speculates, as JSON; empty when it does not."""
        if self.draft is None:
            return ""
        chosen = {"num_speculative_tokens": self.num_speculative_tokens}
        return json.dumps({"model": Path(self.draft).name, **(chosen if self.is_vllm else {})})

    def flags(self) -> tuple[str, ...]:
        """Return its other settings, for a record."""
        values = {"dtype": self.dtype, "device": self.device, "num_threads": self.num_threads}
        return tuple(f"{name}={value}" for name, value in {**values, **self.arguments}.items())

    @property
    def is_vllm(self) -> bool:
        """It needs an environment of its own, and takes a whole wave at once."""
        return self.backend == "vllm"

    def environment(self) -> dict[str, str]:
        """Return what its process finds in its environment besides ours; what is set there wins."""
        if not self.is_vllm:
            return {}
        values = {"VLLM_NO_USAGE_STATS": "1"}
        if self.device == "cpu":
            # vLLM's manual asks for it, and warns of slow speculation without.
            openmp = Path(self.python).parent.parent / "lib" / "libiomp5.so"
            if openmp.is_file():
                values["LD_PRELOAD"] = str(openmp)
            if self.num_threads is not None:
                cores = sorted(os.sched_getaffinity(0))[-self.num_threads :]
                values["OMP_NUM_THREADS"] = str(self.num_threads)
                values["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        return {name: value for name, value in values.items() if name not in os.environ}

    def options(self) -> str:
        """Return what the runner is told, as JSON."""
        names = ("backend", "target", "draft", "dtype", "device", "num_threads")
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        values["num_speculative_tokens"] = self.num_speculative_tokens
        return json.dumps({**values, "arguments": self.arguments})


def check_peer(spec: PeerSpec) -> None:
    """Refuse a peer that cannot run, before anything is started.

    Raises:
        ConfigurationError: naming the flag.
    """
    if spec.backend == "vllm" and not Path(spec.python).is_file():
        raise ConfigurationError(
            f"--vllm-python: {spec.python or 'not given'}; the interpreter of an environment "
            "with vLLM was wanted"
        )
    for model in (spec.target, spec.draft or ""):
        if model.startswith(TOY_PREFIX):
            raise ConfigurationError(f"--peer: {spec.backend} cannot load {model}")


def peer_specs(
    names: Sequence[str],
    target: str,
    draft: str | None,
    *,
    vllm_python: str | None,
    dtype: str,
    device: str,
    num_threads: int | None,
    num_speculative_tokens: int,
    vllm_arguments: dict[str, object],
) -> list[PeerSpec]:
    """Return the peers to start: each with the target alone, and with the draft if there is one."""
    return [
        PeerSpec(
            backend=name,
            python=sys.executable if name == "transformers" else vllm_python or "",
            target=target,
            draft=each,
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            num_speculative_tokens=num_speculative_tokens,
            arguments=vllm_arguments if name == "vllm" else {},
        )
        for name in names
        for each in ((None, draft) if draft is not None else (None,))
    ]
