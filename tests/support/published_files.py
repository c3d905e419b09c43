"""A model directory in the spelling of transformers 4, as most published models have it."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def as_published(directory: Path, **generation: Any) -> Path:
    """Spell what is in `directory`, a Qwen3-MoE with a tokenizer, as transformers 4 did, in files that no version of
    transformers would write just so; with `generation` in its generation_config.json.
    """
    config = json.loads((directory / "config.json").read_text())
    for key in ("dtype", "rope_parameters", "num_local_experts"):
        config.pop(key, None)
    older = {"torch_dtype": "float32", "rope_theta": 1000000.0, "rope_scaling": None, "num_experts": 8}
    config |= {**older, "transformers_version": "4.51.0", "max_window_layers": 48}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"top_p": 0.8, **generation}))
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    whole = json.loads((directory / "tokenizer.json").read_text())
    template = directory / "chat_template.jinja"
    settings = {
        "added_tokens_decoder": {str(a["id"]): {key: a[key] for key in _FLAGS} for a in whole["added_tokens"]},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": template.read_text(),
        **{f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("eos", "pad")},
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    template.unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": tokenizer.eos_token}}))
    (directory / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (directory / "merges.txt").write_text("\n".join(map(str, whole["model"]["merges"])))
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    return directory
