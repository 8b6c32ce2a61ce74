"""Questions to token ids and back by a model's tokenizer; its stops and control tokens."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from prefixrl.common.config.foreign.files import explained
from prefixrl.common.config.prompting import ModelConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.models.config_file import document_of, embedding_rows, positions_of
from prefixrl.common.prompts.answer_end import THINK_OPEN
from prefixrl.common.prompts.extract import THINK_CLOSE
from prefixrl.common.prompts.limits import SpecialTexts, most_prompt_tokens
from prefixrl.common.prompts.prompt_form import PromptForm, conversation
from prefixrl.common.prompts.tokenizer import has_tokenizer, load_tokenizer, misread_text
from prefixrl.common.wire.messages.groups import Turn

_THOUGHT = frozenset({THINK_OPEN, THINK_CLOSE})
"""Tokens of an answer, special or not."""
_MOST_NAMED = 12
OMISSION = "\n[...]\n"
"""Stands where the middle of a long draft was left out."""
OMISSION_TOKENS = 8
"""More tokens than it has in any tokenizer."""

Role = Literal["rollout", "scorer"]


def renderer_of(config: RunConfig, role: Role, model: str | None = None) -> "Renderer":
    """Return the renderer of a role by the run file; `model`: its folder on this host."""
    section = config.engine_section(role)
    model_config = config.model_section(role)
    renderer = Renderer(
        model or model_config.model,
        most_prompt_tokens(config, role, model),
        model_config,
        "target" if model_config is config.target else "adapter",
        section.stop_tokens,
        section.own_stops,
        role,
    )
    renderer.allows_special = config.data.special_tokens == "allow"
    return renderer


class Renderer:
    """Renders questions as the opened assistant turn and decodes continuations."""

    def __init__(
        self,
        model: str,
        max_prompt_tokens: int,
        model_config: ModelConfig | None = None,
        section: str = "adapter",
        stop_tokens: Iterable[int | str] = (),
        own_stops: bool = True,
        role: Role = "rollout",
    ) -> None:
        """Read the tokenizer, find the stops; DataError or ConfigError where it has no such tokens."""
        self._tokenizer = load_tokenizer(model)
        self._model = model
        self._most = max_prompt_tokens
        self._limit = f"the model's positions, and {role}.max_prompt_tokens"
        self.positions = positions_of(document_of(model))
        """Most tokens of a text in the model; None where it names no limit."""
        self._asked = model_config or ModelConfig(model=model)
        self._form = PromptForm(self._tokenizer, self._asked, section)
        ids = set(map(int, self._tokenizer.get_vocab().values()))
        ids |= set(map(int, self._tokenizer.added_tokens_decoder))
        self.rows = embedding_rows(model) or max(ids) + 1
        """Rows of the embedding: some families have more of them than tokens, some folders fewer."""
        self.tokens = frozenset(token for token in ids if token < self.rows)
        """Ids that are tokens and have a row."""
        self.eos_tokens = frozenset(_declared_stops(model, self._tokenizer.eos_token_id))
        """End-of-sequence ids that tokenizer, config and generation config declare."""
        self.closer = self._form.closer()
        """Token that closes an assistant's turn in the chat template; None without one."""
        stops = {self._one_token(stop, model, f"{role}.stop_tokens") for stop in stop_tokens}
        if own_stops:
            stops |= self.eos_tokens
            stops |= set() if self.closer is None else {self.closer}
        self.stop_tokens = frozenset(stops)
        if self.stop_tokens.isdisjoint(self.tokens):
            raise DataError(
                f"{model} declares no end-of-sequence token among the {self.rows} of its embedding; set eos_token in "
                f"its tokenizer_config.json, or give {role}.stop_tokens"
            )
        names = _special_names(self._tokenizer)
        # Marks of a thought are special in some tokenizers, and belong to an answer in all.
        control = {
            token for token, name in names.items() if name not in _THOUGHT
        } - self.stop_tokens
        self.control_tokens = frozenset(control & self.tokens)
        """Special tokens that are no stop: an answer has none of them."""
        self._thought_marks = {token: name for token, name in names.items() if name in _THOUGHT}
        """Marks of a thought that are special tokens, by id."""
        self._special = SpecialTexts(set(names.values()) - _THOUGHT - {self._tokenizer.unk_token})
        self.allows_special = False
        """True if a question may have special tokens."""

    def _one_token(self, token: int | str, model: str, key: str) -> int:
        if isinstance(token, int):
            if token in self.tokens:
                return token
            raise ConfigError(
                f"{key}: {token} is no token of {model}, whose ids are 0 to {max(self.tokens)}"
            )
        ids = self._encode(token, add_special_tokens=False)
        if len(ids) == 1 and (
            ids[0] != self._tokenizer.unk_token_id or token == self._tokenizer.unk_token
        ):
            return int(ids[0])
        added = [each.content for each in self._tokenizer.added_tokens_decoder.values()]
        more = f" and {len(added) - _MOST_NAMED} more" if len(added) > _MOST_NAMED else ""
        raise ConfigError(
            f"{key}: {token!r} is {len(ids)} tokens of {model} ({ids}), a stop must be one that it knows; its added "
            f"tokens are {', '.join(map(repr, added[:_MOST_NAMED])) or 'none'}{more}. For a longer text: "
            f"scorer.stop_texts"
        )

    @property
    def has_chat_template(self) -> bool:
        """True if a prompt is a conversation."""
        return self._form.template is not None

    @property
    def vocabulary(self) -> dict[str, int]:
        """Tokens with their ids, by which tokenizers of one family are known."""
        return dict(self._tokenizer.get_vocab())

    def misread_text(self) -> str | None:
        """Return a text that is read otherwise than by the model's tokenizer.json, if any."""
        return misread_text(self._tokenizer, self._model)

    def prompt(
        self,
        question: str,
        system: str = "",
        earlier: Sequence[Turn] = (),
        advice: str = "",
        draft: str = "",
    ) -> TokenIds:
        """Return the ids of a rendered question; raise ValueError for one that cannot be asked.

        A draft never makes a question one: its special tokens, and the middle of a long one, are left out.
        """
        said = "\n".join([system, *(said for _, said in earlier), question])
        has_special = not self.allows_special and self._special.within(said)
        # Models write advice, so that no key allows it more than text.
        if special := has_special or self._special.within(advice):
            place = "question" if has_special else "advice"
            raise ValueError(
                f"the {place} has {', '.join(map(repr, special[:_MOST_NAMED]))}, special in the tokenizer of "
                f'{self._model}: it could close its own turn; data.special_tokens = "allow" lets it'
            )
        draft = self._special.without(draft)
        while True:
            turns = conversation(self._asked, question, system, earlier, advice, draft)
            text = self._form.prompt(turns)
            ids = self._encode(text, add_special_tokens=not self.has_chat_template)
            if not draft or len(ids) <= self._most:
                break
            draft = self._shortened(draft, len(ids) - self._most)
        if not 0 < len(ids) <= self._most:
            raise ValueError(
                f"prompt has {len(ids)} tokens, allowed are 1 to {self._most} ({self._limit})"
            )
        if (above := max(ids)) >= self.rows:
            raise ValueError(
                f"prompt has token {above} ({self._tokenizer.convert_ids_to_tokens(above)!r}), the embedding of "
                f"{self._model} has {self.rows} rows: resize it, or give the tokenizer that it was trained with"
            )
        return np.asarray(ids, dtype=np.int32)

    def _shortened(self, draft: str, excess_tokens: int) -> str:
        """Return beginning and end of a draft, shorter by so many tokens; "" where too little is left."""
        ids = self.encode(draft)
        size = ids.size - excess_tokens - OMISSION_TOKENS
        if size < 2:
            return ""
        end = size // 2
        shortened = self.text(ids[: size - end]) + OMISSION + self.text(ids[ids.size - end :])
        return shortened if len(shortened) < len(draft) else ""

    def never_drawn(self, control_tokens: Literal["mask", "allow"]) -> frozenset[int]:
        """Return the ids that are no token, and with "mask" control tokens."""
        unknown = frozenset(range(self.rows)) - self.tokens
        return unknown | self.control_tokens if control_tokens == "mask" else unknown

    def has_control(self, ids: TokenIds) -> bool:
        """Return True if a control token is among ids."""
        return bool(self.control_tokens) and not self.control_tokens.isdisjoint(ids.tolist())

    def _encode(self, text: str, **options: bool) -> list[int]:
        with explained(f"the tokenizer of {self._model} cannot encode {text[:40]!r}", ValueError):
            return list(self._tokenizer.encode(text, **options))

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a piece of an answer; raise ValueError for one that it cannot encode."""
        return np.asarray(self._encode(text, add_special_tokens=False), dtype=np.int32)

    def text(self, ids: TokenIds) -> str:
        """Return the text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def pieces(self, ids: TokenIds) -> list[str]:
        """Return the text that each token adds to an answer; empty for a slow tokenizer."""
        if not self._tokenizer.is_fast:
            return []
        return pieces_of(self._tokenizer.backend_tokenizer, ids)

    def piece_reader(self) -> Callable[[int], str]:
        """Return a function that takes the tokens of an answer one by one and returns the text that each adds.

        Special tokens add no text, but for the marks of a thought.

        Raises:
            ConfigError: the tokenizer is slow, and cannot read a text token by token.
        """
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"{self._model} has no tokenizer.json, so that its texts cannot be read while they are written; "
                "leave scorer.stop_when_answered out"
            )
        tokenizer, marks = self._tokenizer.backend_tokenizer, self._thought_marks
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: marks.get(token) or stream.step(tokenizer, token) or ""

    def decode_with_special(self, ids: TokenIds) -> str:
        """Return the text of ids, special tokens included: the form tokenizers can be compared by."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def decode_without_bos(self, ids: TokenIds) -> str:
        """Decode without a leading BOS, for servers that add their own."""
        whole = self._encode("1")
        bare = self.encode("1").tolist()
        opening = whole[: len(whole) - len(bare)] if whole[-len(bare) :] == bare else []
        is_opened = bool(opening) and ids[: len(opening)].tolist() == opening
        return self.decode_with_special(ids[len(opening) :] if is_opened else ids)

    def encode_literal(self, text: str) -> TokenIds:
        """Return the ids of a text in which nothing is read as a special token; raise ValueError as `encode`."""
        return np.asarray(
            self._encode(text, add_special_tokens=False, split_special_tokens=True), dtype=np.int32
        )

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """Return a prefix without a stop token at its end, which would close the target's turn."""
        return ids[:-1] if ids.size and int(ids[-1]) in self.stop_tokens else ids


def _special_names(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    special = {token for token, each in added.items() if each.special}
    special |= set(tokenizer.all_special_ids)
    return {int(token): tokenizer.convert_ids_to_tokens(token) for token in special}


def _declared_stops(model: str, tokenizer_eos: int | None) -> set[int]:
    stops = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    for name in ("config.json", "generation_config.json"):
        declared = document_of(model, name).get("eos_token_id")
        stops.update([declared] if isinstance(declared, int) else declared or [])
    return stops


def masked_tokens(config: RunConfig, model: str) -> tuple[int, ...]:
    """Return the tokens that the adapter never draws; none without a tokenizer."""
    if not config.rollout.has_tokenizer or not has_tokenizer(model):
        return ()
    return tuple(
        sorted(renderer_of(config, "rollout", model).never_drawn(config.rollout.control_tokens))
    )


class ByteRenderer:
    """Renderer of the simulated engine: tokens are the UTF-8 bytes of the text."""

    stop_tokens = frozenset({0})
    tokens = range(2**31)

    def has_control(self, ids: TokenIds) -> bool:
        """Return False: no byte is a control token."""
        return False

    def never_drawn(self, control_tokens: Literal["mask", "allow"]) -> frozenset[int]:
        """Return no id."""
        return frozenset()

    def encode(self, text: str) -> TokenIds:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def text(self, ids: TokenIds) -> str:
        """Return the text of bytes; other ids are left out."""
        return bytes(int(token) for token in ids if 0 < token < 256).decode(errors="replace")

    def pieces(self, ids: TokenIds) -> list[str]:
        """Return the text of each byte."""
        return [self.text(ids[at : at + 1]) for at in range(ids.size)]

    def piece_reader(self) -> Callable[[int], str]:
        """Return a function that returns the text of a byte."""
        return lambda token: self.text(np.asarray([token], dtype=np.int32))

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """Return ids without a closing 0."""
        return ids[:-1] if ids.size and int(ids[-1]) == 0 else ids

    encode_literal = encode

    def prompt(
        self,
        question: str,
        system: str = "",
        earlier: Sequence[Turn] = (),
        advice: str = "",
        draft: str = "",
    ) -> TokenIds:
        """Return the bytes of a question and a draft; other turns are left out."""
        return self.encode(question + draft)

    decode_with_special = text


class ChatRenderer(ByteRenderer):
    """Renderer of a target that is asked in messages: tokens are the UTF-8 bytes of texts.

    A prompt is the JSON of its messages and a line feed, so that a prefix behind it is told from it.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def prompt(
        self,
        question: str,
        system: str = "",
        earlier: Sequence[Turn] = (),
        advice: str = "",
        draft: str = "",
    ) -> TokenIds:
        """Return the bytes of the conversation that asks a question."""
        turns = conversation(self._model, question, system, earlier, advice, draft)
        messages = [{"role": role, "content": content} for role, content in turns]
        return self.encode(msgspec.json.encode(messages).decode() + "\n")


def messages_of(row: TokenIds) -> tuple[list[dict[str, str]], str]:
    """Return the messages of a row of `ChatRenderer`, and the prefix behind them."""
    conversation_json, _, prefix = bytes(row.astype(np.uint8)).partition(b"\n")
    messages: list[dict[str, str]] = msgspec.json.decode(conversation_json)
    return messages, prefix.decode(errors="replace")


Texts = Renderer | ByteRenderer


def texts_of(config: RunConfig, role: Role, model: str | None = None) -> Texts:
    """Return the renderer of a role (`model`: its folder), or its stand-in where the engine is simulated."""
    if role == "scorer" and config.target is not None and config.scorer.is_chat:
        return ChatRenderer(config.target)
    if not config.engine_section(role).has_tokenizer:
        return ByteRenderer()
    return renderer_of(
        config, role, model or model_folder(config.model_section(role).model, needs_weights=False)
    )


def sent_text(config: RunConfig, adapter: Texts, ids: TokenIds) -> str | None:
    """Return the text of a prefix as it goes to scorers; None in direct mode.

    Advice is a text, without special tokens and space around it. A prefix that is continued keeps
    them, because the target's own tokenizer may have to read the text.
    """
    if config.mode == "direct":
        return None
    bare = adapter.without_stop(ids)
    return adapter.text(bare).strip() if config.has_advice else adapter.decode_with_special(bare)


def continued_prefix(target: Texts, ids: TokenIds, text: str | None) -> tuple[TokenIds, bool]:
    """Return a prefix as the target continues it, and True if it was encoded from its text; or raise ValueError.

    `text` is the adapter's reading of `ids` without a stop; None where both have one tokenizer.
    """
    bare = target.without_stop(ids)
    # If both tokenizers decode ids that are tokens to the same text, the ids are the same tokens to both.
    continued = bare
    was_text = False
    if text is not None and not (
        _holds(target, bare) and text in map(target.decode_with_special, (bare, ids))
    ):
        continued = ids[:-1]  # ended by a stop of the adapter alone, else:
        was_text = not _holds(target, continued) or text != target.decode_with_special(continued)
    if was_text and text is not None:
        # Another tokenizer cannot encode a part of a character.
        continued = target.encode_literal(text.rstrip("\ufffd"))
    if not _holds(target, continued):
        raise ValueError(
            f"prefix {text or continued.tolist()!r} has a token without a row in the target's embedding"
        )
    return continued, was_text


def _holds(target: Texts, ids: TokenIds) -> bool:
    return all(token in target.tokens for token in ids.tolist())


def pieces_of(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> list[str]:
    """Return the text that each token adds, "" for a special one and for a part of a character."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token) or "" for token in ids.tolist()]
