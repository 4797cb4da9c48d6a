// Shows the state of the fleet.

import { bar, el, setText, showTable, sparkline, sync } from "./dom.js";
import * as fleet from "./fleet.js";
import { amount, count, NONE, percent, plural, scaled, tokensPerS } from "./format.js";
import { mayOperate } from "./operate.js";

const SLOTS = 60; // polls shown by a tile's line
const ROLE_TITLES = { prefill: "Prefill engines", decode: "Decode engines", unified: "Unified engines" };
const MOST_LANES = 8; // shown ones: each engine may read from every other one
const FULL = { warn: 0.85, bad: 0.97 }; // share of KV blocks in use
const trends = new Map(); // name of a tile -> its latest values

const byId = (id) => document.getElementById(id);
const level = (name, text) => el("span", { class: "state", "data-level": name }, text);

/**
 * Show everything. `state` is {ranks, samples, increases, stats, health, metricsError}: the newest answers,
 * the increases of counters in /metrics and in the engines' statistics, and errors.
 */
export function showFleet(state) {
  showVerdict(fleet.verdictOf(state));
  showProblems(fleet.problemsOf(state));
  showTiles(fleet.tilesOf(state));
  showEngines(state);
  showHandoffs(state);
  showErrors(state);
  showGateways(state);
}

/** Show the fleet's state, or the reason why it is unknown: {level, title, text}. */
export function showVerdict({ level, title, text }) {
  const box = byId("verdict");
  box.dataset.level = level;
  setText(box.querySelector("strong"), title);
  setText(box.querySelector("span"), text);
}

export function showProblems(problems) {
  sync(byId("problems"), problems, ({ text }) => text, () => el("li"), (item, problem) => {
    item.dataset.level = problem.level;
    setText(item, problem.text);
  });
}

function showTiles(tiles) {
  const create = ({ title }) => el(
    "div", { class: "tile" }, el("dt", {}, title), el("dd", { class: "value" }, el("span"), " ", el("small")),
    el("dd", { class: "note" }), el("dd", { class: "trend" }),
  );
  sync(byId("tiles"), tiles, ({ name }) => name, create, (tile, { name, value, of, note, level, trend }) => {
    const values = [...(trends.get(name) ?? []), trend].slice(-SLOTS);
    trends.set(name, values);
    tile.dataset.level = level ?? "";
    setText(tile.querySelector(".value span"), value);
    setText(tile.querySelector(".value small"), of ?? "");
    setText(tile.querySelector(".note"), note);
    tile.querySelector(".trend").replaceChildren(sparkline(values, SLOTS));
  });
}

function showEngines(state) {
  const { ranks } = state;
  const roles = fleet.ROLES.filter((role) => ranks.data.some((engine) => engine.role === role));
  const create = () => el("section", { class: "panel" }, el("h2"), el("div"));
  sync(byId("engines"), roles, (role) => role, create, (section, role) => {
    const engines = ranks.data.filter((engine) => engine.role === role);
    const heading = section.firstElementChild;
    if (!heading.firstChild) heading.append(ROLE_TITLES[role], " ", el("small"));
    setText(heading.lastChild, plural(engines.length, "engine"));
    const caption = { text: ROLE_TITLES[role] };
    showTable(section.lastElementChild, caption, engineColumns(state, role, engines), engines, (each) => each.engine_id);
  });
}

function engineColumns({ ranks, samples, stats }, role, engines) {
  const rate = (name) => (engine) => (
    engine.stats ? tokensPerS(stats.rate(name, fleet.NOW_S, (labels) => labels.engine === engine.engine_id)) : NONE
  );
  const ofStats = (text) => (engine) => (engine.stats ? text(engine.stats, engine) : NONE);
  const gaugeOf = (name) => (engine) => {
    const value = fleet.gauge(samples, name, (labels) => labels.engine === engine.engine_id);
    return value === null ? NONE : count(value);
  };
  const share = (part, whole) => (engine) => {
    const [found, of] = [part, whole].map((name) => (
      stats.sum(name, fleet.MINUTE_S, (labels) => labels.engine === engine.engine_id)
    ));
    return percent(of ? found / of : null);
  };
  const columns = [
    { title: "Engine", cell: (engine) => engineName(engine) },
    { title: "State", cell: (engine) => stateBadge(ranks, engine) },
    { title: "KV in use", cell: ofStats((stats) => kvBar(stats.kv_usage)) },
    {
      title: "Running", number: true,
      cell: ofStats((_, engine) => `${count(engine.num_running)} of ${count(engine.max_num_seqs)}`),
    },
    { title: "Queue", number: true, cell: ofStats(queueText) },
  ];
  if (role !== "decode") columns.push({ title: "Read", number: true, cell: rate("prompt_tokens") });
  if (role !== "prefill") columns.push({ title: "Written", number: true, cell: rate("generation_tokens") });
  columns.push({ title: "Prefix hits", number: true, cell: share("prefix_cache_hits", "prefix_cache_queries") });
  if (role === "prefill") columns.push({ title: "Leases", number: true, cell: gaugeOf("baton_kv_leases_held") });
  if (role === "decode") columns.push({ title: "Receiving", number: true, cell: gaugeOf("baton_kv_receives_active") });
  if (engines.some((engine) => engine.stats?.speculation)) {
    columns.push({ title: "Drafts accepted", number: true, cell: share("num_accepted_tokens", "num_draft_tokens") });
  }
  if (mayOperate()) columns.push({ title: "Action", number: true, cell: (engine) => drainButton(engine) });
  return columns;
}

function engineName(engine) {
  const details = `rank ${engine.rank}, node ${engine.node_ip}, process ${engine.pid}, ${count(engine.num_blocks)} KV blocks`;
  return el("span", { class: "name", title: details }, engine.engine_id, " ", el("small", {}, engine.node_ip));
}

function stateBadge(ranks, engine) {
  const state = fleet.engineState(ranks, engine);
  return level(state.level, state.text);
}

function drainButton(engine) {
  if (engine.draining) return NONE;
  const attributes = { type: "button", class: "small", "data-drain": engine.rank, "aria-label": `Drain ${engine.engine_id}` };
  return el("button", attributes, "Drain");
}

function kvBar(used) {
  return bar(used, percent(used), used >= FULL.bad ? "bad" : used >= FULL.warn ? "warn" : "");
}

function queueText(stats) {
  const waiting = stats.num_requests_waiting + stats.num_requests_waiting_for_kv;
  if (!waiting) return "0";
  const details = [
    stats.num_waiting_tokens && `${scaled(stats.num_waiting_tokens)} tokens`,
    stats.num_requests_waiting_for_kv && `${count(stats.num_requests_waiting_for_kv)} for KV`,
  ].filter(Boolean);
  return `${count(waiting)}${details.length ? ` (${details.join(", ")})` : ""}`;
}

function showHandoffs({ ranks, samples, increases }) {
  const received = ({ outcome }) => outcome === "received";
  const perS = increases.rate("baton_kv_receives_total", fleet.LATELY_S, received);
  const bytesPerS = increases.rate("baton_kv_transfer_bytes_total", fleet.LATELY_S);
  const lanes = fleet.lanesOf(ranks);
  const splits = ranks.data.some((engine) => engine.role !== "unified");
  const isCounted = fleet.gauge(samples, "baton_kv_receives_total") !== null;
  setText(byId("handoffs-rate"), isCounted && perS !== null ? `${scaled(perS)}/s, ${amount(bytesPerS, "B/s")}` : "");
  const box = byId("handoffs");
  if (!lanes.length) {
    const alone = ranks.data.length ? "Each engine does both phases: nothing is handed over." : "No engines.";
    const text = splits ? "No engine reads another one's blocks now." : alone;
    if (box.textContent !== text) box.replaceChildren(el("p", { class: "empty" }, text));
    return;
  }
  const most = Math.max(...lanes.map((lane) => lane.ratePerS ?? 0), 1);
  const columns = [
    { title: "Lane", cell: (lane) => laneName(lane) },
    {
      title: "Lately",
      cell: (lane) => bar((lane.ratePerS ?? 0) / most, amount(lane.ratePerS, "B/s"), lane.isSlow ? "warn" : ""),
    },
    { title: "Reads", number: true, cell: (lane) => count(lane.reads) },
  ];
  const shown = lanes.slice(0, MOST_LANES);
  const caption = lanes.length > MOST_LANES ? `The ${MOST_LANES} most used of ${count(lanes.length)} lanes` : "Lanes";
  showTable(box, { text: caption, visible: lanes.length > MOST_LANES }, columns, shown, (lane) => `${lane.from} ${lane.to}`);
}

function laneName({ from, to, transport }) {
  const [reader, holder] = [to, from].map((engine) => el("span", { class: "whole" }, engine));
  return el("span", { class: "name" }, holder, " → ", reader, " ", el("small", { class: "whole" }, transport));
}

function showErrors({ increases, metricsError }) {
  const box = byId("errors");
  const errors = fleet.errorsOf(increases);
  if (!errors.length) {
    const text = metricsError ? "Not known: /metrics is not readable from here." : "None.";
    if (box.textContent !== text) box.replaceChildren(el("p", { class: "empty" }, text));
    return;
  }
  const columns = [
    { title: "Reason", cell: (row) => errorName(row) },
    { title: "Number", number: true, cell: (row) => count(row.number) },
  ];
  showTable(box, { text: "Errors by reason" }, columns, errors, (row) => `${row.reason} ${row.hint}`);
}

function errorName({ reason, hint, isClients }) {
  return el("span", { class: "state", "data-level": isClients ? "none" : "bad" }, reason, " ", el("small", {}, hint));
}

function showGateways({ ranks, samples }) {
  const inGateway = (name) => (row) => {
    const value = fleet.gauge(samples, name, ({ gateway }) => gateway === undefined || gateway === row.gateway);
    return value === null ? NONE : count(value);
  };
  const columns = [
    { title: "Gateway", cell: (row) => gatewayName(row, ranks.gateway) },
    { title: "Listens at", cell: (row) => fleet.addressOf(row) },
    { title: "Balancing", cell: (row) => row.load_balancing },
    { title: "Reaches", cell: (row) => plural(row.ranks.length, "engine") },
    { title: "In flight", number: true, cell: inGateway("baton_gateway_requests_inflight") },
    { title: "Unplaced", number: true, cell: inGateway("baton_gateway_requests_unplaced") },
  ];
  if (ranks.gateways.length) showTable(byId("gateways"), { text: "Gateways" }, columns, ranks.gateways, (row) => row.gateway);
  else byId("gateways").replaceChildren(el("p", { class: "empty" }, "The directory lists none yet."));
}

function gatewayName(row, answering) {
  const note = row.gateway === answering ? el("small", {}, "answers this page") : null;
  return el("span", { class: "name" }, row.gateway, " ", note);
}
