"""What the engine's thread leaves for a stream is taken in order, and by a waiting task at once."""

from __future__ import annotations

import asyncio

import pytest

from surefoot.backends.engine.mailbox import Mailbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The loop that the product runs on."""
    return "asyncio"


async def test_all_that_waits_is_taken_at_once() -> None:
    """One call takes every item, in the order in which they came, and the next one only later items."""
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
    for item in range(3):
        mailbox.put(item)
    assert await mailbox.take() == [0, 1, 2]
    mailbox.put(3)
    assert await mailbox.take() == [3]


async def test_a_waiting_task_is_woken() -> None:
    """Items that are put before the woken task runs are taken with the one that woke it."""
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(1)
    mailbox.put(2)
    assert await taking == [1, 2]


async def test_a_task_that_stopped_waiting_takes_nothing() -> None:
    """What is put after a waiting task was cancelled is there for the next."""
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    mailbox.put(1)
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert await mailbox.take() == [1]
