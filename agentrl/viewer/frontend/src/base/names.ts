/** Names of runs and evaluations by their keys, for the headings of pages that load something else. */
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { get } from "./api";
import type { Source } from "./types";

const names = signal<ReadonlyMap<string, string>>(new Map());

/** Return the name of a source; its key until the name is known. */
export function useSourceName(source: string): string {
  useEffect(() => {
    if (names.peek().has(source)) return;
    get<{ sources: Source[] }>("/api/sources").then(
      ({ sources }) => {
        names.value = new Map(sources.map((one) => [one.key, one.name]));
      },
      () => {},
    );
  }, [source]);
  return names.value.get(source) ?? source;
}
