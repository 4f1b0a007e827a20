// Numbers as people read them. What is not known is a dash.

export const NOTHING = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const known = (value) => value !== null && value !== undefined;

export const count = (value) => (known(value) ? whole.format(value) : NOTHING);

/** Long counts shortened: 1,234,567 is 1.23M. */
export const short = (value) => (known(value) ? (Math.abs(value) < 100_000 ? whole : compact).format(value) : NOTHING);

/** Three digits that mean something; whole from 1,000 on. */
export function amount(value) {
  if (!known(value)) {
    return NOTHING;
  }
  if (Math.abs(value) >= 100_000) {
    return compact.format(value);
  }
  return (Math.abs(value) >= 1_000 ? whole : significant).format(value);
}

export const versions = (value) => (known(value) ? value.toFixed(2) : NOTHING);

export const percent = (value) => (known(value) ? `${(100 * value).toFixed(0)}%` : NOTHING);

export function bytes(value) {
  if (!known(value)) {
    return NOTHING;
  }
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(left) : significant.format(left)} ${units[unit]}`;
}

export function seconds(value) {
  if (!known(value)) {
    return NOTHING;
  }
  if (value < 1) {
    return `${(1000 * value).toFixed(0)} ms`;
  }
  if (value < 120) {
    return `${value < 10 ? significant.format(value) : value.toFixed(0)} s`;
  }
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

export const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
