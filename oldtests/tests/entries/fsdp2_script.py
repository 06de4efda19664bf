"""A script as a user of torch's FSDP2 wrote it; a test changes its import lines."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "bf16 reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32 out of bf16": MixedPrecisionPolicy(
        torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False
    ),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return x + y.to(x.dtype)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x.to(block_dtype(block)))
        y: torch.Tensor = self.head(x.to(self.head.weight.dtype))
        return y


def block_dtype(block: nn.Module) -> torch.dtype:
    """What the block's users cast its input to if it does not do so itself."""
    return torch.bfloat16 if getattr(block, "half", False) is True else torch.float32


def shard(case: str) -> Any:
    torch.manual_seed(0)
    model: Any = Net()
    options: dict[str, Any] = {}
    if case in POLICIES:
        options["mp_policy"] = POLICIES[case]
        for block in model.blocks:
            block.half = True
    if case == "kept":
        options["reshard_after_forward"] = False
    if case == "resharded":
        options["reshard_after_forward"] = True
    if case == "number of ranks":
        options["reshard_after_forward"] = dist.get_world_size()
    if case == "one rank":
        options["reshard_after_forward"] = 1
    if case == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if case == "ignored":
        options["ignored_params"] = {model.embed.weight}
        model.embed.weight.requires_grad_(False)
    if case == "placed":
        options["shard_placement_fn"] = lambda parameter: None
    if case.startswith("replicas"):
        # Names that no other case uses: torch finds the groups of equal meshes again.
        names = (f"dp{len(case)}", "shard")
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reshard_after_forward=1
        for block in model.blocks:
            made = fully_shard(block, **options)
            assert made is block
        if case == "list":
            fully_shard([model.embed, model.head], **options)
        fully_shard(model, **options)
    return model


def settle(model: Any, case: str) -> None:
    """Call the methods that the case is about."""
    is_sharded = isinstance(model, FSDPModule)
    assert is_sharded
    blocks = [each for each in model.blocks if isinstance(each, FSDPModule)]
    assert len(blocks) == 3
    assert [type(each).__name__ for each in blocks] == ["FSDPBlock"] * 3
    if case == "prefetch":
        for this, ahead in itertools.pairwise(blocks):
            this.set_modules_to_forward_prefetch([ahead])
            ahead.set_modules_to_backward_prefetch([this])
    if case == "factor":
        for each in (model, *blocks):
            each.set_gradient_divide_factor(3.0)
            each.set_force_sum_reduction_for_comms(True)
    if case == "hook":
        for each in (model, *blocks):
            each.set_all_reduce_hook(double)
    if case == "set resharding":
        model.set_reshard_after_forward(True)
        blocks[1].set_reshard_after_forward(False, recurse=False)
    if case == "method":
        register_fsdp_forward_method(model, "score")
    if case == "shared":
        share_comm_ctx([model])
    if case == "event":
        model.set_post_optim_event(torch.Event("cpu"))


def double(sums: torch.Tensor) -> None:
    sums.mul_(2.0)


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def whole(norm: torch.Tensor) -> float:
    """The norm as a number; FSDP2's is a DTensor."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main(case: str) -> dict[str, Any]:
    model = shard(case)
    settle(model, case)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, eps=1e-3
    )
    losses = []
    for step in range(3):
        parts = 2 if "accumulate" in case else 1
        for part in range(parts):
            last = part == parts - 1
            if case.endswith("accumulate"):
                model.set_requires_gradient_sync(last)
            if case.endswith("accumulate shards"):
                model.set_requires_all_reduce(last)
            if case == "keep and accumulate":
                model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
            if case == "by hand":
                handle = model.unshard(async_op=True)
                assert handle is not None
                handle.wait()
                assert model.unshard() is None
                model.blocks[0].unshard()
                model.blocks[0].reshard()
            forward = model.score if case == "method" else model
            loss = forward(batch(step, part)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if case == "recovered" and step == 1:
            model.reset_iter_state()
        if case == "clipped":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            losses.append(whole(norm))
            losses.append(whole(clip_grad_norm_(model.parameters(), 0.04, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    full = {}
    for name, value in model.state_dict().items():
        full[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        losses.append(model(batch(9, 9)).float().mean().item())
    return {"losses": losses, "state": {k: v.tolist() for k, v in full.items()}}
