"""Compares the tokens of a draft model with those of its target."""

from pathlib import Path

from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import ConfigError


def check_tokens(target: Path, draft: Path) -> None:
    """Raise ConfigError if a draft model has other tokens than its target, or none where that has some."""
    mine, theirs = Tokenizer.from_model(target), Tokenizer.from_model(draft)
    if mine is None:
        return  # Vocabularies of another size are refused behind this; whoever has no text has only numbers.
    if theirs is None:
        raise ConfigError(
            f"the draft model {draft} has no tokenizer, so its tokens may not be those of {target}; give a "
            "draft model with the same tokenizer, or speculate suffix"
        )
    if (token := mine.differing(theirs)) is not None:
        here = mine.token_to_id(token)
        raise ConfigError(
            f"the draft model {draft} has other tokens than {target}: {token!r} is "
            f"{theirs.token_to_id(token)} there and {'no token' if here is None else here} here; give a "
            "draft model with the same tokenizer, or speculate suffix"
        )
