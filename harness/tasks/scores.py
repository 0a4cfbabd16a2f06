"""Scores of a single prediction, as SQuAD v1.1 defines them (Rajpurkar et al., arXiv 1606.05250, section 6.1). Pure."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

#: Score of a predicted text against the right answers, 0 to 1.
Score = Callable[[str, Sequence[str]], float]

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """The answer as it is compared: lower case, without ASCII punctuation and English articles, single spaces.

    In this order, so that "the-end" is "theend" and not "end".
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the normalized prediction is one of the normalized answers, else 0.0. ValueError without answers."""
    return max(float(normalized(prediction) == normalized(answer)) for answer in answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the words, against the best of the answers; 0 to 1.

    Words are counted as often as they occur. Two texts of which nothing is left have no word in common and score 0,
    although they match exactly: so does the official script of v1.1. ValueError without answers.
    """
    return max(_f1(normalized(prediction).split(), normalized(answer).split()) for answer in answers)


def _f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)
