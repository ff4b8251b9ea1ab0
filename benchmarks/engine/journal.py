"""A callback that sends our trainer's steps to a benchmark's report."""

from typing import Any

from meshwright import Callback, Training


class TellSteps(Callback):
    """Sends the loss of every step to `report`."""

    def __init__(self, report: Any) -> None:
        self.report = report

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.report.step(record["loss"])
