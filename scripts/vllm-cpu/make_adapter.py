#!/usr/bin/env python3
"""Make a LoRA adapter, with random weights, for the model in a directory that make_model.py made.

Usage: make_adapter.py MODEL DIRECTORY. Then serve it with
--enable-lora --max-lora-rank 8 --lora-modules NAME=DIRECTORY.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

RANK = 8


def main(model, directory):
    with open(os.path.join(model, "config.json")) as f:
        config = json.load(f)
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=generator)
    os.makedirs(directory, exist_ok=True)
    save_file(weights, os.path.join(directory, "adapter_model.safetensors"))
    with open(os.path.join(directory, "adapter_config.json"), "w") as f:
        json.dump({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none",
            "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "base_model_name_or_path": model,
        }, f)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
