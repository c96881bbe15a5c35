/** The list of episodes that was looked at last, so that an episode's page knows the next and the previous one. */
interface EpisodeList {
  source: string;
  query: string;
  ids: string[];
}

const KEY = "agentrl-list";

export function rememberList(list: EpisodeList): void {
  try {
    sessionStorage.setItem(KEY, JSON.stringify({ ...list, ids: list.ids.slice(0, 20000) }));
  } catch {
    sessionStorage.removeItem(KEY);
  }
}

/** Return the list if it contains the episode. */
export function listWith(source: string, id: string): EpisodeList | null {
  const stored = sessionStorage.getItem(KEY);
  if (stored === null) return null;
  const list = JSON.parse(stored) as EpisodeList;
  return list.source === source && list.ids.includes(id) ? list : null;
}
