// Asks the gateway every few seconds while the page is visible, and shows the answers.

import { el, setText } from "./dom.js";
import { engineSamples, FAMILIES } from "./fleet.js";
import { showFleet, showProblems, showVerdict } from "./fleet_view.js";
import { seconds } from "./format.js";
import { startLookup } from "./lookup.js";
import { showOperating, startOperating } from "./operate.js";
import { setModel, startPlayground } from "./playground.js";
import { Increases, parseMetrics } from "./series.js";
import { apiKey, ask, Refused } from "./server.js";

const PERIOD_S = 2;
const LONGEST_PERIOD_S = 15; // between polls while the gateway does not answer
const KEEP_S = 130; // for which counters are kept: over a minute, since browsers may slow timers down
const UNAUTHORIZED = 401;
const LOCKED = "locked";

// For /metrics a gateway asks every process, so the page asks the less often the more processes there are. Pages accept
// each other's answers, but these must be younger than a period: otherwise a page would get its own last one again.
const METRICS = `metrics?${FAMILIES.map((name) => `name[]=${name}`).join("&")}`;
const METRICS_S = { perProcess: 1.2, least: 6, most: 15, shared: 0.8 };
const upTo = (ageS) => ({ headers: { "cache-control": `max-age=${Math.round(ageS)}` } });

const byId = (id) => document.getElementById(id);
const increases = new Increases(KEEP_S); // of counters in /metrics
const stats = new Increases(KEEP_S); // of counters in the engines' statistics
const metrics = { samples: [], metricsError: null, dueS: 0, periodS: METRICS_S.least }; // newest answer, and times
let timer = null;
let numFailed = 0; // failed polls in a row
let answeredAt = null;
let about = null; // the answer of /server_info

async function poll() {
  clearTimeout(timer);
  timer = null;
  if (document.hidden) return;
  let again = true;
  try {
    await update();
    numFailed = 0;
    answeredAt = performance.now();
    showLive("good", "live");
  } catch (error) {
    numFailed += 1;
    again = !lacksKey(error);
    showFailure(error);
  }
  const periodS = Math.min(PERIOD_S * 2 ** Math.min(numFailed, 5), LONGEST_PERIOD_S);
  clearTimeout(timer); // set by another poll that has begun meanwhile
  if (again && !document.hidden) timer = setTimeout(poll, 1000 * periodS);
}

async function update() {
  const [ranks] = await Promise.all([json("v1/cluster/ranks", upTo(PERIOD_S)), updateMetrics()]);
  if (about === null) await introduce();
  showOperating(about.is_admin, ranks.data);
  metrics.periodS = metricsPeriodS(ranks.data.length + ranks.gateways.length + 1); // + 1 for the directory
  stats.add(performance.now() / 1000, engineSamples(ranks));
  const { samples, metricsError } = metrics;
  showFleet({ ranks, samples, increases, stats, metricsError, health: await healthOf(ranks) });
}

const metricsPeriodS = (processes) => (
  Math.min(METRICS_S.most, Math.max(METRICS_S.least, processes * METRICS_S.perProcess))
);

/** Read /metrics if it is time. If that fails, the fleet is shown without them. */
async function updateMetrics() {
  const nowS = performance.now() / 1000;
  if (nowS < metrics.dueS) return;
  try {
    metrics.samples = parseMetrics(await text(METRICS, upTo(metrics.periodS * METRICS_S.shared)));
    metrics.metricsError = null;
    increases.add(performance.now() / 1000, metrics.samples);
  } catch (error) {
    metrics.samples = [];
    metrics.metricsError = `${error.status ?? ""} ${error.message}`.trim();
  }
  metrics.dueS = nowS + metrics.periodS - PERIOD_S / 2;
}

const json = async (path, options) => (await ask(path, options)).json();
const text = async (path, options) => (await ask(path, options)).text();

async function introduce() {
  about = await json("server_info");
  setText(byId("model"), about.model);
  setText(byId("version"), `Baton ${about.version}, ${about.max_model_len.toLocaleString("en-US")} tokens of context`);
  document.title = `${about.model} · Baton`;
  setModel(about.model, about.max_model_len);
}

/** Return the message of /health if no engine that writes answers is reachable, else null. */
async function healthOf(ranks) {
  if (ranks.data.some((engine) => engine.reachable && engine.role !== "prefill" && !engine.draining)) return null;
  try {
    await ask("health");
    return { ready: true, text: "" };
  } catch (error) {
    if (error instanceof Refused) return { ready: false, text: error.message };
    throw error;
  }
}

const lacksKey = (error) => error instanceof Refused && error.status === UNAUTHORIZED;

function showFailure(error) {
  if (lacksKey(error)) {
    showLive("warn", LOCKED);
    const title = apiKey.get() ? "The API key is not valid" : "An API key is needed";
    showVerdict({ level: "wait", title, text: "This server shows its fleet and answers to those who have one." });
    showProblems([]);
    showOperating(false, []);
    if (byId("key-form").hidden) openKeyForm(true);
    return;
  }
  const since = answeredAt === null ? "" : ` The figures below are ${seconds((performance.now() - answeredAt) / 1000)} old.`;
  showLive("bad", "no answer");
  const reason = error instanceof Refused ? `It says ${error.status}: ${error.message}` : "Nobody answers there.";
  showVerdict({ level: "bad", title: "The gateway cannot be asked", text: `${reason}${since}` });
  showProblems([]);
}

function showLive(state, words) {
  byId("live").dataset.state = state;
  setText(byId("live"), words);
  document.body.dataset.stale = state === "bad";
  document.body.dataset.locked = words === LOCKED; // hides the view, since there is nothing to show
}

// The API key

function openKeyForm(open) {
  byId("key-form").hidden = !open;
  byId("key-button").setAttribute("aria-expanded", open);
  if (open) byId("key").focus();
}

byId("key-button").addEventListener("click", () => openKeyForm(byId("key-form").hidden));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  openKeyForm(false);
});
byId("key-forget").addEventListener("click", () => useKey(""));

function useKey(key) {
  apiKey.set(key);
  byId("key").value = "";
  numFailed = 0;
  askAnew();
}

/** Ask for everything now, including the rights of the API key. */
function askAnew() {
  about = null;
  poll();
}

// The theme and the views

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  byId("theme-button").replaceChildren(el("span", { "aria-hidden": "true", class: "theme-mark" }), ` ${chosen}`);
  byId("theme-button").setAttribute("aria-label", `Theme: ${chosen}`);
}

byId("theme-button").addEventListener("click", () => {
  const chosen = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (chosen === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("baton.theme");
  } else {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("baton.theme", chosen);
  }
  showTheme();
});

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => showView(button.dataset.show));
}

function showView(name) {
  document.body.dataset.view = name;
  for (const each of document.querySelectorAll("[data-show]")) {
    each.setAttribute("aria-pressed", each.dataset.show === name);
  }
}

document.querySelector(".skip").addEventListener("click", () => showView("playground")); // a narrow screen shows one view
document.addEventListener("visibilitychange", () => {
  if (document.hidden) showLive("wait", "paused");
  else poll();
});

showTheme();
startPlayground();
startLookup();
startOperating(askAnew);
poll();
