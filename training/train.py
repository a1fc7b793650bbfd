"""Trains a model of `recipes`: `python -m training.train --out DIR --seed 0 [--resume]`.

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
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from training.ahead import Ahead
from training.keep import kept
from training.network import (
    PEAK_RATE,
    LeftOut,
    Muon,
    Outcome,
    build_model,
    build_optimizers,
    loss_and_outcome,
)
from training.recipes import RECIPES, Recipe
from training.schedule import Stage

WARM_UP = 50
CHECKPOINT_SECONDS = 60


def export(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    summary: dict,
    folder: Path,
    new_tokens: int,
) -> None:
    """Writes beside `folder`, then swaps file by file: readers never see half a file."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
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

    def __init__(self, arguments: argparse.Namespace, recipe: Recipe) -> None:
        torch.manual_seed(arguments.seed)
        self.recipe = recipe
        self.arguments = arguments
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = recipe.build_tokenizer()
        self.sequences = recipe.sequences(self.tokenizer)
        self.model = build_model(self.tokenizer, recipe.shape)
        self.left_out = LeftOut(self.model.config)
        self.ahead = Ahead(self.model.config.hidden_size)
        self.dtype = torch.float32 if arguments.float32 else torch.bfloat16
        self.held_out = {
            name: recipe.cases(self.tokenizer, name, count)
            for name, count in recipe.held_out.items()
        }
        self.state = {
            "step": 0, "stage": 0, "stage_step": 0, "tokens": 0, "seconds": 0.0,
            "recent": [], "best": 0.0, "begun": 0, "curriculum": [], "losses": [], "kinds": {},
        }  # fmt: skip
        self.renew(recipe.stages[0])

    def renew(self, stage: Stage) -> None:
        """New optimizers, which warm up."""
        muon = self.arguments.optimizer == "muon" and not stage.adamw
        self.optimizers = build_optimizers(self.model, self.ahead, muon)
        self.state["begun"] = self.state["step"]

    @property
    def stage(self) -> Stage:
        """The present stage, or the last one where all are done."""
        return self.recipe.stages[min(self.state["stage"], len(self.recipe.stages) - 1)]

    def save(self) -> None:
        path = self.out / "checkpoint.pt"
        torch.save(
            {
                "recipe": self.arguments.model,
                "model": self.model.state_dict(),
                "ahead": self.ahead.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "torch_rng": torch.get_rng_state(),
                "state": self.state,
            },
            path.with_suffix(".draft"),
        )
        os.replace(path.with_suffix(".draft"), path)

    def load(self) -> None:
        path = self.out / "checkpoint.pt"
        saved = self._take(torch.load(path, weights_only=True), f"--out: {path}")
        begun = self.state["begun"]
        self.renew(self.stage)
        self.state["begun"] = begun
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.ahead.load_state_dict(saved["ahead"])
        torch.set_rng_state(saved["torch_rng"])

    def start(self, path: Path, stage: str | None = None) -> None:
        """Go on from weights that ``keep`` or ``export`` wrote: with new optimizers, not to the
        same bytes. ``stage``: at the beginning of it, if not where they were kept."""
        names = [one.name for one in self.recipe.stages]
        if stage is not None and stage not in names:
            raise SystemExit(f"--stage must be one of {', '.join(names)}, got {stage}")
        self._take(kept(path), f"--start: {path}")
        if stage is not None:
            self.state.update(stage=names.index(stage), stage_step=0)
        self.renew(self.stage)

    def _take(self, saved: dict, named: str) -> dict:
        if saved.get("recipe", self.arguments.model) not in (
            self.arguments.model,
            self.recipe.parent,
        ):
            raise SystemExit(
                f"{named} was trained by --model {saved.get('recipe')}, "
                f"got --model {self.arguments.model}"
            )
        self.model.load_state_dict(saved["model"])
        self.state.update(saved["state"])
        return saved

    def log(self, **fields: object) -> None:
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
        )
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def rate(self, stage: Stage) -> float:
        steps = self.state["step"] - self.state["begun"] + 1
        rate = stage.rate * PEAK_RATE * min(1.0, steps / WARM_UP)
        if stage.decay:
            rate *= max(1 - self.state["stage_step"] / stage.most, 0.01)
        return rate

    def step(self, stage: Stage) -> tuple[float, Outcome, int]:
        # The batch depends on seed and step alone, so a resumed run sees the same data.
        rng = np.random.default_rng((self.arguments.seed, self.state["step"]))
        weights = np.array([weight for weight, _ in stage.mixtures])
        chosen = int(rng.choice(len(weights), p=weights / weights.sum()))
        batch = self.sequences.batch(stage.mixtures[chosen][1], rng)
        left_out = self.left_out if any(stage.drop) or stage.few else None
        if left_out is not None:
            weak = left_out.draw(len(batch.ids), *stage.drop, stage.few)
            batch = batch.unanswered(weak, self.tokenizer.eos_token_id)
        alone = self.state["stage_step"] < stage.alone
        ahead = (stage.ahead, self.ahead, alone) if stage.ahead else None
        loss, outcome = loss_and_outcome(self.model, batch, self.dtype, stage.rest, left_out, ahead)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(stage)
                if isinstance(optimizer, Muon):
                    group["weight_decay"] = stage.weight_decay
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state["tokens"] += batch.ids.size
        return loss.item(), outcome, batch.ids.shape[1]

    def evaluate(self, stage: Stage, final: bool = False) -> None:
        self.model.eval()
        scores = {
            name: self.recipe.score(self.model, self.tokenizer, cases)
            for name, cases in self.held_out.items()
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
                "recipe": self.arguments.model,
                "seed": self.arguments.seed,
                "optimizer": "adamw" if self.stage.adamw else self.arguments.optimizer,
                "dtype": str(self.dtype).removeprefix("torch."),
                "stage": stage.name,
                "step": self.state["step"],
                "tokens": self.state["tokens"],
                "minutes": round(self.state["seconds"] / 60, 1),
                "held_out_cases": dict(self.recipe.held_out),
                "held_out_accuracy": scores,
                "curriculum": self.state["curriculum"],
            }
            for folder in [self.out / "model", *self.arguments.export]:
                export(self.model, self.tokenizer, summary, folder, self.recipe.new_tokens)

    def count(self, outcome: Outcome) -> None:
        for kind, count in outcome.count.items():
            right, before = self.state["kinds"].get(kind, (0, 0))
            self.state["kinds"][kind] = (right + outcome.right[kind], before + count)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Accuracy since the last line of the log, where answers are of several kinds."""
        kinds = {k: round(right / n, 3) for k, (right, n) in sorted(self.state["kinds"].items())}
        return {"kinds": kinds} if set(kinds) - {""} else {}

    def train(self) -> None:
        state, stages = self.state, self.recipe.stages
        saved_at = time.monotonic()
        while state["stage"] < len(stages):
            stage = stages[state["stage"]]
            began = time.monotonic()
            loss, outcome, length = self.step(stage)
            state["losses"].append(loss)
            state["step"] += 1
            state["stage_step"] += 1
            state["recent"] = [*state["recent"][-19:], outcome.accuracy]
            self.count(outcome)
            state["seconds"] += time.monotonic() - began
            mean = sum(state["recent"]) / len(state["recent"])
            if state["step"] % 25 == 0:
                self.log(
                    stage=stage.name, step=state["step"], tokens=state["tokens"],
                    seconds=state["seconds"], length=length, accuracy=mean,
                    loss=sum(state["losses"]) / len(state["losses"]), rate=self.rate(stage),
                    **self.by_kind(),
                )  # fmt: skip
                state.update(losses=[], kinds={})
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
                if self.stage.adamw != stage.adamw:
                    self.renew(self.stage)
            if ended or time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                self.save()
                saved_at = time.monotonic()
        self.evaluate(stages[-1], final=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(RECIPES), default="longeval")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, log and model")
    parser.add_argument("--export", type=Path, action="append", default=[], help="also copy there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start", type=Path, help="go on from weights of training.keep or a model")
    parser.add_argument("--stage", help="with --start: begin at this stage of the curriculum")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16 autocast")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = Run(arguments, RECIPES[arguments.model])
    if arguments.resume and (arguments.out / "checkpoint.pt").exists():
        run.load()
    elif arguments.start:
        run.start(arguments.start, arguments.stage)
    run.train()


if __name__ == "__main__":
    main()
