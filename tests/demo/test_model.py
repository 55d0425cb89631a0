from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tonnage.demo.model import VOCABULARY, Gpt, GptShape, next_byte_loss  # noqa: E402

SMALL = GptShape(width=32, num_layers=2, num_heads=2, context=16)


def test_the_demo_trains_as_many_parameters_as_its_help_says() -> None:
    assert sum(p.numel() for p in Gpt(GptShape()).parameters()) == pytest.approx(3.3e6, rel=0.02)


def test_a_byte_is_predicted_from_those_before_it_alone() -> None:
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    tokens = torch.randint(0, VOCABULARY, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_an_untrained_model_loses_what_a_guess_would_and_learns_a_pattern() -> None:
    torch.manual_seed(0)
    model = Gpt(SMALL)
    windows = (torch.arange(17) * 3 % 11).repeat(4, 1)
    assert next_byte_loss(model, windows).item() == pytest.approx(math.log(VOCABULARY), abs=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = next_byte_loss(model, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
