from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from tonnage.errors import EngineError, UnitError

pytestmark = pytest.mark.ranks

every_schedule = pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
all_but_early = pytest.mark.parametrize("schedule", ["shard", "allreduce"])


@all_but_early
def test_what_no_rank_uses_stays_and_what_one_uses_moves_as_in_ddp(pair: Any, schedule: str) -> None:
    for differing, kept, moved in pair.run("in_rank_training.unused_parameters", schedule=schedule):
        assert differing == []
        assert kept
        assert moved


@every_schedule
def test_a_parameter_without_gradient_is_an_error_that_names_it_and_the_rank(
    pair: Any, schedule: str
) -> None:
    for rank, error in enumerate(pair.answers("in_rank_training.unused_without_asking", schedule=schedule)):
        assert isinstance(error, EngineError)
        assert "right.weight" in str(error)
        assert f"rank {rank}" in str(error)
        assert "find_unused_parameters=True" in error.hint


@every_schedule
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_equal_those_of_ddp(pair: Any, schedule: str, set_to_none: bool) -> None:
    case = {"schedule": schedule, "set_to_none": set_to_none}
    assert pair.run("in_rank_training.accumulated", **case) == [[], []]


@all_but_early
def test_clipping_equals_torch_on_ddp(pair: Any, schedule: str) -> None:
    for norms, parameters, least in pair.run("in_rank_training.clipped", schedule=schedule):
        assert least > 1, "the limit was never met, so nothing was clipped"
        assert norms < 1e-6
        assert parameters < 1e-6


@all_but_early
@pytest.mark.parametrize("clip", [False, True])
def test_fp16_with_a_gradient_scaler_skips_and_steps_as_ddp_does(
    pair: Any, schedule: str, clip: bool
) -> None:
    for differing, far, (ours, theirs) in pair.run("in_rank_training.scaled", schedule=schedule, clip=clip):
        assert ours == theirs
        assert any(b < a for a, b in itertools.pairwise(ours)), "no step was skipped"
        assert any(b > a for a, b in itertools.pairwise(ours)), "the scale never grew"
        assert clip or differing == []  # norms are summed in another order
        assert far < 1e-6


@all_but_early
@pytest.mark.parametrize("compress", ["int8", "sign"])
def test_what_compression_owes_follows_the_gradient_scale(pair: Any, schedule: str, compress: str) -> None:
    case = {"schedule": schedule, "compress": compress}
    assert pair.run("in_rank_training.scaled_and_compressed", **case) == [([], 32.0)] * 2


@pytest.mark.parametrize("how", ["scaled_early", "scaled_by_torch"])
def test_a_gradient_scaler_that_can_not_work_is_refused(pair: Any, how: str) -> None:
    for error in pair.answers(f"in_rank_training.{how}"):
        assert isinstance(error, EngineError)
        assert "shard" in error.hint or "tonnage.GradScaler" in error.hint


@every_schedule
def test_averages_of_the_weights_equal_those_of_ddp(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.averaged_weights", schedule=schedule) == [[], []]


@every_schedule
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_equal_ddp(pair: Any, schedule: str, reentrant: bool) -> None:
    assert pair.run("in_rank_training.recomputed", schedule=schedule, reentrant=reentrant) == [[], []]


@every_schedule
def test_gradients_of_the_input_alone_begin_no_backward_pass(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.looked_through", schedule=schedule) == [[], []]


@every_schedule
def test_autocast_to_bf16_equals_ddp(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.autocast", schedule=schedule) == [[], []]


@every_schedule
def test_two_models_trained_against_each_other_equal_ddp(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.adversaries", schedule=schedule) == [[], []]


def test_clipping_gradients_that_were_sent_already_is_refused(pair: Any) -> None:
    for error in pair.answers("in_rank_training.clipped_by_torch"):
        assert isinstance(error, EngineError)
        assert "model.clip_grad_norm_" in error.hint


@every_schedule
def test_batch_norm_and_an_uneven_last_batch_equal_ddp(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.with_batch_norm", schedule=schedule) == [[], []]


@every_schedule
@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_learning_rate_schedulers_work_as_on_ddp(pair: Any, schedule: str, name: str) -> None:
    assert pair.run("in_rank_training.scheduled", schedule=schedule, name=name) == [[], []]


@every_schedule
def test_whoever_reads_parameters_right_after_a_step_reads_those_of_ddp(pair: Any, schedule: str) -> None:
    for found in pair.run("in_rank_training.read_right_after_step", schedule=schedule):
        assert [way for way, right in found.items() if not right] == []


@every_schedule
def test_loading_parameters_in_mid_training_equals_ddp(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.loaded", schedule=schedule) == [[], []]


@every_schedule
def test_training_goes_on_from_saved_states_as_if_never_interrupted(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_training.resumed", schedule=schedule) == [[], []]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("second backward", "second backward pass"),
        ("create_graph", "create_graph"),
        ("sparse", "sparse"),
        ("unfrozen", "unfrozen"),
        ("no optimizer", "without its optimizer"),
        ("no backward", "without a synchronised backward"),
        ("foreign parameter", "does not train"),
        ("Muon", "Muon"),
        ("LBFGS", "LBFGS"),
        ("differing", "rank 0 has 0.weight (24, 12)"),
        ("longer", "rank 0"),
        ("closed", "close"),
        ("nothing to train", "no parameter to train"),
        ("no bucket", "0 bytes"),
        ("no schedule", "zero"),
    ],
)
def test_what_would_train_wrongly_is_refused_on_every_rank(pair: Any, how: str, told: str) -> None:
    for error in pair.answers("in_rank_training.refused", how=how):
        assert isinstance(error, EngineError)
        assert told in str(error)
        assert error.hint


def test_a_bucket_size_that_is_none_is_refused(pair: Any) -> None:
    assert all(isinstance(e, UnitError) for e in pair.answers("in_rank_training.refused", how="bucket text"))


def test_a_rank_outside_the_group_is_told_so(pair: Any) -> None:
    inside, outside = pair.answers("in_rank_training.refused", how="not a member")
    assert not isinstance(inside, Exception)
    assert isinstance(outside, EngineError)
    assert "not a member" in str(outside)


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def test_several_processes_without_a_process_group_are_an_error() -> None:
    code = "import torch, tonnage; tonnage.DataParallel(torch.nn.Linear(2, 2))"
    ended = _python(code, WORLD_SIZE="2", RANK="0")
    assert ended.returncode == 1
    assert "init_process_group" in ended.stderr


def test_without_torch_the_error_says_what_to_install() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Blocker())
import tonnage
try:
    tonnage.DataParallel
except tonnage.errors.MissingExtra as error:
    print(error)
"""
    ended = _python(code)
    assert "pip install 'tonnage[train]'" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "what", ["skips a step", "clips", "changes the rate", "changes a gradient", "has unused parameters"]
)
def test_what_the_early_schedule_forbids_is_refused_on_every_rank(pair: Any, what: str) -> None:
    for error in pair.answers("in_rank_training.too_late", what=what):
        assert isinstance(error, EngineError)
        assert "schedule='" in str(error.hint)
