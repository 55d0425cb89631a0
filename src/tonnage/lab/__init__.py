"""Several hosts on one machine: namespaces, shaped links, real ranks, faults."""

from tonnage.lab.faults import kill, resume, stop
from tonnage.lab.hosts import Hosts, Lab, Loopback, Way, available, open_lab, probe
from tonnage.lab.measure import LinkReach, measure_links
from tonnage.lab.run import LineCallback, RunResult

__all__ = [
    "Hosts",
    "Lab",
    "LineCallback",
    "LinkReach",
    "Loopback",
    "RunResult",
    "Way",
    "available",
    "kill",
    "measure_links",
    "open_lab",
    "probe",
    "resume",
    "stop",
]
