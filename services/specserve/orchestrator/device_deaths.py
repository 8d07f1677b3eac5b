"""What devices of one pool died of, as far as it may be one request.

A device that dies says who was in its forward, and any of them may be it. So each is computed alone
after that, until it is past the place where the device died: who is not guilty is soon in company
again, and a device that dies of one alone tells who is. Knows counts; knows no device.
"""

from __future__ import annotations

from collections.abc import Callable

NUM_TO_STAY_ALONE = 2
"""Deaths after which a request is computed alone to its end: it may be it at more than one place.
"""


class DeviceDeaths:
    """The deaths that one request was in."""

    def __init__(self, count: int = 0) -> None:
        """Begin.

        Args:
            count: deaths that another orchestrator has told of.
        """
        self.count = count
        """Devices that died while they computed the request."""
        self.is_proven = False
        """Devices die of this request."""
        self.on_death: Callable[[], None] = lambda: None
        """Called with each death."""
        self._is_past = False
        """It has got on since the last one."""

    @property
    def runs_alone(self) -> bool:
        """Whether the request is to be computed in no one's company."""
        return self.count >= NUM_TO_STAY_ALONE or (self.count > 0 and not self._is_past)

    def note_death(self, num_computed: int) -> None:
        """Write down a death.

        Args:
            num_computed: requests that the device computed then, this one included.
        """
        self.count += 1
        # One death is chance, and so may be a second one elsewhere in the text.
        if num_computed == 1 and self.count > (NUM_TO_STAY_ALONE if self._is_past else 1):
            self.is_proven = True
        self._is_past = False
        self.on_death()

    def note_progress(self) -> None:
        """Write down that a device has computed what is new of the request, and lives."""
        self._is_past = True
