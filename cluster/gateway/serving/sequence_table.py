"""The transition table of a sequence: states, events, and one row for each pair that can occur.

    PLACING ──engine found──> PREFILLING ──first tokens──> DECODING ──finished──> DONE
     ^  ^ │                      │ handed off               ^    │
     │  └─┼──────────────────────┘                          │    │
     │    └──reader found──> HANDING_OFF ──first tokens─────┘    │
     │                            │                              │
     └────lost, refused: from PREFILLING, HANDING_OFF, DECODING──┘      failed, no engine, closed: DONE

A finished prefill keeps the KV of the prompt on offer. A reader is a decode engine that fetches it. An early reader
begins to fetch while the prompt is still being computed, so that little is left when the first token comes.

`ServedSequence` looks up the row of a state and an event, and carries out its effects. docs/concepts/serving.md shows
the table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SequenceState(enum.Enum):
    PLACING = "no engine has it"
    PREFILLING = "an engine computes all tokens so far"
    HANDING_OFF = "a decode engine is to go on from the KV that a prefill engine offers"
    DECODING = "an engine writes tokens"
    DONE = "finished, failed, or given up"


class SequenceEvent(enum.Enum):
    ENGINE_FOUND = "engine found"  # one that computes all tokens up to now
    RECOMPUTE_FOUND = "engine found, KV not needed"  # the same, although KV is on offer, which no engine can fetch
    READER_FOUND = "reader found"
    EARLY_READER = "early reader fetches this KV"
    NO_ENGINE = "no engine"  # none within `capacity_timeout_s`, or every engine has refused
    OFFERED_EARLY = "KV on offer, no token"
    TOKENS = "tokens"
    HANDED_OFF = "handed off"  # the first token has come, and the KV is on offer
    FINISHED = "finished"
    LOST = "attempt lost"
    REFUSED = "attempt refused"  # for lack of room; the engine has not touched the KV on offer
    FAILED = "attempt failed"  # another attempt would not help, or is not allowed
    CLOSED = "closed"  # the client has disconnected, the deadline has passed, or the answer is complete


class Effect(enum.Enum):
    """Effects of an event, carried out in this order."""

    SUBMIT = "submit"  # to the selected engine
    SUBMIT_SOON = "submit soon"  # when the next output is wanted, at the latest in the event loop's next turn
    SUBMIT_EARLY = "submit early"  # to a decode engine, if there is one, that fetches KV as it is written
    BEGIN_EARLY = "begin"  # send the early reader the first token; from now on it is the current attempt
    NOTE_FIRST_OUTPUT = "note first output"  # in timeline, load and circuits: the engine has computed the prompt
    DELIVER = "deliver"  # keep the tokens, and send them to the client after the other effects
    KEEP_OFFER = "keep offer"
    DROP_OFFER = "drop offer"  # the reader has the KV, and has told the prefill engine so
    WITHDRAW_OFFER = "withdraw offer"  # if there is one: no engine will fetch it
    CLOSE_ATTEMPT = "close attempt"
    CLOSE_ALL = "close all attempts"  # including the early one, and one that was about to be submitted
    HAND_OFF = "find reader"  # the early reader, another one, or an engine that computes the prompt again
    BLAME = "blame"  # report the failure to the circuit of the engine or pair, to metrics, and to the log
    JUDGE_DEADLINE = "judge deadline"  # if a deadline has ended the attempt, count that against a circuit
    RETRY = "retry"  # a new generation, so that late outputs of the lost attempt are dropped
    NEW_GENERATION = "new generation"
    ANSWER_ERROR = "answer error"  # raise the attempt's error
    ANSWER_NO_ENGINE = "answer no engine"


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """The consequences of an event in a state."""

    next_state: SequenceState
    effects: tuple[Effect, ...]


_S, _E, _F = SequenceState, SequenceEvent, Effect
_LOST = SequenceRow(_S.PLACING, (_F.BLAME, _F.CLOSE_ALL, _F.WITHDRAW_OFFER, _F.RETRY))
_REFUSED = SequenceRow(_S.PLACING, (_F.BLAME, _F.CLOSE_ALL, _F.RETRY))
_FAILED = SequenceRow(_S.DONE, (_F.BLAME, _F.CLOSE_ALL, _F.WITHDRAW_OFFER, _F.ANSWER_ERROR))
_CLOSED = SequenceRow(_S.DONE, (_F.JUDGE_DEADLINE, _F.WITHDRAW_OFFER, _F.CLOSE_ALL))

SEQUENCE_TABLE: dict[tuple[SequenceState, SequenceEvent], SequenceRow] = {
    (_S.PLACING, _E.ENGINE_FOUND): SequenceRow(_S.PREFILLING, (_F.SUBMIT,)),
    (_S.PLACING, _E.RECOMPUTE_FOUND): SequenceRow(_S.PREFILLING, (_F.WITHDRAW_OFFER, _F.NEW_GENERATION, _F.SUBMIT)),
    (_S.PLACING, _E.READER_FOUND): SequenceRow(_S.HANDING_OFF, (_F.SUBMIT_SOON,)),
    (_S.PLACING, _E.EARLY_READER): SequenceRow(_S.HANDING_OFF, (_F.BEGIN_EARLY,)),
    (_S.PLACING, _E.NO_ENGINE): SequenceRow(_S.DONE, (_F.ANSWER_NO_ENGINE,)),
    (_S.PREFILLING, _E.OFFERED_EARLY): SequenceRow(_S.PREFILLING, (_F.SUBMIT_EARLY,)),
    (_S.PREFILLING, _E.TOKENS): SequenceRow(_S.DECODING, (_F.NOTE_FIRST_OUTPUT, _F.DELIVER)),
    (_S.PREFILLING, _E.HANDED_OFF): SequenceRow(
        _S.PLACING, (_F.NOTE_FIRST_OUTPUT, _F.DELIVER, _F.KEEP_OFFER, _F.CLOSE_ATTEMPT, _F.HAND_OFF)
    ),
    (_S.PREFILLING, _E.FINISHED): SequenceRow(_S.DONE, (_F.NOTE_FIRST_OUTPUT, _F.DELIVER)),
    (_S.HANDING_OFF, _E.TOKENS): SequenceRow(_S.DECODING, (_F.NOTE_FIRST_OUTPUT, _F.DROP_OFFER, _F.DELIVER)),
    (_S.HANDING_OFF, _E.FINISHED): SequenceRow(_S.DONE, (_F.NOTE_FIRST_OUTPUT, _F.DROP_OFFER, _F.DELIVER)),
    (_S.DECODING, _E.TOKENS): SequenceRow(_S.DECODING, (_F.DELIVER,)),
    (_S.DECODING, _E.FINISHED): SequenceRow(_S.DONE, (_F.DELIVER,)),
    **{(state, _E.LOST): _LOST for state in (_S.PREFILLING, _S.HANDING_OFF, _S.DECODING)},
    **{(state, _E.REFUSED): _REFUSED for state in (_S.PREFILLING, _S.HANDING_OFF, _S.DECODING)},
    **{(state, _E.FAILED): _FAILED for state in (_S.PREFILLING, _S.HANDING_OFF, _S.DECODING)},
    **{(state, _E.CLOSED): _CLOSED for state in SequenceState},
}
