"""Ctrl-C, politely: the first one asks the run to stop after the executions that are under way, the second insists."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Call it to ask whether a stop was requested."""

    def __init__(self) -> None:
        self._requested = False

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        print("\nstopping after the executions under way; once more to stop at once", file=sys.stderr)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Listen to SIGINT and SIGTERM inside the block."""
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, request.handle) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
