"""The jobs of a sweep, also if only its leaderboard.csv is left."""

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

from runs.summary import NUMBERS, TEXTS, Summary
from sweeps.leaderboard import Job, distinct, read_jobs


def recorded_jobs(sweep: Path) -> list[Job]:
    """Return the jobs in a sweep's folder; without runs, those of its leaderboard.csv.

    A leaderboard.csv that is missing or cannot be read has none.
    """
    jobs = read_jobs(sweep)
    if jobs:
        return jobs
    # The columns are the job, the swept settings and the fields of Summary; an empty cell has no value. Settings of the
    # names of fields, device and seed, are settings if they stand before the first field.
    table = sweep / "leaderboard.csv"
    with suppress(OSError, LookupError, ValueError, csv.Error), table.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = [*(reader.fieldnames or [])]
        swept = names[1 : names.index("status")]
        for row in reader:
            known = {name: text for name, text in row.items() if text}
            settings = {name: known[name] for name in swept if name in known}
            figures = {each: float(known[each]) for each in NUMBERS if each in known and each != "seed"}
            texts: Any = {each: known.get(each) for each in TEXTS}
            summary = Summary(status=known["status"], **(texts | figures))
            jobs.append(Job(sweep / known["job"], known["job"], settings, summary))
    return distinct(sorted(jobs, key=lambda job: (len(job.name), job.name)))
