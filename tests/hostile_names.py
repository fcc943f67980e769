"""A trace in which every name that somebody may choose is an attack: on HTML, on SVG, on matplotlib's mathtext, on UTF-8."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from trace_mutations import DATA, put_together

ATTACKS = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(2)>\"'-->]]>&lt;",
    "mathtext": "$\\frac{$ {0} %s $",
    "surrogate": "a\ud800b\0c\x1b[2J",
}


def hostile_file(path: Path, attack: str, source: str = "deadlock") -> None:
    """Writes the file of a real run, with ``attack`` in the place of every name and of every word about the machine."""
    with zipfile.ZipFile(DATA / f"{source}.ringtrace") as archive:
        meta, events = json.loads(archive.read("meta.json")), archive.read("events.parquet")
    tables, about = meta["tables"], meta["metadata"]
    for number, group in enumerate(tables["groups"]):
        group["name"] = f"{attack}{number}"
    for payload in tables["payloads"]:
        payload["dtype"] = attack
    for name in ("labels", "files"):
        tables[name] = [f"{attack}{number}" for number, _ in enumerate(tables[name])]
    about["ring_groups"] = []
    for name in ("run_id", "source", "backend", "comm_device", "date"):
        about[name] = attack
    for name in ("notes", "not_recorded", "not_checked"):
        about[name] = [attack]
    for name in ("machine", "versions"):
        about[name] = dict.fromkeys(about[name], attack)
    for one in about.get("ends", ()):
        one["about"] = one["error"] = attack
    path.write_bytes(put_together(json.dumps(meta).encode(), events))
