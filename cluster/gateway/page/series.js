// Prometheus' text format, and the increases of its counters in the last seconds.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Return the samples of a text: a list of {key, name, labels, value}; `key` is the name with its labels. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\[n"\\]/g, (each) => ESCAPES[each]);
    }
    const value = found[3] === "+Inf" ? Infinity : Number(found[3]);
    samples.push({ key: `${found[1]}{${found[2] ?? ""}}`, name: found[1], labels, value });
  }
  return samples;
}

/** Keeps the increases of counters between polls for `keepS` seconds. */
export class Increases {
  constructor(keepS) {
    this.keepS = keepS;
    this.newest = new Map(); // key -> the counter's newest value
    this.polls = []; // {atS, tookS, rises: [{name, labels, by}]}
    this.atS = null;
  }

  /** Add the counters of a poll. After a silence of more than `keepS`, counting begins again. */
  add(atS, samples) {
    const first = this.atS === null || atS - this.atS > this.keepS;
    if (first) this.polls = [];
    const rises = [];
    for (const { key, name, labels, value } of samples) {
      const before = this.newest.get(key) ?? 0;
      // A counter that fell belongs to a new process, which started at 0.
      const by = value < before ? value : value - before;
      // A histogram's bucket without an increase still gives a bound.
      if ((by > 0 || name.endsWith("_bucket")) && !first) rises.push({ name, labels, by });
      this.newest.set(key, value);
    }
    if (!first) this.polls.push({ atS, tookS: atS - this.atS, rises });
    this.polls = this.polls.filter((poll) => atS - poll.atS < this.keepS);
    this.atS = atS;
  }

  /** Return how many of the last `lastS` seconds the polls cover: 0 before the second poll. */
  coveredS(lastS) {
    return this.#last(lastS).reduce((sum, poll) => sum + poll.tookS, 0);
  }

  /** Return by how much the counter `name` rose, summed over the series whose labels `fit`. */
  sum(name, lastS, fit = () => true) {
    let total = 0;
    for (const rise of this.#rises(name, lastS)) if (fit(rise.labels)) total += rise.by;
    return total;
  }

  /** Return the increase by the value of a label, or by the text that a function `label` makes of the labels. */
  by(name, lastS, label) {
    const of = typeof label === "string" ? (labels) => labels[label] ?? "" : label;
    const sums = new Map();
    for (const { labels, by } of this.#rises(name, lastS)) sums.set(of(labels), (sums.get(of(labels)) ?? 0) + by);
    return sums;
  }

  /** Return the increase a second; null before the second poll. */
  rate(name, lastS, fit) {
    const covered = this.coveredS(lastS);
    return covered > 0 ? this.sum(name, lastS, fit) / covered : null;
  }

  /** Return a quantile of a histogram over the last seconds; null if it counted nothing. */
  quantile(name, share, lastS) {
    return quantile(this.by(`${name}_bucket`, lastS, "le"), share);
  }

  #last(lastS) {
    return this.polls.filter((poll) => this.atS - poll.atS < lastS);
  }

  *#rises(name, lastS) {
    for (const poll of this.#last(lastS)) for (const rise of poll.rises) if (rise.name === name) yield rise;
  }
}

/** Compute a quantile from cumulative counts by upper bound, like PromQL's `histogram_quantile`; null if empty. */
export function quantile(buckets, share) {
  const bounds = [...buckets].map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count]);
  bounds.sort((one, other) => one[0] - other[0]);
  const total = bounds.length ? bounds.at(-1)[1] : 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  let [lower, below] = [0, 0];
  for (const [upper, upto] of bounds) {
    if (upto >= rank && upto > below) {
      return upper === Infinity ? lower : lower + ((upper - lower) * (rank - below)) / (upto - below);
    }
    [lower, below] = [upper, upto];
  }
  return lower;
}
