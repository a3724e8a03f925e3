"""The arguments of train.py, checked without Hydra: settings, groups of conf/, sweeps."""

from pathlib import Path

from common.errors import SettingsError
from common.settings import NULLS, setting_hints, unknown_setting
from training.config import TrainConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
SWEEP = ("-m", "--multirun")
NUMBERS = (int, int | None, float, float | None, bool)


def check_typed(typed: dict[str, str], is_sweep: bool) -> None:
    """Raise SettingsError for arguments that Hydra would misread, or refuse less clearly."""
    hints = setting_hints(TrainConfig)
    for name, value in typed.items():
        is_hydras = name.startswith("hydra")
        if not is_hydras and name not in GROUPS and name not in hints:
            raise unknown_setting(name, [*GROUPS, *hints])
        if is_hydras and not is_sweep:
            raise SettingsError(f"{name}={value} is for sweeps", "add -m; run_dir= names the folder of a run")
        is_one = name in GROUPS or name.endswith("attention") or hints.get(name) in NUMBERS
        if "," in value and is_one and not is_sweep:
            raise SettingsError(f"{name}={value} is several values for one run", "add -m to train with each")
        if is_sweep and name in GROUPS and "null" in value.split(","):
            raise SettingsError(f"{name}={value}: null is no option of {name}", "leave it out, or name an option")
        if is_sweep and name in ("run_dir", "resume") and value not in NULLS:
            remedy = "leave it out of -m; hydra.sweep.dir=FOLDER names a sweep's folder, and goes on in it"
            raise SettingsError(f"{name}={value} is for a single run", remedy)
