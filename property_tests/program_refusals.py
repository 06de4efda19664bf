"""What the package refuses by name where the plain model goes on, and why it may."""

from __future__ import annotations

REFUSALS: list[tuple[set[str], str]] = [
    # Parts of a unit, called where nobody gathers its parameters.
    (
        {
            "call:forward",
            "call:method",
            "call:core",
            "action:call_core",
            "form:late_thunk",
        },
        "was called (while fully sharded module|outside the forward of)",
    ),
    # Tensors that leave a unit unseen.
    (
        {
            "form:set_thing",
            "form:late_thunk",
            "call:core",  # while the unit is full by hand
            "call:method",
            "call:jvp",
            "call:vjp",
            "call:vmap",
            "call:skip",  # an attribute that holds no graph in the first forwards
        },
        "Backward (needs|reached a) parameter .* sharded",
    ),
    # Modules of one unit, some of which do not run, or run again after the others.
    ({"option:pairs"}, "Backward needs a? ?parameter .* sharded"),
    # Full parameters that somebody keeps are older than the shards.
    (
        {
            "option:keep_full",
            "action:setting",
            "action:unshard_unit",
            "action:sync",
            "argument:no_sync",
        },
        "were written to while its full parameters were kept",
    ),
    # Torch's functions make state of an optimizer by a step, which writes.
    ({"action:torch_get"}, "Backward needs a tensor as it was in the forward"),
    # Other data of parameters whose gradients are not reduced yet.
    ({"argument:no_sync"}, "while gradients of no_sync wait to be reduced"),
    ({"form:generator"}, "returned a generator, which computes when"),
    ({"core:maxnorm"}, "it renormalises rows inside forward"),
    # Under MixedPrecision, or a wire format, full parameters are copies.
    (
        {"core:clamp", "core:dataclamp", "core:normalized", "option:wire"},
        r"wrote to its weights.* where they are copies",
    ),
    # Units that the plan does not expect to be full at the same time.
    ({"option:shared"}, "both have their full parameters in the same slot"),
    # A copy that is in another dtype than the shards.
    ({"option:low", "option:wire"}, r"where it is a copy in torch.float\d+ of shards"),
    (
        {"action:freeze", "action:freeze_piece"},
        "through a forward that ran before the unit's parameters were frozen",
    ),
    # What only the sharded parameters can serve.
    ({"action:unshard_unit"}, "is not a parameter of"),
    ({"action:inside_summon"}, "called inside unshard_params, which shows"),
    ({"action:inside_summon", "action:unshard_unit"}, "holds the full parameters of"),
    # Sharded values of before or after a change of the layout.
    ({"action:freeze", "action:freeze_piece"}, "back into the layout from which they"),
    (
        {"action:freeze", "action:freeze_piece"},
        "go from one way of sharding to another",
    ),
    # What a format cannot hold.
    ({"core:complex"}, "has dtype torch.complex128, which a checkpoint cannot hold"),
    # An optimizer that made state of the plain model's shapes.
    ({"option:early"}, "made before fully_shard|make it hold state only after"),
]
"""Words of a program (any of them), and what the error says."""
