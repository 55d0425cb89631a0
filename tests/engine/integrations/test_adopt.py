"""What is taken over from a loop, and what is refused with what to do instead."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR

import tonnage
from tonnage.engine.integrations.adopt import adopt_optimizer, adopt_scheduler, own_weights, refuse_wrapped
from tonnage.errors import EngineError


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


@pytest.mark.parametrize("schedule", ["allreduce", "shard", "early"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_adopted_optimizer_steps_as_the_one_it_was(
    kind: type[torch.optim.Optimizer], schedule: str
) -> None:
    def groups(module: nn.Module) -> list[dict[str, object]]:
        matrices = [p for p in module.parameters() if p.ndim == 2]
        rest = [p for p in module.parameters() if p.ndim == 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]

    bare, inner = net(), net()
    plain = kind(groups(bare), lr=0.01)  # type: ignore[call-arg]
    given = kind(groups(inner), lr=0.01)  # type: ignore[call-arg]
    model = tonnage.DataParallel(inner, schedule=schedule)
    engine = adopt_optimizer(model, given)
    schedules = [LinearLR(plain, 0.1, total_iters=3), LinearLR(given, 0.1, total_iters=3)]
    adopt_scheduler(schedules[1], given=given, engine=engine)
    for step in range(5):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for one, optimizer, scheduler in zip((bare, model), (plain, engine), schedules, strict=True):
            one(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.wait()
    assert [group["lr"] for group in engine.param_groups] == [group["lr"] for group in plain.param_groups]
    for ours, theirs in zip(inner.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
    model.close()


def test_schedules_in_schedules_are_taken_along() -> None:
    inner = net()
    given = torch.optim.SGD(inner.parameters(), lr=0.1)
    chain = SequentialLR(given, [LinearLR(given), LinearLR(given)], milestones=[2])
    model = tonnage.DataParallel(inner)
    engine = adopt_optimizer(model, given)
    adopt_scheduler(chain, given=given, engine=engine)
    assert {each.optimizer for each in (chain, *chain._schedulers)} == {engine}
    assert adopt_optimizer(model, engine) is engine
    model.close()


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    inner = net()
    given = torch.optim.AdamW(inner.parameters())
    inner(torch.ones(1, 4)).sum().backward()
    given.step()
    model = tonnage.DataParallel(inner)
    with pytest.raises(EngineError, match="would be lost"):
        adopt_optimizer(model, given)
    model.close()


class Peculiar(torch.optim.SGD):
    """Not to be made again from its defaults."""

    def __init__(self, params: object, *, secret: int, lr: float = 0.1) -> None:
        assert secret
        super().__init__(params, lr=lr)  # type: ignore[arg-type]


def test_an_optimizer_that_cannot_be_made_again_says_so() -> None:
    inner = net()
    model = tonnage.DataParallel(inner)
    with pytest.raises(EngineError, match="can't be made again") as caught:
        adopt_optimizer(model, Peculiar(inner.parameters(), secret=1))
    assert "model.optimizer" in caught.value.hint
    model.close()


@pytest.mark.parametrize("around", ["engine", "torch"])
def test_a_wrapped_model_is_not_wrapped_again(around: str) -> None:
    wrapped: nn.Module = tonnage.DataParallel(net()) if around == "engine" else nn.DataParallel(net())
    with pytest.raises(EngineError, match="is wrapped by DataParallel already"):
        refuse_wrapped(nn.Sequential(wrapped))


def test_weights_of_one_buffer_get_memory_of_their_own_and_tied_ones_share_it() -> None:
    flat = torch.arange(6.0)
    state = {"a": flat[:4].view(2, 2), "b": flat[4:], "tied": flat[:4].view(2, 2), "step": 3}
    own = own_weights(state)
    assert own["a"].untyped_storage().nbytes() == 16
    assert own["a"].data_ptr() == own["tied"].data_ptr() != own["b"].data_ptr()
    assert own["step"] == 3
    assert all(torch.equal(own[name], state[name]) for name in ("a", "b", "tied"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "framework", "extra"),
    [
        ("transformers", "transformers", "huggingface"),
        ("accelerate", "accelerate", "huggingface"),
        ("lightning", "lightning", "lightning"),
        ("ray", "ray", "ray"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_its_extra(name: str, framework: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{framework!r}] = None\n"
        "from tonnage.errors import TonnageError\n"
        f"try:\n    import tonnage.engine.integrations.{name}\n"
        "except TonnageError as error:\n    print(error, error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert f"tonnage[{extra}]" in done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters is a setting of DistributedDataParallel"),
        ({"ddp_comm_hook": object()}, "ddp_comm_hook is a setting of DistributedDataParallel"),
    ],
)
def test_lightning_s_settings_of_ddp_are_refused(settings: dict[str, object], said: str) -> None:
    lightning = pytest.importorskip("tonnage.engine.integrations.lightning", reason="needs lightning")
    with pytest.raises(EngineError, match=said):
        lightning.Strategy(**settings)


def test_accelerate_refuses_a_hook_of_ddp_and_an_optimizer_of_no_model() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    from tonnage.engine.integrations.accelerate import Accelerator

    hook = accelerate.DistributedDataParallelKwargs(comm_hook=accelerate.utils.DDPCommunicationHookType.BF16)
    with pytest.raises(EngineError, match="communication hook BF16 is for DistributedDataParallel"):
        Accelerator(cpu=True, kwargs_handlers=[hook])
    ours = Accelerator(cpu=True)
    with pytest.raises(EngineError, match="belong to no prepared model"):
        ours.prepare(torch.optim.SGD(net().parameters()))
    model = ours.prepare(net())
    with pytest.raises(EngineError, match="2-norm of all"):
        ours.clip_grad_norm_(list(model.parameters())[:1], 1.0)
    model.close()
