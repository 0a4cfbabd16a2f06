"""A generated store and its site, made once for all tests of the dashboards; and a site full of hostile words."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_samples import HOSTILE, NOW, PLAN, make_header, make_record

from dashboards import build, demo, demo_extras
from harness.records import Cell, Evidence, Store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("generated") / "results")
    demo.generate(made, PLAN)
    return made


@pytest.fixture(scope="session")
def site(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    (folder / "asv").mkdir(parents=True)
    (folder / "asv" / "index.html").write_text("<!doctype html><title>asv</title>", encoding="utf-8")
    assert build(store, folder, now=NOW) == folder / "index.html"
    return folder


@pytest.fixture(scope="session")
def hostile_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site whose models, recipes, reasons, logs, kernels, hosts and versions are all hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    store = Store(folder / "results")
    for number in range(3):
        words = [word.replace("\ud800", "?") if number else word for word in HOSTILE]
        header = make_header(
            f"run-{number}",
            NOW - 86400 * (3 - number),
            commit=words[0],
            fingerprint=words[1],
            host={"cpu_model": words[0], words[1]: words[2]},
            versions={"torch": f"{words[1]}{number}", words[0]: words[2]},
            profile=words[3],
            gated=(words[1],),
            arguments=(words[0],),
        )
        records = []
        for word in words:
            word = word.encode("utf-8", "replace").decode()
            cell = Cell(word, "int8", word, "amx", f"offline:{word}", task=word, family=word, weights="real")
            good = make_record(header.run_id, cell)
            choice = {
                "m": 1,
                "n": 2,
                "k": 3,
                "epilogue": word,
                "out_dtype": word,
                "kernel": word,
                "times_s": {word: 1e-6},
            }
            evidence = Evidence(4, 4, 4, {word: 3}, "amx", True, notes=(word,), selection=(choice,))
            records.append(make_record(header.run_id, cell, evidence=evidence))
            other = Cell(word, word, "sq-static", "amx", word, task=word)
            records.append(make_record(header.run_id, other, status="failed", reason=word, accuracy=good.accuracy))
        with store.create_run(header) as writer:
            for record in records:
                accuracy = record.accuracy
                if accuracy is not None and record.status == "ok":
                    arrays = {
                        **demo_extras.examples(accuracy, 1),
                        "worst_texts": np.array([words[0].replace("\0", "")] * 12),
                    }
                    kept = dataclasses.replace(accuracy, outputs=writer.write_outputs(record.cell.key, arrays))
                    record = dataclasses.replace(record, accuracy=kept)
                writer.append(record)
                if record.status == "failed":
                    writer.write_log(record.cell.key, "\n".join(words))
            writer.finish(invalid_reason=words[0] if number == 1 else None)
    demo_extras.write_analyses(store, header)
    for path in (store.root / "analyses").glob("*.json"):
        spoiled = hostile(json.loads(path.read_text(encoding="utf-8")))
        path.with_name(f"{path.stem}-hostile.json").write_text(json.dumps(spoiled), encoding="utf-8")
    build(store, folder / "site", now=NOW)
    return folder / "site"


def hostile(data: Any) -> Any:
    """``data`` with a hostile word in place of each text, in turn."""
    words = itertools.cycle(HOSTILE)

    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return next(words)
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        return [spoil(item) for item in value] if isinstance(value, list) else value

    return spoil(data)
