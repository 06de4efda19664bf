"""Programs that gave wrong numbers, crashed or hung once, by what was wrong."""

from __future__ import annotations

from property_tests.program_recipes import Action, Options, Part, Program

STEPS: tuple[Action, ...] = (("train", 0), ("train", 1), ("train", 2))

REPEATED = Part(
    core="nogradpart",
    children=(
        Part(form="slice", call="vjp", unit="both", dtype="float32", frozen=1),
        Part(form="in_place", frozen=2),
    ),
    unit="",
    again=2,
)


def below(
    *parts: Part, actions: tuple[Action, ...] = STEPS, **options: object
) -> Program:
    """A root of its own parameters, and units below it."""
    made = Options(**options)  # type: ignore[arg-type]  # whatever the example says
    return Program(Part(children=(Part(), *parts)), options=made, actions=actions)


EXAMPLES: dict[str, list[Program]] = {
    "a step between forward and backward where a rank holds frozen elements alone": [
        Program(
            Part(core="plain", children=(Part(frozen=2), Part(core="custom"))),
            width=width,
            options=Options(block="ELEMENT", apart=True),
            actions=(
                ("forward", 1),
                ("forward", 3),
                ("backward",),
                ("step",),
                ("backward", 0),
            ),
        )
        for width in (1, 2)
    ],
    "state that torch makes while a unit is full by hand": [
        Program(
            Part(children=(Part(unit=""),)),
            actions=(
                ("unshard_unit", 0, False),
                ("torch_get", "full"),
                ("forward", 0),
                ("backward",),
            ),
        )
    ],
    "the first forwards of a unit are those of another module": [
        Program(
            Part(children=(Part(call=call), other)),
            options=Options(pairs=True),
            actions=actions,
        )
        for call, other, actions in (
            ("after_no_grad", Part(core="dataclamp"), (("forward", 0),)),
            ("beside", Part(form="aux_only"), STEPS),
            ("beside", Part(form="aux_for_loss"), STEPS),
        )
    ],
    "gradients of no_sync that the pull of a vjp reduces": [
        Program(
            Part(children=(Part(call="vjp", children=(Part(call="vjp"),)),)),
            actions=(("forward", 0), ("backward", 0, "no_sync"), ("forward", 0)),
        )
    ],
    "a write before an error that is caught": [
        below(
            Part(core="clamp", call="caught"),
            actions=(("forward", 0), ("forward", 1)),
        )
    ],
    "an auxiliary loss on an attribute": [
        below(Part(form="aux_for_loss")),
        below(Part(form="aux_for_parent"), Part()),
        below(Part(form="aux_only")),
        below(Part(core="mul", form="aux_of_weights")),
        below(Part(form="attribute"), prefetch=None),
    ],
    "a returned view changed in place": [
        below(Part(form=form, use=use), prefetch=prefetch)
        for form, use in [
            ("view_as", "mul_"),
            ("transpose", "iadd"),
            ("slice", "set"),
            ("chunk", "mul_view"),
            ("view_as", "relu_"),
            ("view", "iadd"),
        ]
        for prefetch in ("BACKWARD_PRE", None)
    ],
    "a unit called for its in-place effect": [
        below(Part(core="mul", form="in_place")),
        below(Part(form="in_place"), prefetch=None),
        below(Part(core="rms", form="copied_in"), strategy="SHARD_GRAD_OP"),
        below(Part(core="div", form="in_place_returned")),
    ],
    "a write to an input that is cast": [
        below(
            Part(core=core, form=form, call=call),
            Part(),
            actions=(
                *STEPS,
                ("forward", 0, "no_grad"),
                ("forward", 0, "inference"),
                ("forward", 0, "input_grad"),
                ("backward",),
            ),
            low=True,
            strategy=strategy,
        )
        for core, form in [
            ("tiny", "in_place"),
            ("scalar", "in_place"),
            ("linear", "copied_in"),
            ("tiny", "in_place_returned"),
        ]
        for call, strategy in [
            ("plain", "FULL_SHARD"),
            ("reentrant", "NO_SHARD"),
            ("caught_and_again", "FULL_SHARD"),
        ]
    ],
    "weights kept full and a fused optimizer": [
        below(Part(), keep_full=True, optimizer=optimizer)
        for optimizer in ("adamw_fused", "momentum_fused", "adamw_single", "sgd")
    ],
    "state that an optimizer makes in its constructor": [
        below(
            Part(),
            optimizer="adagrad_fused",
            early=early,
            actions=(*before, ("torch_get", how), ("torch_set",), *STEPS),
        )
        for how in ("full", "sharded")
        for early in (False, True)
        for before in ((), (("forward", 0), ("backward",)))
    ],
    "state that torch's functions make where ranks hold nothing": [
        Program(
            width=width,
            options=Options(optimizer="adamw_foreach"),
            actions=(*before, ("torch_get", how), ("torch_set",), *STEPS),
        )
        for width in (2, 3)
        for how in ("full", "sharded")
        for before in (
            (),
            (("forward", 0), ("backward",), ("zero",), ("step",)),
            (("single", 0, "set_grad"),),
            (("single", 1, "set_grad"), ("step",)),
        )
    ],
    "state that torch's functions make between forward and backward": [
        Program(
            Part(children=(Part(),)),
            seed=3,
            options=Options(
                optimizer=optimizer, strategy=strategy, keep_full=keep_full
            ),
            actions=(
                ("forward", 1),
                ("torch_get", "sharded"),
                ("backward",),
                ("step",),
                ("torch_set",),
                *STEPS,
            ),
        )
        for optimizer in ("adamw_fused", "momentum_fused", "adamw_foreach", "sgd")
        for strategy, keep_full in [
            ("FULL_SHARD", False),
            ("FULL_SHARD", True),
            ("SHARD_GRAD_OP", False),
        ]
    ],
    "gradients of chosen parameters that are full by hand": [
        Program(
            Part(children=(Part(),)),
            options=Options(strategy=strategy),
            actions=(
                ("forward", 0, "input_grad"),
                ("unshard_unit", unit, False),
                ("backward", 0, "inputs"),
            ),
        )
        for strategy in ("FULL_SHARD", "NO_SHARD")
        for unit in (0, 1)
    ],
    "states of a unit with two names": [
        Program(
            Part(children=(Part(), Part(again=0), Part())),
            options=options,
            actions=(
                ("train", 0),
                ("typed_save", kind, True),
                ("train", 1),
                ("typed_load",),
                *STEPS,
            ),
        )
        for kind in ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "FULL_STATE_DICT")
        for options in (Options(door="wrapper"), Options())
    ],
    "state of other shapes where a rank holds all": [
        Program(
            Part(core=core),
            width=2,
            options=Options(optimizer="adagrad_fused", early=True, strategy=strategy),
            actions=(*before, ("step",), ("summon", 0, False, True)),
        )
        for core in ("prelu", "linear")
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        for before in ((), (("forward", 0), ("backward",)))
    ],
    "a scaler and complex parameters": [
        Program(
            Part(core="complex"),
            actions=(("train", 0, how),),
        )
        for how in ("scale", "unscale")
    ],
    "a unit that raised inside a forward, and unshard_params": [
        below(
            Part(call="caught", again=again),
            actions=(("train", 0), ("inside_summon", "make")),
        )
        for again in (None, 1)
    ],
    "a unit that needs another layout inside a transform": [
        Program(
            Part(
                core="plain",
                children=(
                    Part(children=(Part(unit=""),), unit="both"),
                    Part(unit="both"),
                    Part(
                        core="ownpenalty",
                        call=call,
                        children=(Part(core="conv", frozen=1),),
                    ),
                ),
            ),
            width=5,
            options=Options(
                strategy=strategy, style="auto", apart=True, groups=True, replicas=12
            ),
            actions=(("freeze_all", True), ("train", 2)),
        )
        for call in ("jvp", "vjp")
        for strategy in ("NO_SHARD", "FULL_SHARD")
    ],
    "a backward inside a forward, and gradients for all": [
        Program(
            Part(
                core="layer_norm",
                call="functional",
                children=(REPEATED, REPEATED),
                unit="both",
                again=0,
            ),
            width=2,
            seed=3,
            options=Options(
                strategy="SHARD_GRAD_OP",
                prefetch="BACKWARD_POST",
                forward_prefetch=True,
                block="ELEMENT",
                fill=True,
                methods=True,
            ),
            actions=(("freeze_piece", 6, True), ("train", 1)),
        )
    ],
    "torch's state dicts while a unit is full by hand": [
        below(
            Part(),
            optimizer=optimizer,
            actions=(
                *before,
                ("unshard_unit", 1, False),
                ("torch_get", how),
                ("torch_set",),
                ("reshard_unit", 1),
                *STEPS,
            ),
        )
        for how in ("full", "sharded")
        for optimizer in ("adamw_foreach", "adagrad_fused")
        for before in ((), (("train", 0),))
    ],
    "full parameters older than the shards": [
        *(
            Program(
                Part(core="mul", children=(Part(unit=""),)),
                width=5,
                seed=1,
                options=Options(keep_full=True, optimizer=optimizer),
                actions=(
                    ("forward", 3, "input_grad"),
                    change,
                    ("input_gradient", 2, "once"),
                    ("forward", 3),
                ),
            )
            for change, optimizer in [
                (("write", 0, "no_grad"), "sgd"),
                (("write", 1, "assign"), "sgd"),
                (("step",), "adamw_fused"),
            ]
        ),
        *(
            Program(
                options=Options(strategy="SHARD_GRAD_OP", optimizer=optimizer),
                actions=(
                    ("train", 0, "keep"),
                    ("forward", 0),
                    change,
                    ("unshard_unit", 0, async_op),
                    *STEPS,
                ),
            )
            for change in (("step",), ("write", 0, "no_grad"))
            for optimizer, async_op in [("sgd", True), ("adamw_fused", False)]
        ),
    ],
    "a container that is filled": [
        below(Part(form=form))
        for form in (
            "append_to_trained",
            "set_item_of_trained",
            "set_field",
            "into_nested",
            "removed",
            "cleared",
            "append",
            "set_item",
        )
    ],
    "a backward that raised": [
        below(
            Part(),
            actions=(
                ("forward", 0),
                ("backward",),
                ("raise_in_backward", index, 1, cleared),
                *STEPS,
            ),
        )
        for index in (0, 1, 2)
        for cleared in ("model", "all", "optimizer")
    ],
    "writes to weights in forward": [
        below(Part(core=core)) for core in ("clamp", "dataclamp", "normalized")
    ],
    "functional_call on a unit": [
        below(Part(call="functional")),
        below(Part(core="mul", call="functional"), strategy="SHARD_GRAD_OP"),
    ],
    "functional_call on a unit that is full by hand": [
        Program(
            Part(children=(Part(), Part(call=call))),
            options=Options(pairs=pairs),
            actions=(
                *((("unshard_unit", unit, False)) for unit in units),
                ("forward", 0, how),
                ("save",),
                *STEPS,
            ),
        )
        for call in ("functional", "functional_caught")
        for units, pairs in [((0, 1, 2), False), ((1, 2), True)]
        for how in ("train", "no_grad")
    ],
    "gradients of no_sync where nothing is hooked": [
        Program(
            Part(form=form),
            options=Options(strategy="NO_SHARD"),
            actions=(
                ("forward", 0),
                ("backward", 0, "no_sync"),
                ("forward", 1),
                ("backward",),
                ("step",),
            ),
        )
        for form in ("thunk", "set_thing", "late_thunk")
    ],
    "gradients of chosen parameters": [
        below(Part(), actions=(("forward", 0), ("backward", 0, "inputs"), ("step",))),
        Program(
            Part(form="removed", frozen=2),
            actions=(
                ("forward", 0, "evaluation"),
                ("freeze_all", True),
                ("backward", 0, "inputs"),
            ),
        ),
    ],
    "a write between forward and backward": [
        below(
            Part(core=core),
            actions=(("train", 0, "keep"), ("forward", 1), write, ("backward",)),
            strategy=strategy,
            optimizer=optimizer,
        )
        for core in ("linear", "mul")
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        for write, optimizer in [
            (("step",), "sgd"),
            (("step",), "adamw"),
            (("write", 5, "no_grad"), "sgd"),
        ]
    ],
    "gradients that are kept": [
        below(
            Part(core="mul"),
            actions=(
                ("train", 0, "keep"),
                ("keep", cleared),
                ("forward", 1),
                ("backward",),
                ("swap", 0, 0),
                ("forward", 2),
                ("backward",),
                ("step",),
            ),
        )
        for cleared in ("none", "odd", "even", "all")
    ],
    "values of another dtype that take the place of parameters": [
        below(
            Part(),
            actions=(
                ("train", 0),
                ("save",),
                ("cast", "bfloat16", False),
                ("load", True),
                *STEPS,
            ),
            strategy=strategy,
        )
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ],
    "a first forward of whole weights inside a transform": [
        Program(
            Part(core="plain", children=(Part(core=core, call=call),)),
            options=Options(strategy="NO_SHARD", apart=True),
            actions=(action, ("forward", 0), ("backward",)),
        )
        for core in ("pow", "linear")
        for call in ("jvp", "vjp", "vmap")
        for action in [("copy_aside", 0), ("forward", 0)]
    ],
    "a first forward inside a transform": [
        Program(
            Part(core="plain", children=(Part(call="vjp"),)),
            width=2,
            seed=1,
            options=Options(apart=True),
            actions=(
                ("forward", 0),
                ("backward",),
                ("zero",),
                ("step_half", True),
                ("copy_aside", 2),
            ),
        )
    ],
    "a checkpoint of loaded state before a step": [
        Program(
            seed=1,
            options=Options(optimizer=optimizer),
            actions=(
                *STEPS[:1],
                ("raw_round_trip",),
                ("save_directory", True, True),
                *STEPS,
            ),
        )
        for optimizer in ("adamw_fused", "adamw_single")
    ],
    "a clip while a unit is full by hand": [
        below(
            Part(),
            actions=(*before, ("unshard_unit", 1, False), ("clip", 0.3, 2.0)),
            strategy=strategy,
        )
        for before in (
            (("single", 0, "set_grad"), ("single", 3, "set_grad")),
            (("forward", 0), ("backward",)),
        )
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ],
    "names in a unit of several modules": [
        Program(
            Part(children=(Part(unit="both"), Part(use="detach")), frozen=2),
            width=2,
            seed=1,
            options=Options(pairs=True),
            actions=(
                ("forward", 1),
                ("backward", -1, "scaled"),
                ("scaled", "unscale"),
                ("single", 0, "set_param"),
                *STEPS,
            ),
        )
    ],
    "state of an optimizer that was made while a unit was full": [
        Program(
            Part(core="plain", children=(Part(),)),
            options=Options(apart=True),
            actions=(
                ("unshard_unit", 0, False),
                ("new_optimizer", "adagrad_fused"),
                ("torch_get", "sharded"),
            ),
        )
    ],
    "a write that only calls with other parameters were searched for": [
        Program(
            Part(
                children=(
                    Part(core="dataclamp", call="functional_caught"),
                    Part(call=call, again=0),
                )
            ),
            actions=(("forward", 0), *STEPS),
        )
        for call in ("gradient", "plain")
    ],
    "loaded state of another layout": [
        Program(
            seed=2,
            options=Options(optimizer="adamw_single"),
            actions=(
                ("freeze", 7),
                ("torch_get", "sharded"),
                ("raw_round_trip",),
                ("forward", 1),
                ("step",),
            ),
        )
    ],
    "sharded values of another layout": [
        Program(
            actions=(
                ("freeze", 0),
                ("torch_get", "sharded"),
                ("forward", 2),
                ("torch_set",),
            )
        )
    ],
    "a part of a unit called apart": [
        below(Part(call="core")),
        below(Part(call="method")),
        below(Part(call="forward")),
        below(Part(form="generator")),
        below(Part(form="late_thunk")),
        below(Part(core="oldweightnorm", form="late_thunk")),
        below(Part(), actions=(("call_core", 1, 0),)),
        *(
            Program(
                Part(core="oldweightnorm"), width=width, actions=(("call_core", 0, 0),)
            )
            for width in (2, 4)
        ),
    ],
    "a frozen parameter with a gradient": [
        below(
            Part(),
            actions=(
                ("forward", 0),
                ("backward",),
                ("freeze_piece", 1, False),
                ("clip", 0.1),
                ("step",),
            ),
        )
    ],
    "unused parameters and the gradient of the input": [
        below(
            Part(),
            actions=(
                ("train", 0),
                ("forward", 1, "input_grad"),
                ("input_gradient", 0, "once"),
                ("step",),
                *STEPS,
            ),
            fill=True,
            optimizer="adamw",
        )
    ],
    "a result in a function": [
        *(
            Program(Part(core=core, form="thunk"), actions=STEPS)
            for core in ("tensor_hook", "mul")
        ),
        *(
            below(Part(core="tensor_hook", form="thunk"), Part(), prefetch=prefetch)
            for prefetch in ("BACKWARD_PRE", None)
        ),
    ],
    "a result that nobody sees": [
        below(Part(core=core, form=form), prefetch=prefetch, actions=(("train", 0),))
        for core in ("mul", "div", "pow", "prelu", "rms", "linear")
        for form, prefetch in (("set_thing", "BACKWARD_PRE"), ("thunk", None))
    ],
    "a cast where a rank holds nothing": [
        below(
            Part(core=core),
            actions=(("train", 0), ("cast", dtype, back), *STEPS),
        )
        for core in ("tiny", "scalar", "zero")
        for dtype, back in (("bfloat16", False), ("float32", True))
    ],
    "a parameter that is frozen after a cast": [
        Program(
            Part(core="mul", children=(Part(core="tiny", unit=""),)),
            width=10,
            options=Options(block="ELEMENT", strategy=strategy),
            actions=(
                ("train", 0),
                ("cast", "bfloat16", False),
                ("freeze", index),
                *STEPS,
                ("freeze_all", True),
                *STEPS,
            ),
        )
        for index in (0, 1)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    ],
    "forward mode inside reverse mode": [
        below(Part(call="vjp", children=(Part(core=core, call="jvp"),)), **options)
        for core in ("mul", "linear")
        for options in ({}, {"offload": True}, {"strategy": "SHARD_GRAD_OP"})
    ],
    "other data where a rank holds nothing": [
        below(
            Part(core=core),
            actions=(
                ("train", 0),
                *((("write", i, "assign")) for i in range(5)),
                *STEPS,
            ),
            **options,
        )
        for core in ("tiny", "scalar", "zero")
        for options in (
            {"keep_full": True},
            {"strategy": "SHARD_GRAD_OP", "keep_full": True},
            {},
        )
    ],
    "several backwards through one graph": [
        below(
            Part(core=core),
            actions=(("forward", 0, "input_grad"), ("input_gradient", 0, then), *STEPS),
            prefetch=prefetch,
        )
        for core in ("linear", "mul", "layer_norm")
        for then in ("products", "product_and_backward", "penalty")
        for prefetch in ("BACKWARD_PRE", None)
    ],
    "a parameter that is frozen before backward, and gradients for all": [
        below(
            Part(core=core),
            actions=(
                ("forward", 0),
                ("freeze_piece", index, False),
                ("backward",),
                ("step",),
                *STEPS,
            ),
            fill=True,
            optimizer="adamw",
        )
        for core in ("linear", "spectralnorm")
        for index in (0, 1, 2)
    ],
    "a parameter that is frozen before backward": [
        below(
            Part(core=core),
            actions=(
                *STEPS,
                ("forward", 0),
                ("freeze", 0),
                ("backward",),
                ("step",),
                *STEPS,
                ("freeze", 0),
                *STEPS,
            ),
            optimizer="adamw",
            strategy=strategy,
        )
        for core in ("linear", "tiny")
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ],
    "a step after requires_grad was flipped": [
        below(Part(), actions=(("step",), ("freeze", 0), ("forward", 0), ("step",)))
    ],
    "other data before a backward that does not come": [
        Program(
            actions=(("forward", 0), ("write", index, "assign"), ("save",), *STEPS),
            options=Options(strategy=strategy),
        )
        for index in (0, 1)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    ],
    "other data before unshard": [
        Program(
            actions=(
                ("train", 0),
                change,
                ("unshard_unit", 0, async_op),
                ("save",),
                ("reshard_unit", 0),
                *STEPS,
            )
        )
        for change in (("write", 0, "assign"), ("cast", "float32", False))
        for async_op in (False, True)
    ],
    "a hook on an output that reads weights": [
        below(Part(core="tensor_hook", form=form, use=use), prefetch=prefetch)
        for form, use, prefetch in [
            ("tensor", "take", "BACKWARD_PRE"),
            ("pair", "residual", None),
            ("view_as", "mul_", None),
        ]
    ],
    "a part of a unit that is full by hand, after a step": [
        Program(
            Part(children=(Part(), Part())),
            options=Options(optimizer=optimizer, strategy=strategy),
            actions=(
                ("forward", 0),
                ("backward",),
                *((("unshard_unit", unit, False)) for unit in (0, 1, 2)),
                ("step",),
                ("call_core", unit, 0),
                *STEPS,
            ),
        )
        for optimizer in ("adamw_fused", "adamw_single", "sgd")
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        for unit in (0, 1)
    ],
    "a whole unit's part called apart": [
        below(Part(call=call), strategy="NO_SHARD")
        for call in ("core", "method", "forward")
    ],
    # A layout per loss, as in a GAN that computes all losses first.
    "backward of a forward from before parameters were frozen or unfrozen": [
        Program(
            Part(children=(Part(children=(Part(),)),)),
            options=options,
            actions=(
                ("freeze_piece", 1, not on),
                ("forward", 0, "input_grad"),
                ("freeze_piece", 1, on),
                ("freeze", 1),
                ("forward", 0, "input_grad"),
                *backwards,
                ("step",),
                ("zero",),
                ("forward", 1),
                ("backward",),
            ),
        )
        for on, backwards, options in [
            (True, (("backward", 0), ("backward", 0)), Options()),
            (False, (("backward", 0), ("backward", 0)), Options(prefetch=None)),
            (True, (("backward", 1), ("backward", 0)), Options(strategy="NO_SHARD")),
            (False, (("backward", 0, "all"),), Options(offload=True)),
            (True, (("backward", 0, "all"),), Options(offload=True, low=True)),
            (True, (("backward", 0, "all"),), Options(fill=True)),
            (False, (("backward", 0, "inputs"), ("backward", 0)), Options(low=True)),
            (
                True,
                (("backward", 0, "retain"), ("backward", 1), ("backward", 0)),
                Options(keep_full=True),
            ),
            (False, (("backward", 0, "no_sync"), ("backward", 0)), Options()),
            (True, (("input_gradient", 0, "products"), ("backward",)), Options()),
            (False, (("backward", 0, "create_graph"), ("backward", 0)), Options()),
            (True, (("step",), ("backward", 0)), Options(strategy="NO_SHARD")),
            (
                True,
                (("unshard_unit", 1, True), ("backward", 0), ("backward", 0)),
                Options(pairs=True),
            ),
        ]
    ],
    "a unit that writes its weights, with a module inside a transform": [
        Program(
            Part(children=(Part(call=call), Part(core=core))),
            options=Options(pairs=True),
            actions=(("forward", 0), ("forward", 0), ("backward",), ("save",)),
        )
        for call in ("jvp", "vjp", "vmap")
        for core in ("dataclamp", "clamp")
    ],
    "a wire format inside a transform, and parameters that leave their region": [
        Program(
            Part(children=(Part(call=call), Part())),
            options=Options(wire=True),
            actions=(("forward", 0), ("backward",), ("freeze", 1), *STEPS),
        )
        for call in ("jvp", "vjp", "vmap")
    ],
    "a weight in channels_last, in a slot": [
        below(Part(core="images"), arena=arena) for arena in ("shared", "apart")
    ],
    "optimizers and full parameters": [
        below(Part(), actions=(("inside_summon", what),)) for what in ("make", "step")
    ],
}
ON_THREE = {
    "a parameter that is frozen after a cast",
    "backward of a forward from before parameters were frozen or unfrozen",
    "state that torch's functions make where ranks hold nothing",
    "a scaler and complex parameters",
    "state of other shapes where a rank holds all",
    "loaded state of another layout",
}
"""On two ranks some were right: a parameter has to cover the whole part of one."""
