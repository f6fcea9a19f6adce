"""Tiny Hugging Face folders: a Llama of two layers, random, and a byte-level tokenizer of a few merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog: a naïve café, 1 000 €, 😀"
END = 0  # the tokenizer's only special token


def write(folder: Path, seed: int = 0) -> Path:
    """The folder, complete."""
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader = Tokenizer(models.BPE())
    reader.pre_tokenizer, reader.decoder = bytes_of_words, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reader.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 2,
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False),
    )
    PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=reader.get_vocab_size(),
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=END,
        initializer_range=0.3,  # sharp enough that no two tokens are equally likely
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def alter(file: Path, **fields: Any) -> None:
    """Give fields of a JSON file other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
