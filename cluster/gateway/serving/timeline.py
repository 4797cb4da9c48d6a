"""The timeline of one choice: its stamps with their times, and how much each added to the latency.

    in one engine   ingress, admitted, routed, prefill_queued, prefill_started, first_token, last_token, last_byte
    in two          ... first_token, ticket, decode_routed, decode_queued, claimed, pulled, committed,
                    first_decode, last_token ...
    a lost attempt  ... failed, routed, prefill_queued, prefill_started, resumed ...

Times are by this gateway's clock. An engine reports how long before its message it reached a stage: a duration by its
own clock. So a stage appears later than it was by the travel time of that message. The part from `routed` to
`prefill_queued`, or from `decode_routed` to `decode_queued`, thus includes the network in both directions.

Parts follow each other in the order of causes. Work that overlapped with something else, such as blocks fetched while
the prompt was still computed, adds nothing, so the parts add up to the latency.
"""

from __future__ import annotations

import enum

import msgspec

from baton.engine.core.speculation.stats import NO_DRAFTS, DraftCounts
from baton.engine.core.stages import Ages, Stage

from .attempt import Attempt


class Stamp(enum.StrEnum):
    """The stamps of a choice's timeline."""

    INGRESS = "ingress"  # the request's headers have arrived
    ADMITTED = "admitted"  # the request has been read, validated and tokenized
    ROUTED = "routed"  # it was submitted to the engine that computes its prompt
    PREFILL_QUEUED = "prefill_queued"  # that engine has received it
    PREFILL_STARTED = "prefill_started"  # its first step
    FIRST_TOKEN = "first_token"
    TICKET = "ticket"  # its KV is on offer
    DECODE_ROUTED = "decode_routed"  # it was submitted to the engine that fetches the KV on offer
    DECODE_QUEUED = "decode_queued"  # that engine has received it
    CLAIMED = "claimed"  # that engine has sent its claim
    PULLED = "pulled"  # all bytes of the KV have arrived
    COMMITTED = "committed"  # the blocks are safe to use
    FIRST_DECODE = "first_decode"  # its first step in that engine
    LAST_TOKEN = "last_token"
    LAST_BYTE = "last_byte"  # the whole response was handed to the connection
    FAILED = "failed"  # an attempt was lost; this part is its work since the previous stamp, tokens included
    RESUMED = "resumed"  # the first token after a lost attempt


PREFILL_STAMPS = {Stage.QUEUED: Stamp.PREFILL_QUEUED, Stage.STARTED: Stamp.PREFILL_STARTED}
DECODE_STAMPS = {
    Stage.QUEUED: Stamp.DECODE_QUEUED,
    Stage.CLAIMED: Stamp.CLAIMED,
    Stage.PULLED: Stamp.PULLED,
    Stage.COMMITTED: Stamp.COMMITTED,
    Stage.STARTED: Stamp.FIRST_DECODE,
}


class TimelinePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The time that a choice took from the previous stamp to this one."""

    stamp: Stamp
    at_s: float  # since the ingress
    part_s: float  # share of the latency
    engine: str = ""  # engine that the choice was in; empty: this gateway


class TimelineReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A choice's timeline as a client sees it, and counts of the drafts that were checked for it, if any."""

    latency_s: float
    parts: list[TimelinePart]
    num_drafts: int = 0  # steps that checked draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # those of `num_draft_tokens` that are in the answer


class Timeline:
    """Records the stamps of one choice in the order of causes, on `time.monotonic`'s clock."""

    def __init__(self, ingress_s: float, admitted_s: float) -> None:
        self.is_whole = False  # the last token has come: only the last byte can still add to the latency
        self.ingress_s = ingress_s
        self.drafts = NO_DRAFTS  # checked so far
        self._stamps = [(Stamp.INGRESS, ingress_s, ""), (Stamp.ADMITTED, admitted_s, "")]

    def note(self, stamp: Stamp, at_s: float, engine: str = "") -> None:
        if not self.is_whole or stamp is Stamp.LAST_BYTE:
            self._stamps.append((stamp, at_s, engine))
            self.is_whole |= stamp is Stamp.LAST_TOKEN

    def note_drafts(self, drafts: DraftCounts) -> None:
        """Note drafts that a step has checked."""
        self.drafts += drafts

    def sent(self, attempt: Attempt) -> None:
        """Note that an attempt was submitted."""
        self.note(Stamp.ROUTED if attempt.holder is None else Stamp.DECODE_ROUTED, attempt.sent_s)

    def note_stages(self, attempt: Attempt, ages: Ages, now_s: float) -> None:
        """Note the stages in an attempt's first output. Another process reports their ages, so impossible ones are
        clipped.
        """
        engine, names = attempt.placement.engine.engine_id, PREFILL_STAMPS if attempt.holder is None else DECODE_STAMPS
        for stage, stamp in names.items():
            if (age_s := ages.get(stage)) is not None:
                self.note(stamp, min(now_s, max(attempt.sent_s, now_s - age_s)), engine)

    def until_s(self, stamp: Stamp) -> float | None:
        """Return the time from the ingress to the first stamp of this kind, or None if there is none."""
        return next((at_s - self.ingress_s for name, at_s, _ in self._stamps if name is stamp), None)

    def parts(self) -> list[TimelinePart]:
        """Return the parts. Their `part_s` add up to the time from the ingress to the last stamp."""
        parts, reached_s = [], self.ingress_s
        for stamp, at_s, engine in self._stamps:
            part_s = max(0.0, at_s - reached_s)
            reached_s += part_s
            parts.append(TimelinePart(stamp, at_s - self.ingress_s, part_s, engine))
        return parts

    def report(self) -> TimelineReport:
        parts = self.parts()
        latency_s, drafts = sum(part.part_s for part in parts), self.drafts
        return TimelineReport(latency_s, parts, drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)
