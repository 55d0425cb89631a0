from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tonnage.engine.state import Piece, filled
from tonnage.errors import EngineError

sys.path.insert(0, str(Path(__file__).parent))
import in_rank_checkpoint as alone
from models import OPTIMIZERS, seeded, tokens

_SHARD = {"schedule": "shard", "bucket": 1500}


def _setting(schedule: str = "shard", bucket: Any = 1500, compress: str | None = None, **more: Any) -> Any:
    return {"engine": {"schedule": schedule, "bucket": bucket, "compress": compress}, **more}


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["part", "parts", "whole", "job"])
@pytest.mark.parametrize(
    "setting",
    [
        _setting("shard"),
        _setting("early"),
        _setting("allreduce"),
        _setting("shard", optimizer="SGD"),
        _setting("shard", compress="int8"),
        _setting("allreduce", compress="int8"),
        _setting("allreduce", compress="power:2"),
    ],
    ids=str,
)
def test_on_as_many_ranks_training_goes_on_bit_for_bit(
    pair: Any, tmp_path: Path, setting: Any, how: str
) -> None:
    if how == "parts" and setting["engine"]["schedule"] == "allreduce":
        pytest.skip("with allreduce every rank has the whole state")
    saved = pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=setting)
    loaded = pair.run("in_rank_checkpoint.load", folder=str(tmp_path), setting=setting, how=how, saved_by=2)
    mean_alone = how == "whole" and setting["engine"]["compress"]
    for rank in range(2):
        assert loaded[rank][:2] == saved[rank][:2]
        if how == "job":
            assert loaded[rank][2] == saved[rank][2]
            assert loaded[rank][3] == ({"step": 3}, rank)
    assert loaded[0][2] == loaded[1][2]
    assert mean_alone or loaded[0][0] == saved[0][0]


@pytest.mark.ranks
@pytest.mark.parametrize("bucket", [700, 10**6])
def test_one_ranks_part_loads_into_a_model_with_other_buckets(pair: Any, tmp_path: Path, bucket: int) -> None:
    saved = pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=_setting(bucket=bucket))
    loaded = pair.run(
        "in_rank_checkpoint.load", folder=str(tmp_path), setting=_setting(), how="part", saved_by=2
    )
    assert [each[:2] for each in loaded] == [each[:2] for each in saved]


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["parts", "whole", "job"])
@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize(
    ("before", "after"), [("pair", "quad"), ("quad", "pair"), ("quad", "alone"), ("alone", "pair")]
)
def test_another_number_of_ranks_has_the_same_state(
    request: pytest.FixtureRequest, tmp_path: Path, before: str, after: str, how: str, compress: str | None
) -> None:
    def run(who: str, case: str, **arguments: Any) -> list[Any]:
        if who == "alone":
            return [getattr(alone, case)(**arguments)]
        return request.getfixturevalue(who).run(f"in_rank_checkpoint.{case}", **arguments)  # type: ignore[no-any-return]

    size = {"alone": 1, "pair": 2, "quad": 4}[before]
    saved = run(before, "save", folder=str(tmp_path), setting=_setting(compress=compress))
    loaded = run(
        after,
        "load",
        folder=str(tmp_path),
        setting=_setting(bucket=900, compress=compress),
        how=how,
        saved_by=size,
    )
    assert {each[1] for each in loaded} == {saved[0][1]}
    if compress is None:
        assert loaded[0][0] == saved[0][0]
    assert len({each[2] for each in loaded}) == 1


@pytest.mark.ranks
def test_what_one_schedule_saved_another_loads(pair: Any, tmp_path: Path) -> None:
    saved = pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=_setting("allreduce"))
    for how in ("whole", "job"):
        loaded = pair.run(
            "in_rank_checkpoint.load", folder=str(tmp_path), setting=_setting("shard"), how=how, saved_by=2
        )
        assert loaded[0][:2] == saved[0][:2]


@pytest.mark.ranks
def test_the_whole_state_trains_on_in_plain_torch(pair: Any, tmp_path: Path) -> None:
    """One process with both ranks' batches does what two ranks would have done, but for rounding."""
    setting = _setting()
    pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=setting)
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = seeded(alone.Dropping, 3)
    model.load_state_dict(saved["model"])
    kind, settings = OPTIMIZERS["AdamW"]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1]},
    ]
    optimizer = kind(groups, **settings)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    assert optimizer.param_groups[1]["lr"] == 0.02
    before = copy.deepcopy(model.state_dict())
    batch = tokens(21, 0, 3)
    F.cross_entropy(model(batch), batch).backward()
    optimizer.step()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {4.0}
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("another rank's", "that of rank"),
        ("one is there twice", "parts of ranks 1"),
        ("one part of more", "that of rank 0 of 2"),
        ("nonsense", "no optimizer state"),
        ("other groups", "optimizer"),
        ("no folder", "no checkpoint"),
        ("another model", "another model"),
        ("damaged", "can't be read"),
        ("a file in the way", "can't be written"),
        ("plain optimizer", "was not made by model.optimizer"),
    ],
)
def test_what_can_not_be_loaded_is_refused_with_a_way_out(
    pair: Any, quad: Any, tmp_path: Path, how: str, told: str
) -> None:
    pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=_setting())
    if how == "damaged":
        for each in (tmp_path / "job").glob("*.distcp"):
            each.write_bytes(each.read_bytes()[: each.stat().st_size // 2])
    pool = quad if how == "one part of more" else pair
    for error in pool.answers(
        "in_rank_checkpoint.refuse", folder=str(tmp_path), setting=_setting(), how=how, saved_by=2
    ):
        assert isinstance(error, EngineError)
        assert told in str(error)
        assert error.hint


@pytest.mark.ranks
def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_beside_it(pair: Any, tmp_path: Path) -> None:
    for setting in (_setting(), _setting(optimizer="SGD")):
        saved = pair.run("in_rank_checkpoint.save", folder=str(tmp_path), setting=setting)
    loaded = pair.run(
        "in_rank_checkpoint.load",
        folder=str(tmp_path),
        setting=_setting(optimizer="SGD"),
        how="job",
        saved_by=2,
    )
    assert loaded[0][:3] == saved[0][:3]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job", "part0.pt", "part1.pt", "whole.pt"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_pieces_of_any_cut_make_up_any_part(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    values = torch.arange(total, dtype=torch.float32)
    pieces, first = [], 0
    for each in lengths:
        pieces.append(
            Piece(first=first, numel=each, values={"m": values[first : first + each].clone(), "step": 7})
        )
        first += each
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    dropped = data.draw(st.none() | st.integers(0, len(pieces) - 1))
    order = data.draw(st.permutations([p for i, p in enumerate(pieces) if i != dropped]))
    needed = (
        dropped is not None
        and pieces[dropped].first < stop
        and start < pieces[dropped].first + lengths[dropped]
    )
    if needed and order:
        with pytest.raises(EngineError, match="elements"):
            filled("w", start, torch.empty(stop - start), order)
    elif order:
        found = filled("w", start, torch.empty(stop - start), order)
        assert torch.equal(found["m"], values[start:stop])
        assert found["step"] == 7
    else:
        assert filled("w", start, torch.empty(stop - start), order) == {}
