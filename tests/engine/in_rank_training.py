"""What the ranks of ``test_training.py`` run: everyday training loops, each beside torch's DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import Mixed, differing, features, largest_difference, perceptron, seeded, tokens, twin
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tonnage.engine import DataParallel, GradScaler

_ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class _Both:
    """Our model and DDP's, with an optimizer each."""

    def __init__(self, model: nn.Module, schedule: str, *, unused: bool = False, **settings: Any) -> None:
        settings = settings or _ADAMW
        self.theirs: Any = DistributedDataParallel(twin(model), find_unused_parameters=unused)
        self.ours = DataParallel(model, schedule=schedule, bucket=1500, find_unused_parameters=unused)
        self.optimizers = (
            self.ours.optimizer(torch.optim.AdamW, **settings),
            torch.optim.AdamW(self.theirs.parameters(), **settings),
        )

    def each(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        return list(zip((self.ours, self.theirs), self.optimizers, strict=True))

    def step(self, x: torch.Tensor, change: Callable[[Any], object] = lambda model: None) -> None:
        for model, optimizer in self.each():
            _loss(model, x).backward()
            change(model)
            optimizer.step()
            optimizer.zero_grad()

    def end(self) -> list[str]:
        found = differing(self.ours.module, self.theirs.module)
        self.ours.close()
        return found


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (
        F.cross_entropy(output, x)
        if output.dim() == 2 and not x.is_floating_point()
        else output.square().mean()
    )


class _Branches(nn.Module):
    """Uses the layers that it is told to; ``spare`` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right, self.spare = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor, go_right: bool) -> torch.Tensor:
        x = torch.tanh(self.shared(x))
        return self.right(x) if go_right else self.left(x)


def unused_parameters(schedule: str) -> tuple[list[str], bool, bool]:
    """Differing bits; whether what no rank uses kept its value; whether what one uses moved."""
    rank = dist.get_rank()
    model = seeded(_Branches)
    before = copy.deepcopy(model.state_dict())
    both = _Both(model, schedule, unused=True)
    for step in range(4):
        x = features(5, rank, step)
        for each, optimizer in both.each():
            each(x, rank == 1 and step > 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = torch.equal(model.spare.weight, before["spare.weight"])
    moved = not torch.equal(model.right.weight, before["right.weight"])
    return both.end(), kept, moved


def unused_without_asking(schedule: str) -> None:
    """Rank 1 leaves out a layer; its error is the result."""
    rank = dist.get_rank()
    model = DataParallel(seeded(_Branches), schedule=schedule)
    model.optimizer(torch.optim.SGD, lr=0.1)
    model(features(5, rank, 0), False).sum().backward()


def accumulated(schedule: str, set_to_none: bool) -> list[str]:
    """Three micro-batches a step, two of them under no_sync()."""
    both = _Both(seeded(Mixed), schedule)
    for step in range(3):
        for model, optimizer in both.each():
            for part in range(2):
                with model.no_sync():
                    _loss(model, tokens(6, dist.get_rank(), step * 3 + part)).backward()
            _loss(model, tokens(6, dist.get_rank(), step * 3 + 2)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return both.end()


def clipped(schedule: str) -> tuple[float, float, float]:
    """Largest differences of the norms (relative) and of the parameters, and the smallest norm by the limit."""
    both = _Both(seeded(Mixed), schedule)
    norms: dict[int, list[float]] = {0: [], 1: []}

    def clip(model: Any) -> None:
        if model is both.ours:
            norms[0].append(float(model.clip_grad_norm_(0.05)))
        else:
            norms[1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

    for step in range(6):
        both.step(tokens(7, dist.get_rank(), step), clip)
    off = max(abs(a / b - 1) for a, b in zip(norms[0], norms[1], strict=True))
    far = largest_difference(both.ours.module, both.theirs.module)
    both.end()
    return off, far, min(norms[0]) / 0.05


def scaled(
    schedule: str, clip: bool, compress: str | None = None
) -> tuple[list[str], float, list[list[float]]]:
    """Under fp16 autocast: differing bits, largest difference, and the scales after each step, ours and DDP's.

    The first scale is too large for rank 1 alone, so that steps are skipped for its sake.
    """
    rank = dist.get_rank()
    both = _Both(seeded(Mixed), schedule)
    scalers = (
        GradScaler("cpu", init_scale=2.0**14, growth_interval=3),
        torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3),
    )
    scales: list[list[float]] = [[], []]
    for step in range(14):
        x = tokens(8, rank, step)
        for number, (model, optimizer) in enumerate(both.each()):
            scaler = scalers[number]
            with torch.autocast("cpu", dtype=torch.float16):
                loss = _loss(model, x) * (64 if rank else 1)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                parameters = list(model.parameters())
                model.clip_grad_norm_(1.0) if number == 0 else nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales[number].append(scaler.get_scale())
            optimizer.zero_grad()
    far = largest_difference(both.ours.module, both.theirs.module)
    ledger = both.ours.ledger()
    assert ledger is None or ledger.steps == list(range(14)), "a skipped step is a step, too"
    return both.end(), far, scales


def scaled_and_compressed(schedule: str, compress: str) -> tuple[list[str], float]:
    """Bits that differ from training without a scaler, in fp32, and the last scale.

    Scales are powers of two, by which all that a codec computes becomes larger, and nothing else happens.
    """
    rank = dist.get_rank()
    made = []
    for _ in range(2):
        model = DataParallel(seeded(Mixed), schedule=schedule, bucket=1500, compress=compress)
        made.append((model, model.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)))
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=2)
    for step in range(9):
        x = tokens(10, rank, step)
        for model, optimizer in made:
            loss = _loss(model, x)
            if optimizer is made[0][1]:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    found = differing(made[0][0].module, made[1][0].module)
    for model, _ in made:
        model.close()
    return found, scaler.get_scale()


def scaled_early() -> None:
    model = DataParallel(seeded(perceptron), schedule="early")
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(features(8, dist.get_rank(), 0)).square().sum()).backward()
    scaler.step(optimizer)


def scaled_by_torch() -> None:
    model = DataParallel(seeded(perceptron))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(features(8, dist.get_rank(), 0)).square().sum()).backward()
    scaler.step(optimizer)


def averaged_weights(schedule: str) -> list[str]:
    """Weights averaged over the steps by torch's ``AveragedModel``; bits that differ from DDP's average."""
    both = _Both(seeded(Mixed), schedule)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [
        torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=decay) for model, _ in both.each()
    ]
    for step in range(5):
        both.step(tokens(9, dist.get_rank(), step))
        for average, (model, _) in zip(averages, both.each(), strict=True):
            if model is both.ours:
                model.wait()
            average.update_parameters(model.module)
    found = differing(averages[0].module, averages[1].module)
    return found + both.end()


class _Recomputed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # as an embedding's output would
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return x


def recomputed(schedule: str, reentrant: bool) -> list[str]:
    """Bits that differ from DDP's when activations are computed again."""
    both = _Both(seeded(lambda: _Recomputed(reentrant)), schedule)
    for step in range(4):
        both.step(features(10, dist.get_rank(), step))
    return both.end()


def looked_through(schedule: str) -> list[str]:
    """Bits that differ from DDP's where gradients of the input alone are asked for before the backward pass."""
    both = _Both(seeded(perceptron), schedule)
    for step in range(3):
        for model, optimizer in both.each():
            x = features(14, dist.get_rank(), step).requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            (output.square().mean() + slope.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return both.end()


def autocast(schedule: str) -> list[str]:
    """Bits that differ from DDP's under bf16 autocast, whose parameters stay fp32."""
    both = _Both(seeded(Mixed), schedule)
    for step in range(4):
        x = tokens(11, dist.get_rank(), step)
        for model, optimizer in both.each():
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {p.dtype for p in both.ours.parameters()} == {torch.float32}
    return both.end()


def adversaries(schedule: str) -> list[str]:
    """Two models in turn, one trained through the other, as GANs are; bits that differ from DDP's."""
    maker, judge = (_Both(seeded(perceptron, seed), schedule) for seed in (1, 2))
    for step in range(4):
        noise, real = (features(seed, dist.get_rank(), step) for seed in (12, 13))
        for (make, make_step), (tell, tell_step) in zip(maker.each(), judge.each(), strict=True):
            (tell(make(noise).detach()).mean() - tell(real).mean()).backward()
            tell_step.step()
            tell_step.zero_grad()
            # Through the other's module, whose gradients nobody wants: it is not its turn.
            if isinstance(tell, DataParallel):
                tell.wait()
            tell.module.requires_grad_(False)
            (-tell.module(make(noise)).mean()).backward()
            tell.module.requires_grad_(True)
            make_step.step()
            make_step.zero_grad()
    return maker.end() + judge.end()


def clipped_by_torch() -> None:
    model = DataParallel(seeded(perceptron))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(features(8, dist.get_rank(), 0)).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def with_batch_norm(schedule: str) -> list[str]:
    """Buffers and parameters that differ, BatchNorm's statistics among them; last batches are uneven."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))

    rank = dist.get_rank()
    both = _Both(seeded(make), schedule)
    for step in range(4):
        both.step(features(9, rank, step, batch=8 if step < 3 else 2 + 3 * rank))
    return both.end()


def scheduled(schedule: str, name: str) -> list[str]:
    """Under a learning-rate scheduler, with two groups of different weight decay."""
    model = seeded(Mixed)
    theirs: Any = DistributedDataParallel(twin(model))
    ours = DataParallel(model, schedule=schedule, bucket=1500)
    optimizers = (
        ours.optimizer(torch.optim.AdamW, _groups(ours.module), lr=1e-2),
        torch.optim.AdamW(_groups(theirs.module), lr=1e-2),
    )
    rates: dict[str, Callable[[Any], Any]] = {
        "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8),
        "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    }
    schedulers = [rates[name](each) for each in optimizers]
    for step in range(6):
        x = tokens(10, dist.get_rank(), step)
        for each, optimizer, rate in zip((ours, theirs), optimizers, schedulers, strict=True):
            _loss(each, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
    found = differing(ours.module, theirs.module)
    ours.close()
    return found


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def read_right_after_step(schedule: str) -> dict[str, bool]:
    """Ways to look at the parameters while their transfers may still be under way; whether each is right."""
    both = _Both(seeded(Mixed), schedule)
    rank = dist.get_rank()
    found: dict[str, bool] = {}

    def same(values: dict[str, torch.Tensor]) -> bool:
        theirs = both.theirs.module.state_dict()
        return values.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in values.items())

    def read(step: int) -> Any:
        x, module = tokens(12, 0, 0), both.ours.module
        if step == 0:
            return same(module.state_dict())
        if step == 1:
            return same(copy.deepcopy(module).state_dict())
        if step == 2:
            return same(pickle.loads(pickle.dumps(module)).state_dict())
        if step == 3:
            with torch.no_grad():
                return torch.equal(both.ours.eval()(x), both.theirs.eval()(x))
        if step == 4:
            with torch.no_grad():
                return torch.equal(module.eval()(x), both.theirs.module.eval()(x))
        if step == 5:
            return dict(both.ours.named_parameters())["module.up.weight"].equal(both.theirs.module.up.weight)
        bare = seeded(Mixed, seed=99)
        bare.load_state_dict(module.state_dict())
        return same(bare.state_dict())

    ways = ("state_dict", "deepcopy", "pickle", "eval", "bare eval", "named_parameters", "load into bare")
    for step, way in enumerate(ways):
        both.ours.train(), both.theirs.train()
        both.step(tokens(11, rank, step))
        found[way] = read(step)
    copied = copy.deepcopy(both.ours.module)
    _loss(copied, tokens(11, rank, 0)).backward()  # a copy trains alone, without the engine
    found["the end"] = both.end() == []
    return found


def loaded(schedule: str) -> list[str]:
    """Loading parameters in mid-training, into our module and DDP's; what differs afterwards."""
    both = _Both(seeded(Mixed), schedule)
    other = seeded(Mixed, seed=5).state_dict()
    for step in range(4):
        both.step(tokens(13, dist.get_rank(), step))
        if step == 1:
            both.ours.module.load_state_dict(other)
            both.theirs.module.load_state_dict(other)
    return both.end()


def resumed(schedule: str) -> list[str]:
    """Save after two steps, train on in a new model and optimizer; what differs from no break."""
    both = _Both(seeded(Mixed), schedule)
    rank = dist.get_rank()
    for step in range(2):
        both.step(tokens(14, rank, step))
    saved = copy.deepcopy(both.ours.module.state_dict()), copy.deepcopy(both.optimizers[0].state_dict())
    both.ours.close()
    model = seeded(Mixed, seed=3)
    model.load_state_dict(saved[0])
    both.ours = DataParallel(model, schedule=schedule, bucket=1500)
    optimizer = both.ours.optimizer(torch.optim.AdamW, **_ADAMW)
    optimizer.load_state_dict(saved[1])
    both.optimizers = (optimizer, both.optimizers[1])
    for step in range(2, 4):
        both.step(tokens(14, rank, step))
    return both.end()


def refused(how: str) -> None:
    """Uses that the engine refuses; the error is the result."""
    _REFUSED[how](dist.get_rank())


def _second_backward(rank: int) -> None:
    model = DataParallel(seeded(perceptron))
    model.optimizer(torch.optim.SGD, lr=0.1)
    loss = model(features(1, rank, 0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _create_graph(rank: int) -> None:
    model = DataParallel(seeded(perceptron))
    model.optimizer(torch.optim.SGD, lr=0.1)
    model(features(1, rank, 0)).square().sum().backward(create_graph=True)


def _sparse(rank: int) -> None:
    model = DataParallel(nn.Embedding(16, 4, sparse=True))
    model.optimizer(torch.optim.SGD, lr=0.1)
    model(tokens(1, rank, 0)).sum().backward()


def _unfrozen(rank: int) -> None:
    model = DataParallel(seeded(Mixed))
    model.optimizer(torch.optim.SGD, lr=0.1)
    model.module.frozen.requires_grad_(True)  # type: ignore[union-attr]
    model(tokens(1, rank, 0))


def _without_optimizer(rank: int) -> None:
    DataParallel(seeded(perceptron))(features(1, rank, 0)).sum().backward()


def _step_without_backward(rank: int) -> None:
    DataParallel(seeded(perceptron)).optimizer(torch.optim.SGD, lr=0.1).step()


def _foreign_parameter(rank: int) -> None:
    DataParallel(seeded(perceptron)).optimizer(torch.optim.SGD, nn.Linear(2, 2).parameters(), lr=0.1)


def _differing(rank: int) -> None:
    DataParallel(seeded(lambda: perceptron(width=24 + rank)))


def _longer(rank: int) -> None:
    DataParallel(seeded(lambda: perceptron(depth=4 + rank)))


def _closed(rank: int) -> None:
    model = DataParallel(seeded(perceptron))
    model.optimizer(torch.optim.SGD, lr=0.1)
    model.close()
    model(features(1, rank, 0)).sum().backward()


_REFUSED: dict[str, Callable[[int], object]] = {
    "second backward": _second_backward,
    "create_graph": _create_graph,
    "sparse": _sparse,
    "unfrozen": _unfrozen,
    "no optimizer": _without_optimizer,
    "no backward": _step_without_backward,
    "foreign parameter": _foreign_parameter,
    "Muon": lambda rank: DataParallel(nn.Linear(4, 4, bias=False)).optimizer(torch.optim.Muon, lr=0.1),
    "LBFGS": lambda rank: DataParallel(nn.Linear(4, 4)).optimizer(torch.optim.LBFGS),
    "differing": _differing,
    "longer": _longer,
    "closed": _closed,
    "nothing to train": lambda rank: DataParallel(nn.Linear(4, 4).requires_grad_(False)),
    "no bucket": lambda rank: DataParallel(nn.Linear(4, 4), bucket=0),
    "no schedule": lambda rank: DataParallel(nn.Linear(4, 4), schedule="zero"),
    "bucket text": lambda rank: DataParallel(nn.Linear(4, 4), bucket="2 apples"),
    "not a member": lambda rank: DataParallel(nn.Linear(4, 4), process_group=dist.new_group([0])),
}


def too_late(what: str) -> None:
    """Do what ``schedule="early"`` can't honour, since the gradients have been applied by then."""
    unused = what == "has unused parameters"
    model = DataParallel(seeded(Mixed), schedule="early", find_unused_parameters=unused)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(tokens(2, dist.get_rank(), 0)).square().mean().backward()
    try:
        if what == "clips":
            model.clip_grad_norm_(1.0)
        elif what == "changes the rate":
            optimizer.param_groups[0]["lr"] = 0.2
        elif what == "changes a gradient":
            next(iter(model.module.parameters())).grad.mul_(2)  # type: ignore[union-attr]
        else:
            model(tokens(2, dist.get_rank(), 1))
        optimizer.step()
    finally:
        model.close()
