"""Threads that open resources of their own: the caller gets errors of the start, and can end the thread."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from baton.engine.net.sockets import split_endpoint
from baton.kv_transfer.channel import ZmqChannel
from baton.kv_transfer.errors import TransportError
from baton.kv_transfer.threads import ChannelThread, OwnerThread

pytestmark = pytest.mark.timeout(30)

Ready = Callable[[], None]


@pytest.fixture
def channel() -> Iterator[ZmqChannel]:
    channel = ZmqChannel("127.0.0.1", None)
    yield channel
    if is_open(channel):
        channel.close()


def is_open(channel: ZmqChannel) -> bool:
    """Return whether a socket listens at the channel's address."""
    try:
        socket.create_connection(split_endpoint(channel.address.removeprefix("tcp://"))).close()
    except ConnectionRefusedError:
        return False
    return True


def no_memory(ready: Ready) -> None:
    raise MemoryError("no memory to register")


def test_open_returns_when_the_thread_is_ready() -> None:
    opened: list[str] = []

    def work(ready: Ready) -> None:
        opened.append(threading.current_thread().name)
        ready()

    OwnerThread("mine", work).open(10.0)
    assert opened == ["mine"]


def test_errors_of_the_start_are_raised_by_open() -> None:
    with pytest.raises(MemoryError, match="no memory to register"):
        OwnerThread("mine", no_memory).open(10.0)


def no_answer(ready: Ready) -> None:
    raise TimeoutError("a device does not answer")


@pytest.mark.parametrize("work", [no_memory, no_answer])
def test_a_channel_whose_thread_could_not_begin_is_closed(work: Callable[[Ready], None], channel: ZmqChannel) -> None:
    thread = ChannelThread("mine", channel, work)
    with pytest.raises((MemoryError, TimeoutError), match=r"no memory|does not answer"):
        thread.open(10.0)
    assert not thread.is_alive()
    assert not is_open(channel)


def test_open_gives_up_on_a_stuck_thread_which_ends_when_it_continues(channel: ZmqChannel) -> None:
    library, left = threading.Event(), threading.Event()

    def work(ready: Ready) -> None:
        library.wait(20.0)
        ready()
        while not thread.is_closing:
            channel.wait(20.0)
        left.set()

    thread = ChannelThread("mine", channel, work)
    with pytest.raises(TransportError, match=r"did not start within 0\.05 s"):
        thread.open(0.05)
    library.set()
    assert left.wait(10.0)


def test_closing_wakes_the_thread_waits_for_it_and_may_be_done_twice(channel: ZmqChannel) -> None:
    def work(ready: Ready) -> None:
        ready()
        while not thread.is_closing:
            channel.wait(600.0)

    thread = ChannelThread("mine", channel, work)
    thread.open(10.0)
    assert thread.is_alive()
    assert is_open(channel)
    assert thread.close()
    assert thread.close()
    thread.end()
    assert not thread.is_alive()
    assert not is_open(channel)


def test_closing_ends_in_bounded_time_and_says_where_a_stuck_thread_is(
    channel: ZmqChannel, caplog: pytest.LogCaptureFixture
) -> None:
    library = threading.Event()

    def hangs_in_the_library(ready: Ready) -> None:
        ready()
        library.wait(20.0)

    thread = ChannelThread("mine", channel, hangs_in_the_library)
    thread.open(10.0)
    assert not thread.close(0.05)
    assert "the thread mine has not ended within 0.05 s" in caplog.text
    assert "hangs_in_the_library" in caplog.text
    assert is_open(channel), "the thread may still use it"
    library.set()
    assert thread.close(10.0)
    assert not is_open(channel)


def test_an_ended_thread_does_not_keep_its_owner_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.thread = OwnerThread("mine", self.work)
            self.thread.open(10.0)
            self.thread.join(10.0)

        def work(self, ready: Ready) -> None:
            ready()

    gc.disable()  # the owner must be freed by its reference count, not by a collection
    try:
        owner = Owner()
        gone = weakref.ref(owner)
        del owner
        assert gone() is None
    finally:
        gc.enable()
