/** Curves over training steps with uPlot: interval bands, smoothing, a cursor that all charts of a page share. */
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { num } from "../base/format";
import { color, palette, seriesColor } from "../base/theme";
import type { Column } from "../base/types";

export interface Curve {
  name: string;
  values: Column;
  low?: Column;
  high?: Column;
}

const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [1, 2], [12, 4], [4, 2, 1, 2], [3, 6]];
const sync = uPlot.sync("steps");

/** Smooth with an exponential mean; `weight` from 0 (none) to below 1. Unknown values stay unknown. */
export function smoothed(values: Column, weight: number): Column {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const forLog = (values: Column) => values.map((value) => (value !== null && value > 0 ? value : null));

function transparent(value: string, alpha: number): string {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  if (!context) return value;
  context.fillStyle = value;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

/** On a log scale, keep the powers of ten if there are several. */
function powers(_: uPlot, splits: number[]): (number | null)[] {
  const isPower = (value: number) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  const count = splits.filter(isPower).length;
  const every = Math.ceil(count / 6);
  return count < 2 ? splits : splits.map((s) => (isPower(s) && Math.round(Math.log10(s)) % every === 0 ? s : null));
}

function axes(isLog = false): uPlot.Axis[] {
  const base = {
    stroke: color("muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: color("grid"), width: 1 },
    ticks: { show: false },
  };
  return [
    { ...base, size: 20, gap: 2, values: (_, splits) => splits.map((s) => (Number.isInteger(s) ? String(s) : "")) },
    {
      ...base,
      ...(isLog ? { filter: powers, grid: { ...base.grid, filter: powers } } : {}),
      size: 52,
      gap: 4,
      values: (_, splits) => splits.map((s) => (s === null ? "" : num(s, 3).replace(".00e", "e"))),
    },
  ];
}

interface Built {
  series: uPlot.Series[];
  data: Column[];
  bands: uPlot.Band[];
}

/** For each curve: the bounds of its interval, its raw values if it is smoothed, and the line itself. */
function build(curves: Curve[], hidden: ReadonlySet<string>, smoothing: number, isLog: boolean): Built {
  const built: Built = { series: [{}], data: [], bands: [] };
  const add = (values: Column, series: uPlot.Series) => {
    built.data.push(isLog ? forLog(values) : values);
    built.series.push({ points: { show: false }, ...series });
    return built.series.length - 1;
  };
  curves.forEach((curve, i) => {
    if (hidden.has(curve.name)) return;
    const stroke = seriesColor(i);
    const hasFew = curve.values.filter((v) => v !== null).length < 3;
    if (curve.low && curve.high && !smoothing) {
      const high = add(curve.high, { width: 0 });
      const low = add(curve.low, { width: 0 });
      built.bands.push({ series: [high, low], fill: transparent(stroke, 0.16) });
    }
    if (smoothing) add(curve.values, { stroke: transparent(stroke, 0.28), width: 1 });
    const line = smoothing ? smoothed(curve.values, smoothing) : curve.values;
    const dash = DASHES[i % DASHES.length] ?? [];
    add(line, { label: curve.name, stroke, width: 1.6, dash, points: { show: hasFew, size: 5 }, spanGaps: true });
  });
  return built;
}

/** Spread and extremes are hidden at first where the mean is shown too. */
const isMinor = (name: string, curves: Curve[]) =>
  /\/(min|max|std)$/.test(name) && curves.some((other) => other.name === name.replace(/[^/]+$/, "mean"));

/** Keep a constant curve in the middle, and a rate within its bounds. */
function range(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  // The mean of equal values differs from them in its last bits.
  if (high - low <= 1e-9 * Math.abs(high)) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
  const room = 0.06 * (high - low);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high <= 1 && high + room > 1 && low >= 0 ? 1 : high + room];
}

/** Draw new data when one of `changes` is another, and keep the stretch of steps that the reader has zoomed into. */
function useData(plot: { current: uPlot | null }, data: uPlot.AlignedData, changes: unknown[]): void {
  useEffect(() => {
    const chart = plot.current;
    if (!chart) return;
    const { min, max } = chart.scales.x ?? {};
    const known = chart.data[0];
    const isZoomed = min != null && max != null && (min > (known[0] ?? min) || max < (known.at(-1) ?? max));
    chart.setData(data, !isZoomed);
    if (isZoomed) chart.setScale("x", { min, max });
  }, changes);
}

/** Milliseconds within which a second click makes a double click. */
const DOUBLE_CLICK = 250;

interface ChartProps {
  title: string;
  steps: number[];
  curves: Curve[];
  smoothing: number;
  isLog: boolean;
  height?: number;
  onStep?: (step: number) => void;
}

export function Chart({ title, steps, curves, smoothing, isLog, height = 170, onStep }: ChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const latest = useRef({ steps, onStep });
  latest.current = { steps, onStep };
  const theme = palette.value;
  const [toggled, setToggled] = useState<ReadonlySet<string>>(new Set());
  const hidden = new Set(curves.map((c) => c.name).filter((name) => isMinor(name, curves) !== toggled.has(name)));
  const toggle = (name: string) =>
    setToggled((old) => new Set(old.has(name) ? [...old].filter((n) => n !== name) : [...old, name]));
  const names = curves.map((c) => `${c.name}${c.low ? "~" : ""}${hidden.has(c.name) ? "-" : ""}`);
  const shape = `${names.join()}|${smoothing > 0}|${isLog}|${theme}`;
  const built = build(curves, hidden, smoothing, isLog);
  const data = [steps, ...built.data] as uPlot.AlignedData;

  // `shape` stands for all that needs a new plot
  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const chart = new uPlot(
      {
        width: element.clientWidth,
        height,
        series: built.series,
        bands: built.bands,
        padding: [8, 12, 0, 0],
        scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range } },
        axes: axes(isLog),
        legend: { show: false },
        cursor: { sync: { key: sync.key }, points: { size: 6 }, y: false, drag: { x: true, y: false } },
        hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
      },
      data,
      element,
    );
    plot.current = chart;
    let opening: ReturnType<typeof setTimeout> | undefined;
    chart.over.addEventListener("click", () => {
      const step = latest.current.steps[chart.cursor.idx ?? -1];
      clearTimeout(opening);
      if (step !== undefined) opening = setTimeout(() => latest.current.onStep?.(step), DOUBLE_CLICK);
    });
    chart.over.addEventListener("dblclick", () => clearTimeout(opening)); // it zooms out
    const watch = new ResizeObserver(() => {
      if (element.clientWidth) chart.setSize({ width: element.clientWidth, height });
    });
    watch.observe(element);
    return () => {
      clearTimeout(opening);
      watch.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, height]);

  useData(plot, data, [steps, shape, smoothing, ...curves.map((curve) => curve.values)]);

  const index = at ?? steps.length - 1;
  return (
    <figure class="chart">
      <figcaption>
        <span class="title">{title}</span>
        <span class="step">step {num(steps[index])}</span>
      </figcaption>
      <div ref={host} class="plot" title={onStep ? "Click: the episodes of this step" : undefined} />
      <ul class="legend">
        {curves.map((curve, i) => (
          <li key={curve.name}>
            <button
              type="button"
              class="toggle"
              aria-pressed={!hidden.has(curve.name)}
              title={`${curve.name}: click to show or hide`}
              onClick={() => toggle(curve.name)}
            >
              <LineSample index={i} />
              <span class="name">{curve.name}</span>
              <span class="value">{num((smoothing ? smoothed(curve.values, smoothing) : curve.values)[index])}</span>
            </button>
            {curve.low?.[index] != null && curve.high?.[index] != null && !hidden.has(curve.name) && (
              <span class="muted">
                {num(curve.low[index], 3)} to {num(curve.high[index], 3)}
              </span>
            )}
          </li>
        ))}
      </ul>
    </figure>
  );
}

function LineSample({ index }: { index: number }) {
  const dash = (DASHES[index % DASHES.length] ?? []).join(" ");
  return (
    <svg width="22" height="8" aria-hidden="true" class={`sample s${index % 8}`}>
      <path d="M1 4H21" stroke-dasharray={dash || "none"} />
    </svg>
  );
}

function pattern(index: number, tint: string): CanvasPattern | string {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  if (!context) return tint;
  context.fillStyle = transparent(tint, 0.55);
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = transparent(color("text"), 0.35);
  context.beginPath();
  const kind = index % 4;
  if (kind === 1 || kind === 2) {
    context.moveTo(0, kind === 1 ? 8 : 4);
    context.lineTo(8, kind === 1 ? 0 : 4);
  }
  if (kind === 3) context.arc(4, 4, 1, 0, 7);
  context.stroke();
  return context.createPattern(tile, "repeat") ?? tint;
}

/** Counts per step as stacked areas; patterns tell them apart beside colours. */
export function StackedAreas(props: {
  title: string;
  steps: number[];
  counts: Record<string, number[]>;
  height?: number;
}) {
  const { steps, counts, height = 200 } = props;
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const names = Object.keys(counts);
  const theme = palette.value;
  const sums = steps.map(() => 0);
  const layers = names.map((name) => steps.map((_, i) => (sums[i] = (sums[i] ?? 0) + (counts[name]?.[i] ?? 0))));
  const data = [steps, ...[...layers].reverse()] as uPlot.AlignedData;

  // New names or colours need a new plot
  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const fills = names.map((_, i) => pattern(i, seriesColor(i)));
    const series = names.map((label, i) => {
      const own = i === 0 ? { fill: () => fills[0] ?? "" } : {};
      return { label, stroke: seriesColor(i), width: 1, points: { show: false }, ...own } as uPlot.Series;
    });
    // The layer on top is the first series; each is filled down to the next one.
    const bands = names.slice(1).map((_, i) => {
      const fill = () => fills[names.length - 1 - i] ?? "";
      return { series: [i + 1, i + 2], fill } as uPlot.Band;
    });
    const chart = new uPlot(
      {
        width: element.clientWidth,
        height,
        series: [{}, ...series.reverse()],
        bands,
        padding: [8, 12, 0, 0],
        scales: { x: { time: false }, y: { range: (_, __, max) => [0, Math.max(1, max)] } },
        axes: axes(),
        legend: { show: false },
        cursor: { sync: { key: sync.key }, points: { show: false }, y: false },
        hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
      },
      data,
      element,
    );
    plot.current = chart;
    const watch = new ResizeObserver(() => {
      if (element.clientWidth) chart.setSize({ width: element.clientWidth, height });
    });
    watch.observe(element);
    return () => {
      watch.disconnect();
      chart.destroy();
    };
  }, [names.join(), theme, height]);

  useData(plot, data, [steps, counts, theme]);

  const index = at ?? steps.length - 1;
  return (
    <figure class="chart">
      <figcaption>
        <span class="title">{props.title}</span>
        <span class="step">step {num(steps[index])}</span>
      </figcaption>
      <div ref={host} class="plot" />
      <ul class="legend">
        {names.map((name, i) => (
          <li key={name}>
            <svg width="14" height="12" aria-hidden="true" class={`swatch s${i % 8} p${i % 4}`}>
              <rect width="14" height="12" />
              {i % 4 === 1 && <path d="M0 12L12 0" />}
              {i % 4 === 2 && <path d="M0 6H14" />}
              {i % 4 === 3 && <path d="M6 6h2" />}
            </svg>
            <span class="name">{name.replaceAll("_", " ")}</span>
            <span class="value">{num(counts[name]?.[index])}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
