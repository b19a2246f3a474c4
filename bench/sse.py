"""Server-sent events from bytes, cut anywhere."""

from __future__ import annotations


class SseSplitter:
    """Splits a stream into the data of its events. Lines end in LF or CR LF.

    `num_comments` counts comment lines (`: keep-alive`) so far; fields other than `data` are passed over.
    """

    def __init__(self) -> None:
        self.num_comments = 0
        self._held = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; returns the data of each event that they complete."""
        *lines, self._held = (self._held + data).split(b"\n")
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b":"):
                self.num_comments += 1
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
