"""The programs of ``docs/migrate/clients.md`` that the package index has, by its diffs.

Each trains a small model on two ranks. The other side is the same program as it was:
with torch's FSDP2 (torchtitan), or in one process with all batches (timm, diffusers).
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import clip_grad_norm_, fsdp2, fully_shard, unshard_params
from tests.integrations_env.tiny_llama import distance, full
from tests.support.on_ranks import on_ranks
from tests.support.place import World
from tests.support.reference import backward

CLOSE = 2e-6


def torchtitan() -> Any:
    """Its Llama, without the file of MoE kernels: CPU builds of torch lack triton."""
    pytest.importorskip("torchdata")
    sys.modules.setdefault("torchtitan.models.moe.kernels", mock.MagicMock())
    return pytest.importorskip("torchtitan.models.llama3")


class Titan:
    """Its debug model, smaller, under its optimizer, schedule and checkpointer."""

    def __init__(self, folder: Path, ours: bool) -> None:
        llama3 = torchtitan()
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer import OptimizersContainer
        from torchtitan.config import Checkpoint
        from torchtitan.models.llama3.infra import parallelize

        args = copy.deepcopy(llama3.llama3_args["debugmodel"])
        args.dim, args.n_layers, args.n_heads, args.vocab_size = 64, 2, 4, 128
        args.max_seq_len = 64
        self.ours = ours
        torch.manual_seed(3)
        self.model = llama3.Transformer(args)
        with torch.no_grad():  # as its trainer does
            self.model.init_weights()
        # The import lines of the page.
        names = ("fully_shard", "MixedPrecisionPolicy", "FSDPModule")
        lines = {name: getattr(fsdp2, name) for name in names} if ours else {}
        with mock.patch.dict(vars(parallelize), lines):
            parallelize.apply_fsdp(
                self.model,
                init_device_mesh("cpu", (2,)),
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
                pp_enabled=False,
            )
        for module in () if ours else self.model.modules():
            # Its other reduction, with a factor, does not run on gloo.
            if isinstance(module, parallelize.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        self.optimizers = OptimizersContainer(
            [self.model], torch.optim.AdamW, {"lr": 1e-2}
        )
        self.schedule = LRSchedulersContainer(
            self.optimizers, lambda step: 1 / (1 + step)
        )
        self.checkpoints = CheckpointManager(
            None,
            [self.model],
            self.optimizers,
            self.schedule,
            {},
            Checkpoint(enable=True, interval=3, keep_latest_k=0),
            None,
            base_folder=str(folder),
        )

    def train(self, steps: range, rank: int) -> list[float]:
        """Run ``steps``; return the loss and the norm of each."""
        from torchtitan.distributed.utils import clip_grad_norm_ as titan_clip

        seen = []
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(128, (2, 17), generator=generator)
            out = self.model(tokens[:, :-1]).flatten(0, 1)
            # Over the tokens of all ranks, because apply_fsdp switches division off.
            loss = nn.functional.cross_entropy(out, tokens[:, 1:].flatten()) / 2
            backward(loss)
            if self.ours:
                norm = clip_grad_norm_(self.model, 1.0)
            else:
                norm = titan_clip(self.model.parameters(), 1.0)
            seen += [float(loss.detach()), float(norm)]
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()
        return seen


@on_ranks(2)
def test_torchtitans_llama_trains_and_resumes_as_with_fsdp2(
    world: World, tmp_path: Path
) -> None:
    """Its parallelize by import line, its own checkpointer, FSDP2's checkpoint, too."""
    theirs = Titan(tmp_path / "theirs", ours=False)
    ours = Titan(tmp_path / "ours", ours=True)
    for each in (theirs, ours):
        first = each.train(range(3), world.rank)
        each.checkpoints.save(3)
        rest = each.train(range(3, 5), world.rank)
        if each is theirs:
            expected = first, rest
    assert first == pytest.approx(expected[0], rel=1e-5)
    assert rest == pytest.approx(expected[1], rel=1e-5)

    for saved, door in (("theirs", False), ("theirs", True), ("ours", True)):
        resumed = Titan(tmp_path / saved, ours=door)
        assert resumed.checkpoints.load(3)
        again = resumed.train(range(3, 5), world.rank)
        assert again == pytest.approx(expected[1], rel=1e-5), (saved, door)


@on_ranks(2)
def test_torchtitans_init_weights_gives_the_values_of_the_plain_model(
    world: World, tmp_path: Path
) -> None:
    """Inside ``unshard_params``, as the page says, over other values."""
    sharded = Titan(tmp_path, ours=True).model
    plain = torchtitan().Transformer(sharded.model_args)
    torch.manual_seed(4)
    with torch.no_grad():
        plain.init_weights()
    torch.manual_seed(4)
    with unshard_params(sharded), torch.no_grad():
        sharded.init_weights()
    assert distance(full(sharded), full(plain)) == 0.0


def trains_as_alone(
    world: World,
    make: Callable[[], nn.Module],
    shard: Callable[[Any], None],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], Tensor],
) -> None:
    """Three steps on the rank's batches against one process with both batches."""
    torch.manual_seed(5)
    sharded, plain = make(), make()
    plain.load_state_dict(sharded.state_dict())
    shard(sharded)
    stepping = {id(m): optimizer(m) for m in (sharded, plain)}
    for step in range(3):
        own = loss(sharded, 2 * step + world.rank)
        backward(own)
        both = [loss(plain, 2 * step + rank) for rank in (0, 1)]
        backward(torch.stack(both).mean())
        assert own.item() == pytest.approx(both[world.rank].item(), rel=1e-4)
        for model in (sharded, plain):
            stepping[id(model)].step()
            stepping[id(model)].zero_grad()
    assert distance(full(sharded), full(plain)) < CLOSE


def timm_without_torchvision() -> Any:
    """Import timm. The torchvision of the index has operators of CUDA builds alone."""
    frozen = types.SimpleNamespace(FrozenBatchNorm2d=type("F", (nn.Module,), {}))
    names = ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".utils")
    absent: dict[str, Any] = {f"torchvision{name}": mock.MagicMock() for name in names}
    absent["torchvision.ops.misc"] = frozen
    for name in (".models", ".models.feature_extraction"):
        absent[f"torchvision{name}"] = None  # timm does without
    with mock.patch.dict(sys.modules, absent):
        return pytest.importorskip("timm.optim") and sys.modules["timm"]


def images(index: int) -> Tensor:
    """A batch of small pictures."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, 3, 32, 32, generator=generator)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
@on_ranks(2)
def test_timms_models_train_as_alone(world: World, name: str) -> None:
    """A ViT with layer decay by timm's own optimizer factory, and a ResNet."""
    timm = timm_without_torchvision()
    vit = name.startswith("vit")
    small = (
        {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48} if vit else {}
    )

    def shard(model: Any) -> None:
        blocks = (
            model.blocks
            if vit
            else [model.layer1, model.layer2, model.layer3, model.layer4]
        )
        for block in blocks:
            fully_shard(block)
        fully_shard(model)

    def optimizer(model: nn.Module) -> Any:
        return timm.optim.create_optimizer_v2(
            model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7
        )

    def make() -> Any:
        # Batch statistics differ between a rank's batch and both: a ResNet trains in
        # evaluation mode.
        return timm.create_model(name, num_classes=4, **small).train(vit)

    def loss(model: nn.Module, index: int) -> Tensor:
        labels = torch.tensor([index % 4, (index + 1) % 4])
        out: Tensor = nn.functional.cross_entropy(model(images(index)), labels)
        return out

    trains_as_alone(world, make, shard, optimizer, loss)


@pytest.mark.parametrize("adapter", [False, True])
@on_ranks(2)
def test_diffusers_unet_trains_as_alone(world: World, adapter: bool) -> None:
    """The denoising loss of a conditioned UNet, whole or its LoRA."""
    diffusers = pytest.importorskip("diffusers")

    def make() -> Any:
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            in_channels=3,
            out_channels=3,
        )
        if adapter:
            from peft import LoraConfig

            unet.requires_grad_(False)
            unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
        return unet

    def shard(unet: Any) -> None:
        for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
            fully_shard(block)
        fully_shard(unet)

    def loss(unet: nn.Module, index: int) -> Tensor:
        noisy = images(index)[:, :, :8, :8]
        text = images(index + 50)[:, 0, :8, :16]
        out: Tensor = (unet(noisy, index, text).sample - noisy).square().mean()
        return out

    def optimizer(unet: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p for p in unet.parameters() if p.requires_grad)

    trains_as_alone(world, make, shard, optimizer, loss)
