"""Choose which EP rank holds which expert, and read and write the two files about it.

An *order* of a layer has its E experts by slot: EP rank r holds the slots r*E/ep to (r+1)*E/ep - 1, and its experts
ascend. The contiguous order is 0, 1, ..., E-1. An order is for run time alone: files of weights, checkpoints and counts
keep the model's own numbers.

Ranks may also hold copies of frozen experts, equally many each. Tokens go to their own rank if it holds their expert,
else by turns to all that hold it: k of them get equal shares, if all ranks route equally. The rule needs no exchange.

`expert_load.json` has the tokens that each expert of a run got; a placement file has what was made of them. Both come
from others and are refused unless every number in them is in its place. Nothing here communicates.

    E experts
"""

import heapq
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save

from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.boxes import full_box, inverse
from expertmesh.io.directory import io_errors, replace_synced
from expertmesh.io.reading import read_versioned, shortened
from expertmesh.io.safetensors_reader import open_weight_files

LOAD_FILE, PAIRS_FILE = "expert_load.json", "expert_pairs.safetensors"
SCHEMA_VERSION = 1
# Published models have hundreds of experts in fewer than a hundred layers.
MAX_EXPERTS, MAX_LAYERS, MAX_RANKS = 8192, 4096, 8192
# A layer of 256 random loads takes some 50 swaps at most.
_SWAPS_PER_EXPERT = 8
# Of the mean load, for experts chosen together: 2 % took 10 to 13 % off the rows of a trained router, 5 % little more.
_SLACK_PERCENT = 2
_MAKE_ANEW = "make one with `expertmesh plan --placement RUN --ep N`"
_Content = TypeVar("_Content", "_PlacementFile", "_LoadFile")
_Layer = TypeVar("_Layer")
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Layers = Annotated[dict[str, _Layer], Field(min_length=1, max_length=MAX_LAYERS)]


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of every EP rank, for all layers of a model."""

    ep: int
    """Ranks of an EP group."""
    orders: Mapping[str, tuple[int, ...]]
    """The order of each layer, by the full name of its experts module."""
    copies: Mapping[str, "Copied"] = field(default_factory=dict)
    """The experts that each rank copies, in the order of their owners' slots; empty without copies."""

    @property
    def replicas(self) -> int:
        """Copies of each rank in a layer."""
        return max((len(rank) for ranks in self.copies.values() for rank in ranks), default=0)

    def busiest(self, name: str, load_E: Sequence[int]) -> float:
        """Return the tokens of the busiest rank over the mean, in the layer `name`; 1.0 if there are none."""
        if name not in self.copies:
            return busiest(load_E, self.orders.get(name, range(len(load_E))), self.ep)
        loads = copied_loads(load_E, self.orders[name], self.copies[name])
        return max(loads) * self.ep / sum(loads) if any(loads) else 1.0

    def over(self, loads: Mapping[str, Sequence[int]]) -> tuple[float, float]:
        """Return the tokens of the busiest rank over the mean: in the mean of all layers, and in the worst."""
        layers = [self.busiest(name, load_E) for name, load_E in loads.items()]
        return sum(layers) / len(layers), max(layers)


Copied = tuple[tuple[int, ...], ...]


def balanced(
    loads: Mapping[str, Sequence[int]],
    ep: int,
    replicas: int = 0,
    together: Mapping[str, torch.Tensor] | None = None,
) -> Placement:
    """Return the placement with few tokens on the busiest rank of each layer, by the tokens of its experts.

    Args:
        together: Tokens that chose both of two experts by layer, int64 `[E, E]`. With it and without replicas, experts
            that tokens choose together share ranks, at little more load: a token is sent once to a rank.
    """
    if not replicas:
        orders = {name: balanced_order(load_E, ep) for name, load_E in loads.items()}
        for name, pairs_EE in (together or {}).items():
            orders[name] = _share_ranks(orders[name], loads[name], pairs_EE, ep)
        return Placement(ep, orders)
    found = {name: balanced_copies(load_E, ep, replicas) for name, load_E in loads.items()}
    return Placement(
        ep, {name: order for name, (order, _) in found.items()}, {name: copies for name, (_, copies) in found.items()}
    )


def balanced_order(load_E: Sequence[int], ep: int) -> tuple[int, ...]:
    """Return the order whose busiest rank has as few tokens as was found; contiguous where that has no more.

    Experts go to the least busy rank with room, the busiest first; then two experts change places as long as that takes
    tokens off the busiest rank. It ends with at most the mean of a rank and the tokens of one expert. The result
    depends on the arguments alone: counts are integers, and ties go to lower numbers.

    Args:
        load_E: Tokens of each expert.
        ep: Ranks, a divisor of E.
    """
    experts = len(load_E)
    assert experts % ep == 0, (experts, ep)
    here, contiguous = experts // ep, tuple(range(experts))
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(ep)]
    least = [(0, rank) for rank in range(ep)]
    for expert in sorted(range(experts), key=lambda expert: (-load_E[expert], expert)):
        load, rank = heapq.heappop(least)
        ranks[rank].append((load_E[expert], expert))
        if len(ranks[rank]) < here:
            heapq.heappush(least, (load + load_E[expert], rank))
    _swap(ranks)
    order = tuple(expert for rank in _near_home(ranks) for _, expert in sorted(rank, key=lambda each: each[1]))
    return order if max(rank_loads(load_E, order, ep)) < max(rank_loads(load_E, contiguous, ep)) else contiguous


def _swap(ranks: list[list[tuple[int, int]]]) -> None:
    """Exchange experts, given as load and number, of the busiest rank for others until none takes tokens off it."""
    for rank in ranks:
        rank.sort()
    loads = [sum(load for load, _ in rank) for rank in ranks]
    for _ in range(_SWAPS_PER_EXPERT * len(ranks) * len(ranks[0])):
        most = loads.index(max(loads))
        best: tuple[int, int, int, int] | None = None  # the busier of the two then, the other rank, both places
        for other, rank in enumerate(ranks):
            gap = loads[most] - loads[other]
            for place, (load, _) in enumerate(ranks[most]) if gap > 1 else ():
                # The best exchange moves half of the gap: of sorted loads one of the two next to that.
                at = bisect_left(rank, (load - gap // 2,))
                for its in (at - 1, at):
                    if 0 <= its < len(rank) and 0 < (moved := load - rank[its][0]) < gap:
                        found = max(loads[most] - moved, loads[other] + moved), other, place, its
                        best = found if best is None else min(best, found)
        if best is None:
            return
        _, other, place, its = best
        moved = ranks[most][place][0] - ranks[other][its][0]
        ranks[most][place], ranks[other][its] = ranks[other][its], ranks[most][place]
        loads[most] -= moved
        loads[other] += moved
        ranks[most].sort()
        ranks[other].sort()


def _share_ranks(order: Sequence[int], load_E: Sequence[int], pairs_EE: torch.Tensor, ep: int) -> tuple[int, ...]:
    """Exchange experts of different ranks until no exchange lets more tokens find two of theirs on one rank.

    No rank gets more tokens than the busiest one of `order` has, or 1.02 times the mean if that is more. Then those
    ranks that share most tokens become neighbours, two by two, then the pairs of these, and so on: neighbours are on
    one node.
    """
    here, experts = len(order) // ep, torch.arange(len(order))
    pairs_EE, tokens_E = pairs_EE - pairs_EE.diagonal().diag(), torch.tensor(load_E)
    rank_E = torch.empty_like(experts).scatter_(0, torch.tensor(order), experts // here)
    limit = max(max(rank_loads(load_E, order, ep)), sum(load_E) * (100 + _SLACK_PERCENT) // (100 * ep))
    for _ in range(_SWAPS_PER_EXPERT * len(order)):
        load_R = torch.zeros(ep, dtype=torch.int64).index_add_(0, rank_E, tokens_E)
        with_ER = torch.zeros(len(order), ep, dtype=torch.int64).index_add_(1, rank_E, pairs_EE)
        # What expert x finds on the rank of y, less what it finds on its own; an exchange is both ways.
        moved_EE = with_ER[:, rank_E] - with_ER.gather(1, rank_E[:, None])
        gain_EE = moved_EE + moved_EE.T - 2 * pairs_EE
        after_EE = load_R[rank_E] + tokens_E[:, None] - tokens_E  # of the rank of y, by (x, y)
        gain_EE.masked_fill_((after_EE > limit) | (limit < after_EE.T) | (rank_E == rank_E[:, None]), 0)
        one, other = divmod(int(gain_EE.argmax()), len(order))
        if gain_EE[one, other] <= 0:
            break
        rank_E[[one, other]] = rank_E[[other, one]]
    ranks = [experts[rank_E == rank].tolist() for rank in range(ep)]
    groups = [[rank] for rank in range(ep)]
    while len(groups) % 2 == 0:
        groups = _paired(groups, ranks, pairs_EE)
    return tuple(expert for group in groups for rank in group for expert in ranks[rank])


def _paired(groups: list[list[int]], ranks: list[list[int]], pairs_EE: torch.Tensor) -> list[list[int]]:
    """Return half as many groups of ranks, those joined first that share most tokens."""
    member_GE = torch.zeros(len(groups), len(pairs_EE), dtype=torch.int64)
    for number, group in enumerate(groups):
        member_GE[number, [expert for rank in group for expert in ranks[rank]]] = 1
    shared = (member_GE @ pairs_EE @ member_GE.T).tolist()
    joined = dict[int, list[int]]()
    for one, other in sorted(combinations(range(len(groups)), 2), key=lambda two: -shared[two[0]][two[1]]):
        if one not in joined and other not in joined:
            joined[one] = joined[other] = groups[one] + groups[other]
    return list({min(group): group for group in joined.values()}.values())


def _near_home(ranks: Sequence[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Return the ranks in the order that leaves many experts where contiguous placement has them."""
    here = len(ranks[0])
    stay = Counter((now, expert // here) for now, rank in enumerate(ranks) for _, expert in rank)
    taken: dict[int, int] = {}
    homes: dict[int, int] = {}
    for (now, home), _ in sorted(stay.items(), key=lambda item: (-item[1], item[0])):
        if now not in homes and home not in taken:
            taken[home], homes[now] = now, home
    left = iter([now for now in range(len(ranks)) if now not in homes])
    return [ranks[taken[home] if home in taken else next(left)] for home in range(len(ranks))]


def rank_loads(load_E: Sequence[int], order: Sequence[int], ep: int) -> list[int]:
    """Return the tokens of each of `ep` ranks under `order`."""
    here = len(order) // ep
    return [sum(load_E[expert] for expert in order[first : first + here]) for first in range(0, len(order), here)]


def busiest(load_E: Sequence[int], order: Sequence[int], ep: int) -> float:
    """Return the tokens of the busiest rank over the mean; 1.0 if there are none."""
    return max(rank_loads(load_E, order, ep)) * ep / sum(load_E) if any(load_E) else 1.0


def slots_from(rank: int, order: Sequence[int], copies: Copied) -> list[list[int]]:
    """Return for each expert the slots that tokens of EP rank `rank` go to, by turns of tokens.

    Each rank has the slots of its local experts, then those of its copies.
    """
    here = len(order) // len(copies)
    slots = here + len(copies[0])
    places: list[dict[int, int]] = [{} for _ in order]  # by expert, the slot by rank
    for number, expert in enumerate(order):
        places[expert][number // here] = number // here * slots + number % here
    for owner, experts in enumerate(copies):
        for at, expert in enumerate(experts):
            places[expert][owner] = owner * slots + here + at
    return [[held[rank]] if rank in held else [held[each] for each in sorted(held)] for held in places]


def copied_loads(load_E: Sequence[int], order: Sequence[int], copies: Copied) -> list[float]:
    """Return the tokens of each rank if the tokens of each expert come from all ranks equally."""
    here = len(order) // len(copies)
    held = Counter([*order, *(expert for experts in copies for expert in experts)])
    local = (order[rank * here : (rank + 1) * here] for rank in range(len(copies)))
    return [
        sum(load_E[expert] / held[expert] for expert in (*experts, *copied))
        for experts, copied in zip(local, copies, strict=True)
    ]


def balanced_copies(load_E: Sequence[int], ep: int, replicas: int) -> tuple[tuple[int, ...], Copied]:
    """Return an order and the experts that each rank copies, `replicas` of them, with few tokens on the busiest rank.

    One copy after the other is of the expert with most tokens for each rank that holds it. Then experts are placed
    with the tokens that are left to them, and copies go to the least busy rank with room, the busiest first. Where
    copies of the least busy experts leave fewer tokens on the busiest rank, it has those.
    """
    experts = range(len(load_E))
    here, holders = len(load_E) // ep, [1] * len(load_E)
    most: list[tuple[float, int]] = [(-load, expert) for expert, load in enumerate(load_E)]
    heapq.heapify(most)
    for _ in range(ep * replicas):
        _, expert = heapq.heappop(most)
        holders[expert] += 1
        if holders[expert] < ep:
            heapq.heappush(most, (-load_E[expert] / holders[expert], expert))
    share_E = [load * ep // count for load, count in zip(load_E, holders, strict=True)]
    order = balanced_order(share_E, ep)
    held = [set(order[rank * here : (rank + 1) * here]) for rank in range(ep)]
    loads = rank_loads(share_E, order, ep)
    copies: list[list[int]] = [[] for _ in range(ep)]
    wanted = sorted((e for e in experts for _ in range(holders[e] - 1)), key=lambda e: (-share_E[e], e))
    for expert in wanted:
        room = [rank for rank in range(ep) if len(copies[rank]) < replicas and expert not in held[rank]]
        if room:
            rank = min(room, key=lambda rank: (loads[rank], rank))
            copies[rank].append(expert)
            held[rank].add(expert)
            loads[rank] += share_E[expert]
    idle = balanced_order(load_E, ep)
    found = [_filled(load_E, order, copies, replicas), _filled(load_E, idle, [[] for _ in range(ep)], replicas)]
    return min(found, key=lambda each: max(copied_loads(load_E, *each)))


def _filled(
    load_E: Sequence[int], order: tuple[int, ...], copies: list[list[int]], replicas: int
) -> tuple[tuple[int, ...], Copied]:
    """Return an order with `replicas` copies on each rank: those given, and others of the least busy experts."""
    here, slot = len(order) // len(copies), inverse(order)
    for rank, copied in enumerate(copies):
        held = {*order[rank * here : (rank + 1) * here], *copied}
        others = sorted((e for e in order if e not in held), key=lambda e: (load_E[e], e))
        copied += others[: replicas - len(copied)]
    return order, tuple(tuple(sorted(each, key=slot.__getitem__)) for each in copies)


def least_busiest(load_E: Sequence[int], ep: int) -> float:
    """Return a bound of `busiest` that no order is below: the mean, or the busiest expert beside the least busy ones.

    Above 1.0 one expert is too busy for its rank, which only copies of it would mend.
    """
    if not any(load_E):
        return 1.0
    *others, most = sorted(load_E)
    return max(1.0, (most + sum(others[: len(load_E) // ep - 1])) * ep / sum(load_E))


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    mend: ClassVar[str]
    """The remedy for a damaged file."""
    schema_version: Literal[1]


class _PlacementFile(_File):
    """The content of a placement file."""

    mend = _MAKE_ANEW

    format: Literal["expertmesh-placement"]
    ep: int = Field(ge=1, le=MAX_RANKS)
    layers: _Layers[list[Annotated[list[_Count], Field(max_length=MAX_EXPERTS)]]]
    """The experts of each rank, by layer."""
    copies: dict[str, list[Annotated[list[_Count], Field(max_length=MAX_EXPERTS)]]] | None = None
    """The experts that each rank copies, by layer, equally many; absent without copies."""

    def problem(self) -> str | None:
        """Return the first layer that is no placement, as the end of a sentence, or None."""
        for name, ranks in self.layers.items():
            experts = sorted(expert for rank in ranks for expert in rank)
            if len(ranks) != self.ep or not experts or len({len(rank) for rank in ranks}) > 1:
                return f"{shortened(name)} has not {self.ep} ranks with equally many experts"
            if len(experts) > MAX_EXPERTS or experts != list(range(len(experts))):
                return f"{shortened(name)} has not each expert once"
        if self.copies is None:
            return None
        if self.copies.keys() != self.layers.keys():
            return "its copies are of other layers"
        sizes = {len(copied) for ranks in self.copies.values() for copied in ranks}
        for name, ranks in self.copies.items():
            if len(ranks) != self.ep or sizes in ({0}, set()) or len(sizes) > 1:
                return f"{shortened(name)} has not {self.ep} ranks with equally many copies"
            count = sum(len(own) for own in self.layers[name])
            for own, copied in zip(self.layers[name], ranks, strict=True):
                if len({*own, *copied}) != len(own) + len(copied) or max(copied) >= count:
                    return f"a rank of {shortened(name)} copies an expert that it has, or that is not there"
        return None


class _LoadFile(_File):
    """The content of `LOAD_FILE`."""

    mend = "take that of another run"

    format: Literal["expertmesh-expert-load"]
    first_step: _Count
    """The first optimizer step that is counted."""
    last_step: _Count
    layers: _Layers[Annotated[list[_Count], Field(min_length=1, max_length=MAX_EXPERTS)]]
    """Tokens of each expert, by layer."""

    def problem(self) -> str | None:
        """Return that the steps are none, as the end of a sentence, or None."""
        return "last_step is before first_step" if self.last_step < self.first_step else None


def read_placement(path: str | Path) -> Placement:
    """Read a placement file. Raises `InputError` for what is none."""
    content = _read(Path(path), _PlacementFile)
    orders = {name: tuple(e for rank in ranks for e in sorted(rank)) for name, ranks in content.layers.items()}
    copies = {}
    for name, ranks in (content.copies or {}).items():
        slot = inverse(orders[name])
        copies[name] = tuple(tuple(sorted(copied, key=slot.__getitem__)) for copied in ranks)
    return Placement(content.ep, orders, copies)


def write_placement(placement: Placement, path: str | Path) -> None:
    """Write a placement file, synced, in place of any that is there. Raises `InputError` where it cannot be written."""
    layers = {}
    for name, order in placement.orders.items():
        here = len(order) // placement.ep
        layers[name] = [list(order[first : first + here]) for first in range(0, len(order), here)]
    head = {"format": "expertmesh-placement", "schema_version": SCHEMA_VERSION, "ep": placement.ep}
    copies = {name: [list(rank) for rank in ranks] for name, ranks in placement.copies.items()}
    _write(Path(path), {**head, "copies": copies} if copies else head, layers)


def read_loads(path: str | Path) -> dict[str, list[int]]:
    """Read the tokens of each expert, by the full name of the layer's experts module.

    Args:
        path: A file of loads, or the directory of a run that has one.

    Raises:
        InputError: There is none, or it is damaged.
    """
    path = Path(path)
    return _read(path / LOAD_FILE if path.is_dir() else path, _LoadFile).layers


def write_loads(path: str | Path, loads: Mapping[str, Sequence[int]], first_step: int, last_step: int) -> None:
    """Write the tokens of each expert in the steps from `first_step` to `last_step`, as `write_placement` does."""
    head = {"format": "expertmesh-expert-load", "schema_version": SCHEMA_VERSION}
    layers = {name: list(load_E) for name, load_E in loads.items()}
    _write(Path(path), {**head, "first_step": first_step, "last_step": last_step}, layers)


def read_pairs(run: str | Path, loads: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Read the tokens that chose both of two experts, int64 `[E, E]` by layer; nothing if the run has no such file.

    Args:
        run: The directory of a run that was calibrated, or any other path.
        loads: Tokens of each expert, which tell the layers.

    Raises:
        InputError: The file is damaged, or of another model.
    """
    if not (path := Path(run, PAIRS_FILE)).is_file():
        return {}
    found = dict[str, torch.Tensor]()
    try:
        with open_weight_files(run, PAIRS_FILE) as files:
            for name, tensor in files.tensors.items():
                if name not in loads or tensor.dtype != torch.int64 or tensor.shape != (len(loads.get(name, ())),) * 2:
                    raise InputError(
                        f"{path}: {shortened(name)} is {tensor.dtype} {list(tensor.shape)}, and the layer has "
                        f"{len(loads.get(name, ()))} experts; delete the file",
                        key="placement.other-model",
                    )
                found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                files.read(tensor, full_box(tensor.shape), found[name])
    except (IntegrityError, SecurityError) as error:
        raise InputError(f"{error}; delete the file", key="placement.damaged") from error
    return found


def write_pairs(run: str | Path, together: Mapping[str, torch.Tensor]) -> None:
    """Write what `read_pairs` reads, as `write_placement` does."""
    path, content = Path(run, PAIRS_FILE), save(dict(together))
    with io_errors(path, len(content)):
        replace_synced(path, content)


def check_fits(placement: Placement, layers: Mapping[str, int], ep: int) -> None:
    """Raise `InputError` unless the placement is for this model and this ep.

    Args:
        layers: The number of experts of each layer, by the full name of its experts module.
    """
    if placement.ep != ep:
        raise InputError(
            f"moe.placement: the file is for ep {placement.ep}, and this job has ep {ep}; {_MAKE_ANEW}",
            key="placement.other-ep",
        )
    check_layers("moe.placement", {name: len(order) for name, order in placement.orders.items()}, layers)


def too_many_copies(replicas: int, num_experts: int, ep: int) -> str | None:
    """Return why a rank cannot have so many copies, or None."""
    others = num_experts - num_experts // ep
    return None if replicas <= others else f"other ranks have {others} experts; set it to fewer"


def no_copies(setting: str, why: str) -> InputError:
    return InputError(f"{setting}: {why}", key="moe.replicas-unsupported")


def check_layers(what: str, found: Mapping[str, int], layers: Mapping[str, int]) -> None:
    """Raise `InputError` unless a file has the model's layers, with as many experts.

    Args:
        what: The option that names the file.
        found: The number of experts of each layer of the file.
        layers: That of the model.
    """
    for name in sorted({*found, *layers}, key=lambda name: (name not in layers, name)):
        if found.get(name) != layers.get(name):
            here, there = (f"{each[name]} experts" if name in each else "no such layer" for each in (layers, found))
            raise InputError(
                f"{what}: the model has {here} for {shortened(name)}, and the file has {there}; take one of this model",
                key="placement.other-model",
            )


def _read(path: Path, kind: type[_Content]) -> _Content:
    try:
        content = read_versioned(path, kind, SCHEMA_VERSION, key="placement.damaged")
    except IntegrityError as error:
        raise InputError(f"{error}; {kind.mend}", key="placement.damaged") from error
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: there is no such file; `train` writes {LOAD_FILE} into output_dir, and `plan --placement RUN` "
            "makes a placement of it",
            key="file.unreadable",
        ) from error
    if (problem := content.problem()) is not None:
        raise InputError(f"{path}: damaged: {problem}; {kind.mend}", key="placement.damaged")
    return content


def _write(path: Path, head: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Write one JSON object, a line for each layer."""
    lines = [f"    {json.dumps(name)}: {json.dumps(layer)}" for name, layer in layers.items()]
    first = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    content = ("{\n" + first + '  "layers": {\n' + ",\n".join(lines) + "\n  }\n}\n").encode()
    with io_errors(path, len(content)):
        replace_synced(path, content)
