"""The jobs of a sweep, also if only its leaderboard.csv is left."""

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

from runs.summary import NUMBERS, TEXTS, Summary
from sweeps.decide import RECORD
from sweeps.leaderboard import Job, distinct, read_jobs


def baseline_first(sweep: Path) -> list[Job]:
    """Return the jobs that ran in a sweep's folder, by number.

    Of hydra/sweeper=decide those of the first variant come first: a coin has chosen which job of a seed ran first.
    """
    jobs = read_jobs(sweep)
    is_pairs = (sweep / RECORD).exists()
    return sorted(jobs, key=lambda job: is_pairs and not job.name.endswith("-0"))  # the job SEED-VARIANT


def recorded_jobs(sweep: Path) -> list[Job]:
    """Return the jobs in a sweep's folder; without runs, those of its leaderboard.csv.

    A leaderboard.csv that is missing or cannot be read has none.
    """
    jobs = baseline_first(sweep)
    if jobs:
        return jobs
    # A program that has saved the table again may have put a mark or a column before the first one, and empty rows at
    # the end.
    with suppress(OSError, LookupError, ValueError, csv.Error):
        with (sweep / "leaderboard.csv").open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{name: text for name, text in row.items() if text} for row in reader]
        names = [*(reader.fieldnames or [])]
        swept = names[names.index("job") + 1 : names.index("status")]
        jobs = [recorded_job(sweep, row, swept) for row in rows if row]
    return distinct(sorted(jobs, key=lambda job: (len(job.name), job.name)))


def recorded_job(sweep: Path, row: dict[str, str], swept: list[str]) -> Job:
    """Return the job of a row of leaderboard.csv, whose cells are those with a value.

    The columns are the job, the swept settings and the fields of Summary. Settings of the names of fields, device and
    seed, are settings if they stand before the first field.
    """
    settings = {name: row[name] for name in swept if name in row}
    figures = {each: float(row[each]) for each in NUMBERS if each in row and each != "seed"}
    texts: Any = {each: row.get(each) for each in TEXTS}
    summary = Summary(status=row["status"], **(texts | figures))
    return Job(sweep / row["job"], row["job"], settings, summary)
