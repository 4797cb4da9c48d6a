// Actions of operators: drain a group of engines, and end a request. Each must be confirmed, and its outcome is shown.
//
// The buttons appear if the gateway says that the key has the right `admin`. The gateway checks each call itself.

import { setText } from "./dom.js";
import { runningIn } from "./fleet.js";
import { plural } from "./format.js";
import { ask, Refused } from "./server.js";

const ENDED_BY = "Its client gets an error (403), and keeps what has been written so far.";
const byId = (id) => document.getElementById(id);

let fleet = []; // the listed engines
let decide = null; // function that takes the answer to the open question
let afterwards = () => {};

/** True while the key may drain engines and end requests. */
export const mayOperate = () => document.body.dataset.admin === "true";

/** Begin to accept orders. `refresh` is called after each order, done or refused. */
export function startOperating(refresh) {
  afterwards = refresh;
  byId("engines").addEventListener("click", (event) => {
    const rank = event.target.closest("[data-drain]")?.dataset.drain;
    if (rank !== undefined) drain(Number(rank));
  });
  byId("abort").addEventListener("click", () => {
    if (byId("lookup").reportValidity()) abort(byId("request-id").value.trim());
  });
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
  byId("confirm-yes").addEventListener("click", () => {
    decide?.(true);
    byId("confirm").close();
  });
  byId("confirm").addEventListener("close", () => decide?.(false)); // also by Escape; has no effect after a yes
}

/** Show or hide the operators' controls, and update them to the newest list of engines. */
export function showOperating(isAdmin, engines) {
  fleet = engines;
  document.body.dataset.admin = isAdmin;
  byId("abort").hidden = !isAdmin;
  setText(byId("key-button"), isAdmin ? "Admin key" : "Key");
}

/** Ask a question. Returns true if the answer is yes. */
function confirmed(title, text, yes) {
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  byId("confirm").showModal();
  byId("confirm-no").focus(); // so that Enter alone confirms nothing
  return new Promise((resolve) => { decide = resolve; });
}

async function drain(rank) {
  const engine = fleet.find((each) => each.rank === rank);
  const group = fleet.filter((each) => each.group_id === engine?.group_id);
  if (!engine || !(await confirmed(`Drain ${namesOf(group)}?`, drainText(engine, group), "Drain"))) return;
  await told("drain-outcome", async () => {
    if (fleet.find((each) => each.rank === rank)?.epoch !== engine.epoch) return `${engine.engine_id} was gone already.`;
    const { ranks } = await order("v1/admin/drain", { rank });
    const what = ranks.length === 1 ? `Rank ${ranks[0]} drains` : `The ranks ${ranks.join(", ")} drain`;
    return `${what}: another group takes ${ranks.length === 1 ? "its" : "their"} place.`;
  });
}

function drainText(engine, group) {
  const running = runningIn(group);
  const others = fleet.filter((each) => each.role === engine.role && each.group_id !== engine.group_id && !each.draining);
  const gap = others.length ? "" : ` No other ${engine.role} engine takes requests: new ones wait until its successor runs.`;
  const work = running ? `ends its ${plural(running, "running request")} or hands them over, ` : "";
  return `It takes nothing new, ${work}and a new group takes its place.${gap}`;
}

const namesOf = (group) => group.map((each) => each.engine_id).join(", ");

async function abort(id) {
  if (!(await confirmed(`End the request ${id}?`, ENDED_BY, "End it"))) return;
  await told("abort-outcome", async () => {
    const { aborted } = await order("v1/admin/abort", { request_id: id });
    return `${plural(aborted, "request")} ${aborted === 1 ? "has" : "have"} been ended.`;
  });
}

async function order(path, body) {
  const headers = { "content-type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** Show the outcome of an order: the sentence that `run` returns, or its error. */
async function told(place, run) {
  const box = byId(place);
  setText(box, "");
  try {
    box.dataset.level = "good";
    setText(box, await run());
  } catch (error) {
    box.dataset.level = "bad";
    setText(box, error instanceof Refused ? `Refused with ${error.status}: ${error.message}` : "The server does not answer.");
  }
  afterwards();
}
