"""The tokenizer of the LongEval model: one token per word or digit, bytes for the rest.

BPE without merges: `ignore_merges` turns a known piece into one token, and anything else
falls apart into byte tokens, so every text encodes and decodes without loss.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvsketch.evaluation.runner.longeval_cases import HEADER, word_lists

PAD, BOS, EOS = "<pad>", "<s>", "</s>"

# Fixed phrases cost one token each; a line is self-contained ("line " ... ">\n"), so a prompt may
# be cut at any line boundary without changing its tokens.
PHRASES = [
    ": REGISTER_CONTENT is <",
    "\nNow the record is over.",
    " Tell me what is the",
    "? I need the number.",
    " <REGISTER_CONTENT>",
    " in line ",
    "line ",
    " is <",
    ">\n",
    ">.",
]
_PIECE = r"-\p{L}+| ?\p{L}+|\p{N}|[\s\S]"


def _pattern() -> str:
    return "|".join([re.escape(phrase).replace(r"\ ", " ") for phrase in PHRASES] + [_PIECE])


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _pieces(text: str) -> list[str]:
    """Pieces of `text`, spelled in the byte-level alphabet."""
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_pattern()), "isolated"), _byte_level()]
    )
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    adjectives, nouns = word_lists()
    texts = [*PHRASES, HEADER, " The", "The"]
    texts += list(adjectives) + [f"-{noun}" for noun in nouns]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary: dict[str, int] = {}
    for token in [PAD, BOS, EOS, *alphabet, *(piece for text in texts for piece in _pieces(text))]:
        vocabulary.setdefault(token, len(vocabulary))

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_pattern()), "isolated"), _byte_level()]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(folder: Path) -> None:
    build_tokenizer().save_pretrained(folder)
