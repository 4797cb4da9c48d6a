"""The transition table of a sequence: states, events, and one row for each pair that can occur.

    PLACING ──engine found──> PREFILLING ──first tokens──> DECODING ──finished──> DONE
     ^  ^ │                      │ handed off               ^    │
     │  └─┼──────────────────────┘                          │    │
     │    └──reader found──> HANDING_OFF ──first tokens─────┘    │
     │                            │                              │
     └────lost, refused: from PREFILLING, HANDING_OFF, DECODING──┘      failed, no engine, closed: DONE

A finished prefill keeps the KV of the prompt on offer. A reader is a decode engine that fetches it. An early reader
fetches what is written while the prompt is still being computed, so that little is left when the first token comes.

`ServedSequence` looks a pair up and carries out the effects of its row. docs/concepts/serving.md shows the table.
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
    ENGINE_FOUND = "engine found"  # that computes all tokens so far
    RECOMPUTE_FOUND = "engine found, KV not needed"  # the same, while KV is on offer that no engine can fetch
    READER_FOUND = "reader found"
    EARLY_READER = "early reader fetches this KV"
    NO_ENGINE = "no engine"  # in `capacity_timeout_s`, or every engine has refused
    OFFERED_EARLY = "KV on offer, no token"
    TOKENS = "tokens"
    HANDED_OFF = "handed off"  # the first token, and the KV is on offer
    FINISHED = "finished"
    LOST = "attempt lost"
    REFUSED = "attempt refused"  # for lack of room: the engine has not touched the KV on offer
    FAILED = "attempt failed"  # and another one is of no use, or one too many
    CLOSED = "closed"  # the client has left, its time is over, or the answer is complete


class Effect(enum.Enum):
    """Effects of an event, carried out in this order."""

    SUBMIT = "submit"  # to the engine that was found
    SUBMIT_SOON = "submit soon"  # when the next output is wanted, at the latest in the event loop's next round
    SUBMIT_EARLY = "submit early"  # to a decode engine that fetches what is written, if one is there
    BEGIN_EARLY = "begin"  # the early reader gets the first token and is the attempt from now on
    NOTE_FIRST_OUTPUT = "note first output"  # timeline, load, circuits: the engine has computed the prompt
    DELIVER = "deliver"  # keep the tokens, and send them to the client after the other effects
    KEEP_OFFER = "keep offer"
    DROP_OFFER = "drop offer"  # the reader has the KV, and has said so to the prefill engine
    WITHDRAW_OFFER = "withdraw offer"  # if there is one: no engine will fetch it
    CLOSE_ATTEMPT = "close attempt"
    CLOSE_ALL = "close all attempts"  # the early one too, and one that was about to be submitted
    HAND_OFF = "find reader"  # the early reader, another one, or an engine that computes the prompt again
    BLAME = "blame"  # the circuit of the engine or pair, metrics, log
    JUDGE_DEADLINE = "judge deadline"  # an attempt that a deadline has ended counts against a circuit
    RETRY = "retry"  # a new generation, so that late outputs of the lost attempt are dropped
    NEW_GENERATION = "new generation"
    ANSWER_ERROR = "answer error"  # of the attempt
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
