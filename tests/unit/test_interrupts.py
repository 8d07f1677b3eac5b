"""Stop signals unwind what runs, and never what cleans up."""

from __future__ import annotations

import signal

import pytest

from specserve.tools.interrupts import STOP_SIGNALS, stop_signals_interrupt


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_raises_and_the_handlers_come_back(number: signal.Signals) -> None:
    """As often as it comes, while nothing else was said."""
    before = signal.getsignal(number)
    with stop_signals_interrupt():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)

    assert signal.getsignal(number) is before


def test_a_clean_up_that_a_signal_began_is_not_disturbed_by_the_next() -> None:
    """Only as many signals interrupt as are allowed; `install` counts no signal anew."""
    with stop_signals_interrupt() as interrupts:
        interrupts.allow(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        interrupts.install()
        signal.raise_signal(signal.SIGINT)
        interrupts.allow(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
