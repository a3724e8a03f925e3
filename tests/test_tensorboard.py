"""TensorBoard has a run's figures under the same names, and a resumed run's once."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import before_step, crash

from common.errors import SettingsError
from runs.metrics import read_metrics, scalars
from train import train

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_every_figure_is_there_once_though_the_run_crashed_and_was_resumed(train_config, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(
        train_config, tensorboard=True, log_interval=1, eval_interval=5, checkpoint_interval=5, max_steps=10
    )
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        before_step(patch, 8, crash)
        train(config)
    train(replace(config, resume=config.run_dir))
    found = EventAccumulator(str(Path(config.run_dir) / "tensorboard")).Reload()
    rows = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    names = {name for row in rows for name, _ in scalars(row)}
    assert {"loss", "val_bpb", "head_similarity/layer_0"} <= names == {*found.Tags()["scalars"]}
    for name in names:
        expected = [(row["step"], value) for row in rows for other, value in scalars(row) if other == name]
        assert [(event.step, event.value) for event in found.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in expected
        ]
    assert [event.step for event in found.Tensors("sample/text_summary")] == [5, 10]


def test_what_fails_is_said_and_what_is_not_installed_is_asked_for(train_config, caplog, monkeypatch):
    (Path(train_config.run_dir)).mkdir()
    (Path(train_config.run_dir) / "tensorboard").touch()  # where its folder should be
    train(replace(train_config, tensorboard=True, max_steps=1))
    assert "TensorBoard failed (" in caplog.text and caplog.text.count("training goes on without it") == 1
    monkeypatch.setattr("training.start.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"TensorBoard is not installed: pip install -e \"\.\[tensorboard\]\""):
        train(replace(train_config, tensorboard=True))
