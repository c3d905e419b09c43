"""Made `golden/`: a real checkpoint by two ranks of ep 2, and the hashes of what it holds.

Not run by the tests. Later versions have to read its files as they are; run it again only for a new schema version,
into a new directory: `python -m tests.checkpoint.make_golden DIRECTORY`.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

import expertmesh as em
from tests.checkpoint.tiny import Job
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).with_name("golden")
STEP = 2
FAMILY = "deepseek_v3"  # a dense layer, shared experts, a persistent buffer
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}


def golden_job(parallel: em.ParallelConfig, seed: int = 0) -> Job:
    return Job(tiny_model(FAMILY, seed=seed, **SIZES), parallel)


def sha256(tensor: torch.Tensor) -> str:
    """Over dtype, shape and the bytes, row-major."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data).hexdigest()


def _train_and_save(directory: Path) -> dict[str, str]:
    job = golden_job(em.ParallelConfig(ep=2))
    job.train(range(STEP))
    em.save_checkpoint(job.model, job.optimizer, directory, step=STEP, state={"rows": 16})
    return {name: sha256(tensor) for name, tensor in job.state().items()}


def main(directory: Path) -> None:
    hashes = run_ranks(_train_and_save, 2, directory)[0]
    (directory / "tensors.json").write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
