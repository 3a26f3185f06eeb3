#!/usr/bin/env python3
"""Make the model that serve.sh serves: a small Qwen2 with a tokenizer and random weights.

Usage: make_model.py DIRECTORY, with LAYERS and HIDDEN in the environment.

Most replicas ignore the weights (--load-format dummy): with vLLM's own, which are
smaller, the text hardly depends on the prompt. Where KV caches are transferred it
must, so that a wrong block changes the text. The tokenizer is trained on the sources of Python's standard library,
which lie on every machine that can run this, sorted by name: the same Python
gives the same tokenizer.
"""

import glob
import json
import os
import sys
import sysconfig

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Qwen's order: system, then tools, then the turns, so that what a real model
# makes of a request's prefix is what this one makes of it.
CHAT_TEMPLATE = """\
{%- set ns = namespace(rest=messages) %}
{%- if messages and messages[0].role in ('system', 'developer') %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- set ns.rest = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to use one.<|im_end|>\\n' }}
{%- endif %}
{%- for m in ns.rest %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}{{- m.content }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
        {%- set f = call.function or call %}
        {{- '<tool_call>{"name": "' + f.name + '", "arguments": ' }}
        {{- f.arguments if f.arguments is string else (f.arguments | tojson) }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def corpus():
    """Yield the standard library's top-level sources, one file at a time."""
    for path in sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py"))):
        with open(path, encoding="utf-8", errors="replace") as source:
            yield source.read()


def make_tokenizer():
    """Train a byte-level BPE tokenizer and give it the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def config(layers, hidden, tokenizer):
    """Return config.json: one key-value head of 64, so a token of cache takes 512 bytes a layer in float32."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "torch_dtype": "float32",
    }


def weights(c):
    """Return random weights for a config, so large that attention and not the last token decides the next one."""
    torch.manual_seed(0)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    queries, keys = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]

    def matrix(outputs, inputs, gain=1.0):
        return torch.randn(outputs, inputs) * gain / inputs**0.5

    w = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden, 3),
    }
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size, gain in (("q", queries, 2.5), ("k", keys, 2.5), ("v", keys, 2.0)):
            w[f"{prefix}self_attn.{name}_proj.weight"] = matrix(size, hidden, gain)
            w[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(size)
        w[prefix + "self_attn.o_proj.weight"] = matrix(hidden, queries, 2)
        w[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        w[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        w[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
        w[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        w[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    return w


def write(directory, name, value):
    with open(os.path.join(directory, name), "w", encoding="utf-8") as out:
        json.dump(value, out, indent=2)


def main():
    directory = sys.argv[1]
    os.makedirs(directory, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write(directory, "generation_config.json", ends)

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
        sys.exit("make_model.py: the tokenizer does not give back the text it was given")

    # Last: setup.sh takes this file for the sign that the model is complete.
    layers, hidden = int(os.environ.get("LAYERS", 2)), int(os.environ.get("HIDDEN", 128))
    model = config(layers, hidden, tokenizer)
    save_file(weights(model), os.path.join(directory, "model.safetensors"), {"format": "pt"})
    write(directory, "config.json", model)


main()
