"""The same tiny model under each library, ready to step.

The units are as small as they can be (LayerNorm and two ``Linear(8, 8)``, six
parameters, unless asked otherwise), so that a step is nearly all host time and a
library's own work stands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.floor import floor_shard

PARAMETERS = 6
WIDTH = 8
BATCH = 4
MAX_NORM = 1.0

Clip = Callable[[nn.Module, bool], object]


class Block(nn.Module):
    """One unit of an even number of small parameters: 6 are a norm and two linears."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)]
        norm = [nn.LayerNorm(WIDTH)] if len(linears) > 1 else []
        self.layers = nn.ModuleList([*norm, *linears[len(norm) :]])

    def forward(self, x: Tensor) -> Tensor:
        """Residual block on ``(BATCH, WIDTH)``."""
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        return x + torch.relu(hidden)


class TinyModel(nn.Module):
    """A stem that the root unit owns, then ``units`` blocks."""

    def __init__(self, units: int, parameters: int = PARAMETERS) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(parameters) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        """Stem and blocks in order on ``(BATCH, WIDTH)``."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Variant:
    """One library: how it shards the model and how its users clip.

    ``clip`` takes whether torch's clipping may use list operators, as it does unasked.
    """

    name: str
    shard: Callable[[TinyModel], nn.Module]
    clip: Clip
    parameters: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters


class Trainee:
    """A sharded model with its optimizer; the step in its two halves.

    ``foreach`` says whether clip and AdamW work on lists of tensors or one by one.
    """

    def __init__(
        self, variant: Variant, sharded: nn.Module, *, foreach: bool = True
    ) -> None:
        self.model = sharded
        self._clip = variant.clip
        self._foreach = foreach
        self._input = torch.randn(BATCH, WIDTH)
        self._optimizer = torch.optim.AdamW(
            variant.parameters(self.model), lr=1e-3, foreach=foreach
        )

    @classmethod
    def of(cls, variant: Variant, units: int, parameters: int) -> Trainee:
        """Build the model, shard it, make its optimizer."""
        return cls(variant, variant.shard(TinyModel(units, parameters)))

    def forward_backward(self) -> None:
        """Forward, loss, backward."""
        self.model(self._input).sum().backward()

    def clip_and_update(self) -> None:
        """Clip, optimizer step, gradients dropped."""
        self._clip(self.model, self._foreach)
        self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set all gradients to ``None``."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """One whole training step."""
        self.forward_backward()
        self.clip_and_update()


def _clip_plain(model: nn.Module, foreach: bool) -> Tensor:
    return nn.utils.clip_grad_norm_(
        model.parameters(), MAX_NORM, foreach=None if foreach else False
    )


def _clip_fsdp1(model: nn.Module, foreach: bool) -> object:
    assert isinstance(model, FSDP1)
    return model.clip_grad_norm_(MAX_NORM)


def _clip_fsdp2(model: nn.Module, foreach: bool) -> object:
    norm = _clip_plain(model, foreach)
    # The others return the norm over all ranks; this makes it that here too.
    return norm.full_tensor()  # type: ignore[attr-defined]  # a DTensor at run time


def _shard_plain(model: TinyModel) -> nn.Module:
    return model


def _shard_ddp(model: TinyModel) -> nn.Module:
    return DistributedDataParallel(model)


def _shard_fsdp1(model: TinyModel) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _shard_fsdp2(model: TinyModel) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=mesh)
    fsdp2_fully_shard(model, mesh=mesh)
    return model


def _shard_floor(model: TinyModel) -> nn.Module:
    # A yardstick and no library; its clip is torch's, so each rank takes its own norm.
    floor_shard(model, model.blocks, compute=torch.float32, reduce=torch.float32)
    return model


def load_ours() -> Variant:
    """The package of this repository.

    Raises: ImportError, if it is not installed and this is not the repository's root.
    """
    from composable_fsdp import clip_grad_norm_, fully_shard

    def shard(model: TinyModel) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model

    return Variant("ours", shard, lambda model, _: clip_grad_norm_(model, MAX_NORM))


def load_flat() -> Variant:
    """The same with an optimizer over flat parameters. Raises: as ``load_ours``."""
    from composable_fsdp.features import flat_parameters

    return replace(load_ours(), name="ours flat", parameters=flat_parameters)


PLAIN = Variant("plain", _shard_plain, _clip_plain)
PEERS = (
    Variant("ddp", _shard_ddp, _clip_plain),
    Variant("fsdp1", _shard_fsdp1, _clip_fsdp1),
    Variant("fsdp2", _shard_fsdp2, _clip_fsdp2),
    Variant("floor", _shard_floor, _clip_plain),
)
NAMES = (*(peer.name for peer in PEERS), "ours", "ours flat")


def choose(names: Sequence[str]) -> tuple[list[Variant], str | None]:
    """Plain, then the named variants; and why ours is not among them, if it is not.

    Without ours the peers are still worth a run, so its absence is told, not raised.
    """
    chosen = [PLAIN, *(peer for peer in PEERS if peer.name in names)]
    loaders = {"ours": load_ours, "ours flat": load_flat}
    try:
        return [*chosen, *(loaders[n]() for n in loaders if n in names)], None
    except ImportError as error:
        return chosen, f"ours: not importable ({error})"
