// Prometheus' text format, and what its counters rose by in the last seconds.

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

/** Keeps what counters rose by between polls, as long ago as `keepS` seconds. */
export class Increases {
  constructor(keepS) {
    this.keepS = keepS;
    this.newest = new Map(); // key -> the counter's newest value
    this.polls = []; // {atS, tookS, rises: [{name, labels, by}]}
    this.atS = null;
  }

  /** Take the counters of a poll. After a silence of more than `keepS` it begins anew. */
  add(atS, samples) {
    const first = this.atS === null || atS - this.atS > this.keepS;
    if (first) this.polls = [];
    const rises = [];
    for (const { key, name, labels, value } of samples) {
      const before = this.newest.get(key) ?? 0;
      // A counter that fell is that of a new process, which began at 0.
      const by = value < before ? value : value - before;
      // Of a histogram buckets that did not rise are bounds, too.
      if ((by > 0 || name.endsWith("_bucket")) && !first) rises.push({ name, labels, by });
      this.newest.set(key, value);
    }
    if (!first) this.polls.push({ atS, tookS: atS - this.atS, rises });
    this.polls = this.polls.filter((poll) => atS - poll.atS < this.keepS);
    this.atS = atS;
  }

  /** Return the seconds that the last `lastS` seconds of polls cover: 0 before the second poll. */
  coveredS(lastS) {
    return this.#last(lastS).reduce((sum, poll) => sum + poll.tookS, 0);
  }

  /** Return by how much the counter `name` rose in all its series whose labels `fit`. */
  sum(name, lastS, fit = () => true) {
    let total = 0;
    for (const rise of this.#rises(name, lastS)) if (fit(rise.labels)) total += rise.by;
    return total;
  }

  /** Return by how much it rose for each value of a label, or of a text that `label` makes of the labels. */
  by(name, lastS, label) {
    const of = typeof label === "string" ? (labels) => labels[label] ?? "" : label;
    const sums = new Map();
    for (const { labels, by } of this.#rises(name, lastS)) sums.set(of(labels), (sums.get(of(labels)) ?? 0) + by);
    return sums;
  }

  /** Return its rise in a second; null before the second poll. */
  rate(name, lastS, fit) {
    const covered = this.coveredS(lastS);
    return covered > 0 ? this.sum(name, lastS, fit) / covered : null;
  }

  /** Return a quantile of a histogram over the last seconds; null if nothing was observed. */
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

/** Return a quantile from cumulative counts by upper bound, as PromQL's `histogram_quantile` does; null without any. */
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
