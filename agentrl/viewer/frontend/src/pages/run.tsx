import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { api, useEvents, useGet } from "../base/api";
import { ago, dateTime, fixed, num, percent, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { links, navigate, setQuery, url } from "../base/router";
import { Inline, TextBlock } from "../base/text";
import type { Metrics, Outcomes, Problem, SourceDetail, TaskTypeRow } from "../base/types";
import { Chart, type Curve, StackedAreas } from "../parts/chart";
import { Await, Copy, Damage, Empty, Fact, Facts, RateBar, StateBadge } from "../parts/common";
import { Shell } from "../parts/shell";

function Evidence({ source, problem }: { source: string; problem: Problem }) {
  return (
    <p class="muted">
      <Inline text={(problem.evidence ?? []).join("; ")} />{" "}
      {problem.example && <a href={links.episode(source, problem.example.id)}>an example</a>}
    </p>
  );
}

function Problems({ source, problems }: { source: string; problems: (Problem | string)[] }) {
  if (!problems.length) return null;
  return (
    <section class="problems" aria-label="Problems">
      <h2>▲ {problems.length === 1 ? "A problem was found" : `${problems.length} problems were found`}</h2>
      <ul>
        {problems.map((one, i) => (
          <li key={i}>
            <Inline text={typeof one === "string" ? one : one.text} />
            {typeof one !== "string" && <Evidence source={source} problem={one} />}
          </li>
        ))}
      </ul>
    </section>
  );
}

function Summary({ detail }: { detail: SourceDetail }) {
  const settings = Object.entries(detail.config ?? {});
  return (
    <div class="summary">
      <Facts>
        <Fact name="State">
          <StateBadge state={detail.state} />
        </Fact>
        {detail.kind === "run" && (
          <Fact name="Step">
            {num(detail.step)} of {num(detail.steps)}
          </Fact>
        )}
        <Fact name="Success">{percent(detail.success)}</Fact>
        <Fact name="Reward">{fixed(detail.reward)}</Fact>
        <Fact name="Environments">
          <Inline text={detail.environments.join(", ") || "–"} />
        </Fact>
        <Fact name="Model">
          <Inline text={detail.model ?? "–"} />
        </Fact>
        <Fact name="Started">
          <span title={dateTime(detail.started)}>{ago(detail.started)}</span>
        </Fact>
        <Fact name="Updated">
          <span title={dateTime(detail.updated)}>{ago(detail.updated)}</span>
        </Fact>
      </Facts>
      <details>
        <summary>Settings that differ from the defaults ({settings.length})</summary>
        <dl class="settings">
          {settings.map(([key, value]) => (
            <div key={key}>
              <dt>{key}</dt>
              <dd>
                <Inline text={typeof value === "string" ? value : JSON.stringify(value)} />
              </dd>
            </div>
          ))}
        </dl>
      </details>
      {detail.command && (
        <details>
          <summary>Command</summary>
          <TextBlock text={detail.command} />
          <Copy text={detail.command} label="Copy the command" />
        </details>
      )}
    </div>
  );
}

const MOST_CURVES = 8;

function curvesOf(metrics: Metrics, names: string[]): Curve[] {
  const curves: Curve[] = [];
  for (const name of names.slice(0, MOST_CURVES)) {
    const values = metrics.columns[name];
    if (!values?.some((value) => value !== null)) continue;
    const interval = metrics.intervals[name];
    curves.push({ name, values, ...(interval ? { low: interval.low, high: interval.high } : {}) });
  }
  return curves;
}

interface ChartNames {
  title: string;
  names: string[];
}

/** Divide metrics by their path until few enough for one chart share it, because the scales of different kinds differ. */
function byKind(title: string, names: string[], depth: number): ChartNames[] {
  const kinds = Map.groupBy(names, (name) => name.split("/").slice(0, -1).slice(0, depth).join("/") || name);
  return [...kinds].flatMap(([kind, members]) => {
    const isOnly = kinds.size === 1 || kind === title.toLowerCase();
    const own = isOnly ? title : `${title}: ${kind.split("/").at(-1)}`;
    if (members.length <= MOST_CURVES) return [{ title: own, names: members }];
    if (depth < 2) return byKind(own, members, depth + 1);
    const rest = members.slice(MOST_CURVES);
    return [{ title: own, names: members.slice(0, MOST_CURVES) }, ...byKind(`${own}, more`, rest, depth)];
  });
}

const REST = "Other";
/** Drawn as areas instead. */
const AREAS = "Outcomes";

/** The charts of the page, and those of metrics that belong to no group. */
function chartsOf(metrics: Metrics, search: string): { main: ChartNames[]; rest: ChartNames[] } {
  if (search) {
    const found = metrics.names.filter((name) => name.includes(search)).slice(0, 60);
    return { main: found.map((name) => ({ title: name, names: [name] })), rest: [] };
  }
  const groups = metrics.groups.map(({ title, names }) => {
    const ordered = [...names].sort((a, b) => Number(b.endsWith("/mean")) - Number(a.endsWith("/mean")));
    return { title, names: ordered.filter((name) => !name.startsWith("alarms/")) };
  });
  const main = groups.filter(({ title }) => title !== REST && title !== AREAS);
  const rest = groups.filter(({ title }) => title === REST);
  return {
    main: main.flatMap(({ title, names }) => byKind(title, names, 1)),
    rest: rest.flatMap(({ names }) => byKind(REST, names, 1)),
  };
}

/** The evaluations during the run as a curve over the steps of its metrics; steps without metrics are added. */
function evaluationCurve(metrics: Metrics): Curve | null {
  const found = new Map(metrics.evaluations.map((one) => [one.step, one]));
  if (!metrics.steps.some((step) => found.has(step))) return null;
  const column = (name: "success" | "low" | "high") => metrics.steps.map((step) => found.get(step)?.[name] ?? null);
  return { name: "evaluation", values: column("success"), low: column("low"), high: column("high") };
}

interface ControlProps {
  smoothing: number;
  isLog: boolean;
  search: string;
}

function Controls({ smoothing, isLog, search }: ControlProps) {
  return (
    <div class="controls" role="toolbar" aria-label="Curves">
      <label>
        Smoothing
        <input
          type="range"
          min="0"
          max="0.95"
          step="0.05"
          value={smoothing}
          onInput={(e) => setQuery({ smoothing: Number(e.currentTarget.value) || null })}
        />
        <output>{smoothing.toFixed(2)}</output>
      </label>
      <label>
        <input type="checkbox" checked={isLog} onChange={(e) => setQuery({ log: e.currentTarget.checked })} />
        Log scale
      </label>
      <label>
        Metric
        <input
          type="search"
          placeholder="any name, e.g. entropy"
          value={search}
          onInput={(e) => setQuery({ metric: e.currentTarget.value })}
        />
      </label>
    </div>
  );
}

function Curves({ source, metrics, outcomes }: { source: string; metrics: Metrics; outcomes: Outcomes | null }) {
  const query = url.value.searchParams;
  const smoothing = Number(query.get("smoothing") ?? 0);
  const isLog = query.has("log");
  const search = query.get("metric") ?? "";
  const open = (step: number) => navigate(links.episodes(source, `step_from=${step}&step_to=${step}`));
  const { main, rest } = chartsOf(metrics, search);
  const draw = ({ title, names }: ChartNames) => {
    const curves = curvesOf(metrics, names);
    const evaluated = title === "Success" ? evaluationCurve(metrics) : null;
    if (evaluated) curves.push(evaluated);
    if (!curves.length) return null;
    const shared = { steps: metrics.steps, smoothing, isLog, onStep: open };
    return <Chart key={title} title={title} curves={curves} {...shared} />;
  };
  const hasOutcomes = outcomes !== null && outcomes.steps.length > 0 && !search;
  const [first, ...others] = main.map(draw).filter((chart) => chart !== null);
  return (
    <>
      <Controls smoothing={smoothing} isLog={isLog} search={search} />
      {!first && <Empty title={search ? `No metric contains “${search}”.` : "No metrics yet."} />}
      <div class="charts">
        {first}
        {hasOutcomes && (
          <StackedAreas title="Outcomes by step" steps={outcomes.steps} counts={outcomes.outcomes} height={170} />
        )}
        {others}
      </div>
      {rest.length > 0 && <OtherCharts draw={() => rest.map(draw)} />}
    </>
  );
}

/** Charts that are drawn when they are asked for. */
function OtherCharts({ draw }: { draw: () => ComponentChildren }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <details class="others" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Other metrics</summary>
      {isOpen && <div class="charts">{draw()}</div>}
    </details>
  );
}

function TaskTypes({ source, rows }: { source: string; rows: TaskTypeRow[] }) {
  if (!rows.length) return null;
  const link = (row: TaskTypeRow) => {
    const query = new URLSearchParams({ environment: row.environment });
    if (row.task_type) query.set("task_type", row.task_type);
    if (row.split) query.set("split", row.split);
    return links.episodes(source, query.toString());
  };
  return (
    <section>
      <h2>Success by environment and task type</h2>
      <table class="list">
        <thead>
          <tr>
            <th scope="col">Environment</th>
            <th scope="col">Task type</th>
            <th scope="col">Split</th>
            <th scope="col" class="number">
              Episodes
            </th>
            <th scope="col" class="number">
              Success
            </th>
            <th scope="col">95 % interval</th>
            <th scope="col" class="number">
              Reward
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={`${row.environment} ${row.task_type} ${row.split}`}>
              <th scope="row">
                <a href={link(row)}>
                  <Inline text={row.environment} />
                </a>
              </th>
              <td>
                <Inline text={row.task_type ?? "–"} />
              </td>
              <td>
                <Inline text={row.split ?? "–"} />
              </td>
              <td class="number">{whole(row.episodes)}</td>
              <td class="number">{percent(row.success)}</td>
              <td>
                <RateBar value={row.success} low={row.low} high={row.high} />
              </td>
              <td class="number">{fixed(row.reward)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function RunPage({ source }: { source: string }) {
  const detail = useGet<SourceDetail>(api(source));
  const metrics = useGet<Metrics>(api(source, "metrics"));
  const outcomes = useGet<Outcomes>(api(source, "outcomes"));
  const [isLive, setLive] = useState(true);
  const refresh = () => {
    if (!isLive) return;
    detail.reload();
    metrics.reload();
    outcomes.reload();
  };
  const beat = detail.data?.state === "running" ? 5000 : null;
  useEvents(source, ["metrics", "status", "episodes", "sources"], refresh, { pause: 1500, beat });
  useKeys([
    {
      keys: "l",
      help: "Log scale on or off",
      run: () => setQuery({ log: !url.peek().searchParams.has("log") }),
    },
    {
      keys: "/",
      help: "Search a metric",
      run: () => document.querySelector<HTMLElement>('input[type="search"]')?.focus(),
    },
    { keys: "p", help: "Pause or continue the live update", run: () => setLive((is) => !is) },
  ]);
  const name = detail.data?.name ?? source;
  return (
    <Shell title={name} source={source} crumbs={[{ text: "Runs", to: links.runs() }, { text: <Inline text={name} /> }]}>
      <div class="page-head">
        <h1>
          <Inline text={name} />
        </h1>
        <span class="path">
          <Inline text={detail.data?.path ?? ""} />
        </span>
        {detail.data?.state === "running" && (
          <button type="button" aria-pressed={isLive} onClick={() => setLive(!isLive)}>
            {isLive ? "● Live" : "❙❙ Paused"}
          </button>
        )}
      </div>
      <Await of={detail} what="the run">
        {(data) => (
          <>
            <Problems source={source} problems={data.problems} />
            <Damage files={data.damage} />
            <Summary detail={data} />
          </>
        )}
      </Await>
      <Await of={metrics} what="the metrics">
        {(data) => <Curves source={source} metrics={data} outcomes={outcomes.data} />}
      </Await>
      <TaskTypes source={source} rows={outcomes.data?.by_task_type ?? []} />
    </Shell>
  );
}
