"""Plan tensor parallelism for each part of a model's blocks; on meta, before any weight is read.

The plan follows transformers' plan of the family (`model.tp_plan`). If that has no entry for an attention, its
structure decides: linear layers of complete heads before and after it. A split part gathers the positions of its tp
group, computes with its share of heads or features, and its last layer reduce-scatters over the group. An MLP that
cannot be split runs on the local positions. A layer that mixes positions and cannot be split runs on all positions of
the group, on every rank; this repeats work, and the plan prints it. Experts are never split: ep uses those ranks.
Nothing here communicates.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, head_of, is_classifier, is_inside, is_within
from expertmesh.compat import CACHE_ARGUMENTS, child_slots, parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.introspection.attention import counts_heads
from expertmesh.introspection.proofs import proof_key, refusal_by_proof
from expertmesh.introspection.small_copies import TensorCut, why_not_split
from expertmesh.state.model_view import OUTPUT_ROWS, is_adapter

# A module of a block whose forward takes one of these arguments mixes positions.
_MIXES_POSITIONS = {"attention_mask", "position_embeddings", *CACHE_ARGUMENTS}
_COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_ROWS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_CUT_INPUT = {"rowwise_split_input", "rowwise_rep"}
# Parameters that are not split. Their gradients are partial sums, like all others, so they need no extra reduction.
_UNSPLIT = {"local_params", "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"}
# Names of layers in attention, for families whose plan has no entry for it.
_HEADS_ONLY = {"q_proj", "k_proj", "v_proj", "gate_proj", "q_b_proj", "kv_b_proj"}
_SHARED_BY_HEADS = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
_LAST = ("o_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One module that gathers positions, with the layers that its ranks split; other names are relative to it."""

    name: str
    """Name of the module in the model."""
    mixes_positions: bool
    """True for attention and other layers that mix positions, False for an MLP."""
    columns: tuple[str, ...] = ()
    """Linear layers whose outputs are split."""
    gathered: tuple[str, ...] = ()
    """The `columns` whose outputs are gathered again."""
    rows: str | None = None
    """The last linear layer, whose inputs are split; None if the part is unsplit."""
    cuts_input: bool = False
    """True if `rows` gets full inputs and cuts the local ones."""
    bare: tuple[str, ...] = ()
    """Parameters of the module with one entry per head."""
    norms: tuple[str, ...] = ()
    """Norms over all heads of queries or of keys together."""
    why_unsplit: str = ""
    """The reason why every rank computes the full module, for the printed plan."""
    shares: Mapping[str, TensorCut] = field(default_factory=dict)
    """Under cp, the tensors that are cut while the module runs (introspection/small_copies.py)."""
    counts: tuple[str, ...] = ()
    """Under cp, the attributes with a number of heads, divided while the module runs."""

    @property
    def is_split(self) -> bool:
        """True if the ranks share its heads or features."""
        return self.rows is not None

    def parameter_dims(self, module: nn.Module) -> dict[str, int]:
        """Return the dim that is split, by parameter of the module, adapters included."""
        dims = dict.fromkeys(self.bare, 0)
        for name in (*self.columns, self.rows or ""):
            linear = module.get_submodule(name)
            # Adapter B produces the layer's outputs and A consumes its inputs, so each is split like that side.
            split, dim = (("weight", "lora_A"), 1) if name == self.rows else (OUTPUT_ROWS, 0)
            dims |= {f"{name}.{leaf}": dim for leaf in split if parameter_slots(linear).get(leaf) is not None}
        return dims


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The work of tp in a model."""

    tp: int
    """The size of the tp axis."""
    parts: tuple[TensorPart, ...]
    """The parts that gather positions, in module order."""
    unsplit: tuple[tuple[str, str], ...]
    """(name, reason) of the modules that transformers' plan splits and this plan does not."""
    splits_vocabulary: bool = True
    """False for a classifier, each rank of which has the head's few rows for its own positions."""

    def within(self, blocks: Sequence[str]) -> "TensorPlan":
        """Return the plan with the parts in `blocks` alone, those of this rank's pipeline stages."""
        return replace(self, parts=tuple(part for part in self.parts if is_inside(part.name, *blocks)))

    def lines(self) -> Iterator[str]:
        """Yield the lines to print before training; equal parts of different blocks share a line."""
        if self.tp == 1:
            return
        texts = [line_of(part) for part in self.parts]
        texts += [f"{_short(name)} unsplit, on own positions: {why}" for name, why in self.unsplit]
        for text, count in Counter(texts).items():
            yield f"{count} × {text}"
        if self.splits_vocabulary:
            yield f"vocabulary: each rank computes 1/{self.tp} of the logits of all the group's positions"


def tensor_plan(model: nn.Module, anatomy: Anatomy, tp: int, kept_in_fp32: Callable[[str], bool]) -> TensorPlan:
    """Plan how `tp` ranks share `model`.

    Raises:
        InputError: tp does not divide the heads, or the model has no module that can be split safely; names the module.
    """
    if tp == 1:
        return TensorPlan(1, (), ())
    family = str(model.config.model_type)  # type: ignore[union-attr]
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        raise head_not_split(f"that of {family} ({type(head).__name__}) is no linear layer")
    blocks = decoder_blocks(anatomy)
    styles = _styles(model, anatomy, blocks)
    parts: list[TensorPart] = []
    unsplit: list[tuple[str, str]] = []
    confirmed: dict[Hashable, str | None] = {}
    for block in blocks:
        mixing = mixers(model, block)
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            # A convolution elsewhere would see this rank's positions alone.
            if isinstance(module, nn.Conv1d) and not is_within(name, *mixing):
                raise InputError(
                    f"parallel.tp {tp}: {name} may let positions see each other outside of what is recognised as "
                    "attention; set parallel.tp to 1",
                    key="layout.mixes-positions",
                )
        others = {name.rpartition(".")[0] for name in _named(styles) if is_inside(name, block)}
        others = {name for name in others if not is_within(name, *mixing)}
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if name in mixing:
                part = _mixer_part(module, name, _below(styles, name), tp, confirmed)
                if part.is_split:
                    _refuse_heads(part, module, family, tp)
            elif name in others:
                part = _part(module, name, _below(styles, name), mixes_positions=False)
            else:
                continue
            if part.is_split and (reason := _unsplittable(part, module, tp, kept_in_fp32)):
                part = TensorPart(name, part.mixes_positions, why_unsplit=reason)
            if part.is_split or part.mixes_positions:
                parts.append(part)
            else:
                unsplit.append((name, part.why_unsplit))
    if not any(part.mixes_positions for part in parts):
        raise InputError(
            f"parallel.tp {tp}: no module of {blocks[0]} of {family} is recognised as attention, so positions cannot "
            "be split; set parallel.tp to 1",
            key="layout.attention-not-recognised",
        )
    return TensorPlan(tp, tuple(parts), tuple(unsplit), splits_vocabulary=not is_classifier(model))


def part_by_heads(model: nn.Module, anatomy: Anatomy, name: str, ranks: int) -> TensorPart:
    """Plan how `ranks` share an attention by heads; an unsplit part carries the reason."""
    module, styles = model.get_submodule(name), _styles(model, anatomy, decoder_blocks(anatomy))
    part = _mixer_part(module, name, _below(styles, name), ranks, {})
    if part.is_split and part.gathered:
        return TensorPart(name, True, why_unsplit="what is between its layers sees all heads")
    if part.is_split and (problem := _uneven_heads(part, module, ranks)):
        return TensorPart(name, True, why_unsplit=f"{ranks} ranks cannot share its {problem[1]} heads evenly")
    reason = _unsplittable(part, module, ranks, lambda name: False) if part.is_split else None
    return part if reason is None else TensorPart(name, True, why_unsplit=reason)


def shared_by_heads(model: nn.Module, plan: TensorPlan) -> set[str]:
    """Return the norms in split attention that each rank computes in full: of latents, or of all heads together."""
    return {
        f"{part.name}.{leaf}"
        for part in plan.parts
        if part.is_split
        for leaf, child in model.get_submodule(part.name).named_children()
        if leaf in part.norms or (leaf in _SHARED_BY_HEADS and not isinstance(child, nn.Linear))
    }


def head_not_split(why: str) -> InputError:
    return InputError(
        f"parallel.tp: the rows of the output embedding cannot be split: {why}; set parallel.tp to 1",
        key="layout.tp-output-embedding",
    )


def _styles(model: nn.Module, anatomy: Anatomy, blocks: list[str]) -> dict[str, str]:
    """Return the style in the family's plan for each module or parameter of the blocks, without experts and routers."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    outside = [*(spec.name for spec in anatomy.experts), *anatomy.routers]
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    return {
        name: style
        for name in names
        for pattern, style in patterns
        if pattern.fullmatch(name)
        if is_inside(name, *blocks) and not is_within(name, *outside)
    }


def mixers(model: nn.Module, block: str) -> list[str]:
    """Return the outermost modules of a block that mix positions."""
    found: list[str] = []
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        inside = name != block and not is_inside(name, *found)
        if inside and _MIXES_POSITIONS & set(inspect.signature(module.forward).parameters):
            found.append(name)
    return found


def _mixer_part(
    module: nn.Module, name: str, styles: dict[str, str], tp: int, confirmed: dict[Hashable, str | None]
) -> TensorPart:
    """Plan a module that mixes positions, by the family's plan or by its structure.

    Args:
        styles: those of its submodules and parameters, by name relative to it.
        confirmed: cache of proof results per kind of attention: the reason for refusing to split it, or None.
    """
    part = _part(module, name, styles, mixes_positions=True) if any(_named(styles)) else None
    if part is None or (part.is_split and (_HEADS_ONLY & child_slots(module).keys()) - {*part.columns}):
        # The family has no plan for it, or one for another configuration.
        part = _by_structure(module, name)
        if part.is_split and (reason := _why_not_split(part, module, tp, confirmed)):
            return TensorPart(name, True, why_unsplit=f"transformers' plan leaves it out, and {reason}")
    elif part.gathered and (norms := _norms_of_all_heads(part, module)):
        # The family's plan gathers for the sake of these norms; the remaining code needs no other head.
        by_heads = replace(part, gathered=(), cuts_input=False, norms=norms)
        part = by_heads if _why_not_split(by_heads, module, tp, confirmed) is None else part
    return part


def _why_not_split(part: TensorPart, module: nn.Module, tp: int, confirmed: dict[Hashable, str | None]) -> str | None:
    """Return the reason not to split an attention, from small_copies.py, or None; one proof for each kind."""
    kind = (type(module), tuple((leaf, parameter.shape) for leaf, parameter in module.named_parameters()))
    if kind not in confirmed:
        heads, dims = dict(_heads(part, module)), part.parameter_dims(module)
        key = proof_key(module, part.columns, part.rows, part.bare, part.norms, part.gathered)
        confirmed[kind] = refusal_by_proof(
            "heads", key, partial(why_not_split, module, heads, str(part.rows), dims, part.norms, tp)
        )
    return confirmed[kind]


def _named(styles: Mapping[str, str]) -> Iterator[str]:
    """Return the names that the family's plan splits."""
    return (name for name, style in styles.items() if style in _COLUMNS | _ROWS)


def _part(module: nn.Module, name: str, styles: dict[str, str], *, mixes_positions: bool) -> TensorPart:
    """Plan a part by the family's plan; the part is unsplit if its styles are not understood."""

    def unsplit(why: str) -> TensorPart:
        return TensorPart(name, mixes_positions, why_unsplit=why)

    unknown = [
        f"{leaf or _short(name)} {style}" for leaf, style in styles.items() if style not in _COLUMNS | _ROWS | _UNSPLIT
    ]
    if unknown:
        return unsplit(f"transformers' {unknown[0]} is not supported")
    bare = tuple(leaf for leaf, style in styles.items() if style in _COLUMNS and leaf in parameter_slots(module))
    columns = tuple(leaf for leaf, style in styles.items() if style in _COLUMNS and leaf not in bare)
    rows = [leaf for leaf, style in styles.items() if style in _ROWS]
    if len(rows) != 1 or not columns:
        return unsplit("transformers' plan has no layers before and behind it to split")
    odd = [leaf for leaf in (*columns, *rows) if not isinstance(module.get_submodule(leaf), nn.Linear)]
    if odd:
        return unsplit(f"{odd[0]} is no linear layer")
    gathered = tuple(leaf for leaf in columns if styles[leaf] in _GATHERED)
    cuts_input = styles[rows[0]] in _CUT_INPUT
    if gathered and (gathered != columns or not cuts_input or bare):
        return unsplit("transformers' plan gathers some of its outputs only")
    return TensorPart(name, mixes_positions, columns, gathered, rows[0], cuts_input, bare)


def _by_structure(module: nn.Module, name: str) -> TensorPart:
    """Plan a split by heads from the structure of an attention.

    It needs linear layers of complete heads before and after it, and no other layer that may see all heads.
    """

    def unsplit(why: str) -> TensorPart:
        return TensorPart(name, True, why_unsplit=f"transformers' plan leaves it out, and {why}")

    children = {leaf: child for leaf, child in module.named_children() if any(True for _ in child.parameters())}
    rows = [leaf for leaf in _LAST if leaf in children]
    columns = tuple(leaf for leaf in children if leaf in _HEADS_ONLY)
    standard = {"q_proj", "k_proj", "v_proj"} <= set(columns)
    latent = "kv_b_proj" in columns and bool({"q_proj", "q_b_proj"} & set(columns)) and "k_proj" not in columns
    if len(rows) != 1 or not (standard or latent):
        return unsplit("its layers are not known")
    if not all(isinstance(children[leaf], nn.Linear) for leaf in (*columns, *rows)):
        return unsplit("not all of its layers are linear")
    head_dim = getattr(module, "head_dim", None)
    for leaf, child in children.items():
        # A norm over a single head works with any number of heads.
        norm = standard and all(tuple(p.shape) == (head_dim,) for p in child.parameters())
        if leaf not in (*columns, *rows) and not norm and not (latent and leaf in _SHARED_BY_HEADS):
            return unsplit(f"{leaf} may see all heads")
    last: Any = children[rows[0]]
    if "gate_proj" in columns and children["gate_proj"].out_features != last.in_features:
        return unsplit("gate_proj is not one gate per feature")
    bare = tuple(leaf for leaf, _ in module.named_parameters(recurse=False) if not is_adapter(leaf))
    if any(leaf != "sinks" for leaf in bare):
        return unsplit(f"{bare[0]} may see all heads")
    if counts := counts_heads(module):
        return unsplit(f"its code uses {counts}")
    return TensorPart(name, True, columns, (), rows[0], False, bare)


def _norms_of_all_heads(part: TensorPart, module: nn.Module) -> tuple[str, ...]:
    """Return the norms over all heads of queries and keys; none if other code may see more than one head."""
    children = {leaf: child for leaf, child in module.named_children() if any(True for _ in child.parameters())}
    norms = tuple(leaf for leaf in children if leaf not in (*part.columns, part.rows))
    widths: dict[str, Any] = {f"{leaf[0]}_norm": module.get_submodule(leaf).out_features for leaf in part.columns}
    fit = all([p.shape.numel() for p in children[leaf].parameters()] == [widths.get(leaf)] for leaf in norms)
    known = set(part.columns) == {"q_proj", "k_proj", "v_proj"} and hasattr(module, "head_dim")
    return norms if known and fit and counts_heads(module) is None else ()


def _refuse_heads(part: TensorPart, module: nn.Module, family: str, tp: int) -> None:
    """Raise `InputError` unless each rank gets complete heads of queries, keys and values."""
    if uneven := _uneven_heads(part, module, tp):
        leaf, heads = uneven
        # Each layer that is split must have a multiple of tp heads.
        common = math.gcd(*(count for _, count in _heads(part, module)))
        choices = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise InputError(
            f"parallel.tp {tp}: {part.name}.{leaf} of {family} has {heads} heads, which {tp} ranks cannot share "
            f"evenly; valid values for this model: {choices}",
            key="layout.tp-divides-heads",
        )


def _uneven_heads(part: TensorPart, module: nn.Module, ranks: int) -> tuple[str, int] | None:
    """Return the first layer, with its heads, whose heads `ranks` does not divide."""
    return next(((leaf, heads) for leaf, heads in _heads(part, module) if heads % ranks), None)


def _heads(part: TensorPart, module: Any) -> Iterator[tuple[str, int]]:
    """Yield (layer, number of heads) for each split layer; the number of features if the size of a head is unknown."""
    head_dim = getattr(module, "head_dim", None) or getattr(module, "qk_head_dim", None)
    value_dim = getattr(module, "v_head_dim", None) or head_dim
    features = {leaf: module.get_submodule(leaf).out_features for leaf in part.columns}
    assert part.rows is not None
    features[part.rows] = module.get_submodule(part.rows).in_features
    sizes = {part.rows: value_dim, "v_proj": value_dim, "kv_b_proj": None}
    for leaf, width in features.items():
        size = sizes.get(leaf, head_dim)
        yield leaf, width // size if size and width % size == 0 else width
    for leaf in part.bare:
        yield leaf, module.get_parameter(leaf).shape[0]


def _unsplittable(part: TensorPart, module: nn.Module, tp: int, kept_in_fp32: Callable[[str], bool]) -> str | None:
    """Return why the parameters of a part cannot be split, or None."""
    for name, dim in part.parameter_dims(module).items():
        size = module.get_parameter(name).shape[dim]
        if size % tp:
            return f"{tp} ranks cannot share the {size} of {name} evenly"
        if kept_in_fp32(f"{part.name}.{name}"):
            return f"{name} is kept in float32"
    return None


def _below(styles: dict[str, str], name: str) -> dict[str, str]:
    """Return the styles inside a module by relative name; "" is the module."""
    return {
        (leaf[len(name) + 1 :] if leaf != name else ""): style
        for leaf, style in styles.items()
        if is_within(leaf, name)
    }


def line_of(part: TensorPart) -> str:
    """Return the text of a part for the printed plan."""
    short = _short(part.name)
    if not part.is_split:
        return f"{short} whole on each rank of the group, which repeats its work: {part.why_unsplit}"
    columns = ", ".join((*part.columns, *part.bare))
    if part.gathered:
        return f"{short} by columns ({columns}) and rows ({part.rows}); what is between is whole on each rank, repeated"
    what = "heads" if part.mixes_positions else "features"
    norms = f"; {', '.join(part.norms)} of all heads" if part.norms else ""
    return f"{short} by {what}: columns of {columns}, rows of {part.rows}{norms}"


def _short(name: str) -> str:
    """Return a name without its block, so that the text is equal for all blocks."""
    return re.sub(r"^.*\.\d+\.", "", name)
