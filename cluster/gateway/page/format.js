// Numbers formatted for people, with their units.

export const NONE = "–";

const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Return a number with three significant digits. */
function three(value) {
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(digits, 3)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Return a duration: "0.4 ms", "125 ms", "2.5 s", "3 min 20 s"; a dash for null. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${three(value * 1000)} ms`;
  if (value < 120) return `${three(value)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** Return a whole number with commas. */
export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Return an amount with a scale before its unit: "1.2 GB/s", "840 tok/s"; a dash for null. */
export function amount(value, unit) {
  if (value === null || value === undefined) return NONE;
  const [by, prefix] = SCALES.find(([least]) => value >= least) ?? [1, ""];
  return `${three(value / by)} ${prefix}${unit}`;
}

/** Return a number with a scale after it: "840", "15.2k"; a dash for null. */
export function scaled(value) {
  return amount(value, "").replace(" ", "");
}

/** Return a rate of tokens: "840 tok/s". */
export function tokensPerS(value) {
  return value === null ? NONE : `${scaled(value)} tok/s`;
}

/** Return a share of 1 in percent; a dash for null. */
export function percent(value) {
  if (value === null || value === undefined) return NONE;
  return value > 0 && value < 0.01 ? "<1 %" : `${Math.round(value * 100)} %`;
}

/** Return a number and its noun: "1 engine", "2 engines". */
export function plural(number, noun, many = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : many}`;
}
