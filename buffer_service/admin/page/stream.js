// The service's data: JSON, and a run's events, read with fetch, because an EventSource cannot carry a token.

const TOKEN_KEY = "rollout-buffer token";
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8_000;
/** The service sends something every 5 s; after this long without a byte the connection counts as dead. */
const DEAD_MS = 20_000;

export class Refused extends Error {
  constructor(status, reason, message) {
    super(message);
    this.status = status;
    this.reason = reason;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (value) => sessionStorage.setItem(TOKEN_KEY, value),
  forget: () => sessionStorage.removeItem(TOKEN_KEY),
};

async function answer(path, accept, options = {}) {
  const headers = { Accept: accept, ...options.headers };
  if (token.get() !== null) {
    headers.Authorization = `Bearer ${token.get()}`;
  }
  const response = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  if (!response.ok) {
    const { reason = "", message = `the service answered ${response.status}` } = await response.json().catch(() => ({}));
    throw new Refused(response.status, reason, message);
  }
  return response;
}

/** JSON of a path. Rejects with Refused, or TypeError when the service is not reached. */
export const fetchJson = async (path) => (await answer(path, "application/json", { signal: AbortSignal.timeout(10_000) })).json();

/** Events of a text/event-stream, from texts that may end anywhere: {event, data, id}. */
export class EventParser {
  #rest = "";

  *push(text) {
    // A CR at the very end may have its LF still to come; the service sends LF alone.
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.data !== undefined) {
          yield { event: this.event ?? "message", data: this.data, id: this.id };
        }
        this.event = this.data = undefined;
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") {
        this.data = this.data === undefined ? value : `${this.data}\n${value}`;
      } else if (field === "event") {
        this.event = value;
      } else if (field === "id") {
        this.id = value;
      } else if (field === "retry" && /^\d+$/.test(value)) {
        this.retryMs = Number(value);
      }
    }
  }
}

/**
 * A run's events until `close`; connects again by itself. `on` has the functions heard(), told(event, data), lost(why),
 * connected(), refused(error).
 */
export class RunStream {
  #on;
  #path;
  #lastId = "";
  #closed = new AbortController();
  #connection = null;
  #wake = () => {};

  constructor(run, on) {
    this.#path = `/api/events?run=${encodeURIComponent(run)}`;
    this.#on = on;
    this.#keep();
  }

  close() {
    this.#closed.abort();
    this.#connection?.abort();
    this.#wake();
  }

  /** Do not wait any longer before the next try. */
  retryNow() {
    this.#wake();
  }

  async #keep() {
    let waitMs = FIRST_RETRY_MS;
    while (!this.#closed.signal.aborted) {
      try {
        const told = await this.#read();
        waitMs = told ? FIRST_RETRY_MS : waitMs;
        this.#on.lost("the service ended the connection");
      } catch (error) {
        if (this.#closed.signal.aborted) {
          return;
        }
        // The service cannot read a run of another layout, however often it is asked.
        if (error instanceof Refused && (error.status < 500 || error.reason === "layout_changed")) {
          this.#on.refused(error);
          return;
        }
        this.#on.lost(error instanceof Refused ? error.message : "the service cannot be reached");
      }
      await this.#wait(waitMs);
      waitMs = Math.min(2 * waitMs, LAST_RETRY_MS);
    }
  }

  #wait(waitMs) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, waitMs);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** One connection; whether an event came. */
  async #read() {
    this.#connection = new AbortController();
    let watchdog = setTimeout(() => this.#connection.abort(), DEAD_MS);
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => this.#connection.abort(), DEAD_MS);
    };
    let told = false;
    try {
      const headers = this.#lastId === "" ? {} : { "Last-Event-ID": this.#lastId };
      const response = await answer(this.#path, "text/event-stream", { headers, signal: this.#connection.signal });
      this.#on.connected();
      const parser = new EventParser();
      const decoder = new TextDecoder();
      const reader = response.body.getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done || this.#closed.signal.aborted) {
          return told;
        }
        alive();
        this.#on.heard();
        for (const { event, data, id } of parser.push(decoder.decode(value, { stream: true }))) {
          this.#lastId = id ?? this.#lastId;
          told = true;
          const values = JSON.parse(data);
          if (event === "end") {
            throw new Refused(statusOf(values.reason), values.reason, values.message);
          }
          this.#on.told(event, values);
        }
      }
    } finally {
      clearTimeout(watchdog);
      this.#connection.abort();
    }
  }
}

function statusOf(reason) {
  return { unauthenticated: 401, permission_denied: 403, unknown_run: 404 }[reason] ?? 503;
}
