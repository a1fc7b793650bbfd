"""A training run that is killed and resumed ends with the same weights as one that is not."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from training import data, ruler_data, train
from training.keep import keep, kept
from training.mean import mean
from training.recipes import RECIPES
from training.schedule import Stage

pytestmark = pytest.mark.slow


def arguments(out, model):
    return argparse.Namespace(
        model=model, out=out, export=[], seed=0, resume=True, optimizer="muon", float32=True
    )


def weights_after(out, model, recipe, monkeypatch, steps_before_kill):
    run = train.Run(arguments(out, model), recipe)
    if steps_before_kill:
        real, count = run.step, 0

        def step(stage):
            nonlocal count
            count += 1
            if count > steps_before_kill:
                raise KeyboardInterrupt
            return real(stage)

        monkeypatch.setattr(run, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        run = train.Run(arguments(out, model), recipe)
        run.load()
    run.train()
    return run.model.state_dict()


MIXTURES = {
    "longeval": (data.Mixture(64, 2, verbatim=1.0), {"3": 1}),
    "spread": (ruler_data.Mixture(256, 4, gaps=0.5, span=2048), {"niah_multivalue": 1}),
}


@pytest.mark.parametrize("model", MIXTURES)
def test_resuming_changes_nothing(model, tmp_path, monkeypatch):
    mixture, held_out = MIXTURES[model]
    stages = tuple(
        Stage(name, ((1.0, mixture),), 3, 3, goal=2.0, adamw=name == "b") for name in "ab"
    )
    recipe = dataclasses.replace(RECIPES[model], stages=stages, held_out=held_out)
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0)
    whole = weights_after(tmp_path / "whole", model, recipe, monkeypatch, 0)
    killed = weights_after(tmp_path / "killed", model, recipe, monkeypatch, 4)
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    exported = tmp_path / "whole" / "model"
    assert (exported / "model.safetensors").is_file()
    assert json.loads((exported / "training_log.json").read_text())["step"] == 6


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    torch.save({"recipe": "longeval"}, tmp_path / "checkpoint.pt")
    run = train.Run(arguments(tmp_path, "spread"), RECIPES["spread"])
    with pytest.raises(SystemExit, match=r"--out: .*checkpoint.pt was trained by --model longeval"):
        run.load()


def test_a_kept_run_goes_on_elsewhere(tmp_path):
    run = train.Run(arguments(tmp_path, "spread"), RECIPES["spread"])
    run.state.update(step=7, stage=2)
    run.save()
    keep(tmp_path, tmp_path / "kept.safetensors")
    other = train.Run(arguments(tmp_path / "other", "spread"), RECIPES["spread"])
    torch.nn.init.zeros_(other.model.model.norm.weight)
    other.start(tmp_path / "kept.safetensors")
    assert (other.state["step"], other.state["stage"]) == (7, 2)
    for name, value in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value.bfloat16().float()), name
    other.start(tmp_path / "kept.safetensors", "ask-256")
    assert (other.state["step"], other.state["stage"], other.state["stage_step"]) == (7, 1, 0)
    with pytest.raises(SystemExit, match=r"--stage must be one of copy, .*, settle, got ask-64"):
        other.start(tmp_path / "kept.safetensors", "ask-64")
    wrong = train.Run(arguments(tmp_path / "wrong", "longeval"), RECIPES["longeval"])
    with pytest.raises(SystemExit, match=r"--start: .* was trained by --model spread"):
        wrong.start(tmp_path / "kept.safetensors")


def test_an_exported_model_is_gone_on_from(tmp_path):
    run = train.Run(
        arguments(tmp_path, "spread"), dataclasses.replace(RECIPES["spread"], held_out={})
    )
    run.state.update(step=7, tokens=9, seconds=60.0)
    run.evaluate(run.stage, final=True)
    other = train.Run(arguments(tmp_path / "other", "spread"), RECIPES["spread"])
    torch.nn.init.zeros_(other.model.model.norm.weight)
    other.start(tmp_path / "model", "settle")
    assert [other.state[name] for name in ("step", "begun", "tokens", "seconds")] == [7, 7, 9, 60]
    assert (other.stage.name, other.state["stage_step"]) == ("settle", 0)
    assert len(other.optimizers) == 1  # AdamW for all
    for name, value in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value), name
    lists = train.Run(arguments(tmp_path / "lists", "lists"), RECIPES["lists"])  # begins with it
    lists.start(tmp_path / "model", "lists")
    assert torch.equal(lists.model.lm_head.weight, run.model.lm_head.weight)
    wrong = train.Run(arguments(tmp_path / "wrong", "longeval"), RECIPES["longeval"])
    with pytest.raises(SystemExit, match=r"--start: .* was trained by --model spread"):
        wrong.start(tmp_path / "model")


def test_the_mean_of_models_is_that_of_their_weights(tmp_path):
    recipe, folders = dataclasses.replace(RECIPES["spread"], held_out={}), []
    for seed in (0, 1):
        run = train.Run(arguments(tmp_path / f"run{seed}", "spread"), recipe)
        for weight in run.model.parameters():
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(seed))
        run.evaluate(run.stage, final=True)
        folders.append(tmp_path / f"run{seed}" / "model")
    mean(tmp_path / "mean", [(0.25, folders[0]), (0.75, folders[1])])
    first, second, both = (
        load_file(folder / "model.safetensors") for folder in (*folders, tmp_path / "mean")
    )
    assert both.keys() == first.keys()
    for name, tensor in both.items():
        torch.testing.assert_close(tensor, 0.25 * first[name] + 0.75 * second[name])
    kept(tmp_path / "mean")  # which one can go on from
    log = json.loads((tmp_path / "mean" / "training_log.json").read_text())
    assert [part["weight"] for part in log["mean_of"]] == [0.25, 0.75]
    mean(tmp_path / "quieter", [(1.0, folders[0])], attention=0.5)
    for name, tensor in load_file(tmp_path / "quieter" / "model.safetensors").items():
        reads = name.endswith("self_attn.o_proj.weight") and int(name.split(".")[2]) >= 2
        torch.testing.assert_close(tensor, (0.5 if reads else 1.0) * first[name])
    with pytest.raises(SystemExit, match="--attention 0 must be > 0"):
        mean(tmp_path / "other", [(1.0, folders[0])], attention=0.0)
    with pytest.raises(SystemExit, match=r"add up to 1, got 0\.75"):
        mean(tmp_path / "other", [(0.25, folders[0]), (0.5, folders[1])])
    assert not (tmp_path / "other").exists()
