"""Reads what a job recorded: PyTorch-profiler and Nsight traces to an observed ledger, and what it means."""

from tonnage.trace.advice import Advice, advise
from tonnage.trace.advice_verdict import verdict
from tonnage.trace.advice_words import Language, trace_words
from tonnage.trace.events import (
    Collectives,
    Events,
    Group,
    Loss,
    RankTrace,
    Step,
    Trace,
)
from tonnage.trace.hta import HtaBreakdown, hta_breakdown
from tonnage.trace.lanes import LANE_KINDS, Lanes, lanes
from tonnage.trace.perfetto import write_perfetto
from tonnage.trace.read import read_trace, trace_files
from tonnage.trace.replay import Outcome, check_change, replay
from tonnage.trace.replay_job import Job, replay_job
from tonnage.trace.replay_pace import Straggler, stragglers
from tonnage.trace.replay_split import Split, split

__all__ = [
    "LANE_KINDS",
    "Advice",
    "Collectives",
    "Events",
    "Group",
    "HtaBreakdown",
    "Job",
    "Lanes",
    "Language",
    "Loss",
    "Outcome",
    "RankTrace",
    "Split",
    "Step",
    "Straggler",
    "Trace",
    "advise",
    "check_change",
    "hta_breakdown",
    "lanes",
    "read_trace",
    "replay",
    "replay_job",
    "split",
    "stragglers",
    "trace_files",
    "trace_words",
    "verdict",
    "write_perfetto",
]
