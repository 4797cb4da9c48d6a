// Shows how a request's time was spent: the stamps of `baton_timeline`, which docs/reference/http.md explains.

import { el } from "./dom.js";
import { count, percent, seconds } from "./format.js";

// Stamp -> the event that it stands for.
const PARTS = {
  ingress: "the request's headers are here",
  admitted: "reading, the template, tokens",
  routed: "choosing an engine for the prompt",
  prefill_queued: "the way to the engine and back",
  prefill_started: "waiting in the engine",
  first_token: "computing the prompt",
  ticket: "offering the prompt's KV",
  decode_routed: "choosing an engine that goes on",
  decode_queued: "the way to that engine and back",
  claimed: "waiting for blocks",
  pulled: "the transfer",
  committed: "waiting for the grant",
  first_decode: "waiting for a place in the batch",
  last_token: "writing the answer",
  failed: "an attempt that was lost",
  resumed: "computing the prompt and all tokens so far",
};

// Parts that are the gateway's work. Any other part without an engine belongs to the engine of the part before.
const GATEWAYS = ["admitted", "routed", "decode_routed"];

/** Return the engines of a choice, in the order in which they worked. */
export function enginesOf(timeline) {
  return [...new Set(timeline.parts.map((part) => part.engine).filter(Boolean))];
}

/** Return a choice's timeline as rows with bars on a common scale. */
export function timelineOf(timeline) {
  const whole = Math.max(timeline.latency_s, 1e-9);
  let reached = 0; // time at which the part begins: parts follow each other and add up to the latency
  let engine = "";
  const rows = timeline.parts.slice(1).map((part) => {
    const bar = el("i", { "data-part": part.stamp });
    bar.style.left = `${(100 * reached) / whole}%`;
    bar.style.width = `${(100 * part.part_s) / whole}%`;
    reached += part.part_s;
    engine = part.engine || engine;
    const where = GATEWAYS.includes(part.stamp) ? "gateway" : engine;
    return el(
      "tr", {},
      el("th", { scope: "row" }, el("code", {}, part.stamp), el("small", {}, `${where}: ${PARTS[part.stamp] ?? ""}`)),
      el("td", { class: "lane" }, el("span", { class: "lane-track" }, bar)),
      el("td", { class: "number", title: `reached ${seconds(part.at_s)} after the request came` }, seconds(part.part_s)),
    );
  });
  return el(
    "table", { class: "waterfall" },
    el("caption", {}, `${seconds(timeline.latency_s)} from the request to its last token`, draftsOf(timeline)),
    el("tbody", {}, ...rows),
  );
}

function draftsOf({ num_drafts: steps, num_draft_tokens: drafts, num_accepted_tokens: accepted }) {
  return drafts ? `; ${count(accepted)} of ${count(drafts)} drafts accepted (${percent(accepted / drafts)}) in ${count(steps)} steps` : "";
}
