"""Which modules of a Hugging Face model are blocks, routed experts and routers. No code per model family.

transformers 5 exposes routed experts of some 64 families through one interface: a module class decorated with
`use_experts_implementation`, called as `experts(hidden_states, top_k_index, top_k_weights)`, that holds 3-D
parameters and flags (gated, transposed, biased, ...). Everything here reads that interface and shapes; works on
models on meta; and refuses by name what it does not recognise, so that nothing is sharded on a guess.
"""

from dataclasses import dataclass, replace

from torch import nn

from expertmesh.config.errors import InputError


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """One experts module: where it is and how its parameters are laid out.

    `up` maps hidden to intermediate (gate and up fused when `gated`): `[E, 2I, H]`, or `[E, H, 2I]` when
    `transposed`; `down` maps back: `[E, H, I]` or `[E, I, H]`. Biases are `[E, 2I]` and `[E, H]`. `post_norm`: each
    expert's output passes the module's `post_expert_norm`, one for all experts, before the routing weight.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    transposed: bool
    biased: bool
    up: str
    down: str
    top_k: int | None
    post_norm: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that hold one slice per expert, relative to the module. A norm's are dense."""
        return (self.up, self.down, f"{self.up}_bias", f"{self.down}_bias") if self.biased else (self.up, self.down)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of the parts of a model, in module order."""

    blocks: tuple[str, ...]
    experts: tuple[ExpertsSpec, ...]
    routers: tuple[str, ...]
    shared_experts: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        """Experts per MoE layer; every layer has the same number (checked by `describe`)."""
        return self.experts[0].num_experts

    def is_expert_parameter(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return any(spec.name == module and leaf in spec.parameters for spec in self.experts)


def describe(model: nn.Module) -> Anatomy:
    """Find the parts of `model`. Raises `InputError` naming the module that cannot be sharded, and why."""
    specs = tuple(experts_spec(name, module) for name, module in model.named_modules() if _has_interface(module))
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not specs:
        raise InputError(f"{family}: {_why_no_experts(model)}")
    counts = sorted({spec.num_experts for spec in specs})
    if len(counts) > 1:
        raise InputError(f"{family}: layers with different numbers of experts ({counts}) are not supported")
    blocks = _blocks(model)
    orphans = [spec.name for spec in specs if not any(spec.name.startswith(f"{block}.") for block in blocks)]
    if orphans:
        raise InputError(f"{family}: experts module {orphans[0]} is not inside a decoder block; it cannot be sharded")
    routers, shared = [], []
    for spec in specs:
        prefix = spec.name.rpartition(".")[0]
        children = {
            f"{prefix}.{name}": child
            for name, child in model.get_submodule(prefix).named_children()
            if not _has_interface(child) and any(True for _ in child.parameters())
        }
        shared += [name for name in children if "shared" in name.rpartition(".")[2]]
        others = {name: child for name, child in children.items() if name not in shared}
        # By their class where that says so: some score in several steps, or score shared experts as well.
        named = [name for name, child in others.items() if "router" in type(child).__name__.lower()]
        routers += named or [name for name, child in others.items() if _scores_experts(child, spec)]
    return Anatomy(blocks, specs, tuple(routers), tuple(shared))


def _has_interface(module: nn.Module) -> bool:
    """Whether the module's class was decorated with transformers' `use_experts_implementation`."""
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def experts_spec(name: str, module: nn.Module) -> ExpertsSpec:
    gated, biased, transposed = bool(module.has_gate), bool(module.has_bias), bool(module.is_transposed)
    up, down = ("gate_up_proj" if gated else "up_proj"), "down_proj"
    spec = ExpertsSpec(
        name=name,
        num_experts=0,
        hidden_size=0,
        intermediate_size=0,
        gated=gated,
        transposed=transposed,
        biased=biased,
        up=up,
        down=down,
        top_k=_top_k(module),
    )
    post_norm = bool(getattr(module, "has_post_expert_norm", False))
    present = {parameter for parameter, _ in module.named_parameters()}
    present |= {buffer for buffer, _ in module.named_buffers()}
    present -= {leaf for leaf in present if post_norm and leaf.startswith("post_expert_norm.")}
    if present != set(spec.parameters):
        odd = sorted(present ^ set(spec.parameters))
        raise InputError(f"{name}: experts with parameters {odd} beside {list(spec.parameters)} are not supported")
    down_EHI = module.get_parameter(down)
    if down_EHI.dim() != 3:
        raise InputError(f"{name}.{down}: experts must be 3-D [experts, out, in], got shape {tuple(down_EHI.shape)}")
    num_experts, hidden, intermediate = down_EHI.shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    width = 2 * intermediate if gated else intermediate
    expected = (num_experts, hidden, width) if transposed else (num_experts, width, hidden)
    if tuple(module.get_parameter(up).shape) != expected:
        raise InputError(f"{name}.{up}: expected shape {expected}, got {tuple(module.get_parameter(up).shape)}")
    return replace(
        spec, num_experts=num_experts, hidden_size=hidden, intermediate_size=intermediate, post_norm=post_norm
    )


def _top_k(module: nn.Module) -> int | None:
    config = getattr(module, "config", None)
    for key in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token", "top_k"):
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None


def _scores_experts(module: nn.Module, spec: ExpertsSpec) -> bool:
    """A router maps a token to one score per expert: it holds a `[num_experts, ...]` matrix."""
    return any(parameter.dim() == 2 and parameter.shape[0] == spec.num_experts for parameter in module.parameters())


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """The repeated layers, as the family itself declares them unsplittable, that sit in a module list."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            names += [f"{name}.{index}" for index, layer in enumerate(module) if type(layer).__name__ in classes]
    return tuple(names)


def _why_no_experts(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            kind = type(module[0]).__name__ if len(module) else "nothing"
            return f"{name} is a list of {kind} modules, not transformers' fused experts interface; it is not supported"
    for name, module in model.named_modules():
        if "conv" not in name and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            return f"{name} ({type(module).__name__}) does not use transformers' experts interface; it is not supported"
    return "no routed experts found; only Mixture-of-Experts models with transformers' experts interface can be trained"
