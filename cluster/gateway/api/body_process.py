"""Main module of a body process, which reads large request bodies one at a time, limited in time and memory.

A body that makes a parser, a template or a tokenizer hang or take too much memory does so here. Timers and the memory
limit end this process, and the gateway starts another one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys

import msgspec

from baton.engine.structured.compiler_process import limit_memory
from baton.engine.text import Tokenizer

from ..bodies.process_messages import (
    AnswerReply,
    PeerClosed,
    PreparedReply,
    ReaderSetup,
    ReadOrder,
    ReadyReply,
    RefusalReply,
    Reply,
    pack_tokens,
    read_file,
    receive,
    send,
)
from ..errors import ApiError, too_expensive
from ..model import ServedModel
from ..settings import GatewaySettings
from .body_reader import BodyReader, RequestKind

WAITING = 6  # limit of elapsed time, as a multiple of the limit of CPU time
NICENESS = 5  # the gateway, which shares the cores, has priority


def main() -> None:
    """Serve the gateway over the inherited socket whose descriptor is the first argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICENESS)
    try:
        setup, file = receive(channel, ReaderSetup)
        reader = _reader(setup, file)
        send(channel, ReadyReply())
        limit_memory(setup.memory_bytes)
        gc.freeze()
        serve(channel, reader, setup.timeout_s)
    except (PeerClosed, OSError):  # the gateway has ended
        return


def _reader(setup: ReaderSetup, file: int) -> BodyReader:
    tokenizer = Tokenizer.from_bytes(read_file(file, os.fstat(file).st_size))
    os.close(file)
    model = ServedModel(
        setup.model_id,
        tokenizer,
        setup.max_model_len,
        setup.vocab_size,
        tuple(setup.eos_token_ids),
        setup.generation_defaults,
    )
    return BodyReader(model, GatewaySettings(), in_event_loop=False)


def serve(channel: socket.socket, reader: BodyReader, timeout_s: int) -> None:
    """Read bodies as ordered until the gateway closes the socket."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    with asyncio.Runner() as runner:
        while True:
            order, body = receive(channel, ReadOrder)
            reader.reconfigure(order.settings())
            result = os.memfd_create("read")
            _limit_time(timeout_s)
            try:
                text = read_file(body, os.fstat(body).st_size)
                reply: Reply = runner.run(_carry_out(reader, order, text, result))
            except ApiError as error:
                reply = RefusalReply.of(error)
            except MemoryError:
                reply = RefusalReply.of(too_expensive("needs more memory to be read than one request may have"))
            _limit_time(0)
            os.close(body)
            text = b""
            gc.collect()  # an error's traceback and its task form a reference cycle that holds the parsed body
            if trim is not None:
                trim(0)  # before the reply, upon which the gateway counts the body's memory as free
            send(channel, reply, result)
            os.close(result)


def _limit_time(timeout_s: int) -> None:
    """End this process after `timeout_s` of CPU time: on a busy machine, a body may take longer. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    signal.alarm(timeout_s * WAITING)


async def _carry_out(reader: BodyReader, order: ReadOrder, text: bytes, file: int) -> AnswerReply | PreparedReply:
    """Read a body, and write the result to `file`."""
    kind = RequestKind(order.kind)
    if not kind.generates:
        return AnswerReply(_write(file, await reader.answer(kind, text)))
    prepared = await reader.prepare(kind, text, order.key_salt)
    texts, prepared.prompts = prepared.prompts, []
    if prepared.prediction is not None:
        texts, prepared.prediction = [*texts, prepared.prediction], []
    num_bytes = _write(file, msgspec.json.encode(prepared))
    _write(file, pack_tokens([len(tokens) for tokens in texts]))
    for tokens in texts:
        _write(file, pack_tokens(tokens))
    return PreparedReply(num_bytes, len(texts))


def _write(file: int, content: bytes) -> int:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    return len(content)


if __name__ == "__main__":
    main()
