"""Drawing programs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from property_tests.program_cores import CORES
from property_tests.program_forms import FORMS
from property_tests.program_model import CALLS, USES
from property_tests.program_recipes import Action, Options, Part, Program
from property_tests.program_side import OPTIMIZERS

INDEX = st.integers(0, 7)
BATCH = st.integers(0, 3)
ON = st.booleans()
AHEAD = st.lists(INDEX, max_size=3).map(tuple)


def often(first: str, words: list[str]) -> st.SearchStrategy[str]:
    return st.one_of(st.just(first), st.sampled_from(words))


def parts(below: st.SearchStrategy[tuple[Part, ...]]) -> st.SearchStrategy[Part]:
    """Draw one part with children from ``below``."""
    return st.builds(
        Part,
        core=often("linear", list(CORES)),
        form=often("tensor", list(FORMS)),
        call=often("plain", list(CALLS)),
        use=often("take", list(USES)),
        children=below,
        unit=st.sampled_from(["piece", "piece", "", "core", "both"]),
        dtype=st.sampled_from(["float64"] * 12 + ["float32", "bfloat16"]),
        frozen=st.sampled_from([0, 0, 0, 1, 2]),
        again=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 3)),
    )


def roots() -> st.SearchStrategy[Part]:
    """Draw a tree of at most three levels."""
    leaves = parts(st.just(()))
    middle = parts(st.lists(leaves, max_size=2).map(tuple))
    top = st.lists(st.one_of(leaves, middle), min_size=1, max_size=3).map(tuple)
    return parts(top)


STRATEGIES = [
    *["FULL_SHARD"] * 4,
    *["SHARD_GRAD_OP", "NO_SHARD"] * 2,
    *["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
]


def options() -> st.SearchStrategy[Options]:
    """Draw how units are sharded."""
    return st.builds(
        Options,
        strategy=st.sampled_from(STRATEGIES),
        door=st.sampled_from(["composable", "wrapper"]),
        style=st.sampled_from(["manual", "auto"]),
        prefetch=st.sampled_from(["BACKWARD_PRE", None, "BACKWARD_POST"]),
        forward_prefetch=ON,
        offload=st.sampled_from([False, False, False, True]),
        limit=ON,
        block=st.sampled_from(["ROW", "ELEMENT", "TENSOR", "rows(3)"]),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        early=st.sampled_from([False, False, True]),
        keep_full=st.sampled_from([False, False, False, True]),
        pairs=st.sampled_from([False, False, False, True]),
        apart=st.sampled_from([False, False, False, True]),
        fill=st.sampled_from([False, False, False, True]),
        replicas=st.sampled_from([1, 2, 12]),
        low=st.sampled_from([False] * 7 + [True]),
        mix=st.sampled_from(["compute", "float32", "reduce", "output"]),
        wrapped=st.sampled_from([""] * 6 + ["recomputed", "reentered"]),
        wire=st.sampled_from([False, False, False, True]),
        arena=st.sampled_from(["", "", "shared", "apart"]),
        methods=st.sampled_from([False, False, False, True]),
        groups=st.sampled_from([False, False, False, True]),
        second=st.sampled_from(["", "", "", *STRATEGIES]),
        hook=st.sampled_from([False] * 7 + [True]),
        factor=st.sampled_from([0.0] * 7 + [3.0]),
    )


def _action(name: str, *arguments: object) -> st.SearchStrategy[Action]:
    return st.tuples(
        st.just(name),
        *(
            a if isinstance(a, st.SearchStrategy) else st.sampled_from(list(a))  # type: ignore[call-overload]  # lists of words
            for a in arguments
        ),
    )


HOOKS = ["scale", "in_place", "input", "input_in_place", "gradient", "output_gradient"]
CHANGES = ["mul_", "assign", "clone", "zero", "provide", "replace_data", "share"]
BACKWARDS = [
    *["plain"] * 4,
    "retain",
    "all",
    "twice",
    "no_sync",
    "replica",
    "output",
    "create_graph",
    "input_alone",
    "half",
]


def actions() -> st.SearchStrategy[list[Action]]:
    """Draw what a script does; often whole steps, so that it gets somewhere."""
    forwards = ["train", "train", "input_grad", "input_grad"]
    forwards += ["no_grad", "inference", "evaluation", "on_cpu", "anomaly"]
    clears = ["optimizer", "model", "all"]
    train = st.one_of(
        _action("train", BATCH),
        _action("train", BATCH, ["clip"]),
        _action("train", BATCH, ["keep", "accumulate"]),
        _action("train", BATCH, ["scale", "unscale", "infinite"]),
    )
    step = [
        _action("forward", BATCH, forwards),
        _action("forward", BATCH, forwards),
        _action("backward", st.integers(-1, 2), BACKWARDS),
        _action("backward", st.integers(-1, 2), BACKWARDS),
        _action("step"),
        _action("zero", [*clears, "optimizer_zeros", "model_zeros", "odd", "even"]),
    ]
    graph = [
        _action(
            "input_gradient",
            INDEX,
            ["once", "retain", "penalty", "products", "product_and_backward"],
        ),
        _action("raise_in_forward", INDEX, BATCH, ON),
        _action("raise_in_backward", INDEX, BATCH, clears),
        _action("collect"),
    ]
    gradients = [
        _action("clip", [0.3, 1e3], [2.0, 1.0, float("inf")]),
        _action("keep", ["none", "all", "odd", "even"]),
        _action("change_gradients", CHANGES),
        _action("swap", INDEX, INDEX),
        _action("leaf_hook", INDEX, ["tensor", "post"]),
    ]
    parameters = [
        _action("freeze", INDEX),
        _action("freeze_piece", INDEX, ON),
        _action("write", INDEX, ["no_grad", "data", "assign", "copy", "foreach"]),
        _action("cast", ["float32", "bfloat16", "float64"], ON),
        _action("copy_model", ON),
        _action("copy_aside", BATCH),
        _action("freeze_all", ON),
        _action("mode", ON),
        _action("step_half", ON),
        _action("nap", ["gradients", "none"]),
        _action("new_optimizer", list(OPTIMIZERS)),
    ]
    states = [
        _action("save"),
        _action("load"),
        _action("load", ON),
        _action("module_hook", INDEX, HOOKS),
        _action("optimizer_round_trip"),
        _action("summon", INDEX, ON, ON),
        _action("inside_summon", ["make", "step"]),
        _action("unshard_unit", INDEX, ON),
        _action("reshard_unit", INDEX),
        _action("setting", ["after_backward", "after_forward"], INDEX, ON),
        _action("prefetch", ["forward", "backward"], INDEX, AHEAD),
        _action("sync", ON),
        _action("fill", ON),
        _action("call_core", INDEX, BATCH),
        _action("alone", INDEX, BATCH),
    ]
    single = ["get_param", "set_param", "get_grad", "set_grad", "no_grad", "get_state"]
    types = ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT"]
    back = [
        _action("single", INDEX, single),
        _action("single", INDEX, single),
        _action("save_directory", ON, ON),
        _action("load_directory"),
        _action("torch_get", ["full", "sharded"]),
        _action("torch_set"),
        _action("typed_save", types, ON),
        _action("typed_load"),
        _action("raw_round_trip"),
    ]
    groups = (step, graph, gradients, parameters, states, back)
    kinds = [st.one_of(group) for group in groups]
    return st.lists(st.one_of(train, *kinds), min_size=1, max_size=10)


READING = ("weight_too", "aux_of_weights")
"""Forms that read parameters of the core."""


def legal(part: Part) -> Part:
    """The nearest part in which nobody reads the parameters of a unit below.

    Sharded parameters are plain tensors; what reads them outside their unit sees this
    rank's part, and nothing can notice it.
    """
    children = []
    for child in map(legal, part.children):
        made = child
        if child.use in ("weight", "penalty") and (child.again or _has_unit(child)):
            made = replace(child, use="take")
        children.append(made)
    unit = part.unit
    if part.form in READING and unit in ("core", "both"):
        unit = "piece"
    return replace(part, children=tuple(children), unit=unit)


def _has_unit(part: Part) -> bool:
    return (
        part.unit != "" or part.again is not None or any(map(_has_unit, part.children))
    )


def programs() -> st.SearchStrategy[Program]:
    """Draw a program; shrinks to one step of a linear layer."""
    drawn = st.builds(
        Program,
        root=roots(),
        width=st.sampled_from([4, 2, 3, 5]),
        seed=st.integers(0, 3),
        options=options(),
        actions=actions().map(tuple),
    )
    return drawn.map(possible)


def possible(program: Program) -> Program:
    """The nearest program that torch can run, and whose names are those of a plain one.

    ``p.data = ...`` under ``torch.func`` crashes the process. A fused optimizer
    raises for complex parameters, where a rank has some. A hook on a view that was
    written to may crash the process.
    """
    words = program.words()
    # A backward that does not reach a root leaves its gradients of ``no_sync``.
    if "call:skip" in words and LOCAL & words:
        program = replace(program, options=replace(program.options, apart=False))
    if program.options.apart:
        program = _apart(program)
    program = replace(program, root=legal(program.root))
    options = program.options
    # A recomputation that checkpoint stops early leaves the other data in its place.
    stopped = {*FUNCTIONAL, "call:checkpoint"}
    if stopped & program.words() and "core:quantized" in program.words():
        program = replace(program, root=_without(program.root, "quantized"))
    if WRITING & program.words():
        program = replace(program, root=_unhooked(program.root))
    if FUSED & program.words():
        program = replace(program, root=_without(program.root, "complex"))
        # Torch's fused SGD reads momentum that is not there yet for 16 and more
        # elements of bfloat16.
        if "dtype:bfloat16" in program.words():
            options = replace(options, optimizer="momentum")
    if options.door == "wrapper" and program.words() >= UNLIKE_WRAPPER:
        options = replace(options, door="composable")
    # A ``forward`` that is called as a method is refused, unless it only calls methods
    # that gather: then the weights that it reads itself are this rank's part.
    if "call:forward" in program.words():
        options = replace(options, methods=False)
        # A hook that reads a weight itself needs the unit to be gathered for backward.
        program = replace(program, root=_without(program.root, "tensor_hook"))
    if options.low and UNLIKE_LOW & program.words():
        options = replace(options, low=False)
    # A wrapper has other names, and functions of torch.func see it, or its caches.
    if {*FUNCTIONAL, "core:quantized"} & program.words():
        options = replace(options, wrapped="")
    if options.door == "wrapper" or "argument:replica" in program.words():
        options = replace(options, second="")
    if options.hook:  # which sums over one group, and divides as it likes
        options = replace(options, factor=0.0)
        if "HYBRID" in options.strategy + options.second:
            options = replace(options, strategy="FULL_SHARD", second="")
    return replace(program, options=options)


def _apart(program: Program) -> Program:
    """Children of the root as roots: all that is trained is in them."""
    options = replace(program.options, door="composable", pairs=False)
    children = tuple(
        replace(child, unit="both" if child.unit in ("core", "both") else "piece")
        for child in map(_unshared, program.root.children)
    )
    root = replace(program.root, core="plain", children=children, unit="piece")
    return replace(program, root=root, options=options)


def _unshared(part: Part) -> Part:
    children = tuple(map(_unshared, part.children))
    return replace(part, again=None, children=children)


UNLIKE_LOW = {
    *("dtype:float32", "dtype:bfloat16", "form:partly"),
    *("core:batchnorm", "core:buffered", "core:spectralnorm", "core:complex"),
    *("core:quantized", "option:apart", "call:core", "form:late_thunk"),
}
"""What has dtypes of its own, or takes a decision by the last bits."""
UNLIKE_WRAPPER = {"call:forward", "action:module_hook"}
"""``forward`` of a wrapper, as FSDP1's, calls the module and with it its hooks."""
LOCAL = {f"argument:{how}" for how in ("no_sync", "replica", "accumulate")} | {
    "action:sync"
}
WRITING = {f"use:{use}" for use in ("set", "mul_", "mul_view", "iadd", "relu_")}
FUSED = {
    f"{kind}:{name}"
    for name, (_, settings) in OPTIMIZERS.items()
    if settings.get("fused")
    for kind in ("option", "argument")
}
FUNCTIONAL = {"call:jvp", "call:vjp", "call:vmap"}


def _without(part: Part, *cores: str) -> Part:
    children = tuple(_without(child, *cores) for child in part.children)
    kept = "linear" if part.core in cores else part.core
    return replace(part, core=kept, children=children)


def _unhooked(part: Part) -> Part:
    use = "take" if part.use == "hook" else part.use
    return replace(part, use=use, children=tuple(map(_unhooked, part.children)))
