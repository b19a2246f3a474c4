"""Bytes from the wire, cut in every way."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from surefoot.bench.errors import Disconnected, ProtocolFailed
from surefoot.bench.http1 import ResponseParser
from surefoot.bench.sse import SseSplitter

STREAM = (
    ": hello\n\n"
    'data: {"a": "ü🙂"}\n\n'
    "event: x\r\nid: 7\r\ndata:second\r\n\r\n"
    ": keep-alive\n\n"
    "data: one\ndata:  two\n\n"
    "data\n\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = ['{"a": "ü🙂"}'.encode(), b"second", b"one\n two", b"[DONE]"]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    """A whole answer in chunks, with an extension and a trailer."""
    body = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + body + b"0\r\nDigest: x\r\n\r\n"


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces that end at `cuts`."""
    ends = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def split(pieces: list[bytes]) -> tuple[list[bytes], int]:
    """Events and number of comments of a stream fed in pieces."""
    splitter = SseSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.num_comments


def test_events_do_not_depend_on_where_the_stream_is_cut() -> None:
    """Every cut into two pieces, and byte by byte, gives the same events and comments."""
    for cut in range(len(STREAM) + 1):
        assert split(pieces_of(STREAM, [cut])) == (EVENTS, 2), cut
    assert split([bytes([byte]) for byte in STREAM]) == (EVENTS, 2)


def test_a_body_does_not_depend_on_where_the_response_is_cut() -> None:
    """Every cut of a chunked response into two pieces, and byte by byte, gives the same body."""
    data = chunked(b"hello", b" world\r\n0\r\n", b"!" * 300)
    body = b"hello world\r\n0\r\n" + b"!" * 300
    for cuts in [*([cut] for cut in range(len(data) + 1)), list(range(1, len(data)))]:
        parser = ResponseParser()
        assert b"".join(parser.feed(piece) for piece in pieces_of(data, cuts)) == body, cuts
        assert parser.complete
        assert parser.head is not None
        assert parser.head.status == 200
        assert parser.head.headers["content-type"] == "text/event-stream"


def test_events_inside_chunks_at_random_cuts() -> None:
    """Chunks that cut events, in pieces that cut chunks, give the events that were sent."""
    rng = random.Random(5)
    for _ in range(200):
        chunks = [piece for piece in pieces_of(STREAM, rng.sample(range(1, len(STREAM)), 6)) if piece]
        data = chunked(*chunks)
        parser, splitter, events = ResponseParser(), SseSplitter(), []
        for piece in pieces_of(data, rng.sample(range(len(data)), 8)):
            events += splitter.feed(parser.feed(piece))
        assert events == EVENTS


def test_a_body_of_known_length_ends_there() -> None:
    """A response with a length is complete at its last byte."""
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nab") == b"ab"
    assert not parser.complete
    assert parser.feed(b"cde") == b"cde"
    assert parser.complete


def test_a_body_without_length_ends_with_the_connection() -> None:
    """A response that says nothing of its length is complete when the connection ends."""
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\nconnection: close\r\n\r\nab") == b"ab"
    parser.end()
    assert parser.complete
    assert parser.head is not None
    assert not parser.head.keeps_alive


def test_interim_responses_are_passed_over() -> None:
    """A 100 before the response is not the response."""
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n") == b""
    assert parser.complete


def test_an_early_end_is_a_disconnect() -> None:
    """A connection that ends inside the head or inside a chunk is a disconnect."""
    for data in (b"", b"HTTP/1.1 200", HEAD, HEAD + b"5\r\nhel"):
        parser = ResponseParser()
        parser.feed(data)
        with pytest.raises(Disconnected):
            parser.end()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        HEAD + b"xyz\r\n",
        HEAD + b"2\r\nabcd\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    """Bytes that are no HTTP/1.1 response raise `ProtocolFailed`."""
    with pytest.raises(ProtocolFailed):
        ResponseParser().feed(data)
