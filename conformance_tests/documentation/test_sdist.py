"""The sdist holds what its noxfile and its script of all checks name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["noxfile.py", ".ci/run", "CONTRIBUTING.md"])
def test_the_sdist_holds_the_named_files(name):
    """Each file or folder of the source tree, by its first part."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = settings["tool"]["hatch"]["build"]["targets"]["sdist"]
    included = {path.strip("/").partition("/")[0] for path in build["include"]}
    included |= {"pyproject.toml", "LICENSE"}  # which every sdist has

    words = set(re.findall(r"[\w./-]+", (ROOT / name).read_text()))
    tops = {word.removeprefix("./").partition("/")[0] for word in words}
    named = {top for top in tops if top and (ROOT / top).exists()} - {".", ".."}

    assert named - included - {".venv", ".nox"} == set()
    assert "README.md" in included


def test_the_conda_recipe_has_the_dependencies_of_the_project():
    """Those of the core and of the extra `scipy`, and the build's."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    run = project["dependencies"] + project["optional-dependencies"]["scipy"]
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    sections = dict(re.findall(r"^  (host|run):\n((?:    - .*\n)+)", recipe, re.M))
    listed = {
        name: {
            line.removeprefix("    - ").replace(" ", "") for line in text.splitlines()
        }
        for name, text in sections.items()
    }

    assert listed["run"] == {*run, f"python{project['requires-python']}"}
    assert listed["host"] - {"pip", "python3.11.*"} == {
        *settings["build-system"]["requires"]
    }
    assert f'version: "{project["version"]}"' in recipe
