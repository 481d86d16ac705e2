"""Writes a run's `report.html`, which needs only the run's folder and can be written at any
time."""

from trainer.report.page import write_report

__all__ = ["write_report"]
