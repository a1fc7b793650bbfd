"""A random Llama of a few thousand weights and a word-level tokenizer, for tests that generate an
answer to a prompt but need no right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvsketch.evaluation.runner.longeval import LinesCase
from kvsketch.evaluation.runner.longeval_cases import HEADER, QUESTION, format_line

POSITIONS = 1024
_WORDS = ["brave", "calm", "dark", "early", "fair", "glad", "huge", "idle"]


def tiny_case(lines: int = 30, which: int = 3, expected: int | None = None) -> LinesCase:
    """A small official-format case made without `wonderwords`; about 11 tokens a line."""
    pairs = [(f"{_WORDS[i % 8]}-{_WORDS[i // 8 % 8]}", 7 * i + 1) for i in range(lines)]
    key, number = pairs[which]
    prompt = HEADER + "".join(format_line(*pair) for pair in pairs) + QUESTION.format(key=key)
    return LinesCase(prompt, number if expected is None else expected, lines, f"tiny:{which}")


def tiny_tokenizer() -> Any:
    pieces = pre_tokenizers.Split(Regex(r"\p{N}|\p{L}+|\n|[^\p{N}\p{L}\n]+"), "isolated")
    words = {piece for piece, _ in pieces.pre_tokenize_str(tiny_case(64).prompt)}
    vocabulary = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        *"0123456789",
        *sorted(words - set("0123456789")),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pieces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def tiny_model(vocab_size: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,  # large enough for attention to matter
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_model(folder: Path) -> Path:
    """Save model and tokenizer in `folder`, which `--model` then takes."""
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_llama(vocab_size: int = 96) -> Any:
    """A random Llama of 8 heads and 4 KV heads, weights large enough for attention to matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.5,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
