"""Training through codecs, several ranks simulated in one process: the sums are those of the engine."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

import torch

from tonnage.demo.model import Gpt, GptShape, next_byte_loss
from tonnage.engine.compress import Codec, PowerState, as_matrix, make_codec

RANKS = 4
TEXT = b"".join(b"%d times %d is %d. " % (a, b, a * b) for a in range(2, 40) for b in range(2, 40))


class Averaging:
    """The mean of the ranks' gradients through a codec, with error feedback or without."""

    def __init__(self, codec: Codec | None, numel: int, *, feedback: bool) -> None:
        self._codec = codec
        self._residuals = [torch.zeros(numel) if feedback else None for _ in range(RANKS)]
        size = codec.max_wire_nbytes(numel) if codec else 0
        self._wires = [torch.zeros(size, dtype=torch.uint8) for _ in range(RANKS)]

    def __call__(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(gradients[0])
        if self._codec is None:
            return torch.mean(torch.stack(gradients), dim=0)
        for gradient, wire, residual in zip(gradients, self._wires, self._residuals, strict=True):
            self._codec.encode(gradient, wire, residual)
        self._codec.reduce(self._wires, out, scale=1 / RANKS)
        return out


class PowerAveraging:
    """The same by PowerSGD; what is no matrix travels as it is."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self._matrices, offset = [], 0
        for name, parameter in model.named_parameters():
            matrix = as_matrix(name, offset, parameter.shape, rank=rank)
            self._matrices += [matrix] if matrix else []
            offset += parameter.numel()
        self._states = [PowerState(self._matrices, rank=rank, device="cpu") for _ in range(RANKS)]
        self._residuals = [torch.zeros(offset) for _ in range(RANKS)]

    def __call__(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        out = torch.mean(torch.stack(gradients), dim=0)
        for state, gradient, residual in zip(self._states, gradients, self._residuals, strict=True):
            state.project(gradient, residual)
        p = torch.stack([state.p for state in self._states]).sum(dim=0)
        for state, residual in zip(self._states, self._residuals, strict=True):
            state.p.copy_(p)
            state.back_project(residual)
        q = torch.stack([state.q for state in self._states]).sum(dim=0)
        self._states[0].q.copy_(q)
        self._states[0].deliver(out, scale=1 / RANKS)
        for state in self._states[1:]:
            state.load_state_dict(self._states[0].state_dict())
        return out


def small_gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(GptShape(width=32, num_layers=2, num_heads=2, context=32))


def train_gpt(average: Averaging | PowerAveraging, model: Gpt, *, steps: int = 60) -> float:
    """Mean loss of the last steps of a small GPT under Adam, each rank with windows of its own."""
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pick, losses = random.Random(1), []
    for _ in range(steps):
        gradients = []
        for _rank in range(RANKS):
            starts = [pick.randrange(len(data) - 33) for _ in range(4)]
            loss = next_byte_loss(model, torch.stack([data[s : s + 33] for s in starts]))
            optimizer.zero_grad()
            loss.backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            losses.append(loss.item())
        mean = average(gradients)
        parts = mean.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
    return sum(losses[-40:]) / 40


@pytest.fixture(scope="module")
def plain_loss() -> float:
    model = small_gpt()
    return train_gpt(Averaging(None, 0, feedback=False), model)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("lossless", 1e-3),
        ("sparse", 1e-3),
        ("bf16", 0.01),
        ("fp16", 0.01),
        ("int8", 0.01),
        ("topk:0.25", 0.15),
    ],
)
def test_a_small_gpt_trains_about_as_well_through_each_codec(
    name: str, within: float, plain_loss: float
) -> None:
    model = small_gpt()
    numel = sum(p.numel() for p in model.parameters())
    loss = train_gpt(Averaging(make_codec(name), numel, feedback=True), model)
    assert loss == pytest.approx(plain_loss, rel=within)


def test_a_small_gpt_trains_about_as_well_through_power_sgd(plain_loss: float) -> None:
    model = small_gpt()
    assert train_gpt(PowerAveraging(model, rank=4), model) == pytest.approx(plain_loss, rel=0.15)


def least_squares(name: str, *, feedback: bool) -> float:
    """Distance that is left to the solution, as a part of the first, after 600 steps of plain SGD."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, 200, generator=generator) for _ in range(RANKS)]
    solution = torch.randn(200, generator=generator) * torch.logspace(-1, 1, 200)
    targets = [x @ solution for x in inputs]
    weights = torch.zeros(200)
    average = Averaging(make_codec(name), 200, feedback=feedback)
    for _ in range(600):
        mean = average([x.T @ (x @ weights - y) / 256 for x, y in zip(inputs, targets, strict=True)])
        weights -= 0.02 * mean
    return ((weights - solution).norm() / solution.norm()).item()


@pytest.mark.parametrize("name", ["sign", "topk:0.02", "topk:0.005"])
def test_without_error_feedback_the_solution_is_missed_and_with_it_found(name: str) -> None:
    assert least_squares(name, feedback=True) < 0.01
    assert least_squares(name, feedback=False) > 0.2
