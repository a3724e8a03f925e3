"""The command for lm-eval in docs/interop.md finds the bits per byte of eval.py."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import random_gpt

from cli.eval import score_checkpoints
from data.config import DataConfig, TokenizerConfig
from data.tokenizer import make_tokenizer
from export import ExportConfig, export
from generation.config import EvalConfig
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "docs" / "interop.md"
# One document: eval.py lets a document see the one before it, lm-eval does not.
DOCUMENT = "Anna counted ten birds, and nine of them sang to her. The last one slept."
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.parametrize("as_on_the_page", [True, False], ids=["as on the page", "without add_bos_token"])
def test_lm_eval_finds_the_bits_per_byte_of_eval(as_on_the_page, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": DOCUMENT}) + "\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(TASK, encoding="utf-8")
    encoding = make_tokenizer(TokenizerConfig(name="bpe", vocab_size=300), [DOCUMENT])
    model = random_gpt(vocab_size=encoding.n_vocab, block_size=128)
    save_checkpoint(tmp_path / "step_1", model=model, tokenizer=encoding, config=TrainConfig(model=model.config))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "mymodel")))
    data = DataConfig(path=str(tmp_path / "text.txt"))
    (ours,) = score_checkpoints(EvalConfig(checkpoint=str(tmp_path / "step_1"), data=data))

    (command,) = re.findall(r"^lm_eval (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    arguments = command.replace("--tasks wikitext", "--tasks mine --include_path . --output_path out")
    if not as_on_the_page:
        arguments = arguments.replace(",add_bos_token=False", "")
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(results.read_text(encoding="utf-8"))["results"]["mine"]["bits_per_byte,none"]
    is_text = ours.bytes > 0  # lm-eval does not ask for the <|endoftext|> that ends a document
    bits_per_byte = ours.nats[is_text].sum() / ours.bytes.sum() / math.log(2)
    assert (abs(theirs - bits_per_byte) < 1e-3) == as_on_the_page, (theirs, bits_per_byte)
