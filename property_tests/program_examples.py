"""Programs that gave wrong numbers, crashed or hung once, by what was wrong.

What a script does is written as text: actions and their arguments, ``;`` between them.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from typing import Any

from property_tests.program_recipes import Action, Options, Part, Program

STEPS = "train 0; train 1; train 2"
FULL, HALF, WHOLE = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"
PRE, TRANSFORMS = "BACKWARD_PRE", ("jvp", "vjp", "vmap")


def _argument(word: str) -> Any:
    try:
        return literal_eval(word)
    except ValueError:
        return word


def actions(text: str) -> tuple[Action, ...]:
    lines = (part.split() for part in text.split(";") if part.strip())
    return tuple((name, *map(_argument, words)) for name, *words in lines)


def case(
    *children: Part,
    do: str = STEPS,
    root: Part = Part(),  # noqa: B008  # frozen
    width: int = 4,
    seed: int = 0,
    **options: Any,
) -> Program:
    tree = replace(root, children=children)
    return Program(tree, width, seed, Options(**options), actions(do))


def below(*parts: Part, **more: Any) -> Program:
    return case(Part(), *parts, **more)


REPEATED = Part(
    core="nogradpart",
    children=(
        Part(form="slice", call="vjp", unit="both", dtype="float32", frozen=1),
        Part(form="in_place", frozen=2),
    ),
    unit="",
    again=2,
)
PLAIN, LOOSE = Part(core="plain"), Part(unit="")

CLEARED: list[tuple[str, dict[str, Any]]] = [
    ("optimizer_zeros", {"offload": True}),
    ("even", {}),
    ("even", {"low": True, "strategy": HALF}),
]
LAYOUTS: list[tuple[bool, str, dict[str, Any]]] = [
    (True, "backward 0; backward 0", {}),
    (False, "backward 0; backward 0", {"prefetch": None}),
    (True, "backward 1; backward 0", {"strategy": WHOLE}),
    (False, "backward 0 all", {"offload": True}),
    (True, "backward 0 all", {"offload": True, "low": True}),
    (True, "backward 0 all", {"fill": True}),
    (False, "backward 0 inputs; backward 0", {"low": True}),
    (True, "backward 0 retain; backward 1; backward 0", {"keep_full": True}),
    (False, "backward 0 no_sync; backward 0", {}),
    (True, "input_gradient 0 products; backward", {}),
    (False, "backward 0 create_graph; backward 0", {}),
    (True, "step; backward 0", {"strategy": WHOLE}),
    (True, "unshard_unit 1 True; backward 0; backward 0", {"pairs": True}),
]

EXAMPLES: dict[str, list[Program]] = {
    # Below two others, it was shown twice and freed once.
    "a unit in two places is shown": [
        case(Part(), Part(children=(Part(again=0),)), do=f"summon 2 True; {STEPS}")
    ],
    # The record of reductions was read by the regions of after the change.
    "freezing after a recorded step": [
        case(Part(), do=f"train 0; freeze 0; {STEPS}", strategy=WHOLE)
    ],
    "a root that is called with its own output, and units by themselves": [
        case(
            *(Part(call="deep"), Part(call="reentrant"), Part(frozen=2)),
            do="forward 0; forward 1; backward 0 all; alone 1 0; alone 2 1; alone 0 2;"
            f"step; {STEPS}",
            root=Part(call=call),
            strategy=strategy,
        )
        for call in ("twice", "deep")
        for strategy in (HALF, FULL)
    ],
    "a layer that keeps a list of its weights": [
        below(Part(core="lstm"), Part(core="gru"), low=low, strategy=strategy)
        for low, strategy in ((True, FULL), (False, HALF), (False, FULL))
    ],
    "modules whose weights are computed, and a packed sequence": [
        below(Part(core="weightnorm"), Part(form="packed"), Part(core="orthogonal")),
    ],
    "a gradient that is the memory of the weights": [
        below(
            Part(core="gives_itself"), do="forward 0; backward 0 no_sync; train 1; step"
        )
    ],
    "weights that a unit returns": [
        below(Part(form="weight_too"), Part(core="mul", form="weight_too"))
    ],
    "gradients of a shard group that wait for the replicas": [
        case(
            Part(),
            do=f"forward 0; backward 0 replica; forward 1; backward; step; {STEPS}",
            strategy=strategy,
            replicas=2,
        )
        for strategy in (WHOLE, "HYBRID_SHARD")
    ],
    "several strategies, lists of prefetches and a factor": [
        case(
            *(Part(), Part(), Part()),
            do=f"prefetch forward 1 (2,3); prefetch backward 3 (2,1); {STEPS};"
            f"prefetch forward 1 (); {STEPS}; train 0 clip",
            second=second,
            factor=3.0,
        )
        for second in (WHOLE, "HYBRID_SHARD", HALF)
    ],
    "checkpoint wrappers, and dtypes of computing and reducing": [
        case(Part(), Part(core="lstm"), low=True, mix=mix, wrapped=wrapped)
        for mix in ("float32", "reduce", "output")
        for wrapped in ("reentered", "recomputed")
    ],
    "gradients that a hook averages": [
        below(Part(), do=STEPS, hook=True, strategy=strategy)
        for strategy in (WHOLE, FULL)
    ],
    # Full parameters that were kept became others after the first of two backwards.
    "two backwards after an unshard by hand": [
        case(
            Part(),
            do="unshard_unit 1 False; forward 0; forward 1; backward 0 twice; step;"
            "zero; unshard_unit 0 True; train 2",
        )
    ],
    "a step between forward and backward where a rank holds frozen elements alone": [
        case(
            *(Part(frozen=2), Part(core="custom")),
            do="forward 1; forward 3; backward; step; backward 0",
            root=PLAIN,
            width=width,
            block="ELEMENT",
            apart=True,
        )
        for width in (1, 2)
    ],
    "state that torch makes while a unit is full by hand": [
        case(LOOSE, do="unshard_unit 0 False; torch_get full; forward 0; backward")
    ],
    "the first forwards of a unit are those of another module": [
        case(Part(call=call), other, pairs=True, do=do)
        for call, other, do in (
            ("after_no_grad", Part(core="dataclamp"), "forward 0"),
            ("beside", Part(form="aux_only"), STEPS),
            ("beside", Part(form="aux_for_loss"), STEPS),
        )
    ],
    "gradients of no_sync that the pull of a vjp reduces": [
        case(
            Part(call="vjp", children=(Part(call="vjp"),)),
            do="forward 0; backward 0 no_sync; forward 0",
        )
    ],
    "a write before an error that is caught": [
        below(Part(core="clamp", call="caught"), do="forward 0; forward 1")
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
        for prefetch in (PRE, None)
    ],
    "a unit called for its in-place effect": [
        below(Part(core="mul", form="in_place")),
        below(Part(form="in_place"), prefetch=None),
        below(Part(core="rms", form="copied_in"), strategy=HALF),
        below(Part(core="div", form="in_place_returned")),
    ],
    "a write to an input that is cast": [
        below(
            *(Part(core=core, form=form, call=call), Part()),
            do=f"{STEPS}; forward 0 no_grad; forward 0 inference;"
            "forward 0 input_grad; backward",
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
            ("plain", FULL),
            ("reentrant", WHOLE),
            ("caught_and_again", FULL),
        ]
    ],
    "weights kept full and a fused optimizer": [
        below(Part(), keep_full=True, optimizer=optimizer)
        for optimizer in ("adamw_fused", "momentum_fused", "adamw_single", "sgd")
    ],
    "state that an optimizer makes in its constructor": [
        below(
            Part(),
            do=f"{before}; torch_get {how}; torch_set; {STEPS}",
            optimizer="adagrad_fused",
            early=early,
        )
        for how in ("full", "sharded")
        for early in (False, True)
        for before in ("", "forward 0; backward")
    ],
    "state that torch's functions make where ranks hold nothing": [
        case(
            do=f"{before}; torch_get {how}; torch_set; {STEPS}",
            optimizer="adamw_foreach",
            width=width,
        )
        for width in (2, 3)
        for how in ("full", "sharded")
        for before in (
            "",
            "forward 0; backward; zero; step",
            "single 0 set_grad",
            "single 1 set_grad; step",
        )
    ],
    "state that torch's functions make between forward and backward": [
        case(
            Part(),
            do=f"forward 1; torch_get sharded; backward; step; torch_set; {STEPS}",
            seed=3,
            optimizer=optimizer,
            strategy=strategy,
            keep_full=keep_full,
        )
        for optimizer in ("adamw_fused", "momentum_fused", "adamw_foreach", "sgd")
        for strategy, keep_full in [(FULL, False), (FULL, True), (HALF, False)]
    ],
    "gradients of chosen parameters that are full by hand": [
        case(
            Part(),
            do=f"forward 0 input_grad; unshard_unit {unit} False; backward 0 inputs",
            strategy=strategy,
        )
        for strategy in (FULL, WHOLE)
        for unit in (0, 1)
    ],
    "states of a unit with two names": [
        case(
            *(Part(), Part(again=0), Part()),
            do=f"train 0; typed_save {kind} True; train 1; typed_load; {STEPS}",
            door=door,
        )
        for kind in ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "FULL_STATE_DICT")
        for door in ("wrapper", "composable")
    ],
    "state of other shapes where a rank holds all": [
        case(
            do=f"{before}; step; summon 0 False True",
            root=Part(core=core),
            width=2,
            strategy=strategy,
            optimizer="adagrad_fused",
            early=True,
        )
        for core in ("prelu", "linear")
        for strategy in (FULL, HALF)
        for before in ("", "forward 0; backward")
    ],
    "a scaler and complex parameters": [
        case(root=Part(core="complex"), do=f"train 0 {how}")
        for how in ("scale", "unscale")
    ],
    "a unit that raised inside a forward, and unshard_params": [
        below(Part(call="caught", again=again), do="train 0; inside_summon make")
        for again in (None, 1)
    ],
    "a unit that needs another layout inside a transform": [
        case(
            Part(children=(LOOSE,), unit="both"),
            Part(unit="both"),
            Part(core="ownpenalty", call=call, children=(Part(core="conv", frozen=1),)),
            do="freeze_all True; train 2",
            root=PLAIN,
            width=5,
            strategy=strategy,
            style="auto",
            apart=True,
            groups=True,
            replicas=12,
        )
        for call in ("jvp", "vjp")
        for strategy in (WHOLE, FULL)
    ],
    "a backward inside a forward, and gradients for all": [
        case(
            *(REPEATED, REPEATED),
            do="freeze_piece 6 True; train 1",
            root=Part(core="layer_norm", call="functional", unit="both", again=0),
            width=2,
            seed=3,
            strategy=HALF,
            prefetch="BACKWARD_POST",
            forward_prefetch=True,
            block="ELEMENT",
            fill=True,
            methods=True,
        )
    ],
    "torch's state dicts while a unit is full by hand": [
        below(
            Part(),
            do=f"{before}; unshard_unit 1 False; torch_get {how}; torch_set;"
            f"reshard_unit 1; {STEPS}",
            optimizer=optimizer,
        )
        for how in ("full", "sharded")
        for optimizer in ("adamw_foreach", "adagrad_fused")
        for before in ("", "train 0")
    ],
    "full parameters older than the shards": [
        *(
            case(
                LOOSE,
                do=f"forward 3 input_grad; {change}; input_gradient 2 once; forward 3",
                root=Part(core="mul"),
                width=5,
                seed=1,
                keep_full=True,
                optimizer=optimizer,
            )
            for change, optimizer in [
                ("write 0 no_grad", "sgd"),
                ("write 1 assign", "sgd"),
                ("step", "adamw_fused"),
            ]
        ),
        *(
            case(
                do=f"train 0 keep; forward 0; {change};"
                f"unshard_unit 0 {async_op}; {STEPS}",
                strategy=HALF,
                optimizer=optimizer,
            )
            for change in ("step", "write 0 no_grad")
            for optimizer, async_op in [("sgd", True), ("adamw_fused", False)]
        ),
    ],
    "a container that is filled": [
        below(Part(form=form))
        for form in (
            *("append_to_trained", "set_item_of_trained", "set_field", "into_nested"),
            *("removed", "cleared", "append", "set_item"),
        )
    ],
    "a backward that raised": [
        below(
            Part(),
            do=f"forward 0; backward; raise_in_backward {index} 1 {cleared}; {STEPS}",
        )
        for index in (0, 1, 2)
        for cleared in ("model", "all", "optimizer")
    ],
    "writes to weights in forward": [
        below(Part(core=core)) for core in ("clamp", "dataclamp", "normalized")
    ],
    "functional_call on a unit": [
        below(Part(call="functional")),
        below(Part(core="mul", call="functional"), strategy=HALF),
    ],
    "functional_call on a unit that is full by hand": [
        case(
            *(Part(), Part(call=call)),
            do=f"{units}; forward 0 {how}; save; {STEPS}",
            pairs=pairs,
        )
        for call in ("functional", "functional_caught")
        for units, pairs in [
            ("unshard_unit 0 False; unshard_unit 1 False; unshard_unit 2 False", False),
            ("unshard_unit 1 False; unshard_unit 2 False", True),
        ]
        for how in ("train", "no_grad")
    ],
    "gradients of no_sync where nothing is hooked": [
        case(
            do="forward 0; backward 0 no_sync; forward 1; backward; step",
            root=Part(form=form),
            strategy=WHOLE,
        )
        for form in ("thunk", "set_thing", "late_thunk")
    ],
    "gradients of chosen parameters": [
        below(Part(), do="forward 0; backward 0 inputs; step"),
        case(
            do="forward 0 evaluation; freeze_all True; backward 0 inputs",
            root=Part(form="removed", frozen=2),
        ),
    ],
    "a write between forward and backward": [
        below(
            Part(core=core),
            do=f"train 0 keep; forward 1; {write}; backward",
            strategy=strategy,
            optimizer=optimizer,
        )
        for core in ("linear", "mul")
        for strategy in (FULL, HALF)
        for write, optimizer in [
            ("step", "sgd"),
            ("step", "adamw"),
            ("write 5 no_grad", "sgd"),
        ]
    ],
    "gradients that are kept": [
        below(
            Part(core="mul"),
            do=f"train 0 keep; keep {cleared}; forward 1; backward; swap 0 0;"
            "forward 2; backward; step",
        )
        for cleared in ("none", "odd", "even", "all")
    ],
    "gradients that are kept, shared and given other data": [
        below(
            *(Part(core="mul"), Part(core="mul")),
            do=f"train 0 keep; {what}; forward 1; backward; {what}; zero {cleared};"
            "forward 2; backward; keep odd; forward 1; backward; step",
            **options,
        )
        for cleared, options in CLEARED
        for what in (
            "change_gradients provide; change_gradients share",
            "change_gradients replace_data; change_gradients mul_",
            "keep none; swap 0 1; change_gradients clone",
        )
    ],
    "values of another dtype that take the place of parameters": [
        below(
            Part(),
            do=f"train 0; save; cast bfloat16 False; load True; {STEPS}",
            strategy=strategy,
        )
        for strategy in (FULL, WHOLE)
    ],
    "a first forward of whole weights inside a transform": [
        case(
            Part(core=core, call=call),
            do=f"{action} 0; forward 0; backward",
            root=PLAIN,
            strategy=WHOLE,
            apart=True,
        )
        for core in ("pow", "linear")
        for call in TRANSFORMS
        for action in ("copy_aside", "forward")
    ],
    "a first forward inside a transform": [
        case(
            Part(call="vjp"),
            do="forward 0; backward; zero; step_half True; copy_aside 2",
            root=PLAIN,
            width=2,
            seed=1,
            apart=True,
        )
    ],
    "a checkpoint of loaded state before a step": [
        case(
            do=f"train 0; raw_round_trip; save_directory True True; {STEPS}",
            seed=1,
            optimizer=optimizer,
        )
        for optimizer in ("adamw_fused", "adamw_single")
    ],
    "a clip while a unit is full by hand": [
        below(
            Part(),
            do=f"{before}; unshard_unit 1 False; clip 0.3 2.0",
            strategy=strategy,
        )
        for before in ("single 0 set_grad; single 3 set_grad", "forward 0; backward")
        for strategy in (FULL, WHOLE)
    ],
    "names in a unit of several modules": [
        case(
            *(Part(unit="both"), Part(use="detach")),
            do="forward 1; backward -1 scaled; scaled unscale; single 0 set_param;"
            f"{STEPS}",
            root=Part(frozen=2),
            width=2,
            seed=1,
            pairs=True,
        )
    ],
    "state of an optimizer that was made while a unit was full": [
        case(
            Part(),
            do="unshard_unit 0 False; new_optimizer adagrad_fused; torch_get sharded",
            root=PLAIN,
            apart=True,
        )
    ],
    "a write that only calls with other parameters were searched for": [
        case(
            Part(core="dataclamp", call="functional_caught"),
            Part(call=call, again=0),
            do=f"forward 0; {STEPS}",
        )
        for call in ("gradient", "plain")
    ],
    "loaded state of another layout": [
        case(
            do="freeze 7; torch_get sharded; raw_round_trip; forward 1; step",
            seed=2,
            optimizer="adamw_single",
        )
    ],
    "sharded values of another layout": [
        case(do="freeze 0; torch_get sharded; forward 2; torch_set")
    ],
    "a part of a unit called apart": [
        below(Part(call="core")),
        below(Part(call="method")),
        below(Part(call="forward")),
        below(Part(form="generator")),
        below(Part(form="late_thunk")),
        below(Part(core="oldweightnorm", form="late_thunk")),
        below(Part(), do="call_core 1 0"),
        *(
            case(root=Part(core="oldweightnorm"), width=width, do="call_core 0 0")
            for width in (2, 4)
        ),
    ],
    "a frozen parameter with a gradient": [
        below(Part(), do="forward 0; backward; freeze_piece 1 False; clip 0.1; step")
    ],
    "unused parameters and the gradient of the input": [
        below(
            Part(),
            do=f"train 0; forward 1 input_grad; input_gradient 0 once; step; {STEPS}",
            fill=True,
            optimizer="adamw",
        )
    ],
    "a result in a function": [
        *(case(root=Part(core=core, form="thunk")) for core in ("tensor_hook", "mul")),
        *(
            below(Part(core="tensor_hook", form="thunk"), Part(), prefetch=prefetch)
            for prefetch in (PRE, None)
        ),
    ],
    "a result that nobody sees": [
        below(Part(core=core, form=form), prefetch=prefetch, do="train 0")
        for core in ("mul", "div", "pow", "prelu", "rms", "linear")
        for form, prefetch in (("set_thing", PRE), ("thunk", None))
    ],
    "a cast where a rank holds nothing": [
        below(Part(core=core), do=f"train 0; cast {dtype} {back}; {STEPS}")
        for core in ("tiny", "scalar", "zero")
        for dtype, back in (("bfloat16", False), ("float32", True))
    ],
    "a parameter that is frozen after a cast": [
        case(
            Part(core="tiny", unit=""),
            do=f"train 0; cast bfloat16 False; freeze {index}; {STEPS};"
            f"freeze_all True; {STEPS}",
            root=Part(core="mul"),
            width=10,
            block="ELEMENT",
            strategy=strategy,
        )
        for index in (0, 1)
        for strategy in (FULL, HALF)
    ],
    "forward mode inside reverse mode": [
        below(Part(call="vjp", children=(Part(core=core, call="jvp"),)), **options)
        for core in ("mul", "linear")
        for options in ({}, {"offload": True}, {"strategy": HALF})
    ],
    "other data where a rank holds nothing": [
        below(
            Part(core=core),
            do="train 0;" + "".join(f"write {i} assign;" for i in range(5)) + STEPS,
            **options,
        )
        for core in ("tiny", "scalar", "zero")
        for options in ({"keep_full": True}, {"strategy": HALF, "keep_full": True}, {})
    ],
    "changes where a rank holds nothing, and what ranks send": [
        case(
            Part(core="tiny", children=(Part(core="scalar", unit=""), Part("tiny"))),
            do=f"train 0; {do}; {STEPS}",
            strategy=HALF,
            door=door,
            keep_full=kept,
        )
        for door in ("composable", "wrapper")
        for do, kept in [
            ("cast float32 True; train 0", False),
            ("forward 0; backward 0 no_sync; write 2 assign", False),
            ("train 0; write 3 assign; train 0", True),
            ("train 0; write 3 same_address; train 0", True),
            ("train 0; write 3 no_grad; train 0", True),
            ("save; load True; train 0; typed_save FULL_STATE_DICT False", False),
        ]
    ],
    "several backwards through one graph": [
        below(
            Part(core=core),
            do=f"forward 0 input_grad; input_gradient 0 {then}; {STEPS}",
            prefetch=prefetch,
        )
        for core in ("linear", "mul", "layer_norm")
        for then in ("products", "product_and_backward", "penalty")
        for prefetch in (PRE, None)
    ],
    "a parameter that is frozen before backward, and gradients for all": [
        below(
            Part(core=core),
            do=f"forward 0; freeze_piece {index} False; backward; step; {STEPS}",
            fill=True,
            optimizer="adamw",
        )
        for core in ("linear", "spectralnorm")
        for index in (0, 1, 2)
    ],
    "a parameter that is frozen before backward": [
        below(
            Part(core=core),
            do=f"{STEPS}; forward 0; freeze 0; backward; step; {STEPS};"
            f"freeze 0; {STEPS}",
            optimizer="adamw",
            strategy=strategy,
        )
        for core in ("linear", "tiny")
        for strategy in (FULL, WHOLE)
    ],
    "a step after requires_grad was flipped": [
        below(Part(), do="step; freeze 0; forward 0; step")
    ],
    "other data before a backward that does not come": [
        case(do=f"forward 0; write {index} assign; save; {STEPS}", strategy=strategy)
        for index in (0, 1)
        for strategy in (FULL, HALF)
    ],
    "other data before unshard": [
        case(
            do=f"train 0; {change}; unshard_unit 0 {async_op}; save;"
            f"reshard_unit 0; {STEPS}"
        )
        for change in ("write 0 assign", "cast float32 False")
        for async_op in (False, True)
    ],
    "a hook on an output that reads weights": [
        below(Part(core="tensor_hook", form=form, use=use), prefetch=prefetch)
        for form, use, prefetch in [
            ("tensor", "take", PRE),
            ("pair", "residual", None),
            ("view_as", "mul_", None),
        ]
    ],
    "a part of a unit that is full by hand, after a step": [
        case(
            *(Part(), Part()),
            do="forward 0; backward; unshard_unit 0 False; unshard_unit 1 False;"
            f"unshard_unit 2 False; step; call_core {unit} 0; {STEPS}",
            optimizer=optimizer,
            strategy=strategy,
        )
        for optimizer in ("adamw_fused", "adamw_single", "sgd")
        for strategy in (FULL, HALF)
        for unit in (0, 1)
    ],
    "a whole unit's part called apart": [
        below(Part(call=call), strategy=WHOLE) for call in ("core", "method", "forward")
    ],
    # A layout per loss, as in a GAN that computes all losses first.
    "backward of a forward from before parameters were frozen or unfrozen": [
        case(
            Part(children=(Part(),)),
            do=f"freeze_piece 1 {not on}; forward 0 input_grad; freeze_piece 1 {on};"
            f"freeze 1; forward 0 input_grad; {then}; step; zero; forward 1; backward",
            **options,
        )
        for on, then, options in LAYOUTS
    ],
    "a unit that writes its weights, with a module inside a transform": [
        case(
            *(Part(call=call), Part(core=core)),
            do="forward 0; forward 0; backward; save",
            pairs=True,
        )
        for call in TRANSFORMS
        for core in ("dataclamp", "clamp")
    ],
    "a wire format inside a transform, and parameters that leave their region": [
        case(
            *(Part(call=call), Part()),
            do=f"forward 0; backward; freeze 1; {STEPS}",
            wire=True,
        )
        for call in TRANSFORMS
    ],
    "a weight in channels_last, in a slot": [
        below(Part(core="images"), arena=arena) for arena in ("shared", "apart")
    ],
    "optimizers and full parameters": [
        below(Part(), do=f"inside_summon {what}") for what in ("make", "step")
    ],
}
ON_THREE = {
    "a parameter that is frozen after a cast",
    "backward of a forward from before parameters were frozen or unfrozen",
    "state that torch's functions make where ranks hold nothing",
    "a scaler and complex parameters",
    "state of other shapes where a rank holds all",
    "loaded state of another layout",
    "changes where a rank holds nothing, and what ranks send",
}
"""On two ranks some were right: a parameter has to cover the whole part of one."""
