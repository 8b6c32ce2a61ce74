"""Files of JSON lines that are appended to while others read them: the last line may be half there."""

import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixrl.common.errors import DataError

log = logging.getLogger(__name__)

Line = TypeVar("Line", bound=msgspec.Struct)


def read(path: Path, kind: type[Line]) -> list[Line]:
    """Every line, in order; none where there is no such file.

    A last line that is no JSON is left out: it is being written, or was when the machine died or the disk was full.

    Raises:
        DataError: an earlier line is damaged, or a line holds something else; names file and line.
    """
    decoder = msgspec.json.Decoder(kind)
    texts = path.read_bytes().splitlines() if path.exists() else []
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        try:
            lines.append(decoder.decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # What was cut is no JSON; a whole line of other fields is of something else.
            if number < len(texts) or isinstance(error, msgspec.ValidationError):
                raise DataError(
                    f"{path} line {number} is damaged: {error}; mend it or take it out"
                ) from None
            log.warning("%s: left out the last line, which is not whole: %s", path, error)
    return lines
