"""Drawings, line by line."""

from layerswap.compose.composition import draw
from layerswap.compose.presets import Zones, partition, soup, swap

TRANSITIONS = """\
head, final norm ░░░░░░░░░░ math
               5 ██████████ swahili
               4 ▒▒▒▒▒▒▒▒▒▒ 0.75 math + 0.25 swahili
               3 ░░░░░░░░░░ math
               2 ░░░░░░░░░░
               1 ▒▒▒▒▒▒▒▒▒▒ 0.75 math + 0.25 swahili
               0 ██████████ swahili
       embedding ░░░░░░░░░░ math"""

PARTITION_A = """\
head, final norm ░░░░░░░░░░ task
               3 ██████████ language
               2 █████░░░░░ attention: language; mlp: task
               1 █████░░░░░
               0 ██████████ language
       embedding ░░░░░░░░░░ task"""

SOUP = """\
head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.25 a + 0.75 b
               1 ▒▒▒▒▒▒▒▒▒▒
               0 ▒▒▒▒▒▒▒▒▒▒
       embedding ▒▒▒▒▒▒▒▒▒▒"""


def test_swap_with_transitions():
    plan = swap(
        6,
        task="math",
        language="swahili",
        zones=Zones(1, 1, 1, 1),
        weights={"math": 3, "swahili": 1},
        outside="task",
    )
    assert draw(plan) == str(plan) == TRANSITIONS


def test_partition_a():
    assert draw(partition("A", 4)) == PARTITION_A


def test_soup():
    assert draw(soup(2, {"b": 3, "a": 1})) == SOUP
