import { useState } from "preact/hooks";
import { useGet } from "../base/api";
import { fixed, num, percent, signed, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { links, setQuery, url } from "../base/router";
import { Inline } from "../base/text";
import type { Comparison, Episode, EpisodeRow, Source } from "../base/types";
import { Await, Choice, Empty, Success } from "../parts/common";
import { Shell } from "../parts/shell";
import { type Side, SideBySide } from "../parts/side_by_side";

type Result = Comparison["tasks"][number]["result"];
const RESULTS: Record<Result, { mark: string; text: string; tone: string }> = {
  won: { mark: "▲", text: "B won", tone: "good" },
  lost: { mark: "▼", text: "B lost", tone: "bad" },
  same: { mark: "=", text: "same", tone: "muted" },
};

function Pick({ name, label, sources, value }: { name: string; label: string; sources: Source[]; value: string }) {
  return (
    <label class="inline-field">
      {label}
      <select
        aria-label={label}
        value={value}
        onChange={(e) => setQuery({ [name]: e.currentTarget.value, task: null, environment: null }, false)}
      >
        <option value="">choose…</option>
        {sources.map((one) => (
          <option key={one.key} value={one.key}>
            {one.name} ({one.kind})
          </option>
        ))}
      </select>
    </label>
  );
}

const countOf = (value: number | string[]) => (typeof value === "number" ? value : value.length);

function Verdict({ data }: { data: Comparison }) {
  const { test } = data;
  return (
    <div class="verdict">
      <div class="tiles">
        <div class="tile">
          <strong class="good">▲ {whole(data.won)}</strong> tasks B won
        </div>
        <div class="tile">
          <strong class="bad">▼ {whole(data.lost)}</strong> tasks B lost
        </div>
        <div class="tile">
          <strong>= {whole(data.same)}</strong> the same
        </div>
        {test && (
          <>
            <div class="tile">
              <strong>{signed(test.difference)}</strong> success of B over A
              {test.low !== null && (
                <span class="muted">
                  95 %: {signed(test.low)} to {signed(test.high)}
                </span>
              )}
            </div>
            <div class="tile">
              <strong>{test.p !== null && test.p < 1e-4 ? "p < 0.0001" : `p = ${num(test.p, 3)}`}</strong> {test.name}
              <span class="muted">{test.p !== null && test.p < 0.05 ? "unlikely to be chance" : "may be chance"}</span>
            </div>
          </>
        )}
      </div>
      {data.panels.match === "different" && (
        <p class="bad" role="note">
          Different panels: A was evaluated on <code>{data.panels.a}</code>, B on <code>{data.panels.b}</code>. Their
          tasks, samples or seeds differ, so only the common tasks below can be compared.
        </p>
      )}
      {data.panels.match === "same" && (
        <p class="muted">
          Same panel: <code>{data.panels.a}</code>
        </p>
      )}
      {(countOf(data.only_a) > 0 || countOf(data.only_b) > 0) && (
        <p class="muted">
          Not compared: {countOf(data.only_a)} tasks that only A has, {countOf(data.only_b)} that only B has.
        </p>
      )}
    </div>
  );
}

function Tasks({ data, task, environment }: { data: Comparison; task: string | null; environment: string | null }) {
  const [kind, setKind] = useState<Result | "all">("all");
  const rows = data.tasks.filter((one) => kind === "all" || one.result === kind);
  const isShown = (one: Comparison["tasks"][number]) =>
    one.task === task && (environment === null || one.environment === environment);
  const at = rows.findIndex(isShown);
  const move = (by: number) => {
    const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
    if (next) setQuery({ task: next.task, environment: next.environment, episode_a: null, episode_b: null });
  };
  useKeys([
    { keys: "j", help: "Next task", run: () => move(1) },
    { keys: "k", help: "Previous task", run: () => move(-1) },
  ]);
  return (
    <section>
      <div class="section-head">
        <h2>Tasks</h2>
        <Choice
          label="Tasks"
          options={[
            { value: "all", text: `All ${data.tasks.length}` },
            { value: "won", text: `▲ Won ${data.won}` },
            { value: "lost", text: `▼ Lost ${data.lost}` },
            { value: "same", text: `= Same ${data.same}` },
          ]}
          value={kind}
          choose={setKind}
        />
      </div>
      <div class="task-list">
        <table class="list">
          <thead>
            <tr>
              <th scope="col">Task</th>
              <th scope="col">Environment</th>
              <th scope="col">Result</th>
              <th scope="col" class="number">
                Success A
              </th>
              <th scope="col" class="number">
                Success B
              </th>
              <th scope="col" class="number">
                Reward A
              </th>
              <th scope="col" class="number">
                Reward B
              </th>
              <th scope="col" class="number">
                Episodes
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map((one) => (
              <tr key={`${one.environment} ${one.task}`} class={isShown(one) ? "current" : ""}>
                <th scope="row">
                  <button
                    type="button"
                    class="link"
                    onClick={() =>
                      setQuery({ task: one.task, environment: one.environment, episode_a: null, episode_b: null })
                    }
                  >
                    <Inline text={one.task} />
                  </button>
                </th>
                <td>
                  <Inline text={one.environment} />
                </td>
                <td class={RESULTS[one.result].tone}>
                  <span aria-hidden="true">{RESULTS[one.result].mark}</span> {RESULTS[one.result].text}
                </td>
                <td class="number">{percent(one.a.success, 0)}</td>
                <td class="number">{percent(one.b.success, 0)}</td>
                <td class="number">{fixed(one.a.reward)}</td>
                <td class="number">{fixed(one.b.reward)}</td>
                <td class="number">
                  {one.a.episodes} / {one.b.episodes}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function side(name: "a" | "b", source: string, episode: Episode, rows: EpisodeRow[] | undefined): Side {
  const head = (
    <>
      <strong>{name.toUpperCase()}</strong> <a href={links.episode(source, episode.row.id)}>open</a>{" "}
      <EpisodeChoice side={name} rows={rows} chosen={episode.row.id} /> <Success value={episode.row.success} />
      <span class="figures">
        <span>reward {fixed(episode.row.reward)}</span>
        <span>{episode.row.turns} turns</span>
      </span>
    </>
  );
  return { key: name, head, episode };
}

interface TwoEpisodesData {
  a: Episode | null;
  b: Episode | null;
  episodes_a?: EpisodeRow[];
  episodes_b?: EpisodeRow[];
}

/** The choice of one of a task's episodes. */
function EpisodeChoice({
  side: name,
  rows,
  chosen,
}: {
  side: "a" | "b";
  rows: EpisodeRow[] | undefined;
  chosen: string | undefined;
}) {
  if (!rows || rows.length < 2) return null;
  return (
    <select
      aria-label={`Episode of ${name.toUpperCase()}`}
      value={chosen ?? ""}
      onChange={(e) => setQuery({ [`episode_${name}`]: e.currentTarget.value })}
    >
      {rows.map((row) => (
        <option key={row.id} value={row.id}>
          {row.step ? `step ${row.step} ` : ""}#{row.member ?? 0}: reward {fixed(row.reward)}
        </option>
      ))}
    </select>
  );
}

function TwoEpisodes({ a, b, task }: { a: string; b: string; task: string }) {
  const query = new URLSearchParams({ a, b, task });
  for (const name of ["environment", "episode_a", "episode_b"]) {
    const value = url.value.searchParams.get(name);
    if (value) query.set(name, value);
  }
  const loaded = useGet<TwoEpisodesData>(`/api/compare/episodes?${query}`);
  return (
    <section>
      <h2>
        <Inline text={task} />
      </h2>
      <Await of={loaded} what="the two episodes">
        {(data) => {
          const sides = [
            ...(data.a ? [side("a", a, data.a, data.episodes_a)] : []),
            ...(data.b ? [side("b", b, data.b, data.episodes_b)] : []),
          ];
          return sides.length ? <SideBySide sides={sides} /> : <Empty title="No episode of this task is stored." />;
        }}
      </Await>
    </section>
  );
}

export function ComparePage() {
  const query = url.value.searchParams;
  const [a, b, task] = [query.get("a") ?? "", query.get("b") ?? "", query.get("task")];
  const sources = useGet<{ sources: Source[] }>("/api/sources");
  const isReady = a !== "" && b !== "";
  const loaded = useGet<Comparison>(isReady ? `/api/compare?${new URLSearchParams({ a, b })}` : null);
  const all = sources.data?.sources ?? [];
  return (
    <Shell title="Compare" crumbs={[{ text: "Runs", to: links.runs() }, { text: "Compare" }]}>
      <div class="page-head">
        <h1>Compare</h1>
        <Pick name="a" label="A" sources={all} value={a} />
        <Pick name="b" label="B" sources={all} value={b} />
        <button type="button" disabled={!isReady} onClick={() => setQuery({ a: b, b: a }, false)}>
          ⇄ Swap
        </button>
      </div>
      {!isReady && (
        <Empty title="Choose two runs or evaluations over the same tasks.">
          The page shows which tasks were won and lost, tests whether the difference may be chance, and puts two
          episodes of a task beside each other.
        </Empty>
      )}
      {isReady && (
        <Await of={loaded} what="the comparison">
          {(data) =>
            data.tasks.length ? (
              <>
                <Verdict data={data} />
                <Tasks data={data} task={task} environment={query.get("environment")} />
                {task && <TwoEpisodes a={a} b={b} task={task} />}
              </>
            ) : (
              <Empty title="These two have no task in common.">
                Compare evaluations of the same split, or runs on the same environment.
              </Empty>
            )
          }
        </Await>
      )}
    </Shell>
  );
}
