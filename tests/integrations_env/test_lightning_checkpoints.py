"""Full and sharded checkpoints of the Trainer, into every strategy and world size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from composable_fsdp import verify
from composable_fsdp.errors import CheckpointError
from composable_fsdp.integrations.lightning import checkpoints
from composable_fsdp.lightning import ComposableFSDPStrategy, consolidate
from tests.integrations_env.lightning_world import (
    QUIET,
    Lit,
    as_torchrun,
    fitted,
    loader,
    plain,
    require_equal,
    trainer,
    weights,
)
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = QUIET

FORMS = ["full", "sharded"]


def strategy(form: str) -> ComposableFSDPStrategy:
    return ComposableFSDPStrategy(state_dict_type=form)


def save_after_two_epochs(world: World, form: str, path: str, where: str) -> None:
    """Fit two epochs of four, and save; on each rank."""
    with as_torchrun(world):
        module = Lit(where, lr=0.01, adam=True)
        together = fitted(world, module, strategy(form), max_epochs=2)
        together.save_checkpoint(path)


def resume(world: World, form: str, path: str, where: str) -> dict[str, Any]:
    """Continue to four epochs; return the full weights."""
    with as_torchrun(world):
        module = Lit(where, lr=0.01, adam=True)
        together = trainer(strategy(form), world.world_size, max_epochs=4)
        each = loader(world.world_size, world.rank)
        together.fit(module, each, each, ckpt_path=path)
        assert together.global_step == 16
    return weights(module)


def unbroken() -> dict[str, Any]:
    reference = Lit(lr=0.01, adam=True)
    plain(reference, max_epochs=4)
    return weights(reference)


@pytest.mark.req("U-13")
@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 4)])
@pytest.mark.parametrize("where", ["init", "hook"])
def test_a_resumed_fit_equals_the_unbroken_fit(
    ranks: Any, tmp_path: Path, saved: str, loaded: str, sizes: Any, where: str
) -> None:
    """Either form is loaded by either strategy, at any world size, with AdamW."""
    path = str(tmp_path / "last.ckpt")
    first, second = sizes
    ranks(first).run(save_after_two_epochs, saved, path, where)

    found = ranks(second).run(resume, loaded, path, where)

    assert Path(path).is_dir() == (saved == "sharded")
    for each in found:
        require_equal(each, unbroken(), 2e-6)


def test_a_checkpoint_of_one_device_is_resumed_by_ranks_and_the_other_way_round(
    ranks: Any, tmp_path: Path
) -> None:
    """A plain Trainer reads full files, and files that consolidate wrote."""
    reference = Lit(lr=0.01, adam=True)
    plain(reference, max_epochs=2).save_checkpoint(tmp_path / "plain.ckpt")
    for form in FORMS:
        ranks(2).run(save_after_two_epochs, form, str(tmp_path / form), "init")
    consolidate(tmp_path / "sharded", tmp_path / "one.ckpt")

    (found, _) = ranks(2).run(resume, "full", str(tmp_path / "plain.ckpt"), "init")
    require_equal(found, unbroken(), 2e-6)
    for file in ("full", "one.ckpt"):
        module = Lit(lr=0.01, adam=True)
        trainer("auto", 1, max_epochs=4).fit(
            module, loader(), loader(), ckpt_path=tmp_path / file
        )
        require_equal(weights(module), unbroken(), 2e-6)
    with pytest.raises(CheckpointError, match=r"one\.ckpt exists already"):
        consolidate(tmp_path / "sharded", tmp_path / "one.ckpt")


@pytest.mark.req("S3-08")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["init", "hook"])
def test_load_from_checkpoint_gives_the_plain_module(
    ranks: Any, tmp_path: Path, form: str, where: str
) -> None:
    """Of a file or a directory, without ranks, with hyperparameters."""
    path = tmp_path / "last.ckpt"
    ranks(2).run(save_after_two_epochs, form, str(path), where)
    reference = Lit(lr=0.01, adam=True)
    plain(reference, max_epochs=2)

    module = Lit.load_from_checkpoint(path, map_location="cpu")

    require_equal(weights(module), weights(reference), 2e-6)
    assert (module.where, module.lr) == (where, 0.01)
    if form == "sharded":
        assert verify(path)


def keep_some(world: World, form: str, folder: str, weights_only: bool) -> Any:
    """Fit with a callback that keeps the two best and the last checkpoint."""
    with as_torchrun(world):
        kept = ModelCheckpoint(
            folder,
            "{epoch}",
            monitor="val_loss",
            save_top_k=2,
            save_last=True,
            save_weights_only=weights_only,
        )
        module = Lit()
        together = trainer(
            strategy(form),
            world.world_size,
            max_epochs=4,
            enable_checkpointing=True,
            callbacks=[kept],
        )
        each = loader(world.world_size, world.rank)
        together.fit(module, each, each)
        best = together.test(module, each, ckpt_path="best", verbose=False)
        last = together.test(module, each, ckpt_path="last", verbose=False)
        if weights_only:
            with pytest.raises(KeyError, match="contains only the model"):
                together.fit(module, each, ckpt_path=kept.best_model_path)
    return best, last, kept.best_model_path, float(kept.best_model_score or 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_model_checkpoint_keeps_the_best_and_the_last(
    ranks: Any, tmp_path: Path, form: str, weights_only: bool
) -> None:
    """Older checkpoints are removed, and "best" and "last" are loaded."""
    (found, other) = ranks(2).run(keep_some, form, str(tmp_path), weights_only)

    assert found == other
    best, last, path, score = found
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert Path(path).name == "epoch=3.ckpt"
    assert best[0]["test_loss"] == pytest.approx(score, abs=1e-6)
    assert last == best
    # The last is overwritten at each epoch: a manifest, and the files of two ranks.
    if form == "sharded":
        names = sorted(each.name for each in (tmp_path / "last.ckpt").iterdir())
        assert (names[0], len(names)) == ("manifest.json", 3)


class Remembering(Lit):
    """Saves values of its own, and has a hyperparameter that is an object."""

    def __init__(self, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.note, self.restored = note, None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {("a", 1): torch.ones(2), "counts": Counter(a=2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = checkpoint["seen"]


class Note:
    """An object that torch's restricted reader refuses."""


def with_objects(world: World, form: str, path: str) -> tuple[str, Any]:
    """Save and load a module with values of its own; return the refusal."""
    with as_torchrun(world):
        module = Remembering(Note())
        together = fitted(world, module, strategy(form), max_epochs=1)
        together.save_checkpoint(path)
        each = loader(world.world_size, world.rank)
        with pytest.raises(CheckpointError) as error:
            together.test(module, each, ckpt_path=path, verbose=False)
        trusting = ComposableFSDPStrategy(state_dict_type=form, weights_only=False)
        again = trainer(trusting, world.world_size)
        fresh = Remembering(Note())
        again.test(fresh, each, ckpt_path=path, verbose=False)
        return str(error.value), fresh.restored


@pytest.mark.parametrize("form", FORMS)
def test_values_of_hooks_are_saved_and_objects_are_loaded_only_when_trusted(
    ranks: Any, tmp_path: Path, form: str
) -> None:
    """Keys may be tuples; the message for objects names the class and the way out."""
    for told, restored in ranks(2).run(with_objects, form, str(tmp_path / "a.ckpt")):
        assert "a.ckpt holds " in told
        assert "Note" in told
        assert "pass weights_only=False to the strategy" in told
        assert torch.equal(restored["a", 1], torch.ones(2))
        assert restored["counts"] == {"a": 2}


@on_ranks(2)
def test_a_hook_that_edits_the_weights_of_a_sharded_checkpoint_is_told(
    world: World,
) -> None:
    """The change would be lost."""

    class Editing(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["extra"] = torch.ones(1)

    with as_torchrun(world):
        together = fitted(world, Editing(), strategy("sharded"), max_epochs=1)
        with pytest.raises(CheckpointError, match=r"put extra into .*'full'"):
            together.save_checkpoint("nowhere.ckpt")


def scaler_after_resume(world: World, form: str, path: str) -> float:
    """Save and resume with 16-mixed; return the scale that the second fit starts."""

    def plugin(scale: float) -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", scale))

    with as_torchrun(world):
        module = Lit()
        together = fitted(
            world, module, strategy(form), max_epochs=1, plugins=[plugin(32.0)]
        )
        together.save_checkpoint(path)
        again = trainer(strategy(form), 2, max_epochs=2, plugins=[plugin(2.0)])
        again.fit(Lit(), loader(2, world.rank), ckpt_path=path)
        return float(again.precision_plugin.scaler.get_scale())


@pytest.mark.parametrize("form", FORMS)
def test_the_scale_of_the_loss_is_resumed(
    ranks: Any, tmp_path: Path, form: str
) -> None:
    """The state has the place where a plain Trainer looks for it."""
    path = tmp_path / "a.ckpt"

    assert ranks(2).run(scaler_after_resume, form, str(path)) == [32.0, 32.0]
    whole = (
        checkpoints.read_whole(path)
        if form == "sharded"
        else checkpoints.read_full(path, None)
    )
    assert whole["MixedPrecision"]["scale"] == 32.0


@on_ranks(2)
def test_a_form_does_not_overwrite_or_read_the_other(
    world: World, tmp_path: Path
) -> None:
    """The messages say what lies there."""
    path = tmp_path / "last.ckpt"
    with as_torchrun(world):
        for form, other in (FORMS, FORMS[::-1]):
            fitted(world, Lit(), strategy(form), max_epochs=1).save_checkpoint(
                path / form
            )
            again = fitted(world, Lit(), strategy(other), max_epochs=1)
            with pytest.raises(CheckpointError, match="checkpoint\\?"):
                again.save_checkpoint(path / form)
