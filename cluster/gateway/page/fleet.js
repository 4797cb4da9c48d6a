// The state of the fleet, from the answers of /v1/cluster/ranks and /metrics: plain data, without any HTML.

import { amount, count, percent, plural, scaled, seconds, tokensPerS } from "./format.js";

export const MINUTE_S = 60;
export const NOW_S = 10; // time over which rates of the engines' statistics are shown
export const LATELY_S = 20; // the same for /metrics, whose answers are shared and so vary in age
export const ROLES = ["prefill", "decode", "unified"];

// The families of /metrics that the page reads.
export const FAMILIES = [
  "baton_time_to_first_token_seconds", "baton_inter_token_latency_seconds", "baton_http_responses_total",
  "baton_stream_errors_total", "baton_request_retries_total", "baton_circuits_opened_total",
  "baton_requests_by_path_total", "baton_gateway_requests_inflight", "baton_gateway_requests_unplaced",
  "baton_gateway_settings_refused", "baton_kv_receives_total", "baton_kv_transfer_bytes_total",
  "baton_kv_leases_held", "baton_kv_receives_active", "baton_process_up",
];

const ENGINE_COUNTERS = ["prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"];
const DRAFT_COUNTERS = ["num_draft_tokens", "num_accepted_tokens"];
const GENERATING = /^\/v1\/(completions|chat\/completions|responses|messages)$/;
const PROBES = ["/health", "/ping"]; // their 503 answers say the same as the state at the top
const OVERLOAD = ["408", "429"];
const CLIENT_LEFT = "499";

/** Return the counters of the engines' statistics as samples, each with the label `engine`. */
export function engineSamples(ranks) {
  return ranks.data.filter((engine) => engine.stats).flatMap(({ engine_id: engine, epoch, stats }) => {
    const values = [
      ...ENGINE_COUNTERS.map((name) => [name, stats[name]]),
      ...DRAFT_COUNTERS.map((name) => [name, stats.speculation?.[name] ?? 0]),
    ];
    return values.map(([name, value]) => ({ key: `${name} ${engine} ${epoch}`, name, labels: { engine }, value }));
  });
}

/** Return the sum of a gauge over the series whose labels `fit`; null if there is none. */
export function gauge(samples, name, fit = () => true) {
  const found = samples.filter((sample) => sample.name === name && fit(sample.labels));
  return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/** Return whether this gateway should reach an engine: its load balancing mode may limit it to some. */
function isMeantFor(ranks, engine) {
  const own = ranks.gateways.find((gateway) => gateway.gateway === ranks.gateway);
  return !own || own.ranks.includes(engine.rank);
}

/** Return an engine's state: {level, text}. */
export function engineState(ranks, engine) {
  if (engine.draining) return { level: "wait", text: "drains" };
  if (!engine.reachable) {
    return isMeantFor(ranks, engine) ? { level: "bad", text: "lost" } : { level: "none", text: "another gateway's" };
  }
  if (engine.circuit === "open") return { level: "bad", text: "left alone" };
  if (engine.circuit === "half-open") return { level: "warn", text: "tried again" };
  if (!engine.stats) return { level: "wait", text: "no news yet" };
  return { level: "good", text: "ready" };
}

/** Return the number of requests in the steps of those engines that this gateway reaches. */
export function runningIn(engines) {
  return engines.reduce((sum, engine) => sum + (engine.num_running ?? 0), 0);
}

/** Return a gateway's address; if it listens on all addresses, the one by which others reach its node. */
export function addressOf({ host, node_ip: nodeIp, port }) {
  const name = ["", "0.0.0.0", "::"].includes(host) ? nodeIp : host;
  return `${name.includes(":") ? `[${name}]` : name}:${port}`;
}

/** Return problems and coming changes: a list of {level, text}, the worst first. */
export function problemsOf({ ranks, samples, metricsError }) {
  const found = [];
  const add = (level, text) => found.push({ level, text });
  for (const engine of ranks.data) {
    const [name, state] = [engine.engine_id, engineState(ranks, engine).text];
    if (state === "lost") add("bad", `${name} is listed, and this gateway does not reach it.`);
    if (state === "left alone") add("bad", `${name} failed too often: this gateway leaves it alone for a while.`);
    if (state === "tried again") add("warn", `${name} failed too often: this gateway tries it with a single request.`);
    if (state === "drains") add("wait", `${name} drains: it takes nothing new and ends what it has.`);
    if (engine.stats?.num_late_compilations) {
      add("warn", `${name} compiled ${plural(engine.stats.num_late_compilations, "kernel")} while it served.`);
    }
    for (const lane of engine.reads_from.filter((each) => each.is_slow)) {
      add("warn", `${name} reads from ${lane.engine_id} slowly: GPU memory probably goes through TCP.`);
    }
  }
  for (const { name, labels, value } of samples) {
    if (name === "baton_process_up" && value === 0) {
      add("bad", `The ${labels.kind} ${labels.process} does not answer: its figures are missing.`);
    }
    if (name === "baton_gateway_settings_refused" && value > 0) {
      add("warn", `The gateway ${labels.gateway ?? ""} refused its new settings: the previous ones stay in effect.`);
    }
  }
  const unplaced = gauge(samples, "baton_gateway_requests_unplaced");
  if (unplaced) add("warn", `${plural(unplaced, "choice")} ${unplaced === 1 ? "waits" : "wait"} for an engine.`);
  if (metricsError) add("warn", `Latencies, errors and hand-offs are not shown: /metrics says: ${metricsError}`);
  for (const group of ranks.starting) add("wait", `${group.group_id} starts on ${group.node_ip}: ${group.state}`);
  const order = ["bad", "warn", "wait"];
  return found.sort((one, other) => order.indexOf(one.level) - order.indexOf(other.level));
}

/** Return how many requests of the last minute failed because of overload or a fault of the server. */
export function failuresOf(increases) {
  const failed = ({ route, status }) => GENERATING.test(route) && (status >= "500" || OVERLOAD.includes(status));
  return increases.sum("baton_http_responses_total", MINUTE_S, failed)
    + increases.sum("baton_stream_errors_total", MINUTE_S);
}

/** Return the fleet's state as a word and a sentence: {level, title, text}. `health` is /health's message, or null. */
export function verdictOf({ ranks, increases, health }) {
  const engines = ranks.data.filter((engine) => engine.reachable);
  const writers = engines.filter((engine) => engine.role !== "prefill" && !engine.draining);
  if (!writers.length && health?.ready) {
    return { level: "wait", title: "Idle", text: "No engine runs. The first request starts one." };
  }
  if (!ranks.data.length && ranks.starting.length) {
    return { level: "wait", title: "Starting", text: `${plural(ranks.starting.length, "group")} of engines on the way.` };
  }
  if (!ranks.data.length) {
    return { level: "bad", title: "No engines", text: "Requests wait for one, then get a 503." };
  }
  if (!writers.length) {
    return { level: "bad", title: "Not serving", text: health?.text ?? "No engine that writes answers can be reached." };
  }
  const all = (field) => engines.reduce((sum, engine) => sum + (engine.stats?.[field] ?? 0), 0);
  const running = runningIn(engines);
  const waiting = all("num_requests_waiting");
  const size = `${plural(ranks.data.length, "engine")}, ${plural(ranks.gateways.length, "gateway")}`;
  const load = running + waiting ? `${plural(running, "request")} running, ${count(waiting)} waiting` : "no requests now";
  const failed = failuresOf(increases);
  if (failed) {
    const text = `${plural(failed, "request")} failed in the last minute. ${size}; ${load}.`;
    return { level: "warn", title: "Serving, with failures", text };
  }
  const hurt = ranks.data.some((engine) => engineState(ranks, engine).level === "bad");
  if (hurt) return { level: "warn", title: "Serving, with less", text: `Some engines are lost. ${size}; ${load}.` };
  if (waiting > running) return { level: "warn", title: "Busy", text: `More requests wait than run. ${size}; ${load}.` };
  return { level: "good", title: "Serving", text: `${size}; ${load}.` };
}

/**
 * Return the figures at the top: {name, title, value, of, note, trend}; `trend` is the value for the line, or null.
 * Latencies, prefix hits and failures are of the last minute.
 */
export function tilesOf({ ranks, samples, increases, stats }) {
  const all = (field) => ranks.data.reduce((sum, engine) => sum + (engine.stats?.[field] ?? 0), 0);
  const latency = (name, title, family) => {
    const [half, most] = [0.5, 0.99].map((share) => increases.quantile(family, share, MINUTE_S));
    const note = most === null ? "no requests" : `p99 ${seconds(most)}`;
    return { name, title, value: seconds(half), of: half === null ? "" : "p50", note, trend: increases.quantile(family, 0.5, LATELY_S) };
  };
  const running = runningIn(ranks.data);
  const written = stats.rate("generation_tokens", NOW_S);
  const [looked, hit] = ["prefix_cache_queries", "prefix_cache_hits"].map((name) => stats.sum(name, MINUTE_S));
  const handed = gauge(samples, "baton_kv_receives_total") === null
    ? null : increases.rate("baton_kv_receives_total", LATELY_S, ({ outcome }) => outcome === "received");
  const failed = failuresOf(increases);
  const answered = increases.sum("baton_http_responses_total", MINUTE_S, ({ route }) => GENERATING.test(route));
  const used = ranks.data.map((engine) => engine.stats?.kv_usage ?? 0);
  const unplaced = gauge(samples, "baton_gateway_requests_unplaced") ?? 0;
  return [
    latency("ttft", "First token", "baton_time_to_first_token_seconds"),
    latency("itl", "Between tokens", "baton_inter_token_latency_seconds"),
    {
      name: "written", title: "Written", value: scaled(written), of: "tok/s", trend: written,
      note: `${tokensPerS(stats.rate("prompt_tokens", NOW_S))} read`,
    },
    {
      name: "requests", title: "Running", value: count(running),
      note: `${count(all("num_requests_waiting") + unplaced)} waiting`, trend: running,
    },
    {
      name: "kv", title: "Fullest KV", value: percent(used.length ? Math.max(...used) : null),
      note: used.length ? `mean ${percent(used.reduce((sum, each) => sum + each, 0) / used.length)}` : "no engines",
      trend: used.length ? Math.max(...used) : null,
    },
    {
      name: "prefix", title: "Prefix hits", value: percent(looked ? hit / looked : null),
      note: looked ? `of ${scaled(looked)} tokens` : "no prompts", trend: looked ? hit / looked : null,
    },
    {
      name: "handoffs", title: "Hand-offs", value: scaled(handed), of: handed === null ? "" : "/s", trend: handed,
      note: handed === null ? "none" : amount(increases.rate("baton_kv_transfer_bytes_total", LATELY_S), "B/s"),
    },
    {
      name: "failures", title: "Failures", value: count(failed), level: failed ? "bad" : "",
      note: answered ? `of ${scaled(answered)} answers` : "no requests", trend: failed,
    },
  ];
}

/** Return the last minute's errors by reason, the most frequent first: {reason, hint, number, isClients}. */
export function errorsOf(increases) {
  const rows = [];
  const add = (name, label, hint, isClients = () => false) => {
    for (const [reason, number] of increases.by(name, MINUTE_S, label)) {
      if (reason) rows.push({ reason, hint, number, isClients: isClients(reason) });
    }
  };
  const ofResponse = ({ route, status }) => (status >= "400" && !PROBES.includes(route) ? `${status} ${route}` : "");
  const isClients = (reason) => reason < "500" && !OVERLOAD.includes(reason.slice(0, 3));
  add("baton_http_responses_total", ofResponse, "answers", isClients);
  for (const row of rows) if (row.reason.startsWith(CLIENT_LEFT)) row.hint = "the client left";
  add("baton_stream_errors_total", ({ status }) => `${status} in a stream`, "broken after the first byte");
  add("baton_request_retries_total", "reason", "attempts, repeated elsewhere");
  add("baton_circuits_opened_total", ({ kind }) => `circuit of an ${kind}`.replace("an pair", "a pair"), "opened");
  add("baton_kv_receives_total", ({ outcome }) => (outcome === "received" ? "" : `hand-off ${outcome}`), "hand-offs");
  return rows.sort((one, other) => one.isClients - other.isClients || other.number - one.number);
}

/**
 * Return the connections over which engines read each other's blocks: {from, to, transport, ratePerS, reads, isSlow}.
 * Slow ones come first, then the most used ones.
 */
export function lanesOf(ranks) {
  const lanes = ranks.data.flatMap((reader) => reader.reads_from.map((lane) => ({
    from: lane.engine_id, to: reader.engine_id, transport: lane.transport, ratePerS: lane.bytes_per_s,
    reads: lane.num_reads, isSlow: lane.is_slow,
  })));
  return lanes.sort((one, other) => other.isSlow - one.isSlow || other.reads - one.reads);
}
