"""`report.html` of a run, made from its folder alone, at any time."""

from trainer.report.page import write_report

__all__ = ["write_report"]
