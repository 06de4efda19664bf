"""Policies by name, and questions to a plan and a tree, for the tests beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import Tensor, nn

from composable_fsdp.tools.sharding_plan import ShardingPlan
from tests.support.tiny import TinyBlock

Choice = Mapping[str, Mapping[str, Any]]
Policy = Callable[..., dict[nn.Module, dict[str, Any]]]


def units(choice: Choice) -> Policy:
    """A policy that picks modules by name, with the options given for each."""

    def policy(
        root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            root.get_submodule(name): {**root_kwargs, **options}
            for name, options in choice.items()
        }

    return policy


def names_of(result: ShardingPlan) -> dict[str, list[str]]:
    """Per unit, its parameters from the unit's module, sorted."""
    return {
        unit.fqn: sorted(s.fqn for r in unit.regions for s in r.parameters)
        for unit in result.units
    }


def snapshot(model: nn.Module) -> list[object]:
    """The objects at every place, their attributes, and what was done to their data."""
    places = model.named_modules(remove_duplicate=False)
    params = model.named_parameters(remove_duplicate=False)
    return [
        [(name, id(module), sorted(vars(module))) for name, module in places],
        [
            (name, id(p), p._version, p.requires_grad, id(p.grad), p.is_meta)
            for name, p in params
        ],
    ]


def linears(count: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


class Text(nn.Module):
    """Token ids to logits, of any size: an embedding, blocks and a head."""

    def __init__(self, vocab: int, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(TinyBlock(width, 4) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
