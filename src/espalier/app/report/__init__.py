"""The report: one self-contained HTML page about one run or several."""

from __future__ import annotations

from espalier.app.report.page import write_report

__all__ = ["write_report"]
