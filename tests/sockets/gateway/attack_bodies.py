"""Expensive requests that a gateway accepts far enough to read them: bodies of up to 16 MiB, and small bodies with
large answers.
"""

from __future__ import annotations

import json

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MIB = 2**20
BODY_BYTES = 16 * MIB - 4096


def attacks(size: int = BODY_BYTES) -> dict[str, tuple[str, bytes]]:
    """Return a route and a body by name."""
    model, chat = b'{"model":"tiny",', b'"messages":[{"role":"user","content":"hello"}]'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[%s[]]}'}}
    calls = json.dumps({"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    keys = b",".join(b'"%d":1' % number for number in range(size // 14))
    few = min(size, 2 * MIB)  # within the limit of values in one body
    long = model + b'"prompt":[' + _filled(b"7", 2 * 30_000) + b"]"
    shorter = model + b'"prompt":[' + _filled(b"7", 2 * 12_000) + b"]"
    answer = b',"max_tokens":150,"ignore_eos":true,"n":16'
    chat_logprobs = b',"logprobs":true,"top_logprobs":20'
    return {
        "lists in prompt": (COMPLETIONS, model + b'"prompt":[' + _filled(b"[]", size) + b"]}"),
        "empty messages": (CHAT, model + b'"messages":[' + _filled(b'{"role":"user","content":""}', size) + b"]}"),
        "objects in an unknown field": (CHAT, model + chat + b',"x":[' + _filled(b"{}", size) + b"]}"),
        "arguments of a call": (CHAT, calls.replace(b"%s", _filled(b"[]", size) + b",")),
        "token ids": (COMPLETIONS, model + b'"prompt":[' + _filled(b"7", few) + b"]}"),
        "wrong items of stop": (COMPLETIONS, model + b'"prompt":"x","stop":[' + _filled(b"7", few) + b"]}"),
        "many keys": (COMPLETIONS, model + b'"prompt":"x",' + keys + b"}"),
        "a long key": (COMPLETIONS, model + b'"prompt":"x","' + b"k" * size + b'":1}'),
        "a long model": (COMPLETIONS, b'{"prompt":"x","model":"' + b"k" * size + b'"}'),
        "a long text": (COMPLETIONS, model + b'"prompt":"' + b"fox " * (size // 4) + b'"}'),
        "metadata": (COMPLETIONS, model + b'"prompt":"x","metadata":{' + keys.replace(b":1", b':""') + b"}}"),
        "template variables": (CHAT, model + chat + b',"chat_template_kwargs":{"a":"' + b"x" * size + b'"}}'),
        "items of a response": (
            RESPONSES,
            model + b'"input":[' + _filled(b'{"role":"user","content":""}', few) + b"]}",
        ),
        "tokens to a text": ("/detokenize", b'{"tokens":[' + _filled(b"7", few) + b"]}"),
        "echo with 5 log probabilities": (COMPLETIONS, long + b',"echo":true,"logprobs":5,"max_tokens":1}'),
        "echo with 5 log probabilities, streamed": (
            COMPLETIONS,
            long + b',"echo":true,"logprobs":5,"max_tokens":1,"stream":true}',
        ),
        "20 log probabilities of a prompt": (COMPLETIONS, shorter + b',"prompt_logprobs":20,"max_tokens":1}'),
        "20 log probabilities of 16 answers": (CHAT, model + chat + answer + chat_logprobs + b"}"),
        "20 log probabilities of 16 answers, streamed": (
            CHAT,
            model + chat + answer + chat_logprobs + b',"stream":true}',
        ),
        "20 log probabilities of a response": (
            RESPONSES,
            model + b'"input":"x","stream":true,"max_output_tokens":150,"top_logprobs":20}',
        ),
    }


def _filled(item: bytes, size: int) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))
