import { useState } from "preact/hooks";
import { useEvents, useGet } from "../base/api";
import { ago, dateTime, fixed, NONE, percent, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { links, navigate } from "../base/router";
import { Inline } from "../base/text";
import type { Source } from "../base/types";
import { Await, Empty, Indexing, Sparkline, StateBadge } from "../parts/common";
import { Shell } from "../parts/shell";

function Row({ source, isCurrent, isMarked, mark }: RowProps) {
  const progress =
    source.step === null ? NONE : source.steps ? `${source.step} / ${source.steps}` : String(source.step);
  const sparkline =
    source.kind === "run" ? <Sparkline values={source.sparkline} label={`${source.name} by step`} /> : null;
  return (
    <tr class={isCurrent ? "current" : ""}>
      <td>
        <input type="checkbox" checked={isMarked} onChange={mark} aria-label={`Compare ${source.name}`} />
      </td>
      <th scope="row">
        <a href={links.run(source.key)}>
          <Inline text={source.name} />
        </a>
        <span class="path" title={source.path}>
          <Inline text={source.path} />
        </span>
      </th>
      <td>
        <StateBadge state={source.state} /> <Indexing index={source.index} />
        {source.problem && <p class="error">✕ {source.problem}</p>}
      </td>
      <td class="number">{progress}</td>
      <td class="number">{percent(source.success)}</td>
      <td class="number">{fixed(source.reward)}</td>
      <td>{sparkline}</td>
      <td class="clip" title={source.environments.join(", ")}>
        {source.environments.length ? <Inline text={source.environments.join(", ")} /> : NONE}
      </td>
      <td class="clip" title={source.model ?? ""}>
        {source.model ? <Inline text={source.model} /> : NONE}
      </td>
      <td class="number" title={dateTime(source.updated)}>
        {ago(source.updated)}
      </td>
    </tr>
  );
}

interface RowProps {
  source: Source;
  isCurrent: boolean;
  isMarked: boolean;
  mark: () => void;
}

function Table({ title, sources, current, marked, mark }: TableProps) {
  if (!sources.length) return null;
  return (
    <section>
      <h2>
        {title} <span class="count">{whole(sources.length)}</span>
      </h2>
      <div class="scroll-x">
        <table class="list runs">
          <thead>
            <tr>
              <th scope="col">
                <span class="sr">Compare</span>
              </th>
              <th scope="col">Name</th>
              <th scope="col">State</th>
              <th scope="col" class="number">
                Step
              </th>
              <th scope="col" class="number">
                Success
              </th>
              <th scope="col" class="number">
                Reward
              </th>
              <th scope="col">By step</th>
              <th scope="col">Environments</th>
              <th scope="col">Model</th>
              <th scope="col" class="number">
                Updated
              </th>
            </tr>
          </thead>
          <tbody>
            {sources.map((source) => (
              <Row
                key={source.key}
                source={source}
                isCurrent={source.key === current}
                isMarked={marked.includes(source.key)}
                mark={() => mark(source.key)}
              />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

interface TableProps {
  title: string;
  sources: Source[];
  current: string | undefined;
  marked: string[];
  mark: (key: string) => void;
}

export function RunsPage() {
  const loaded = useGet<{ sources: Source[]; unread: number }>("/api/sources");
  const isAnyRunning = loaded.data?.sources.some((one) => one.state === "running") ?? false;
  useEvents(null, ["sources", "index"], loaded.reload, { beat: isAnyRunning ? 5000 : null });
  const [at, setAt] = useState(0);
  const [marked, setMarked] = useState<string[]>([]);
  const sources = loaded.data?.sources ?? [];
  const runs = sources.filter((one) => one.kind === "run");
  const evaluations = sources.filter((one) => one.kind === "evaluation");
  const ordered = [...runs, ...evaluations];
  const current = ordered[Math.min(at, ordered.length - 1)]?.key;
  const move = (by: number) => setAt((i) => Math.max(0, Math.min(ordered.length - 1, i + by)));
  const mark = (key: string) =>
    setMarked((old) => (old.includes(key) ? old.filter((one) => one !== key) : [...old, key].slice(-2)));
  const compare = () => navigate(links.compare(marked[0], marked[1]));
  useKeys([
    { keys: "j", help: "Next row", run: () => move(1) },
    { keys: "k", help: "Previous row", run: () => move(-1) },
    { keys: "Enter", help: "Open the row", run: () => current && navigate(links.run(current)) },
    { keys: "x", help: "Mark the row for a comparison", run: () => current && mark(current) },
    { keys: "c", help: "Compare the two marked rows", run: () => marked.length === 2 && compare() },
    { keys: "g g", help: "First row", run: () => setAt(0) },
    { keys: "G", help: "Last row", run: () => setAt(ordered.length - 1) },
  ]);
  return (
    <Shell title="Runs" crumbs={[{ text: "Runs" }]}>
      <div class="page-head">
        <h1>Runs and evaluations</h1>
        <button type="button" class="primary" disabled={marked.length !== 2} onClick={compare}>
          Compare{marked.length ? ` (${marked.length} of 2 marked)` : ""}
        </button>
      </div>
      <Await of={loaded} what="the runs">
        {() =>
          sources.length ? (
            <>
              {loaded.data?.unread ? <p class="muted">{whole(loaded.data.unread)} more are being read.</p> : null}
              <Table title="Runs" sources={runs} current={current} marked={marked} mark={mark} />
              <Table title="Evaluations" sources={evaluations} current={current} marked={marked} mark={mark} />
            </>
          ) : (
            <Empty title="No runs in the opened folders.">
              Start one with <code>agentrl demo</code> or <code>agentrl train</code>; it appears here by itself.
            </Empty>
          )
        }
      </Await>
    </Shell>
  );
}
