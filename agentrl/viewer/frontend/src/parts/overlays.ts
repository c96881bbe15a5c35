/** What colours tokens: for each overlay a style class and a value per token, and a legend with counts. */
import { fixed, num, percent, signed } from "../base/format";
import type { Column, TokenColumns } from "../base/types";

export const OVERLAYS = ["source", "logprob", "ratio", "advantage", "entropy", "version", "clipped"] as const;
export type OverlayName = (typeof OVERLAYS)[number];

export const OVERLAY_TEXT: Record<OverlayName, { text: string; title: string }> = {
  source: { text: "Source and loss", title: "Where each token comes from, and whether it is in the loss" },
  logprob: { text: "Log-probability", title: "How probable the engine found each sampled token" },
  ratio: { text: "Ratio", title: "Probability under the trained policy, divided by that when sampled" },
  advantage: { text: "Advantage", title: "What the loss multiplies each token's gradient with" },
  entropy: { text: "Entropy", title: "Uncertainty of the policy at each token, in nats" },
  version: { text: "Weight version", title: "Weights that sampled each token" },
  clipped: { text: "Clipped or filtered", title: "Tokens whose gradient was clipped or removed, and by what" },
};

export interface LegendEntry {
  style: string;
  text: string;
  count: number;
}

export interface Overlay {
  styles: string[];
  values: string[];
  legend: LegendEntry[];
}

/** Return true if the run has the data of an overlay. */
export function hasOverlay(columns: TokenColumns, name: OverlayName): boolean {
  if (name === "source") return true;
  if (name === "clipped") return columns.clipped !== null || columns.masked_by !== null;
  return columns[name]?.some((value) => value !== null) ?? false;
}

export function overlay(columns: TokenColumns, name: OverlayName): Overlay {
  switch (name) {
    case "source":
      return sources(columns);
    case "logprob":
      return probabilities(columns.logprob ?? []);
    case "ratio":
      return diverging(
        (columns.ratio ?? []).map((r) => (r === null || r <= 0 ? null : Math.log(r))),
        0.02,
        (log) => `×${fixed(Math.exp(log), 3)}`,
      );
    case "advantage":
      return diverging(columns.advantage ?? [], 0, (value) => signed(value));
    case "entropy":
      return sequential(columns.entropy ?? []);
    case "version":
      return versions(columns.version ?? []);
    case "clipped":
      return flags(columns);
  }
}

function counted(styles: string[], texts: (readonly [string, string])[]): LegendEntry[] {
  const counts = new Map<string, number>();
  for (const style of styles) counts.set(style, (counts.get(style) ?? 0) + 1);
  return texts.map(([style, text]) => ({ style, text, count: counts.get(style) ?? 0 }));
}

const SOURCE_TEXT: Record<string, string> = {
  prompt: "prompt",
  template: "chat template",
  observation: "observation",
  sampled: "sampled by the policy",
  forced: "written for the policy",
  mistake: "not trained on",
};

function sources(columns: TokenColumns): Overlay {
  const isTrained = (i: number) => Boolean(columns.trained[i]) && !columns.masked_by?.[i];
  const styles = columns.source.map((s, i) => `src-${columns.sources[s]}${isTrained(i) ? " in-loss" : ""}`);
  const values = columns.source.map((s, i) => `${columns.sources[s]}${isTrained(i) ? ", in the loss" : ""}`);
  const texts = [...new Set(styles)].map((style) => {
    const source = style.slice(4).split(" ")[0] ?? "";
    return [style, (SOURCE_TEXT[source] ?? source) + (style.endsWith("in-loss") ? ": in the loss" : "")] as const;
  });
  return { styles, values, legend: counted(styles, texts) };
}

const PROBABILITIES = [0.95, 0.75, 0.5, 0.2, 0.05];

function probabilities(logprobs: Column): Overlay {
  const styles = logprobs.map((value) => {
    if (value === null) return "";
    const bin = PROBABILITIES.findIndex((bound) => Math.exp(value) >= bound);
    return `q${bin === -1 ? PROBABILITIES.length : bin}`;
  });
  const texts = [...PROBABILITIES, 0].map((bound, i) => {
    const above = i === 0 ? 1 : PROBABILITIES[i - 1];
    const text = bound ? `${percent(bound, 0)} to ${percent(above, 0)}` : `below ${percent(above, 0)}`;
    return [`q${i}`, text] as const;
  });
  return { styles, values: logprobs.map((v) => (v === null ? "" : fixed(v, 2))), legend: counted(styles, texts) };
}

function largest(values: Column): number {
  let found = 0;
  for (const value of values) if (value !== null && Math.abs(value) > found) found = Math.abs(value);
  return found;
}

const STEPS = 4;

/** Blue above the middle, orange below; `flat` is how far from the middle nothing is coloured. */
function diverging(values: Column, flat: number, text: (value: number) => string): Overlay {
  const scale = largest(values);
  const styles = values.map((value) => {
    if (value === null) return "";
    if (Math.abs(value) <= flat || scale === 0) return "d0";
    return `${value < 0 ? "dn" : "dp"}${Math.max(1, Math.ceil((Math.abs(value) / scale) * STEPS - 1e-9))}`;
  });
  const range = (low: number, high: number) => `${text(low)} to ${text(high)}`;
  const sides = [1, 2, 3, 4].map((i) => [(scale * (i - 1)) / STEPS || flat, (scale * i) / STEPS] as const);
  const texts = [
    ...sides.map(([low, high], i) => [`dn${i + 1}`, range(-high, -low)] as const).reverse(),
    ["d0", flat ? `${text(-flat)} to ${text(flat)}` : text(0)] as const,
    ...sides.map(([low, high], i) => [`dp${i + 1}`, range(low, high)] as const),
  ];
  const legend = counted(styles, texts).filter((entry) => entry.count > 0);
  return { styles, values: values.map((v) => (v === null ? "" : text(v))), legend };
}

function sequential(values: Column): Overlay {
  const scale = largest(values);
  const styles = values.map((value) => {
    if (value === null) return "";
    return `q${scale === 0 ? 0 : Math.min(5, Math.floor((Math.abs(value) / scale) * 6))}`;
  });
  const texts = [0, 1, 2, 3, 4, 5].map((i) => {
    return [`q${i}`, `${num((scale * i) / 6, 2)} to ${num((scale * (i + 1)) / 6, 2)}`] as const;
  });
  return { styles, values: values.map((v) => (v === null ? "" : fixed(v, 2))), legend: counted(styles, texts) };
}

function versions(values: Column): Overlay {
  const isKnown = (v: number | null) => v !== null && v >= 0;
  const known = [...new Set(values.filter(isKnown))].sort((a, b) => Number(a) - Number(b));
  const place = new Map(known.map((version, i) => [version, `c${i % 8}`]));
  const styles = values.map((value) => (isKnown(value) ? (place.get(value) ?? "") : ""));
  const legend = known.map((version) => ({
    style: place.get(version) ?? "",
    text: `version ${version}`,
    count: values.filter((value) => value === version).length,
  }));
  return { styles, values: values.map((v) => (isKnown(v) ? `v${v}` : "")), legend };
}

function flags(columns: TokenColumns): Overlay {
  const styles: string[] = [];
  const values: string[] = [];
  const reasons = new Map<string, number>();
  columns.id.forEach((_, i) => {
    const reason = columns.masked_by?.[i] ?? null;
    if (reason !== null) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
    if (reason !== null) styles.push("flag-masked");
    else if (columns.clipped?.[i]) styles.push("flag-clipped");
    else styles.push(columns.trained[i] ? "flag-trained" : "");
    values.push(reason ?? (columns.clipped?.[i] ? "clipped" : columns.trained[i] ? "trained" : ""));
  });
  const legend = counted(styles, [
    ["flag-trained", "trained"],
    ["flag-clipped", "clipped"],
  ]);
  for (const [reason, count] of reasons) legend.push({ style: "flag-masked", text: `removed: ${reason}`, count });
  return { styles, values, legend };
}
