"""Numbers in sentences of pages are those of recorded results."""

import re


def check_sentence(sentence, apart, page):
    """Check that a page has a sentence, and that its numbers are a difference and its interval.

    What is said to be below has no signs.
    """
    values = (apart.mean, apart.low, apart.high)
    if apart.high < 0:
        values = (-apart.mean, -apart.high, -apart.low)
    numbers = re.findall(r"-?\d+\.\d+", sentence)
    assert numbers == [f"{100 * one:.1f}" for one in values][: len(numbers)]
    assert sentence in page
