import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, api, get, useEvents } from "../base/api";
import { ago, dateTime, fixed, NONE, seconds, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { rememberList } from "../base/list";
import { links, navigate, setQuery, url } from "../base/router";
import { Inline } from "../base/text";
import type { EpisodeRow, IndexProgress, EpisodePage as Page } from "../base/types";
import { Damage, Empty, Failure, Indexing, Loading, Outcome, SourceName, Success } from "../parts/common";
import { Filters } from "../parts/filters";
import { Shell } from "../parts/shell";

const ROW = 30;
const PAGE = 200;

interface Rows {
  query: string;
  rows: EpisodeRow[];
  total: number | null;
  unsearched?: number | null;
  index?: IndexProgress | null;
  cursor: string | null;
  damage: Page["damage"];
  facets: Page["facets"];
}

/** Load rows page by page; `more` loads the next page, `reload` the first ones again. */
function useRows(source: string, query: string) {
  const [state, setState] = useState<Rows | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const isBusy = useRef(false);
  const load = useCallback(
    async (cursor: string | null, limit: number, signal?: AbortSignal) => {
      const address = new URLSearchParams(query);
      address.set("limit", String(limit));
      if (!address.has("order")) address.set("descending", "true");
      if (cursor !== null) address.set("cursor", cursor);
      try {
        const page = await get<Page>(`${api(source, "episodes")}?${address}`, signal);
        setError(null);
        setState((old) => {
          if (old?.query !== query) return { ...page, query };
          if (cursor !== null) return { ...page, query, rows: [...old.rows, ...page.rows] };
          // Loaded again while more rows are there: the others stay below, so that the table does not shrink.
          const found = new Set(page.rows.map((row) => row.id));
          const others =
            page.cursor === null ? [] : old.rows.slice(page.rows.length).filter((row) => !found.has(row.id));
          return { ...page, query, rows: [...page.rows, ...others], cursor: others.length ? old.cursor : page.cursor };
        });
      } catch (caught) {
        if (signal?.aborted) return;
        setError(caught instanceof ApiError ? caught : new ApiError(String(caught), null, 0));
      }
    },
    [source, query],
  );
  useEffect(() => {
    const abort = new AbortController();
    load(null, PAGE, abort.signal);
    return () => abort.abort();
  }, [load]);
  // A text search answers in parts: ask on until the screen is full or all episodes are searched.
  const isSearching =
    state?.query === query && state.cursor !== null && state.rows.length < PAGE && (state.unsearched ?? 0) > 0;
  useEffect(() => {
    if (isSearching && state) load(state.cursor, PAGE);
  }, [isSearching, state, load]);
  const more = useCallback(async () => {
    if (isBusy.current || isSearching || !state?.cursor || state.query !== query) return;
    isBusy.current = true;
    await load(state.cursor, PAGE);
    isBusy.current = false;
  }, [load, state, query, isSearching]);
  const reload = () => {
    if (!isSearching) load(null, Math.max(PAGE, Math.min(1000, state?.rows.length ?? 0)));
  };
  return { state, error, more, reload, isSearching, isCurrent: state?.query === query };
}

const COLUMNS: { text: string; order?: string; isNumber?: boolean; title?: string }[] = [
  { text: "Step", isNumber: true, title: "Training step in which the episode ended" },
  { text: "Task", order: "task_id" },
  { text: "Environment", order: "environment" },
  { text: "Outcome", order: "outcome" },
  { text: "Success" },
  { text: "Reward", order: "reward", isNumber: true },
  { text: "Turns", order: "turns", isNumber: true },
  { text: "Tokens", order: "tokens", isNumber: true },
  { text: "Time", order: "seconds", isNumber: true },
  { text: "Marks" },
  { text: "Ended", order: "ended", isNumber: true },
];

function Header({ order, isDescending }: { order: string; isDescending: boolean }) {
  return (
    <thead>
      <tr>
        {COLUMNS.map((column) => {
          const isSorted = column.order !== undefined && column.order === order;
          const sort = isSorted ? (isDescending ? "descending" : "ascending") : undefined;
          const choose = () => setQuery({ order: column.order ?? null, descending: isSorted ? !isDescending : true });
          return (
            <th
              key={column.text}
              scope="col"
              class={column.isNumber ? "number" : ""}
              aria-sort={sort}
              title={column.title}
            >
              {column.order ? (
                <button type="button" class="sort" onClick={choose}>
                  {column.text}
                  <span aria-hidden="true">{isSorted ? (isDescending ? " ↓" : " ↑") : ""}</span>
                </button>
              ) : (
                column.text
              )}
            </th>
          );
        })}
      </tr>
    </thead>
  );
}

function Cells({ row, source }: { row: EpisodeRow; source: string }) {
  return (
    <>
      <td class="number">{row.step || NONE}</td>
      <th scope="row" class="clip">
        <a href={links.episode(source, row.id)} tabIndex={-1} title={row.id}>
          <Inline text={row.task_id} />
          {row.member !== null && <span class="muted"> #{row.member}</span>}
        </a>
      </th>
      <td class="clip">
        <Inline text={row.environment + (row.task_type ? ` · ${row.task_type}` : "")} />
      </td>
      <td>
        <Outcome outcome={row.outcome} />
      </td>
      <td>
        <Success value={row.success} />
      </td>
      <td class="number">{fixed(row.reward)}</td>
      <td class="number">{whole(row.turns)}</td>
      <td class="number">{whole(row.tokens)}</td>
      <td class="number">{seconds(row.seconds)}</td>
      <td class="marks">
        {row.invalid > 0 && <span class="bad">✕ {row.invalid} invalid</span>}
        {row.truncated && <span class="warn">▲ cut</span>}
        {row.error && <span class="bad">✕ error</span>}
      </td>
      <td class="number" title={dateTime(row.ended_at)}>
        {ago(row.ended_at)}
      </td>
    </>
  );
}

interface TableProps {
  source: string;
  found: Rows;
  at: number;
  setAt: (at: number) => void;
  more: () => void;
  order: string;
  isDescending: boolean;
}

function Table({ source, found, at, setAt, more, order, isDescending }: TableProps) {
  const host = useRef<HTMLElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const measure = () => {
    const element = host.current;
    if (element) setView({ top: element.scrollTop, height: element.clientHeight });
  };
  useEffect(() => {
    measure();
    const watch = new ResizeObserver(measure);
    if (host.current) watch.observe(host.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const head = ROW;
    const y = at * ROW;
    if (y < element.scrollTop) element.scrollTop = y;
    else if (y + ROW + head > element.scrollTop + element.clientHeight) {
      element.scrollTop = y + ROW + head - element.clientHeight;
    }
  }, [at]);
  const { rows } = found;
  const first = Math.max(0, Math.floor(view.top / ROW) - 15);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / ROW) + 15);
  useEffect(() => {
    if (last > rows.length - 60) more();
  }, [last, rows.length, more]);
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: the keys that move in the table scroll it
    <section ref={host} class="virtual" onScroll={measure} tabIndex={0} aria-label="Table of episodes">
      <table class="list episodes" aria-rowcount={found.total === null ? -1 : found.total + 1}>
        <Header order={order} isDescending={isDescending} />
        <tbody>
          {first > 0 && <tr class="spacer" style={{ height: `${first * ROW}px` }} />}
          {rows.slice(first, last).map((row, i) => {
            const index = first + i;
            return (
              <tr
                key={row.id}
                class={`${index === at ? "current" : ""}${index % 2 ? " odd" : ""}`}
                aria-rowindex={index + 2}
                aria-current={index === at ? "true" : undefined}
                onClick={() => setAt(index)}
                onDblClick={() => navigate(links.episode(source, row.id))}
              >
                <Cells row={row} source={source} />
              </tr>
            );
          })}
          {last < rows.length && <tr class="spacer" style={{ height: `${(rows.length - last) * ROW}px` }} />}
        </tbody>
      </table>
    </section>
  );
}

function countText(found: Rows, isSearching: boolean): string {
  if (isSearching) return `${whole(found.rows.length)} found so far, ${whole(found.unsearched)} to search…`;
  if (found.total !== null) return `${whole(found.total)} found`;
  return found.cursor === null
    ? `${whole(found.rows.length)} found`
    : `${whole(found.rows.length)} found, and more below`;
}

export function EpisodesPage({ source }: { source: string }) {
  const query = url.value.searchParams;
  const text = query.toString();
  const { state, error, more, reload, isSearching, isCurrent } = useRows(source, text);
  const [at, setAt] = useState(0);
  useEvents(source, ["episodes", "index"], reload, { pause: 2000 });
  // A new query starts at the top
  useEffect(() => setAt(0), [text]);
  useEffect(() => {
    if (state) rememberList({ source, query: state.query, ids: state.rows.map((row) => row.id) });
  }, [source, state]);
  const count = state?.rows.length ?? 0;
  const move = (by: number) => setAt((i) => Math.max(0, Math.min(count - 1, i + by)));
  const open = () => {
    const row = state?.rows[at];
    if (row) navigate(links.episode(source, row.id));
  };
  const focus = (selector: string) => document.querySelector<HTMLElement>(selector)?.focus();
  useKeys([
    { keys: "j", help: "Next episode", run: () => move(1) },
    { keys: "k", help: "Previous episode", run: () => move(-1) },
    { keys: "ArrowDown", help: "Next episode", run: () => move(1) },
    { keys: "ArrowUp", help: "Previous episode", run: () => move(-1) },
    { keys: "PageDown", help: "20 episodes down", run: () => move(20) },
    { keys: "PageUp", help: "20 episodes up", run: () => move(-20) },
    { keys: "g g", help: "First episode", run: () => setAt(0) },
    { keys: "G", help: "Last loaded episode", run: () => setAt(count - 1) },
    { keys: "Enter", help: "Open the episode", run: open },
    { keys: "/", help: "Search in the text of the turns", run: () => focus("#filter-text") },
    { keys: "f", help: "Go to the filters", run: () => focus("#filters select, #filters input:not([type=search])") },
    { keys: "c", help: "Clear the filters", run: () => navigate(links.episodes(source)) },
  ]);
  const order = query.get("order") ?? "ended";
  return (
    <Shell
      title="Episodes"
      source={source}
      crumbs={[
        { text: "Runs", to: links.runs() },
        { text: <SourceName source={source} />, to: links.run(source) },
        { text: "Episodes" },
      ]}
    >
      <div class="with-sidebar">
        <Filters facets={state?.facets ?? null} />
        <section class="results" aria-busy={!isCurrent}>
          <div class="page-head">
            <h1>Episodes</h1>
            <span class="count" role="status">
              {state && countText(state, isSearching)}
            </span>
            <Indexing index={state?.index} />
            <span class="hint muted">
              <kbd>j</kbd> <kbd>k</kbd> move · <kbd>Enter</kbd> open · <kbd>/</kbd> search · <kbd>f</kbd> filters
            </span>
          </div>
          <Damage files={state?.damage} />
          {error && <Failure error={error} retry={reload} />}
          {!state && !error && <Loading what="the episodes" />}
          {state?.rows.length === 0 && isCurrent && !isSearching && (
            <Empty title={text ? "No episode matches these filters." : "No episode has ended yet."}>
              {text && <a href={links.episodes(source)}>Clear the filters</a>}
            </Empty>
          )}
          {state && state.rows.length > 0 && (
            <Table
              source={source}
              found={state}
              at={at}
              setAt={setAt}
              more={more}
              order={order}
              isDescending={query.has("order") ? query.get("descending") === "true" : true}
            />
          )}
        </section>
      </div>
    </Shell>
  );
}
