// Shows the timeline of any client's request, looked up by its id.

import { el } from "./dom.js";
import { plural, seconds } from "./format.js";
import { ask, Refused } from "./server.js";
import { timelineOf } from "./timeline.js";

const byId = (id) => document.getElementById(id);

/** Begin to accept ids in the form. */
export function startLookup() {
  byId("lookup").addEventListener("submit", async (event) => {
    event.preventDefault();
    const id = byId("request-id").value.trim();
    if (id) byId("timeline").replaceChildren(el("h3", {}, "Timeline"), ...await found(id));
  });
}

async function found(id) {
  try {
    const { data } = await (await ask(`v1/cluster/requests/${encodeURIComponent(id)}`)).json();
    return data.flatMap(partsOf);
  } catch (error) {
    const text = error instanceof Refused ? error.message : "The server does not answer.";
    return [el("p", { class: "failure", role: "alert" }, text)];
  }
}

function partsOf(request) {
  const at = new Date(1000 * request.began_at).toLocaleString("en-GB");
  const about = [request.route, String(request.status), `began ${at}`, `took ${seconds(request.latency_s)}`, request.path];
  const head = el("p", { class: "quiet" }, el("code", {}, request.request_id), ` · ${about.filter(Boolean).join(" · ")}`);
  const many = request.choices.length > 1;
  const choices = request.choices.flatMap((choice, index) => [
    ...(many ? [el("p", { class: "quiet" }, `choice ${index + 1} of ${plural(request.choices.length, "choice")}`)] : []),
    timelineOf(choice),
  ]);
  return [head, ...(choices.length ? choices : [el("p", { class: "empty" }, "No engine was asked.")])];
}
