"""Writes a run's `report.html`, which needs only the run's folder and can be written at any
time."""

from trainer.extras.report.page import Report, write_report

__all__ = ["Report", "write_report"]
