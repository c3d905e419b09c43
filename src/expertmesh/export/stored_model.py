"""The model of a checkpoint in one process, without its values in memory: on meta.

For export and verify. The model is built from the config that the checkpoint brings along, and has to have exactly the
tensors of the manifest. No GPU, no process group, no pickle.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import CONFIG_FILE
from expertmesh.adapters.plan import adapt
from expertmesh.checkpoint.manifest import unsafe_content
from expertmesh.checkpoint.read import SavedState, check_fits
from expertmesh.checkpoint.small_files import ADAPTER, HUGGINGFACE, read_layout
from expertmesh.checkpoint.state import model_state
from expertmesh.config import LoraConfig
from expertmesh.config.errors import SecurityError
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.weights.load import remember
from expertmesh.weights.meta_model import build_meta_model, give_dtypes, read_model_config


def stored_model(state: SavedState, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the checkpoint's model on meta, in its stored dtypes, ready to be saved in the layout that training began
    with.

    A checkpoint of a LoRA run holds the adapters alone; files then have the family's published layout. Reads config and
    layout, whose hashes the caller has compared.

    Raises:
        InputError: transformers cannot build it, or it needs remote code without the flag.
        IntegrityError: The checkpoint is not one of this model.
    """
    config, directory = read_model_config(str(state.directory / HUGGINGFACE), trust_remote_code=trust_remote_code)
    model = build_meta_model(config, torch.float32, directory=directory, trust_remote_code=trust_remote_code)
    has_adapters = holds_adapters(state)
    if has_adapters:
        adapt(model, LoraConfig(from_adapter=str(state.directory / ADAPTER)), torch.float32, None)
    targets = model_state(model)
    give_dtypes(targets, {name: DTYPES[entry.dtype] for name, entry in state.manifest.model.items()})
    check_fits(state, targets)
    layout = read_layout(model, state.directory, state.manifest)
    if not has_adapters:
        remember(model, *layout)
    return model


def holds_adapters(state: SavedState) -> bool:
    """Return whether the checkpoint holds the adapters of a LoRA run, without the model under them."""
    return f"{ADAPTER}/{CONFIG_FILE}" in state.manifest.by_name


def companion_files(state: SavedState) -> dict[str, Path]:
    """Return the files that belong beside the weights of the model, by their path there: config, tokenizer, chat
    template, code.

    Raises `SecurityError` for a link that leads out of the checkpoint, and for a pickle.
    """
    prefix = f"{HUGGINGFACE}/"
    names = [file.name for file in state.manifest.files if file.name.startswith(prefix)]
    for name in names:
        if (reason := unsafe_content(state.directory / name, state.directory)) is not None:
            raise SecurityError(reason, key="checkpoint.unsafe")
    return {name.removeprefix(prefix): state.directory / name for name in names}
