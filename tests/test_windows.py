"""Nothing on the way of the four commands is imported, named or done that Windows lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs.checkpoint import verify_checkpoint

ROOT = Path(__file__).parent.parent
COMMANDS = """
train.py resume=auto run_dir=run max_steps=4
train.py resume=run max_steps=8
sample.py checkpoint=run/checkpoints/last max_new_tokens=5
eval.py checkpoint=run
export.py checkpoint=run to=exported
"""
SETTINGS = """data.path=text.txt tokenizer=byte model.n_layer=1 model.n_head=2 model.n_embd=32 model.block_size=16
    batch_size=2 checkpoint_interval=1 keep_checkpoints=2 eval_interval=4 sample_tokens=3 device=cpu"""
DRIVER = """
import runpy, shlex, sys
import as_on_windows
for command in sys.argv[1].strip().splitlines():
    sys.argv = shlex.split(command)
    try:
        runpy.run_module(sys.argv[0].removesuffix(".py"), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="imitates Windows on Linux")
def test_the_commands_work_where_posix_is_hidden_and_links_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("Être ou ne pas être.\n" * 200, encoding="utf-8")
    commands = COMMANDS.replace("max_steps", f"{' '.join(SETTINGS.split())} max_steps")
    places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    no_utf8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # a text's encoding has to be said
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, commands], cwd=tmp_path, env=places | no_utf8, capture_output=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"resuming at step 4" in ended.stdout and b"failed" not in ended.stdout
    last, saved = tmp_path / "run/checkpoints/last", [*(tmp_path / "run/checkpoints").glob("step_*")]
    assert last.read_text() == "step_8" and not last.is_symlink() and 2 <= len(saved) <= 3
    for checkpoint in saved:
        verify_checkpoint(checkpoint)
    summary = json.loads((tmp_path / "run/summary.json").read_bytes())
    assert (summary["status"], summary["peak_memory_mb"]) == ("finished", 700)
    assert (tmp_path / "exported/model.safetensors").stat().st_size > 9
