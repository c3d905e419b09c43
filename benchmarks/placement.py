"""The busiest EP rank under contiguous and balanced placement and with copies, of skewed routing; a step's time.

    python -m benchmarks.placement            # rows and pairs, simulated; no rank is started
    python -m benchmarks.placement --time     # steps on two ranks of one thread
    python -m benchmarks.placement --routes MODEL ROWS.jsonl   # the routes that a model takes for 300 rows of text

A token takes the top k of Zipf(1.0) log-probabilities with Gumbel noise of its own, so that experts are drawn without
replacement. Which expert is how popular is drawn anew for each layer. The placement is made from one half of the tokens
and judged on the other half. Rows are what travels: a token once to each rank that holds any of its experts.

    T tokens, K top-k, E experts, R ranks
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import expertmesh as em
from benchmarks.probes import median
from benchmarks.result import markdown
from expertmesh.experts.pairs import count_together
from expertmesh.experts.placement import (
    Copied,
    Placement,
    balanced,
    busiest,
    least_busiest,
    slots_from,
    write_placement,
)

EPS = (8, 16, 32, 64, 128, 256)
LAYERS, TOKENS, SEED = 16, 32_768, 0
REPLICAS = 2
# All over the mean of ranks, but totals of rows, which are over that of contiguous placement.
COLUMNS = (
    "contiguous: pairs",
    "rows",
    "balanced: pairs",
    "rows",
    "rows in total",
    f"{REPLICAS} copies: pairs",
    "rows",
    "rows in total",
    "pairs without copies, at least",
)


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of a published model."""

    name: str
    experts: int
    top_k: int


ROUTINGS = (Routing("Qwen3-30B-A3B", 128, 8), Routing("DeepSeek-V3", 256, 8))


def choices(routing: Routing, draw: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return the experts of each token of one layer, `[2T, K]`."""
    weight_E = draw.permutation(-np.log(np.arange(1, routing.experts + 1))).astype(np.float32)
    scores_TE = weight_E + draw.gumbel(size=(2 * TOKENS, routing.experts)).astype(np.float32)
    return np.argpartition(-scores_TE, routing.top_k, axis=1)[:, : routing.top_k]


def work_of_ranks(chosen_TK: npt.NDArray[np.intp], order: Sequence[int], copies: Copied) -> npt.NDArray[np.intp]:
    """Return the pairs and the rows that each rank receives, `[2, R]`; tokens come from all ranks by turns."""
    ep = len(copies)
    slots, found = len(order) // ep + len(copies[0]), np.zeros((2, ep), dtype=np.intp)
    for rank in range(ep):
        ways, chosen = slots_from(rank, order, copies), chosen_TK[rank::ep]
        most = max(map(len, ways))
        rank_EM = np.array([[*each, *[0] * (most - len(each))] for each in ways]) // slots
        turns_E = np.array([len(each) for each in ways])
        rank_TK = np.sort(rank_EM[chosen, np.arange(len(chosen))[:, None] % turns_E[chosen]], axis=1)
        found[0] += np.bincount(rank_TK.ravel(), minlength=ep)
        found[1] += np.bincount(rank_TK[np.diff(rank_TK, axis=1, prepend=-1) > 0], minlength=ep)
    return found


def figures(chosen: npt.NDArray[np.intp], experts: int, ep: int) -> list[float]:
    """Return one layer's figures, in the order of `COLUMNS`."""
    seen, later = (np.bincount(half.ravel(), minlength=experts).tolist() for half in np.split(chosen, 2))
    replicas = min(REPLICAS, experts - experts // ep)
    placements = [
        Placement(ep, {"": tuple(range(experts))}),
        balanced({"": seen}, ep),
        balanced({"": seen}, ep, replicas),
    ]
    found, total = list[float](), 0.0
    for placement in placements:
        work = work_of_ranks(chosen[TOKENS:], placement.orders[""], placement.copies.get("", ((),) * ep))
        found += (work.max(1) / work.mean(1)).tolist()
        total = total or float(work[1].sum())
        found += [] if placement is placements[0] else [float(work[1].sum()) / total]
    assert found[0] == busiest(later, range(experts), ep)
    return [*found, least_busiest(later, ep)]


EXPERTS, TOP_K, MODEL_LAYERS, ROWS, POSITIONS, STEPS = 16, 2, 4, 8, 256, 9


def step_times(rank: int, directory: str) -> None:
    """Time steps of a model whose routes give one half of the experts 70 % of the pairs; rank 0 prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    weight_E = np.concatenate([0.7 / np.arange(1, 9) / np.sum(1 / np.arange(1, 9)), np.full(8, 0.3 / 8)])
    draw = np.random.default_rng(SEED)
    scores = np.log(weight_E) + draw.gumbel(size=(2, ROWS, POSITIONS, MODEL_LAYERS, EXPERTS))
    routes = np.argpartition(-scores, TOP_K, axis=-1)[..., :TOP_K]
    loads = {
        f"model.layers.{layer}.mlp.experts": np.bincount(routes[..., layer, :].ravel(), minlength=EXPERTS).tolist()
        for layer in range(MODEL_LAYERS)
    }
    ids = torch.from_numpy(draw.integers(0, 256, (2, ROWS, POSITIONS)))[rank]
    batch = {"input_ids": ids, "labels": ids, "routes": torch.from_numpy(routes[rank].astype(np.int32))}
    jobs: dict[str, Any] = {}
    for what, lora in (("full", None), ("lora", em.LoraConfig(r=8, targets=("experts",)))):
        for name, replicas in (("contiguous", 0), ("balanced", 0), *((("2 copies", 2),) if lora else ())):
            moe = em.MoeConfig()
            if name != "contiguous":
                path = Path(directory, f"{rank}-{what}-{replicas}.json")
                write_placement(balanced(loads, 2, replicas), path)
                moe = em.MoeConfig(placement=str(path), replicas=replicas)
            jobs[f"{what}, {name}"] = model(moe, lora)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses: dict[str, float] = {}
    for _ in range(STEPS + 1):
        for name, job in jobs.items():
            dist.barrier()
            began = time.perf_counter()
            loss = em.causal_lm_loss(job, batch, target_tokens=2 * ROWS * (POSITIONS - 1))
            loss.backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            losses.setdefault(name, float(loss.detach()))
            job.zero_grad(set_to_none=True)
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    if rank == 0:
        shares = [sum(load_E[:8]) / sum(load_E) for load_E in loads.values()]
        print(f"the first half of the experts gets {min(shares):.0%} to {max(shares):.0%} of the pairs")
        rows = []
        for name, each in seconds.items():
            base = seconds[f"{name.partition(',')[0]}, contiguous"]
            ratio = median([one / other for one, other in zip(each[1:], base[1:], strict=True)])
            rows.append([name, f"{median(each[1:]):.3f}", f"{ratio:.2f}"])
        print(markdown(["training", "s a step (median)", "of contiguous"], rows))
    dist.destroy_process_group()


def model(moe: em.MoeConfig, lora: em.LoraConfig | None) -> Any:
    """Return a Qwen3-MoE on ep 2 with random weights, the same on all ranks."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=1024,
        num_hidden_layers=MODEL_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    torch.manual_seed(SEED)
    return em.parallelize(Qwen3MoeForCausalLM(config), em.init_mesh(em.ParallelConfig(ep=2)), moe=moe, lora=lora)


ROUTED_ROWS, ROUTED_POSITIONS = 300, 256


def recorded_choices(directory: str, rows: Path) -> list[torch.Tensor]:
    """Return the experts that an unsharded model chooses for the first lines of a file, `[T, K]` by layer, shuffled."""
    model = AutoModelForCausalLM.from_pretrained(directory, output_router_logits=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chosen = list[list[torch.Tensor]]()
    with rows.open(encoding="utf-8") as lines, torch.no_grad():
        for line in itertools.islice(lines, ROUTED_ROWS):
            text = " ".join(map(str, json.loads(line).values()))
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=ROUTED_POSITIONS)
            chosen.append(
                [logits.topk(model.config.num_experts_per_tok).indices for logits in model(**ids).router_logits]
            )
    layers = [torch.cat(layer) for layer in zip(*chosen, strict=True)]
    return [layer[torch.randperm(len(layer), generator=torch.Generator().manual_seed(SEED))] for layer in layers]


def recorded_figures(chosen_TK: torch.Tensor, experts: int, ep: int, nodes: int) -> list[list[float]]:
    """Return the figures of one layer under contiguous, balanced and co-located placement.

    They are made from the first half of the tokens and judged on the other: pairs of the busiest rank over the mean,
    its rows over all tokens, and the ranks and nodes that a token is sent to.
    """
    seen, later = chosen_TK.chunk(2)
    pairs_EE = count_together(seen, experts)
    load = {"": pairs_EE.diagonal().tolist()}
    orders = [tuple(range(experts)), *(balanced(load, ep, 0, each).orders[""] for each in (None, {"": pairs_EE}))]
    figures = []
    for order in orders:
        rank_TK = (torch.tensor(order).argsort() // (experts // ep))[later]
        hit_TR = torch.zeros(len(later), ep).scatter_(1, rank_TK, 1.0)
        pairs_R = rank_TK.flatten().bincount(minlength=ep)
        hit_TN = hit_TR.view(-1, nodes, ep // nodes).amax(-1)
        work = hit_TR.sum(0).max(), hit_TR.sum(), hit_TN.sum()
        figures.append([int(pairs_R.max()) * ep / rank_TK.numel(), *(float(each) / len(later) for each in work)])
    return figures


def print_recorded(directory: str, rows: Path) -> None:
    """Print the figures of every layout for one model and one file of rows."""
    layers = recorded_choices(directory, rows)
    experts = AutoConfig.from_pretrained(directory).num_experts
    table = []
    for ep, nodes in ((4, 2), (8, 2), (8, 4), (16, 2), (16, 4)):
        found = np.array([recorded_figures(chosen, experts, ep, nodes) for chosen in layers]).mean(0)
        for name, figures in zip(("contiguous", "balanced", "balanced, with pairs"), found, strict=True):
            table.append([f"{ep} on {nodes} nodes", name, *(f"{figure:.2f}" for figure in figures)])
    print(markdown(["ep", "placement", "pairs: busiest rank", "rows: busiest rank", "ranks", "nodes"], table))


def main() -> None:
    if "--routes" in sys.argv:
        directory, rows = sys.argv[sys.argv.index("--routes") + 1 :]
        print_recorded(directory, Path(rows))
        return
    if "--time" in sys.argv:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(step_times, (directory,), 2)  # type: ignore[no-untyped-call]
        return
    print(f"| model | ep | {' | '.join(COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for routing in ROUTINGS:
        draw = np.random.default_rng(SEED)
        layers = [choices(routing, draw) for _ in range(LAYERS)]
        for ep in (ep for ep in EPS if routing.experts % ep == 0):
            found = np.array([figures(chosen, routing.experts, ep) for chosen in layers])
            cells = [f"{mean:.2f} ({worst:.2f})" for mean, worst in zip(found.mean(0), found.max(0), strict=True)]
            print(f"| {routing.name} | {ep} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
