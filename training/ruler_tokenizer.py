"""The tokenizer of the spread model: one token per word, three digits or two capitals.

BPE without merges, as the LongEval model's (`tokenizer`), but a word has one form wherever it
stands: the space before it is a token of its own, or part of the phrase before.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvsketch.evaluation.runner.longeval_cases import HEADER, QUESTION, word_lists
from kvsketch.evaluation.tasks.ruler_words import all_words
from training.tokenizer import BOS, EOS, PAD

_ASKED = "mentioned in the provided text"
_CHAINS = "chain(s) of variable assignment"
# Fixed phrases cost one token each. None may swallow the end of a context together with the start
# of its question: both are encoded apart where the question is unseen.
PHRASES = (
    # LongEval
    HEADER,
    ": REGISTER_CONTENT is <",
    ">\n",
    QUESTION.split("{key}")[0],
    "? I need the number.",
    "The <REGISTER_CONTENT> in line ",
    " is <",
    ">.",
    # RULER's needles
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    "One of the special magic numbers for ",
    " is: ",
    "\nWhat is the special magic number for ",
    f" {_ASKED}? The special magic number for ",
    f" {_ASKED} is",
    "\nWhat are all the special magic numbers for ",
    f" {_ASKED}? The special magic numbers for ",
    f" {_ASKED} are",
    ", and ",
    # RULER's chains of variables
    f"Memorize and track the {_CHAINS} hidden in the following text.\n\n",
    "VAR ",
    " = VAR ",
    " = ",
    "\nQuestion: Find all variables that are assigned the value ",
    f" in the text above. Answer: According to the {_CHAINS} in the text above, "
    "5 variables are assigned the value ",
    ", they are:",
    # RULER's common words
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words "
    "that appear most often in the list are:",
    # other wordings
    "\nRepeat line ",
    " of the record.\n",
    "\nRepeat what is said about ",
    "\nRepeat all of the above.\n",
    "The code for ",
    "\nWhat is the code for ",
    "? It is ",
    " was entered under number ",
    "\nUnder which number was ",
    " entered? ",
    # any text
    ". ",
    ", ",
    "\n\n",
)
LINE = "line "  # where a LongEval line begins
LINE_END = ".\n"  # unless a question follows
_COMMON = (
    "a about after again all also always an and another any are around as at back be because "
    "been before being better between both but by can come could did do does doing don done "
    "down each even ever every few find first for from get give go going good great had has "
    "have he her here him his how i if in into is isn it its just kind know last less let "
    "life like little long look lot made make makes man many may me mean might more most much "
    "must my need never new no not now of off often on one only or other others our out over "
    "own part people place point probably put rather really right s same say see seem seems "
    "she should since so some something still such t take than that the their them themselves "
    "then there these they thing things think this those though thought through time to too "
    "try two under until up us use used very want was way we well were what when where which "
    "while who why will with without work world would year years you your "
)
# The commonest words of English prose; with a space before them they are one token too, unless they
# may be keys or counted.
COMMON_WORDS = frozenset(_COMMON.split())
_PIECES = (
    r"[A-Z]{2}(?![a-z])",
    r"\p{L}\p{Ll}*",
    r"\p{N}{1,3}",
    r"[\s\S]",
)


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """All that keys are made of or that may be counted, sorted."""
    adjectives, nouns = word_lists()
    return tuple(sorted({*all_words(), *adjectives, *nouns}))


@lru_cache(maxsize=1)
def common() -> tuple[str, ...]:
    """Of ``COMMON_WORDS``, those that are nothing else."""
    return tuple(sorted(COMMON_WORDS - set(words())))


def _pattern() -> str:
    phrases = [re.escape(p).replace(r"\ ", " ") for p in sorted(PHRASES, key=len, reverse=True)]
    line = r"line (?=[^\n:]{1,80}: REGISTER_CONTENT)"
    end = r"\.\n(?!What |Question:|Repeat |Under |\n)"
    spaced = " (?:" + "|".join(common()) + r")(?!\p{L})"
    return "|".join([*phrases, line, end, spaced, *_PIECES])


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _vocabulary() -> list[str]:
    capitals = string.ascii_uppercase
    texts = [*PHRASES, LINE_END, *(f" {word}" for word in common()), *common()]
    texts += [word.capitalize() for word in sorted(COMMON_WORDS) if len(word) > 1]
    texts += [str(number).zfill(width) for width in (1, 2, 3) for number in range(10**width)]
    texts += [first + second for first in capitals for second in capitals]
    texts += words()
    splitter = _splitter()
    pieces = [piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)]
    return [LINE.replace(" ", "\u0120"), *pieces]  # a space as the byte-level alphabet spells it


def build_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary: dict[str, int] = {}
    for token in [PAD, BOS, EOS, *alphabet, *_vocabulary()]:
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    # As most models' tokenizers do; attention that finds nothing rests there.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
    )
