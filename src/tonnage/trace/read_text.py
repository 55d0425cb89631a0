"""A trace file as blocks of whole events, whatever its size: unpack, cut between events, keep the rest.

A Chrome trace is one object whose ``traceEvents`` is long, or that array alone. What stands before the
first event is kept as ``head``; the events come in blocks that are cut where one event ends and the next
begins, so that a block parses by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from tonnage.trace.events import Loss

BLOCK = 4 << 20
"""Bytes read at a time: small beside a trace, large beside an event."""

_PACKED = 1 << 18
"""Packed bytes unpacked at a time: traces pack about 20 to 1."""

_HEAD_LIMIT = 64 << 20
"""Bytes in which the first event must begin."""

_FIRST = re.compile(rb'\s*\[|\{\s*"traceEvents"\s*:\s*\[|.*?"traceEvents"\s*:\s*\[', re.S)
_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|dur|args|attr|id|s|bp)"'
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEYS + rb")")
"""The end of one event before the next; an event begins with one of these keys."""

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class TraceText:
    """The text of one file, read once from front to back.

    Attributes:
        path: the file.
        progress: called with each number of bytes read from it.
        head: text before the first event, once blocks are read.
        losses: what the file's packing lost.
        nbytes: unpacked bytes read so far.
    """

    path: Path
    progress: Callable[[int], None] | None = None
    head: bytes = b""
    losses: list[Loss] = field(default_factory=list)
    nbytes: int = 0

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Blocks of events without the array's brackets, and whether it is the last of the file."""
        pieces = self._pieces()
        rest = self._to_first_event(pieces)
        for piece in pieces:
            text = rest + piece
            cut = _last_cut(text)
            if cut < 0:
                rest = text
                continue
            yield text[:cut], False
            rest = text[cut:].lstrip(b" \t\r\n,")
        yield rest, True

    def _to_first_event(self, pieces: Iterator[bytes]) -> bytes:
        text = b""
        for piece in pieces:
            text = text + piece if text else piece.removeprefix(_BOM)
            begin = _FIRST.match(text)
            if begin:
                self.head = text[: begin.end()]
                return text[begin.end() :]
            if len(text) > _HEAD_LIMIT:
                break
        self.head = text
        return b""

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            for piece in self._unpacked(file) if packed else self._read(file, BLOCK):
                self.nbytes += len(piece)
                yield piece

    def _read(self, file: BinaryIO, nbytes: int) -> Iterator[bytes]:
        while piece := file.read(nbytes):
            if self.progress:
                self.progress(len(piece))
            yield piece

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """Whatever the packed members hold, up to the byte at which they break."""
        member = isal_zlib.decompressobj(wbits=31)
        try:
            for packed in self._read(file, _PACKED):
                while packed:
                    text = member.decompress(packed, BLOCK)
                    if text:
                        yield text
                    packed = member.unused_data if member.eof else member.unconsumed_tail
                    if member.eof:
                        member = isal_zlib.decompressobj(wbits=31)
                        if packed[:2] not in (_GZIP, b"", _GZIP[:1]):
                            return
                        if not packed:
                            break
            if not member.eof and (rest := member.flush()):
                yield rest
        except isal_zlib.error as error:  # type: ignore[misc]  # its stub does not say that it is an exception
            self.losses.append(
                Loss(what=f"the packed file is damaged ({error})", where=f"byte {self.nbytes} of its text")
            )


def _last_cut(text: bytes) -> int:
    """Where the last whole event of ``text`` that is followed by another ends; -1 for nowhere."""
    low = len(text)
    while low > 0:
        low = max(low - (1 << 16), 0)
        found = list(BETWEEN.finditer(text, low))
        if found:
            return found[-1].start() + 1
    return -1
