import { useEffect, useMemo, useState } from "preact/hooks";
import { api, get, useEvents, useGet } from "../base/api";
import { whole } from "../base/format";
import { useKeys } from "../base/keys";
import { listWith } from "../base/list";
import { links, navigate, setQuery, url } from "../base/router";
import { Inline, TextBlock } from "../base/text";
import type { Episode, EpisodePage as EpisodeList, Sequence, Turn } from "../base/types";
import { Await, Choice, Copy, Empty, Outcome, SourceName, Success } from "../parts/common";
import { EpisodeFacts, Notes } from "../parts/episode_side";
import { OVERLAYS, type OverlayName } from "../parts/overlays";
import { Prompt, RawRecord } from "../parts/raw";
import { Shell } from "../parts/shell";
import { Timeline } from "../parts/timeline";
import { TokenPanel } from "../parts/token_panel";
import { TurnView, turnName, withPrompt } from "../parts/turn";

const VIEWS = ["conversation", "tokens", "timeline", "prompt", "json", "log"] as const;
type View = (typeof VIEWS)[number];
const VIEW_TEXT: Record<View, string> = {
  conversation: "Conversation",
  tokens: "Tokens",
  timeline: "Timeline",
  prompt: "Raw prompt",
  json: "Raw JSON",
  log: "Log",
};

/** What the address says: the view, and the chosen sequence, turn and token. */
function place() {
  const query = url.value.searchParams;
  const numberOf = (name: string) => (/^\d+$/.test(query.get(name) ?? "") ? Number(query.get(name)) : null);
  const token = numberOf("token");
  const chosen = query.get("view") as View | null;
  const isTokens = token !== null || query.has("overlay");
  const view: View = chosen && VIEWS.includes(chosen) ? chosen : isTokens ? "tokens" : "conversation";
  const overlay = query.get("overlay") as OverlayName | null;
  return {
    view,
    sequence: numberOf("sequence") ?? 0,
    turn: numberOf("turn"),
    token,
    overlay: overlay && OVERLAYS.includes(overlay) ? overlay : ("source" as OverlayName),
  };
}

function scrollToTurn(turn: number | null) {
  if (turn === null) return;
  const found = document.getElementById(`turn-${turn}`) ?? document.querySelector(`[data-turn="${turn}"].sampled`);
  found?.scrollIntoView({ block: "start" });
}

/** The episodes before and after this one in the list that was looked at last, or among those of its step. */
function useNeighbours(source: string, id: string, step: number | null) {
  const list = useMemo(() => listWith(source, id), [source, id]);
  const [ids, setIds] = useState<string[]>(list?.ids ?? []);
  useEffect(() => {
    if (list || step === null) return;
    const abort = new AbortController();
    get<EpisodeList>(`${api(source, "episodes")}?step_from=${step}&step_to=${step}&limit=1000`, abort.signal).then(
      (page) => setIds(page.rows.map((row) => row.id)),
      () => setIds([]),
    );
    return () => abort.abort();
  }, [list, source, step]);
  const at = ids.indexOf(id);
  return {
    at,
    count: ids.length,
    previous: at > 0 ? ids[at - 1] : undefined,
    next: at >= 0 ? ids[at + 1] : undefined,
    query: list?.query ?? "",
  };
}

function Outline({ turns, current, open }: { turns: Turn[]; current: number | null; open: (turn: number) => void }) {
  return (
    <nav class="outline" aria-label="Turns">
      <ol>
        {turns.map((turn, i) => (
          <li key={turn.number ?? `p${i}`}>
            <button
              type="button"
              aria-current={turn.number !== null && turn.number === current ? "true" : undefined}
              onClick={() => (turn.number === null ? window.scrollTo(0, 0) : open(turn.number))}
            >
              <span class="name">{turnName(turn.number)}</span>
              <span class="gist">
                <Inline text={summaryOf(turn)} />
              </span>
              {turn.invalid && (
                <span class="bad" title="Invalid call">
                  ✕
                </span>
              )}
              {turn.reward !== null && turn.reward !== 0 && <span class="figure">{turn.reward.toFixed(2)}</span>}
            </button>
          </li>
        ))}
      </ol>
    </nav>
  );
}

function summaryOf(turn: Turn): string {
  const call = turn.parts.find((part) => part.kind === "tool_call");
  if (call) return `${call.name ?? "call"}()`;
  const part = turn.parts.find((one) => one.kind === "assistant") ?? turn.parts.find((one) => one.kind === "user");
  return (part?.text ?? turn.role).slice(0, 60);
}

interface BodyProps {
  source: string;
  episode: Episode;
  hasLog: boolean;
  reload: () => void;
}

function SequenceChoice({ sequences, chosen }: { sequences: Sequence[]; chosen: number }) {
  if (sequences.length < 2) return null;
  return (
    <label class="inline-field">
      Sequence
      <select
        value={String(chosen)}
        onChange={(e) => setQuery({ sequence: Number(e.currentTarget.value) || null, token: null, turn: null })}
      >
        {sequences.map((one, i) => (
          <option key={i} value={String(i)}>
            {i + 1} of {sequences.length}
            {one.role ? ` · ${one.role}` : ""} · {whole(one.tokens)} tokens
            {one.parent !== null ? ` · from ${one.parent + 1}` : ""}
          </option>
        ))}
      </select>
    </label>
  );
}

function Body({ source, episode, hasLog, reload }: BodyProps) {
  const at = place();
  const sequenceNumber = Math.min(at.sequence, episode.sequences.length - 1);
  const sequence = episode.sequences[sequenceNumber];
  const turns = useMemo(() => withPrompt(sequence?.turns ?? []), [sequence]);
  const numbers = turns.flatMap((turn) => (turn.number === null ? [] : [turn.number]));
  const openTurn = (turn: number) => {
    setQuery({ turn, token: null, ...(at.view === "tokens" ? { view: "tokens" } : {}) });
    scrollToTurn(turn);
  };
  const step = (by: number) => {
    const now = at.turn === null ? (by > 0 ? -1 : 0) : numbers.indexOf(at.turn);
    const next = numbers[Math.max(0, Math.min(numbers.length - 1, now + by))];
    if (next !== undefined) openTurn(next);
  };
  const show = (view: View) =>
    setQuery({
      view: view === "conversation" ? null : view,
      ...(view === "tokens" ? {} : { token: null, overlay: null }),
    });
  // Only what the page was opened with, and a change of the view
  useEffect(() => {
    if (at.token === null) scrollToTurn(at.turn);
  }, [at.view]);
  useKeys([
    { keys: "j", help: "Next turn", run: () => step(1) },
    { keys: "k", help: "Previous turn", run: () => step(-1) },
    { keys: "g g", help: "To the top", run: () => window.scrollTo(0, 0) },
    { keys: "G", help: "To the end", run: () => window.scrollTo(0, document.body.scrollHeight) },
    {
      keys: "t",
      help: "Tokens or conversation",
      run: () => show(place().view === "tokens" ? "conversation" : "tokens"),
    },
    { keys: "e", help: "Unfold or fold all thinking", run: foldThinking },
  ]);
  const link = (turn: number) =>
    links.episode(source, episode.row.id, { turn, ...(sequenceNumber ? { sequence: sequenceNumber } : {}) });
  return (
    <>
      <div class="view-bar">
        <Choice
          label="View"
          options={VIEWS.filter((view) => view !== "log" || hasLog).map((value) => ({ value, text: VIEW_TEXT[value] }))}
          value={at.view}
          choose={show}
        />
        <SequenceChoice sequences={episode.sequences} chosen={sequenceNumber} />
      </div>
      {episode.error && (
        <p class="error">
          ✕ <Inline text={episode.error} />
        </p>
      )}
      {at.view === "tokens" && sequence ? (
        <TokenPanel
          source={source}
          episode={episode}
          sequence={sequenceNumber}
          token={at.token}
          turn={at.turn}
          overlay={at.overlay}
        />
      ) : (
        <div class={`episode-body ${at.view}`}>
          {at.view === "conversation" && <Outline turns={turns} current={at.turn} open={openTurn} />}
          <div class="content">
            {!sequence && <Empty title="This episode ended before its first token." />}
            {at.view === "conversation" &&
              turns.map((turn, i) => (
                <TurnView
                  key={turn.number ?? `p${i}`}
                  turn={turn}
                  isCurrent={turn.number !== null && turn.number === at.turn}
                  {...(turn.number === null
                    ? {}
                    : { link: link(turn.number), tokensLink: `${link(turn.number)}&view=tokens` })}
                />
              ))}
            {at.view === "timeline" && (
              <Timeline
                turns={turns}
                open={(turn) => {
                  setQuery({ view: null, turn }, false);
                }}
              />
            )}
            {at.view === "prompt" && (
              <Prompt source={source} id={episode.row.id} turns={numbers} turn={at.turn ?? numbers[0] ?? 0} />
            )}
            {at.view === "json" && <RawRecord source={source} id={episode.row.id} />}
            {at.view === "log" && <TextBlock text={episode.log ?? ""} />}
          </div>
          <aside class="side" aria-label="About the episode">
            <EpisodeFacts source={source} episode={episode} />
            <Notes source={source} episode={episode} turn={at.turn} changed={reload} />
          </aside>
        </div>
      )}
    </>
  );
}

function foldThinking() {
  const all = [...document.querySelectorAll<HTMLDetailsElement>("details.thinking")];
  const isAnyFolded = all.some((one) => !one.open);
  for (const one of all) one.open = isAnyFolded;
}

export function EpisodePage({ source, id }: { source: string; id: string }) {
  const loaded = useGet<Episode>(api(source, "episode", id));
  const row = loaded.data?.row;
  const near = useNeighbours(source, id, row?.step ?? null);
  useEvents(source, ["episodes"], () => {
    if (row && !row.complete) loaded.reload();
  });
  const keep = () => {
    const query = url.peek().searchParams;
    const kept: Record<string, string> = {};
    for (const name of ["view", "overlay"]) if (query.has(name)) kept[name] = query.get(name) ?? "";
    return kept;
  };
  const go = (to: string | undefined) => to !== undefined && navigate(links.episode(source, to, keep()));
  useKeys([
    { keys: "n", help: "Next episode", run: () => go(near.next) },
    { keys: "p", help: "Previous episode", run: () => go(near.previous) },
    { keys: "u", help: "Back to the table of episodes", run: () => navigate(links.episodes(source, near.query)) },
    { keys: "s", help: "The siblings in the group", run: () => row && navigate(links.group(source, row.group_id)) },
  ]);
  return (
    <Shell
      title={row?.task_id ?? "Episode"}
      source={source}
      crumbs={[
        { text: "Runs", to: links.runs() },
        { text: <SourceName source={source} />, to: links.run(source) },
        { text: "Episodes", to: links.episodes(source, near.query) },
        { text: <Inline text={id} /> },
      ]}
    >
      <Await of={loaded} what="the episode">
        {(episode) => (
          <>
            <div class="page-head">
              <h1>
                <Inline text={episode.row.task_id} />
              </h1>
              <Outcome outcome={episode.row.outcome} />
              <Success value={episode.row.success} />
              <span class="spacer" />
              {episode.replay && <Copy text={episode.replay} label="Copy replay command" />}
              <Copy
                text={JSON.stringify(episode.chat, null, 2)}
                label="Copy as messages"
                title="The conversation as chat messages (JSON)"
              />
              <span class="pager">
                <button
                  type="button"
                  disabled={near.previous === undefined}
                  onClick={() => go(near.previous)}
                  title="Previous episode (p)"
                >
                  ← Previous
                </button>
                <span class="muted">{near.at >= 0 ? `${whole(near.at + 1)} / ${whole(near.count)}` : ""}</span>
                <button
                  type="button"
                  disabled={near.next === undefined}
                  onClick={() => go(near.next)}
                  title="Next episode (n)"
                >
                  Next →
                </button>
              </span>
            </div>
            <Body source={source} episode={episode} hasLog={Boolean(episode.log)} reload={loaded.reload} />
          </>
        )}
      </Await>
    </Shell>
  );
}
