// What the page remembers of a run: its totals of the last WINDOW_S, for rates, and series for the small curves.
//
// A rate is what a total grew by in the last WINDOW_S, over WINDOW_S; over the time that the page has watched where that
// is shorter. The service tells a run when it changed, so between two events its totals stand still. A gap in the
// connection forgets the totals: what happened in it belongs to no window.

/** States of groups that nobody trains on, in the order of the ledger. */
export const DROPS = ["dropped_overflow", "dropped_stale", "recycled", "filtered", "rejected", "discarded", "lost"];

export const WINDOW_S = 30;
export const SERIES_S = 600;
const LEAST_S = 3;
const POINT_S = 0.9;

export class History {
  #samples = [];
  #points = [];
  #seen = null;

  /** Totals at a time of the service, in ms. */
  add(timeMs, totals) {
    const last = this.#samples.at(-1);
    if (last !== undefined && (timeMs < last.timeMs || Object.keys(totals).some((name) => totals[name] < last.totals[name]))) {
      this.interrupt(); // A clock that was set back, or a store that was.
    }
    this.#samples.push({ timeMs, totals });
    this.#seen ??= timeMs;
    // One from before the window has to stay: it holds at the window's beginning.
    while (this.#samples.length > 1 && this.#samples[1].timeMs <= timeMs - 1000 * WINDOW_S) {
      this.#samples.shift();
    }
  }

  /** What follows is not joined to what was. */
  interrupt() {
    this.#samples = [];
    this.#seen = null;
    if (this.#points.length > 0 && this.#points.at(-1).values !== null) {
      this.#points.push({ timeMs: this.#points.at(-1).timeMs, values: null });
    }
  }

  /** Seconds that a rate at `nowMs` covers. */
  span(nowMs) {
    return this.#seen === null ? 0 : Math.min(WINDOW_S, (nowMs - this.#seen) / 1000);
  }

  /** Growth of a total per second; null while too little is known. */
  rate(name, nowMs) {
    const span = this.span(nowMs);
    if (span < LEAST_S) {
      return null;
    }
    const from = nowMs - 1000 * span;
    const start = this.#samples.findLast((sample) => sample.timeMs <= from) ?? this.#samples[0];
    return (this.#samples.at(-1).totals[name] - start.totals[name]) / span;
  }

  /** Note values for the curves. */
  note(nowMs, values) {
    const last = this.#points.at(-1);
    if (last !== undefined && last.values !== null && nowMs - last.timeMs < 1000 * POINT_S) {
      return;
    }
    this.#points.push({ timeMs: nowMs, values });
    while (this.#points[0].timeMs < nowMs - 1000 * SERIES_S) {
      this.#points.shift();
    }
  }

  /** [{timeMs, value}], value null where the curve is broken. */
  series(name) {
    return this.#points.map(({ timeMs, values }) => ({ timeMs, value: values === null ? null : values[name] }));
  }
}

/** Groups of a ledger that nobody trains on. */
export const dropped = (groups) => DROPS.reduce((total, state) => total + groups[state].groups, 0);

/** Their rate in all, by the rate of each total; null while one is not known. */
export function dropRate(rate) {
  const rates = DROPS.map(rate);
  return rates.includes(null) ? null : rates.reduce((total, one) => total + one, 0);
}

/** The totals of a run that rates are made of; they only grow. */
export function totalsOf(run) {
  const { groups, tasks, statistics } = run;
  return {
    decoded_tokens: statistics.decoded_tokens,
    accepted_groups: groups.accepted.groups,
    assembled_groups: statistics.assembled_groups,
    assembled_response_tokens: statistics.assembled_response_tokens,
    submitted_tasks: tasks.submitted,
    leases_granted: statistics.leases_granted,
    published_version: run.published.version,
    ...Object.fromEntries(DROPS.map((state) => [state, groups[state].groups])),
  };
}
