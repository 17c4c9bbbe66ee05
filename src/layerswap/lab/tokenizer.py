"""The lab's tokenizer: one token per syllable, name, number or mark.

A syllable that opens a word carries the space before it, so that " kimo" is " ki" + "mo" and
decoding gives the text back, character for character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.lab.world import CONSONANTS, PEOPLE, VOWELS, World, syllables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
MARKS = (".", "?", ":")
MAX_LENGTH = 128


def vocabulary(world: World) -> list[str]:
    """Every token in the order of its id, the special ones first."""
    opening = [*syllables(), *PEOPLE, *map(str, range(world.settings.biggest + 1))]
    return [
        *(PAD, BOS, EOS, UNKNOWN),
        *MARKS,
        *(f" {token}" for token in opening),
        *syllables(),
        *PEOPLE,
    ]


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """The tokenizer of a world, with padding on the right.

    It puts `<s>` before every text and never adds `</s>`; training does. `save_pretrained`
    writes files that `AutoTokenizer` loads without this package.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary(world))}
    core = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNKNOWN))
    pattern = Regex(rf" ?[{CONSONANTS}][{VOWELS}]| ?[A-Z][a-z]+| ?[0-9]+|[.?:]")
    core.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])]
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="right",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
