"""Preference training of a Hugging Face MoE model with TRL's DPOTrainer, expert parallelism and adapters:

    torchrun --nproc-per-node 8 examples/dpo_with_trl.py Qwen/Qwen3-30B-A3B pairs.jsonl runs/qwen3-dpo

Lines of pairs.jsonl are {"prompt": ..., "chosen": ..., "rejected": ...}. The reference is the model with adapters off.
"""

import os
import sys

import torch
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

import expertmesh as em

model, data, output = sys.argv[1:4]
on_cpu = not torch.accelerator.is_available()
args = DPOConfig(
    output,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    max_steps=int(os.environ.get("MAX_STEPS", "200")),
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=on_cpu,
    bf16=not on_cpu,
)

Trainer = em.trainer(DPOTrainer)
trainer = Trainer(
    model=model,
    args=args,
    parallel=em.ParallelConfig(ep=int(os.environ["WORLD_SIZE"])),
    lora=em.LoraConfig(r=16, alpha=32, targets=["attention", "experts"]),
    train_dataset=load_dataset("json", data_files=data, split="train"),
)
trainer.train()
trainer.save_model(f"{output}/adapter")
trainer.end()
