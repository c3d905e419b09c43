"""Reinforcement learning of a Hugging Face MoE model with TRL's GRPOTrainer and expert parallelism:

    torchrun --nproc-per-node 8 examples/grpo_with_trl.py Qwen/Qwen3-30B-A3B prompts.jsonl runs/qwen3-grpo

Lines of prompts.jsonl are {"prompt": ...}. The sharded model generates; completions are rewarded for being short.
"""

import os
import sys
from typing import Any

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

import expertmesh as em


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


model, data, output = sys.argv[1:4]
on_cpu = not torch.accelerator.is_available()
args = GRPOConfig(
    output,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=int(os.environ.get("MAX_COMPLETION", "256")),
    max_steps=int(os.environ.get("MAX_STEPS", "200")),
    learning_rate=1e-6,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=on_cpu,
    bf16=not on_cpu,
)

Trainer = em.trainer(GRPOTrainer)
trainer = Trainer(
    model=model,
    args=args,
    parallel=em.ParallelConfig(ep=int(os.environ["WORLD_SIZE"])),
    reward_funcs=reward,
    train_dataset=load_dataset("json", data_files=data, split="train"),
)
trainer.train()
trainer.save_model(f"{output}/model")
trainer.end()
