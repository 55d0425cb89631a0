"""Checkpoints of a whole job, for any number of ranks: what ``torch.distributed.checkpoint`` (DCP) reads.

Every rank writes what it alone has, and what all have is written once. The state of an optimizer lies in
the files as flat tensors of the parameters' sizes, cut where ranks and buckets were; DCP cuts them anew
for whoever loads them. The folder is made beside its name and moved there whole.

What is in it, by key: ``model.NAME``; ``optimizer.state.NAME.KIND`` and ``optimizer.param_groups``;
``about``, ``extra``; and of each rank ``rank.R.random``, ``rank.R.extra`` and ``rank.R.compression``.

Source: PyTorch's documentation, "Distributed Checkpoint - torch.distributed.checkpoint".
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tonnage.engine.carry import everybodys
from tonnage.engine.schedule import plain_name
from tonnage.engine.shard import ShardedOptimizer
from tonnage.engine.state import Piece, check_layout
from tonnage.engine.whole import WholeOptimizer
from tonnage.engine.wrapper import DataParallel
from tonnage.errors import EngineError

FORMAT = "tonnage checkpoint 1"

_Engine = ShardedOptimizer | WholeOptimizer
_Path = tuple[Any, ...]


def checkpoint_state(
    model: DataParallel, optimizer: torch.optim.Optimizer, *, extra: Any = None, rank_extra: Any = None
) -> dict[str, Any]:
    """What :func:`save_checkpoint` writes, for those who call DCP themselves (``async_save``, other storage).

    It refers to the memory that is trained in: save it, or copy it, before the next step.
    """
    engine = _engine(optimizer)
    compression = engine.compression_state()
    about = {
        "format": FORMAT,
        "world_size": engine.transport.world_size,
        "compress": compression.get("name"),
        "channels_last": engine.channels_last(),
    }
    own = {"random": (_random_state(),), "extra": (rank_extra,), "compression": compression}
    return {
        "model": {plain_name(name): value for name, value in model.module.state_dict().items()},
        "optimizer": {
            "state": {
                name: {kind: _part(value, piece, engine.numel(name)) for kind, value in piece.values.items()}
                for name, piece in engine.pieces().items()
            },
            # Tuples are leaves to DCP, and are written in one piece.
            "param_groups": tuple(engine.group_settings()),
        },
        "about": (about,),
        "extra": (extra,),
        "rank": {str(engine.transport.rank): own},
    }


def save_checkpoint(
    folder: str | Path,
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Any = None,
    rank_extra: Any = None,
) -> None:
    """Write model, optimizer and whatever else a job needs to go on; whole, or not at all.

    All ranks call it together, between ``optimizer.step()`` and the next ``backward()``. A checkpoint of
    that name is replaced. Every rank must see the folder.

    Args:
        folder: what to make.
        model: the wrapped model.
        optimizer: that ``model.optimizer(…)`` made.
        extra: whatever is alike on all ranks, such as the step and a scheduler's state.
        rank_extra: whatever each rank has of its own, such as its place in the data.

    Raises:
        EngineError: the folder can't be written.
    """
    engine = _engine(optimizer)
    target = Path(folder)
    beside = target.with_name(f".{target.name}.partial")
    state = checkpoint_state(model, engine, extra=extra, rank_extra=rank_extra)
    alone = engine.transport.world_size == 1
    _together(engine, target, lambda: _clear(beside), only=0)
    _together(engine, target, lambda: _quietly(save, state, beside, alone=alone))
    _together(engine, target, lambda: _put_in_place(beside, target), only=0)


def load_checkpoint(
    folder: str | Path, model: DataParallel, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Take back what :func:`save_checkpoint` wrote, on any number of ranks; returns ``extra, rank_extra``.

    All ranks call it together. On as many ranks as saved it, training goes on bit for bit, torch's random
    numbers included; on others ``rank_extra`` is ``None``. It unpickles ``extra``: load only what you trust.

    Raises:
        EngineError: there is none, it is damaged, or it is of another model.
    """
    engine = _engine(optimizer)
    file = _File.at(Path(folder), alone=engine.transport.world_size == 1)
    first = file.read({"about": None, "extra": None, "optimizer": {"param_groups": None}})
    (about,), (extra,) = first["about"], first["extra"]
    rank, ranks = engine.transport.rank, about["world_size"]
    same = ranks == engine.transport.world_size
    plain = {name: plain_name(name) for name in model.module.state_dict()}
    states = {plain[name]: value for name, value in model.module.state_dict().items()}
    file.check_same(("model",), states)
    check_layout(about["channels_last"], engine.channels_last())
    owned = engine.owned()
    wanted: dict[str, Any] = {
        "model": states,
        "optimizer": {
            "state": {name: _targets(file, name, piece, engine.numel(name)) for name, piece in owned.items()}
        },
    }
    if same:
        wanted["rank"] = {str(rank): {"random": None, "extra": None}}
    found = file.read(wanted)
    model.module.load_state_dict({name: found["model"][plain[name]] for name in plain})
    engine.take(
        {
            name: Piece(first=owned[name].first, numel=owned[name].numel, values=_plain(values))
            for name, values in found["optimizer"]["state"].items()
            if values
        },
        first["optimizer"]["param_groups"],
        _Compressions(file, range(rank, rank + 1) if same else range(ranks)) if about["compress"] else (),
    )
    if not same:
        return extra, None
    own = found["rank"][str(rank)]
    _set_random_state(own["random"][0])
    return extra, own["extra"][0]


class FlatShard(torch.Tensor):
    """Elements ``[first, first + len)`` of a flat tensor of ``total``; DCP saves and loads it as a shard."""

    first: int
    total: int

    @staticmethod
    def of(values: torch.Tensor, *, first: int, total: int) -> FlatShard:
        """``values``, flat, as that part."""
        shard = values.as_subclass(FlatShard)
        shard.first, shard.total = first, total
        return shard

    def size(self, *_: Any) -> Any:
        """Of the whole: DCP compares it with what was saved."""
        return torch.Size([self.total])

    def plain(self) -> torch.Tensor:
        """The same memory as an everyday tensor."""
        return self.as_subclass(torch.Tensor)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.plain())
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([self.total]))
        return [
            WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offsets, sizes = torch.Size([self.first]), torch.Size([self.plain().numel()])
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)]

    def __get_tensor_shard__(self, _: object) -> torch.Tensor:
        return self.plain()


# Below: how.


@dataclass(frozen=True, slots=True)
class _File:
    """A checkpoint, and where in it each value is."""

    folder: Path
    alone: bool
    metadata: Metadata

    @staticmethod
    def at(folder: Path, *, alone: bool) -> _File:
        try:
            metadata = FileSystemReader(folder).read_metadata()
            paths = set(metadata.planner_data.values())
        except Exception as error:
            raise EngineError(
                f"no checkpoint can be read: {_first_line(error)}",
                where=str(folder),
                hint="give a folder that save_checkpoint() made",
            ) from error
        if ("about",) not in paths:
            raise EngineError("this checkpoint was not written by save_checkpoint()", where=str(folder))
        return _File(folder, alone, metadata)

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill ``state``: its tensors in place, whatever else is in it by what was saved."""
        try:
            _quietly(load, state, self.folder, alone=self.alone)
        except Exception as error:  # a damaged file breaks whatever reads it
            raise EngineError(
                f"the checkpoint can't be read: {_first_line(error)}",
                where=str(self.folder),
                hint="if it is damaged, load an earlier one",
            ) from error
        return state

    def below(self, *path: Any) -> Iterator[tuple[_Path, Any]]:
        """What was saved under ``path``: the rest of each path, and DCP's word for the value."""
        for key, full in self.metadata.planner_data.items():
            if full[: len(path)] == path:
                yield full[len(path) :], self.metadata.state_dict_metadata[key]

    def check_same(self, path: _Path, wanted: Mapping[str, Any]) -> None:
        """The names and sizes there are those of ``wanted``."""
        saved = {rest[0]: each for rest, each in self.below(*path)}
        missing, more = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
        odd = [
            name
            for name, each in saved.items()
            if name in wanted and isinstance(each, TensorStorageMetadata) and each.size != wanted[name].size()
        ]
        if missing or more or odd:
            problems = (("lacks", missing), ("also has", more), ("has another size of", odd))
            told = "; ".join(f"{verb} {', '.join(names[:3])}" for verb, names in problems if names)
            raise EngineError(
                f"the checkpoint is of another model: it {told}",
                where=str(self.folder),
                hint="load it into the model that was saved",
            )


class _Compressions(Sequence[Mapping[str, Any]]):
    """What each rank of ``ranks`` owed, read when it is asked for: all at once could be far more than a rank."""

    def __init__(self, file: _File, ranks: range) -> None:
        self._file, self._ranks = file, ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, place: Any) -> Any:
        rank = str(self._ranks[place])
        template: dict[str, Any] = {}
        for path, each in self._file.below("rank", rank, "compression"):
            _put(template, path, _empty(each))
        # Each rank reads what it needs, so none may wait for another here.
        state = {"rank": {rank: {"compression": template}}}
        _quietly(load, state, self._file.folder, alone=True)
        return state["rank"][rank]["compression"]


def _quietly(act: Callable[..., Any], state: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """DCP's ``save`` or ``load``; that it is done alone is meant, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        try:
            act(state, checkpoint_id=folder, no_dist=alone)
        except CheckpointException as error:  # no Exception to Python; it holds what each rank met
            first = next(iter(error.failures.values()))[0]
            raise (first if isinstance(first, Exception) else RuntimeError(str(first))) from error


def _engine(optimizer: torch.optim.Optimizer) -> _Engine:
    if not isinstance(optimizer, _Engine):
        raise EngineError(
            f"{type(optimizer).__name__} was not made by model.optimizer(…)",
            hint="make the optimizer through the model, or save its state_dict() yourself",
        )
    return optimizer


def _part(value: Any, piece: Piece, total: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == (piece.numel,) and piece.numel < total:
        return FlatShard.of(value, first=piece.first, total=total)
    return value


def _targets(file: _File, name: str, piece: Piece, total: int) -> dict[str, Any]:
    """Where to read an optimizer's values of one parameter to."""
    found: dict[str, Any] = {}
    for (kind,), each in file.below("optimizer", "state", name):
        found[kind] = _empty(each)
        if isinstance(each, TensorStorageMetadata) and each.size == (total,) and piece.numel < total:
            values = torch.empty(piece.numel, dtype=each.properties.dtype)
            found[kind] = FlatShard.of(values, first=piece.first, total=total)
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: value.plain() if isinstance(value, FlatShard) else value for kind, value in values.items()}


def _empty(saved: Any) -> torch.Tensor | None:
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return None


def _put(nested: Any, path: _Path, value: Any) -> None:
    """Set ``nested[path[0]][path[1]]…``, making the dicts and lists on the way."""
    key, rest = path[0], path[1:]
    if isinstance(nested, list):
        nested.extend([None] * (key + 1 - len(nested)))
    if not rest:
        nested[key] = value
        return
    made: Any = [] if isinstance(rest[0], int) else {}
    here = nested[key] if isinstance(nested, list) else nested.get(key)
    if here is None:
        nested[key] = here = made
    _put(here, rest, value)


def _together(engine: _Engine, where: Path, act: Callable[[], object], *, only: int | None = None) -> None:
    """All ranks (or that one) have done it when this returns, or all raise what the first one met."""
    problem = b""
    try:
        if only in (None, engine.transport.rank):
            act()
    except Exception as error:  # whatever it was, the other ranks wait to hear of it
        problem = _first_line(error).encode()
    told = [each.decode() for each in everybodys(engine.transport, problem)]
    failed = next((rank for rank, each in enumerate(told) if each), None)
    if failed is not None:
        raise EngineError(
            f"the checkpoint can't be written: {told[failed]}",
            where=f"{where}, rank {failed}",
            hint="name a folder that all ranks can write to, with room",
        )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _clear(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _put_in_place(beside: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    _clear(old)
    if target.exists():
        target.rename(old)
    beside.rename(target)
    _clear(old)


def _random_state() -> dict[str, Any]:
    found: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
