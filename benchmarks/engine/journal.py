"""Our trainer's steps, told to a benchmark's report by a callback."""

from typing import Any

from meshwright import Callback, Training


class TellSteps(Callback):
    """Tells `report` the loss of every step."""

    def __init__(self, report: Any) -> None:
        self.report = report

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.report.step(record["loss"])
