"""Text as characters, for small models, and the tokenizers of others behind the same protocol.

Rule: the three special tokens come first (pad 0, bos 1, eos 2), then the alphabet in the order given, so an
alphabet that only grows at its end keeps the ids of a trained model.
"""

from collections.abc import Sequence
from typing import Any

from groupstate.core.arguments import string
from groupstate.errors import BadInput


class CharTokenizer:
    """One token per character of a fixed alphabet."""

    pad_id = 0
    bos_id = 1
    eos_id = 2

    def __init__(self, alphabet: str) -> None:
        string("alphabet", alphabet)
        if len(set(alphabet)) != len(alphabet):
            twice = sorted({char for char in alphabet if alphabet.count(char) > 1})
            raise BadInput(f"the alphabet {alphabet!r} has {twice!r} more than once; give each character once")
        self.alphabet = alphabet
        self._ids = {char: number for number, char in enumerate(alphabet, start=3)}

    @property
    def vocabulary_size(self) -> int:
        return 3 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """The ids of the characters, without bos and eos.

        Raises:
            BadInput: a character that the alphabet lacks.
        """
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            char = error.args[0]
            raise BadInput(
                f"character {char!r} at index {text.index(char)} of {text!r} is not in the alphabet "
                f"{self.alphabet!r}; add it there, or leave it out of the text"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The characters; special tokens are left out.

        Raises:
            BadInput: an id beyond the vocabulary.
        """
        for token in token_ids:
            if not 0 <= token < self.vocabulary_size:
                raise BadInput(f"token {token} is not in the vocabulary of {self.vocabulary_size} tokens")
        return "".join(self.alphabet[token - 3] for token in token_ids if token >= 3)


class TransformersTokenizer:
    """One of the package transformers, without special tokens in either direction."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
