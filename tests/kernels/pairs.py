"""Few combinations of many options in which any two values of different options meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

Case = dict[str, int]  # an index into the values of every option
Pair = tuple[tuple[str, int], tuple[str, int]]

_CANDIDATES = 20


def pairwise[T](options: Mapping[str, Sequence[T]], seed: int = 0) -> list[dict[str, T]]:
    """Combinations that cover every pair, the ones that cover most first; the same in every run.

    Greedy: of several random candidates that each begin with a pair not yet covered and then take,
    option by option, the value with the most such pairs, the best one is kept.
    """
    rng = random.Random(seed)
    names = list(options)
    missing: dict[Pair, None] = {}  # a set in an order that does not depend on hashes
    for a, b in itertools.combinations(names, 2):
        for i, j in itertools.product(range(len(options[a])), range(len(options[b]))):
            missing[(a, i), (b, j)] = None

    def pairs(case: Case) -> list[Pair]:
        chosen = [(name, case[name]) for name in names if name in case]
        return list(itertools.combinations(chosen, 2))

    def gain(case: Case) -> int:
        return sum(pair in missing for pair in pairs(case))

    def candidate() -> Case:
        case = dict(rng.choice(list(missing)))
        for name in rng.sample(names, len(names)):
            if name not in case:
                values = rng.sample(range(len(options[name])), len(options[name]))
                case[name] = max(values, key=lambda value: gain({**case, name: value}))
        return case

    cases: list[dict[str, T]] = []
    while missing:
        best = max((candidate() for _ in range(_CANDIDATES)), key=gain)
        for pair in pairs(best):
            missing.pop(pair, None)
        cases.append({name: options[name][best[name]] for name in names})
    return cases
