"""What the words of a report mean, for a reader who has never seen them."""

from __future__ import annotations

from collections.abc import Iterable

from ttapca.benchmark.cells import Row, Setting

METHODS = {
    "source": "the model as it is",
    "bn": "BatchNorm with the statistics of the test batch",
    "tent": "scale and shift of the normalisation layers, learned by entropy",
    "shot": "the feature extractor's weights, learned by information maximisation",
    "slr+it": "an input transformation, and scale and shift of the normalisation layers, "
    "learned by likelihood ratios and diversity",
    "eata": "scale and shift of the normalisation layers, learned by the entropy of reliable "
    "samples",
    "roid": "scale and shift of the normalisation layers, learned by weighted likelihood "
    "ratios and pulled to the source",
    "lame": "the batch's outputs, corrected by the affinity of its samples",
    "sar": "scale and shift, learned by the entropy of reliable samples nearby",
    "memo": "all weights, learned for each image by the entropy over its views",
    "cotta": "all weights, learned from a slow teacher; some return to the source",
    "ttt": "the weights up to a split, learned by telling rotations apart",
    "ttapca-relu": "ReLU spectral filter, learned by entropy",
    "ttapca-exp": "exponential spectral filter, learned by entropy",
    "ttapca-multiplicative": "spectral filter with a bounded multiplier, learned by entropy",
    "ttapca-closed": "spectral filter from the closed form on, learned by entropy and pulled back",
    "wiener": "spectral filter in closed form, the safe choice; no gradient",
    "match": "spectral filter in closed form, to the source variances; no gradient",
    "two-sided": "spectral filter in closed form, exponents by choice; no gradient",
}
"""The summaries of all methods, without torch: who reads results does not wait for it."""

SETTINGS: dict[Setting, str] = {
    "episodic": "adaptation starts anew at each batch",
    "online": "adaptation goes on over one corruption, and starts anew at the next",
    "correlated": "like online, with the images of a class one after another",
    "continual": "adaptation goes on from one corruption to the next, and never starts anew",
    "mixed": "all corruptions at once, image by image; adaptation never starts anew",
}


def glossary(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Explain the methods and settings that occur.

    Args:
        rows: Of a file of results.

    Returns:
        Words and what they mean, methods first, in the order in which they occur; a method that
        this version does not know is left out.

    Example:
        >>> glossary([])
        []
    """
    cells = [row.cell for row in rows]
    methods = dict.fromkeys(cell.method for cell in cells)
    settings = dict.fromkeys(cell.setting for cell in cells)
    return [
        *((name, METHODS[name]) for name in methods if name in METHODS),
        *((name, SETTINGS[name]) for name in settings if name in SETTINGS),
    ]
