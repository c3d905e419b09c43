"""The diagrams of the docs: two views of the mesh, a forward of an expert layer, orders of a step, a checkpoint.

`make figures` writes them beside the picture of the README (figures.py). Ranks and their groups are those of the
product's own `Layout`. One file suits light and dark pages: its colours follow the reader's setting.
"""

from collections.abc import Iterator, Sequence

from expertmesh.distributed.layout import EXPERT_AXES, Layout

_STYLE = """<style>
text { fill: #1f2328; font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
.faint { fill: #6e7781 } .strong { font-weight: 600; font-size: 14px } .middle { text-anchor: middle }
.box { fill: #eef1f4; stroke: #8c959f } .a { fill: #cfe3fb; stroke: #0969da } .b { fill: #fde3cf; stroke: #cf5b00 }
.line { fill: none; stroke: #6e7781; stroke-width: 1.5 } .head { fill: #6e7781 }
.wait { fill: none; stroke: #cf5b00; stroke-width: 1.5; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .faint { fill: #8d96a0 }
.box { fill: #21262d; stroke: #7d8590 } .a { fill: #0c2d55; stroke: #58a6ff } .b { fill: #4a2512; stroke: #f0883e }
.line { stroke: #8d96a0 } .head { fill: #8d96a0 } .wait { stroke: #f0883e }
}
</style>"""


def diagrams() -> dict[str, str]:
    """By file name, the text of each diagram."""
    return {
        "mesh.svg": _svg(760, 232, "Two views of the same ranks", _mesh()),
        "expert-layer.svg": _svg(760, 268, "One forward of an expert layer on two ranks", _expert_layer()),
        "orders.svg": _svg(760, 248, "Two orders of the micro-batches of a step", _orders()),
        "checkpoint.svg": _svg(760, 236, "Each rank writes its own parts; the manifest comes last", _checkpoint()),
    }


def _svg(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    )
    return "\n".join([opening, f"<title>{title}</title>", _STYLE, *parts, "</svg>"]) + "\n"


def _mesh() -> Iterator[str]:
    """Eight ranks with ep 4, once as dense parameters see them and once as experts do."""
    layout = Layout(fsdp=8, ep=4)
    yield _text(20, 24, "Attention, norms, router: fsdp 8", "strong")
    for rank in range(layout.world_size):
        yield from _rank(20 + 90 * rank, 36, rank, "a", "1/8 of each")
    yield _text(20, 122, "Experts: efsdp 2 × ep 4, on the same ranks", "strong")
    rows: Sequence[Sequence[int]] = layout.groups(EXPERT_AXES[-1])
    for row, ranks in enumerate(rows):
        y = 134 + 46 * row
        for place, rank in enumerate(ranks):
            yield from _rank(20 + 135 * place, y, rank, "b", f"experts {2 * place}, {2 * place + 1}; half", 125)
        yield _text(566, y + 23, "all-to-all of rows: ep", "faint")
    yield _text(540, 226, "gathers and sums, by column: efsdp", "faint")


def _rank(x: float, y: float, rank: int, kind: str, holds: str, width: float = 80) -> Iterator[str]:
    yield _box(x, y, width, 38, kind)
    yield _text(x + width / 2, y + 16, f"rank {rank}", "middle")
    yield _text(x + width / 2, y + 31, holds, "middle faint")


def _expert_layer() -> Iterator[str]:
    stages = (("1 router", "top-k, scores"), ("2a dispatch", "a row a rank"), ("2b experts", "grouped products"))
    stages += (("2c combine", "sums come back"),)
    yield _text(20, 24, "One forward of an expert layer", "strong")
    for lane, y in enumerate((44, 144)):
        yield _text(20, y + 30, f"rank {lane}", "faint")
        for place, (name, what) in enumerate(stages):
            x = 90 + 170 * place
            sends = name.startswith(("2a", "2c"))
            yield _box(x, y, 130, 48, "b" if sends else "box")
            yield _text(x + 65, y + 21, name, "middle")
            yield _text(x + 65, y + 38, what, "middle faint")
            if place:
                yield from _arrow(x - 40, y + 24, x - 2, y + 24)
    for x in (260 + 65, 600 + 65):
        yield f'<path class="wait" d="M{x} 94V142"/>'
        yield _text(x + 8, 122, "all-to-all", "faint")
    yield _box(260, 208, 300, 34, "a")
    yield _text(410, 229, "3 shared expert, while rows are in flight", "middle")
    yield _text(
        20,
        262,
        "Backward sends the same rows the other way: one host wait a layer in forward, none in backward.",
        "faint",
    )


def _orders() -> Iterator[str]:
    """Two micro-batches through three blocks and back, with what FSDP2 gathers and reduces in each order."""
    blocks, batches = 3, "ab"
    there, back = range(1, blocks + 1), range(blocks, 0, -1)
    by_micro_batch = [
        (each, block, way) for each in batches for way, order in (("F", there), ("B", back)) for block in order
    ]
    by_layer = [(each, block, way) for way, order in (("F", there), ("B", back)) for block in order for each in batches]
    for name, passes, y in (("by_micro_batch", by_micro_batch, 12), ("by_layer", by_layer, 114)):
        # By layer a block stays gathered for all micro-batches of a round, the last one also until its backward.
        gathers = [
            name == "by_micro_batch" or not place or block != passes[place - 1][1]
            for place, (_, block, _) in enumerate(passes)
        ]
        reduces = [way == "B" and (name == "by_micro_batch" or each == batches[-1]) for each, _, way in passes]
        yield _text(20, y + 14, f"{name}: {sum(gathers)} gathers, {sum(reduces)} reductions", "strong")
        for place, (each, block, way) in enumerate(passes):
            x = 20 + 60 * place
            yield _box(x, y + 26, 54, 28, "a" if each == batches[0] else "b")
            yield _text(x + 27, y + 45, f"{way}{block} {each}", "middle")
            for mark, shown, below in (("gather", gathers, 69), ("reduce", reduces, 84)):
                if shown[place]:
                    yield _text(x + 27, y + below, mark, "middle faint")
    yield _text(
        20,
        236,
        "F1 a: forward of block 1 with micro-batch a; B: backward. By layer, a round of more micro-batches adds none.",
        "faint",
    )


def _checkpoint() -> Iterator[str]:
    yield _text(20, 24, "step-00000100", "strong")
    for rank in range(4):
        y = 40 + 44 * rank
        yield _box(20, y, 110, 32, "a")
        yield _text(75, y + 21, f"rank {rank}", "middle")
        yield from _arrow(130, y + 16, 208, y + 16)
        yield _box(210, y, 250, 32, "box")
        yield _text(335, y + 21, f"model-0000{rank}-of-00004.safetensors", "middle")
        yield f'<path class="line" d="M460 {y + 16}H500V{122}"/>'
    yield from _arrow(500, 122, 538, 122)
    yield _box(540, 92, 200, 60, "b")
    yield _text(640, 116, "manifest.json, last", "middle")
    yield _text(640, 136, "who wrote which part; hashes", "middle faint")
    yield _text(
        20,
        228,
        "No rank gathers a tensor. Any number of ranks reads it again, each only the bytes of its new shards.",
        "faint",
    )


def _arrow(x: float, y: float, end_x: float, end_y: float) -> Iterator[str]:
    yield f'<path class="line" d="M{x} {y}L{end_x - 6} {end_y}"/>'
    yield f'<path class="head" d="M{end_x} {end_y}l-9 -4v8z"/>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}">{words}</text>'
