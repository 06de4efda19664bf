"""Every public operation on a model whose weights have a million elements each.

A door makes a ``Pair``: the plain model and the sharded one after an equal step. Each
operation runs on the sharded model and is compared to the plain one, or leaves values
that ``same_model`` compares.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import composable_fsdp as cf
from composable_fsdp import StateDictType
from tests.support.place import World

LONG = 1_000_003
"""Elements of the one-dimensional weights: odd, so no rank's part fills whole words."""
WIDTH, TOKENS = 31, 32_771


class Odd(nn.Module):
    """Weights that no number of ranks, words or rows divides."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.empty(LONG))
        self.low = nn.Parameter(torch.empty(LONG, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.empty(3, LONG // 3 + 3))
        frozen = torch.empty(WIDTH, TOKENS, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.table: Tensor
        self.register_buffer("table", torch.empty(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, WIDTH)`` to the same."""
        sums = [self.long.sum(), self.low.float().sum(), *self.wide.sum(1)]
        shift = (torch.stack(sums) * self.table).sum() / 1000
        return F.linear(x, self.frozen[:, :WIDTH].to(x.dtype)) + shift


class RealSizes(nn.Module):
    """A tied embedding, a linear layer and ``Odd``: five million elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.odd = Odd()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        generator = torch.Generator().manual_seed(0)
        for value in [*self.parameters(), *self.buffers()]:
            value.data.normal_(std=0.03, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.tokens(tokens)))
        return self.head(self.odd(x))  # type: ignore[no-any-return]  # of Linear


UNITS = ("middle", "odd")
"""The units below the root."""


@dataclass
class Pair:
    """A sharded model, and the plain model that it has to equal."""

    world: World
    folder: Path
    plain: nn.Module
    plain_optim: torch.optim.Optimizer
    model: Any
    optim: torch.optim.Optimizer
    norm: tuple[Tensor, Tensor]
    """The total norm of the gradients, of the plain model and of the sharded one."""

    def fulls(self) -> dict[str, Tensor]:
        """Return the full values of the sharded model by the plain name."""
        with cf.unshard_params(self.model, writeback=False):
            return {
                name: copy.deepcopy(p.detach()) for name, p in named(self.model).items()
            }

    def same_model(self) -> None:
        same(self.fulls(), detached(named(self.plain)))

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Set all shards to zero; the block has to bring the plain values back."""
        with _zeroed([p.data for p in self.model.parameters()]):
            yield
            self.same_model()

    @contextmanager
    def state_lost(self) -> Iterator[None]:
        """Set the optimizer's state to zero; the block has to bring it back."""
        with _zeroed([v for each in self.optim.state.values() for v in each.values()]):
            yield
            with cf.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                same_state(cf.optim_state_dict(self.model, self.optim), self)


@contextmanager
def _zeroed(values: list[Tensor]) -> Iterator[None]:
    """Set ``values`` to zero; an error in the block brings them back."""
    kept = [value.clone() for value in values]
    with torch.no_grad():
        torch._foreach_zero_(values)
        try:
            yield
        except BaseException:
            torch._foreach_copy_(values, kept)
            raise


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    pairs = model.named_parameters()
    return {name.replace("_fsdp_wrapped_module.", ""): p for name, p in pairs}


def detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}


def same(got: Any, want: Any, where: str = "") -> None:
    """Compare nested values; floats to what another order of sums makes of a step."""
    if isinstance(want, Mapping):
        assert sorted(map(str, got)) == sorted(map(str, want)), where
        for key in want:
            same(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, Tensor):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        if not want.numel():
            return
        far = 4e-2 if want.dtype is torch.bfloat16 else 1e-3
        worst = (got.cpu().float() - want.float()).abs().max()
        assert worst <= far * want.float().abs().max(), f"{where}: {worst}"
    else:
        assert got == want, where


def same_state(saved: Mapping[str, Any], pair: Pair) -> None:
    """Compare the state of an optimizer state dict keyed by name."""
    want = {
        name: pair.plain_optim.state[p]
        for name, p in named(pair.plain).items()
        if p.requires_grad
    }
    same(saved["state"], want)


def tokens() -> Tensor:
    return torch.randint(TOKENS, (2, 5), generator=torch.Generator().manual_seed(1))


def make_pair(
    world: World,
    folder: Path,
    shard: Callable[[nn.Module], nn.Module],
    clip: Callable[[Any], Tensor] = lambda model: cf.clip_grad_norm_(model, 0.5),
) -> Pair:
    """Return both models after a step on the same input, with their gradients."""
    plain = RealSizes()
    model = shard(copy.deepcopy(plain))
    optims = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    norms = []
    for each, optim in zip((plain, model), optims, strict=True):
        F.cross_entropy(each(tokens()).flatten(0, 1), tokens().flatten()).backward()  # type: ignore[no-untyped-call]
        if each is plain:
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        else:
            norms.append(clip(model))
        optim.step()
    return Pair(world, folder, plain, optims[0], model, optims[1], (norms[0], norms[1]))


# --- The operations ------------------------------------------------------------------


def train_and_clip(p: Pair) -> None:
    same(p.norm[1], p.norm[0])
    p.same_model()


def state_dict_full(p: Pair) -> None:
    """Every rank gets it; a plain model's state dict loads as the own does."""
    with cf.state_dict_type(p.model, StateDictType.FULL_STATE_DICT):
        saved = p.model.state_dict()
        same(saved, p.plain.state_dict())
        with p.lost():
            p.model.load_state_dict(p.plain.state_dict())


def state_dict_full_rank0(p: Pair) -> None:
    config = cf.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with cf.state_dict_type(p.model, StateDictType.FULL_STATE_DICT, config):
        saved = p.model.state_dict()
    same(saved, p.plain.state_dict() if p.world.rank == 0 else {})


def state_dict_sharded(p: Pair) -> None:
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with cf.state_dict_type(p.model, kind):
            saved = copy.deepcopy(p.model.state_dict())
            with p.lost():
                p.model.load_state_dict(saved)


def state_dict_own(p: Pair) -> None:
    """Of the type that the door has without being told."""
    saved = copy.deepcopy(p.model.state_dict())
    same(saved, p.plain.state_dict())
    with p.lost():
        p.model.load_state_dict(saved)


def torch_state_dict(p: Pair) -> None:
    """torch's functions, with full and with sharded values, and from the first rank."""
    options = dcp.StateDictOptions(full_state_dict=True)
    model, optim = dcp.get_state_dict(p.model, p.optim, options=options)
    same(model, p.plain.state_dict())
    same_state(optim, p)
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    empty = p.world.rank > 0
    with p.lost(), p.state_lost():
        dcp.set_model_state_dict(p.model, {} if empty else model, options=options)
        dcp.set_optimizer_state_dict(
            p.model, p.optim, {} if empty else copy.deepcopy(optim), options=options
        )
    model, optim = copy.deepcopy(dcp.get_state_dict(p.model, p.optim))
    with p.lost(), p.state_lost():
        dcp.set_state_dict(
            p.model, p.optim, model_state_dict=model, optim_state_dict=optim
        )


def optim_state(p: Pair) -> None:
    for kind in StateDictType:
        with cf.state_dict_type(p.model, kind):
            saved = copy.deepcopy(cf.optim_state_dict(p.model, p.optim))
            with p.state_lost():
                given = cf.optim_state_dict_to_load(p.model, p.optim, saved)
                p.optim.load_state_dict(given)


def one_parameter(p: Pair) -> None:
    for name, value in named(p.plain).items():
        found = cf.get_full_param(p.model, name)
        same(found, value.detach(), name)
    with p.lost():
        for name, value in named(p.plain).items():
            cf.set_full_param(p.model, name, value.detach())


def one_gradient(p: Pair) -> None:
    for name, value in named(p.plain).items():
        found = cf.get_full_grad(p.model, name)
        if value.grad is None:
            assert found is None
            continue
        assert found is not None
        same(found, value.grad, name)
        cf.set_full_grad(p.model, name, 2 * found)
        same(cf.get_full_grad(p.model, name), 2 * value.grad, name)
        cf.set_full_grad(p.model, name, found)


def one_state(p: Pair) -> None:
    with p.state_lost():
        for name, value in named(p.plain).items():
            if value.requires_grad:
                state = p.plain_optim.state[value]
                cf.optim.set_full_optim_state(p.model, p.optim, name, state)
                found = cf.optim.get_full_optim_state(p.model, p.optim, name)
                same(found, state, name)


def unsharded(p: Pair) -> None:
    """Written back or not, on the first rank alone, on the host, with gradients."""
    plain = named(p.plain)
    with cf.unshard_params(p.model, rank0_only=True, writeback=False):
        if p.world.rank == 0:
            same(detached(named(p.model)), detached(plain))
    with cf.unshard_params(p.model, offload_to_cpu=True, with_grads=True):
        same(detached(named(p.model)), detached(plain))
        for name, full in named(p.model).items():
            if full.requires_grad:
                same(full.grad, plain[name].grad, name)
    with p.lost(), cf.unshard_params(p.model, check_same=True), torch.no_grad():
        for name, full in named(p.model).items():
            full.copy_(plain[name])
    with cf.unshard_params(p.model.odd, recurse=False), torch.no_grad():
        p.model.odd.long.neg_()
    same(cf.get_full_param(p.model, "odd.long"), -plain["odd.long"].detach())
    with torch.no_grad():
        # A write to shards needs no full values.
        p.model.odd.long.neg_()
    p.same_model()


def save_and_load(p: Pair) -> None:
    cf.save(p.folder / "saved", p.model, p.optim)
    with p.lost(), p.state_lost():
        cf.load(p.folder / "saved", p.model, p.optim)
    assert cf.verify(p.folder / "saved").ok


def async_save(p: Pair) -> None:
    cf.async_save(p.folder / "later", p.model).result()
    with p.lost():
        cf.load(p.folder / "later", p.model)


def export_and_convert(p: Pair) -> None:
    cf.storage.export_safetensors(p.folder / "exported", p.model, max_shard_bytes=10**7)
    if p.world.rank == 0:
        for to in ("dcp", "torch", "safetensors"):
            cf.convert(p.folder / "later", p.folder / to, to)
    p.world.barrier()
    exported: dict[str, Tensor] = {}
    for file in (p.folder / "exported").glob("*.safetensors"):
        exported |= load_file(file)
    want = p.plain.state_dict()
    same({**want, **exported}, want)
    assert len(exported) >= len(want) - 1
    for made in ("exported", "dcp", "torch", "safetensors"):
        with p.lost():
            cf.load(p.folder / made, p.model)


def average_and_copy(p: Pair) -> None:
    rule = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    ema, plain_ema = (AveragedModel(m, multi_avg_fn=rule) for m in (p.model, p.plain))
    with torch.no_grad():
        for model, average in ((p.model, ema), (p.plain, plain_ema)):
            average.update_parameters(model)
            for each in average.module.parameters():
                each.mul_(2)
            average.update_parameters(model)
    averaged = Pair(
        p.world, p.folder, plain_ema.module, p.plain_optim, ema.module, p.optim, p.norm
    )
    averaged.same_model()
    same(
        ema.module(tokens()).detach(),
        plain_ema.module(tokens()).detach(),
    )


def nonfinite(p: Pair) -> None:
    assert cf.features.find_nonfinite(p.model) == ()
    gradient = cf.get_full_grad(p.model, "odd.wide")
    assert gradient is not None
    broken = gradient.clone()
    broken[2, -1] = float("nan")
    cf.set_full_grad(p.model, "odd.wide", broken)
    (found,) = cf.features.find_nonfinite(p.model)
    assert (found.parameter, found.kind, found.elements) == ("odd.wide", "nan", 1)
    cf.set_full_grad(p.model, "odd.wide", gradient)


def on_owners(p: Pair) -> None:
    """Whole matrices, each on a rank, as Muon's step."""
    models: tuple[Any, Any] = p.model, p.plain
    pairs = [(m.odd.wide, m.middle.weight) for m in models]
    got = cf.features.map_on_owners(
        pairs[0], [w.detach() for w in pairs[0]], lambda each, _: each.cumsum(1)
    )
    with p.lost(), torch.no_grad():
        for value, part in zip(pairs[0], got, strict=True):
            if part is not None:
                value.copy_(part)
        for name, value in zip(("odd.wide", "middle.weight"), pairs[1], strict=True):
            same(cf.get_full_param(p.model, name), value.detach().cumsum(1), name)
        p.model.load_state_dict(p.plain.state_dict())


Operation = Callable[[Pair], None]
OPERATIONS: tuple[Operation, ...] = (
    train_and_clip,
    state_dict_own,
    state_dict_full,
    state_dict_full_rank0,
    state_dict_sharded,
    torch_state_dict,
    optim_state,
    one_parameter,
    one_gradient,
    one_state,
    unsharded,
    average_and_copy,
    nonfinite,
    on_owners,
    save_and_load,
    async_save,
    export_and_convert,
)


def run_all(operations: Iterable[Operation], pair: Pair) -> None:
    """Run the operations; say for each that fails where."""
    failed = []
    for operation in operations:
        try:
            operation(pair)
        except Exception:
            text = traceback.format_exc(limit=-3)
            failed.append(f"{operation.__name__}: {text}")
    assert not failed, "\n".join(failed)
