"""Generations of training software, by what they overlap and fuse.

They differ in facts, not in fitted numbers: whether attention scores go through memory, whether
gradients are reduced while the backward pass runs, and so on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tonnage.errors import LayoutError
from tonnage.plan.layout import Recipe

_NO_OVERLAP: dict[str, Any] = {
    "fused_loss": False,
    "keeps_outputs": True,
    "overlap_grad": False,
    "overlap_param": False,
    "overlap_tp": False,
    "overlap_p2p": False,
}

_DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduction buffer: the default of ``reduce_bucket_size``."""

SOFTWARE: dict[str, Recipe] = {
    # Narayanan et al., 2104.04473: fused softmax and GELU kernels, blocking sends, gradients at the end.
    "megatron-2021": Recipe(precision="fp16", attention="eager", **_NO_OVERLAP),
    # Korthikanti et al., 2205.05198: the backward all-reduce runs beside the weight gradient.
    "megatron-2022": Recipe(precision="fp16", attention="eager", **{**_NO_OVERLAP, "overlap_tp": True}),
    # Megatron-DeepSpeed (BLOOM, vTrain, MT-NLG): as Megatron of 2021, but DeepSpeed's pipeline engine works off
    # one instruction at a time, and has no interleaving. It sends cut activations, too: its is_pipe_partitioned
    # and is_grad_partitioned follow is_model_parallel (deepspeed/runtime/pipe/engine.py).
    "megatron-deepspeed": Recipe(
        precision="bf16",
        attention="eager",
        paired=False,
        interleaves=False,
        # BF16_Optimizer adds 2-byte gradients up in 4-byte ones and keeps both, and all-reduces them whole
        # (deepspeed/runtime/pipe/engine.py, _bf16_reduce_grads).
        scatters=False,
        fused_grad=False,
        spare_grads=2,
        bucket=_DEEPSPEED_BUCKET,
        **_NO_OVERLAP,
    ),
    # The same before that optimizer, in fp16 or bf16: gradients are added up and reduced in 2 bytes, and
    # made fp32 in the update.
    "megatron-deepspeed-fp16": Recipe(
        precision="fp16",
        attention="eager",
        grad_nbytes=2,
        bucket=_DEEPSPEED_BUCKET,
        paired=False,
        interleaves=False,
        fused_grad=False,
        **_NO_OVERLAP,
    ),
    # DeepSpeed ZeRO-3 of 2021, in Narayanan's table 2: prefetch, but each rank's bytes through its own NIC.
    "deepspeed-2021": Recipe(
        precision="fp16",
        attention="eager",
        rails=False,
        **{**_NO_OVERLAP, "overlap_param": True, "overlap_grad": True},
    ),
    # Megatron-Core of early 2024: as below, before cuDNN's attention and the fused loss.
    "megatron-core-2024": Recipe(attention="flash2", fused_loss=False),
    # Megatron-Core with Transformer Engine: everything beside something; attention of cuDNN.
    "megatron-core": Recipe(attention="flash3", overlap_ep=True, grad_nbytes=2, expandable=True),
    # PyTorch FSDP with eager element-wise kernels; torchtitan's run_train.sh asks for expandable segments.
    "fsdp": Recipe(attention="flash2", fused=False, fused_loss=False, low_copy=False, expandable=True),
    # The same with torch.compile, block by block: the loss stays as it is.
    "fsdp-compiled": Recipe(
        attention="flash2", fused=True, fused_loss=False, low_copy=False, expandable=True
    ),
    # llm-foundry of 2023: Triton's port of the first flash attention.
    "fsdp-2023": Recipe(attention="flash1", fused=False, fused_loss=False, low_copy=False),
}
"""Recipes by name."""


def software(name: str, **changes: Any) -> Recipe:
    """The recipe of that generation, with some habits changed.

    Raises:
        LayoutError: there is none of that name.
    """
    if name not in SOFTWARE:
        raise LayoutError(f"no software {name!r}", hint=f"known: {', '.join(SOFTWARE)}")
    return dataclasses.replace(SOFTWARE[name], **changes)
