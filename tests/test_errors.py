from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage import errors
from tonnage.errors import MissingExtra, RankFailure, TonnageError, UnitError, UsageError, require

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TonnageError)),
    key=lambda kind: kind.__name__,
)


@given(st.sampled_from(KINDS), st.text(), st.text(), st.text())
def test_an_error_crosses_to_another_process_whole(
    kind: type[TonnageError], what: str, where: str, hint: str
) -> None:
    error = kind(what, where=where, hint=hint)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (twin.what, twin.where, twin.hint, str(twin)) == (what, where, hint, str(error))


def test_a_rank_failure_takes_its_ranks_along() -> None:
    error = pickle.loads(pickle.dumps(RankFailure("rank 3 died", ranks=(3, 5), hint="restart it")))
    assert (error.what, error.ranks, error.hint) == ("rank 3 died", (3, 5), "restart it")


def test_an_error_reads_what_where_do_and_leaves_out_what_is_not_known() -> None:
    assert str(TonnageError("it broke", where="rank 2", hint="mend it")) == (
        "it broke\nwhere: rank 2\ndo:    mend it"
    )
    assert str(TonnageError("it broke", hint="mend it")) == "it broke\ndo:    mend it"
    assert str(TonnageError("it broke")) == "it broke"


def test_the_docstring_draws_every_kind_of_error() -> None:
    assert len(KINDS) > 5
    for kind in KINDS:
        assert kind.__name__ in (errors.__doc__ or "")


def test_wrong_units_are_wrong_use() -> None:
    assert issubclass(UnitError, UsageError)


def test_require_brings_a_module_that_is_there() -> None:
    assert require("json.decoder", extra="none", purpose="nothing") is sys.modules["json.decoder"]


@pytest.mark.parametrize("name", ["no_such_module_at_all", "no_such_module_at_all.inner"])
def test_require_names_the_extra_of_a_missing_module(name: str) -> None:
    with pytest.raises(MissingExtra, match="no_such_module_at_all is needed for flying") as caught:
        require(name, extra="wings", purpose="flying")
    assert caught.value.hint == "pip install 'tonnage[wings]'"


@pytest.mark.parametrize("lacking", ["another_missing_module", "broken_module._native"])
def test_require_shows_what_a_broken_module_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    package = tmp_path / "broken_module"
    package.mkdir()
    (package / "__init__.py").write_text(f"import {lacking}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=lacking):
        require("broken_module", extra="none", purpose="nothing")
