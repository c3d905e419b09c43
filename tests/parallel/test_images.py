"""Images in a loop of one's own: every gradient, the vision tower's too, is the unsharded model's, or one sentence.

In fp64, where nothing is left of rounding: Qwen3.5-MoE, whose linear attention makes much of it in fp32, and
Qwen3-VL-MoE, whose tower also enters between the decoder's first blocks. Ranks have other numbers of rows and images of
other sizes.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expertmesh as em
from expertmesh.integrations.patches import prepare
from tests.families.tiny import random_model
from tests.support.errors import refused, refused_on_ranks
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import whole, worst

MODELS = {
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
# For each rank and row: height and width of its images in patches.
IMAGES: list[list[list[tuple[int, int]]]] = [[[(2, 4)], [(4, 4), (2, 2)], []], [[(6, 4)], []]]
_START, _IMAGE, _END = 4, 5, 6

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch, int], torch.Tensor]


def _model(family: str, **changes: Any) -> Any:
    model: Any = random_model(MODELS[family], family, torch.float64, **changes).train()
    model.set_experts_implementation("eager")  # transformers' grouped product takes no fp64
    config = model.config
    config.vision_start_token_id, config.image_token_id, config.vision_end_token_id = _START, _IMAGE, _END
    config.video_token_id = 7
    return model


def _batch(model: Any, rank: int, has_images: bool = True) -> Batch:
    vision, drawn = model.config.vision_config, torch.Generator().manual_seed(rank)
    merged, width = vision.spatial_merge_size**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    rows = IMAGES[rank] if has_images else [[] for _ in IMAGES[rank]]
    ids = []
    for number, images in enumerate(rows):
        row = torch.randint(10, 90, (6 + 3 * number + rank,), generator=drawn).tolist()
        for height, wide in images:
            row += [_START, *[_IMAGE] * (height * wide // merged), _END]
            row += torch.randint(10, 90, (3,), generator=drawn).tolist()
        ids.append(torch.tensor(row))
    length = max(map(len, ids)) + max(map(len, ids)) % 2 + (0 if has_images else 4)
    input_ids = torch.stack([F.pad(row, (0, length - len(row))) for row in ids])
    is_image, mask = input_ids == _IMAGE, torch.stack([F.pad(torch.ones_like(i), (0, length - len(i))) for i in ids])
    labels = input_ids.masked_fill(is_image | (mask == 0), -100)
    batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": is_image.int()}
    if has_images:
        grids = [(1, *image) for row in rows for image in row]
        patches = sum(height * wide for _, height, wide in grids)
        batch["pixel_values"] = torch.randn(patches, width, generator=drawn, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor(grids)
    return batch


def _with_blank_image(model: Any, batch: Batch) -> Batch:
    """The rows of text, and in the padding at the end of the first of them an image of zeros, without targets."""
    vision = model.config.vision_config
    merged, width = vision.spatial_merge_size**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    assert not batch["attention_mask"][0, -3:].any()
    batch["input_ids"][0, -3:] = torch.tensor([_START, _IMAGE, _END])
    batch["mm_token_type_ids"][0, -2] = 1
    batch["attention_mask"][0, -3:] = 1
    blank = torch.zeros(merged, width, dtype=torch.float64)
    return batch | {"pixel_values": blank, "image_grid_thw": torch.tensor([[1, 2, merged // 2]])}


def _over_all_targets(model: nn.Module, batch: Batch, targets: int) -> torch.Tensor:
    if hasattr(model, "reshard"):
        return em.causal_lm_loss(model, batch, target_tokens=targets)
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    flat, following = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(flat, following, ignore_index=-100, reduction="sum") / targets


def _own_mean(model: nn.Module, batch: Batch, targets: int) -> torch.Tensor:
    """Of each rank's targets, averaged over ranks: gradients of ours are by `like_ddp`."""
    loss: torch.Tensor = model(**batch).loss
    return loss if hasattr(model, "reshard") else loss / 2


def _compare(model: Any, loss_of: Loss, has_images: Sequence[bool], options: dict[str, Any]) -> None:
    own, rank = copy.deepcopy(model), dist.get_rank()
    batches = [_batch(model, number, has) for number, has in enumerate(has_images)]
    targets = sum(em.count_targets(batch["labels"]) for batch in batches)
    for batch in batches:
        loss_of(own, batch, targets).backward()
    expected = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    em.like_ddp(em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), **options))
    lacks_image = any(has_images) and not has_images[rank]
    loss_of(model, _with_blank_image(model, batches[rank]) if lacks_image else batches[rank], targets).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert any(has_images) == any(".visual." in name for name in expected)
    assert worst(whole(gradients), expected)[0] <= 1e-10
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert float(em.clip_grad_norm_(model, 0.5)) == pytest.approx(float(norm), rel=1e-10)


def _case(
    tied: bool, family: str, loss_of: Loss, has_images: Sequence[bool], options: dict[str, Any]
) -> tuple[int, Callable[[], None]]:
    model = _model(family, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    return 2, lambda: _compare(model, loss_of, has_images, options)


@pytest.mark.slow_cases(
    r"over all targets-(qwen3_5_moe-apart|qwen3_vl_moe-tied)",
    r"a blank image on one rank-(qwen3_5_moe-.*|qwen3_vl_moe-apart)",
    r"text alone-(qwen3_5_moe-tied|qwen3_vl_moe-.*)",
    r"own mean, checkpointed-(qwen3_5_moe-.*|qwen3_vl_moe-tied)",
    why="pairwise over losses, families and heads",
)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("loss_of", "has_images", "options"),
    [
        pytest.param(_over_all_targets, (True, True), {}, id="over all targets"),
        pytest.param(_over_all_targets, (True, False), {}, id="a blank image on one rank"),
        pytest.param(_over_all_targets, (False, False), {}, id="text alone"),
        pytest.param(_own_mean, (True, True), {"activation_checkpointing": True}, id="own mean, checkpointed"),
    ],
)
@one_launch(_case)
def test_every_gradient_with_images_is_exact(
    launched: Launched, tied: bool, family: str, loss_of: Loss, has_images: Sequence[bool], options: dict[str, Any]
) -> None:
    launched()


def _one_step(model: nn.Module, batches: Sequence[Batch], targets: int) -> None:
    em.forward_backward(model, batches, target_tokens=targets)


def _as_accelerate_does(model: Any, batches: Sequence[Batch], targets: int) -> None:
    for number, batch in enumerate(batches, start=1):
        with model.no_sync() if number < len(batches) else nullcontext():
            em.causal_lm_loss(model, batch, target_tokens=targets).backward()


def _replicas(model: Any, step: Callable[[Any, Sequence[Batch], int], None], order: Sequence[bool]) -> None:
    own, rank = copy.deepcopy(model), dist.get_rank()
    targets = sum(em.count_targets(_batch(model, number, has)["labels"]) for has in order for number in range(2))
    for has_images in order:
        for number in range(2):
            _over_all_targets(own, _batch(model, number, has_images), targets).backward()
    expected = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    prepare(em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, replicate=2))))
    for _ in range(2):  # what a step leaves behind comes in the next
        step(model, [_batch(model, rank, has_images) for has_images in order], targets)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        assert worst(whole(gradients), expected)[0] <= 1e-10
        model.zero_grad()


@pytest.mark.slow_cases(r"images first-_as.*", r"text first-_one.*", why="pairwise over orders and loops")
@pytest.mark.parametrize("step", [_one_step, _as_accelerate_does])
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["images first", "text first"])
@one_launch(lambda step, order: (2, partial(_replicas, _model("qwen3_vl_moe"), step, order)))
def test_a_tower_of_some_micro_batches_trains_between_replicas(
    launched: Launched, step: Callable[[Any, Sequence[Batch], int], None], order: Sequence[bool]
) -> None:
    launched()


def _on_one_rank(model: Any, with_images: int) -> None:
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    rank = dist.get_rank()
    batch = _batch(model, rank, rank == with_images)
    given = "pixel_values" if rank == with_images else "text alone"
    steps: list[Callable[[], Any]] = [
        lambda: em.causal_lm_loss(model, batch, target_tokens=50),
        lambda: em.forward_backward(model, [batch], target_tokens=50),
        lambda: em.like_ddp(model)(**batch),
    ]
    for run in steps:
        with refused("model.media-on-some-ranks", naming=f"called with {given} on this rank"):
            run()


@pytest.mark.parametrize("with_images", [0, 1])
def test_images_on_some_ranks_are_one_sentence_on_all(with_images: int) -> None:
    shared_ranks(_on_one_rank, 2, _model("qwen3_5_moe"), with_images)


def _in_layout(model: Any, layout: dict[str, int]) -> None:
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, **layout)))
    em.forward_backward(model, [_batch(model, 0)], target_tokens=50)


@pytest.mark.slow_cases(r"qwen3_vl_moe-layout1.*", why="two others stay")
@pytest.mark.parametrize(
    ("family", "layout", "key", "naming"),
    [
        ("qwen3_5_moe", {"pp": 2}, "layout.pp-takes-text-alone", "a batch has pixel_values"),
        ("qwen3_vl_moe", {"tp": 2}, "layout.input-per-position", "deepstack_visual_embeds"),
        ("qwen3_vl_moe", {"cp": 2}, "layout.input-per-position", "deepstack_visual_embeds"),
    ],
)
def test_images_that_a_layout_cannot_split_are_refused(
    family: str, layout: dict[str, int], key: str, naming: str
) -> None:
    with refused_on_ranks(key, naming=naming):
        shared_ranks(_in_layout, 2, _model(family), layout)
