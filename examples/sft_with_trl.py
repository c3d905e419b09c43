"""Fine-tune a Hugging Face MoE model with TRL's SFTTrainer and expert parallelism, and resume where it stopped:

    torchrun --nproc-per-node 8 examples/sft_with_trl.py Qwen/Qwen3-30B-A3B train.jsonl runs/qwen3-sft

Lines of train.jsonl are {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}, as TRL takes them.
Two CPU processes are enough to try it on a tiny model: --nproc-per-node 2.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import expertmesh as em

model, data, output = sys.argv[1:4]
on_cpu = not torch.accelerator.is_available()
args = SFTConfig(
    output,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    max_steps=int(os.environ.get("MAX_STEPS", "200")),
    learning_rate=1e-5,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    logging_steps=1,
    save_steps=100,
    save_total_limit=2,
    report_to="none",
    use_cpu=on_cpu,
    bf16=not on_cpu,
)

Trainer = em.trainer(SFTTrainer)
trainer = Trainer(
    model=model,
    args=args,
    parallel=em.ParallelConfig(ep=int(os.environ["WORLD_SIZE"])),
    train_dataset=load_dataset("json", data_files=data, split="train"),
)
trainer.train(resume_from_checkpoint=any(Path(output).glob("checkpoint-*/complete.json")))
trainer.save_model(f"{output}/model")
trainer.end()
