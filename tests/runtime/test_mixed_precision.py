"""Mixed precision: dtypes of compute, reduction, buffers, inputs and outputs."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from composable_fsdp import (
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    no_sync,
    save,
    unshard_params,
)
from composable_fsdp.planning.precision import overridden_classes
from composable_fsdp.runtime import precision as runtime_precision
from composable_fsdp.storage.native import NativeSource
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    train,
    wide_input,
)
from tests.support.sharded import own_gradient
from tests.support.tiny import tiny_mlp
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
BF16 = torch.bfloat16
COMPUTE = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)

both_paths = pytest.mark.parametrize("path", PATHS)


class Writing(nn.Module):
    """Writes to an input, which may be in a list, and returns what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 4))

    def forward(self, x: Tensor, others: list[Tensor], *, y: Tensor) -> Tensor:
        x[:, 1:].mul_(2)
        x.add_(self.weight)
        others[0].relu_()
        y.sub_(x)
        return x * 1


class Caller(nn.Module):
    """Reads what the unit below has written."""

    def __init__(self) -> None:
        super().__init__()
        self.below = Writing()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        a, b, c = (x + self.bias).float(), (x * self.bias).float(), x.float() - 1
        with pytest.raises(AttributeError) if fails else nullcontext():
            result = self.below(a, [b], y=None if fails else c)
        return a + b + (c if fails else result + c)


@on_ranks(1, 2)
@both_paths
@pytest.mark.parametrize("mode", ["train", "fails", "no_grad", "inference"])
def test_writes_to_inputs_that_are_cast_reach_the_caller(
    world: World, path: str, mode: str
) -> None:
    """Alone, in a list and by keyword, in each mode, and before an error."""
    plain = Caller()
    wide = MixedPrecision(
        param_dtype=torch.float64, cast_forward_inputs=True, output_dtype=torch.float32
    )
    model = apply_units(Caller(), ["below"], path=path, mixed_precision=wide)
    x = torch.linspace(-2, 2, 12).view(3, 4)
    modes: dict[str, Any] = {
        "no_grad": torch.no_grad,
        "fails": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with modes.get(mode, nullcontext)():
        outputs = [each(x.clone(), mode == "fails") for each in (plain, model)]

    torch.testing.assert_close(outputs[1], outputs[0].to(outputs[1].dtype))
    if outputs[0].requires_grad:
        for output in outputs:
            torch.autograd.backward(output.square().sum())
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(get_full_grad(model, name), parameter.grad)


class Seen(nn.Module):
    """A linear layer that notes the dtypes its forward meets."""

    scale: Tensor
    count: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 1.001))
        self.register_buffer("count", torch.tensor(3))
        self.met: dict[str, torch.dtype] = {}
        self.given: list[Tensor] = []

    def forward(self, x: Tensor, *, note: Any = None) -> Tensor:
        weight = self.linear.weight
        scale = self.scale
        self.met = {"x": x.dtype, "weight": weight.dtype, "scale": scale.dtype}
        if note is not None:
            self.met["note"] = note["deep"][0].dtype
        y: Tensor = self.linear(x.to(weight.dtype)) * scale.to(weight.dtype)
        return y


def seen(width: int = 8) -> Seen:
    torch.manual_seed(0)
    return Seen(width)


def fsdp2_weights(world: World) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of torch's FSDP2 after the same training."""
    model = TinyGPT()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in model.blocks:
        torch_fsdp2(block, mp_policy=policy)
    torch_fsdp2(model, mp_policy=policy)
    losses = train(model, world.rank, gpt_input, sgd)
    whole = {n: v.full_tensor() for n, v in model.state_dict().items()}
    return losses, whole


@pytest.mark.req("B-20")
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_low_precision_compute_trains_as_fsdp2_does(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """bf16 compute, fp32 reduction: losses equal to the bit, weights to rounding."""
    expected, weights = fsdp2_weights(world)
    model = TinyGPT()
    ours = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, mixed_precision=COMPUTE
    )

    losses = train(ours, world.rank, gpt_input, sgd)

    assert losses == expected
    for name, value in ours.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.allclose(value, weights[name], atol=1e-6), name


@pytest.mark.req("B-20", "S0-05")
@both_paths
@on_ranks(2)
def test_a_policy_sets_the_precision_of_one_class(world: World, path: str) -> None:
    """The embedding is gathered in fp32 beside a bf16 root; all reduce in fp32."""
    own = {"mixed_precision": MixedPrecision(output_dtype=BF16)}
    policy = CustomPolicy(lambda m: own if isinstance(m, nn.Embedding) else False)
    name = "policy" if path == "composable" else "auto_wrap_policy"
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    options: dict[str, Any] = {"mixed_precision": COMPUTE, name: policy}
    sharded = apply_units(model, [], path=path, **options)

    with record_steps() as calls:
        backward(sharded(torch.tensor([[1, 2]])).float().sum())

    sent = {(c.op, c.dtype) for c in calls}
    assert sent == {
        ("all_gather", (BF16,)),
        ("all_gather", (torch.float32,)),
        ("reduce_scatter", (torch.float32,)),
    }


@pytest.mark.req("B-20")
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, BF16])
@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_asked_for(
    world: World, dtype: torch.dtype | None
) -> None:
    """Without a reduce dtype it is that of compute; ``.grad`` is the parameters'."""
    model = tiny_mlp()
    fully_shard(model, mixed_precision=MixedPrecision(BF16, dtype))

    with record_steps() as calls:
        backward(loss_of(model, wide_input(8)(0, world.rank)))

    (reduced,) = {c.dtype for c in calls if c.op == "reduce_scatter"}
    assert reduced == (dtype or BF16,)
    for p in model.parameters():
        assert own_gradient(p).dtype is torch.float32


@pytest.mark.req("B-20")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MixedPrecision(BF16), (BF16, BF16)),
        (MixedPrecision(BF16, cast_root_forward_inputs=False), (torch.float32, None)),
        (
            MixedPrecision(
                BF16, cast_forward_inputs=True, cast_root_forward_inputs=False
            ),
            (BF16, BF16),
        ),
        (MixedPrecision(reduce_dtype=BF16), (torch.float32, torch.float32)),
    ],
)
def test_inputs_of_the_root_are_cast_as_told(
    one_rank: World, options: MixedPrecision, expected: tuple[Any, Any]
) -> None:
    """Also those deep in keyword arguments; integers stay."""
    model = seen()
    fully_shard(model, mixed_precision=options)
    integers = torch.ones(1, dtype=torch.int64)

    model(torch.randn(2, 8), note={"deep": [torch.ones(1), integers]})

    assert model.met["x"] is expected[0]
    assert model.met["note"] is expected[0]
    assert integers.dtype is torch.int64


@pytest.mark.req("B-20")
@pytest.mark.parametrize(
    ("cast", "root_cast"), [(False, False), (False, True), (True, False)]
)
@pytest.mark.parametrize("by", ["hand", "policy", "wrapper"])
def test_an_inner_unit_casts_its_inputs_as_in_fsdp1(
    one_rank: World, by: str, cast: bool, root_cast: bool
) -> None:
    """``cast_root_forward_inputs`` is for the root of each call, or the outer wrapper.

    As in torch's composable FSDP1, and in torch's wrapper.
    """
    inner = seen()
    options = MixedPrecision(
        BF16, cast_forward_inputs=cast, cast_root_forward_inputs=root_cast
    )
    if by == "wrapper":
        unit = FullyShardedDataParallel(inner, mixed_precision=options)
        model: nn.Module = FullyShardedDataParallel(nn.Sequential(unit))
    else:
        model = nn.Sequential(inner)
        if by == "hand":
            fully_shard(inner, mixed_precision=options)
        policy = CustomPolicy(
            lambda m: {"mixed_precision": options} if m is inner else False
        )
        fully_shard(model, policy=policy if by == "policy" else None)

    model(torch.randn(2, 8))

    casts = cast or (root_cast and by == "hand")
    assert inner.met["x"] is (BF16 if casts else torch.float32)
    assert inner.met["weight"] is BF16


@pytest.mark.req("B-20")
def test_outputs_are_cast_if_told(one_rank: World) -> None:
    """``output_dtype`` casts what comes out, and the gradient comes back through it."""
    model = seen()
    fully_shard(model, mixed_precision=MixedPrecision(BF16, output_dtype=torch.float32))

    out = model(torch.randn(2, 8))
    backward(out.sum())

    assert out.dtype is torch.float32
    assert model.met["weight"] is BF16
    assert model.linear.weight.grad is not None


@pytest.mark.req("B-20", "B-11")
@both_paths
@on_ranks(2)
def test_the_gradient_of_a_cast_input_comes_back_in_its_dtype(
    world: World, path: str
) -> None:
    """A fp32 input of a bf16 model gets the fp32 gradient of the plain bf16 model."""
    model = tiny_mlp()
    plain = copy.deepcopy(model).to(BF16)
    sharded = apply_units(model, [], path=path, mixed_precision=MixedPrecision(BF16))
    x = wide_input(8)(0, world.rank).requires_grad_()
    y = x.detach().clone().requires_grad_()

    backward(sharded(x).sum())
    backward(plain(y.to(BF16)).sum())

    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.req("B-20")
@pytest.mark.parametrize("told", [None, torch.float64])
def test_buffers_keep_their_dtype_unless_told(
    one_rank: World, told: torch.dtype | None
) -> None:
    """In forward; integers stay, and the state dict gives the original dtypes."""
    model = seen()
    before = {name: value.dtype for name, value in model.state_dict().items()}
    fully_shard(model, mixed_precision=MixedPrecision(BF16, buffer_dtype=told))
    buffer = model.scale

    model(torch.randn(2, 8))

    assert model.met["scale"] is (told or torch.float32)
    assert model.count.dtype is torch.int64
    assert model.scale is buffer
    after = {name: value.dtype for name, value in model.state_dict().items()}
    assert after == before


def test_a_shared_modules_buffer_keeps_its_dtype_under_each_name(
    one_rank: World, tmp_path: Path
) -> None:
    """In the state dict and in the native checkpoint, as at one place."""
    shared = seen()
    model = fully_shard(
        nn.Sequential(shared, nn.Linear(8, 8), shared),
        mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16),
    )

    model(torch.randn(2, 8))
    save(tmp_path / "saved", model)

    found = model.state_dict()
    assert shared.scale.dtype is BF16
    assert found["0.scale"].dtype is found["2.scale"].dtype is torch.float32
    with NativeSource(tmp_path / "saved") as source:
        assert source.model["0.scale"].dtype is torch.float32


@pytest.mark.req("B-20")
@on_ranks(2)
def test_a_forward_meets_the_dtypes_it_meets_under_fsdp1(world: World) -> None:
    """Input, weight and buffer, and so the output to the bit."""
    theirs, ours = seen(), seen()
    options: dict[str, Any] = {"param_dtype": BF16, "buffer_dtype": BF16}
    wrapped = TorchFSDP1(
        theirs,
        mixed_precision=TorchMixedPrecision(**options),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    fully_shard(ours, mixed_precision=MixedPrecision(**options))
    x = wide_input(8)(0, world.rank)

    expected, out = wrapped(x), ours(x)

    assert torch.equal(out, expected)
    assert out.dtype is expected.dtype
    assert ours.met == theirs.met


@pytest.mark.req("B-20")
@on_ranks(2)
def test_gradients_stay_in_low_precision_on_request(world: World) -> None:
    """In the reduce dtype, also when a second backward adds to them."""
    model = tiny_mlp()
    options = MixedPrecision(torch.float32, BF16, keep_low_precision_grads=True)
    fully_shard(model, mixed_precision=options)

    for batch in range(2):
        backward(loss_of(model, wide_input(8)(batch, world.rank)))

    for p in model.parameters():
        assert not p.numel() or own_gradient(p).dtype is BF16
        assert p.dtype is torch.float32
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.req("B-14")
@on_ranks(2)
def test_low_precision_compute_accumulates_in_the_reduce_dtype(world: World) -> None:
    """1 + 2**-9 + 2**-9 is lost in bf16 and kept here."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mixed_precision=COMPUTE)
    small = torch.full((1, 1), 2.0**-9)

    with no_sync(model):
        backward(model(torch.ones(1, 1)).sum())
        backward(model(small).sum())
    backward(model(small).sum())

    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    assert all(g.item() == 1.0 + 2.0**-8 for g in gradients)
    assert gradients or world.rank > 0


def check_eval(world: World, path: str, strategy: ShardingStrategy) -> None:
    model = TinyGPT()
    plain = copy.deepcopy(model)
    sharded = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, mixed_precision=COMPUTE
    )
    x = gpt_input(0, world.rank)

    first = loss_of(sharded, x)
    sharded.eval()
    full = sharded(x)
    sharded.train()
    backward(first)
    second = loss_of(sharded, x)

    assert full.dtype is torch.float32
    assert torch.equal(full, plain.eval()(x))
    assert torch.equal(first, second)
    assert all((p.grad is None) == (not p.numel()) for p in sharded.parameters())


@pytest.mark.req("B-20")
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_evaluation_in_full_precision_on_request(
    ranks: RankCount,
    path: str,
    strategy: ShardingStrategy,
) -> None:
    """Equal to the plain model's, between a low-precision forward and its backward."""
    ranks(2).run(_with_variable, check_eval, path, strategy)


def _with_variable(world: World, check: Callable[..., None], *args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        check(world, *args)


def test_evaluation_in_full_precision_may_be_under_inference_mode(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaves of the other form, made in the first evaluation, are trained later."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = seen()
    fully_shard(model, mixed_precision=COMPUTE)

    with torch.inference_mode():
        model.eval()(torch.randn(2, 8))
    model(torch.randn(2, 8)).sum().backward()

    assert model.met["weight"] is torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_full_precision_in_evaluation_takes_inputs_as_they_are(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights, nor inputs, nor buffers are in the low dtype then."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = seen()
    fully_shard(model, mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))

    model(torch.randn(2, 8))
    trained = dict(model.met)
    model.eval()(torch.randn(2, 8))

    assert set(trained.values()) == {BF16}
    assert set(model.met.values()) == {torch.float32}


@pytest.mark.parametrize("own", [None, torch.float32, BF16])
@both_paths
def test_a_root_of_another_dtype_leaves_the_inputs_of_an_evaluation(
    one_rank: World,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    own: torch.dtype | None,
) -> None:
    """Without parameters of its own, or with some in the compute dtype."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if own is not None:
        model.register_parameter("gain", nn.Parameter(torch.ones(3, dtype=own)))
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    sharded = apply_units(model, ["0", "2"], path=path, mixed_precision=COMPUTE)

    assert torch.equal(sharded.eval()(x), plain(x))
    assert sharded.train()(x).dtype is BF16
    assert torch.equal(sharded.eval()(x), plain(x))


def test_evaluation_is_in_the_compute_dtype_by_default(one_rank: World) -> None:
    """Without the environment variable, as in FSDP1."""
    model = seen()
    fully_shard(model, mixed_precision=COMPUTE)

    model.eval()(torch.randn(2, 8))

    assert model.met["weight"] is BF16


@pytest.mark.req("S1-42")
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_unshard_params_shows_full_precision(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """What is written there survives, though bf16 could not hold it."""
    model = TinyGPT()
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    sharded = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, mixed_precision=COMPUTE
    )
    loss_of(sharded, gpt_input(0, world.rank))

    with unshard_params(sharded, writeback=True):
        for name, p in sharded.named_parameters():
            assert torch.equal(p, plain[name])
            p.data.add_(2.0**-20)

    for name, value in sharded.state_dict().items():
        assert torch.equal(value, plain[name] + 2.0**-20)
    backward(loss_of(sharded, gpt_input(0, world.rank)))


class NotingNorm(nn.BatchNorm1d):
    """A batch norm that notes the dtypes its forward meets."""

    met: tuple[torch.dtype, torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        self.met = (x.dtype, self.weight.dtype)
        return super().forward(x)


@pytest.mark.req("S0-08")
@both_paths
@on_ranks(2)
def test_batch_norms_keep_full_precision_under_a_policy(
    world: World, path: str
) -> None:
    """A unit of its own, inputs raised and outputs lowered; as FSDP1, and said once."""
    torch.manual_seed(0)
    norm = NotingNorm(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    theirs = copy.deepcopy(model)
    name = "policy" if path == "composable" else "auto_wrap_policy"
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(BF16),
        name: ModuleWrapPolicy({nn.Linear}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = apply_units(model, [], path=path, **options)
        wrapped = TorchFSDP1(
            theirs,
            mixed_precision=TorchMixedPrecision(BF16),
            auto_wrap_policy=TorchModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    x = wide_input(8)(0, world.rank)

    out, expected = sharded(x), wrapped(x)

    assert norm.met == (torch.float32, torch.float32)
    assert torch.equal(out, expected)
    assert out.dtype is BF16
    assert any("_BatchNorm" in str(w.message) for w in caught[:1])


@pytest.mark.req("S0-08")
def test_only_classes_that_occur_are_overridden() -> None:
    """Asked with all classes at once, it returns those present."""
    classes = (nn.BatchNorm1d, nn.LayerNorm)
    options = MixedPrecision(BF16, _module_classes_to_ignore=classes)
    modules = [nn.Linear(2, 2), nn.LayerNorm(2)]

    found = overridden_classes(modules, options)

    assert found == {nn.LayerNorm}


@pytest.mark.req("S0-08")
def test_the_map_of_input_dtypes_keeps_no_module_alive() -> None:
    """Also of a module whose forward raised, and integers are not cast."""
    module = nn.Embedding(4, 2)
    runtime_precision.keep_full_precision(module)
    out = module(torch.tensor([1]))
    with pytest.raises(RuntimeError):
        module(torch.ones(1, dtype=BF16))
    after_raise = module(torch.tensor([1]))
    with pytest.raises(RuntimeError):
        module(torch.ones(1, dtype=BF16))
    reference = weakref.ref(module)
    entries = len(runtime_precision._GIVEN)

    del module
    gc.collect()

    assert out.dtype is torch.float32
    assert after_raise.dtype is torch.float32
    assert reference() is None
    assert len(runtime_precision._GIVEN) < entries
