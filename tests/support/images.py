"""Tiny models that read images, with all their files, and rows with pictures: nothing is downloaded.

A processor is the family's own class; its image part has patches as small as those of the tiny tower.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.families.tiny import CHANGES, random_model

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{{- 'IMAGE' if part.type == 'image' else part.text }}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A family of models that read images."""

    model: str
    """Name of its class."""
    tokens: dict[str, str]
    """Its tokens of images, by key of its configuration: the start of an image, the image, its end, a video."""
    pixels: dict[str, Any]
    """Settings of its image processor."""
    around: tuple[str, str] = ("", "")
    """What its processor writes around the tokens of an image."""
    named: tuple[str, ...] = ()
    """Names by which its processor asks the tokenizer for tokens."""
    placeholder: str = ""
    """What the template writes for an image; empty for the token of images, with those around it."""
    needs: str = ""
    """A package without which its processor is not there."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes of the tiny configuration, if not those of CHANGES."""

    @property
    def image(self) -> str:
        """The token whose embedding the model replaces."""
        return self.tokens["image_token_id"]

    @property
    def written(self) -> str:
        """What stands for an image in a row's text before the processor reads it."""
        return self.placeholder or self.image


_QWEN = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
_GLM = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_token_id": "<|image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_token_id": "<|video|>",
}
_GEMMA = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>",
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
}
_PIXELS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_OF_QWEN, _OF_GLM = ({**_PIXELS, "image_processor_type": f"{name}ImageProcessor"} for name in ("Qwen2VL", "Glm4v"))
# As the published mixture: images attend to themselves in both directions, and nothing reads sound.
_GEMMA_CONFIG = {
    "text_config": CHANGES["gemma4"],
    "vision_config": {"position_embedding_size": 128},
    "audio_config": None,
}
_LLAMA = {
    "image_token_id": "<|patch|>",
    "boi_token_id": "<|image_start|>",
    "eoi_token_id": "<|image_end|>",
    **{name: f"<|{name}|>" for name in ("image", "tile_x_separator", "tile_y_separator")},
}
_LLAMA_CONFIG = {
    "text_config": {**CHANGES["llama4"], "max_position_embeddings": 256},
    "vision_config": {
        **CHANGES["llama4_published"]["vision_config"],
        "intermediate_size": 128,  # four patches of the hidden size, which its adapter takes at once
    },
}
FAMILIES = {
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", _QWEN, _OF_QWEN),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", _QWEN, _OF_QWEN),
    "glm4v_moe": Family("Glm4vMoeForConditionalGeneration", _GLM, _OF_GLM),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        _GEMMA,
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
        ("<|image>", "<image|>"),
        ("image_token", "boi_token", "eoi_token", "video_token", "audio_token", "boa_token", "eoa_token"),
        placeholder="<|image|>",
        config=_GEMMA_CONFIG,
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        _LLAMA,
        {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 16, "width": 16}, "max_patches": 4},
        ("<|image_start|>", "<|image_end|>"),
        placeholder="<|image|>",
        needs="torchvision",
        config=_LLAMA_CONFIG,
    ),
}


def write_vision_model(directory: Path, name: str) -> Path:
    """Write a random model of `FAMILIES` as its published repositories have it: weights, tokenizer, processor."""
    family = FAMILIES[name]
    # Where the processor writes what is around an image, the template does not.
    image = family.placeholder or "".join(list(family.tokens.values())[:3])
    tokenizer = bpe_tokenizer(TEMPLATE.replace("IMAGE", image))
    tokenizer.add_tokens(list(family.tokens.values()), special_tokens=True)
    config = family.config or CHANGES.get(name, {})
    text = {"vocab_size": len(tokenizer) + -len(tokenizer) % 8, "max_position_embeddings": 256}
    text = {**config.get("text_config", {}), **text}
    model: Any = random_model(family.model, "", **{**config, "text_config": text})
    for key, token in family.tokens.items():
        if hasattr(model.config, key):
            setattr(model.config, key, tokenizer.convert_tokens_to_ids(token))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path, named = directory / "tokenizer_config.json", dict(zip(family.named, family.tokens.values(), strict=False))
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    (directory / "preprocessor_config.json").write_text(json.dumps(family.pixels))
    if name == "llama4":
        (directory / "processor_config.json").write_text(json.dumps({"patch_size": 4}))
    return directory


def image_texts(family: Family, found: dict[str, Any]) -> list[str]:
    """What stands for each image in a row's text, by what the family's image processor gives for the row.

    Takes what is not the model's out of `found`.
    """
    counts, ratios = found.pop("num_soft_tokens_per_image", None), found.pop("aspect_ratios", None)
    if ratios is not None:  # tiles of four tokens, row by row, and the image as one more
        tile, (x, y) = family.image * 4, ("<|tile_x_separator|>", "<|tile_y_separator|>")
        tiles = [(x.join([tile] * int(width)) + y) * int(height) * (height * width > 1) for height, width in ratios]
        return [f"{each}{family.placeholder}{tile}".join(family.around) for each in tiles]
    if counts is None:
        counts = [int(grid.prod()) // 4 for grid in found["image_grid_thw"]]
    return [(family.image * int(count)).join(family.around) for count in counts]


def is_vision(name: str) -> bool:
    """Return whether a parameter's name is one of a tower, or of what brings its output to the text's width."""
    parts = ("visual.", "vision_tower.", "embed_vision.", "vision_model.", "multi_modal_projector.")
    return any(part in name for part in parts)


def write_picture(path: Path, size: tuple[int, int], seed: int) -> Path:
    """Write an image of noise, (width, height) pixels, of the kind that its suffix names."""
    from PIL import Image

    width, height = size
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.numpy()).save(path)
    return path


def row_of(images: Sequence[Any], question: str, answer: str) -> dict[str, Any]:
    """Return a row of format messages with images before the question."""
    parts = [{"type": "image", "image": image} for image in images]
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": question}] if parts else question},
            {"role": "assistant", "content": answer},
        ]
    }


SIZES = [(16, 8), (16, 16), (8, 8), (24, 16), (9, 30), (40, 24)]
PICTURES = ([0], [1, 2], [], [], [3], [], [], [4, 5])
"""For each row the pictures of `SIZES` that it has."""


def write_rows(directory: Path, pictures: Sequence[Sequence[int]] = PICTURES) -> Path:
    """Write rows with images beside them, in files that rows name relatively."""
    names = [f"pictures/{n}.{'jpg' if n % 2 else 'png'}" for n in range(len(SIZES))]
    for number, (name, size) in enumerate(zip(names, SIZES, strict=True)):
        write_picture(directory / name, size, number)
    words = "the module returns a list of all names and the message is not logged".split()  # noqa: SIM905
    rows = [
        row_of([names[each] for each in of_row], f"What is {words[n % 7]} {n}?", " ".join(words[n % 5 : n % 5 + 3 + n]))
        for n, of_row in enumerate(pictures)
    ]
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
