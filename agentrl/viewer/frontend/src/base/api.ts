/** Requests to the viewer's API, and hooks that load from it. */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { BASE } from "./router";

/** An error that the server explains: what went wrong, and the next step. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly hint: string | null,
    readonly status: number,
  ) {
    super(message);
  }
}

async function request<T>(method: string, url: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  let response: Response;
  try {
    response = await fetch(BASE + url, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? null : JSON.stringify(body),
      signal: signal ?? null,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The viewer's server does not answer.", "Start it again: agentrl view", 0);
  }
  const text = await response.text();
  if (response.ok) return (text ? JSON.parse(text) : null) as T;
  throw errorFrom(text, response.status);
}

interface ServerError {
  message: string;
  got: string | null;
  expected: string | null;
  hint: string | null;
}

function errorFrom(text: string, status: number): ApiError {
  try {
    const { error } = JSON.parse(text) as { error: ServerError };
    const facts = [error.got && `got ${error.got}`, error.expected && `expected ${error.expected}`].filter(Boolean);
    const hint = [facts.join(", "), error.hint].filter(Boolean).join(". ");
    return new ApiError(error.message, hint || null, status);
  } catch {
    return new ApiError(`The server answered with status ${status}.`, null, status);
  }
}

export const get = <T>(url: string, signal?: AbortSignal) => request<T>("GET", url, undefined, signal);
export const post = <T>(url: string, body: unknown) => request<T>("POST", url, body);
export const remove = (url: string) => request<unknown>("DELETE", url);

/** Return the address of a source's endpoint, such as `/api/r/key/episode/id`. */
export function api(source: string, ...rest: string[]): string {
  return ["/api/r", source, ...rest].map((part, i) => (i === 0 ? part : encodeURIComponent(part))).join("/");
}

export interface Loaded<T> {
  data: T | null;
  error: ApiError | null;
  isLoading: boolean;
  reload: () => void;
}

/** Load JSON from an address, and again when the address changes; null loads nothing. Data stays while it is reloaded. */
export function useGet<T>(url: string | null): Loaded<T> {
  const [state, setState] = useState<{ url: string | null; data: T | null; error: ApiError | null }>({
    url: null,
    data: null,
    error: null,
  });
  const [round, setRound] = useState(0);
  // A new round loads again
  useEffect(() => {
    if (url === null) return;
    const abort = new AbortController();
    get<T>(url, abort.signal).then(
      (data) => setState({ url, data, error: null }),
      (error: unknown) => {
        if (abort.signal.aborted) return;
        const known = error instanceof ApiError ? error : new ApiError(String(error), null, 0);
        setState((old) => ({ url, data: old.url === url ? old.data : null, error: known }));
      },
    );
    return () => abort.abort();
  }, [url, round]);
  const reload = useCallback(() => setRound((n) => n + 1), []);
  const isCurrent = state.url === url;
  return { data: isCurrent ? state.data : null, error: isCurrent ? state.error : null, isLoading: !isCurrent, reload };
}

interface EventOptions {
  /** Milliseconds during which several events count as one. */
  pause?: number;
  /** Milliseconds after which `changed` is called without an event; by default, never. */
  beat?: number | null;
}

/** Call `changed` when the server reports one of the events, and when it is connected: it reports nothing before. */
export function useEvents(
  source: string | null,
  names: readonly string[],
  changed: () => void,
  { pause = 700, beat = null }: EventOptions = {},
): void {
  const latest = useRef(changed);
  latest.current = changed;
  const list = names.join(" ");
  useEffect(() => {
    const query = source === null ? "" : `?source=${encodeURIComponent(source)}`;
    const events = new EventSource(`${BASE}/api/events${query}`);
    let timer: ReturnType<typeof setTimeout> | null = null;
    const hear = () => {
      timer ??= setTimeout(() => {
        timer = null;
        latest.current();
      }, pause);
    };
    for (const name of ["connected", ...list.split(" ")]) events.addEventListener(name, hear);
    const clock = beat === null ? null : setInterval(hear, beat);
    return () => {
      events.close();
      if (clock) clearInterval(clock);
      if (timer) clearTimeout(timer);
    };
  }, [source, list, pause, beat]);
}
