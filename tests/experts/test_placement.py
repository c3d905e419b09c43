"""Which EP rank holds which expert: the balanced order by its properties, and the two files by what is refused."""

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.experts.pairs import count_pairs, count_together
from expertmesh.experts.placement import (
    LOAD_FILE,
    PAIRS_FILE,
    Placement,
    balanced,
    balanced_copies,
    balanced_order,
    busiest,
    check_fits,
    copied_loads,
    least_busiest,
    rank_loads,
    read_loads,
    read_pairs,
    read_placement,
    write_loads,
    write_pairs,
    write_placement,
)
from tests.support.errors import refused

LAYER = "model.layers.0.mlp.experts"
SIZES = ((4, 2), (8, 2), (12, 3), (16, 16), (64, 8), (128, 8), (128, 32), (256, 64))


def loads(kind: str, experts: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    if kind == "zipf":
        return draw.sample([100_000 // (place + 1) for place in range(experts)], experts)
    return [draw.randrange(10 if kind == "ties" else 10**9) for _ in range(experts)]


@pytest.mark.parametrize("kind", ["zipf", "ties", "uniform"])
@pytest.mark.parametrize(("experts", "ep"), SIZES)
def test_no_exchange_takes_tokens_off_the_busiest_rank(kind: str, experts: int, ep: int) -> None:
    for seed in range(4):
        load_E = loads(kind, experts, seed)
        order, contiguous = balanced_order(load_E, ep), range(experts)
        assert sorted(order) == list(contiguous)
        ranks = [order[first : first + experts // ep] for first in range(0, experts, experts // ep)]
        assert all(list(rank) == sorted(rank) for rank in ranks)
        most = max(found := rank_loads(load_E, order, ep))
        assert most <= max(rank_loads(load_E, contiguous, ep))
        assert order == balanced_order(load_E, ep)
        assert least_busiest(load_E, ep) <= busiest(load_E, order, ep)
        if order == tuple(contiguous):
            continue
        pairs = [(its, load_E[e]) for rank, its in zip(ranks, found, strict=True) for e in rank]
        hot = (rank for rank, its in zip(ranks, found, strict=True) if its == most)
        assert any(
            all(max(most - load_E[e] + load, its + load_E[e] - load) >= most for e in rank for its, load in pairs)
            for rank in hot
        )
        # Of equal counts no exchange is left only if the busiest and the least busy differ by one expert at most.
        assert most * ep <= sum(load_E) + max(load_E) * (ep - 1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("experts", "ep"), [size for size in SIZES if size[1] < size[0]])
def test_copies_take_tokens_off_the_busiest_rank(experts: int, ep: int, replicas: int) -> None:
    for seed in range(8):
        load_E = loads("zipf" if seed % 2 else "uniform", experts, seed)
        order, copies = balanced_copies(load_E, ep, replicas)
        assert sorted(order) == list(range(experts))
        here = experts // ep
        for rank, copied in enumerate(copies):
            assert len({*copied, *order[rank * here : (rank + 1) * here]}) == here + replicas
        found = copied_loads(load_E, order, copies)
        assert sum(found) == pytest.approx(sum(load_E))
        # Each rank has to hold some, which may be idle ones.
        idle = sum(sorted(load_E)[: here + replicas])
        assert max(found) <= max(rank_loads(load_E, balanced_order(load_E, ep), ep)) + idle
        assert max(found) * ep / sum(load_E) <= (1.1 if experts >= 64 else 1.6)


def test_loads_with_an_even_split_reach_it_and_even_ones_stay_in_order() -> None:
    assert balanced_order([7, 7, 1, 1], 2) == (0, 2, 1, 3)
    assert balanced_order([9, 5, 4, 3, 2, 1], 2) == (1, 2, 3, 0, 4, 5)  # 1 and 2 stay on the first rank
    for even in ([0] * 8, [5] * 8, [3, 1] * 4):
        assert balanced_order(even, 4) == tuple(range(8))
    assert balanced_order([9, 1, 1, 1], 1) == (0, 1, 2, 3)
    assert busiest([0, 0], (0, 1), 2) == least_busiest([0, 0], 2) == 1.0
    assert busiest([6, 2], (0, 1), 2) == least_busiest([6, 2], 2) == 1.5
    # Of counts that no float holds exactly: one token decides.
    large = 2**60
    assert balanced_order([large + 1, large, large, large - 1], 2) == (0, 3, 1, 2)


def test_experts_stay_where_contiguous_placement_has_them_where_ranks_are_free() -> None:
    load_E = [9, 9, 1, 1, 5, 5, 5, 5]
    order = balanced_order(load_E, 2)
    assert rank_loads(load_E, order, 2) == [20, 20]
    assert sum(slot // 4 == expert // 4 for slot, expert in enumerate(order)) >= 4


def chosen_in_clusters(experts: int, seed: int, tokens: int = 500, top_k: int = 4) -> torch.Tensor:
    """Return the experts of each token `[T, K]`, int64; a token prefers those of one of its cluster."""
    draw = torch.Generator().manual_seed(seed)
    cluster_E = torch.arange(experts)[torch.randperm(experts, generator=draw)] % 4
    likes_TE = (torch.randint(4, (tokens, 1), generator=draw) == cluster_E) * 1.5
    return (likes_TE + torch.randn(tokens, experts, generator=draw)).topk(top_k).indices


def rows_to(chosen_TK: torch.Tensor, order: tuple[int, ...], groups: int) -> int:
    """Return how many rows travel: a token once to each of `groups` equal parts of the order that it needs."""
    place_E = torch.tensor(order).argsort() // (len(order) // groups)
    return sum(len(set(each)) for each in place_E[chosen_TK].tolist())


@pytest.mark.parametrize(("experts", "ep"), [(8, 2), (16, 4), (32, 8), (12, 3), (64, 8)])
def test_experts_that_tokens_choose_together_share_ranks(experts: int, ep: int) -> None:
    for seed in range(4):
        chosen_TK = chosen_in_clusters(experts, seed)
        pairs_EE = count_together(chosen_TK, experts)
        load_E = pairs_EE.diagonal().tolist()
        apart, found = (balanced({LAYER: load_E}, ep, 0, each).orders[LAYER] for each in (None, {LAYER: pairs_EE}))
        assert sorted(found) == list(range(experts))
        ranks = [found[first : first + experts // ep] for first in range(0, experts, experts // ep)]
        assert all(list(rank) == sorted(rank) for rank in ranks)
        limit = max(*rank_loads(load_E, apart, ep), sum(load_E) * 102 // (100 * ep))
        assert max(rank_loads(load_E, found, ep)) <= limit
        assert found == balanced({LAYER: load_E}, ep, 0, {LAYER: pairs_EE}).orders[LAYER]
        if experts >= 16:
            assert rows_to(chosen_TK, found, ep) < rows_to(chosen_TK, apart, ep)
        # No exchange is left: one would be over the limit, or part more than it joins.
        apart_EE = pairs_EE - pairs_EE.diagonal().diag()
        loads = rank_loads(load_E, found, ep)
        for (a, one), (b, other) in itertools.combinations(enumerate(ranks), 2):
            for x, y in itertools.product(one, other):
                gain = apart_EE[x, list(other)].sum() + apart_EE[y, list(one)].sum() - 2 * apart_EE[x, y]
                gain -= apart_EE[x, list(one)].sum() + apart_EE[y, list(other)].sum()
                moved = load_E[x] - load_E[y]
                assert gain <= 0 or loads[a] - moved > limit or loads[b] + moved > limit


def test_ranks_that_share_tokens_are_neighbours() -> None:
    """Eight experts on four ranks: 0 and 4, 1 and 5 and so on are always chosen together, and so are two such pairs."""
    chosen_TK = torch.tensor([[0, 4, 2, 6], [1, 5, 3, 7]] * 50)
    pairs_EE = count_together(chosen_TK, 8)
    order = balanced({LAYER: pairs_EE.diagonal().tolist()}, 4, 0, {LAYER: pairs_EE}).orders[LAYER]
    assert [rows_to(chosen_TK, order, groups) for groups in (4, 2)] == [200, 100]


def test_tokens_that_chose_both_of_two_experts_are_counted_without_padding() -> None:
    chosen_TK, real_T = chosen_in_clusters(16, 0), torch.arange(500) % 3 > 0
    expected = torch.zeros(16, 16, dtype=torch.int64)
    for token in chosen_TK[real_T].tolist():
        for one, other in itertools.product(token, token):
            expected[one, other] += 1
    assert torch.equal(count_together(chosen_TK, 16, real_T), expected)
    assert torch.equal(expected.diagonal(), count_pairs(chosen_TK, 16, real_T))


def test_a_file_of_pairs_returns_what_was_written_and_is_refused_for_another_model(tmp_path: Path) -> None:
    pairs = {LAYER: count_together(chosen_in_clusters(8, 0), 8)}
    loads = {LAYER: [0] * 8}
    assert read_pairs(tmp_path, loads) == {}
    write_pairs(tmp_path, pairs)
    assert torch.equal(read_pairs(tmp_path, loads)[LAYER], pairs[LAYER])
    for other in ({LAYER: [0] * 4}, {"model.layers.9.mlp.experts": [0] * 8}, {}):
        with refused("placement.other-model"):
            read_pairs(tmp_path, other)
    write_pairs(tmp_path, {LAYER: pairs[LAYER].int()})
    with refused("placement.other-model"):
        read_pairs(tmp_path, loads)
    (tmp_path / PAIRS_FILE).write_bytes((tmp_path / PAIRS_FILE).read_bytes()[:-1])
    with refused("placement.damaged"):
        read_pairs(tmp_path, loads)


def test_both_files_return_what_was_written(tmp_path: Path) -> None:
    placement = Placement(2, {LAYER: (0, 3, 1, 2), "model.layers.1.mlp.experts": (0, 1, 2, 3)})
    write_placement(placement, tmp_path / "placement.json")
    assert read_placement(tmp_path / "placement.json") == placement
    counts = {LAYER: [3, 0, 2**60, 1]}
    write_loads(tmp_path / LOAD_FILE, counts, 1, 100)
    assert read_loads(tmp_path) == read_loads(str(tmp_path / LOAD_FILE)) == counts
    assert json.loads((tmp_path / LOAD_FILE).read_text()) == {
        "format": "expertmesh-expert-load",
        "schema_version": 1,
        "first_step": 1,
        "last_step": 100,
        "layers": counts,
    }
    content = json.loads((tmp_path / "placement.json").read_text())
    assert content["layers"][LAYER] == [[0, 3], [1, 2]]
    content["layers"][LAYER] = [[3, 0], [2, 1]]  # a file by hand need not be sorted
    (tmp_path / "placement.json").write_text(json.dumps(content))
    assert read_placement(tmp_path / "placement.json") == placement
    order, copies = balanced_copies([9, 1, 1, 9], 2, 1)
    copied = Placement(2, {LAYER: order}, {LAYER: copies})
    write_placement(copied, tmp_path / "placement.json")
    assert read_placement(tmp_path / "placement.json") == copied
    with refused("output.unwritable"):
        write_placement(placement, tmp_path / "nowhere" / "placement.json")


def _changed(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: content | values


PLACEMENTS: dict[str, tuple[Any, str]] = {
    "no layer": (_changed(layers={}), "layers"),
    "a list": (lambda content: [content], "valid dictionary"),
    "an unknown key": (_changed(replicas=1), "replicas"),
    "a missing key": (lambda content: {key: content[key] for key in content if key != "ep"}, "ep"),
    "another format": (_changed(format="expertmesh-expert-load"), "format"),
    "ep that is true": (_changed(ep=True), "ep"),
    "ep 0": (_changed(ep=0), "ep"),
    "another ep": (_changed(ep=4), "has not 4 ranks"),
    "too many ranks": (_changed(ep=10**9), "ep"),
    "unequal ranks": (_changed(layers={LAYER: [[0, 1, 2], [3]]}), "equally many"),
    "no experts": (_changed(layers={LAYER: [[], []]}), "equally many"),
    "an expert twice": (_changed(layers={LAYER: [[0, 1], [1, 2]]}), "each expert once"),
    "an expert too high": (_changed(layers={LAYER: [[0, 1], [2, 4]]}), "each expert once"),
    "a negative expert": (_changed(layers={LAYER: [[0, -1], [2, 3]]}), "greater than or equal to 0"),
    "a fraction": (_changed(layers={LAYER: [[0, 1.0], [2, 3]]}), "valid integer"),
    "a word": (_changed(layers={LAYER: [[0, "1"], [2, 3]]}), "valid integer"),
    "a number beyond int64": (_changed(layers={LAYER: [[0, 2**63], [2, 3]]}), "less than"),
    "too many experts": (_changed(layers={LAYER: [list(range(5000)), list(range(5000, 10000))]}), "each expert once"),
    "copies of another layer": (_changed(copies={"x": [[1], [0]]}), "copies are of other layers"),
    "copies of no layer": (_changed(copies={}), "copies are of other layers"),
    "no copies": (_changed(copies={LAYER: [[], []]}), "equally many copies"),
    "copies for one rank": (_changed(copies={LAYER: [[1]]}), "equally many copies"),
    "unequal copies": (_changed(copies={LAYER: [[1], [0, 3]]}), "equally many copies"),
    "a copy of an own expert": (_changed(copies={LAYER: [[1], [2]]}), "copies an expert that it has"),
    "a copy twice": (_changed(copies={LAYER: [[1, 1], [0, 3]]}), "copies an expert that it has"),
    "a copy of no expert": (_changed(copies={LAYER: [[1], [4]]}), "or that is not there"),
    "a copy that is a word": (_changed(copies={LAYER: [["1"], [0]]}), "valid integer"),
    "a long name": (_changed(layers={"x" * 10**6: [[0], [0]]}), "(1,000,000 characters) has not each expert once"),
}
LOADS: dict[str, tuple[Any, str]] = {
    "no layer": (_changed(layers={}), "layers"),
    "a negative count": (_changed(layers={LAYER: [1, -1]}), "greater than or equal to 0"),
    "a fraction": (_changed(layers={LAYER: [1, 0.5]}), "valid integer"),
    "no experts": (_changed(layers={LAYER: []}), "at least 1 item"),
    "too many experts": (_changed(layers={LAYER: [1] * 8193}), "at most 8192 items"),
    "steps that end before they begin": (_changed(last_step=0), "last_step is before first_step"),
    "an unknown key": (_changed(tokens=1), "tokens"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "given.json"


def test_hostile_files_are_refused_by_name(path: Path) -> None:
    write_placement(Placement(2, {LAYER: (0, 3, 1, 2)}), path)
    placement = json.loads(path.read_text())
    write_loads(path, {LAYER: [1, 2]}, 1, 2)
    counts = json.loads(path.read_text())
    readers: tuple[tuple[Any, dict[str, tuple[Any, str]], dict[str, Any]], ...] = (
        (read_placement, PLACEMENTS, placement),
        (read_loads, LOADS, counts),
    )
    for read, changes, right in readers:
        for what, (change, names) in changes.items():
            path.write_text(json.dumps(change(right)))
            with refused("placement.damaged", naming=str(path)) as error:
                read(path)
            assert names in str(error.value), (what, str(error.value))
            assert len(str(error.value)) < 1000 + len(str(path)), what
        twice = re.sub(r'("layers": \{)', rf'\1"{LAYER}": [], ', json.dumps(right))
        for text in ("", "{", "NaN", "\0" * 99, "[" * 10**5, twice, json.dumps(right)[:-1], "1" * 10**4):
            path.write_text(text)
            with refused("placement.damaged", naming=str(path)):
                read(path)
        path.write_text(json.dumps(right | {"schema_version": 2}))
        with refused("install.too-old", naming="schema version 2"):
            read(path)
        path.write_text(json.dumps(right) + " " * (17 << 20))
        with refused("file.too-large", naming=str(path)):
            read(path)
        path.unlink()
        with refused("file.unreadable", naming=str(path)):
            read(path)
        with refused("file.unreadable", naming=str(path.parent)):
            read(path.parent)


def test_a_placement_of_another_job_is_refused() -> None:
    placement = Placement(2, {LAYER: (0, 3, 1, 2)})
    check_fits(placement, {LAYER: 4}, 2)
    with refused("placement.other-ep", naming="is for ep 2, and this job has ep 4; make one with `expertmesh plan"):
        check_fits(placement, {LAYER: 4}, 4)
    other = "model.layers.1.mlp.experts"
    for layers, named in (
        ({LAYER: 8}, f"the model has 8 experts for {LAYER}, and the file has 4 experts"),
        ({LAYER: 4, other: 4}, f"the model has 4 experts for {other}, and the file has no such layer"),
        ({}, f"the model has no such layer for {LAYER}, and the file has 4 experts"),
    ):
        with refused("placement.other-model", naming=named):
            check_fits(placement, layers, 2)
