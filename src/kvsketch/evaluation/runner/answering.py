"""Answers a question with a model and a cache, and measures bytes and time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvsketch.errors import AccuracyWarning
from kvsketch.evaluation.runner.encoding import EncodedCase
from kvsketch.evaluation.runner.following import Follower
from kvsketch.evaluation.runner.replies import Footprint, clock, costs, footprint, new_cache
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.tasks.base import Reply
from kvsketch.hf import SketchCache, prefill
from kvsketch.hf.passing import passed_to_generate


class Answerer:
    """A model, its tokenizer and the settings under which it answers."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self._pad = tokenizer.pad_token_id
        if self._pad is None:  # any id: padding is masked
            self._pad = tokenizer.eos_token_id or 0
        self._warm = False
        self._follower = Follower(model, settings)

    def answer(self, cases: Sequence[EncodedCase], setup: Setup) -> list[Reply]:
        """Greedy answers to a batch of cases of one answer length, each with its share of bytes and
        seconds; or the measurements on their continuations. A large measured error is no news where
        answers are scored."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the measured error", AccuracyWarning)
            return self._answer(cases, setup)

    def _answer(self, cases: Sequence[EncodedCase], setup: Setup) -> list[Reply]:
        if cases[0].measure:
            return [self._follower.reply(case, setup) for case in cases]
        if cases[0].turns:
            return [self._session(case, setup) for case in cases]
        if not self._warm:  # the first call of a process includes initialisation
            cache = DynamicCache(config=self.model.config)
            self._generate(torch.tensor([list(cases[0].ids[:8])]), None, cache, None, 2)
            self._warm = True
        ids, mask = self._batch(cases)
        # With the question unseen there is one row (Settings), so its record is the batch's.
        record = cases[0].record if self.settings.question == "unseen" else ids.shape[1]
        cache = new_cache(self.model.config, self.settings, setup, record)
        start = self._clock()
        if record < ids.shape[1]:
            self._read(ids[:, :record], mask[:, :record], cache)
        probe = _Probe(cache, self._clock)
        output = self._generate(ids, mask, cache, probe, cases[0].new_tokens)
        answers = output[:, ids.shape[1] :].tolist()
        end = self._clock()
        rows, final = len(cases), footprint(cache)
        lengths = [self._length(tokens) for tokens in answers]
        return [
            Reply(
                text=self.tokenizer.decode(tokens[:length], skip_special_tokens=True),
                prompt_tokens=len(case.ids),
                new_tokens=length,
                **costs(probe.footprint, final, rows),
                prefill_seconds=(probe.prefilled - start) / rows,
                decode_tokens=length - 1,
                decode_seconds=(end - probe.resumed) / rows,
            )
            for case, tokens, length in zip(cases, answers, lengths, strict=True)
        ]

    def _session(self, case: EncodedCase, setup: Setup) -> Reply:
        """The answers to the turns of a session, in one cache; its bytes at the end."""
        first = len(case.turns[0].text) or len(case.turns[0].question)
        cache = new_cache(self.model.config, self.settings, setup, first)
        said: list[int] = []
        answers, asked, made, reading, decoding = [], 0, 0, 0.0, 0.0
        for turn in case.turns:
            start = self._clock()
            for part in (turn.text, turn.question):
                said += part
                asked += len(part)
                if part is turn.text and part:
                    ids = torch.tensor([said])
                    self._read(ids, torch.ones_like(ids), cache)
            ids = torch.tensor([said])
            probe = _Probe(cache, self._clock)
            output = self._generate(ids, torch.ones_like(ids), cache, probe, case.new_tokens)
            tokens = output[0, len(said) :].tolist()
            end, tokens = self._clock(), tokens[: self._length(tokens)]
            reading += probe.prefilled - start
            decoding += end - probe.resumed
            made += len(tokens) - 1
            said += tokens
            answers.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        final = footprint(cache)
        return Reply(
            text="\n".join(answers),
            prompt_tokens=asked,
            new_tokens=made + len(answers),
            **costs(final, final),
            prefill_seconds=reading,
            decode_tokens=made,
            decode_seconds=decoding,
            turns=answers,
        )

    def _read(self, ids: Tensor, mask: Tensor, cache: Any) -> None:
        """The context alone, before the question is known."""
        if self.settings.queries == "prompt" or not isinstance(cache, SketchCache):
            # One token is generated and discarded: generate() has no "prefill only".
            self._generate(ids, mask, cache, None, 1)
            return
        device = self.model.device
        with torch.inference_mode():
            prefill(
                self.model,
                ids.to(device),
                cache,
                queries=self.settings.queries,
                tokenizer=self.tokenizer,
                attention_mask=mask.to(device),
                chunk_size=self.settings.prefill_chunk_size,
            )

    def _batch(self, cases: Sequence[EncodedCase]) -> tuple[Tensor, Tensor]:
        """Ids and mask `[batch, tokens]`, padded on the left."""
        width = max(len(case.ids) for case in cases)
        ids = [[self._pad] * (width - len(case.ids)) + list(case.ids) for case in cases]
        mask = [[0] * (width - len(case.ids)) + [1] * len(case.ids) for case in cases]
        return torch.tensor(ids), torch.tensor(mask)

    def _generate(
        self, ids: Tensor, mask: Tensor | None, cache: Any, probe: _Probe | None, new: int
    ) -> Tensor:
        s, device = self.settings, self.model.device
        config = GenerationConfig(
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=self._pad,
            # transformers 5.16 chunks the whole prompt again when part of it is in the cache;
            # what is left then is a question, shorter than any chunk that makes sense.
            prefill_chunk_size=None if cache.get_seq_length() else s.prefill_chunk_size,
        )
        with torch.inference_mode():
            output: Tensor = self.model.generate(
                ids.to(device),
                attention_mask=(torch.ones_like(ids) if mask is None else mask).to(device),
                **passed_to_generate(cache),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([probe] if probe else []),
            )
        return output

    def _clock(self) -> float:
        return clock(self.model.device)

    def _length(self, tokens: list[int]) -> int:
        """Tokens up to and with the first end of sequence; what follows is padding."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))


class _Probe(StoppingCriteria):  # type: ignore[misc]
    """Never stops anything: `generate` calls it after every token, and after the first one the
    prompt, and nothing else, is in the cache."""

    def __init__(self, cache: Any, clock: Any) -> None:
        self._cache = cache
        self._clock = clock
        self.footprint: Footprint
        self.prefilled = 0.0
        self.resumed = 0.0  # the time of measuring is not counted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.prefilled:
            self.prefilled = self._clock()
            self.footprint = footprint(self._cache)
            self.resumed = self._clock()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
