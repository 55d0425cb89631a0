"""Where a model comes from: a preset's name, a ``config.json``, or a live ``torch.nn.Module``.

Torch is imported only by whoever already holds a module; nothing here imports it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from tonnage.errors import LayoutError
from tonnage.plan.families import model_from_config
from tonnage.plan.model import Layer, Matrix, Model, runs


class _Parameter(Protocol):
    @property
    def shape(self) -> Any: ...
    def numel(self) -> int: ...


class ModuleLike(Protocol):
    """What is used of a ``torch.nn.Module``."""

    def named_parameters(self) -> Any:
        """Names and parameters, each shared one once."""
        ...

    def named_modules(self) -> Any:
        """Names and modules."""
        ...


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Configurations of well-known models under the names that people type."""
    text = resources.files("tonnage.plan").joinpath("data/models.json").read_text("utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def preset(name: str) -> Model:
    """The preset of that name; ``llama-3-70b`` and ``Llama3_70B`` mean ``llama3-70b``.

    Raises:
        LayoutError: there is none; the nearest names are given.
    """
    known = {_key(each): each for each in presets()}
    found = known.get(_key(name))
    if found is None:
        near = difflib.get_close_matches(_key(name), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(known[each] for each in near)}?" if near else ""
        listing = f"presets: {', '.join(sorted(presets()))}; or give a path to a config.json"
        raise LayoutError(f"no model preset {name!r}", hint=hint or listing)
    return model_from_config(presets()[found], name=found)


def load_model(source: str | Path | Mapping[str, Any] | ModuleLike | Model) -> Model:
    """The model that ``source`` names: preset, path to a ``config.json`` or its folder, or the thing itself.

    Raises:
        LayoutError: no such preset or file, or it is no decoder.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return model_from_config(source, name=str(source.get("_name_or_path") or "config"))
    if isinstance(source, str | Path):
        path = Path(source)
        looks_like_path = path.suffix == ".json" or len(path.parts) > 1 or path.is_dir()
        return _from_file(path) if looks_like_path else preset(str(source))
    return model_from_module(source)


def model_from_module(module: ModuleLike) -> Model:
    """A live module's parameters and matrices as they are.

    The longest list of equal blocks is taken as the layers; what stands before counts as the
    embedding, after it as the head. Heads come from ``module.config`` where it has them.

    Raises:
        LayoutError: no list of blocks with matrices is found.
    """
    params: list[tuple[str, _Parameter]] = list(module.named_parameters())
    prefix = _block_list(params)
    if prefix is None:
        raise LayoutError(
            f"{type(module).__name__} has no list of layers",
            hint="pass a module that keeps its blocks in a ModuleList or Sequential",
        )
    blocks: dict[int, list[tuple[str, _Parameter]]] = {}
    rest: list[tuple[str, _Parameter]] = []
    for name, value in params:
        if name.startswith(prefix):
            index, _, inner = name[len(prefix) :].partition(".")
            blocks.setdefault(int(index), []).append((inner, value))
        else:
            rest.append((name, value))
    tables = [value for _, value in rest if len(value.shape) == 2]
    if not tables:
        raise LayoutError(
            f"{type(module).__name__} has layers but no embedding",
            hint="pass the whole model, not only its blocks",
        )
    vocab, hidden = max(((int(v.shape[0]), int(v.shape[1])) for v in tables), key=lambda s: s[0] * s[1])
    outside = sum(value.numel() for _, value in rest)
    same = [value for value in tables if tuple(value.shape) == (vocab, hidden)]
    config = getattr(module, "config", None)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    kv_heads = int(getattr(config, "num_key_value_heads", heads) or heads)
    layers = [_live_layer(blocks[i], hidden, heads, kv_heads) for i in sorted(blocks)]
    tied = len(same) < 2
    return Model(
        name=type(module).__name__,
        family="live",
        hidden=hidden,
        vocab=vocab,
        layers=runs(layers),
        tied=tied,
        other_embedding=outside - vocab * hidden * (1 if tied else 2),
    )


def _live_layer(params: list[tuple[str, _Parameter]], hidden: int, heads: int, kv_heads: int) -> Layer:
    matrices: list[Matrix] = []
    vectors = 0
    for name, value in params:
        shape = tuple(int(n) for n in value.shape)
        if len(shape) != 2:
            vectors += value.numel()
            continue
        into_stream = shape[0] == hidden and shape[1] != hidden
        part = "attention" if "attn" in name or "attention" in name else "mlp"
        matrices.append(
            Matrix(
                name=name.removesuffix(".weight"),
                fan_in=shape[1],
                fan_out=shape[0],
                part="attention" if part == "attention" else "mlp",
                split="row" if into_stream else "column",
            )
        )
    dim = hidden // heads if heads else 0
    ffn = max((m.fan_in for m in matrices if m.part == "mlp" and m.fan_out == hidden), default=0)
    return Layer(
        matrices=tuple(matrices),
        vectors=vectors,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=dim,
        v_dim=dim,
        kv_width=2 * kv_heads * dim,
        ffn=ffn,
    )


def _block_list(params: list[tuple[str, _Parameter]]) -> str | None:
    """The name up to the index of the list that holds most parameters in blocks."""
    totals: dict[str, int] = {}
    for name, value in params:
        parts = name.split(".")
        for i, part in enumerate(parts[:-1]):
            if part.isdigit():
                prefix = ".".join(parts[:i]) + "." if i else ""
                totals[prefix] = totals.get(prefix, 0) + value.numel()
                break
    return max(totals, key=lambda each: totals[each]) if totals else None


def _from_file(path: Path) -> Model:
    target = path / "config.json" if path.is_dir() else path
    try:
        text = target.read_text("utf-8")
    except OSError as error:
        raise LayoutError(
            f"can't read the model's configuration: {error.strerror}",
            where=str(target),
            hint="give a config.json, a folder that holds one, or a preset's name",
        ) from error
    except UnicodeDecodeError as error:
        raise LayoutError("the configuration is no text", where=str(target)) from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise LayoutError(
            f"the configuration is no JSON: {error.msg}", where=f"{target}, line {error.lineno}"
        ) from error
    if not isinstance(config, dict):
        raise LayoutError(f"the configuration is a {type(config).__name__}, not an object", where=str(target))
    return model_from_config(config, name=str(config.get("_name_or_path") or target.parent.name or "config"))


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
