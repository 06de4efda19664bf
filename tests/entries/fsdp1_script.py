"""A training script for torch's FSDP1 on the CPU, as its users write them.

The test of the import swap runs its text twice: as it is, and with
``torch.distributed.fsdp`` replaced by ``composable_fsdp``. Nothing else differs.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    transformer_auto_wrap_policy,
)

VOCAB, WIDTH, CONTEXT = 32, 16, 8
# Its name from torch 2.13 on, and the one before.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None)
reduce_scatter = reduce_scatter or dist.reduce_scatter_tensor


Layer = nn.TransformerEncoderLayer


def block() -> nn.Module:
    """Attention and a feed-forward layer."""
    return nn.TransformerEncoderLayer(
        WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True
    )


class Transformer(nn.Module):
    """Tokens to logits, with a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocab)``."""
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def init_weights(module: nn.Module) -> None:
    """Equal values wherever a module is, whole or not."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        with torch.no_grad():
            values = torch.arange(module.weight.numel(), dtype=torch.float32)
            module.weight.copy_(torch.sin(values).view_as(module.weight) * 0.1)


def batch_of(step: int, rank: int) -> Tensor:
    """Token ids ``(4, CONTEXT)``, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (4, CONTEXT), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross entropy of the next token."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build(strategy: ShardingStrategy) -> FSDP:
    """Wrap each block, then the whole, and initialise the values."""
    torch.manual_seed(0)
    model = FSDP(
        Transformer(),
        sharding_strategy=strategy,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={Layer},
        ),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model.apply(init_weights)
    return model


def train(model: FSDP, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Four steps with accumulation, scaling, clipping; this rank's losses."""
    rank, losses = dist.get_rank(), []
    scaler = ShardedGradScaler(device="cpu", init_scale=64.0, growth_interval=2)
    for step in range(first, first + 4):
        with model.no_sync():
            scaler.scale(loss_of(model, batch_of(2 * step, rank)) / 2).backward()  # type: ignore[no-untyped-call]
        loss = loss_of(model, batch_of(2 * step + 1, rank))
        scaler.scale(loss / 2).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    return [*losses, scaler.get_scale()]


def save(model: FSDP, optimizer: torch.optim.Optimizer, offload: bool) -> io.BytesIO:
    """A file with both states in full, from rank 0; what others write is empty."""
    model_config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, model_config, optim_config
    ):
        assert FSDP.get_state_dict_type(model).state_dict_config == model_config
        states = [model.state_dict(), FSDP.optim_state_dict(model, optimizer)]
    file = io.BytesIO()
    torch.save(states, file)
    return file


def load(model: FSDP, optimizer: torch.optim.Optimizer, file: io.BytesIO) -> list[Any]:
    """Take both states from rank 0's file; the names that were in this rank's."""
    file.seek(0)
    states = torch.load(file)
    weights = [states[0]]
    dist.broadcast_object_list(weights, src=0)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=True),
    )
    model.load_state_dict(weights[0])
    part = FSDP.optim_state_dict_to_load(model, optimizer, states[1])
    optimizer.load_state_dict(part)
    return [sorted(each) for each in (states[0], states[1].get("state", {}))]


def describe(model: FSDP, offload: bool) -> dict[str, Any]:
    """Names and numbers that do not depend on how values are stored."""
    sums: dict[str, float] = {}
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        for name, parameter in model.named_parameters():
            sums[name] = parameter.double().sum().item()
            if parameter.grad is not None:
                sums[f"{name}.grad"] = parameter.grad.double().norm().item()
    with FSDP.summon_full_params(
        model, rank0_only=True, writeback=False, offload_to_cpu=offload
    ):
        if dist.get_rank() == 0:
            sums["largest"] = max(p.abs().max().item() for p in model.parameters())
    return {
        "sums": sums,
        "units": len(FSDP.fsdp_modules(model)),
        "roots": len(FSDP.fsdp_modules(model, root_only=True)),
        "is root": [unit.check_is_root() for unit in FSDP.fsdp_modules(model)],
        "buffers": [
            name.replace("_fsdp_wrapped_module.", "")
            for name, _ in model.named_buffers()
        ],
    }


def rekeyed(model: FSDP, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The older functions: full state on rank 0, by number, scattered again."""
    full = FSDP.full_optim_state_dict(model, optimizer)
    part = FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    optimizer.load_state_dict(part)
    if dist.get_rank() != 0:
        return [full]
    plain = Transformer()
    numbered = FSDP.rekey_optim_state_dict(
        full,
        OptimStateKeyType.PARAM_ID,
        plain,
        optim=torch.optim.AdamW(plain.parameters()),
    )
    return [sorted(numbered["state"]), sorted(full["state"])]


def main(strategy: str, offload: bool) -> dict[str, Any]:
    """Train, save, train on; go back to what was saved and train on again.

    ``offload``: move full values to host memory. For a model on the CPU, FSDP1 then
    reads memory that it has freed, and gives every state the values of the last one
    (seen on torch 2.13).
    """
    make: Callable[..., torch.optim.Optimizer] = functools.partial(
        torch.optim.AdamW, lr=0.01, eps=1e-4
    )
    model = build(ShardingStrategy[strategy])
    optimizer = make(model.parameters())
    before = train(model, optimizer, 0)
    file = save(model, optimizer, offload)
    after = train(model, optimizer, 4)

    resumed = build(ShardingStrategy[strategy])
    optimizer = make(resumed.parameters())
    keys = load(resumed, optimizer, file)
    again = train(resumed, optimizer, 4)
    loss_of(resumed, batch_of(99, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
    return {
        "losses": [before, after, again],
        "keys": keys if dist.get_rank() == 0 else None,
        "model": describe(resumed, offload),
        "rekeyed": rekeyed(resumed, optimizer),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("FULL_SHARD", torch.cuda.is_available())["losses"])  # noqa: T201
    dist.destroy_process_group()
