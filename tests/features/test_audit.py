"""Programs that take a shard for the parameter are told in the first step, others not.

Each program trains a model of two units; a table says what of it is told, and where.
"""

from __future__ import annotations

import linecache
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from composable_fsdp import (
    ShardedGradScaler,
    audit,
    clip_grad_norm_,
    fsdp2,
    fully_shard,
    get_full_param,
    grad_norm,
    no_sync,
    param_norm,
)
from composable_fsdp.access import full_shape
from composable_fsdp.errors import CompositionError
from composable_fsdp.features import audit as audits
from composable_fsdp.features import flat_parameters, map_on_owners
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, backward
from tests.support.sharded import message_of
from tests.support.world import World

Program = Callable[[nn.Module], object]
PREFIX = "composable_fsdp: shard taken for the parameter: "


def build(path: str, width: int = 6) -> nn.Module:
    """Two units; on two ranks the shard of the first weight has as many rows as
    columns, so that shapes alone do not tell rows from columns.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
    )
    return apply_units(model, ["0"], path=path)


def weight(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.ndim == 2)


def loss_of(model: nn.Module) -> Tensor:
    x = torch.ones(4, weight(model).shape[1])
    loss: Tensor = model(x).square().mean()
    return loss


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(
    model: nn.Module,
    make: Callable[..., optim.Optimizer] = optim.SGD,
    *,
    penalty: Callable[[nn.Module], Any] = lambda _: 0.0,
    between: Callable[[nn.Module], object] = lambda _: None,
    parameters: Any = None,
    **options: Any,
) -> None:
    optimizer = make(parameters or list(model.parameters()), **{"lr": 0.01, **options})
    for _ in range(3):
        torch.autograd.backward(loss_of(model) + penalty(model))
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def after_backward(between: Callable[[nn.Module], object]) -> Program:
    return partial(train, between=between)


def with_penalty(penalty: Callable[[nn.Module], Any]) -> Program:
    return partial(train, penalty=penalty)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


Rule = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


class ByRule(optim.Optimizer):
    """A hand-written optimizer: ``rule`` gives the update of one parameter."""

    def __init__(self, params: Any, lr: float, rule: Rule) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.rule(p, p.grad, self.state[p]), alpha=group["lr"])


class ForShards(ByRule):
    works_on_shards = True


def by_rule(rule: Rule, kind: type[ByRule] = ByRule) -> Program:
    return partial(train, make=kind, rule=rule)


def trust_ratio(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    made: Tensor = g * (p.norm() / (g.norm() + 1e-6))
    return made


def lion(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    mean = state.setdefault("exp_avg", torch.zeros_like(p))
    update = mean.mul(0.9).add(g, alpha=0.1).sign_()
    mean.lerp_(g, 0.01)
    made: Tensor = update
    return made


def sharpness_aware(model: nn.Module) -> None:
    base = sgd(model)
    for _ in range(2):
        backward(loss_of(model))
        norm = torch.stack([g.norm() for g in gradients(model)]).norm()
        step = [(p, p.grad / norm) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, up in step:
                p.add_(up)
        base.zero_grad()
        backward(loss_of(model))
        with torch.no_grad():
            for p, up in step:
                p.sub_(up)
        base.step()


def first_rows(model: nn.Module) -> None:
    for g in gradients(model):
        g[:2] = 0


def masked_rows(model: nn.Module) -> None:
    def hook(g: Tensor) -> Tensor:
        g = g.clone()
        g[:2] = 0
        return g

    weight(model).register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
    train(model)


def scaled(kind: Any) -> Program:
    def program(model: nn.Module) -> None:
        optimizer, scaler = sgd(model), kind("cpu")
        for _ in range(2):
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return program


TOLD: dict[str, tuple[Program, str, str]] = {
    "SAM": (sharpness_aware, "norm", "g.norm() for g in"),
    "orthogonality": (
        with_penalty(lambda m: (weight(m).t() @ weight(m)).square().sum()),
        "matmul",
        "weight(m).t() @ weight(m)",
    ),
    "norms in logs": (
        after_backward(lambda m: [float(p.detach().norm()) for p in m.parameters()]),
        "norm",
        "float(p.detach().norm())",
    ),
    "torch's clip": (
        after_backward(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
        "_foreach_norm",
        "nn.utils.clip_grad_norm_",
    ),
    "LARS": (by_rule(trust_ratio), "norm in ByRule", "p.norm() / (g.norm()"),
    "rows of gradients": (after_backward(first_rows), "__setitem__", "g[:2] = 0"),
    "rows in a hook": (masked_rows, "__setitem__", "g[:2] = 0"),
    "a row": (
        after_backward(lambda m: weight(m).detach()[0].clone()),
        "__getitem__",
        "detach()[0]",
    ),
    "filled": (
        after_backward(lambda m: nn.init.normal_(weight(m))),
        "normal_",
        "nn.init.normal_",
    ),
    "torch's scaler": (
        scaled(torch.amp.GradScaler),
        "_amp_foreach_non_finite_check_and_unscale_",
        "scaler.step(optimizer)",
    ),
}


def l2(model: nn.Module) -> Tensor:
    found: Tensor = sum(p.pow(2).sum() for p in model.parameters())  # type: ignore[assignment]
    return 0.01 * found


def decay(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.99)


def clip_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for g in gradients(model):
        g[g.isnan()] = 0
        g.clamp_(-1, 1)


def without_sync(model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(2):
        with no_sync(model):
            backward(loss_of(model))
        backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()


def by_full_shapes(model: nn.Module) -> None:
    groups = [{"params": [p], "lr": 0.1 / full_shape(p)[0]} for p in model.parameters()]
    train(model, parameters=groups)


def evaluated(model: nn.Module) -> None:
    def look(_: nn.Module) -> None:
        with torch.no_grad():
            assert float(loss_of(model)) >= 0
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert grad_norm(model) >= 0
        assert param_norm(model) >= 0

    train(model, between=look)
    get_full_param(model, "0.weight").norm()


def owned(model: nn.Module) -> None:
    matrices = [p for p in model.parameters() if p.ndim == 2]

    def whole(update: Tensor, _: Tensor) -> Tensor:
        made: Tensor = update / update.norm()
        return made

    def step(_: nn.Module) -> None:
        updates = [None if p.grad is None else p.grad.clone() for p in matrices]
        map_on_owners(matrices, updates, whole)

    train(model, between=step)


def around(model: nn.Module) -> None:
    class Around(optim.Optimizer):
        """Holds another optimizer, as Lookahead does."""

        def __init__(self, params: Any, lr: float) -> None:
            self.base = optim.AdamW(params, lr)
            super().__init__(self.base.param_groups, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    train(model, Around)


def stepped_before(model: nn.Module) -> None:
    """As DCP does, which creates state."""
    optimizer = ForShards(model.parameters(), 0.01, trust_ratio)
    optimizer.step()
    for _ in range(3):
        backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()


def in_modes(model: nn.Module) -> None:
    class Mine(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    before = torch._C._len_torch_function_stack()
    with Mine(), torch.device("cpu"):
        train(model)
    assert torch._C._len_torch_function_stack() == before


def in_a_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=train, args=(model,))
    thread.start()
    thread.join()


def transformed(model: nn.Module) -> None:
    def look(_: nn.Module) -> None:
        values = torch.func.vmap(lambda x: x * 2)(torch.ones(2, 3))
        torch.func.grad(lambda x: x.sum())(values)

    train(model, between=look)


every: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "AdamW": optim.AdamW,
}


def averaged(model: nn.Module) -> None:
    loss_of(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # untyped in torch
    train(model, between=average.update_parameters)


@torch.no_grad()
def as_reference(model: nn.Module) -> None:
    """Forwards of a copy that is frozen in part, and of one that is frozen."""
    frozen = deepcopy(model)
    weight(frozen).requires_grad_(False)
    loss_of(frozen)
    loss_of(deepcopy(model).requires_grad_(False))


QUIET: dict[str, Program] = {
    **{f"{n} foreach": partial(train, make=m, foreach=True) for n, m in every.items()},
    "AdamW fused": partial(train, make=optim.AdamW, fused=True),
    "SGD fused": partial(train, make=optim.SGD, fused=True),
    "L2": with_penalty(l2),
    "decay by hand": after_backward(decay),
    "clip by value": after_backward(clip_by_value),
    "our clip": after_backward(lambda m: clip_grad_norm_(m, 0.1)),
    "no_sync": without_sync,
    "our scaler": scaled(ShardedGradScaler),
    "rates by full shapes": by_full_shapes,
    "evaluation and norms": evaluated,
    "flat parameters": lambda m: train(m, optim.AdamW, parameters=flat_parameters(m)),
    "owners": owned,
    "an optimizer in another": around,
    "modes": in_modes,
    "a thread": in_a_thread,
    "functorch": transformed,
    "Lion": by_rule(lion),
    "works_on_shards": by_rule(trust_ratio, ForShards),
    "works_on_shards, after a step before any forward": stepped_before,
    "a reference that is frozen": as_reference,
    "an average of the weights": averaged,
}


def said(program: Program, model: nn.Module) -> list[Any]:
    """The warnings of a program, in which the audit itself must not fail."""
    with (
        mock.patch.object(audits, "_log") as log,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        program(model)
    assert log.mock_calls == []
    return list(found)


@pytest.mark.req("R-10")
@on_ranks(1, 2)
def test_a_shard_taken_for_the_parameter_is_told_at_its_line(world: World) -> None:
    """By function, parameter and line, on each of two ranks; one rank has it all. The
    doors by turns."""
    # FSDP2's door wraps functions of torch for the whole process.
    fsdp2.fully_shard(nn.Linear(4, 4))
    for index, (name, (program, function, line)) in enumerate(TOLD.items()):
        found = said(program, build(PATHS[index % 2]))

        texts = [str(each.message) for each in found]
        if world.world_size == 1:
            assert texts == [], name
            continue
        first = next(
            (w for w in found if f"{PREFIX}{function}" in str(w.message)), None
        )
        assert first is not None, (name, texts)
        assert "parameter '" in str(first.message), name
        assert first.filename == __file__, (name, first.filename)
        assert line in linecache.getline(__file__, first.lineno), (name, first.lineno)


@pytest.mark.req("R-10", "R-12")
@on_ranks(1, 2)
def test_right_programs_hear_nothing(world: World) -> None:
    """Each trains to its end without a warning, the doors by turns."""
    for index, (name, program) in enumerate(QUIET.items()):
        found = said(program, build(PATHS[index % 2]))

        assert [str(each.message) for each in found] == [], name


PENALTIES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "L2": (lambda w: 0.1 * w.square().sum(), True),
    "L1 by rows": (lambda w: w.abs().sum(1).sum() / 3, True),
    "two sums": (lambda w: w.sum() + (w - 1).pow(2).sum(), True),
    "norms of rows": (lambda w: w.square().sum(1).sqrt().sum(), True),
    "mse": (lambda w: nn.functional.mse_loss(w, w.detach(), reduction="sum"), True),
    "a mean": (lambda w: w.square().mean(), False),
    "a norm": (lambda w: 0.1 * w.norm(), False),
    "a product of matrices": (lambda w: (w.t() @ w).square().sum(), False),
    "right and wrong": (lambda w: w.square().sum() + w.norm(), False),
    "a row": (lambda w: w[0].square().sum(), False),
}


@on_ranks(2)
def test_which_penalties_are_right_on_shards(world: World) -> None:
    """Sums over elements, and what is linear in them."""
    for name, (penalty, is_right) in PENALTIES.items():

        def of_weight(model: nn.Module, of: Any = penalty) -> Any:
            return of(weight(model))

        told = said(with_penalty(of_weight), build("composable"))
        assert (told == []) is is_right, name


class Tied(nn.Module):
    """The outer unit reads the weight of the inner, as a head that is tied by hand."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.head, self.way = nn.Linear(6, 6), nn.Linear(6, 6), way

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.inner(x)) + self.way(self.inner.weight)
        return made


@pytest.mark.req("R-10")
@on_ranks(2)
def test_a_shard_in_a_graph_is_told_where_no_mode_sees_it(world: World) -> None:
    """In the forward of another unit, and before the first forward; each once. A sum
    over elements is right and quiet there, too.
    """
    inside, right = Tied(lambda w: (w.t() @ w).sum()), Tied(lambda w: w.square().sum())
    fully_shard(inside.inner)
    fully_shard(right.inner)
    before = build("composable")

    def early(model: nn.Module, penalize: Any = Tensor.norm) -> None:
        penalty = penalize(weight(model))
        torch.autograd.backward(loss_of(model) + penalty)

    def twice(model: nn.Module) -> None:
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()

    (first,) = said(twice, fully_shard(inside))
    (second,) = said(early, before)
    assert said(twice, fully_shard(right)) == []
    quiet = partial(early, penalize=lambda w: w.square().sum())
    assert said(quiet, build("composable")) == []

    for told, name in (first, "inner.weight"), (second, "0.weight"):
        assert f"The loss reads parameter '{name}'" in str(told.message)
        assert "backward" in linecache.getline(told.filename, told.lineno)


@on_ranks(2)
def test_a_model_of_real_size_is_audited_alike(world: World) -> None:
    """A weight of two million elements, whose rows are not as many as columns."""
    clip, function, _ = TOLD["torch's clip"]

    assert function in str(said(clip, build("composable", 1000))[0].message)
    assert said(QUIET["AdamW foreach"], build("composable", 1000)) == []


@on_ranks(2)
def test_the_action_of_an_audit(world: World) -> None:
    """ "off" ends it, "error" raises, and a later step is audited when asked."""
    norms = after_backward(lambda m: weight(m).detach().norm())
    quiet, strict, again, late = (build("composable") for _ in range(4))
    audit(quiet, "off")
    audit(strict, "error")
    train(again)

    assert said(norms, quiet) == []
    with pytest.raises(CompositionError, match="takes elements together of parameter"):
        norms(strict)
    assert said(norms, again) == []
    backward(loss_of(late))
    audit(late, "off")
    assert said(lambda m: sgd(m).step(), late) == []
    assert said(norms, late) == []
    audit(again)
    assert len(said(norms, again)) == 1
    assert said(norms, again) == []
    with pytest.raises(ValueError, match="expects an action of warn, error, off"):
        audit(again, "loud")  # type: ignore[arg-type]  # a mistake


@on_ranks(2)
def test_the_audit_holds_nothing_of_the_program(world: World) -> None:
    """A loss that the program deletes is free, though the audit saw its frame."""
    model = build("composable")
    loss = loss_of(model)
    link = weakref.ref(loss)
    weight(model).detach().mul(2.0)
    del loss

    assert link() is None


@on_ranks(2)
def test_an_error_of_the_user_leaves_no_mode(world: World) -> None:
    """The next forward takes the mode off, and the audit goes on."""

    def raises(_: nn.Module) -> None:
        raise KeyError("mine")

    model = build("composable")
    with pytest.raises(KeyError):
        train(model, between=raises)
    model.zero_grad()
    assert len(said(TOLD["torch's clip"][0], model)) == 1
    assert torch._C._len_torch_function_stack() == 0


@on_ranks(2)
def test_the_audit_goes_on_after_a_step_that_raised(world: World) -> None:
    """Of the user's optimizer, which the audit ended, and of one of torch."""

    def raises() -> float:
        raise KeyError("mine")

    model = build("composable")
    audit(model, "error")
    optimizer = ByRule(model.parameters(), 0.01, trust_ratio)
    backward(loss_of(model))
    with pytest.raises(CompositionError, match="norm in ByRule takes elements"):
        optimizer.step()
    optimizer.step()
    with pytest.raises(KeyError):
        optim.SGD(model.parameters(), 0.01).step(raises)

    with pytest.raises(CompositionError, match="norm takes elements"):
        weight(model).norm()


@on_ranks(2)
def test_compiled_functions_are_compiled_once(world: World) -> None:
    """A loss that is compiled in the first step is neither traced nor made again."""
    # torch looks at ``.grad`` of the argument, which is an error here.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    torch._dynamo.reset()
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    loss = torch.compile(lambda y: y.square().mean(), backend=backend, fullgraph=True)
    model = build("composable")
    optimizer = sgd(model)
    for _ in range(3):
        loss(model(torch.ones(4, 6))).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert len(made) == 1


@pytest.mark.req("R-11")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2, 3)
def test_groups_and_rates_from_local_shapes_are_refused_on_all_ranks(
    world: World, path: str
) -> None:
    """By option, group or parameter, before anything is stepped."""
    for of, text in (
        (lambda p: {"params": [p], "lr": 0.1 * p.shape[0]}, "one 'lr' for '0."),
        (lambda p: {"params": [p], "betas": (0.9, 1 / (2 + len(p)))}, "one 'betas'"),
    ):
        model = build(path, 7)
        kind = optim.SGD if "lr" in text else optim.AdamW
        told = message_of(
            partial(train, model, kind, parameters=[of(p) for p in model.parameters()])
        )
        assert (
            told.removeprefix("CompositionError: ")
            .removeprefix("On another rank: ")
            .startswith(f"{kind.__name__} expects on all ranks {text}")
        )
    model = build(path, 7)
    small = [p for p in model.parameters() if p.numel() < 34]
    large = [p for p in model.parameters() if p.numel() >= 34]
    groups = [{"params": small, "lr": 0.0}, {"params": large}]
    before = [p.detach().clone() for p in model.parameters()]

    told = message_of(partial(train, model, parameters=groups))

    assert "expects on all ranks one 'lr' for '" in told
    assert "full_shape(p)" in told
    assert all(map(torch.equal, before, model.parameters()))

    # Numbers of another type are no other numbers.
    train(build(path, 7), optim.SGD, lr=(0, 0.0)[world.rank % 2])


@pytest.mark.req("R-09")
@on_ranks(2)
def test_a_step_under_no_sync_is_told_by_unit(world: World) -> None:
    """It trains nothing; the gradients wait for a reduction."""

    def program(model: nn.Module) -> None:
        optimizer = sgd(model)
        with no_sync(model):
            backward(loss_of(model))
            optimizer.step()

    (only,) = said(program, fully_shard(nn.Linear(6, 6)))

    assert "SGD.step() was called while gradients of" in str(only.message)
    assert "outside no_sync" in str(only.message)


@on_ranks(2)
def test_an_average_of_a_sharded_model_hears_nothing(world: World) -> None:
    """``AveragedModel`` copies the model, and its update is element-wise."""
    model = build("composable")
    loss_of(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # untyped in torch

    assert said(after_backward(lambda m: average.update_parameters(m)), model) == []


LATE_COMPILER = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from composable_fsdp import fully_shard
from tests.support.seam import fake_store

dist.init_process_group("fake", rank=0, world_size=2, store=fake_store())
audited = fully_shard(nn.Linear(8, 8))
audited(torch.ones(2, 8))
assert torch._C._len_torch_function_stack() == 1
assert "torch._dynamo" not in sys.modules
block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
block = torch.compile(block, backend="aot_eager")
checkpoint(block, torch.ones(2, 8), use_reentrant=False).sum().backward()
"""


def test_another_model_is_compiled_as_without_an_audit() -> None:
    """A checkpoint recomputes without the audit's mode. Dynamo is imported late, and
    cannot be told to take the mode off before it compiles for the first time."""
    command = [sys.executable, "-c", LATE_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@on_ranks(2)
def test_an_error_of_the_audit_ends_no_program(world: World) -> None:
    """In any part of it: the step is that of a model that is not audited."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the audit")

    def penalty(model: nn.Module) -> Tensor:
        made: Tensor = 0.1 * weight(model).norm()
        return made

    expected = build("composable")
    audit(expected, "off")
    train(expected, penalty=penalty, between=gradients)
    for where, name in (
        (audits._Call, "before"),
        (audits._Call, "after"),
        (audits, "_users_frame"),
        (audits, "accumulators_of"),
        (audits, "param_ref"),
    ):
        model = build("composable")
        with mock.patch.object(where, name, broken), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, penalty=penalty, between=gradients)
        for found, right in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, right)
