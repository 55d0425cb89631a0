"""Advice: what is known to be wrong comes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tonnage.trace import Job, advise, replay, split, verdict

Jobs = Callable[[str], Job]
FOLDERS = ["dlrm_v100_8ranks", "own_gloo_ddp_4ranks", "own_gloo_manual_4ranks", "cpu_only_gloo_w300"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_advice_is_ranked_by_what_its_own_replay_saves(job: Jobs, folder: str) -> None:
    made = job(folder)
    found = advise(made)
    saved = [each.outcome.saved for each in found]
    assert saved == sorted(saved, reverse=True)
    assert all(each.outcome == replay(made, each.outcome.change) for each in found)
    assert len({each.kind for each in found}) == len(found)
    assert all("{" not in each.text for each in found)


def test_the_sleeping_rank_comes_first(job: Jobs) -> None:
    first = advise(job("own_gloo_ddp_4ranks"))[0]
    assert (first.kind, first.confidence) == ("straggler", "high")
    assert first.text.startswith("rank 3 loses 31")


def test_an_all_reduce_a_parameter_is_to_be_joined(job: Jobs) -> None:
    first = advise(job("own_gloo_manual_4ranks"))[0]
    assert first.kind == "fuse"
    assert first.text == "join the 24 small all-reduces of a step in one buffer"


def test_one_rank_gives_no_certain_advice(job: Jobs) -> None:
    assert {each.confidence for each in advise(job("cpu_only_gloo_w300"))} <= {"low"}


def test_the_verdict_names_waiting_and_the_rank(job: Jobs) -> None:
    made = job("dlrm_v100_8ranks")
    text = verdict(split(made), replay(made), advise(made))
    assert text.startswith(
        "Waiting, not the network: 96.5% of the time in collectives is waiting for the last rank; "
        "rank 7 is last in 5 of 8."
    )
    assert "96.5%" in verdict(split(made), replay(made), advise(made, lang="zh"), "zh")
