/** Small parts that every page uses: states of loading, badges, copy buttons, sparklines. */
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { ApiError, Loaded } from "../base/api";
import { fixed, percent, whole, words } from "../base/format";
import { useSourceName } from "../base/names";
import { Inline } from "../base/text";
import type { Column, DamagedFile, IndexProgress, Num, RunState } from "../base/types";

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty" role="status">
      <strong>{title}</strong>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Failure({ error, retry }: { error: ApiError; retry?: () => void }) {
  return (
    <div class="failure" role="alert">
      <strong>{error.message}</strong>
      {error.hint && <p>{error.hint}</p>}
      {retry && (
        <button type="button" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return (
    <div class="loading" role="status">
      <span class="spinner" aria-hidden="true" /> Loading {what}…
    </div>
  );
}

/** Show what was loaded, or that it loads or failed. */
export function Await<T>(props: { of: Loaded<T>; what: string; children: (data: T) => ComponentChildren }) {
  const { data, error, reload } = props.of;
  if (data !== null) {
    return (
      <>
        {error && <Failure error={error} retry={reload} />}
        {props.children(data)}
      </>
    );
  }
  return error ? <Failure error={error} retry={reload} /> : <Loading what={props.what} />;
}

const STATE_MARKS: Record<RunState, string> = {
  running: "▶",
  finished: "✓",
  interrupted: "■",
  crashed: "✕",
  stalled: "❙❙",
};

export function StateBadge({ state }: { state: RunState }) {
  return (
    <span class={`badge state-${state}`}>
      <span aria-hidden="true">{STATE_MARKS[state] ?? "?"}</span> {state}
    </span>
  );
}

const FAILURES = new Set(["environment_error", "engine_error", "sandbox_error", "reward_error"]);

export function outcomeTone(outcome: string | null): string {
  if (outcome === null) return "neutral";
  if (FAILURES.has(outcome)) return "bad";
  return outcome === "finished" || outcome === "stopped_by_tool" ? "plain" : "warn";
}

export function Outcome({ outcome }: { outcome: string | null }) {
  const tone = outcomeTone(outcome);
  const mark = { bad: "✕", warn: "▲", plain: "●", neutral: "○" }[tone];
  return (
    <span class={`outcome ${tone}`}>
      <span aria-hidden="true">{mark}</span> {outcome === null ? "not ended" : words(outcome)}
    </span>
  );
}

export function Success({ value }: { value: boolean | null }) {
  if (value === null) return <span class="muted">unknown</span>;
  return value ? <span class="good">✓ solved</span> : <span class="bad">✕ failed</span>;
}

export function Copy({ text, label, title }: { text: string; label: string; title?: string }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), 1600);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      setSaid("The browser refused");
    }
  };
  return (
    <button type="button" class="copy" onClick={copy} title={title ?? text.slice(0, 400)}>
      <span aria-live="polite">{said || label}</span>
    </button>
  );
}

/** A line of values without axes; the newest one is marked. */
export function Sparkline({ values, label }: { values: Column; label: string }) {
  const known = values.filter((v): v is number => v !== null);
  if (known.length < 2) return <span class="muted">–</span>;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [width, height] = [120, 22];
  const x = (i: number) => 2 + (i * (width - 6)) / (values.length - 1);
  const y = (v: number) => height - 3 - ((v - low) / (high - low || 1)) * (height - 6);
  const points = values.flatMap((v, i) => (v === null ? [] : [`${x(i).toFixed(1)},${y(v).toFixed(1)}`]));
  const last = points.at(-1)?.split(",") ?? ["0", "0"];
  return (
    <svg
      class="sparkline"
      width={width}
      height={height}
      role="img"
      aria-label={`${label}, ${fixed(low)} to ${fixed(high)}`}
    >
      <polyline points={points.join(" ")} fill="none" />
      <circle cx={last[0]} cy={last[1]} r="2" />
    </svg>
  );
}

/** A success rate as a bar with its interval, beside its number. */
export function RateBar({ value, low, high }: { value: Num; low: Num; high: Num }) {
  if (value === null) return <span class="muted">–</span>;
  const label =
    low === null || high === null ? fixed(value) : `${fixed(value)}, 95 % from ${fixed(low)} to ${fixed(high)}`;
  return (
    <svg class="rate" width="140" height="12" role="img" aria-label={label}>
      <rect class="track" width="140" height="12" rx="2" />
      <rect class="fill" width={140 * value} height="12" rx="2" />
      {low !== null && high !== null && (
        <path class="whisker" d={`M${140 * low} 3v6M${140 * high} 3v6M${140 * low} 6H${140 * high}`} />
      )}
    </svg>
  );
}

/** A signed value as a bar from the middle: to the right if positive. */
export function SignedBar({ value, scale }: { value: Num; scale: number }) {
  if (value === null) return <span class="muted">–</span>;
  const length = Math.min(1, Math.abs(value) / (scale || 1)) * 38;
  return (
    <svg class="signed" width="80" height="12" aria-hidden="true">
      <rect class={value < 0 ? "neg" : "pos"} x={value < 0 ? 40 - length : 40} y="1" width={length} height="10" />
      <path d="M40 0v12" />
    </svg>
  );
}

/** The progress of the server's index of a store; nothing if it is complete. */
export function Indexing({ index }: { index: IndexProgress | null | undefined }) {
  if (!index || index.complete || index.done_bytes >= index.total_bytes) return null;
  return (
    <span class="indexing" role="status">
      indexing {percent(index.done_bytes / index.total_bytes, 0)}
      <progress value={index.done_bytes} max={index.total_bytes} aria-label="Index of the stored episodes" />
    </span>
  );
}

const SHOWN_LINES = 5;

/** The files of the store of which not all records can be read, and where; nothing if there are none. */
export function Damage({ files }: { files: readonly DamagedFile[] | undefined }) {
  if (!files?.length) return null;
  return (
    <section class="problems damage" aria-label="Damaged records">
      <h2>▲ Some records cannot be read</h2>
      <ul>
        {files.map(({ file, records, lines }) => (
          <li key={file}>
            {whole(records)} {records === 1 ? "record" : "records"} of <code>{file}</code>,{" "}
            {lines.length === 1 ? "line" : "lines"} {lines.slice(0, SHOWN_LINES).join(", ")}
            {records > SHOWN_LINES && ", …"}
          </li>
        ))}
      </ul>
      <p>Episodes that need one of them are left out.</p>
    </section>
  );
}

export function Facts({ children }: { children: ComponentChildren }) {
  return <dl class="facts">{children}</dl>;
}

export function Fact({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** Buttons of which one is chosen. */
export function Choice<T extends string>(props: {
  label: string;
  options: readonly { value: T; text: string; title?: string; isDisabled?: boolean }[];
  value: T;
  choose: (value: T) => void;
}) {
  return (
    <fieldset class="choice" aria-label={props.label}>
      {props.options.map((one) => (
        <button
          key={one.value}
          type="button"
          aria-pressed={one.value === props.value}
          disabled={one.isDisabled ?? false}
          title={one.title}
          onClick={() => props.choose(one.value)}
        >
          {one.text}
        </button>
      ))}
    </fieldset>
  );
}

export function SourceName({ source }: { source: string }) {
  return <Inline text={useSourceName(source)} />;
}
