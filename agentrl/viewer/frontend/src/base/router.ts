/** The address of the page as a signal. Links within the viewer change it without loading the page again. */
import { computed, signal } from "@preact/signals";

/** Path of the viewer at this address: empty, or the prefix of a proxy, such as `/user/me/proxy/8800`. */
export const BASE = new URL(".", import.meta.url).pathname.replace(/\/$/, "");

const here = signal(location.pathname + location.search);

export const url = computed(() => new URL(here.value, location.origin));

/** Path of the page within the viewer. */
export const path = computed(() => url.value.pathname.slice(BASE.length));

window.addEventListener("popstate", () => {
  here.value = location.pathname + location.search;
});

document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const link = (event.target as Element).closest("a");
  if (
    !link ||
    link.origin !== location.origin ||
    !link.pathname.startsWith(`${BASE}/`) ||
    link.target ||
    link.hasAttribute("download")
  )
    return;
  event.preventDefault();
  navigate(link.pathname + link.search);
});

/** Go to an address within the viewer. */
export function navigate(to: string, options: { replace?: boolean } = {}): void {
  if (to === here.peek()) return;
  const isSamePage = to.split("?")[0] === here.peek().split("?")[0];
  if (options.replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  here.value = to;
  if (!isSamePage) window.scrollTo(0, 0);
}

/** Change parameters of the current address; null removes one. */
export function setQuery(
  changes: Record<string, string | number | boolean | null | readonly string[]>,
  replace = true,
) {
  const query = new URLSearchParams(url.peek().search);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    if (Array.isArray(value)) for (const one of value) query.append(name, one);
    else if (value !== null && value !== "" && value !== false) query.set(name, String(value));
  }
  const text = query.toString();
  navigate(url.peek().pathname + (text ? `?${text}` : ""), { replace });
}

const part = encodeURIComponent;

export const links = {
  runs: () => `${BASE}/`,
  run: (source: string) => `${BASE}/r/${part(source)}`,
  episodes: (source: string, query = "") => `${BASE}/r/${part(source)}/episodes${query ? `?${query}` : ""}`,
  episode: (source: string, id: string, query: Record<string, string | number> = {}) => {
    const text = new URLSearchParams(Object.entries(query).map(([k, v]) => [k, String(v)])).toString();
    return `${BASE}/r/${part(source)}/episode/${part(id)}${text ? `?${text}` : ""}`;
  },
  group: (source: string, group: string) => `${BASE}/r/${part(source)}/group/${part(group)}`,
  inFlight: (source: string) => `${BASE}/r/${part(source)}/in-flight`,
  compare: (a?: string, b?: string) => `${BASE}/compare${a ? `?a=${part(a)}${b ? `&b=${part(b)}` : ""}` : ""}`,
};
