"""Trains the LongEval model: `python -m training.train --out DIR --seed 0 [--resume]`.

Writes DIR/checkpoint.pt (to resume), DIR/log.jsonl and DIR/model (the best snapshot so far).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvsketch.evaluation.runner.longeval_cases import generate_cases
from training.data import Batch, Sequences
from training.evaluate import forced
from training.schedule import STAGES, Stage
from training.tokenizer import build_tokenizer

PEAK_RATE = 2e-3
WARM_UP = 100
CHECKPOINT_SECONDS = 60
HELD_OUT_SEED = 123_456_789
HELD_OUT_CASES = {200: 16, 300: 16, 400: 16, 680: 12}


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        # Slow frequencies: keys must match whatever their distance.
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, muon: bool) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    chosen = {id(p) for p in matrices} if muon else set()
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    ]
    if muon:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=PEAK_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def hidden_states(
    model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Plain causal attention at any positions.

    `LlamaModel.forward` would read a jump in the positions as the start of another document.
    """
    inner = model.model
    hidden = inner.embed_tokens(ids)
    rotary = inner.rotary_emb(hidden, positions)
    for layer in inner.layers:
        hidden = layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
        )
    return inner.norm(hidden)


def loss_and_accuracy(
    model: LlamaForCausalLM, batch: Batch, dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """Mean loss of the predicted tokens, and the share of numbers predicted without a fault."""
    ids = torch.from_numpy(batch.ids)
    wanted = torch.from_numpy(batch.loss)[:, 1:]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = hidden_states(model, ids, torch.from_numpy(batch.positions))
        # Logits are the largest tensor: only compute those with a loss.
        logits = model.lm_head(hidden[:, :-1][wanted])
    targets = ids[:, 1:][wanted]
    loss = F.cross_entropy(logits.float(), targets)
    wrong = (logits.argmax(-1) != targets).numpy()
    answers = batch.answer[:, 1:][wanted.numpy()]
    numbers = np.unique(answers[answers >= 0])
    missed = np.unique(answers[wrong & (answers >= 0)])
    return loss, 1 - len(missed) / max(len(numbers), 1)


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, summary: dict, folder: Path
) -> None:
    """Writes beside `folder`, then swaps file by file: readers never see half a file."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    GenerationConfig(
        do_sample=False,
        max_new_tokens=48,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(draft)
    (draft / "training_log.json").write_text(json.dumps(summary, indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for file in draft.iterdir():
        file.chmod(0o644)
        os.replace(file, folder / file.name)
    draft.rmdir()


class Run:
    """Everything a checkpoint holds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self.arguments = arguments
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = build_tokenizer()
        self.sequences = Sequences(self.tokenizer)
        self.model = build_model(self.tokenizer)
        self.optimizers = build_optimizers(self.model, arguments.optimizer == "muon")
        self.dtype = torch.float32 if arguments.float32 else torch.bfloat16
        self.held_out = {
            lines: generate_cases(lines, count, HELD_OUT_SEED)
            for lines, count in HELD_OUT_CASES.items()
        }
        self.state = {
            "step": 0, "stage": 0, "stage_step": 0, "tokens": 0, "seconds": 0.0,
            "recent": [], "best": 0.0, "curriculum": [], "losses": [],
        }  # fmt: skip

    def save(self) -> None:
        path = self.out / "checkpoint.pt"
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "torch_rng": torch.get_rng_state(),
                "state": self.state,
            },
            path.with_suffix(".draft"),
        )
        os.replace(path.with_suffix(".draft"), path)

    def load(self) -> None:
        saved = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(saved["torch_rng"])
        self.state = saved["state"]

    def log(self, **fields: object) -> None:
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
        )
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def rate(self, stage: Stage) -> float:
        rate = PEAK_RATE * min(1.0, (self.state["step"] + 1) / WARM_UP)
        if stage.decay:
            rate *= max(1 - self.state["stage_step"] / stage.most, 0.01)
        return rate

    def step(self, stage: Stage) -> tuple[float, float, int]:
        # The batch depends on seed and step alone, so a resumed run sees the same data.
        rng = np.random.default_rng((self.arguments.seed, self.state["step"]))
        weights = np.array([weight for weight, _ in stage.mixtures])
        chosen = int(rng.choice(len(weights), p=weights / weights.sum()))
        batch = self.sequences.batch(stage.mixtures[chosen][1], rng)
        loss, accuracy = loss_and_accuracy(self.model, batch, self.dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(stage)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state["tokens"] += batch.ids.size
        return loss.item(), accuracy, batch.ids.shape[1]

    def evaluate(self, stage: Stage, final: bool = False) -> None:
        self.model.eval()
        scores = {
            str(lines): forced(self.model, self.tokenizer, cases)
            for lines, cases in self.held_out.items()
        }
        self.model.train()
        total = sum(scores.values())
        # Equal scores go to the later model, which has seen more. The end of the decay ships
        # whatever a handful of held-out cases says: it is the model the schedule is made for.
        better = final or (total >= self.state["best"] and total > 0)
        self.log(
            event="evaluation", stage=stage.name, step=self.state["step"],
            tokens=self.state["tokens"], seconds=self.state["seconds"],
            accuracy=scores, exported=better,
        )  # fmt: skip
        if better:
            self.state["best"] = total
            summary = {
                "seed": self.arguments.seed,
                "optimizer": self.arguments.optimizer,
                "dtype": str(self.dtype).removeprefix("torch."),
                "stage": stage.name,
                "step": self.state["step"],
                "tokens": self.state["tokens"],
                "minutes": round(self.state["seconds"] / 60, 1),
                "held_out_cases": {str(k): v for k, v in HELD_OUT_CASES.items()},
                "held_out_accuracy": scores,
                "curriculum": self.state["curriculum"],
            }
            for folder in [self.out / "model", *self.arguments.export]:
                export(self.model, self.tokenizer, summary, folder)

    def train(self) -> None:
        state = self.state
        saved_at = time.monotonic()
        while state["stage"] < len(STAGES):
            stage = STAGES[state["stage"]]
            began = time.monotonic()
            loss, accuracy, length = self.step(stage)
            state["losses"].append(loss)
            state["step"] += 1
            state["stage_step"] += 1
            state["recent"] = [*state["recent"][-19:], accuracy]
            state["seconds"] += time.monotonic() - began
            mean = sum(state["recent"]) / len(state["recent"])
            if state["step"] % 25 == 0:
                self.log(
                    stage=stage.name, step=state["step"], tokens=state["tokens"],
                    seconds=state["seconds"], length=length, accuracy=mean,
                    loss=sum(state["losses"]) / len(state["losses"]), rate=self.rate(stage),
                )  # fmt: skip
                state["losses"] = []
            settled = state["stage_step"] >= stage.least and mean >= stage.goal
            ended = settled or state["stage_step"] >= stage.most
            if stage.evaluate and (ended or state["stage_step"] % stage.evaluate == 0):
                self.evaluate(stage)
            if ended:
                state["curriculum"].append(
                    {
                        "stage": stage.name, "steps": state["stage_step"],
                        "tokens": state["tokens"], "accuracy": round(mean, 4),
                    }
                )  # fmt: skip
                state.update(stage=state["stage"] + 1, stage_step=0, recent=[])
            if ended or time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                self.save()
                saved_at = time.monotonic()
        self.evaluate(STAGES[-1], final=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, log and model")
    parser.add_argument("--export", type=Path, action="append", default=[], help="also copy there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16 autocast")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = Run(arguments)
    if arguments.resume and (arguments.out / "checkpoint.pt").exists():
        run.load()
    run.train()


if __name__ == "__main__":
    main()
