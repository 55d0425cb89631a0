"""The words: they follow from the ledger, so planting a cause must change what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import pytest

from tonnage.ledger import STILL_KINDS, Ledger
from tonnage.report.facts import run_names
from tonnage.report.run import weigh
from tonnage.report.verdict import Verdict, judge


def verdict(*ledgers: Ledger) -> Verdict:
    return judge([weigh(ledger, name) for ledger, name in zip(ledgers, run_names(ledgers), strict=True)])


def said(*ledgers: Ledger) -> str:
    found = verdict(*ledgers)
    return "\n".join([found.headline, *found.reasons])


def with_facts(ledger: Ledger, **facts: Any) -> Ledger:
    return Ledger(ledger.frame, {**ledger.facts, **facts})


def test_the_fastest_is_named_with_how_much_faster_it_is(three: Sequence[Ledger]) -> None:
    headline = verdict(*three).headline
    assert headline == (
        "tonnage is the fastest: 456 ms a step, 1.24 times as fast as ddp (566 ms) "
        "and 1.54 times as fast as naive (701 ms)."
    )


def test_runs_that_take_the_same_time_are_called_equally_fast(make: Callable[..., Ledger]) -> None:
    again = with_facts(make("ddp"), run="other")
    assert verdict(make("ddp"), again).headline == "ddp and other are equally fast at 566 ms a step."


def test_one_run_alone_is_held_against_its_bound(make: Callable[..., Ledger]) -> None:
    assert verdict(make("ddp")).headline.startswith(
        "ddp takes 566 ms a step (p10 565 ms, p90 568 ms), 1.38 times"
    )


def test_what_was_hidden_and_what_stood_still_is_told_of_each_run(three: Sequence[Ledger]) -> None:
    text = said(*three)
    assert "naive moves bytes for 451 ms of a step, none of it under compute" in text
    assert "ddp moves bytes for 411 ms of a step, of that 95.4 ms under backward" in text
    assert "149 ms under backward and 78.8 ms under forward" in text
    assert "computation stood still for 451 ms (64 % of the step)" in text


def test_the_saving_is_put_down_to_what_became_less(three: Sequence[Ledger]) -> None:
    assert "tonnage saves 110 ms a step over ddp: 110 ms less standing still for bytes." in said(*three)


def test_a_saving_in_compute_is_not_put_down_to_bytes(make: Callable[..., Ledger]) -> None:
    slow = with_facts(make("naive", slow=dict.fromkeys(range(4), 1.5)), run="slow")
    assert "naive saves 125 ms a step over slow: 125 ms less computing." in said(make("naive"), slow)


def test_the_number_and_size_of_transfers_is_told(three: Sequence[Ledger]) -> None:
    assert (
        "naive sends 52 transfers a step (328 kB on average), ddp 2 (8.53 MB) and tonnage 30 (1.14 MB)."
        in said(*three)
    )


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (
            62_500_000.0,
            "The link sets the pace of ddp: the 25.6 MB that a rank sends take 410 ms at 500 Mbit/s",
        ),
        (1e9, "Compute sets the pace of ddp: compute alone takes 252 ms"),
    ],
)
def test_the_slower_of_link_and_compute_sets_the_pace(
    make: Callable[..., Ledger], rate: float, words: str
) -> None:
    assert words in said(with_facts(make("ddp"), link_rate=rate))


def test_a_late_rank_is_named(make: Callable[..., Ledger]) -> None:
    assert "Rank" not in said(make("ddp"))
    text = said(make("ddp", slow={3: 1.4}))
    assert "Rank 3 of ddp computes 35" in text
    assert "40 % more than the median of the others (25" in text


def test_the_transfer_that_stood_in_the_way_is_named(make: Callable[..., Ledger]) -> None:
    ledger = make("tonnage")
    planted = ledger.frame.with_columns(
        pl.when(pl.col("label") == "b07").then(0.5).otherwise(pl.col("exposed")).alias("exposed")
    )
    assert "% of that for all-gather 'b07'" in said(Ledger(planted, ledger.facts))


def test_a_run_in_which_nothing_stood_still_says_so(make: Callable[..., Ledger]) -> None:
    ledger = make("ddp")
    hidden = Ledger(ledger.frame.with_columns(pl.lit(0.0).alias("exposed")), ledger.facts)
    assert "computation never stood still for it" in said(hidden)


def test_the_gap_is_taken_apart(make: Callable[..., Ledger]) -> None:
    slow = make("ddp", slow=dict.fromkeys(range(4), 1.5))
    text = said(slow)
    assert "above its bound of 410 ms" in text
    assert "124 ms compute slower than without communication" in text


def test_losses_are_compared_step_by_step(make: Callable[..., Ledger]) -> None:
    ddp = make("ddp")
    drifted = with_facts(
        make("naive"), loss=[each + (0.25 if n == 7 else 0) for n, each in enumerate(ddp.facts["loss"])]
    )
    assert "same to the last bit" in said(ddp, make("naive"))
    assert "The losses differ by 0.25 at most (ddp and naive, step 7" in said(ddp, drifted)
    broken = with_facts(ddp, loss=[1.0, float("nan")])
    assert "The loss of ddp is no number at some step." in said(broken)


def test_without_compute_rows_the_words_do_not_claim_what_was_hidden(make: Callable[..., Ledger]) -> None:
    bare = make("ddp").filter(pl.col("kind") != "compute")
    assert "what computed beside it is not in the ledger" in said(bare)


def test_without_step_rows_the_bytes_are_compared(make: Callable[..., Ledger]) -> None:
    untimed = [make(name).filter(~pl.col("kind").is_in(STILL_KINDS)) for name in ("naive", "tonnage")]
    assert verdict(*untimed).headline.startswith("No step was timed; ")
    assert "puts the fewest bytes on the wire, 25.6 MB a step and rank." in verdict(*untimed).headline


def test_an_empty_ledger_is_said_to_be_empty() -> None:
    assert verdict(Ledger.empty()).headline == "No step was timed; nothing was moved either."


def test_a_prediction_without_times_still_tells_what_is_exposed() -> None:
    row = {"step": 0, "kind": "gradient", "op": "all-reduce", "nbytes": 8, "wire_nbytes": 8, "exposed": 0.25}
    text = said(Ledger.from_rows([row], {"run": "plan"}))
    assert (
        "When the bytes of plan moved is not in the ledger; computation stood still for 250 ms, all for"
        in text
    )


def test_a_compute_time_that_the_run_itself_refutes_is_not_believed(make: Callable[..., Ledger]) -> None:
    text = said(with_facts(make("ddp"), compute_time=0.7))
    assert "Compute alone is given as 700 ms, yet ddp computes for only 25" in text
    assert "reaches its bound" not in text
