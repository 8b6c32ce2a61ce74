"""A prefix on its way from the adapter's tokenizer to the target's."""

from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer


def continued_prefix(target: Renderer | ByteRenderer, ids: TokenIds, text: str | None) -> tuple[TokenIds, bool]:
    """Return a prefix as the target continues it, and True if it was encoded from its text.

    `text` is the adapter's reading of `ids` without a stop; None where both have one tokenizer.
    """
    bare = target.without_stop(ids)
    # If both tokenizers decode the ids to the same text, the ids are the same tokens to both.
    if text is None or text in map(target.decode_with_special, (bare, ids)):
        return bare, False
    if text == target.decode_with_special(ids[:-1]):  # ended by a stop of the adapter alone
        return ids[:-1], False
    # Another tokenizer cannot encode a part of a character.
    return target.encode_literal(text.rstrip("\ufffd")), True
