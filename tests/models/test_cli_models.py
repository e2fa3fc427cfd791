"""`lumenbox models`: what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from lumenbox.cli.models import models
from lumenbox.models import catalogue


def run(*arguments: str) -> str:
    return CliRunner().invoke(models, arguments, catch_exceptions=False).stdout


def test_life_of_a_model(cache: Path) -> None:
    assert run("pull", "tiny-random").strip() == str(cache / "tiny-random")
    listed = json.loads(run("ls", "--json"))
    assert (listed["schema"], listed["default"]) == (1, "smollm2-135m")
    assert {row["name"]: row["state"] for row in listed["models"]}["tiny-random"] == "ready"
    assert "tiny-random\tready" in run("ls")
    shown = json.loads(run("show", "tiny-random", "--json"))
    assert (shown["schema"], shown["context_length"], shown["problem"]) == (1, 8192, None)
    assert "LlamaForCausalLM" in run("show", "tiny-random")
    run("rm", "tiny-random")
    assert json.loads(run("show", "tiny-random", "--json"))["state"] == "absent"


def test_damage_is_shown(cache: Path) -> None:
    (catalogue.pull("tiny-random") / "config.json").unlink()
    shown = json.loads(run("show", "tiny-random", "--json"))
    assert shown["state"] == "damaged"
    assert "config.json is missing" in shown["problem"]


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from lumenbox.cli.models import models\n"
        "slow = {'torch', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'rich'}\n"
        "sys.exit(bool(slow & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_models_room_needs_no_torch(tiny_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lumenbox.models.tokenizer import Tokenizer\n"
        "import lumenbox.models.catalogue, lumenbox.models.tiny\n"
        f"Tokenizer.load(Path({str(tiny_dir)!r}))\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
