"""Tiny models that read images, with all their files, and rows with pictures: nothing is downloaded.

A processor is the family's own class; its image part has patches as small as those of the tiny tower.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    pixels: str
    """Class of its image processor."""

    @property
    def placeholder(self) -> str:
        return self.tokens["image_token_id"]


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
FAMILIES = {
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", _QWEN, "Qwen2VLImageProcessor"),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", _QWEN, "Qwen2VLImageProcessor"),
    "glm4v_moe": Family("Glm4vMoeForConditionalGeneration", _GLM, "Glm4vImageProcessor"),
}
_PIXELS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_vision_model(directory: Path, name: str) -> Path:
    """Write a random model of `FAMILIES` as its published repositories have it: weights, tokenizer, processor."""
    family = FAMILIES[name]
    image = "".join(list(family.tokens.values())[:3])
    tokenizer = bpe_tokenizer(TEMPLATE.replace("IMAGE", image))
    tokenizer.add_tokens(list(family.tokens.values()), special_tokens=True)
    text = {**CHANGES.get(name, {}).get("text_config", {}), "vocab_size": len(tokenizer) + -len(tokenizer) % 8}
    model: Any = random_model(family.model, name, text_config=text)
    for key, token in family.tokens.items():
        setattr(model.config, key, tokenizer.convert_tokens_to_ids(token))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = {**_PIXELS, "image_processor_type": family.pixels}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


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
