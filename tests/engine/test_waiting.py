import torch
from torch import nn

import tonnage


def test_a_holder_waits_for_parameters_of_a_child_that_it_never_calls() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = tonnage.DataParallel(nn.Sequential(nn.Linear(16, 16), _Attend(attention)), bucket=1)
    model.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.randn(2, 3, 16)).sum().backward()
    hooks = {hook.name: set(hook.buckets) for hook in model._schedule._hooks}
    assert hooks["1.attention.out_proj"] <= hooks["1.attention"]
    assert hooks["0"].isdisjoint(hooks["1.attention"])
    model.close()


class _Attend(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended
