"""Every recipe for fine-tuning and distillation builds, and the command line runs one."""

from pathlib import Path

import pytest
from tiny import random_base, write_reviews

from plume.cli.main import main
from plume.config import DistillConfig, FinetuneConfig, build, read_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted((RECIPES / "finetune").glob("*.toml")), ids=lambda p: p.stem)
def test_fine_tuning_recipes_build(path):
    build(FinetuneConfig, read_recipe(path), origin=str(path))


@pytest.mark.parametrize("path", sorted((RECIPES / "distill").glob("*.toml")), ids=lambda p: p.stem)
def test_distillation_recipes_build(path):
    build(DistillConfig, read_recipe(path), origin=str(path))


def test_the_command_line_fine_tunes(tmp_path, capsys):
    base, rows = random_base("gpt2", tmp_path / "base"), write_reviews(tmp_path / "reviews.csv", copies=2)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{base}"\nfolder = "{tmp_path / "run"}"\nseeds = 1\n[task]\ntrain = "{rows}"\n')
    assert main(["finetune", str(recipe), "--epochs=1", "--batch=8", "--device", "cpu", "--precision", "float32"]) == 0
    said = capsys.readouterr().out
    assert "validation accuracy:" in said and "text = 'review' (guessed)" in said
    assert main(["finetune", str(recipe)]) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert main(["finetune", str(recipe), "--task.colums.text", "x"]) == 2
    assert "did you mean task.columns" in capsys.readouterr().err
