"""Programs that gave wrong numbers, crashed or hung once, by what was wrong.

A program is text: ``parts | script | options``. Parts are the children of the root,
between ``+``: words of ``Part``, the first one its core, and its children in brackets;
what stands before ``:`` is the root. A script has actions with their arguments between
``;``. Of ``{a/b}`` each choice makes a program, and ``$1`` is the first choice again.
A line that is indented goes on with the one above.
"""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import replace
from itertools import product
from textwrap import dedent
from typing import Any

from property_tests.program_recipes import Action, Options, Part, Program

STEPS = "train 0; train 1; train 2"
SHORT = {"HALF": "SHARD_GRAD_OP", "WHOLE": "NO_SHARD"}


def _argument(word: str) -> Any:
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return SHORT.get(word, word)


def actions(text: str) -> tuple[Action, ...]:
    lines = (part.split() for part in text.split(";") if part.strip())
    return tuple((name, *map(_argument, words)) for name, *words in lines)


def _fields(words: list[str]) -> dict[str, Any]:
    """Values by name; a word alone is True."""
    pairs = (word.partition("=") for word in words)
    return {name: _argument(value) if equal else True for name, equal, value in pairs}


def _parts(words: list[str]) -> tuple[Part, ...]:
    """Take the parts up to a closing bracket out of ``words``."""
    found = [Part(core=words.pop(0))] if words else []
    while words and (word := words.pop(0)) != ")":
        if word == "+":
            found.append(Part(core=words.pop(0)))
        elif word == "(":
            found[-1] = replace(found[-1], children=_parts(words))
        else:
            found[-1] = replace(found[-1], **_fields([word]))
    return tuple(found)


def program(text: str) -> Program:
    """Read a program without choices."""
    tree, script, options = (f"{text}||".split("|"))[:3]
    root, colon, below = tree.rpartition(":")
    (top,) = _parts((root if colon else "linear").split())
    children = _parts(re.findall(r"[()+]|[^\s()+]+", below))
    more = _fields(options.split())
    width, seed = more.pop("width", 4), more.pop("seed", 0)
    done = actions(script.replace("STEPS", STEPS) if script.strip() else STEPS)
    return Program(replace(top, children=children), width, seed, Options(**more), done)


def programs(text: str) -> list[Program]:
    """Read the programs of a text, one a line; a line that is indented goes on."""
    found = []
    for line in re.sub(r"\n\s+", " ", dedent(text).strip()).split("\n"):
        fixed, choices = re.split(r"\{.*?\}", line), re.findall(r"\{(.*?)\}", line)
        for chosen in product(*(choice.split("/") for choice in choices)):
            made = "".join(map("".join, zip(fixed, (*chosen, ""), strict=True)))
            found.append(program(made.replace("$1", chosen[0] if chosen else "")))
    return found


LAYOUTS = """
True backward 0; backward 0
False backward 0; backward 0 | prefetch=None
True backward 1; backward 0 | strategy=WHOLE
False backward 0 all | offload
True backward 0 all | offload low
True backward 0 all | fill
True backward 0 retain; backward 1; backward 0 | keep_full
False backward 0 no_sync; backward 0
True input_gradient 0 products; backward
False backward 0 create_graph; backward 0
True step; backward 0 | strategy=WHOLE
True unshard_unit 1 True; backward 0; backward 0 | pairs
"""


def _layout(line: str) -> Program:
    """A layout per loss, as in a GAN that computes all losses first."""
    on, _, rest = line.partition(" ")
    then, _, options = rest.partition("|")
    return program(
        f"linear (linear) | freeze_piece 1 {on != 'True'}; forward 0 input_grad;"
        f"freeze_piece 1 {on}; freeze 1; forward 0 input_grad; {then}; step; zero;"
        f"forward 1; backward | {options}"
    )


TEXT = """
# Below two others, it was shown twice and freed once.
a unit in two places is shown
    linear + linear (linear again=0) | summon 2 True; STEPS
# The record of reductions was read by the regions of after the change.
freezing after a recorded step
    linear | train 0; freeze 0; STEPS | strategy=WHOLE
a root that is called with its own output, and units by themselves
    linear call={twice/deep}: linear call=deep + linear call=reentrant + linear frozen=2
        | forward 0; forward 1; backward 0 all; alone 1 0; alone 2 1; alone 0 2; step;
        STEPS | strategy={HALF/FULL_SHARD}
a layer that keeps a list of its weights
    linear + lstm + gru | | {low strategy=FULL_SHARD/strategy=FULL_SHARD/strategy=HALF}
modules whose weights are computed, and a packed sequence
    linear + weightnorm + linear form=packed + orthogonal
weights that a unit returns
    linear + linear form=weight_too + mul form=weight_too
gradients of a shard group that wait for the replicas
    linear | forward 0; backward 0 replica; forward 1; backward; step; STEPS |
        strategy={WHOLE/HYBRID_SHARD} replicas=2
several strategies, lists of prefetches and a factor
    linear + linear + linear | prefetch forward 1 (2,3); prefetch backward 3 (2,1);
        STEPS; prefetch forward 1 (); STEPS; train 0 clip |
        second={WHOLE/HYBRID_SHARD/HALF} factor=3.0
checkpoint wrappers, and dtypes of computing and reducing
    linear + lstm | | low mix={float32/reduce/output} wrapped={reentered/recomputed}
buffers below checkpoint wrappers
    linear + batchnorm | | door=wrapper wrapped=recomputed
gradients that a hook averages
    linear + linear | | hook strategy={WHOLE/FULL_SHARD}
# Full parameters that were kept became others after the first of two backwards.
two backwards after an unshard by hand
    linear | unshard_unit 1 False; forward 0; forward 1; backward 0 twice; step; zero;
        unshard_unit 0 True; train 2
a step between forward and backward where a rank holds frozen elements alone
    plain: linear frozen=2 + custom | forward 1; forward 3; backward; step; backward 0 |
        width={1/2} block=ELEMENT apart
state that torch makes while a unit is full by hand
    linear unit= | unshard_unit 0 False; torch_get full; forward 0; backward
the first forwards of a unit are those of another module
    linear call=after_no_grad + dataclamp | forward 0 | pairs
    linear call=beside + linear form={aux_only/aux_for_loss} | | pairs
gradients of no_sync that the pull of a vjp reduces
    linear call=vjp (linear call=vjp) | forward 0; backward 0 no_sync; forward 0
a write before an error that is caught
    linear + clamp call=caught | forward 0; forward 1
an auxiliary loss on an attribute
    linear + linear form=aux_for_loss
    linear + linear form=aux_for_parent + linear
    linear + linear form=aux_only
    linear + mul form=aux_of_weights
    linear + linear form=attribute | | prefetch=None
a returned view changed in place
    linear + linear {form=view_as use=mul_/form=transpose use=iadd/form=slice use=set/
        form=chunk use=mul_view/form=view_as use=relu_/form=view use=iadd} | |
        prefetch={BACKWARD_PRE/None}
a unit called for its in-place effect
    linear + mul form=in_place
    linear + linear form=in_place | | prefetch=None
    linear + rms form=copied_in | | strategy=HALF
    linear + div form=in_place_returned
a write to an input that is cast
    linear + {tiny form=in_place/scalar form=in_place/linear form=copied_in/tiny
        form=in_place_returned} {call=reentrant/call=plain/call=caught_and_again} +
        linear | STEPS; forward 0 no_grad; forward 0 inference; forward 0 input_grad;
        backward | low {strategy=WHOLE/}
weights kept full and a fused optimizer
    linear + linear | | keep_full
        optimizer={adamw_fused/momentum_fused/adamw_single/sgd}
state that an optimizer makes in its constructor
    linear + linear | {/forward 0; backward}; torch_get {full/sharded}; torch_set; STEPS
        | optimizer=adagrad_fused early={False/True}
state that torch's functions make where ranks hold nothing
    | {/forward 0; backward; zero; step/single 0 set_grad/single 1 set_grad; step};
        torch_get {full/sharded}; torch_set; STEPS | optimizer=adamw_foreach width={2/3}
state that torch's functions make between forward and backward
    linear | forward 1; torch_get sharded; backward; step; torch_set; STEPS | seed=3
        optimizer={adamw_fused/momentum_fused/adamw_foreach/sgd}
        {/keep_full/strategy=HALF}
states of a unit with two names
    linear + linear again=0 + linear | train 0; typed_save
        {LOCAL/SHARDED/FULL}_STATE_DICT True; train 1; typed_load; STEPS |
        door={wrapper/composable}
state of other shapes where a rank holds all
    {prelu/linear}: | {/forward 0; backward}; step; summon 0 False True | width=2
        strategy={FULL_SHARD/HALF} optimizer=adagrad_fused early
a scaler and complex parameters
    complex: | train 0 {scale/unscale}
a unit that raised inside a forward, and unshard_params
    linear + linear call=caught again={None/1} | train 0; inside_summon make
a unit that needs another layout inside a transform
    plain: linear unit=both (linear unit=) + linear unit=both + ownpenalty
        call={jvp/vjp} (conv frozen=1) | freeze_all True; train 2 | width=5
        strategy={WHOLE/FULL_SHARD} style=auto apart groups replicas=12
a backward inside a forward, and gradients for all
    layer_norm unit=both again=0: nogradpart unit= again=2 (linear
        form=slice call=vjp unit=both dtype=float32 frozen=1 + linear form=in_place
        frozen=2) + nogradpart unit= again=2 (linear form=slice call=vjp unit=both
        dtype=float32 frozen=1 + linear form=in_place frozen=2) | freeze_piece 6 True;
        train 1 | width=2 seed=3 strategy=HALF prefetch=BACKWARD_POST forward_prefetch
        block=ELEMENT fill methods
torch's state dicts while a unit is full by hand
    linear + linear | {/train 0}; unshard_unit 1 False; torch_get {full/sharded};
        torch_set; reshard_unit 1; STEPS | optimizer={adamw_foreach/adagrad_fused}
full parameters older than the shards
    mul: linear unit= | forward 3 input_grad; {write 0 no_grad/write 1 assign/step};
        input_gradient 2 once; forward 3 | width=5 seed=1 keep_full
        {/optimizer=adamw_fused}
    | train 0 keep; forward 0; {step/write 0 no_grad}; unshard_unit 0 {True/False};
        STEPS | strategy=HALF {/optimizer=adamw_fused}
a container that is filled
    linear + linear form={append_to_trained/set_item_of_trained/set_field/into_nested}
    linear + linear form={removed/cleared/append/set_item}
a backward that raised
    linear + linear | forward 0; backward; raise_in_backward {0/1/2} 1
        {model/all/optimizer}; STEPS
an interrupt in any layer, in forward
    linear + linear + linear call=twice | forward 0; backward; raise_in_forward 0 3
        False True; forward 1; backward; step; zero; forward 0; backward;
        raise_in_forward 1 3 False True; forward 1; backward; step; zero; forward 0;
        backward; raise_in_forward 2 3 True True; forward 1; backward; step; zero;
        forward 0; backward; raise_in_forward 3 3 False True; forward 1; backward; step;
        zero; train 2 | strategy={FULL_SHARD/HALF/WHOLE} wrapped={recomputed/}
an interrupt in any layer, in backward
    linear + linear + linear call=twice | train 0; raise_in_backward 0 3 model True;
        alone 0 1; train 1; raise_in_backward 1 3 model True; alone 1 1; train 1;
        raise_in_backward 2 3 model True; alone 2 1; train 1; raise_in_backward 3 3
        model True; alone 3 1; train 1 | strategy={FULL_SHARD/HALF/WHOLE}
        wrapped={recomputed/}
a hook of a parameter that raised, and a forward from before
    linear + onerowonly + linear | forward 1; raise_in_leaf_hooks {0/1/3} 0; backward;
        forward 2; backward; step; STEPS | strategy={WHOLE/HALF/FULL_SHARD}
writes to weights in forward
    linear + {clamp/dataclamp/normalized}
gradients of no_sync where nothing is hooked
    linear form={thunk/set_thing/late_thunk}: | forward 0; backward 0 no_sync; forward
        1; backward; step | strategy=WHOLE
a write between forward and backward
    linear + {linear/mul} | train 0 keep; forward 1; step; backward |
        strategy={FULL_SHARD/HALF} optimizer=adamw
    linear + {linear/mul} | train 0 keep; forward 1; {step/write 5 no_grad}; backward |
        strategy={FULL_SHARD/HALF}
a write by a call between forward and backward
    linear + linear | save; forward 1; {load/single 1 set_param/summon 0 True True};
        backward | strategy={FULL_SHARD/HALF/WHOLE}
    linear + linear | save; forward 1; {load/single 1 set_param/summon 0 True True};
        backward | {offload/low}
gradients that are kept
    linear + mul | train 0 keep; keep {none/odd/even/all}; forward 1; backward; swap 0
        0; forward 2; backward; step
gradients that are kept, shared and given other data
    linear + mul + mul | train 0 keep; {change_gradients provide; change_gradients
        share/change_gradients replace_data; change_gradients mul_/keep none; swap 0 1;
        change_gradients clone}; forward 1; backward; $1; zero {optimizer_zeros/even};
        forward 2; backward; keep odd; forward 1; backward; step | {offload//low
        strategy=HALF}
values of another dtype that take the place of parameters
    linear + linear | train 0; save; cast bfloat16 False; load True; STEPS |
        strategy={FULL_SHARD/WHOLE}
a first forward of whole weights inside a transform
    plain: {pow/linear} call={jvp/vjp/vmap} | {copy_aside/forward} 0; forward 0;
        backward | strategy=WHOLE apart
a first forward inside a transform
    plain: linear call=vjp | forward 0; backward; zero; step_half True; copy_aside 2 |
        width=2 seed=1 apart
a checkpoint of loaded state before a step
    | train 0; raw_round_trip; save_directory True True; STEPS | seed=1
        optimizer={adamw_fused/adamw_single}
a clip while a unit is full by hand
    linear + linear | {single 0 set_grad; single 3 set_grad/forward 0; backward};
        unshard_unit 1 False; clip 0.3 2.0 | strategy={FULL_SHARD/WHOLE}
names in a unit of several modules
    linear frozen=2: linear unit=both + linear use=detach | forward 1; backward -1
        scaled; scaled unscale; single 0 set_param; STEPS | width=2 seed=1 pairs
state of an optimizer that was made while a unit was full
    plain: linear | unshard_unit 0 False; new_optimizer adagrad_fused; torch_get sharded
        | apart
loaded state of another layout
    | freeze 7; torch_get sharded; raw_round_trip; forward 1; step | seed=2
        optimizer=adamw_single
sharded values of another layout
    | freeze 0; torch_get sharded; forward 2; torch_set
a part of a unit called apart
    linear + linear call={core/method/forward}
    linear + linear form={generator/late_thunk}
    linear + oldweightnorm form=late_thunk
    linear + linear | call_core 1 0
    oldweightnorm: | call_core 0 0 | width={2/4}
a frozen parameter with a gradient
    linear + linear | forward 0; backward; freeze_piece 1 False; clip 0.1; step
unused parameters and the gradient of the input
    linear + linear | train 0; forward 1 input_grad; input_gradient 0 once; step; STEPS
        | fill optimizer=adamw
a result in a function
    {tensor_hook/mul} form=thunk:
    linear + tensor_hook form=thunk + linear | | prefetch={BACKWARD_PRE/None}
a result that nobody sees
    linear + {mul/div/pow/prelu/rms/linear} {form=set_thing/form=thunk} | train 0 |
        prefetch={BACKWARD_PRE/None}
    linear + custom form={set_thing/thunk} | train 0
a cast where a rank holds nothing
    linear + {tiny/scalar/zero} | train 0; cast {bfloat16 False/float32 True}; STEPS
a parameter that is frozen after a cast
    mul: tiny unit= | train 0; cast bfloat16 False; freeze {0/1}; STEPS; freeze_all
        True; STEPS | width=10 block=ELEMENT strategy={FULL_SHARD/HALF}
forward mode inside reverse mode
    linear + linear call=vjp ({mul/linear} call=jvp) | | offload
    linear + linear call=vjp ({mul/linear} call=jvp) | | strategy={FULL_SHARD/HALF}
other data where a rank holds nothing
    linear + {tiny/scalar/zero} | train 0; write 0 assign; write 1 assign; write 2
        assign; write 3 assign; write 4 assign; STEPS | {keep_full
        strategy=FULL_SHARD/keep_full strategy=HALF/}
changes where a rank holds nothing, and what ranks send
    tiny (scalar unit= + tiny) | train 0; {cast float32 True; train 0/forward 0;
        backward 0 no_sync; write 2 assign}; STEPS | strategy=HALF
        door={composable/wrapper}
    tiny (scalar unit= + tiny) | train 0; train 0; write 3
        {assign/same_address/no_grad}; train 0; STEPS | strategy=HALF keep_full
        door={composable/wrapper}
    tiny (scalar unit= + tiny) | train 0; save; load True; train 0; typed_save
        FULL_STATE_DICT False; STEPS | strategy=HALF door={composable/wrapper}
several backwards through one graph
    linear + {linear/mul/layer_norm} | forward 0 input_grad; input_gradient 0
        {products/product_and_backward/penalty}; STEPS | prefetch={BACKWARD_PRE/None}
a parameter that is frozen before backward, and gradients for all
    linear + {linear/spectralnorm} | forward 0; freeze_piece {0/1/2} False; backward;
        step; STEPS | fill optimizer=adamw
a parameter that is frozen before backward
    linear + {linear/tiny} | STEPS; forward 0; freeze 0; backward; step; STEPS; freeze
        0; STEPS | optimizer=adamw strategy={FULL_SHARD/WHOLE}
a step after requires_grad was flipped
    linear + linear | step; freeze 0; forward 0; step
other data before a backward that does not come
    | forward 0; write {0/1} assign; save; STEPS | strategy={FULL_SHARD/HALF}
other data before unshard
    | train 0; {write 0 assign/cast float32 False}; unshard_unit 0 {False/True}; save;
        reshard_unit 0; STEPS
a hook on an output that reads weights
    linear + tensor_hook form=tensor use=take
    linear + tensor_hook form=pair use=residual | | prefetch=None
    linear + tensor_hook form=view_as use=mul_ | | prefetch=None
a part of a unit that is full by hand, after a step
    linear + linear | forward 0; backward; unshard_unit 0 False; unshard_unit 1 False;
        unshard_unit 2 False; step; call_core {0/1} 0; STEPS |
        optimizer={adamw_fused/adamw_single/sgd} strategy={FULL_SHARD/HALF}
a whole unit's part called apart
    linear + linear call={core/method/forward} | | strategy=WHOLE
a unit that writes its weights, with a module inside a transform
    linear call={jvp/vjp/vmap} + {dataclamp/clamp} | forward 0; forward 0; backward;
        save | pairs
a wire format inside a transform, and parameters that leave their region
    linear call={jvp/vjp/vmap} + linear | forward 0; backward; freeze 1; STEPS | wire
gradients to which a backward adds nothing
    linear (linear unit= call=skip) | forward 0; backward; forward 1; backward; forward
        2; backward; forward 3; backward; step | offload
a weight in channels_last, in a slot
    linear + images | | arena={shared/apart}
a nap before a step, after a backward and around a load
    linear + linear | nap gradients; save; forward 0; backward; nap gradients; load;
        step; nap none; train 0; step | optimizer=adamw door={composable/wrapper}
memory that a program keeps, exchanges, flattens and puts back
    linear + mul + tiny | train 0; memory keep; memory new; train 1; memory restore;
        train 2; memory drop; train 1 | strategy={FULL_SHARD/HALF door=wrapper/WHOLE}
    linear + mul + mul | train 0; memory flatten; train 1; memory write; summon 0 True;
        train 2; memory exchange; train 0; memory exchange; forward 0 inference |
        strategy={HALF/WHOLE/FULL_SHARD}
    linear + mul | train 0; memory flatten; save; load; memory drop; forward 0
        inference; train 1; save; memory keep; load True; memory write; train 2 |
        strategy={HALF/WHOLE/FULL_SHARD}
    linear + mul | train 0; memory keep; memory swap; memory write; train 1; memory
        empty; cast float32 True; train 2 | strategy={HALF/WHOLE/FULL_SHARD}
    linear + mul | forward 0; backward; memory new; forward 1; backward; forward 2
        {inference/on_meta}; step; train 0 | door={wrapper/composable}
    mul: mul + mul | train 0; memory keep; memory new; train 0; memory write; memory
        exchange; train 1; memory restore; memory flatten; train 2 | width=70001
        door={wrapper/composable}
an optimizer over flat parameters
    linear + tiny + zero + scalar | train 0; train 1 clip; train 2 keep accumulate;
        optimizer_round_trip; STEPS | flat optimizer={momentum/adamw door=wrapper
        strategy=WHOLE/adamw strategy=HALF}
    linear + tiny + zero + linear frozen=1 | train 0; train 1 clip; save; train 2; load;
        STEPS | flat {optimizer=adamw low/optimizer=momentum low mix=reduce
        strategy=HALF/optimizer=adamw offload strategy=HALF}
optimizers and full parameters
    linear + linear | inside_summon {make/step}
"""
EXAMPLES = {
    "backward of a forward from before parameters were frozen or unfrozen": [
        _layout(line) for line in LAYOUTS.strip().split("\n")
    ]
}
for block in re.split(r"\n(?=\S)", TEXT.strip()):
    title, _, lines = block.partition("\n")
    if lines:
        EXAMPLES[title] = programs(lines)

ON_THREE = {
    "a parameter that is frozen after a cast",
    "an optimizer over flat parameters",
    "backward of a forward from before parameters were frozen or unfrozen",
    "state that torch's functions make where ranks hold nothing",
    "a scaler and complex parameters",
    "state of other shapes where a rank holds all",
    "loaded state of another layout",
    "changes where a rank holds nothing, and what ranks send",
}
"""On two ranks some were right: a parameter has to cover the whole part of one."""
EVERY_DAY = {
    "an optimizer over flat parameters",
    "memory that a program keeps, exchanges, flattens and puts back",
} | {f"an interrupt in any layer, in {where}" for where in ("forward", "backward")}
"""Of which all programs run each day."""
