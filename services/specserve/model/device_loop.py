"""The device loop: messages in, one engine iteration, output out. Runs in a process or a thread.

Knows an engine and two functions; knows neither sockets nor event loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.model.batch_record import BatchRecord
from specserve.model.engine_base import EngineLike
from specserve.model.grammar_gate import GrammarGate, grammars_of
from specserve.model.messages import (
    EngineOutput,
    Message,
    ProposeCall,
    Role,
    Shutdown,
    VerifyCall,
)
from specserve.model.toy import PREFIX as TOY_PREFIX

if TYPE_CHECKING:
    from specserve.model.runner import Runner

_PROGRESS_S = 0.1
"""Long work without replies (prefill) still reports its iteration count this often."""


def build_engine(
    config: EngineConfig,
    role: Role,
    speculative: SpeculativeConfig | None,
    record: BatchRecord | None = None,
) -> EngineLike:
    """Load what the configuration names.

    Args:
        record: where it writes down whom it computes.

    Raises:
        SpecServeError: the model is missing, or the configuration is wrong.
    """
    # Imported late: torch takes seconds to import, and a server with a device process needs none.
    from specserve.model.engine import Engine  # noqa: PLC0415
    from specserve.model.planted_faults import plant_wanted  # noqa: PLC0415

    plant_wanted(role)
    speculative = speculative or SpeculativeConfig()
    grammars = grammars_of(config)
    engine = Engine(
        _load_runner(config),
        config,
        role=role,
        draft_sample_top_k=speculative.draft_sample_top_k,
        draft_confidence_threshold=speculative.draft_confidence_threshold,
        num_cached_outcomes=speculative.num_cached_outcomes,
        grammars=grammars,
        record=record,
    )
    return GrammarGate(engine, grammars)


def run_device(
    engine: EngineLike,
    receive: Callable[[float | None], Iterable[Message]],
    send: Callable[[EngineOutput], None],
    record: BatchRecord,
) -> None:
    """Serve until Shutdown.

    Args:
        receive: waits up to so many seconds (None: for ever, 0: not at all), takes what has come.
        send: hands an output to the server.
        record: who is computed by now; the engine writes there too.

    Raises:
        EOFError: `receive` or `send` found the server gone.
    """
    reported_at = time.monotonic()
    reported = engine.load
    while True:
        for message in receive(engine.wait_s()):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, (ProposeCall, VerifyCall)):
                record.begin((message.session_id,))
                engine.submit(message)
                record.end()
            else:
                engine.submit(message)
        output = engine.step()
        if output is None:
            load = engine.load
            # A release has no reply, and a gauge must not go on showing what it has freed.
            has_freed = load.num_sessions != reported.num_sessions
            is_due = load != reported and time.monotonic() - reported_at >= _PROGRESS_S
            if not has_freed and not is_due:
                continue
            output = EngineOutput((), load)
        send(output)
        reported, reported_at = output.load, time.monotonic()


def _load_runner(config: EngineConfig) -> Runner:
    if config.model.startswith(TOY_PREFIX):
        # As late as above, and without transformers, which takes seconds more.
        import torch  # noqa: PLC0415

        from specserve.model.toy_runner import ToyRunner  # noqa: PLC0415

        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        return ToyRunner.from_spec(config)
    from specserve.model.loading import load_runner  # noqa: PLC0415

    return load_runner(config)
