// A chat with the model, and a list of its requests with their timelines from the server.

import { el, setText, showTable } from "./dom.js";
import { count, NONE, plural, seconds, tokensPerS } from "./format.js";
import { ask, eventsOf, Refused } from "./server.js";
import { enginesOf, timelineOf } from "./timeline.js";

const KEPT = 20; // requests in the list, at most
const MOST_TOKENS = 512; // of an answer, unless the user changes it
const byId = (id) => document.getElementById(id);

const requests = []; // the newest first
let messages = []; // the conversation up to now
let running = null; // the AbortController of the present request
let model = "";

/** Begin to accept messages from the form. */
export function startPlayground() {
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("turns").replaceChildren();
    byId("message").focus();
  });
  showRequests();
}

/** Set the model to talk to, and suggest a limit for its answers. */
export function setModel(id, maxModelLen) {
  model = id;
  if (!byId("max-tokens").value) byId("max-tokens").value = Math.min(MOST_TOKENS, Math.floor(maxModelLen / 2));
}

function turn(role, text) {
  const turns = byId("turns");
  const body = el("div", { class: "text" }, text);
  turns.append(el("article", { class: `turn ${role}` }, el("h3", {}, role === "user" ? "You" : "Model"), body));
  turns.scrollTop = turns.scrollHeight;
  return body;
}

async function send() {
  const text = byId("message").value.trim();
  if (!text) return byId("message").focus();
  byId("message").value = "";
  turn("user", text);
  const body = turn("assistant", "");
  const answer = new Answer(body);
  running = new AbortController();
  setBusy(true);
  const request = { at: new Date(), status: "running", path: "", engines: [], writtenTokens: null, firstS: null, wholeS: null };
  requests.unshift(request);
  requests.length = Math.min(requests.length, KEPT);
  showRequests();
  const began = performance.now();
  const conversation = [...messages, { role: "user", content: text }];
  try {
    await stream(conversation, request, answer, began, running.signal);
    request.status = "done";
    messages = [...conversation, { role: "assistant", content: answer.text }];
  } catch (error) {
    const stopped = error.name === "AbortError";
    request.status = stopped ? "stopped" : "failed";
    request.id = error instanceof Refused ? error.requestId : request.id;
    answer.fail(stopped ? "Stopped." : describe(error), stopped);
    // A partial answer stays in the conversation; a question without any answer is dropped from it.
    if (stopped && answer.text) messages = [...conversation, { role: "assistant", content: answer.text }];
  }
  request.wholeS = (performance.now() - began) / 1000;
  running = null;
  const pressedStop = document.activeElement === byId("stop");
  setBusy(false);
  if (pressedStop) byId("message").focus();
  answer.finish(request);
  showRequests();
}

function describe(error) {
  if (error instanceof Refused) {
    return `${error.status}: ${error.message}${error.requestId ? ` (request ${error.requestId})` : ""}`;
  }
  if (error instanceof TypeError) return "The server does not answer.";
  return error.message;
}

async function stream(conversation, request, answer, began, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST", signal, headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, messages: withSystem(conversation), ...options(), ...STREAMED }),
  });
  request.id = response.headers.get("x-request-id");
  request.path = response.headers.get("x-baton-path") ?? "";
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const written = answer.add(choice?.delta ?? {});
    if (written && request.firstS === null) request.firstS = (performance.now() - began) / 1000;
    if (choice?.finish_reason) request.finish = choice.finish_reason;
    if (event.usage) request.usage = event.usage;
    if (event.baton_timeline) request.timeline = event.baton_timeline[0];
  }
  request.engines = request.timeline ? enginesOf(request.timeline) : [];
}

const STREAMED = { stream: true, stream_options: { include_usage: true }, baton_timeline: true };

function withSystem(conversation) {
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }, ...conversation] : conversation;
}

function options() {
  const [most, temperature] = ["max-tokens", "temperature"].map((id) => byId(id).value);
  return { ...(most && { max_tokens: Number(most) }), ...(temperature && { temperature: Number(temperature) }) };
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("turns").setAttribute("aria-busy", busy);
}

/** The model's growing answer. */
class Answer {
  constructor(body) {
    this.body = body;
    this.text = "";
    this.thoughts = null;
    this.shown = document.createTextNode("");
    body.append(this.shown);
    body.classList.add("writing");
  }

  /** Add a piece of the answer. Return true if it contained text. */
  add({ content, reasoning_content: thought, tool_calls: calls }) {
    if (thought) {
      if (!this.thoughts) {
        this.thoughts = document.createTextNode("");
        const details = el("details", { class: "thoughts", open: "" }, el("summary", {}, "Thoughts"), this.thoughts);
        this.body.insertBefore(details, this.shown);
      }
      this.thoughts.data += thought;
    }
    const added = (content ?? "") + (calls ?? []).map((call) => call.function?.arguments ?? "").join("");
    this.text += added;
    this.shown.data += added;
    if (added || thought) this.#follow();
    return Boolean(added || thought);
  }

  /** Keep the end in view, unless the reader has scrolled up. */
  #follow() {
    const turns = byId("turns");
    if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120) turns.scrollTop = turns.scrollHeight;
  }

  fail(text, stopped) {
    this.body.after(el("p", stopped ? { class: "note" } : { class: "failure", role: "alert" }, text));
  }

  /** Show how the request was served. */
  finish(request) {
    this.body.classList.remove("writing");
    const usage = request.usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const parts = [
      request.path && el("span", { class: "path" }, request.path.split(";")[0]),
      request.engines.join(" → "),
      usage && `${plural(usage.prompt_tokens, "prompt token")}, ${count(cached)} cached`,
      usage && `${count(usage.completion_tokens)} written`,
      request.firstS !== null && `first token ${seconds(request.firstS)}`,
      speedOf(request),
      request.finish === "length" && "cut off at the most tokens",
    ].filter(Boolean);
    const items = parts.map((part) => el("li", {}, part));
    if (request.timeline) {
      items.push(el("li", {}, el("button", { type: "button", class: "link", onclick: () => select(request) }, "timeline")));
    }
    if (items.length) this.body.parentElement.append(el("ul", { class: "served" }, ...items));
    this.#follow();
  }
}

function speedOf({ usage, firstS, wholeS }) {
  const tokens = usage ? usage.completion_tokens - 1 : 0;
  return tokens > 0 && wholeS > firstS ? tokensPerS(tokens / (wholeS - firstS)) : null;
}

const COLUMNS = [
  { title: "Request", cell: (request) => nameOf(request) },
  { title: "Path", cell: (request) => request.path.split(";")[0] || NONE },
  { title: "First token", number: true, cell: (request) => seconds(request.firstS) },
  { title: "Whole", number: true, cell: (request) => seconds(request.wholeS) },
  { title: "Tokens", number: true, cell: (request) => (request.usage ? count(request.usage.completion_tokens) : NONE) },
];

const LEVELS = { running: "wait", done: "good", stopped: "none", failed: "bad" };

function nameOf(request) {
  const at = request.at.toLocaleTimeString("en-GB");
  const name = el("span", { class: "state", "data-level": LEVELS[request.status] }, at, " ", el("small", {}, request.status));
  if (!request.timeline) return name;
  const attributes = { type: "button", class: "link", "aria-label": `Timeline of the request of ${at}` };
  const button = el("button", attributes, name);
  button.setAttribute("data-request", request.id);
  return button;
}

byId("requests").addEventListener("click", (event) => {
  const id = event.target.closest("[data-request]")?.dataset.request;
  const request = requests.find((each) => each.id === id);
  if (request) select(request);
});

function showRequests() {
  const box = byId("requests");
  if (!requests.length) {
    box.replaceChildren(el("p", { class: "empty" }, "None yet. Send a message, then click its time to see where it went."));
    return;
  }
  showTable(box, { text: "Requests of this tab" }, COLUMNS, requests, (request) => request.at.getTime());
}

function select(request) {
  const about = el("p", { class: "quiet" }, el("code", {}, request.id), request.path && ` · ${request.path}`);
  byId("timeline").replaceChildren(el("h3", {}, "Timeline"), about, timelineOf(request.timeline));
  byId("timeline").scrollIntoView({ block: "nearest", behavior: "smooth" });
}
