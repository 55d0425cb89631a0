"""Reports on ledgers: in a terminal, as one HTML file, as JSON."""

from tonnage.report.comparison import Condition, comparison_json, holding, parse_condition
from tonnage.report.document import report_json
from tonnage.report.html import render_html, write_html
from tonnage.report.lanes import LanesPage, PageTable, render_lanes
from tonnage.report.run import after_warmup
from tonnage.report.table import print_comparison, print_report

__all__ = [
    "Condition",
    "LanesPage",
    "PageTable",
    "after_warmup",
    "comparison_json",
    "holding",
    "parse_condition",
    "print_comparison",
    "print_report",
    "render_html",
    "render_lanes",
    "report_json",
    "write_html",
]
