"""The main job from end to end: the same training three ways, on real ranks over real links."""

from tonnage.demo.run import MOST_RANKS, WAY_NAMES, Progress, run_demo

__all__ = ["MOST_RANKS", "WAY_NAMES", "Progress", "run_demo"]
