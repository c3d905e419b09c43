"""Find which modules of a Hugging Face model are blocks, routed experts and routers. No code per model family.

transformers 5 exposes the routed experts of some 64 families through one interface: a module class decorated with
`use_experts_implementation`, called as `experts(hidden_states, top_k_index, top_k_weights)`, that holds 3-D parameters
and flags (gated, transposed, biased, ...). Experts of the same maths without that interface are recognised by their
shapes and the arguments of their forward. So are mixtures without any such module, whose router sorts rows for two
stacks of matrices. introspection/small_copies.py proves that the maths is the same. Everything here works on models on
meta, and refuses by name what it does not recognise: nothing is sharded on a guess.

Blocks are also grouped by kind (`group_by_kind`, `settings`), so that one of each can be run for its group.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from expertmesh.compat import child_slots, declared
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import ModelView, is_adapter

# What attention is called with beside hidden states, where keys or values have hidden states of their own.
HIDDEN_OF_KEYS = frozenset({"key_hidden_states", "value_hidden_states"})
_DISTINGUISHING = ("layer_type", "attention_type", "sliding_window")
_NUMBERS = ("layer", "idx", "index")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """One experts module: where it is and how its parameters are laid out."""

    name: str
    """The module's name in the model."""
    num_experts: int
    """The number of experts, of all ranks."""
    hidden_size: int
    """The width of a token."""
    intermediate_size: int
    """The width of one expert's activation."""
    gated: bool
    """True if gate and up are fused in `up`."""
    transposed: bool
    """True if parameters are `[E, in, out]`."""
    biased: bool
    """True if there are biases `[E, 2I]` and `[E, H]`."""
    up: str
    """Name of the parameter that maps hidden to intermediate: `[E, 2I, H]` when gated, transposed `[E, H, 2I]`."""
    down: str
    """Name of the parameter that maps back: `[E, H, I]`, transposed `[E, I, H]`."""
    top_k: int | None
    """None if the model does not give it."""
    post_norm: bool = False
    """True if each expert's output passes the module's `post_expert_norm` before the routing weight; one norm for all
    experts."""
    flat_gate: str | None = None
    """The gate's name, if gate, up and down are apart and each is flattened to `[E * I, H]`."""
    router: str | None = None
    """Name of the module that gives a "sorted" call the order of pairs by expert, the token and the weight of each pair
    in it, and a list of their counts."""
    call: Literal["interface", "pairs", "dense", "sorted"] = "interface"
    """Call of the experts by their block. "interface": by transformers' own. "pairs": the same arguments without it.
    "dense": one row per (expert, token), weighted already, zero where the token did not choose the expert. "sorted":
    the module is the full mixture, called with hidden states; `up` and `down` are modules with one parameter each."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters with one slice per expert, relative to the module. A norm's are dense."""
        if self.flat_gate is not None:
            return (self.flat_gate, self.up, self.down)
        return (self.up, self.down, f"{self.up}_bias", f"{self.down}_bias") if self.biased else (self.up, self.down)

    @property
    def holders(self) -> tuple[str, ...]:
        """The full names of the modules that hold `up` and `down`, and the adapters on them."""
        places = (f"{self.name}.{parameter}".rpartition(".")[0] for parameter in (self.up, self.down))
        return tuple(dict.fromkeys(places))


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The names of the parts of a model, in module order."""

    blocks: tuple[str, ...]
    """Decoder blocks, those of other towers included."""
    experts: tuple[ExpertsSpec, ...]
    """The modules with routed experts."""
    routers: tuple[str, ...]
    """Names of the routers."""
    shared_experts: tuple[str, ...]
    """Names of the shared experts."""

    @property
    def num_experts(self) -> int:
        """The number of experts per MoE layer; every layer has the same number (`describe` checks it)."""
        return self.experts[0].num_experts

    @property
    def sorting_routers(self) -> tuple[str, ...]:
        """All routers of a model whose mixtures sort their rows, including those of mixtures in its attention."""
        return self.routers if any(spec.router is not None for spec in self.experts) else ()

    def is_expert_parameter(self, name: str) -> bool:
        """Return whether `name` is a parameter with one slice per expert."""
        return any(name.removeprefix(f"{spec.name}.") in spec.parameters for spec in self.experts)


def decoder_blocks(anatomy: Anatomy) -> list[str]:
    """Return the blocks of the module list that holds the experts (a vision tower has other blocks)."""
    stack = anatomy.experts[0].name
    lists = {block.rpartition(".")[0] for block in anatomy.blocks if is_inside(stack, block)}
    return [block for block in anatomy.blocks if block.rpartition(".")[0] in lists]


def names_without_blocks(names: Iterable[str]) -> str:
    """Return names of parameters for a printed line: equal names of different blocks once, without their block."""
    return ", ".join(dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in names))


def is_inside(name: str, *modules: str) -> bool:
    """Return whether `name` is a module or parameter of any of `modules`, at any depth."""
    return name.startswith(tuple(f"{module}." for module in modules))


def is_within(name: str, *modules: str) -> bool:
    """Return whether `name` is one of `modules`, or inside of any of them."""
    return name in modules or is_inside(name, *modules)


def is_classifier(model: nn.Module) -> bool:
    """Return whether the head is a sequence classifier's, with one row of logits for each sequence."""
    return isinstance(model, GenericForSequenceClassification)


def head_of(model: nn.Module) -> Any:
    """Return the module behind the base model: a classifier's `score`, else the output embedding; None without one."""
    if is_classifier(model):
        return child_slots(model)["score"]
    get_head: Any = model.get_output_embeddings
    return get_head()


def dense_linears(model: nn.Module, anatomy: Anatomy) -> Iterator[str]:
    """Return the names of the linear layers in the blocks of `model`, of all its pipeline stages.

    These are the linears of attention, dense MLPs and shared experts, not of routers. A gate of one row is left out: it
    is too small for scales.
    """
    for name, module in ModelView(model).full.named_modules():
        routes = is_within(name, *anatomy.routers)
        inside = is_inside(name, *anatomy.blocks)
        if isinstance(module, nn.Linear) and inside and not routes and module.out_features > 1:
            yield name


def packable_linears(model: nn.Module, anatomy: Anatomy) -> Iterator[str]:
    """Return those of `dense_linears` whose layer computes `F.linear` with their weight and nothing else.

    Fused kernels of state-space layers take weights as they are, so their linears are left out, and so is what a family
    keeps in fp32 in any compute dtype.
    """
    full = ModelView(model).full
    uses = Counter(id(parameter) for _, parameter in full.named_parameters(remove_duplicate=False))
    in_fp32 = {*declared(full, "_keep_in_fp32_modules"), *declared(full, "_keep_in_fp32_modules_strict")}
    for name in dense_linears(model, anatomy):
        module, parent = full.get_submodule(name), full.get_submodule(name.rpartition(".")[0])
        # This package and FSDP2 put classes in front of a module's own.
        in_front = ("expertmesh.", "torch.distributed.")
        kind = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(in_front))
        stays = any(map(carries_state, (parent, *parent.children()))) or not in_fp32.isdisjoint(name.split("."))
        # A tied weight is the embedding's too, which looks up rows.
        if kind is nn.Linear and not stays and uses[id(module.weight)] == 1:
            yield name


def carries_state(module: nn.Module) -> bool:
    """Return whether the module is a linear attention, a state-space layer, or a convolution inside of one."""
    parameters = {leaf for leaf, _ in module.named_parameters(recurse=False)}
    return isinstance(module, nn.Conv1d) or not parameters.isdisjoint({"A_log", "dt_bias"})


def describe(model: nn.Module) -> Anatomy:
    """Find the parts of `model`, of all its pipeline stages.

    Raises:
        InputError: A module cannot be sharded; names it, with the reason.
    """
    model = ModelView(model).full
    specs = tuple(replace(spec, top_k=spec.top_k or _top_k_of_block(model, spec)) for spec in experts_specs(model))
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not specs:
        raise InputError(f"{family}: {_why_no_experts(model)}", key="model.no-experts")
    counts = sorted({spec.num_experts for spec in specs})
    if len(counts) > 1:
        raise InputError(
            f"{family}: layers with different numbers of experts ({counts}) are not supported",
            key="model.unequal-expert-counts",
        )
    blocks = _blocks(model)
    orphans = [spec.name for spec in specs if not is_inside(spec.name, *blocks)]
    if orphans:
        raise InputError(
            f"{family}: experts module {orphans[0]} is not inside a decoder block; it cannot be sharded",
            key="model.experts-outside-blocks",
        )
    routers, shared = [], []
    for spec in specs:
        if spec.router is not None:
            # All modules of the router's class in the block: a mixture of attention's projections has another one.
            kind = type(model.get_submodule(f"{spec.name}.{spec.router}"))
            block = next(block for block in blocks if is_inside(spec.name, block))
            parts = model.get_submodule(block).named_modules(prefix=block)
            routers += [name for name, part in parts if type(part) is kind]
            continue
        prefix = spec.name.rpartition(".")[0]
        children = {
            f"{prefix}.{name}": child
            for name, child in model.get_submodule(prefix).named_children()
            if not _is_experts(child) and any(True for _ in child.parameters())
        }
        shared += [name for name in children if "shared" in name.rpartition(".")[2]]
        others = {name: child for name, child in children.items() if name not in shared}
        # By their class where that says so: some score in several steps, or score shared experts as well. Else by a
        # `[num_experts, ...]` matrix, which maps a token to one score per expert.
        named = [name for name, child in others.items() if "router" in type(child).__name__.lower()]
        matrices = {name: [p.shape for p in child.parameters() if p.dim() == 2] for name, child in others.items()}
        scoring = [name for name, shapes in matrices.items() if any(rows == spec.num_experts for rows, _ in shapes)]
        routers += named or scoring
    return Anatomy(blocks, specs, tuple(routers), tuple(shared))


def experts_specs(model: nn.Module) -> Iterator[ExpertsSpec]:
    """Yield what each experts module of `model` holds, in module order; nothing for experts in a list of modules."""
    return (experts_spec(name, module) for name, module in model.named_modules() if _is_experts(module))


def _is_experts(module: nn.Module) -> bool:
    return _has_interface(module) or _own_call(module) is not None


def _has_interface(module: nn.Module) -> bool:
    """Return whether the module's class was decorated with transformers' `use_experts_implementation`."""
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def _own_call(module: nn.Module) -> Literal["pairs", "dense", "sorted"] | None:
    """Return how experts without the interface are called, or None if these are no experts in a known form."""
    if _sorted_parts(module) is not None:
        return "sorted"
    shapes = _shapes(module)
    if not _is_fused(shapes) and not _is_flat(module, shapes):
        return None
    arguments = list(inspect.signature(module.forward).parameters)
    if arguments[1:] == ["top_k_index", "top_k_weights"]:
        return "pairs"
    return "dense" if len(arguments) == 1 and _is_fused(shapes) else None


def _is_fused(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether gate and up are in one 3-D parameter and down in another, by the names that transformers uses."""
    return set(shapes) == {"gate_up_proj", "down_proj"} and all(len(shape) == 3 for shape in shapes.values())


def _is_flat(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether there are three matrices of one shape `[E * I, H]`, with the module's own E."""
    experts = getattr(module, "num_experts", None)
    return (
        len(shapes) == 3
        and len(set(shapes.values())) == 1
        and all(len(shape) == 2 for shape in shapes.values())
        and isinstance(experts, int)
        and all(shape[0] % experts == 0 for shape in shapes.values())
    )


def _sorted_parts(module: nn.Module) -> tuple[str, str, str] | None:
    """Return the names of router, up and down of a mixture whose router sorts rows by expert; None for all others.

    Such a module has two children with a stack of matrices each, `[E, 2I, H]` and `[E, H, I]`, which are called with
    rows and their counts, one other child, and at most a bias.
    """
    stacks = {name: child for name, child in module.named_children() if _is_stack(child)}
    if len(stacks) != 2:
        return None
    others = [
        name for name, child in module.named_children() if name not in stacks and any(True for _ in child.parameters())
    ]
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if len(others) != 1 or not parameters <= {"bias"} or len(inspect.signature(module.forward).parameters) != 1:
        return None
    for (up_name, up_stack), (down_name, down_stack) in permutations(stacks.items()):
        ((up_leaf, up),), ((down_leaf, down),) = _shapes(up_stack).items(), _shapes(down_stack).items()
        if up == (down[0], 2 * down[2], down[1]):
            return others[0], f"{up_name}.{up_leaf}", f"{down_name}.{down_leaf}"
    return None


def _is_stack(module: nn.Module) -> bool:
    """Return whether it holds one matrix for each expert, `[E, out, in]`, and is called with rows and their counts."""
    shapes = [p.shape for name, p in module.named_parameters(recurse=False) if not is_adapter(name)]
    if len(shapes) != 1 or len(shapes[0]) != 3 or len(_shapes(module)) != 1:
        return False
    return len(inspect.signature(module.forward).parameters) == 2


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return parameters and buffers by their names in the module, without adapters."""
    state = module.state_dict(keep_vars=True)
    return {name: tuple(tensor.shape) for name, tensor in state.items() if not is_adapter(name)}


def experts_spec(name: str, module: nn.Module) -> ExpertsSpec:
    """Return what one experts module holds and how it is called.

    Raises:
        InputError: Its parameters do not fit together.
    """
    if _has_interface(module):
        return _fused_spec(name, module, bool(module.has_gate), bool(module.is_transposed), bool(module.has_bias))
    call, shapes = _own_call(module), _shapes(module)
    assert call is not None
    if (parts := _sorted_parts(module)) is not None:
        router, up, down = parts
        experts, hidden, width = shapes[down]
        top_k = getattr(module.get_submodule(router), "top_k", None)
        return ExpertsSpec(
            name, experts, hidden, width, True, False, False, up, down, top_k, router=router, call="sorted"
        )
    if _is_flat(module, shapes):
        gate, up, down = shapes  # in the order of definition, which the check on a small copy confirms
        rows, hidden = shapes[down]
        count: int = module.num_experts  # type: ignore[assignment]
        spec = ExpertsSpec(name, count, hidden, rows // count, True, False, False, up, down, _top_k(module))
        return replace(spec, flat_gate=gate, call=call)
    (up_experts, _, up_columns), (down_experts, down_rows, _) = shapes["gate_up_proj"], shapes["down_proj"]
    if up_experts != down_experts:
        raise _unsupported(
            f"{name}: gate_up_proj holds {up_experts} experts and down_proj {down_experts}, so a share of the one is "
            "not the share of the other that belongs to it; such experts are not supported (published files have no "
            "weights for identity experts: where the class has places for these, transformers cannot read them either)"
        )
    # `[E, 2I, H]` and `[E, H, I]`; never both ways, as 2I is not I.
    transposed = up_columns != down_rows
    return replace(_fused_spec(name, module, gated=True, transposed=transposed, biased=False), call=call)


def _fused_spec(name: str, module: nn.Module, gated: bool, transposed: bool, biased: bool) -> ExpertsSpec:
    """Return the layout of experts in 3-D parameters. Raises `InputError` if their shapes do not fit together."""
    up, down = ("gate_up_proj" if gated else "up_proj"), "down_proj"
    post_norm = bool(getattr(module, "has_post_expert_norm", False))
    # Sizes follow when they are known to be there.
    spec = ExpertsSpec(name, 0, 0, 0, gated, transposed, biased, up, down, _top_k(module), post_norm)
    present = {parameter for parameter, _ in module.named_parameters() if not is_adapter(parameter)}
    present |= {buffer for buffer, _ in module.named_buffers()}
    present -= {leaf for leaf in present if post_norm and leaf.startswith("post_expert_norm.")}
    if odd := sorted(present ^ set(spec.parameters)):
        raise _unsupported(f"{name}: experts with parameters {odd} beside {list(spec.parameters)} are not supported")
    shape = tuple(module.get_parameter(down).shape)
    if len(shape) != 3:
        raise _unsupported(f"{name}.{down}: experts must be 3-D [experts, out, in], got shape {shape}")
    num_experts, hidden, intermediate = shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    width = 2 * intermediate if gated else intermediate
    expected = (num_experts, hidden, width) if transposed else (num_experts, width, hidden)
    if (found := tuple(module.get_parameter(up).shape)) != expected:
        raise _unsupported(f"{name}.{up}: expected shape {expected}, got {found}")
    return replace(spec, num_experts=num_experts, hidden_size=hidden, intermediate_size=intermediate)


def _unsupported(problem: str) -> InputError:
    return InputError(problem, key="model.unsupported-expert-parameters")


def _top_k(module: nn.Module) -> int | None:
    """Return how many experts a token gets, by the names that configurations use; None if they do not say."""
    config = getattr(module, "config", None)
    for key in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token", "top_k"):
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None


def _top_k_of_block(model: nn.Module, spec: ExpertsSpec) -> int | None:
    """Return the top-k of experts without a config, as the block around them or its router has it."""
    block = model.get_submodule(spec.name.rpartition(".")[0])
    for module in (block, *block.children()):
        if isinstance(value := getattr(module, "top_k", None), int):
            return value
    return None


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the repeated layers in a module list that the family itself declares unsplittable."""
    classes = set(declared(model, "_no_split_modules"))
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            # FSDP2 puts a class of its own in front.
            kinds = [{kind.__name__ for kind in type(layer).__mro__} for layer in module]
            names += [f"{name}.{index}" for index, layer_kinds in enumerate(kinds) if classes & layer_kinds]
    return tuple(names)


def _why_no_experts(model: nn.Module) -> str:
    """Return the reason why `model` has no experts that are known, by the modules that look like some."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            kind = type(module[0]).__name__ if len(module) else "nothing"
            return f"{name} is a list of {kind} modules, not transformers' fused experts interface; it is not supported"
    for name, module in model.named_modules():
        if "conv" not in name and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            arguments = ", ".join(inspect.signature(module.forward).parameters)
            return (
                f"{name} ({type(module).__name__}) is called with ({arguments}), and experts can be sharded only if "
                "they are called with the tokens, the experts chosen for each and their weights; it is not supported"
            )
    return "no routed experts found; only Mixture-of-Experts models with transformers' experts interface can be trained"


def group_by_kind(
    model: nn.Module, blocks: Sequence[str], kind: Callable[[str], Hashable] = lambda name: ()
) -> list[list[str]]:
    """Group the names `blocks` by kind, as `kind` tells it beside `block_kind`; groups are in the order of their first
    block.
    """
    groups: dict[Hashable, list[str]] = {}
    for name in blocks:
        groups.setdefault((block_kind(model.get_submodule(name)), kind(name)), []).append(name)
    return list(groups.values())


def block_kind(block: nn.Module) -> Hashable:
    """Return a value that is equal for blocks of equal cost."""
    kinds = [str(getattr(part, what, "")) for part in (block, *block.children()) for what in _DISTINGUISHING]
    shapes = [(name, parameter.shape, parameter.requires_grad) for name, parameter in block.named_parameters()]
    return type(block).__name__, tuple(kinds), tuple(shapes)


def settings(block: nn.Module) -> Hashable:
    """Return all plain settings of a block's modules except the layer number: equal for blocks whose code does the
    same.
    """
    return tuple(
        (name, type(part).__name__, key, value)
        for name, part in block.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, _PLAIN) and not (type(value) is int and any(word in key for word in _NUMBERS))
    )
