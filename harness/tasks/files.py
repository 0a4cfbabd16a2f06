"""Rows of labelled data from a folder, a file or the hub.

A folder holds one file a split, named as the data sets are distributed (``dev_matched.tsv``, ``train-v1.1.json``,
``validation.jsonl``, ``train-00000-of-00001.parquet``), or is one that ``datasets``' ``save_to_disk`` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import models
from harness.errors import AssetError

Fields = dict[str, Any]

_SUFFIXES = (".tsv", ".jsonl", ".json", ".parquet")
_SAVED = ("dataset_dict.json", "dataset_info.json")


def read(task: str, location: str, config: str | None, splits: Sequence[str], *, offline: bool = False) -> list[Fields]:
    """The rows of the first of ``splits`` that there is.

    Args:
        location: a folder, or a hub id.
        config: the part of a hub's data set, such as ``mnli``; a folder may have its files in one of that name.
        splits: names of the split, the preferred one first.

    Raises:
        AssetError: nothing there, or damaged; one line that says what to do.
    """
    folder = Path(location)
    if not folder.exists():
        return _from_hub(task, location, config, splits, offline)
    if not folder.is_dir():
        raise AssetError(f"task {task}: {folder} is a file; give the folder that holds both its splits")
    saved = _saved_to_disk(task, folder, splits)
    if saved is not None:
        return saved
    for place in (folder, *(folder / name for name in (config, "plain_text", "data") if name)):
        for split in splits:
            paths = _files(place, split)
            if paths:
                return [row for path in paths for row in read_file(path)]
    raise AssetError(
        f"task {task}: {folder} has no file called {' or '.join(splits)} ({', '.join(_SUFFIXES)}); "
        "put it there or correct the location in the file that --sources gives"
    )


def _files(folder: Path, split: str) -> list[Path]:
    """The file of a split, or all its parquet shards; empty where there is none."""
    for suffix in _SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return [path]
    return sorted(folder.glob(f"{split}-*-of-*.parquet"))


def read_file(path: Path) -> list[Fields]:
    """All rows of a file, by its suffix. AssetError naming the line where it is damaged."""
    readers = {".tsv": _tsv, ".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
    try:
        return list(readers[path.suffix](path))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # bad UTF-8 and bad JSON are ValueErrors
        text = " ".join(str(error).split())
        raise AssetError(f"{path} cannot be read ({type(error).__name__}: {text[:120]}); check the file") from error


def _tsv(path: Path) -> Iterator[Fields]:
    """GLUE's form: a line of names, then values between tabs; quotation marks mean themselves."""
    with path.open(encoding="utf-8", newline="\n") as file:
        names = file.readline().rstrip("\r\n").split("\t")
        for number, line in enumerate(file, start=2):
            values = line.rstrip("\r\n").split("\t")
            if len(values) != len(names):
                raise ValueError(f"line {number} has {len(values)} values under {len(names)} names")
            yield dict(zip(names, values, strict=True))


def _json_lines(path: Path) -> Iterator[Fields]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is no JSON") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no object")
                yield row


def _json(path: Path) -> Iterator[Fields]:
    """SQuAD's nested form, a list of rows, or rows line by line under the wrong name."""
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        yield from _json_lines(path)
        return
    rows = content.get("data", [content]) if isinstance(content, dict) else content
    for row in rows:
        if "paragraphs" in row:
            yield from _squad_article(row)
        else:
            yield dict(row)


def _squad_article(article: Mapping[str, Any]) -> Iterator[Fields]:
    for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
            answers = asked["answers"]
            yield {
                "id": asked["id"],
                "question": asked["question"],
                "context": paragraph["context"],
                "answers": {
                    "text": [answer["text"] for answer in answers],
                    "answer_start": [answer["answer_start"] for answer in answers],
                },
            }


def _parquet(path: Path) -> Iterator[Fields]:
    import pyarrow.parquet

    yield from pyarrow.parquet.read_table(path).to_pylist()


def _saved_to_disk(task: str, folder: Path, splits: Sequence[str]) -> list[Fields] | None:
    """The split of a folder that ``datasets`` saved; None where it is no such folder."""
    holders = [folder, *(folder / split for split in splits)]
    if not any((holder / name).is_file() for holder in holders for name in _SAVED):
        return None
    import datasets

    for split in splits:
        if (folder / split / "dataset_info.json").is_file():
            try:
                return list(datasets.load_from_disk(str(folder / split)))
            except Exception as error:  # damaged arrow files raise many kinds
                text = " ".join(str(error).split())
                raise AssetError(f"{folder / split} cannot be read ({text[:120]}); save it again") from error
    found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "none"
    raise AssetError(f"task {task}: {folder} has no split {' or '.join(splits)}; it has {found}")


def _from_hub(task: str, location: str, config: str | None, splits: Sequence[str], offline: bool) -> list[Fields]:
    if offline or not models.hub_answers():
        raise AssetError(
            f"task {task}: there is no folder {location} and the data hub cannot be reached; give a local folder as "
            f"{task} under [tasks] in the file that --sources gives"
        )
    import datasets

    try:
        found = datasets.load_dataset(location, config)
        split = next(name for name in splits if name in found)
        return list(found[split])
    except StopIteration:
        raise AssetError(f"task {task}: {location} has no split {' or '.join(splits)}") from None
    except Exception as error:  # the client raises nearly every kind
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise AssetError(f"task {task}: {location} cannot be read from the hub: {first.strip()}") from error
