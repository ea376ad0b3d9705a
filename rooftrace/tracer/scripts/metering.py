"""Memory of the device that is not there, as a script may ask for it while it runs."""

from __future__ import annotations

from rooftrace.tracer.scripts.stage import RecorderStage


class RecordedMemory:
    """Bytes of the device that are alive, by what recorders know of their storages.

    They are counted where the script asks, so a peak between two questions is not seen: `peak` is
    the largest answer since the last reset.  The report has the peaks of the steps.
    """

    def __init__(self, stage: RecorderStage) -> None:
        self._stage = stage
        self._peak = 0

    def allocated(self) -> int:
        """Bytes alive now."""
        now = self._stage.recorder.alive_bytes()
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        """The largest number of bytes that was asked for since the last reset."""
        return max(self._peak, self.allocated())

    def reset_peak(self) -> None:
        """The peak is what is alive now."""
        self._peak = 0
        self.allocated()
