"""The Trainer of transformers, training a sharded model.

Overridden methods that begin with an underscore are the Trainer's hooks for other
engines, and not documented there; checked with transformers 5.23.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from composable_fsdp.access.manual import full_shape
from composable_fsdp.integrations.hf_accelerate import (
    SHARDED_STATE,
    ShardedAccelerator,
    as_sharding,
)
from composable_fsdp.integrations.hf_adapters import adapter_values, has_adapters
from composable_fsdp.integrations.hf_config import HFSharding
from composable_fsdp.integrations.hf_weights import load_pretrained, write_weights
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.load import LoadOptions, load
from composable_fsdp.storage.save import SaveOptions, save

_SCHEDULER = "scheduler.pt"
_OPTIMIZER = "optimizer.pt"


class ShardedTrainer(Trainer):
    """A ``Trainer`` that trains a sharded model.

    Units, precision and device follow ``TrainingArguments``: ``bf16=True`` is a
    ``MixedPrecision``, ``max_grad_norm`` clips by the norm over all ranks, and
    checkpoints can be resumed at another number of ranks. As a first base class it does
    the same for another trainer: ``class MyTrainer(ShardedTrainer, Seq2SeqTrainer)``,
    ``class MyDPO(ShardedTrainer, trl.DPOTrainer)``.

    Args:
        model: the model; sharded here unless ``fully_shard`` was applied before.
        more: further arguments of the trainer in its order. Its ``args`` are
            ``TrainingArguments``: with ``fsdp=True`` the settings of ``fsdp_config``
            are read as ``from_hf_config`` reads them.
        sharding: an ``HFSharding``, or the settings that ``from_hf_config`` reads.
            Default None: ``args.fsdp_config``, or a unit per layer that the model names
            in ``_no_split_modules``.
        kwargs: further keyword arguments of the trainer.

    Collective: as ``fully_shard``; all ranks must make the trainer.
    Raises: ValueError, for settings that contradict each other; as ``fully_shard``.

    ::

        trainer = ShardedTrainer(model, args, train_dataset=data)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        model: nn.Module | str | None = None,
        *more: Any,
        sharding: HFSharding | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = _order_of(type(self)).bind_partial(self, model, *more)
        named = kwargs if "args" in kwargs else given.arguments
        # A copy: the caller's arguments may make another trainer.
        args = copy.copy(named.get("args"))
        self._sharding = _sharding_of(args, sharding)
        if args is not None:
            named["args"] = args
        super().__init__(*given.args[1:], **kwargs)

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        """Note the arguments of the accelerator."""
        found: dict[str, Any] = super()._build_accelerator_args(**given)
        self._accelerator_args = found
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """Make a ``ShardedAccelerator`` and shard the model; see ``Trainer``."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ShardedAccelerator(
            **self._accelerator_args, sharding=self._sharding
        )
        # The trainer gathers by a method of the accelerator that was replaced.
        self.gather_function: Any = partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )
        # Before the trainer moves the model to the device as a whole.
        if self.model is not None:
            self.accelerator.shard(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new sharded model. Collective: as ``fully_shard``."""
        return self.accelerator.shard(super().call_model_init(trial))

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a step on ``inputs``, as of the unsharded model."""
        model: Any = self.model
        name = getattr(model, "main_input_name", "input_ids")
        # TRL's online trainers pass a list of prompts, which transformers counts as 0.
        tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not units_in(model) or tokens is None:
            return int(super().floating_point_ops(inputs))
        # ``Trainer`` would count this rank's rows. Without embeddings, by name, as
        # transformers does: a head that is tied to an embedding has its name.
        modules = model.named_modules()
        left_out = {f"{n}.weight" for n, m in modules if isinstance(m, nn.Embedding)}
        named = model.named_parameters()
        numel = sum(full_shape(p).numel() for n, p in named if n not in left_out)
        return 6 * int(tokens.numel()) * numel

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the shards where they are: under CPU offload, in host memory."""
        if not units_in(model):
            super()._move_model_to_device(model, device)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save the weights tensor by tensor, and all else as ``Trainer`` does."""
        # The model's parts come from all ranks, so all ranks enter.
        folder = output_dir or self.args.output_dir
        if not units_in(self.model):
            super()._save(folder, state_dict)
            return
        # Without values, ``Trainer`` writes configuration, tokenizer and arguments; an
        # adapter is small, so ``Trainer`` writes that, too.
        adapter, writes = has_adapters(self.model), self.args.should_save
        values = adapter_values(self.model, keeps=writes) if adapter else {}
        write_weights(
            self.model,
            folder,
            partial(super()._save, folder, values),
            weights=not adapter,
            writes=writes,
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights of a checkpoint. Collective: as ``load``."""
        given: Any = self.model if model is None else model
        # Strict, while the plain Trainer takes missing weights with a warning.
        if units_in(given) and not has_adapters(given):
            load_pretrained(given, resume_from_checkpoint, cast=True)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint. Collective: as ``load``."""
        if units_in(self.model) and not has_adapters(self.model):
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state sharded. Collective: as ``save``."""
        if not units_in(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # The file of the plain Trainer would hold rank 0's shards.
        folder = os.path.join(output_dir, SHARDED_STATE)
        # accelerate's wrapper steps only when gradients are complete.
        optim = getattr(self.optimizer, "optimizer", self.optimizer)
        save(folder, self.model, optim, options=SaveOptions(overwrite=True))
        if self.args.should_save:
            path = os.path.join(output_dir, _SCHEDULER)
            torch.save(self.lr_scheduler.state_dict(), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state of a checkpoint. Collective: as ``load``."""
        if not units_in(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, SHARDED_STATE)
        if not os.path.isdir(folder):
            if os.path.isfile(os.path.join(checkpoint, _OPTIMIZER)):
                raise ValueError(
                    f"{checkpoint} has the optimizer of an unsharded Trainer; expected "
                    f"the folder {SHARDED_STATE}. Remove {_OPTIMIZER} to train on with "
                    "the weights and a new optimizer state."
                )
            # A checkpoint of ``save_only_model`` has weights alone.
            return
        # The trainer restores the random states itself.
        optim = getattr(self.optimizer, "optimizer", self.optimizer)
        load(folder, self.model, optim, options=LoadOptions(rng=False))
        scheduler = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)


def _order_of(kind: type) -> inspect.Signature:
    """Return the signature of the trainer behind the mixin, which names ``args``."""
    # TRL's second argument is a reference model, a teacher or reward functions. A class
    # between that passes on ``*args`` names nothing.
    behind = kind.__mro__[kind.__mro__.index(ShardedTrainer) + 1 :]
    inits = [vars(each)["__init__"] for each in behind if "__init__" in vars(each)]
    for signature in map(inspect.signature, inits):
        args = signature.parameters.get("args")
        if args is not None and args.kind is not inspect.Parameter.VAR_POSITIONAL:
            return signature
    raise TypeError(f"no trainer behind {kind.__name__} takes args")


def _sharding_of(
    args: TrainingArguments | None, given: HFSharding | Mapping[str, Any] | None
) -> HFSharding:
    """Return the sharding to train with, and switch off torch's FSDP in ``args``."""
    # An empty ``fsdp_config`` alone switches nothing on.
    if args is None or not args.fsdp:
        return as_sharding(given)
    if given is not None:
        raise ValueError(
            "ShardedTrainer got settings twice: sharding=... and fsdp=True with "
            "fsdp_config in the arguments. Leave one of the two out."
        )
    config = args.fsdp_config
    # Otherwise the trainer would make accelerate's plugin for torch's FSDP.
    args.fsdp, args.fsdp_config, args.fsdp_plugin_args = False, {}, None
    return as_sharding(config)
