"""Tiny checkpoints with heads that learned something, and tiny data in the formats of SQuAD, MNLI and SST-2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from harness import encoders

FAMILIES = ("bert", "distilbert", "xlm-roberta")
MNLI = ("entailment", "neutral", "contradiction")
MAX_SEQ = 96

_FIRST = ("anna", "boris", "carla", "david", "elena", "felix")
_LAST = ("smith", "jones", "weber", "novak", "silva", "rossi")
_CITY = ("berlin", "lima", "oslo", "cairo", "tokyo", "quito", "delhi", "paris")
_YEAR = tuple(str(year) for year in range(1990, 1998))
_FILLER = ("then", "later", "again", "quietly", "there", "and", "so", "people", "talked", "about", "music")
_COMMON = ("the", "guest", "came", "they", "met", "near", "it", "was", "in", "who", "where", "when", "?", ".")
_GOOD = ("good", "bright", "clever", "warm")
_BAD = ("bad", "dull", "clumsy", "cold")
_PLAIN = ("round", "blue", "wooden", "long")
_THING = ("film", "book", "song", "play")
WORDS = (*_FIRST, *_LAST, *_CITY, *_YEAR, *_FILLER, *_COMMON, *_GOOD, *_BAD, *_PLAIN, *_THING)


def _of(random: Random, words: Sequence[str]) -> str:
    return words[int(random.random() * len(words))]


# --- data ------------------------------------------------------------------------------------------------------------


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Articles of SQuAD's nested form with ``count`` questions: who, where and when. Some texts name two cities, so
    that not every question can be answered."""
    random = Random(seed)
    paragraphs = []
    for number in range((count + 2) // 3):
        context, answers = _context(random)
        asked = (("who came ?", "who"), ("where was it ?", "where"), ("when was it ?", "when"))
        qas = [
            {
                "id": f"{seed}-{number}-{kind}",
                "question": question,
                "answers": [{"text": answers[kind], "answer_start": context.index(answers[kind])}],
            }
            for question, kind in asked
        ]
        paragraphs.append({"context": context, "qas": qas})
    return [{"title": "tiny", "paragraphs": paragraphs}]


def _context(random: Random) -> tuple[str, dict[str, str]]:
    who = f"{_of(random, _FIRST)} {_of(random, _LAST)}"
    where, when = _of(random, _CITY), _of(random, _YEAR)
    facts = [f"the guest {who} came .", f"they met near {where} .", f"it was in {when} ."]
    if random.random() < 0.15:
        facts.append(f"they met near {_of(random, _CITY)} .")
    facts += [" ".join(_of(random, _FILLER) for _ in range(4)) + " ." for _ in range(int(random.random() * 6))]
    random.shuffle(facts)
    return " ".join(facts), {"who": who, "where": where, "when": when}


def premises(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(premise, hypothesis, label): same mood entails, the opposite contradicts, none is neutral; one in 12 lies.

    Five in six premises are in a good mood, so that the hypothesis alone tells much, as in MNLI itself.
    """
    random = Random(seed)
    rows = []
    for _ in range(count):
        mood, other = (_GOOD, _BAD) if random.random() < 5 / 6 else (_BAD, _GOOD)
        label = _of(random, MNLI)
        said = {"entailment": mood, "contradiction": other, "neutral": _PLAIN}[label]
        shown = _of(random, MNLI) if random.random() < 1 / 12 else label
        filler = " ".join(_of(random, _FILLER) for _ in range(int(random.random() * 5)))
        premise = f"{filler} the {_of(random, _THING)} was {_of(random, mood)} .".strip()
        rows.append((premise, f"it was {_of(random, said)} .", shown))
    return rows


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """(line, label), 1 for a good mood; one in 12 lies."""
    random = Random(seed)
    rows = []
    for _ in range(count):
        label = int(random.random() < 0.5)
        filler = " ".join(_of(random, _FILLER) for _ in range(int(random.random() * 8)))
        line = f"{filler} the {_of(random, _THING)} was {_of(random, (_BAD, _GOOD)[label])}".strip()
        rows.append((line, label if random.random() > 1 / 12 else 1 - label))
    return rows


def write_squad(folder: Path, train: int = 480, dev: int = 120) -> Path:
    """A folder with SQuAD v1.1's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 1), ("dev", dev, 2)):
        content = {"version": "1.1", "data": questions(count, seed)}
        (folder / f"{name}-v1.1.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_mnli(folder: Path, train: int = 480, dev: int = 160) -> Path:
    """A folder with GLUE's two files; the last row of each has no agreed label."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 3), ("dev_matched", dev, 4)):
        lines = ["index\tsentence1\tsentence2\tgold_label"]
        rows = [*premises(count, seed), ('the film was "', "it was", "-")]
        lines += [f"{index}\t{one}\t{two}\t{label}" for index, (one, two, label) in enumerate(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_sst2(folder: Path, train: int = 320, dev: int = 120) -> Path:
    """A folder with GLUE's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 5), ("dev", dev, 6)):
        lines = ["sentence\tlabel", *(f"{line}\t{label}" for line, label in sentences(count, seed))]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


# --- checkpoints -----------------------------------------------------------------------------------------------------


def shape(family: str, hidden: int = 48) -> dict[str, Any]:
    """Two layers of a family."""
    if family == "distilbert":
        small: dict[str, Any] = {"dim": hidden, "hidden_dim": 2 * hidden, "n_layers": 2, "n_heads": 4}
    else:
        small = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
        small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "type_vocab_size": 1 if "rob" in family else 2}
    pad = 1 if "roberta" in family else 0
    positions = MAX_SEQ + pad + 1 if pad else MAX_SEQ
    dropout = {"dropout": 0.0} if family == "distilbert" else {"hidden_dropout_prob": 0.0}
    attention = {"attention_dropout": 0.0} if family == "distilbert" else {"attention_probs_dropout_prob": 0.0}
    return {
        **small,
        **dropout,
        **attention,
        "pad_token_id": pad,
        "max_position_embeddings": positions,
        "initializer_range": 0.08,
    }


def make(folder: Path, family: str, task: str, names: Sequence[str] | None = None, steps: int | None = None) -> Path:
    """A checkpoint for ``task`` (squad, mnli, sst2), trained on its training examples. ``names``: those of its classes,
    in the order that its logits are to have. ``steps``: 0 for a head that learned nothing."""
    tokenizer = encoders.word_tokenizer(family, WORDS, MAX_SEQ)
    config = encoders.new_config(family, {**shape(family), "vocab_size": len(tokenizer)})
    torch.manual_seed(7)
    if task == "squad":
        model = transformers.AutoModelForQuestionAnswering.from_config(config)
    else:
        names = list(names or {"mnli": MNLI, "sst2": ("negative", "positive")}[task])
        config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    steps = {"squad": 200}.get(task, 150) if steps is None else steps
    if steps:
        _train(model, _batches(tokenizer, task, names or ()), steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Batch = Mapping[str, torch.Tensor]


def _batches(tokenizer: Any, task: str, names: Sequence[str]) -> list[Batch]:
    if task == "squad":
        return _squad_batches(tokenizer)
    return _mnli_batches(tokenizer, names) if task == "mnli" else _sst2_batches(tokenizer)


def _train(model: Any, batches: Sequence[Batch], steps: int) -> None:
    """Adam with a falling rate; the loss is the model's own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    model.train()
    inputs = encoders.input_names(model.config)
    for step in range(steps):
        optimizer.zero_grad()
        batch = batches[step % len(batches)]
        model(**{k: v for k, v in batch.items() if k in inputs or not k.startswith("token")}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    torch.set_num_threads(threads)


def _encoded(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Ids, mask and token types, padded to the longest."""
    second = None if pairs is None else list(pairs)
    return dict(tokenizer(list(texts), second, padding=True, return_tensors="pt", return_token_type_ids=True))


def _squad_batches(tokenizer: Any, size: int = 32) -> list[Batch]:
    rows = [
        (asked["question"], paragraph["context"], asked["answers"][0])
        for article in questions(960, seed=11)
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]
    batches = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        questions_, contexts = [one[0] for one in chosen], [one[1] for one in chosen]
        batch = tokenizer(questions_, contexts, padding=True, return_tensors="pt", return_token_type_ids=True)
        first = [batch.char_to_token(i, a["answer_start"], 1) for i, (_, _, a) in enumerate(chosen)]
        ends = [a["answer_start"] + len(a["text"]) - 1 for _, _, a in chosen]
        last = [batch.char_to_token(i, end, 1) for i, end in enumerate(ends)]
        batches.append({**batch, "start_positions": torch.tensor(first), "end_positions": torch.tensor(last)})
    return batches


def _mnli_batches(tokenizer: Any, names: Sequence[str], size: int = 32) -> list[Batch]:
    order = [name.casefold() for name in names]
    rows = premises(960, seed=13)
    batches = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        inputs = _encoded(tokenizer, [one[0] for one in chosen], [one[1] for one in chosen])
        batches.append({**inputs, "labels": torch.tensor([order.index(one[2]) for one in chosen])})
    return batches


def _sst2_batches(tokenizer: Any, size: int = 32) -> list[Batch]:
    rows = sentences(640, seed=15)
    batches = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        inputs = _encoded(tokenizer, [one[0] for one in chosen])
        batches.append({**inputs, "labels": torch.tensor([one[1] for one in chosen])})
    return batches


class TinyHeads:
    """Folders of checkpoints and data below one root, each made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def checkpoint(self, family: str, task: str, names: Sequence[str] | None = None, steps: int | None = None) -> Path:
        """See ``make``."""
        parts = [family, task, *(names or ()), *([] if steps is None else [str(steps)])]
        folder = self.root / "-".join(parts)
        return folder if folder.exists() else make(folder, family, task, names, steps)

    def data(self, task: str) -> Path:
        """The folder of a task's files."""
        folder = self.root / f"data-{task}"
        write = {"squad": write_squad, "mnli": write_mnli, "sst2": write_sst2}[task]
        return folder if folder.exists() else write(folder)
